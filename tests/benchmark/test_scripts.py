"""The scripts in benchmarks/."""

import importlib
import json
import math
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer

from linformers import LinformerConfig, LinformerModel
from linformers.convert import from_pretrained
from linformers_cli import run_script

from ..test_convert import original
from ..training.small import write_table
from ..training.test_adopt import source, tokenizer
from .test_efficiency import out_of_memory


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def run(monkeypatch):
    """Run a script with arguments; returns the exit code."""

    def run_benchmark(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_script(lambda: typer.run(importlib.import_module(name).main))
        return ended.value.code

    return run_benchmark


def measure_peers(task="inference"):
    import peers

    return peers.measure(peers.peers(128, 16, 1, 64), 128, 2, 64, task, lambda name: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["inference", "training"])
def test_peers(task, monkeypatch):
    import peers

    cells = {cell["model"]: cell for cell in measure_peers(task)}
    assert {"linformers", "ModernBERT", "Longformer", "BigBird", "Nyströmformer"} <= cells.keys()
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 for cell in cells.values())
    monkeypatch.setattr(peers, "interleaved", lambda runs: {"linformers": 1.0})  # the others ran out of memory
    ran_out = measure_peers(task)
    assert {c["failure"] for c in ran_out if c["model"] != "linformers"} == {"out of memory"}
    assert len(peers.table_of(ran_out).rows) == len(ran_out) == len(cells)
    monkeypatch.setattr(peers.Embedded, "__init__", lambda *arguments: 1 / 0)
    failures = {cell["model"]: cell["failure"] for cell in measure_peers(task)}
    assert failures["BigBird"] == "ZeroDivisionError: division by zero"


def test_peers_write_a_record_with_versions(monkeypatch, tmp_path, run):
    import peers

    cell = {"model": "linformers", "n": 64, "task": "inference", "batch": 1, "peak_bytes": 1, "failure": None}
    measured = [{**cell, "seconds": 1.0}]
    monkeypatch.setattr(peers, "measure", Mock(side_effect=[measured, KeyboardInterrupt]))
    monkeypatch.setattr(peers.importlib.metadata, "version", {"linformer": "1.2"}.__getitem__)
    monkeypatch.setattr(peers.importlib.metadata, "PackageNotFoundError", KeyError)
    assert run("peers", "--lengths", 64, "--projected", 16, "--name", "mine", "--out", tmp_path) == 130
    record = json.loads((tmp_path / "mine.json").read_text())
    assert record["linformer"] == "1.2"
    assert "linformer-pytorch" not in record
    assert len(record["cells"]) == 1


def test_attention(tmp_path, run):
    options = "--lengths 64,128 --projected 16,32 --tokens 128 --heads 2 --channels 16 --out"
    assert run("attention", *options.split(), tmp_path) == 0
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {(cell["n"], cell["k"]) for cell in record["cells"]} == {(64, 16), (64, 32), (128, 16), (128, 32)}
    assert all(cell["forward"] > 0 for cell in record["cells"] if "failure" not in cell)


@pytest.mark.parametrize("place", ["torch.randn", "attention.captured"])
def test_attention_that_does_not_fit(place, monkeypatch):
    import attention

    monkeypatch.setattr(place, out_of_memory)
    cells = attention.measure(64, 16, 64, 2, 16)
    assert {cell["failure"] for cell in cells} == {"out of memory"}
    assert set(attention.tables(cells)[0].columns[2].cells) == {"out of memory"}


