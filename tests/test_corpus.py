"""Text to shards of tokens and back: nothing lost, nothing half written, nothing held in memory."""

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from linformers.training import corpus
from linformers.training.corpus import Corpus, TokenStream, prepare, tokenizer_hash

WORDS = ["the", "attention", "is", "linear", "in", "length", "漢字", "naïve", "🙂", ".", "\n", "x1", "<mask>", "</s>"]


def text(seed, words=40):
    draw = random.Random(seed)
    return f"Document {seed}. " + " ".join(draw.choice(WORDS) for _ in range(words))


TEXTS = [text(seed) for seed in range(200)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": item}) + "\n" for item in texts))
    return str(path)


def run(sources, out, **options):
    options = {"vocab_size": 400, "validation_share": 0.1, "workers": 1} | options
    return prepare([str(source) for source in sources], out, console=Console(quiet=True), **options)


def texts_of(opened, split):
    """The documents of a split, back from their tokens."""
    stream, tokenizer = opened.tokens(split), opened.tokenizer()
    ids = stream.read(0, len(stream))
    ends = np.flatnonzero(ids == opened.eos_token_id)
    assert len(ids) == 0 or ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder):
    """All that a corpus holds, as bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", TEXTS)


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    """A corpus in many shards; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("corpus")
    run([source], folder, shard_tokens=1000)
    return folder


