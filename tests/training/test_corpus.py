"""Shards of tokens and their manifest: read as one stream, and damage is detected."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from linformers.training import corpus, prepare
from linformers.training.corpus import Corpus, TokenStream, tokenizer_hash

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
    expected = {"format": 1, "dtype": "uint16", "vocab_size": 400, "eos_token_id": 2, "sources": [source]}
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
    path.write_text(path.read_text().replace('"lstrip": true', '"lstrip": false'))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00003.bin", lambda path: os.truncate(path, 1500), "train-00003.bin has 1500 bytes, expected 2000"),
        ("train-00003.bin", Path.unlink, "train-00003.bin is missing, expected 2000 bytes"),
        ("train-00003.bin", flip, "train-00003.bin has sha256"),
        ("tokenizer/tokenizer.json", retokenize, "tokenizer has the hash"),
    ],
    ids=["truncated", "missing", "flipped bit", "another tokenizer"],
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
    for content, message in [("{", "is damaged"), ('{"format": 2}', "has format 2"), ("[]", "has format None")]:
        (copy / "manifest.json").write_text(content)
        with refused(f"manifest.json {message}"):
            Corpus.open(copy)
