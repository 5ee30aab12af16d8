"""`linformers demo` in seconds."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import linformers
from linformers import LinformerConfig, LinformerModel, demo
from linformers_cli import app

SECONDS = {demo.LINFORMER: [0.25, 0.5], demo.TWIN: [0.125, 2.0]}  # of two lengths, instead of measured ones
LENGTHS = (64, 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with random weights, n = 64."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(linformers.pretrained(), model_max_length=64)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    size |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "projected_length": 8, "local_window": 4}
    torch.manual_seed(0)
    for part in (LinformerModel(LinformerConfig(**size)), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def quick(model, monkeypatch):
    """A few documents, a small model, and fixed times; returns the configs of the models that are timed."""
    files = demo.standard_library()[:60]
    monkeypatch.setattr(demo, "standard_library", lambda: files)
    monkeypatch.setattr(demo, "run", partial(demo.run, model=model, characters=(2000, 4000), lengths=LENGTHS))
    build, configs, times = demo.efficiency.build, [], {name: iter(own) for name, own in SECONDS.items()}
    monkeypatch.setattr(demo.efficiency, "build", lambda config: configs.append(config) or build(config))
    monkeypatch.setattr(demo.measure, "interleaved", lambda runs: {name: next(times[name]) for name in runs})
    monkeypatch.setenv("COLUMNS", "5000")  # which no passage fills
    return configs


def run_demo(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], catch_exceptions=False)


def test_search(quick, model, tmp_path):
    """What the demo finds is what `linformers.embed` and dot products find; old vectors are replaced."""
    (tmp_path / "vectors.parquet").write_text("of an earlier demo")
    result = run_demo("--out", tmp_path)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    documents = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    texts = {row["id"]: row["text"] for row in documents}
    assert len(texts) == len(documents) > 10
    assert {id.split(":")[0] for id in texts} == {"manual", "module"}
    assert all(2000 <= len(text) <= 4000 for text in texts.values())
    assert f"{len(texts)} vectors of {len(texts)} documents in {tmp_path / 'vectors.parquet'}\n" in result.output
    vectors = linformers.embed(texts.values(), model)
    best = [list(texts)[np.argmax(vectors @ query)] for query in linformers.embed(demo.QUERIES, model, prompt="query")]
    found = re.findall(r"^\$ linformers search \S+ '(.+)' --best 1\n1\. (.+)  -?[\d.]+\n   (.+)\n", result.output, re.M)
    assert [(query, id) for query, id, _ in found] == list(zip(demo.QUERIES, best, strict=True))
    for _, id, passage in found:
        assert passage.strip() in " ".join(texts[id].split())


def test_time(quick, model, tmp_path):
    output = run_demo("--out", tmp_path).output
    own, twin = quick
    assert (own.projection, own.local_window, twin.projection, twin.local_window) == ("linear", 4, "identity", 0)
    assert own.max_position_embeddings == 128  # the longest document to time
    same = {"projection": "", "local_window": 0}
    assert own.to_dict() | same == twin.to_dict() | same
    loaded = LinformerConfig.from_pretrained(model)
    assert (own.hidden_size, own.projected_length) == (loaded.hidden_size, loaded.projected_length)
    assert re.findall(r"│ (\d+) +│ ([\d.]+) s +│ ([\d.]+) s +│ ([\d.]+) +│", output) == [
        ("64", "0.250", "0.125", "0.50"),
        ("128", "0.500", "2.000", "4.00"),
    ]
    assert "128 tokens take 0.50 s; with full attention, 2.00 s, 4.0 times as long\n" in output
    assert f"The picture is {tmp_path / 'time.png'}\n" in output
    assert (tmp_path / "time.png").stat().st_size > 10_000
    assert "  linformers embed FOLDER --out vectors.parquet\n" in output


def test_without_matplotlib_there_is_a_sentence_and_the_table(quick, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run_demo("--out", tmp_path)
    assert result.exit_code == 0
    assert result.stderr == "No plot without matplotlib: pip install 'linformers[plots]'\n"
    assert "4.0 times as long" in result.stdout
    assert "picture" not in result.stdout
    assert not (tmp_path / "time.png").exists()


def test_each_pass_is_timed(model):
    """Real times; what they are is up to the machine."""
    points = demo.time_of_reading(LinformerConfig.from_pretrained(model), LENGTHS, demo.Console(quiet=True))
    assert {name: tuple(n for n, _ in values) for name, values in points.items()} == dict.fromkeys(SECONDS, LENGTHS)
    assert all(seconds > 0 for values in points.values() for _, seconds in values)


def test_every_python_has_a_few_hundred_documents():
    documents = {row["id"]: row["text"] for row in demo.python_documents(2_000, 20_000)}
    assert 100 < len(documents) < 1000
    assert "copytree: Recursively copy a directory tree" in documents["module: shutil"]
    assert "identifiers and keywords" in documents["manual: identifiers"].lower()


def test_documentation(tmp_path):
    path = Path(tmp_path, "birds.py")
    path.write_text(
        '"""All birds."""\nclass Duck:\n    def quack(self):\n        """Loudly."""\n    def fly(self): 0\n'
        'async def nest():\n    """Build.\n\n    Then wait.\n    """\n'
    )
    assert demo.documentation(path) == "birds: All birds.\n\nquack: Loudly.\n\nnest: Build.\n\nThen wait."


def test_steps_are_for_pretraining():
    result = run_demo("--steps", 3)
    assert result.exit_code == 2
    assert "3 has no effect without --pretrain" in result.stderr


# `linformers demo --pretrain`


@pytest.fixture
def small(monkeypatch):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    constants = {"LENGTHS": (64, 128), "TOKENS": 256, "PROJECTED": 16, "TRAIN_LENGTH": 64, "VOCABULARY": 400}
    for name, value in {**constants, "SIZE": size}.items():
        monkeypatch.setattr(demo, name, value)
    files = demo.standard_library()[:60]
    monkeypatch.setattr(demo, "standard_library", lambda: files)


def test_pretraining(small, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = run_demo("--pretrain", "--steps", 3, "--out", tmp_path)
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
    assert f"linformers demo --pretrain --steps 30 --out {tmp_path}" in text

    names = ("linformer-3", "linformer-with-a-window-3", "transformer-3")
    own, local, twin = (json.loads((tmp_path / name / "run.json").read_text())["recipe"] for name in names)
    assert own["model"] | {"local_window": 8} == local["model"]
    assert own["model"] | {"projection": "identity"} == twin["model"]
    assert {**own, "out": "", "model": {}} == {**twin, "out": "", "model": {}} == {**local, "out": "", "model": {}}


def test_a_run_that_a_signal_stopped_ends_the_demo(small, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.efficiency, "compare", lambda *arguments, **options: [])
    monkeypatch.setattr(demo, "prepare", lambda *arguments, **options: None)
    monkeypatch.setattr(demo, "pretrain", lambda *arguments, **options: 143)
    result = run_demo("--pretrain", "--steps", 3, "--out", tmp_path)
    assert result.exit_code == 143
