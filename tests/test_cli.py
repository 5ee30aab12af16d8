"""The command line: what it writes, and how it answers a mistake."""

import json
import sys
from importlib.metadata import version

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformers import cli, demo
from linformers.benchmark.efficiency import interleaved, peak_memory
from linformers.cli import app


@pytest.fixture
def small(monkeypatch):
    """A demo of seconds."""
    monkeypatch.setattr(demo, "LENGTHS", (64, 128))
    monkeypatch.setattr(demo, "TOKENS", 256)
    monkeypatch.setattr(demo, "PROJECTED", 16)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setattr(demo, "SIZE", size)
    monkeypatch.setattr(cli, "console", Console(width=100))


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.split() == ["linformers", version("linformers")]


def test_demo(small, tmp_path, capsys):
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_bench(tmp_path):
    arguments = ["--lengths", "64,128", "--projected", "16,32", "--tokens", "256", "--layers", "2", "--hidden", "64"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "efficiency.json").read_text())
    assert {"command", "commit", "device", "torch", "transformers"} <= record.keys()
    assert [(cell["n"], cell["k"]) for cell in record["lengths"]] == [
        (n, k) for n in (64, 128) for k in (None, None, 16, 32)
    ]
    assert len(record["projected_lengths"]) == 4
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 for cell in record["lengths"])
    assert (tmp_path / "efficiency.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--lengths", "64,x"], "lengths='64,x' must be positive whole numbers separated by commas"),
        (["bench", "--lengths", "512", "--tokens", "256"], "lengths=512 does not divide tokens=256"),
        (["bench", "--lengths", "[a]"], "lengths='[a]' must be positive whole numbers"),
        (["bench", "--lengths", "64", "--projected", "64"], "projected=64 leaves nothing to measure"),
        (["bench", "--layers", "0"], "layers=0 must be a positive integer"),
        (["bench", "--hidden", "100"], "hidden=100 must be a multiple of 64"),
        (["bench", "--lengths", "-5"], "lengths='-5' must be positive whole numbers"),
        (["bench", "--out", __file__], "is no folder that can be written to: File exists"),
        (["demo", "--steps", "0"], "steps=0 must be at least 1"),
        (["demo", "--out", __file__], "is no folder that can be written to: File exists"),
    ],
)
def test_mistakes_end_in_one_sentence(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["linformers", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


def test_peak_memory_counts_what_lives_at_once():
    x = torch.ones(1000, 1000)  # 4 MB

    def run():
        a = x + 1  # 4 MB
        b = a + 1  # 8 MB
        del a
        return torch.cat([b, b, b]).sum()  # 4 + 12 MB

    assert peak_memory(run, "cpu") == pytest.approx(16e6, rel=0.01)


def test_timing_is_of_the_right_function():
    import time

    times = interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, min_seconds=0.05)
    assert times["slow"] >= 0.02
    assert times["fast"] < times["slow"]


def test_masked_bytes():
    text = demo.standard_library(100_000)
    rows = demo.MaskedBytes(text, 50)
    row, again = rows[7], rows[7]
    assert all(torch.equal(row[name], again[name]) for name in row)
    ids, labels = (torch.stack([rows[i][name] for i in range(50)]) for name in ("input_ids", "labels"))
    chosen = labels != -100
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (ids[chosen] == demo.MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    kept = ids[chosen] == labels[chosen]
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.03)
    assert ((ids >= demo.FIRST_BYTE) & (ids <= demo.MASK)).all()
    assert (ids[~chosen] != demo.MASK).all()
