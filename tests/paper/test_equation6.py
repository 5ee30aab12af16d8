"""P replaced by low rank: the best matrix, and what E and F achieve."""

import json

import pytest
import torch
from paper.equation6 import OTHERS, OWN, POOLED, SVD, UNIFORM, observe
from torch.nn.functional import scaled_dot_product_attention

from linformers.analysis import attentions
from linformers.errors import UserError
from paper import equation6, report

N, K = 24, 6


@pytest.fixture
def model(folder):
    return attentions.load_encoder(folder("bert"))[0]


def test_no_matrix_of_rank_k_is_nearer():
    probs = (3 * torch.randn(2, 3, N, N)).softmax(-1)
    values = torch.linalg.svdvals(probs.double())
    for k in (1, K, N - 1):
        low = equation6.low_rank(probs, k)
        assert torch.linalg.matrix_rank(low.double(), atol=1e-5).eq(k).all()
        missed = (low - probs).double().norm(dim=(-1, -2))
        torch.testing.assert_close(missed, values[..., k:].square().sum(-1).sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "albert", "twin"])
def test_observed_inputs_give_the_models_output(kind, folder):
    model, _ = attentions.load_encoder(folder(kind))
    ids, watched = torch.randint(4, 90, (N,)), []
    with torch.no_grad(), attentions.WatchAttention(lambda layer, probs: watched.append(probs), N):
        expected = model(ids[None]).last_hidden_state
    output, layers = observe(model, ids, kind)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for probs, (query, key, value) in zip(watched, layers, strict=True):
        torch.testing.assert_close(probs @ value, scaled_dot_product_attention(query, key, value))
    assert model.config._attn_implementation == "eager"


def test_replacing_p_by_itself_changes_nothing(model):
    ids = torch.randint(4, 90, (1, N))
    identity = [(torch.eye(N), torch.eye(N))] * 3
    results = {loss["way"]: loss for loss in equation6.losses(model, ids, N - 1, "m", identity, steps=1)}
    assert results[OTHERS]["heads"] < 1e-5
    assert results[OTHERS]["model"] < 1e-5


def test_what_is_lost(model):
    """The nearest matrix and a fit to the passage lose less than a map that ignores it; a larger k loses less."""
    ids = torch.randint(4, 90, (3, N))
    known = [observe(model, row, "m")[1] for row in ids[1:]]
    fitted = equation6.fit_layers(known, K, steps=30, rate=0.1)
    results = {loss["way"]: loss["heads"] for loss in equation6.losses(model, ids[:1], K, "m", fitted, steps=150)}
    assert max(results[SVD], results[OWN]) < 0.5 * results[POOLED]
    assert results[POOLED] < results[UNIFORM]
    more = equation6.losses(model, ids[:1], 2 * K, "m", equation6.fit_layers(known, 2 * K, steps=1, rate=0.1), steps=1)
    assert more[0]["heads"] < results[SVD]


def test_command(folder, text, tmp_path):
    arguments = [folder("roberta"), "--text", text, "--projected", "4,8", "--passages", "2", "--others", "3"]
    report.main("equation6", [*arguments, "--length", str(N), "--steps", "3", "--results", str(tmp_path)])
    record = json.loads((tmp_path / "equation6" / "equation6.json").read_text())
    ways = (SVD, OWN, OTHERS, POOLED, UNIFORM)
    assert [(loss["way"], loss["k"]) for loss in record["losses"]] == [(way, k) for k in (4, 8) for way in ways]
    assert all(own > 0 for times in record["seconds"].values() for own in times.values())
    assert (tmp_path / "equation6" / "equation6.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bert", ["--projected", str(N)], "projected=24 must be below length=24"),
        ("bert", ["--passages", "900"], "passages=900 and others=64 exceed the"),
        ("mpnet", ["--others", "1"], "does not use transformers' attention interface"),
    ],
)
def test_wrong_input_is_named(kind, options, message, folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_script", lambda command: command())
    arguments = [folder(kind), "--text", text, "--length", str(N), "--results", str(tmp_path)]
    with pytest.raises(UserError, match=message):
        report.main("equation6", [*arguments, *options])
