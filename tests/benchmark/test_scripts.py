"""The scripts in benchmarks/."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from linformers_cli import run_script

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
