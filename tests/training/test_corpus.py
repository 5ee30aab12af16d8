"""Shards of tokens and their manifest: read as one stream, and damage is detected."""

import functools
import hashlib
import json
import operator
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from linformers.files import write_folder
from linformers.training import corpus, prepare
from linformers.training.corpus import Corpus, TokenStream, tokenizer_hash, write_manifest

from ..modes import refused
from .small import flip
from .texts import TEXTS, run


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
    for start, count in [(-1, 5), (0, 10**9), (5, -1)]:  # past the ends
        with refused(f"tokens {start} to {start + count} are out of range: there are {size}"):
            stream.read(start, count)


def test_few_maps_are_open_and_none_is_pickled(prepared, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_OPEN_SHARDS", 3)
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
    expected = {"format": 2, "dtype": "uint16", "vocab_size": 400, "eos_token_id": 2, "sources": [source]}
    expected |= {"validation_sources": [], "tokenizer": tokenizer_hash(prepared / "tokenizer")}
    assert {name: manifest[name] for name in expected} == expected
    for split in manifest["splits"].values():
        assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
        for shard in split["shards"]:
            data = (prepared / shard["file"]).read_bytes()
            assert (shard["bytes"], shard["tokens"]) == (len(data), len(data) // 2)
            assert shard["sha256"] == hashlib.sha256(data).hexdigest()
    named = [shard["file"] for split in manifest["splits"].values() for shard in split["shards"]]
    assert sorted(named) == sorted(path.name for path in prepared.glob("*.bin"))
    assert not list(prepared.glob(".*unfinished"))
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == len(TEXTS)


def test_a_large_vocabulary_takes_four_bytes(prepared, source, tmp_path, monkeypatch):
    assert np.iinfo(np.uint16).max == prepare.MAX_UINT16_VOCABULARY - 1
    monkeypatch.setattr(prepare, "MAX_UINT16_VOCABULARY", 399)
    manifest = run([source], tmp_path, shard_tokens=1000)
    assert manifest["dtype"] == "uint32"
    assert manifest["splits"]["train"]["shards"][0]["bytes"] == 4000
    opened = Corpus.open(tmp_path)
    opened.verify()
    for split in ("train", "validation"):
        narrow, wide = Corpus.open(prepared).tokens(split), opened.tokens(split)
        assert wide.read(0, 1).dtype == np.uint32
        np.testing.assert_array_equal(wide.read(0, len(wide)), narrow.read(0, len(narrow)))


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


def retokenize(path):
    """Another tokenizer, which is itself intact."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["another"])
    write_folder(path, tokenizer.save_pretrained)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00003.bin", lambda path: os.truncate(path, 1500), "train-00003.bin has 1500 bytes, expected 2000"),
        ("train-00003.bin", Path.unlink, "train-00003.bin is missing, expected 2000 bytes"),
        ("train-00003.bin", flip, "train-00003.bin has sha256"),
        ("train-00003.bin", lambda path: path.symlink_to(path.rename(path.with_name("a"))), "00003.bin is a link"),
        ("tokenizer/tokenizer_config.json", flip, "tokenizer_config.json has sha256"),
        ("tokenizer", retokenize, "tokenizer has the hash"),
    ],
    ids=["truncated", "missing", "flipped bit", "link", "flipped bit of the tokenizer", "another tokenizer"],
)
def test_damage_is_named(name, damage, message, copy):
    damage(copy / name)
    # Opening a corpus reads sizes alone.
    find = Corpus.open(copy).verify if damage in (flip, retokenize) else lambda: Corpus.open(copy)
    with refused(message):
        find()


def test_folders_that_are_no_corpus(copy, tmp_path):
    with refused(f"data='{tmp_path}' holds no corpus"):
        Corpus.open(tmp_path)
    for content, message in [("{", "is damaged"), ('{"format": 1}', "has format 1"), ("{}", "has format None")]:
        (copy / "manifest.json").write_text(content)
        with refused(f"manifest.json {message}"):
            Corpus.open(copy)


def test_any_changed_byte_of_the_manifest_is_found(copy):
    path = copy / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with refused("manifest.json "):
            Corpus.open(copy)
    for changed in (content + b" ", content[:-1], content.replace(b'"dtype"', b'"dtype" ')):
        path.write_bytes(changed)
        with refused("is damaged: its sha256 is not that of its content"):
            Corpus.open(copy)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("dtype", "object", "dtype is 'object', expected one of uint16, uint32"),
        ("dtype", "float16", "dtype is 'float16'"),
        ("dtype", ["uint16"], "dtype has a wrong value, expected str"),
        ("dtype", "uint32", "train-00000.bin has 1000 tokens in 2000 bytes, expected 4 each"),
        ("vocab_size", 0, "vocab_size is 0, expected 1 to 65536"),
        ("vocab_size", 2**16 + 1, "vocab_size is 65537"),
        ("eos_token_id", 400, "eos_token_id is 400, expected a token below 400"),
        ("eos_token_id", True, "eos_token_id has a wrong value, expected int"),
        ("eos_token_id", None, "it has wrong keys, expected format, dtype"),
        ("sources", [1], "sources[0] has a wrong value, expected str"),
        ("splits.train", None, "splits has wrong keys, expected train, validation"),
        ("splits.train.tokens", 10**9, "splits.train.tokens is 1000000000, expected the sum of its shards"),
        ("splits.train.documents", 0, "splits.train.documents is 0, expected 1 to"),
        ("splits.train.documents", -1, "splits.train.documents has a wrong value, expected int"),
        ("splits.train.shards", {}, "splits.train.shards has a wrong value, expected list"),
        ("splits.train.shards.0", None, "splits.train.tokens is"),
        ("splits.train.shards.0.tokens", 999.0, "splits.train.shards[0].tokens has a wrong value, expected int"),
        ("splits.train.shards.0.bytes", 1000, "train-00000.bin has 1000 tokens in 1000 bytes"),
        (
            "splits.train.shards.0.file",
            "../a.bin",
            "splits.train.shards[0].file is '../a.bin', expected",
        ),
        ("splits.train.shards.0.sha256", None, "splits.train.shards[0] has wrong keys, expected file, tokens"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(place, value, message, copy):
    """Even if its hash is right; `None` removes the key."""
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["sha256"]
    *outer, name = (int(part) if part.isdecimal() else part for part in place.split("."))
    table = functools.reduce(operator.getitem, outer, manifest)
    if value is None:
        del table[name]
    else:
        table[name] = value
    write_manifest(copy, manifest)
    with refused(f"manifest.json is damaged: {message}"):
        Corpus.open(copy)


def test_tokens_and_the_tokenizer_agree_with_the_manifest(copy):
    manifest = dict(Corpus.open(copy).manifest)
    write_manifest(copy, manifest | {"vocab_size": 300})
    with refused("expected tokens below vocab_size=300"):
        Corpus.open(copy).verify()
    for name, value in (("vocab_size", 401), ("eos_token_id", 3)):
        write_manifest(copy, manifest | {name: value})
        with refused(f"tokenizer has {name}={manifest[name]}, expected {value} as in manifest.json"):
            Corpus.open(copy).tokenizer()