def test_attention_is_compared_with_the_best_backend():
    import attention

    def cell(model, **values):
        return {"model": model, "n": 64, "k": 16, "backward": 1.0, **values}

    cells = [cell(attention.DISPATCH, forward=2.0), cell("SDPA, cuDNN", forward=3.0), cell("SDPA, flash", forward=1.0)]
    cells.append({"model": "SDPA, memory-efficient", "n": 64, "k": 16, "failure": "not supported"})
    (forward, _) = attention.tables(cells)
    assert list(forward.columns[2].cells) == ["2000.000 (0.50×)", "3000.000", "1000.000", "–"]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("peers", "--task train", "task='train' is not one of 'inference', 'training'"),
        ("peers", "--only bert", "only='bert'"),
        ("peers", "--projected 256 --lengths 512,128", "projected=256 must be below lengths=128"),
        ("peers", "--lengths 128,a", "128,a"),
        ("peers", "--out FILE/x", "FILE/x"),
        ("attention", "--heads 0", "--heads"),
    ],
)
def test_mistakes(script, arguments, message, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert run(script, "--out", tmp_path, *arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_conversion(tmp_path, run, monkeypatch):
    import conversion

    monkeypatch.setattr(conversion, "STARTS", {name: conversion.STARTS[name] for name in list(conversion.STARTS)[:2]})
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    model, out = source(tmp_path / "in"), tmp_path / "out"
    assert run("conversion", model, "--text", tmp_path / "text.txt", "--passages", 4, "--out", out) == 0
    record = json.loads((out / "starts.json").read_text())
    first, second = list(conversion.STARTS)
    assert list(record["rows"]) == [first, f"{first}, without projected", f"{first}, without window", second]
    assert all(-1 <= value <= 1 for row in record["rows"].values() for value in row.values())
    assert {"command", "commit", "torch", "device"} <= record.keys()


def test_distillation(tmp_path, run, capsys):
    model, out = source(tmp_path / "in"), tmp_path / "out"
    random, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    for name in ("train", "test"):
        rows = [{"text": "".join(random.choice(letters, size=20 + i))} for i in range(30)]
        write_table(tmp_path / f"{name}.jsonl", rows)
    files = ["--text", tmp_path / "train.jsonl", "--held-out", tmp_path / "test.jsonl"]
    shape = ["--length", 64, "--projected", 8, "--window", 4, "--steps", 4, "--passages", 5, "--out", out]
    recipe = ["--recipe", "all", "--recipe", "short=0.5,projection_scale=2,batch_size=2"]
    assert run("distillation", model, *files, *shape, *recipe) == 0
    record = json.loads((out / "recipes.json").read_text())
    assert list(record["rows"]) == ["copied", "all", recipe[3]]
    for row in record["rows"].values():
        for part in (row, row["without projected"], row["without window"]):
            for name in ("25 tokens", "up to 25 tokens"):
                assert all(-1 <= value <= 1 for value in part[name].values())
    copied, trained = record["rows"]["copied"], record["rows"]["all"]
    assert copied["25 tokens"] != trained["25 tokens"]
    assert {"command", "commit", "torch", "device"} <= record.keys()
    assert run("distillation", model, *files, *shape, *recipe, "--recipe", "cosine") == 0
    again = json.loads((out / "recipes.json").read_text())["rows"]
    assert again["all"] == trained
    assert list(again) == ["copied", "all", recipe[3], "cosine"]
    assert run("distillation", model, *files, *shape, "--recipe", "speed=1") == 2
    assert "recipe='speed=1' is not one of hidden states" in capsys.readouterr().err


def test_speed_of_embedding(tmp_path, run, capsys):
    import embedding

    encoder = tmp_path / "encoder"
    config = LinformerConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                             intermediate_size=16, max_position_embeddings=32, projected_length=4)  # fmt: skip
    LinformerModel(config).save_pretrained(encoder)
    letters = tokenizer()
    letters.model_max_length = 32
    letters.save_pretrained(encoder)
    write_table(tmp_path / "texts.jsonl", [{"text": "abc " * length} for length in (1, 9, 40, 3)])
    arguments = [encoder, "--text", tmp_path / "texts.jsonl", "--length", 40, "--seconds", 0.1, "--out", tmp_path]
    assert run("embedding", *arguments, "--documents", 3, "--rounds", 2) == 0
    record = json.loads((tmp_path / "embedding.json").read_text())
    ready, embedded = (np.median(values) for values in record["tokens_per_second"].values())
    assert all(len(values) == 2 for values in record["tokens_per_second"].values())
    assert record["share"] == pytest.approx(embedded / ready)
    assert run("embedding", *arguments, "--documents", 4) == 2  # one is too long
    assert "documents=1 more" in capsys.readouterr().err
    network = Mock(side_effect=lambda input_ids: Mock(last_hidden_state=torch.zeros(input_ids.shape)))
    network.config.vocab_size = 99
    model = Mock(network=network, batch_tokens=64, device="cpu")
    model.encoder.max_length = 30
    assert embedding.ready_speed(model, 0.05) > 0
    assert network.call_args.kwargs["input_ids"].shape == (2, 30)  # rows of full length


def test_embed():
    """Rows of different lengths in any order, in several batches, as each of them alone."""
    from benchmarks import vectors

    from linformers import pooling

    network, rows = original("bert", pad_token_id=0), [list(range(3, 3 + size)) for size in (5, 1, 20, 9, 25)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "TOKENS", 30)
        found = vectors.embed(network, rows, pooling.mean_of_real_tokens)
    for row, vector in zip(rows, found, strict=True):
        states = network(torch.tensor([row])).last_hidden_state
        expected = torch.nn.functional.normalize(states.mean(1), dim=-1)[0]
        torch.testing.assert_close(vector, expected.detach(), rtol=0, atol=1e-5)


@pytest.fixture
def documents_data(tmp_path):
    """Articles and labeled papers of a few letters, whose tokens are letters."""
    random, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    articles = []
    for i in range(9):
        own = random.choice(letters, size=5)
        text = "".join(random.choice(own, size=30 + 6 * i))
        articles.append({"title": "".join(own), "text": text})
    papers = []
    for i in range(36):
        own = ["abcd", "efgh", "ijkl"][i % 3]
        papers.append({"text": " ".join(random.choice(list(own), size=40)), "label": i % 3})
    (tmp_path / "wiki").mkdir()
    for shard in (0, 1):
        write_table(tmp_path / "wiki" / f"train-{shard:02d}.parquet", articles if shard else articles[:2])
    (tmp_path / "papers").mkdir()
    for split, part in (("train", papers[:24]), ("validation", papers[24:30]), ("test", papers[30:])):
        write_table(tmp_path / "papers" / f"{split}.parquet", part)
    model = source(tmp_path / "in")
    converted = from_pretrained(str(model), length=64, projected_length=8, local_window=4)
    converted.save_pretrained(tmp_path / "copied")
    return model, ["--data", tmp_path, "--model", f"copied={tmp_path / 'copied'}", "--length", 64]


def test_retrieval_of_documents(documents_data, run, tmp_path, monkeypatch):
    from benchmarks import documents

    model, options = documents_data
    for name, value in {"ARTICLES": 6, "LEAST": 40, "LATE": 20, "SPAN": 10}.items():
        monkeypatch.setattr(documents, name, value)
    monkeypatch.setitem(sys.modules, "documents", documents)
    assert run("documents", "retrieval", model, *options, "--out", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "retrieval.json").read_text())
    names = ["original, 25 tokens", "original, mean of chunks", "original, best chunk", "copied"]
    names += ["copied, without projected", "copied, without window", "BM25"]
    assert list(record["rows"]) == names
    assert (record["shard"], record["articles"]) == ("train-01.parquet", 6)
    for row in record["rows"].values():
        for kind in ("title", "span", "late span"):
            assert 0 <= row[kind]["recall@1"] <= row[kind]["recall@10"] == 1
            difference = row[kind]["difference"]
            assert -1 <= difference["low"] <= difference["mean"] <= difference["high"] <= 1
    assert record["rows"]["original, mean of chunks"]["span"]["difference"] == {"mean": 0, "low": 0, "high": 0}
    monkeypatch.setattr(documents, "LEAST", 10_000)
    assert run("documents", "retrieval", model, *options, "--out", tmp_path / "out") == 2


