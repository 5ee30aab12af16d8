"""The scripts in benchmarks/."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer

from linformers_cli import run_script

from ..test_convert import original
from ..training.small import write_table
from ..training.test_adopt import source
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
