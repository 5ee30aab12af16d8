"""Tokenizers, trained and taken, and batches of text that are encoded in order."""

import json
import os
import shutil
import types
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from linformers.training import prepare, tokenizer
from linformers.training.corpus import Corpus

from .texts import TEXTS, contents, run, texts_of, write_jsonl


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


def test_the_tokenizer_learns_from_each_file_and_not_from_what_is_held_out(tmp_path, monkeypatch):
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
    for name in ("eos", "sep") if missing == "eos" else (missing,):
        del settings[f"{name}_token"]
    (own / config.name).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"has no {missing} token; it needs pad, eos and mask tokens"):
        run([source], tmp_path / "out", tokenizer=str(own))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_like_berts_ends_documents_with_its_separator(prepared, source, tmp_path):
    config = prepared / "tokenizer" / "tokenizer_config.json"
    own = Path(shutil.copytree(prepared / "tokenizer", tmp_path / "own"))
    settings = json.loads(config.read_text())
    del settings["eos_token"]
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (own / config.name).write_text(json.dumps(settings))
    run([source], tmp_path / "out", tokenizer=str(own))
    corpus = Corpus.open(tmp_path / "out")
    assert list(corpus.tokenizer()("a text", "another")) == ["input_ids", "attention_mask"]  # all that is trained with
    assert corpus.tokenizer().eos_token == settings["sep_token"]
    stream = corpus.tokens("train")
    assert stream.read(len(stream) - 1, 1).tolist() == [corpus.tokenizer().eos_token_id]


def test_a_slow_tokenizer_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: types.SimpleNamespace(is_fast=False))
    with pytest.raises(ValueError, match=r"tokenizer='x' has no tokenizer\.json"):
        run([source], tmp_path / "out", tokenizer="x")


def test_a_rerun_is_the_same_whatever_the_workers(prepared, source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 1000)
    run([source], tmp_path / "again", shard_tokens=1000)
    run([source], tmp_path / "two", shard_tokens=1000, workers=2)
    assert contents(prepared) == contents(tmp_path / "again") == contents(tmp_path / "two")


def test_processes_start_only_where_they_pay(source, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("a pool was asked for")

    monkeypatch.setattr(tokenizer, "ProcessPoolExecutor", refuse)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    run([source], tmp_path / "small", workers=None)
    monkeypatch.setattr(prepare, "SMALL", 0)
    with pytest.raises(RuntimeError, match="a pool was asked for"):
        run([source], tmp_path / "large", workers=None)


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
    for batch, result in tokenizer._in_order(submit, batches(), 6):
        assert batch == result
        under_way -= 1
        results.append(result)
    assert results == list(range(100))
    assert most == 6