def test_classification_of_documents(documents_data, run, tmp_path, monkeypatch):
    from benchmarks import classification

    model, options = documents_data
    monkeypatch.setattr(classification, "RATES", (3e-3, 1e-9))
    monkeypatch.setattr(classification, "EPOCHS", {"papers": 30})
    arguments = ["classification", model, *options, "--seeds", 2, "--out", tmp_path / "out"]
    assert run("documents", *arguments) == 0
    path = tmp_path / "out" / "papers.json"
    record = json.loads(path.read_text())
    rows = ["original, 25 tokens", "original, mean of chunks", "copied"]
    assert set(record["summary"]) == {"TF-IDF", *rows, *(f"{name}, frozen" for name in rows)}
    for name in rows:
        assert record["summary"][name]["rate"] == 3e-3  # the other one learns nothing
        assert len(record["summary"][name]["test"]) == 2
        assert min(record["summary"][name]["test"]) > 0.8
    assert {"test without projected", "test without window"} < record["summary"]["copied"].keys()
    monkeypatch.setattr(classification, "finetune", None)  # nothing is repeated
    assert run("documents", *arguments) == 0
    assert json.loads(path.read_text()) == record
    assert run("documents", "classification", model, *options, "--task", "sst2", "--out", tmp_path / "out") == 2


