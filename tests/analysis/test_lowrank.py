"""P replaced by low rank: the best there is, and what E and F make of it."""

import dataclasses
import io
import json
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformers.analysis import attentions, equation6, lowrank, qkv
from linformers.cli import app

N, K = 24, 6


@pytest.fixture
def model(folder):
    return attentions.load_encoder(folder("bert"))[0]


def test_no_matrix_of_rank_k_is_nearer():
    torch.manual_seed(0)
    probs = (3 * torch.randn(2, 3, N, N)).softmax(-1)
    values = torch.linalg.svdvals(probs.double())
    for k in (1, K, N - 1):
        low = lowrank.low_rank(probs, k)
        assert torch.linalg.matrix_rank(low.double(), atol=1e-5).eq(k).all()
        missed = (low - probs).double().norm(dim=(-1, -2))
        torch.testing.assert_close(missed, values[..., k:].square().sum(-1).sqrt(), rtol=1e-4, atol=1e-6)


def test_linear_attention_with_the_identity_is_attention():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 3, N, 4)
    torch.testing.assert_close(lowrank.linear(query, key, torch.eye(N), torch.eye(N)), (query @ key.mT / 2).softmax(-1))


def test_recorded_are_queries_keys_and_values(model):
    """P V from what was recorded is what the model makes of the P that was watched."""
    ids = torch.randint(4, 90, (1, N))
    watched = []
    watching = attentions.watching(lambda layer, probs: watched.append(probs), N)
    with torch.no_grad(), lowrank.Recorder(model, "m") as recorder, watching:
        model(ids)
    for probs, (query, key, _) in zip(watched, recorder.seen, strict=True):
        expected = lowrank.linear(query, key, torch.eye(N), torch.eye(N))
        torch.testing.assert_close(probs, expected)
    assert not any(module._forward_hooks for module in model.modules())


def test_replacing_p_by_itself_changes_nothing(model):
    ids = torch.randint(4, 90, (1, N))
    identity = [(torch.eye(N), torch.eye(N))] * 3
    results = {loss.way: loss for loss in lowrank.losses(model, ids, N - 1, "m", identity, steps=1)}
    assert results[lowrank.OTHERS].heads < 1e-5
    assert results[lowrank.OTHERS].model < 1e-5


def test_what_is_lost(model):
    """What is nearest to P, or fitted to the passage, loses less than what knows nothing of it; more k, less loss."""
    torch.manual_seed(0)
    ids = torch.randint(4, 90, (3, N))
    fitted = lowrank.fit(model, ids[1:], K, "m", steps=30)
    results = {loss.way: loss.heads for loss in lowrank.losses(model, ids[:1], K, "m", fitted, steps=150)}
    assert max(results[lowrank.SVD], results[lowrank.OWN]) < 0.5 * results[lowrank.POOLED]
    more = lowrank.losses(model, ids[:1], 2 * K, "m", lowrank.fit(model, ids[1:], 2 * K, "m", steps=1), steps=1)
    assert more[0].heads < results[lowrank.SVD]


def test_times():
    times = lowrank.seconds(N, [4, 8], heads=2, d=4, device="cpu")
    assert {way: list(own) for way, own in times.items()} == {
        "exact": [None],
        lowrank.SVD: [4, 8],
        "E, F": [4, 8],
    }
    assert all(seconds > 0 for own in times.values() for seconds in own.values())


def test_command(folder, text, tmp_path):
    out = tmp_path / "out"
    arguments = ["lowrank", folder("roberta"), "--text", text, "--length", str(N), "--projected", "4,8"]
    arguments += ["--passages", "2", "--others", "3", "--steps", "3", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((out / "lowrank.json").read_text())
    assert [(loss["way"], loss["k"]) for loss in record["losses"]] == [
        (way, k) for k in (4, 8) for way in (lowrank.SVD, lowrank.OWN, lowrank.OTHERS, lowrank.POOLED, lowrank.UNIFORM)
    ]
    assert "| best rank k (SVD) |" in (out / "lowrank.md").read_text()
    assert (out / "lowrank.png").stat().st_size > 1000


def test_a_stopped_run_goes_on(folder, text, tmp_path, monkeypatch):
    settings = equation6.Settings(folder("roberta"), [text], [4, 8], N, passages=1, others=2, steps=2)
    quiet = {"command": "", "console": Console(file=io.StringIO(), width=100)}
    equation6.run(settings, out=tmp_path / "whole", **quiet)
    said = quiet["console"].file

    def interrupt():
        raise KeyboardInterrupt  # a signal would be ignored where the tests run in the background

    fit, fitted, stops = lowrank.fit, [], [lambda: signal.raise_signal(signal.SIGTERM), interrupt]

    def stop_at_8(model, ids, k, name, **options):
        fitted.append(k)
        if k == 8 and stops:
            stops.pop(0)()
        return fit(model, ids, k, name, **options)

    monkeypatch.setattr(lowrank, "fit", stop_at_8)
    out, before = tmp_path / "stopped", signal.getsignal(signal.SIGTERM)
    for stop, message in ((SystemExit, "^143$"), (KeyboardInterrupt, "^$")):
        with pytest.raises(stop, match=message):
            equation6.run(settings, out=out, **quiet)
        assert said.getvalue().endswith("Stopped after 1 of 2 k; run again, it goes on from there\n")
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match=r"losses\.json is of a run with another model, other texts, or other numbers"):
        equation6.run(dataclasses.replace(settings, steps=3), out=out, **quiet)
    stopped_at = len(fitted)
    equation6.run(settings, out=out, **quiet)
    assert 4 not in fitted[stopped_at:]
    whole, own = (json.loads((path / "lowrank.json").read_text()) for path in (tmp_path / "whole", out))
    assert own["losses"] == whole["losses"]
    assert not (out / "losses.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projected": [N]}, "projected=24 must be below length=24"),
        ({"passages": 900}, "passages=900 and others=64 are more than the"),
        ({"steps": 0}, "steps=0 must be a positive integer"),
    ],
)
def test_one_sentence(options, message, folder, text, tmp_path):
    settings = equation6.Settings(
        **{"model": folder("bert"), "texts": [text], "projected": [4], "length": N, **options}
    )
    with pytest.raises(ValueError, match=message):
        equation6.run(settings, out=tmp_path / "out", command="", console=Console(quiet=True))


@pytest.mark.parametrize(
    ("kind", "message"), [("mpnet", "adds a bias to its logits"), ("albert", "has 3 layers but maps of .* for 1: take")]
)
def test_what_e_and_f_would_leave_out(kind, message, folder, text, tmp_path):
    settings = equation6.Settings(folder(kind), [text], projected=[4], length=N, passages=1, others=1)
    with pytest.raises(ValueError, match=message):
        equation6.run(settings, out=tmp_path / "out", command="", console=Console(quiet=True))


def test_queries_and_keys_of_a_decoder_are_refused(folder, text):
    with pytest.raises(ValueError, match="is causal: its queries do not see the keys behind them"):
        qkv.read_passages(Path(folder("llama")), Path(text), 8)