@pytest.fixture
def copy(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


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
    run([folder], tmp_path / "out", validation=[write_jsonl(tmp_path / "v.jsonl", TEXTS[:3])])
    opened = Corpus.open(tmp_path / "out")
    opened.verify()
    assert texts_of(opened, "train") == expected
    assert texts_of(opened, "validation") == TEXTS[:3]


def test_the_tokenizer_is_robertas_kind(prepared):
    opened = Corpus.open(prepared)
    tokenizer = opened.tokenizer()
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
    names = ["bos", "pad", "eos", "unk", "mask", "cls", "sep"]
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == [0, 1, 2, 3, 4, 0, 2]
    (a,), (b,) = (
        tokenizer("a", add_special_tokens=False)["input_ids"],
        tokenizer("b", add_special_tokens=False)["input_ids"],
    )
    assert tokenizer("a")["input_ids"] == [0, a, 2]
    assert tokenizer("a", "b")["input_ids"] == [0, a, 2, 2, b, 2]
    assert list(tokenizer("a")) == ["input_ids", "attention_mask"]
    assert tokenizer("a <mask>", add_special_tokens=False)["input_ids"] == [a, 4]
    assert len(tokenizer) == opened.vocab_size == 400
    assert tokenizer.is_fast


def test_special_tokens_in_a_text_are_text(prepared):
    assert any("</s>" in item and "<mask>" in item for item in TEXTS)
    stream = Corpus.open(prepared).tokens("train")
    ids = stream.read(0, len(stream))
    documents = Corpus.open(prepared).manifest["splits"]["train"]["documents"]
    assert np.count_nonzero(ids == 2) == documents
    assert not np.isin(ids, [0, 1, 3, 4]).any()


def test_a_rerun_is_the_same_whatever_the_workers(prepared, source, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 1000)
    run([source], tmp_path / "again", shard_tokens=1000)
    run([source], tmp_path / "two", shard_tokens=1000, workers=2)
    assert contents(prepared) == contents(tmp_path / "again") == contents(tmp_path / "two")


def test_processes_start_only_where_they_pay(source, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("a pool was asked for")

    monkeypatch.setattr(corpus, "ProcessPoolExecutor", refuse)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    run([source], tmp_path / "small", workers=None)
    monkeypatch.setattr(corpus, "SMALL", 0)
    with pytest.raises(RuntimeError, match="a pool was asked for"):
        run([source], tmp_path / "large", workers=None)


def test_shards_are_one_stream(prepared):
    opened = Corpus.open(prepared)
    shards = opened.manifest["splits"]["train"]["shards"]
    assert len(shards) > 5
    assert [shard["tokens"] for shard in shards[:-1]] == [1000] * (len(shards) - 1)
    assert 0 < shards[-1]["tokens"] <= 1000
    whole = np.concatenate([np.fromfile(prepared / shard["file"], "<u2") for shard in shards])
    stream = opened.tokens("train")
    assert len(stream) == len(whole) == opened.manifest["splits"]["train"]["tokens"]
    size = len(whole)
    for start, count in [(0, size), (999, 2), (1000, 1000), (500, 3000), (size - 1, 1), (size, 0), (0, 0)]:
        np.testing.assert_array_equal(stream.read(start, count), whole[start : start + count])
    assert stream.read(5, 10).dtype == np.uint16
    stream.read(5, 10)[:] = 0  # a copy: the file stays
    np.testing.assert_array_equal(stream.read(5, 10), whole[5:15])


@pytest.mark.parametrize(("start", "count"), [(-1, 5), (0, 10**9), (5, -1)])
def test_reading_past_the_ends_is_refused(prepared, start, count):
    stream = Corpus.open(prepared).tokens("train")
    with pytest.raises(ValueError, match=f"tokens {start} to {start + count} are not all among the {len(stream)}"):
        stream.read(start, count)


def test_few_maps_are_open_and_none_is_pickled(prepared, monkeypatch):
    monkeypatch.setattr(corpus, "OPEN_MAPS", 3)
    stream = Corpus.open(prepared).tokens("train")
    whole = stream.read(0, len(stream))
    assert len(stream._maps) == 3
    dumped = pickle.dumps(stream)
    assert len(dumped) < 3000
    loaded = pickle.loads(dumped)
    assert isinstance(loaded, TokenStream)
    np.testing.assert_array_equal(loaded.read(0, len(loaded)), whole)


def test_the_manifest_is_true(prepared, source):
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["sources"] == [source]
    assert manifest["vocab_size"] == 400
    assert manifest["dtype"] == "uint16"
    assert manifest["tokenizer"] == tokenizer_hash(prepared / "tokenizer")
    named = []
    for split in manifest["splits"].values():
        assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
        for shard in split["shards"]:
            data = (prepared / shard["file"]).read_bytes()
            assert (shard["bytes"], shard["tokens"]) == (len(data), len(data) // 2)
            assert shard["sha256"] == hashlib.sha256(data).hexdigest()
            named.append(shard["file"])
    assert sorted(named) == sorted(path.name for path in prepared.glob("*.bin"))
    assert not list(prepared.glob("*.tmp"))
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == len(TEXTS)


def test_a_large_vocabulary_takes_four_bytes(prepared, source, tmp_path, monkeypatch):
    assert np.iinfo(np.uint16).max == corpus.UINT16_VOCABULARY - 1
    monkeypatch.setattr(corpus, "UINT16_VOCABULARY", 399)
    manifest = run([source], tmp_path, shard_tokens=1000)
    assert manifest["dtype"] == "uint32"
    assert manifest["splits"]["train"]["shards"][0]["bytes"] == 4000
    opened = Corpus.open(tmp_path)
    opened.verify()
    for split in ("train", "validation"):
        narrow, wide = Corpus.open(prepared).tokens(split), opened.tokens(split)
        assert wide.read(0, 1).dtype == np.uint32
        np.testing.assert_array_equal(wide.read(0, len(wide)), narrow.read(0, len(narrow)))


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
    assert len(list(corpus.PIECE.finditer(book))) > 2
    np.testing.assert_array_equal(ids[:-1], backend.encode(book, add_special_tokens=False).ids)


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
    prepare([str(tmp_path)], tmp_path / "out", vocab_size=300, validation=held, workers=1, console=console)
    opened = Corpus.open(tmp_path / "out")
    assert texts_of(opened, "train") == TEXTS[:50] + TEXTS[60:70]
    assert texts_of(opened, "validation") == TEXTS[50:60]
    shown = console.export_text()
    assert "1 of the files are for validation" in shown
    assert "train: 60 documents" in shown
    assert f"Written to {tmp_path / 'out'}" in shown


def test_the_tokenizer_learns_from_each_file_and_not_from_what_is_held_out(tmp_path, monkeypatch):
    for name, word in (("a", "alpha"), ("b", "beta"), ("c", "gamma")):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{word} {number}" for number in range(50)])
    seen = []
    train = corpus.train_tokenizer

    def spy(texts, vocab_size):
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(corpus, "train_tokenizer", spy)
    run([tmp_path], tmp_path / "out", tokenizer_documents=100)
    held_out = set(texts_of(Corpus.open(tmp_path / "out"), "validation"))
    assert any(f"alpha {number}" in held_out for number in range(33))
    kept = [[f"{w} {n}" for n in range(50) if f"{w} {n}" not in held_out] for w in ("alpha", "beta", "gamma")]
    assert seen == kept[0][:33] + kept[1][:33] + kept[2][:34]

    seen.clear()
    monkeypatch.setattr(corpus, "TOKENIZER_CHARACTERS", 3 * 16)
    run([tmp_path], tmp_path / "short", tokenizer_documents=20)
    assert "".join(seen) == "".join("".join(part)[:16] for part in kept)


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


def test_the_tokenizers_hash_is_that_of_what_it_does(prepared, tmp_path):
    opened = Corpus.open(prepared)
    tokenizer = opened.tokenizer()
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=4)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (prepared / "tokenizer" / "tokenizer.json").read_bytes()
    assert tokenizer_hash(tmp_path) == opened.tokenizer_hash
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(tmp_path) != opened.tokenizer_hash


def test_a_tokenizer_is_taken(prepared, source, tmp_path):
    tokenizer = Corpus.open(prepared).tokenizer()
    tokenizer("a b", truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(tmp_path / "own")
    run([source], tmp_path / "out", tokenizer=str(tmp_path / "own"), shard_tokens=1000)
    taken, trained = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "out", prepared))
    assert taken == trained


@pytest.mark.parametrize("missing", ["pad", "eos", "mask"])
def test_a_tokenizer_without_a_token_is_refused(missing, prepared, source, tmp_path):
    config = prepared / "tokenizer" / "tokenizer_config.json"
    own = Path(shutil.copytree(prepared / "tokenizer", tmp_path / "own"))
    settings = json.loads(config.read_text())
    del settings[f"{missing}_token"]
    (own / config.name).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"has no {missing} token; it needs pad, eos and mask tokens"):
        run([source], tmp_path / "out", tokenizer=str(own))
    assert not (tmp_path / "out").exists()