def test_ties_count_as_losses_and_intervals_are_paired():
    from benchmarks import documents

    scores = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 1.0, 2.0]])
    assert documents.ranks_of(scores).tolist() == [2, 1, 0]
    chunks = documents.best_chunk(torch.tensor([[1.0, 5.0, 2.0, 3.0]]), torch.tensor([0, 0, 1, 1]), 2)
    assert chunks.tolist() == [[5.0, 3.0]]
    differences = torch.tensor([1.0] * 30 + [0.0] * 60 + [-1.0] * 10)
    interval = documents.paired_interval(differences)
    error = 1.96 * (0.4 - 0.2**2) ** 0.5 / 10  # of a mean of 100, by the normal approximation
    assert interval == pytest.approx({"mean": 0.2, "low": 0.2 - error, "high": 0.2 + error}, abs=0.02)


def test_bm25():
    from benchmarks import bags_of_words

    documents = ["the cat sat", "The dog, the dog!", "a bird"]
    scores = bags_of_words.bm25(documents, ["cat", "dog the", "fish"])
    assert scores.argmax(1).tolist()[:2] == [0, 1]
    assert scores[2].tolist() == [0, 0, 0]
    length = 3 / 3  # of the first document, relative to the mean
    expected = math.log(1 + 2.5 / 1.5) * 2.2 / (1 + 1.2 * (0.25 + 0.75 * length))
    assert scores[0, 0].item() == pytest.approx(expected)


def test_logistic_regression_on_tf_idf():
    """The weights minimize the loss: its gradient is 0."""
    from benchmarks import bags_of_words

    texts = [f"{word} {other} end" for word in ("good", "bad") for other in ("film", "book", "song") * 4]
    labels = torch.tensor([0] * 12 + [1] * 12)
    train, test = bags_of_words.tf_idf([texts, ["good unseen words", "a bad film"]])
    torch.testing.assert_close(torch.linalg.vector_norm(train.to_dense(), dim=1), torch.ones(24))
    weights, biases = bags_of_words.fit(train, labels, 1e-2)
    weights.requires_grad_()
    loss = torch.nn.functional.cross_entropy(train @ weights + biases, labels) + 1e-2 / 2 * weights.square().sum()
    assert torch.autograd.grad(loss, weights)[0].abs().max() < 1e-4
    predictions, _ = bags_of_words.logistic_regression([train, train, test], [labels, labels])
    assert predictions.tolist() == [0, 1]
