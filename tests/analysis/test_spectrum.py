"""The spectrum of P: exact, streaming, resumable, and for any encoder with full attention."""

import io
import json
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

from linformers.analysis import attentions, spectrum
from linformers.errors import UserError

from .conftest import encoder, tokenizer

N = 24
DEFAULTS = {"length": N, "sentences": 4, "at": 8, "seed": 0, "text_column": "text", "workers": None, "command": "test"}


def run(model, text, out, console=None, **options):
    console = console or Console(file=io.StringIO(), width=100)
    return spectrum.run(model, [text], out=out, console=console, **{**DEFAULTS, **options})


@pytest.mark.parametrize("shape", [(3, 2, 50, 50), (40, 30), (30, 40), (300, 300)])
def test_singular_values_are_those_of_numpy(shape):
    matrices = (4 * torch.randn(shape)).softmax(-1)
    matrices[..., -5:, :] = matrices[..., :5, :]  # some are 0
    expected = np.linalg.svd(matrices.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(spectrum.singular_values(matrices), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "distilbert", "twin"])
def test_any_encoder(kind, folder):
    """The matrices that are watched are those that the model returns as its attentions."""
    model, _ = attentions.load_encoder(folder(kind))
    ids = torch.randint(4, 90, (5, N))
    result = spectrum.measure(model, ids, workers=2)
    with torch.no_grad():
        returned = torch.stack(model(ids, output_attentions=True).attentions)  # (layers, b, h, n, n)
    values = np.linalg.svd(returned.double().numpy(), compute_uv=False)
    shares, energy = (own.cumsum(-1) / own.sum(-1, keepdims=True) for own in (values, values**2))
    assert result.sentences == 5
    np.testing.assert_allclose(result.values, values.mean(1), atol=1e-5)
    np.testing.assert_allclose(result.cumulative, shares.mean(1), atol=1e-5)
    np.testing.assert_allclose(result.cumulative_std, shares.std(1, ddof=1), atol=1e-5)
    np.testing.assert_allclose(result.energy, energy.mean(1), atol=1e-5)
    assert result.cumulative.std() > 0.01


def test_an_interrupted_measurement_resumes(folder, tmp_path):
    model, _ = attentions.load_encoder(folder("bert"))
    ids = torch.randint(4, 90, (6, N))
    whole, state, seen = spectrum.measure(model, ids), tmp_path / "state.npz", []
    with pytest.raises(KeyboardInterrupt):
        spectrum.measure(model, ids, state_file=state, on_passage=Mock(side_effect=[0, 1, 2, KeyboardInterrupt]))
    result = spectrum.measure(model, ids, state_file=state, on_passage=seen.append)
    assert seen == [3, 4, 5, 6]
    for name in ("values", "cumulative", "cumulative_std", "energy"):
        np.testing.assert_array_equal(getattr(result, name), getattr(whole, name))
    fewer = spectrum.measure(model, ids[:5], state_file=state)
    assert fewer.sentences == 6  # all that were measured
    np.testing.assert_array_equal(fewer.energy, whole.energy)
    more = torch.cat([ids, torch.randint(4, 90, (2, N))])
    grown = spectrum.measure(model, more, state_file=state)
    np.testing.assert_array_equal(grown.energy, spectrum.measure(model, more).energy)
    other, _ = attentions.load_encoder(folder("roberta"))
    for their_model, their_ids in ((model, more.flip(0)), (model, more[:, :-1]), (other, more)):
        with pytest.raises(UserError, match=r"state\.npz has another model, text, length or seed"):
            spectrum.measure(their_model, their_ids, state_file=state)


@pytest.mark.parametrize("junk", [b"", b"no arrays", b"PK\x03\x04 no arrays"])
def test_a_damaged_state_is_named(junk, tmp_path):
    (tmp_path / "state.npz").write_bytes(junk)
    with pytest.raises(UserError, match=r"state\.npz is not the state of a measurement"):
        spectrum.load_state(tmp_path / "state.npz", "", np.zeros((1, N)))


def test_sigterm_in_the_middle_of_a_passage(folder, text, tmp_path, monkeypatch):
    model, console, add, added = folder("bert"), Console(file=io.StringIO(), width=100), spectrum.Moments.add, []
    whole = run(model, text, tmp_path / "whole")

    def stop(moments, sample):
        added.append(1)
        if len(added) == 3:
            signal.raise_signal(signal.SIGTERM)
        return add(moments, sample)

    monkeypatch.setattr(spectrum.Moments, "add", stop)
    with pytest.raises(SystemExit, match="143"):
        run(model, text, tmp_path / "out", console)
    assert "Stopped after 2 passages; run again to resume" in console.file.getvalue()
    result = run(model, text, tmp_path / "out")
    assert len(added) == 3 + 2
    np.testing.assert_array_equal(result.values, whole.values)


