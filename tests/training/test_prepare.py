"""Text to tokens and back: nothing is lost, held-out text is not trained on, a kill leaves nothing half done."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from linformers import files
from linformers.training import checkpoints, prepare
from linformers.training.corpus import Corpus

from ..forks import CONTEXT
from ..modes import refused
from .texts import TEXTS, contents, run, text, texts_of, write_jsonl


def test_long_documents(tmp_path):
    book, unbroken = text(0, words=60_000), "x" * 120_000
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:20], book, unbroken, "after"])
    run([source], tmp_path / "out", validation=[write_jsonl(tmp_path / "v.jsonl", ["valid"])], vocab_size=300)
    assert texts_of(Corpus.open(tmp_path / "out"), "train") == [*TEXTS[:20], book, unbroken, "after"]


def test_long_words_do_not_slow_the_tokenizer_down(tmp_path):
    """It learns from the other words, since theirs would take minutes. The tokens hold every word."""
    words = ["ab" * 2**17, "#" * 2**18]
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:20], *words])
    run([source], tmp_path / "out", validation=[write_jsonl(tmp_path / "v.jsonl", ["valid"])], vocab_size=400)
    assert texts_of(Corpus.open(tmp_path / "out"), "train")[20:] == words
    assert max(map(len, Corpus.open(tmp_path / "out").tokenizer().get_vocab())) < 20


def test_batches_have_a_bounded_size():
    documents = [("train", text(0, 100_000)), *(("train", item) for item in TEXTS), ("validation", "a")] * 5
    batches = list(prepare._batches(iter(documents)))
    assert len(batches) >= 2
    sizes = [sum(len(item) for _, item in batch) for batch in batches]
    least = prepare.BATCH_CHARACTERS
    assert all(least <= size < least + len(documents[0][1]) for size in sizes[:-1])
    assert [document for batch in batches for document in batch] == documents


def test_held_out_documents_depend_on_their_text(prepared, tmp_path):
    train, validation = (texts_of(Corpus.open(prepared), split) for split in ("train", "validation"))
    assert 5 < len(validation) < 40
    assert sorted(train + validation) == sorted(TEXTS)
    assert [item for item in TEXTS if item in set(train)] == train
    # Neither their order nor other documents matter.
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
    assert opened.manifest["validation_sources"] == held
    shown = console.export_text()
    assert "train: 60 documents" in shown
    assert f"Written to {tmp_path / 'out'}" in shown


def test_result_does_not_depend_on_workers(prepared, source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 1000)
    run([source], tmp_path / "again", shard_tokens=1000)
    run([source], tmp_path / "two", shard_tokens=1000, workers=3)
    assert contents(prepared) == contents(tmp_path / "again") == contents(tmp_path / "two")


def test_datasets_of_the_hub(tmp_path, monkeypatch):
    asked = set()

    def load_dataset(path, name=None, *, split, streaming):
        asked.add((path, name, split, streaming))
        if path == "some/none":
            raise FileNotFoundError("Dataset 'some/none' doesn't exist on the Hub\nmore")
        part = TEXTS[:50] if split == "train" else TEXTS[50:60]
        return ({"text": item, "id": number} for number, item in enumerate(["", *part]))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    manifest = run(["wikitext"], tmp_path / "out")
    assert asked == {("wikitext", None, "train", True)}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 50
    run(["some/name:config"], tmp_path / "two", validation=["some/name:config"])
    assert asked >= {("some/name", "config", split, True) for split in ("train", "validation")}
    assert texts_of(Corpus.open(tmp_path / "two"), "validation") == TEXTS[50:60]
    with refused("wikitext has no column 'body'; its columns are 'text', 'id'"):
        run(["wikitext"], tmp_path / "three", text_column="body")
    with refused("'some/none' is not a file or folder"):
        run(["some/none"], tmp_path / "four")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("pip install 'linformers[hub]'"):
        run(["some/name"], tmp_path / "five")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 260}, "vocab_size=260 must be at least 261"),
        *(({"validation_share": own}, f"validation_share={own} must be") for own in (0, 1)),
        ({"max_damaged": 1}, "max_damaged=1 must be"),
        *(({name: 0}, f"{name}=0 must be") for name in ("shard_tokens", "tokenizer_documents", "workers")),
        ({"tokenizer": "/nowhere"}, "tokenizer='/nowhere', a folder or a name on the hub"),
        ({"text_column": "body"}, "no column 'body'; its columns are 'text'"),
        ({"validation_share": 1e-9}, "no documents for validation: validation_share=1e-09"),
        ({"validation_share": 1 - 1e-9}, "no documents for train: validation_share=0.999999999"),
    ],
)
def test_wrong_arguments(options, message, source, tmp_path):
    with refused(message):
        run([source], tmp_path / "out", **options)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_wrong_sources(prepared, source, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = str(tmp_path / "empty.jsonl")
    for sources, options, message in [
        ([], {}, "sources=[] leave nothing to train on"),
        ([source], {"validation": [source, "missing.txt"]}, "source 'missing.txt' does not exist"),
        (["../nowhere"], {}, "source '../nowhere' does not exist"),
        ([empty], {}, "no documents for train"),
        ([source], {"validation": [empty]}, "no documents for validation"),
    ]:
        with refused(message):
            run(sources, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists() or [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    with refused("already holds a corpus"):
        run([source], prepared)
    (tmp_path / "out" / "tokenizer").mkdir()
    (tmp_path / "out" / "tokenizer" / "notes.txt").write_text("mine")
    with refused("has a folder 'tokenizer' of other origin"):
        run([source], tmp_path / "out")
    (tmp_path / "used").mkdir()
    with checkpoints.locked(tmp_path / "used"), refused("in use by another process"):
        run([source], tmp_path / "used")
    with refused("out="):
        run([source], tmp_path / "empty.jsonl")


# Damage.


def test_damage_above_a_share_is_refused_and_below_it_reported(tmp_path):
    """Of 200 documents, one is not UTF-8 and one is not text."""
    source = Path(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    lines = source.read_bytes().splitlines(keepends=True)
    lines[7] = b'{"text": "caf\xe9"}\n'
    source.write_bytes(b"".join([*lines, b'{"text": ["a", "list"]}\n']))
    found = f"{source}, line 8 is not UTF-8: found 2 damaged lines or rows in 200 documents, more than max_damaged="
    for share in (0.001, 0.009):
        with refused(f"{found}{share} allows"):
            run([source], tmp_path / "out", max_damaged=share)
    console = Console(record=True, width=300)
    run([source], tmp_path / "out", max_damaged=0.01, console=console)
    shown = console.export_text()
    assert f"{source}, line 8 is not UTF-8\n" in shown
    assert "2 damaged lines or rows in 200 documents: wrong bytes became U+FFFD" in shown
    opened = Corpus.open(tmp_path / "out")
    texts = texts_of(opened, "train") + texts_of(opened, "validation")
    assert sorted(texts) == sorted([*TEXTS[:7], "caf\ufffd", *TEXTS[8:]])


def test_a_table_without_any_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    with refused("a.jsonl, line 1: 'text' is of type int, not text: found 2 damaged lines or rows in 0 documents"):
        run([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (PreTrainedTokenizerFast, Exception("No space left on device (os error 28)")),  # as tokenizers raises it
        (PreTrainedTokenizerFast, OSError(errno.ENOSPC, "No space left on device")),
        (prepare, OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=["tokenizer", "its config", "shard"],
)
def test_a_full_disk(target, error, source, tmp_path, monkeypatch):
    name = "write_file" if target is prepare else "save_pretrained"
    monkeypatch.setattr(target, name, Mock(side_effect=error))
    with refused(f"out='{tmp_path / 'out'}' cannot be written: {error}"):
        run([source], tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.unfinished"))
    monkeypatch.setattr(target, name, Mock(side_effect=KeyError("a bug")))
    with pytest.raises(KeyError):
        run([source], tmp_path / "out")


# Tokenizers.


def test_tokenizer_is_like_robertas(prepared):
    opened = Corpus.open(prepared)
    tokenizer = opened.tokenizer()
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
    names = ["bos", "pad", "eos", "unk", "mask", "cls", "sep"]
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == [0, 1, 2, 3, 4, 0, 2]
    (a,), (b,) = (tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "ab")
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
    assert np.count_nonzero(ids == 2) == Corpus.open(prepared).manifest["splits"]["train"]["documents"]
    assert not np.isin(ids, [0, 1, 3, 4]).any()


def test_tokenizer_learns_from_each_file_and_not_from_held_out_text(tmp_path, monkeypatch):
    for name, word in (("a", "alpha"), ("b", "beta"), ("c", "gamma")):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{word} {number}" for number in range(50)])
    seen = []
    train = prepare.train_tokenizer

    def spy(texts, vocab_size):
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(prepare, "train_tokenizer", spy)
    run([tmp_path], tmp_path / "out", tokenizer_documents=100)
    held_out = set(texts_of(Corpus.open(tmp_path / "out"), "validation"))
    assert any(f"alpha {number}" in held_out for number in range(33))
    kept = [[f"{w} {n}" for n in range(50) if f"{w} {n}" not in held_out] for w in ("alpha", "beta", "gamma")]
    assert seen == kept[0][:33] + kept[1][:33] + kept[2][:34]

    seen.clear()
    monkeypatch.setattr(prepare, "TOKENIZER_CHARACTERS", 3 * 16)
    run([tmp_path], tmp_path / "short", tokenizer_documents=20)
    assert "".join(seen) == "".join("".join(part)[:16] for part in kept)


def test_existing_tokenizer(prepared, source, tmp_path, monkeypatch):
    tokenizer = Corpus.open(prepared).tokenizer()
    tokenizer("a b", truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(tmp_path / "own")
    run([source], tmp_path / "out", tokenizer=str(tmp_path / "own"), shard_tokens=1000)
    taken, trained = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "out", prepared))
    assert taken == trained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: types.SimpleNamespace(is_fast=False))
    with refused("tokenizer='x' has no tokenizer.json"):  # a slow one
        run([source], tmp_path / "slow", tokenizer="x")


def change_tokenizer(prepared, folder, *removed, **added):
    """A tokenizer with other settings."""
    own = Path(shutil.copytree(prepared / "tokenizer", folder / "own"))
    settings = json.loads((own / "tokenizer_config.json").read_text()) | added
    kept = {name: value for name, value in settings.items() if name not in removed}
    (own / "tokenizer_config.json").write_text(json.dumps(kept))
    return str(own)


@pytest.mark.parametrize("missing", ["pad", "eos", "mask"])
def test_tokenizer_without_a_special_token(missing, prepared, source, tmp_path):
    own = change_tokenizer(prepared, tmp_path, f"{missing}_token", *(["sep_token"] if missing == "eos" else []))
    with refused(f"tokenizer='{own}' has no {missing} token"):
        run([source], tmp_path / "out", tokenizer=own)
    assert not (tmp_path / "out").exists()


def test_tokenizer_like_berts_ends_documents_with_its_separator(prepared, source, tmp_path):
    names = ["input_ids", "token_type_ids", "attention_mask"]
    run(
        [source], tmp_path / "out", tokenizer=change_tokenizer(prepared, tmp_path, "eos_token", model_input_names=names)
    )
    opened = Corpus.open(tmp_path / "out")
    tokenizer, stream = opened.tokenizer(), opened.tokens("train")
    assert list(tokenizer("a text", "another")) == ["input_ids", "attention_mask"]
    assert tokenizer.eos_token == tokenizer.sep_token
    assert stream.read(len(stream) - 1, 1).tolist() == [tokenizer.eos_token_id]


# Memory and kills.


def fast_encode(documents, tokenizer_file, eos_token_id, dtype, workers):
    """As fast as reading, to measure memory on much text in little time."""
    for batch in prepare._batches(documents):
        yield [(split, np.frombuffer(item.encode(), np.uint8).astype(dtype)) for split, item in batch]


def megabytes(source, out, taken, leak, answer):
    """The memory that a run takes, in its own process."""
    prepare.encode = fast_encode
    if leak:
        batches = prepare._batches
        prepare._batches = lambda documents: iter(list(batches(documents)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run([source], out, tokenizer=taken, shard_tokens=2**20)
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def test_memory_does_not_grow_with_the_corpus(prepared, tmp_path):
    def measured(size, leak=False):
        rows = [text(0, 4000).replace("Document 0", f"Document {number}") for number in range(size)]
        source = write_jsonl(tmp_path / f"{size}.jsonl", rows)
        receiver, sender = CONTEXT.Pipe(duplex=False)
        arguments = (source, tmp_path / f"{size}-{leak}", str(prepared / "tokenizer"), leak, sender)
        CONTEXT.Process(target=megabytes, args=arguments).start()
        return receiver.recv()

    small = measured(300)  # 7 MB
    assert measured(2400) < small + 25
    assert measured(2400, leak=True) > small + 40  # the measurement detects leaks


def test_kill_before_a_file_gets_its_name(prepared, source, tmp_path, monkeypatch):
    """What is left is not a corpus and has no broken shard; the next run removes it."""
    shards, flush = len(list(prepared.glob("*.bin"))), files._flush
    before = 3 + len(list((prepared / "tokenizer").iterdir()))  # the tokenizer's files and folders come first
    for number in (1, before, before + 1, before + 4, before + shards, before + shards + 1):
        out, flushed = tmp_path / str(number), []

        def die(path, number=number, flushed=flushed):
            flush(path)
            flushed.append(path)
            if len(flushed) == number:
                raise KeyboardInterrupt

        monkeypatch.setattr(files, "_flush", die)
        with pytest.raises(KeyboardInterrupt):
            run([source], out, shard_tokens=1000)
        monkeypatch.setattr(files, "_flush", flush)
        left = {path.name for path in out.glob("*") if path.is_file()}
        complete = [name for name in left if name.endswith(".bin")]
        assert len(complete) == max(0, number - before - 1)
        assert (out / "tokenizer").exists() == (number >= before)
        assert all((out / name).read_bytes() == (prepared / name).read_bytes() for name in complete)
        assert any(name.endswith(".unfinished") for name in left) == (number > before)
        with refused("holds no corpus"):
            Corpus.open(out)
        run([source], out, shard_tokens=1000)
        assert contents(out) == contents(prepared)
    assert ".manifest.json.unfinished" in left


def test_only_files_of_a_killed_run_are_removed(prepared, source, tmp_path):
    killed = ("train-00077.bin", ".validation-00000.bin.unfinished", ".manifest.json.unfinished")
    for name in (*killed, "train-notes.bin", "notes.txt"):
        (tmp_path / name).write_text("left")
    for name in (".tokenizer.unfinished", ".tokenizer.removed.unfinished"):
        shutil.copytree(prepared / "tokenizer", tmp_path / name)
    run([source], tmp_path, shard_tokens=1000)
    assert contents(tmp_path) == contents(prepared) | {"train-notes.bin": b"left", "notes.txt": b"left"}


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.long)])
def test_random_kills(kills, prepared, source, tmp_path):
    """A killed run leaves a complete corpus or none, and the next run leaves what an undisturbed one does."""
    chance, killed, number = random.Random(0), 0, 0
    while killed < kills:
        number += 1
        out = tmp_path / str(number)
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        while killed < kills and not (out / "manifest.json").exists():
            (out / ".lock").unlink(missing_ok=True)
            child = CONTEXT.Process(target=run, args=([source], out), kwargs={"shard_tokens": 1000})
            child.start()
            # Its first file shows that it has started.
            while child.is_alive() and not (out / ".lock").exists():
                child.join(1e-3)
            child.join(chance.random() * 0.4)
            killed += child.is_alive()
            child.kill()
            child.join()
        if not (out / "manifest.json").exists():
            run([source], out, shard_tokens=1000)
        Corpus.open(out).verify()
        assert contents(out) == contents(prepared) | {"notes.txt": b"mine"}
        assert {path.name for path in out.iterdir()} == {path.name for path in prepared.iterdir()} | {"notes.txt"}


def test_the_command_imports_no_models(source, tmp_path):
    """They take twice the memory of its work."""
    code = """
