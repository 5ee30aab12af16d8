"""`linformers demo` in seconds."""

import json
import re

import pytest
from typer.testing import CliRunner

from linformers import demo
from linformers_cli import app


@pytest.fixture
def small(monkeypatch):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    constants = {"LENGTHS": (64, 128), "TOKENS": 256, "PROJECTED": 16, "TRAIN_LENGTH": 64, "VOCABULARY": 400}
    for name, value in {**constants, "SIZE": size}.items():
        monkeypatch.setattr(demo, name, value)
    files = demo.standard_library()[:60]
    monkeypatch.setattr(demo, "standard_library", lambda: files)


def test_demo(small, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("cost", "training"))
    text = result.output
    assert "\x1b" not in text
    table = {row[0]: row[1:] for row in re.findall(r"│ (\w[\w ]+?) +│ ([\d.]+) +│ ([\d,]*) +│", text)}
    assert table.keys() == {*demo.MODELS, "without context"}
    assert 100 < float(table["Linformer"][0]) < 1000
    assert f"echo '{demo.SENTENCE}' | linformers predict\n" in text
    behind = any(float(table[name][0]) > float(table["without context"][0]) for name in demo.MODELS)
    assert ("3 steps are too few" in text) == behind
    assert f"linformers demo --steps 30 --out {tmp_path}" in text

    names = ("linformer-3", "linformer-with-a-window-3", "transformer-3")
    own, local, twin = (json.loads((tmp_path / name / "run.json").read_text())["recipe"] for name in names)
    assert own["model"] | {"local_window": 8} == local["model"]
    assert own["model"] | {"projection": "identity"} == twin["model"]
    assert {**own, "out": "", "model": {}} == {**twin, "out": "", "model": {}} == {**local, "out": "", "model": {}}


def test_a_run_that_a_signal_stopped_ends_the_demo(small, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "compare", lambda *arguments, **options: [])
    monkeypatch.setattr(demo, "prepare", lambda *arguments, **options: None)
    monkeypatch.setattr(demo, "pretrain", lambda *arguments, **options: 143)
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 143