def test_passages(text, monkeypatch):
    own = tokenizer()
    ids = attentions.passages([text], own, N, 20)
    assert ids.shape == (20, N)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    for texts in ([text], text, Path(text)):  # one file needs no list
        assert torch.equal(ids, attentions.passages(texts, own, N, 20))
    assert not torch.equal(ids, attentions.passages([text], own, N, 20, seed=1))
    for pool in (attentions.POOL_TOKENS, 4 * N):  # all at once, and four at a time
        monkeypatch.setattr(attentions, "POOL_TOKENS", pool)
        many = attentions.passages([text], own, N, 20)
        for count in (1, 3, 9):
            assert torch.equal(attentions.passages([text], own, N, count), many[:count])
        assert len(many.unique(dim=0)) == 20
    own.model_max_length = 300
    with pytest.raises(UserError, match="length=300 is too long for these texts"):
        attentions.passages([text], own, 300, 20)


def test_run_writes_the_record_and_the_figure(folder, text, tmp_path):
    console = Console(file=io.StringIO(), width=300)
    result = run(folder("bert"), text, tmp_path, console, sentences=6)
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert {"command", "commit", "device", "torch", "model", "texts"} <= record.keys()
    assert (record["n"], record["at"], record["sentences"]) == (N, 8, 6)
    np.testing.assert_allclose(record["cumulative"], result.cumulative, atol=5.1e-5)
    for name in ("cumulative", "cumulative_std", "energy"):
        np.testing.assert_allclose(record[f"{name}_at"], getattr(result, name)[:, :, 7])
        np.testing.assert_allclose(record[f"{name}_by_layer"], getattr(result, name).mean(1), atol=1e-6)
    assert f"{result.cumulative[:, :, 7].mean():.3f} of their sum" in console.file.getvalue()
    assert (tmp_path / "spectrum.png").stat().st_size > 1000


def test_defaults_without_matplotlib(folder, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(folder("bert"), text, tmp_path, length=None, at=None)  # this model accepts 32 tokens
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert (record["n"], record["at"]) == (32, 8)
    assert "pip install 'linformers[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "spectrum.png").exists()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("linformer", {}, "is a Linformer"),
        ("gpt2", {}, "is causal"),
        ("modernbert", {}, "has layers with a sliding window"),
        ("t5", {}, "is an encoder-decoder"),
        ("bert", {"length": 33}, "length=33 exceeds the 32 tokens"),
        ("bert", {"at": 24}, "at=24 must be below length=24"),
        ("bert", {"length": 31, "text": "short.txt"}, "length=31 is too long for these texts"),
        ("bert", {"text": "none.txt"}, "'none.txt' does not exist"),
        ("bert", {"length": 2, "at": None}, "length=2 leaves no room"),
        ("bert", {"workers": 0}, "workers=0 must be a positive integer"),
    ],
)
def test_wrong_input_is_named(kind, options, message, folder, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    with pytest.raises(UserError, match=message):
        run(folder(kind), options.pop("text", text), tmp_path / "out", **options)


def test_folders_that_are_no_encoder(folder, tmp_path):
    def refused(name, message):
        with pytest.raises(UserError, match=f"model='{name}'{message}"):
            attentions.load_encoder(str(name))

    refused("no/such/folder", " is not a folder")
    refused("./nothing", " is not a folder")
    own = Path(folder("bert"))
    (tmp_path / "model").symlink_to(own)
    refused(tmp_path, " is the folder of a run")
    for path in own.glob("tokenizer*"):  # then transformers creates one that knows no words
        path.unlink()
    refused(own, ".* tokenizer")
    tokenizer(["w1", "w2"]).save_pretrained(own)
    refused(own, " has a tokenizer of 6 tokens but a vocabulary of 100")
    (own / "config.json").write_text("{}")
    refused(own, " cannot be loaded")


@pytest.mark.parametrize(("kind", "most"), [("bert", 40), ("roberta", 38), ("mpnet", 38), ("distilbert", 40)])
def test_as_long_as_the_positions_reach_and_in_float32(kind, most, folder):
    own = tokenizer()
    own.model_max_length = 10**30  # unknown to the tokenizer
    own.save_pretrained(path := folder(kind))
    encoder(kind).to(torch.bfloat16).save_pretrained(path)
    model, own = attentions.load_encoder(path)
    assert own.model_max_length == most
    assert model.dtype == torch.float32  # small singular values beside large ones: rounding would drown them
    with torch.no_grad():
        model(torch.full((1, most), 5))
    with pytest.raises(UserError, match=f"length={most + 1} exceeds the {most} tokens"):
        attentions.passages(["none.txt"], own, most + 1, 1)


def test_a_window_as_wide_as_the_passage_is_full_attention(folder):
    """This one reaches four tokens to either side."""
    model, _ = attentions.load_encoder(folder("modernbert"))
    assert attentions.check_full_attention(model, torch.randint(4, 90, (1, 5)), "own") == (3, 2)
    with pytest.raises(UserError, match="model='own' has layers with a sliding window"):
        attentions.check_full_attention(model, torch.randint(4, 90, (1, 6)), "own")