import sys
from linformers_cli import main
try:
    main()
finally:
    print([name for name in ("linformers.modeling", "transformers.modeling_utils") if name in sys.modules])
"""
    command = [
        sys.executable,
        "-c",
        code,
        "prepare",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--vocab-size",
        "300",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "[]"


PEAK = """
import re, sys
from linformers_cli import main
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_of_the_command(tmp_path):
    """Of its only process, for `PREPARE_MEGABYTES` of text (1,000)."""
    draw, path, size = np.random.default_rng(0), tmp_path / "a.jsonl", 0
    words = ["".join(map(chr, 97 + draw.integers(26, size=draw.integers(2, 12)))) for _ in range(50_000)]
    with path.open("w") as file:
        while size < 1e6 * float(os.environ.get("PREPARE_MEGABYTES", "1000")):
            for ids in np.minimum(draw.zipf(1.2, size=(100, 300)), len(words)) - 1:
                size += file.write(json.dumps({"text": " ".join([words[i] for i in ids])}) + "\n")
    command = [sys.executable, "-c", PEAK, "prepare", str(path), "--out", str(tmp_path / "out")]
    errors = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    megabytes = int(errors.split()[-1]) * 1024 / 1e6
    print(f"{size / 1e6:.0f} MB of text: {megabytes:.0f} MB")
    assert megabytes < 600
