"""Text to tokens and back: nothing lost, nothing trained on that is held out, every mistake in one sentence."""

import gzip
import json
import lzma
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from linformers.training import card, prepare
from linformers.training.checkpointing import locked
from linformers.training.corpus import Corpus

from .texts import TEXTS, contents, run, text, texts_of, write_jsonl


def test_every_kind_of_file_comes_back(tmp_path):
    folder = tmp_path / "text"
    (folder / "deep" / "er").mkdir(parents=True)
    parts = [TEXTS[i : i + 10] for i in range(0, 60, 10)]
    write_jsonl(folder / "a.jsonl", parts[0])
    rows = "".join('"' + item.replace('"', '""') + '"\r\n' for item in parts[1])
    (folder / "b.csv").write_text("text\r\n" + rows, newline="")
    pyarrow.parquet.write_table(pyarrow.table({"text": parts[2], "n": range(10)}), folder / "c.parquet")
    packed = "".join(json.dumps({"text": item}) + "\n" for item in parts[3]).encode()
    (folder / "deep" / "d.jsonl.gz").write_bytes(gzip.compress(packed))
    (folder / "deep" / "er" / "e.txt.xz").write_bytes(lzma.compress(parts[4][0].encode()))
    (folder / "f.txt").write_text(parts[5][0], newline="")
    expected = [*parts[0], *parts[1], *parts[2], *parts[3], parts[4][0], parts[5][0]]
    held_out = write_jsonl(tmp_path / "v.jsonl", TEXTS[:3])
    run([folder], tmp_path / "out", validation=[held_out])
    opened = Corpus.open(tmp_path / "out")
    assert card._held_out(opened) == f" from `{held_out}`"
    opened.verify()
    assert texts_of(opened, "train") == expected
    assert texts_of(opened, "validation") == TEXTS[:3]


def test_a_long_document_stays_one(tmp_path):
    book = text(0, words=60_000)
    unbroken = "x" * 120_000
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:20], book, unbroken, "after"])
    other = write_jsonl(tmp_path / "v.jsonl", ["valid"])
    run([source], tmp_path / "out", validation=[other], vocab_size=300)
    opened = Corpus.open(tmp_path / "out")
    assert texts_of(opened, "train") == [*TEXTS[:20], book, unbroken, "after"]
    # Cut into pieces for encoding, it has the tokens that it has as a whole.
    backend = opened.tokenizer().backend_tokenizer
    backend.encode_special_tokens = True
    stream = opened.tokens("train")
    ids = np.split(stream.read(0, len(stream)), np.flatnonzero(stream.read(0, len(stream)) == 2) + 1)[20]
    assert len(list(prepare.PIECE.finditer(book))) > 2
    np.testing.assert_array_equal(ids[:-1], backend.encode(book, add_special_tokens=False).ids)


def test_batches_have_a_bounded_size():
    documents = [("train", text(0, 100_000)), *(("train", item) for item in TEXTS), ("validation", "a")] * 5
    batches = list(prepare._batches(iter(documents)))
    assert len(batches) > 2
    assert all(len(piece) <= 100_000 for batch in batches for piece in batch.texts)
    assert all(2**20 <= batch.characters < 2**20 + 100_000 for batch in batches[:-2])
    assert all(batch.characters == sum(map(len, batch.texts)) for batch in batches)
    together = ["".join(p for b in batches if b.split == split for p in b.texts) for split in ("train", "validation")]
    assert together == ["".join(item for own, item in documents if own == split) for split in ("train", "validation")]


def test_held_out_documents_are_chosen_by_their_text(prepared, tmp_path):
    train, validation = (texts_of(Corpus.open(prepared), split) for split in ("train", "validation"))
    assert 5 < len(validation) < 40
    assert sorted(train + validation) == sorted(TEXTS)
    assert [item for item in TEXTS if item in set(train)] == train
    # Neither their order nor what else there is moves a document.
    source = write_jsonl(tmp_path / "a.jsonl", [*reversed(TEXTS), *(text(seed) for seed in range(500, 520))])
    run([source], tmp_path / "out")
    again = texts_of(Corpus.open(tmp_path / "out"), "validation")
    assert [item for item in again if item in TEXTS] == validation[::-1]