def test_a_slow_tokenizer_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: types.SimpleNamespace(is_fast=False))
    with pytest.raises(ValueError, match=r"tokenizer='x' has no tokenizer\.json"):
        run([source], tmp_path / "out", tokenizer="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 260}, "vocab_size=260 must be at least 261"),
        ({"validation_share": 0}, "validation_share=0 must lie between 0 and 1, or name validation sources"),
        ({"validation_share": 1}, "validation_share=1 must lie between 0 and 1"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be a positive integer"),
        ({"tokenizer_documents": 0}, "tokenizer_documents=0 must be a positive integer"),
        ({"workers": 0}, "workers=0 must be a positive integer"),
        ({"tokenizer": "/nowhere"}, "tokenizer='/nowhere' cannot be loaded from a folder or the hub: "),
        ({"text_column": "body"}, "has no column 'body'; its columns are 'text'"),
        ({"validation_share": 1e-9}, "validation_share=1e-09 of 200 documents is none; choose a larger share or name"),
    ],
)
def test_wrong_arguments(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        run([source], tmp_path / "out", **options)
    assert message in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_wrong_sources(prepared, source, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = str(tmp_path / "empty.jsonl")
    for sources, options, message in [
        ([], {}, r"sources=\[\] leave nothing to train on"),
        ([source], {"validation": [source, "missing.txt"]}, "source 'missing.txt' does not exist"),
        (["no such name"], {}, "source 'no such name' does not exist"),
        (["../nowhere"], {}, r"source '\.\./nowhere' does not exist"),
        ([empty], {}, "the sources hold no text to train on"),
        ([source], {"validation": [empty]}, "the validation sources hold no text"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(sources, tmp_path / "out", **options)
        assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match="already holds a corpus; choose another folder or delete it"):
        run([source], prepared)


def test_what_a_killed_run_left_is_cleared_and_nothing_else(prepared, source, tmp_path):
    for name in ("train-00077.bin", "validation-00000.bin.tmp", "manifest.json.tmp", "train-notes.bin", "notes.txt"):
        (tmp_path / name).write_text("left")
    run([source], tmp_path, shard_tokens=1000)
    own = {"train-notes.bin": b"left", "notes.txt": b"left"}
    assert contents(tmp_path) == contents(prepared) | own


def test_a_flipped_bit_is_found(copy):
    path = copy / "train-00003.bin"
    data = bytearray(path.read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[777] ^= 4
    path.write_bytes(data)
    opened = Corpus.open(copy)
    found = hashlib.sha256(data).hexdigest()
    with pytest.raises(ValueError, match=rf"train-00003\.bin has sha256 {found}, expected {expected} \(2000 bytes"):
        opened.verify()


def test_a_shard_of_another_size_is_named(copy):
    os.truncate(copy / "train-00003.bin", 1500)
    with pytest.raises(ValueError, match=r"train-00003\.bin has 1500 bytes, expected 2000"):
        Corpus.open(copy)
    (copy / "train-00003.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00003\.bin is missing, expected 2000 bytes"):
        Corpus.open(copy)


def test_another_tokenizer_is_found(copy):
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"lstrip": true', '"lstrip": false'))
    with pytest.raises(ValueError, match=rf"{copy / 'tokenizer'} has the hash \w{{64}}, expected \w{{64}}$"):
        Corpus.open(copy).verify()


def test_folders_that_are_no_corpus(copy, tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path} holds no corpus: run linformers prepare$"):
        Corpus.open(tmp_path)
    with pytest.raises(ValueError, match="split='test' is not one of 'train', 'validation'"):
        Corpus.open(copy).tokens("test")
    for content, message in [
        ("{", r"manifest\.json is damaged"),
        ('{"format": 2}', r"manifest\.json has format 2, expected 1"),
        ("[]", "has format None"),
    ]:
        (copy / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            Corpus.open(copy)


def test_no_more_batches_are_under_way_than_the_window_has():
    under_way, most = 0, 0

    def batches():
        nonlocal under_way, most
        for number in range(100):
            under_way += 1
            most = max(most, under_way)
            yield number

    def submit(number):
        future = Future()
        future.set_result(number)
        return future

    results = []
    for batch, result in corpus._in_order(submit, batches(), 6):
        assert batch == result
        under_way -= 1
        results.append(result)
    assert results == list(range(100))
    assert most == 6


def test_batches_have_a_bounded_size():
    documents = [("train", text(0, 100_000)), *(("train", item) for item in TEXTS), ("validation", "a")] * 5
    batches = list(corpus._batches(iter(documents)))
    assert len(batches) > 2
    assert all(len(piece) <= 100_000 for batch in batches for piece in batch.texts)
    assert all(2**20 <= batch.characters < 2**20 + 100_000 for batch in batches[:-2])
    assert all(batch.characters == sum(map(len, batch.texts)) for batch in batches)
    together = ["".join(p for b in batches if b.split == split for p in b.texts) for split in ("train", "validation")]
    assert together == ["".join(item for own, item in documents if own == split) for split in ("train", "validation")]


class ByteEncoder(corpus.Encoder):
    """An encoder as fast as reading, so that memory can be measured on much text in little time."""

    def __call__(self, batch):
        return np.frombuffer("\n".join(batch.texts).encode(), np.uint8).astype(self.dtype)


def megabytes(source, out, tokenizer, leak, answer):
    """The memory that a run takes, in a process of its own."""
    corpus.Encoder = ByteEncoder
    if leak:
        batches = corpus._batches
        corpus._batches = lambda documents: iter(list(batches(documents)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run([source], out, tokenizer=tokenizer, shard_tokens=2**22)
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def start(target, *arguments):
    process = corpus._context().Process(target=target, args=arguments)
    process.start()
    return process


def test_memory_does_not_grow_with_the_corpus(prepared, tmp_path):
    row = json.dumps({"text": text(0, 4000)}) + "\n"
    for name, size in (("small", 10), ("large", 60)):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            for number in range(size * 10**6 // len(row)):
                file.write(row.replace("Document 0", f"Document {number}"))

    def measured(name, leak=False):
        receiver, sender = corpus._context().Pipe(duplex=False)
        out = tmp_path / f"{name}-{leak}"
        tokenizer = str(prepared / "tokenizer")
        process = start(megabytes, str(tmp_path / f"{name}.jsonl"), out, tokenizer, leak, sender)
        sender.close()
        result = receiver.recv()
        process.join()
        return result

    small = measured("small")
    assert measured("large") < small + 25
    assert measured("large", leak=True) > small + 40  # the measure sees what is held


def run_slowly(source, out):
    """A run that writes little at a time, so that there are many moments at which it can be killed."""
    batches = corpus._batches

    def slow(documents):
        corpus.BATCH_CHARACTERS = 1000
        for batch in batches(documents):
            yield batch
            time.sleep(0.01)

    corpus._batches = slow
    run([source], out, shard_tokens=1000)


def run_and_die(source, out, number):
    """A run that is killed before its file of that number gets its name."""
    finish, names = corpus._finish, []

    def die(file, path):
        names.append(path)
        if len(names) == number:
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(file, path)

    corpus._finish = die
    run([source], out, shard_tokens=1000)


def check_killed(process, source, out, prepared):
    """What is left is no corpus and has no broken shard; the next run clears it. Returns the names that were left."""
    assert process.exitcode == -signal.SIGKILL
    left = {path.name for path in out.glob("*") if path.is_file()}
    assert corpus.MANIFEST not in left
    for name in left:
        if name.endswith(".bin"):
            assert (out / name).read_bytes() == (prepared / name).read_bytes()
    with pytest.raises(ValueError, match="holds no corpus"):
        Corpus.open(out)
    run([source], out, shard_tokens=1000)
    assert contents(out) == contents(prepared)
    return left


@pytest.mark.parametrize("shards", [0, 1, 3, 6])
def test_a_run_killed_at_some_moment_leaves_nothing_that_looks_whole(shards, prepared, source, tmp_path):
    process = start(run_slowly, source, tmp_path / "out")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/*.bin"))) < shards and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.Random(shards).uniform(0, 0.02))
    process.kill()
    process.join()
    left = check_killed(process, source, tmp_path / "out", prepared)
    assert sum(name.endswith(".bin") for name in left) >= shards


def test_a_run_killed_before_a_file_has_its_name(prepared, source, tmp_path):
    shards = len(list(prepared.glob("*.bin")))
    for number in (1, 4, shards, shards + 1):
        out = tmp_path / str(number)
        process = start(run_and_die, source, out, number)
        process.join()
        left = check_killed(process, source, out, prepared)
        assert sum(name.endswith(".bin") for name in left) == number - 1
        assert any(name.endswith(".tmp") for name in left)
    assert "manifest.json.tmp" in left


def test_workers_leave_when_the_main_process_is_killed(source, tmp_path):
    code = f"""
import sys, time
from linformers.training import corpus
batches = corpus._batches
def slow(documents):
    corpus.BATCH_CHARACTERS = 500
    for batch in batches(documents):
        yield batch
        time.sleep(0.2)
corpus._batches = slow
from rich.console import Console
from pathlib import Path
corpus.prepare([{source!r}], Path({str(tmp_path / "out")!r}), vocab_size=300, shard_tokens=100, workers=2,
               validation_share=0.1, console=Console(quiet=True))
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while not list(tmp_path.glob("out/*.bin")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.glob("out/*.bin"))
        assert len(members(process.pid)) >= 4  # itself, two workers, and the server they come from
        process.kill()
        process.wait()
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert members(process.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def members(session):
    """The processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(folder.name))
    return found
