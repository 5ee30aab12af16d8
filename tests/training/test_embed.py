"""Vectors of documents: what they are, that nothing but the text decides them, and that no run loses work."""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import linformers
from linformers import LinformerModel, files
from linformers.training import embed
from linformers.training.batches import Text, spans
from linformers.training.embed import Embedder, Meter, Settings

from ..modes import refused
from . import small

WORDS = ["the", "a", "quick", "brown", "fox", "dog", "jumps", "over", "lazy", "and", "sleeps", "under", "tree", "of"]


def text(seed, words):
    return " ".join(np.random.default_rng(seed).choice(WORDS, size=words))


TEXTS = [text(seed, words) for seed, words in enumerate((5, 40, 1, 20, 200, 7, 90, 12, 3, 70))]


def sentence_folder(model, folder, mode="mean", prompts=None, **pooling):
    """A copy of a model in the layout of sentence-transformers."""
    shutil.copytree(model, folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_Normalize"):
        (folder / path).mkdir()
    settings = {"word_embedding_dimension": 16, "pooling_mode": mode, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
    return folder


def run(sources, out, **options):
    sources = [sources] if isinstance(sources, str | Path) else sources
    options = {"console": small.QUIET, "command": "linformers embed", "tokens": 64, **options}
    embed.embed_files(sources, out, **options)
    return out


def table(path, texts=TEXTS, **columns):
    rows = [{"text": own, **{name: values[i] for name, values in columns.items()}} for i, own in enumerate(texts)]
    return small.write_table(path, rows)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Vectors.


@torch.inference_mode()
def naive(folder, texts, mode="mean"):
    """One text at a time, with transformers alone; none may be longer than n."""
    tokenizer, network = AutoTokenizer.from_pretrained(folder), LinformerModel.from_pretrained(folder).eval()
    found = []
    for own in texts:
        ids = tokenizer(own, return_tensors="pt")["input_ids"]
        assert ids.shape[1] <= network.config.max_position_embeddings
        hidden = network(ids).last_hidden_state[0]
        found.append(hidden.mean(0) if mode == "mean" else hidden[0])
    return torch.stack(found).numpy()


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_vectors_are_those_of_the_model(mode, random):
    texts = [own for own in TEXTS if len(own.split()) < 20]
    expected = naive(random, texts, mode)
    assert np.abs(linformers.embed(texts, random, pooling=mode) - unit(expected)).max() < 1e-5
    assert np.abs(linformers.embed(texts, random, pooling=mode, normalize=False) - expected).max() < 1e-5


@pytest.mark.parametrize("late_chunks", [None, 6])
def test_vectors_depend_on_the_text_alone(late_chunks, random):
    """Not on the batch, the order or the neighbors."""
    options = {"model": random, "late_chunks": late_chunks}
    expected = linformers.embed(TEXTS, tokens=8, **options)
    backwards = linformers.embed(TEXTS[::-1], tokens=10_000, **options)[::-1]
    alone = [linformers.embed([own], **options)[0] for own in TEXTS]
    for found in (backwards, alone):
        for own, other in zip(found, expected, strict=True):
            assert own.shape == other.shape
            assert np.abs(own - other).max() < 1e-5
    assert len({vectors.tobytes() for vectors in expected}) == len(TEXTS)


def test_long_texts_are_read_in_parts(random):
    """The mean of all tokens, each from one part; equal to that of parts read by hand."""
    embedder = Embedder(random, Settings(normalize=False))
    (tokens,) = embedder.encoder.encode([Text(TEXTS[4])])
    parts = list(embedder.encoder.parts(0, tokens))
    assert len(parts) > 3
    assert [part.own[0] for part in parts] == [0, *(part.own[1] for part in parts[:-1])]
    assert parts[-1].own[1] == len(tokens.ids)
    total, count = np.zeros(16), 0
    for part in parts:
        assert len(part.ids) <= 32
        hidden = embedder.network(torch.from_numpy(part.ids)[None]).last_hidden_state[0].detach().numpy()
        start, stop = (part.head + number - part.first for number in part.own)
        own = [0, *range(start, stop), len(part.ids) - 1]
        total, count = total + hidden[own].sum(0), count + len(own)
    assert np.abs(embedder.embed([TEXTS[4]])[0] - total / count).max() < 1e-5


@pytest.mark.parametrize(("count", "room"), [(1, 5), (5, 5), (6, 5), (100, 16), (17, 16), (1000, 33), (9, 1), (50, 8)])
def test_spans(count, room):
    found = list(spans(count, room))
    assert [own[0] for *_, own in found] + [count] == [0] + [own[1] for *_, own in found]
    for start, stop, (first, last) in found:
        assert 0 <= start <= first < last <= stop <= count
        assert stop - start <= room
    for (_, stop, _), (start, _, _) in pairwise(found):
        assert stop - start >= room // 8
    assert len({stop - start for start, stop, _ in found}) == 1
    assert list(spans(0, room)) == []


def test_late_chunks(random):
    """Each is the mean of its tokens, pooled after the whole text was read; their mean is that of all tokens."""
    own = TEXTS[3]
    (chunks,) = linformers.embed([own], random, late_chunks=6, normalize=False)
    tokenizer, network = AutoTokenizer.from_pretrained(random), LinformerModel.from_pretrained(random).eval()
    ids = tokenizer(own, return_tensors="pt")["input_ids"]
    hidden = network(ids).last_hidden_state[0, 1:-1].detach()
    expected = torch.stack([part.mean(0) for part in hidden.split(6)]).numpy()
    assert np.abs(chunks - expected).max() < 1e-5


def test_prompts_and_pooling_of_the_folder(random, tmp_path):
    prompts = {"query": "the fox ", "passage": "a dog ", "other": "tree "}
    folder = sentence_folder(random, tmp_path / "model", "cls", prompts)
    for purpose, prefix in {"document": "a dog ", "query": "the fox ", "other": "tree ", "none": ""}.items():
        expected = unit(naive(random, [prefix + TEXTS[0], prefix + TEXTS[2]], "cls"))
        assert np.abs(linformers.embed([TEXTS[0], TEXTS[2]], folder, prompt=purpose) - expected).max() < 1e-5
    mean = linformers.embed(TEXTS[:1], folder, pooling="mean", prompt="none")
    assert np.abs(mean - unit(naive(random, TEXTS[:1]))).max() < 1e-5
    with refused("prompt='question' is not one of 'document', 'query', 'none', 'query', 'passage', 'other'"):
        linformers.embed(TEXTS, folder, prompt="question")
    with refused("late_chunks needs the mean of tokens, but pooling is 'cls'"):
        linformers.embed(TEXTS, folder, late_chunks=4)
    without = sentence_folder(random, tmp_path / "without", "mean", prompts, include_prompt=False)
    network = LinformerModel.from_pretrained(random).eval()
    tokenizer = AutoTokenizer.from_pretrained(random)
    ids = tokenizer("a dog " + TEXTS[0], return_tensors="pt")["input_ids"]
    count = len(tokenizer("a dog ", add_special_tokens=False)["input_ids"])
    hidden = network(ids).last_hidden_state[0].detach()
    expected = torch.cat([hidden[:1], hidden[1 + count :]]).mean(0, keepdim=True).numpy()
    assert np.abs(linformers.embed(TEXTS[:1], without, normalize=False) - expected).max() < 1e-5


def test_empty_texts(random):
    found = linformers.embed(["", TEXTS[0], " \n"], random)
    assert not found[[0, 2]].any()
    assert np.abs(found[1] - linformers.embed(TEXTS[:1], random)[0]).max() < 1e-5
    assert linformers.embed([], random).shape == (0, 16)
    (empty, _) = linformers.embed(["", TEXTS[1]], random, late_chunks=8)
    assert (empty.shape, empty.any()) == ((1, 16), False)


def test_the_bundled_model_is_the_default():
    assert linformers.embed(["He was elected president."]).shape == (1, 256)


# Files.


def test_files_of_all_kinds(random, tmp_path):
    """Rows in the order of the input, with ids."""
    ids = [f"own {i}" for i in range(10)]
    expected = linformers.embed(TEXTS, random)
    for name, columns in {"a.jsonl": {}, "a.csv.gz": {"id": ids}, "a.parquet": {"id": list(range(10))}}.items():
        source = table(tmp_path / name, **columns)
        for suffix in ("npy", "parquet"):
            out = run(source, tmp_path / f"{name}.{suffix}", model=random)
            if suffix == "npy":
                vectors, rows = np.load(out), lines(out.with_suffix(".ids.jsonl"))
                info = json.loads(out.with_suffix(".json").read_text())
            else:
                found = pyarrow.parquet.read_table(out)
                vectors, rows = np.array(found["vector"].to_pylist(), np.float32), found.to_pylist()
                info = json.loads(found.schema.metadata[b"linformers"])
            assert np.abs(vectors - expected).max() < 1e-5
            shown = columns.get("id", [f"{source}:{number}" for number in range(1, 11)])
            assert [row["id"] for row in rows] == list(map(str, shown))
            assert (info["rows"], info["dimension"], info["pooling"], info["normalized"]) == (10, 16, "mean", True)
            assert info["in_parts"] == 4
            assert rows[4]["parts"] > 3
            assert info["model_hash"]
            assert info["notes"] == [
                "documents longer than n=32 tokens, read in overlapping parts, whose vectors are merged: 4 of 10"
            ]
    assert not list(tmp_path.glob("*.parts"))


def test_folders_of_mixed_types(random, tmp_path, capsys):
    folder = tmp_path / "in"
    table(folder / "b.jsonl", TEXTS[:2], id=["x", "y"])
    (folder / "a.txt").write_text(TEXTS[1] + "\n\n" + TEXTS[2])
    (folder / "c.md").write_text("")
    (folder / "d.txt").write_bytes(b"abc\0def" * 10)
    (folder / "e.txt").write_bytes(b"caf\xe9 fox")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "rows.csv").write_text('text,id\n,z\n"a\nb",w\n')
    console = Console(width=200)
    out = run(folder, tmp_path / "out.npy", model=random, console=console)
    ids = [row["id"] for row in lines(out.with_suffix(".ids.jsonl"))]
    assert ids == [str(folder / "a.txt"), "x", "y", str(folder / "c.md"), str(folder / "e.txt"), "z", "w"]
    vectors = np.load(out)
    assert (np.linalg.norm(vectors, axis=1) > 0.99).tolist() == [own not in (str(folder / "c.md"), "z") for own in ids]
    said = capsys.readouterr().out
    for note in (
        f"1 file has NUL bytes and was left out; the first: {folder / 'd.txt'}",
        f"1 file of another type was left out; the first: {folder / 'image.png'}",
        "1 line is not UTF-8: its wrong bytes became �",
        "empty documents, whose vectors are 0: 2 of 7",
    ):
        assert note in said
    whole = naive(random, [(folder / "a.txt").read_text()[:60]])
    assert whole.shape == (1, 16)


def test_one_of_a_thing_is_singular(random, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    out = run(tmp_path / "a.txt", tmp_path / "out.npy", model=random, console=Console(width=500))
    assert capsys.readouterr().out.splitlines()[-1] == f"1 vector of 1 document in {out}"


def test_late_chunks_of_files(random, tmp_path):
    out = run(table(tmp_path / "a.jsonl"), tmp_path / "out.npy", model=random, late_chunks=6)
    rows, vectors = lines(out.with_suffix(".ids.jsonl")), np.load(out)
    expected = linformers.embed(TEXTS, random, late_chunks=6)
    assert np.abs(vectors - np.concatenate(expected)).max() < 1e-5
    start = 0
    for own, chunks in zip(TEXTS, expected, strict=True):
        of_text = rows[start : start + len(chunks)]
        assert [row["chunk"] for row in of_text] == list(range(len(chunks)))
        pieces = [own[row["start"] : row["end"]] for row in of_text]
        assert "".join("".join(pieces).split()) == "".join(own.split())
        start += len(chunks)
    assert start == len(rows)


def test_a_stopped_run_continues(random, tmp_path, monkeypatch):
    """The same files as those of an uninterrupted run; finished blocks are not repeated."""
    source = table(tmp_path / "a.jsonl", TEXTS * 30)
    monkeypatch.setattr("linformers.training.batches.TEXTS_PER_BLOCK", 50)
    outs = [tmp_path / name for name in ("straight.npy", "stopped.npy")]
    run(source, outs[0], model=random)
    vectors, seen = Embedder.vectors, []

    def stopping(self, block, report):
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(block.number)
        return vectors(self, block, report)

    monkeypatch.setattr(Embedder, "vectors", stopping)
    with pytest.raises(SystemExit) as stopped:
        run(source, outs[1], model=random)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not outs[1].exists()
    parts = outs[1].with_name("stopped.npy.parts")
    with refused("normalized was True and is now False; delete it to start anew"):
        run(source, outs[1], model=random, normalize=False)
    shutil.copytree(parts, tmp_path / "smaller.npy.parts")
    (parts / "000001.parquet").write_bytes((parts / "000001.parquet").read_bytes()[:-9])  # damaged: made again
    seen.clear()
    seen += [-1, -1, -1]
    run(source, outs[1], model=random)
    assert seen[3:] == [1, 2, 3, 4, 5]
    for suffix in (".npy", ".ids.jsonl", ".json"):
        straight, own = (out.with_suffix(suffix).read_bytes() for out in outs)
        assert straight == own
    with refused("exists already: delete it or choose another"):
        run(source, outs[1], model=random)
    seen[:] = [-1, -1, -1]
    smaller = run(source, tmp_path / "smaller.npy", model=random, tokens=16)  # batches of another size change nothing
    assert seen[3:] == [2, 3, 4, 5]
    assert np.abs(np.load(smaller) - np.load(outs[0])).max() < 1e-5


def test_blocks_are_small_enough_to_lose_on_a_cpu(random, monkeypatch):
    """A block has a fixed number of characters, whatever the size of a batch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    texts = [Text("the quick brown fox " * 500)] * 40  # 10,000 characters each
    blocks = list(Embedder(random, Settings(tokens=10**6)).encoder.read(texts))
    assert [len(block.texts) for block in blocks] == [14, 14, 12]


def test_the_bar_shows_documents_and_speed(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([10.0, 12.0, 12.0]).__next__)
    meter = Meter(1000)
    meter.add(600, 3)  # of an earlier run
    meter.add(100, 0.5, tokens=5000)
    assert meter.shown() == {"completed": 700, "amount": "3 documents", "detail": "2,500 tokens a second"}
    meter.add(900, 5)  # the total was an estimate
    assert meter.shown()["completed"] == 990


def test_the_output_may_lie_among_the_documents(random, tmp_path):
    """What a stopped run leaves there is no document."""
    (tmp_path / "in" / "out.parquet.parts").mkdir(parents=True)
    table(tmp_path / "in" / "out.parquet.parts" / "000000.parquet")
    (tmp_path / "in" / "a.txt").write_text(TEXTS[0])
    assert len(pyarrow.parquet.read_table(run(tmp_path / "in", tmp_path / "in" / "out.parquet", model=random))) == 1


def test_changed_documents_are_read_again(random, tmp_path, monkeypatch):
    """After a stop, by their content: a mended line does not cost the others."""
    source = tmp_path / "a.jsonl"
    table(source, TEXTS * 10)
    source.write_text(source.read_text() + "{\n")
    monkeypatch.setattr("linformers.training.batches.TEXTS_PER_BLOCK", 30)
    with refused(f"{source}, line 101 is damaged: it is not JSON"):
        run(source, tmp_path / "out.npy", model=random)
    blocks = len(list((tmp_path / "out.npy.parts").glob("*.parquet")))
    assert blocks > 0
    table(source, [*TEXTS * 9, *TEXTS[::-1]])
    computed = []
    vectors = Embedder.vectors
    monkeypatch.setattr(
        Embedder, "vectors", lambda self, block, *rest: computed.append(block.number) or vectors(self, block, *rest)
    )
    out = run(source, tmp_path / "out.npy", model=random)
    assert computed == list(range(blocks, 4))
    assert np.abs(np.load(out) - linformers.embed([*TEXTS * 9, *TEXTS[::-1]], random)).max() < 1e-5


@pytest.mark.slow
def test_two_processes_give_the_same_files(random, tmp_path):
    source = table(tmp_path / "a.jsonl", TEXTS * 400)
    run(source, tmp_path / "one.parquet", model=random, tokens=1024)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "-m",
        "linformers",
    ]
    options = ["embed", source, "--out", tmp_path / "two.parquet", "--model", random, "--tokens", "1024"]
    subprocess.run([*command, *map(str, options)], check=True, capture_output=True, timeout=300)
    one, two = (pyarrow.parquet.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert one.drop_columns("vector").equals(two.drop_columns("vector"))
    own, other = (np.array(found["vector"].to_pylist()) for found in (one, two))
    assert np.abs(own - other).max() < 1e-5
    assert pyarrow.parquet.ParquetFile(tmp_path / "two.parquet").num_row_groups > 4
    assert not list(tmp_path.glob("*.parts"))


def test_wrong_arguments(random, model, tmp_path):
    source = table(tmp_path / "a.jsonl")
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"a\0b")
    bare = Path(shutil.copytree(random, tmp_path / "bare"))
    for name in ("tokenizer.json", "tokenizer_config.json", "manifest.json"):
        (bare / name).unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "semicolons.csv").write_text("id;text\n1;a\n")
    (tmp_path / "x.png").write_bytes(b"x")
    out = tmp_path / "out.npy"
    for sources, options, message in [
        (source, {"out": tmp_path / "out.txt"}, "must be a file that ends in .npy or .parquet"),
        (binary, {}, f"{binary} is not UTF-8 text: it has NUL bytes"),
        (source, {"model": bare}, f"model={str(bare)!r} has no tokenizer"),
        (source, {"model": tmp_path / "nowhere"}, "is not a folder"),
        (source, {"text": "body"}, "has no column 'body'; its columns are 'text'"),
        (tmp_path / "semicolons.csv", {}, "its columns are separated by semicolons, not commas"),
        (tmp_path / "empty", {}, "is not a supported file and contains none"),
        (tmp_path / "x.png", {}, "is not a supported file"),
        (tmp_path / "empty.jsonl", {}, "has no documents"),
        (source, {"pooling": "max"}, "pooling='max' is not one of 'mean', 'cls'"),
        (source, {"tokens": 0}, "tokens=0 must be a positive integer"),
        (source, {"late_chunks": -1}, "late_chunks=-1 must be a positive integer"),
        (source, {"prompt": "x"}, "prompt='x' is not one of"),
    ]:
        with refused(message):
            run(sources, options.pop("out", out), **{"model": random, **options})
    for texts in ("one text", [1]):
        with refused("texts must be a list of strings"):
            linformers.embed(texts, random)
    with refused("setting='pool' is not one of 'pooling'"):
        linformers.embed(["a"], random, pool="mean")


def test_nan_is_no_vector(random, tmp_path):
    spoiled = Path(shutil.copytree(random, tmp_path / "model"))
    weights = load_file(spoiled / "model.safetensors")
    weights["embeddings.norm.weight"].fill_(torch.nan)
    save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
    files.write_manifest(spoiled)
    with refused("computes NaN"):
        linformers.embed(TEXTS, spoiled)
