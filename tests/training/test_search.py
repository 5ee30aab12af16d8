"""Search: the nearest documents, their best passages, and files that are not what they should be."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console

import linformers
from linformers.training import search

from ..modes import refused
from . import small
from .test_embed import TEXTS, run, sentence_folder, table

QUERY = "the lazy dog"


def found(vectors, query=QUERY, **options):
    return search.search(vectors, query=query, console=small.QUIET, **options)


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_nearest_documents(suffix, normalize, random, tmp_path):
    """By the cosine, in order; an empty document is the last but for those on the other side."""
    texts = [*TEXTS, ""]
    out = run(table(tmp_path / "a.jsonl", texts), tmp_path / f"out.{suffix}", model=random, normalize=normalize)
    query = linformers.embed([QUERY], random)[0]
    cosines = linformers.embed(texts, random) @ query
    entries = found(out, best=20)
    assert [entry["document"] for entry in entries] == np.argsort(-cosines, kind="stable").tolist()
    assert [entry["score"] for entry in entries] == pytest.approx(sorted(cosines, reverse=True), abs=1e-5)
    for entry in entries:
        own = texts[entry["document"]]
        assert entry.get("passage", "") == own[entry.get("start", 0) : entry.get("end", 0)]
        assert ("passage" in entry) == bool(own)
    assert [entry["id"] for entry in found(out, best=2)] == [entry["id"] for entry in entries[:2]]


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_the_best_passage_of_chunks(suffix, random, tmp_path, monkeypatch):
    """The same with a vector for each chunk and with one for each document, which is read again."""
    source = table(tmp_path / "a.jsonl")
    chunks = linformers.embed(TEXTS, random, late_chunks=6)
    query = linformers.embed([QUERY], random)[0]
    best = [float((own @ query).max()) for own in chunks]
    out = run(source, tmp_path / f"chunks.{suffix}", model=random, late_chunks=6)
    entries = found(out, best=4)
    assert [entry["document"] for entry in entries] == np.argsort(-np.array(best))[:4].tolist()
    assert [entry["score"] for entry in entries] == pytest.approx(sorted(best, reverse=True)[:4], abs=1e-5)
    assert [entry["chunk"] for entry in entries] == [int((chunks[e["document"]] @ query).argmax()) for e in entries]
    monkeypatch.setattr(search, "PASSAGE", 6)
    whole = {entry["document"]: entry for entry in found(run(source, tmp_path / "out.npy", model=random), best=10)}
    for entry in entries:
        other = whole[entry["document"]]
        assert (entry["start"], entry["end"], entry["passage"]) == (other["start"], other["end"], other["passage"])


def test_prompts_of_queries(random, tmp_path):
    folder = sentence_folder(random, tmp_path / "model", "cls", {"query": "the fox ", "document": "a dog "})
    out = run(table(tmp_path / "a.jsonl"), tmp_path / "out.npy", model=folder)
    query = linformers.embed([QUERY], folder, prompt="query")[0]
    scores = np.sort(linformers.embed(TEXTS, folder) @ query)[::-1]
    entries = found(out, best=10)
    assert [entry["score"] for entry in entries] == pytest.approx(scores.tolist(), abs=1e-5)
    assert all(entry["passage"] for entry in entries)


def test_printed_answers(random, tmp_path, capsys):
    out = run(table(tmp_path / "a.jsonl", id=list("abcdefghij")), tmp_path / "out.npy", model=random)
    console = Console(width=10_000)
    best, *_ = search.search(out, query=QUERY, json=True, console=console)
    first, *rest = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(rest) == 4
    assert (first["rank"], first["id"], first["passage"]) == (1, best["id"], best["passage"])
    search.search(out, query=QUERY, best=1, passages=False, console=console)
    assert capsys.readouterr().out == f"1. {best['id']}  {best['score']:.3f}\n"


def test_a_terminal_shows_progress(random, tmp_path):
    """On standard error, so that standard output holds the answers alone; without a terminal, there is none."""
    out = run(table(tmp_path / "a.jsonl"), tmp_path / "out.npy", model=random)
    for is_terminal in (True, False):
        terminal = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        search.search(out, query=QUERY, console=small.QUIET, terminal=terminal)
        shown = ["the documents" in terminal.file.getvalue(), "best passages" in terminal.file.getvalue()]
        assert shown == [is_terminal] * 2


def test_relative_names_are_found_from_elsewhere(random, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(TEXTS[0])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    table(Path("b.csv"), TEXTS[1:3])
    out = run([Path("in"), Path("b.csv")], tmp_path / "out.npy", model=random)
    monkeypatch.chdir(tmp_path / "elsewhere")
    entries = found(out)
    assert {entry["id"] for entry in entries} == {"in/a.txt", "b.csv:1", "b.csv:2"}
    assert all(entry["passage"] for entry in entries)


def test_documents_that_are_gone_or_changed_have_no_passage(random, tmp_path):
    source = table(tmp_path / "a.jsonl", id=list("abcdefghij"))
    out = run(source, tmp_path / "out.npy", model=random)
    assert all("passage" in entry for entry in found(out))
    table(source, id=list("ABCDEFGHIJ"))
    assert not any("passage" in entry for entry in found(out))
    source.unlink()
    assert len(found(out)) == 5


def test_files_that_are_not_what_they_should_be(random, model, tmp_path):
    source = table(tmp_path / "a.jsonl")
    out, other = (run(source, tmp_path / f"out.{suffix}", model=random) for suffix in ("npy", "parquet"))
    for vectors in (out, other):
        with refused(f"{vectors} was made with another model, {str(random)!r}"):
            found(vectors, model=model)
        with refused("query is empty"):
            found(vectors, query=" ")
    gone = Path(shutil.copytree(random, tmp_path / "model"))
    moved = run(source, tmp_path / "moved.npy", model=gone)
    gone.rename(tmp_path / "elsewhere")
    with refused(f"made with the model {str(gone)!r}, which is not there: pass its folder as model"):
        found(moved)
    assert len(found(moved, model=tmp_path / "elsewhere")) == 5
    np.save(tmp_path / "own.npy", np.zeros((2, 3)))
    for end in ("ids.jsonl", "json"):
        with refused(f"out.{end} only describes the vectors in {out}: search that file"):
            found(tmp_path / f"out.{end}")
    with refused("has no own.ids.jsonl beside it: it is not a file of linformers embed"):
        found(tmp_path / "own.npy")
    pyarrow.parquet.write_table(pyarrow.table({"vector": [[1.0]]}), tmp_path / "own.parquet")
    with refused("it is not a file of linformers embed"):
        found(tmp_path / "own.parquet")
    (tmp_path / "text.parquet").write_text("text")
    with refused("text.parquet is damaged or not what its name says"):
        found(tmp_path / "text.parquet")
    np.save(out, np.load(out)[:-1])
    with refused(f"{out} has the shape (9, 16), but its description says (10, 16)"):
        found(out)
    out.write_bytes(b"\x93NUMPY")
    with refused(f"{out} is damaged"):
        found(out)
    out.with_suffix(".json").write_text("{}")
    with refused("has a description of format None, expected 1: embed again"):
        found(out)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(6, 13, "quick brown"), (4, 15, "quick brown"), (3, 16, " quick brown "), (0, 2, "the"), (16, 18, "fox")],
)
def test_passages_have_whole_words(start, stop, expected):
    text = "the quick brown fox"
    assert text[slice(*search.whole_words(text, start, stop))] == expected