def test_validation_files_are_not_trained_on(tmp_path):
    for name, part in (("a", TEXTS[:50]), ("b", TEXTS[50:60]), ("c", TEXTS[60:70])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    console = Console(record=True, width=200)
    held = [str(tmp_path / "b.jsonl")]
    prepare.prepare([str(tmp_path)], tmp_path / "out", vocab_size=300, validation=held, workers=1, console=console)
    opened = Corpus.open(tmp_path / "out")
    assert texts_of(opened, "train") == TEXTS[:50] + TEXTS[60:70]
    assert texts_of(opened, "validation") == TEXTS[50:60]
    shown = console.export_text()
    assert "1 of the files are for validation" in shown
    assert "train: 60 documents" in shown
    assert f"Written to {tmp_path / 'out'}" in shown


def test_text_that_has_no_utf8_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d a character"}\n')
    run([tmp_path / "a.jsonl"], tmp_path / "out", validation=[write_jsonl(tmp_path / "v.jsonl", ["a"])])
    assert texts_of(Corpus.open(tmp_path / "out"), "train") == ["half ? a character"]


class FakeDatasets(types.ModuleType):
    """The part of the package datasets that is used."""

    def __init__(self):
        super().__init__("datasets")
        self.asked = []

    def load_dataset(self, path, name=None, *, split, streaming):
        self.asked.append((path, name, split, streaming))
        if path == "some/none":
            raise FileNotFoundError("Dataset 'some/none' doesn't exist on the Hub\nmore")
        part = TEXTS[:50] if split == "train" else TEXTS[50:60]
        return ({"text": item, "id": number} for number, item in enumerate(["", *part]))


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    manifest = run(["wikitext"], tmp_path / "out")
    assert set(fake.asked) == {("wikitext", None, "train", True)}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 50
    fake.asked.clear()
    run(["some/name:config"], tmp_path / "two", validation=["some/name:config"])
    assert set(fake.asked) == {("some/name", "config", "train", True), ("some/name", "config", "validation", True)}
    assert texts_of(Corpus.open(tmp_path / "two"), "validation") == TEXTS[50:60]
    with pytest.raises(ValueError, match="dataset 'wikitext' has no column 'body'; its columns are 'text', 'id'"):
        run(["wikitext"], tmp_path / "three", text_column="body")
    with pytest.raises(ValueError, match=r"source 'some/none' is no file or folder, and on the hub: Dataset .* Hub$"):
        run(["some/none"], tmp_path / "four")


def test_a_name_on_the_hub_needs_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = (
        "source 'some/name' is no file or folder; as a hub name it needs the package datasets: "
        "pip install 'linformers[hub]'"
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared whole
        run(["some/name"], tmp_path / "out")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 260}, "vocab_size=260 must be at least 261"),
        ({"validation_share": 0}, "validation_share=0 must lie between 0 and 1; or name files to hold out with "),
        ({"validation_share": 1}, "validation_share=1 must lie between 0 and 1"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be a positive integer"),
        ({"tokenizer_documents": 0}, "tokenizer_documents=0 must be a positive integer"),
        ({"workers": 0}, "workers=0 must be a positive integer"),
        ({"tokenizer": "/nowhere"}, "tokenizer='/nowhere' cannot be loaded from a folder or the hub: "),
        ({"text_column": "body"}, "has no column 'body'; its columns are 'text'"),
        ({"validation_share": 1e-9}, "validation_share=1e-09 of 200 documents, chosen by their hash, is none; "),
    ],
)
def test_wrong_arguments(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        run([source], tmp_path / "out", **options)
    assert message in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("share", "cause"),
    [
        (0.2, "validation_share=0.2 of 6 documents, chosen by their hash, is none; "),
        (0.999, "there is no text to train on: validation_share=0.999 leaves none; "),
    ],
)
def test_a_share_that_leaves_a_split_empty_names_the_way_out(share, cause, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"a small text, number {number}")
    with pytest.raises(ValueError, match="name files to hold out with --validation") as error:
        run([tmp_path], tmp_path / "out", validation_share=share)
    assert str(error.value).startswith(cause)


def test_wrong_sources(prepared, source, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = str(tmp_path / "empty.jsonl")
    for sources, options, message in [
        ([], {}, r"sources=\[\] leave nothing to train on"),
        ([source], {"validation": [source, "missing.txt"]}, "source 'missing.txt' does not exist"),
        (["no such name"], {}, "source 'no such name' does not exist"),
        (["../nowhere"], {}, r"source '\.\./nowhere' does not exist"),
        ([empty], {}, "there is no text to train on: the sources hold none"),
        ([source], {"validation": [empty]}, "the validation sources hold no text"),
        ([empty], {"validation": [source]}, "there is no text to train on: the sources hold none"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(sources, tmp_path / "out", **options)
        assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match="already holds a corpus; choose another folder or delete it"):
        run([source], prepared)
    (tmp_path / "used").mkdir()
    with locked(tmp_path / "used"), pytest.raises(ValueError, match="is in use by another process"):
        run([source], tmp_path / "used")
    with pytest.raises(ValueError, match="is no folder that can be written to: File exists"):
        run([source], tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [("\n", "the validation sources hold no text"), ('{"body": "a"}\n', "has no column 'text'; its columns are")],
)
def test_validation_sources_are_looked_at_before_anything_is_written(content, message, source, tmp_path):
    (tmp_path / "v.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        run([source], tmp_path / "out", validation=[str(tmp_path / "v.jsonl")])
    assert not (tmp_path / "out").exists()


def test_what_a_killed_run_left_is_cleared_and_nothing_else(prepared, source, tmp_path):
    for name in ("train-00077.bin", "validation-00000.bin.tmp", "manifest.json.tmp", "train-notes.bin", "notes.txt"):
        (tmp_path / name).write_text("left")
    run([source], tmp_path, shard_tokens=1000)
    own = {"train-notes.bin": b"left", "notes.txt": b"left"}
    assert contents(tmp_path) == contents(prepared) | own
