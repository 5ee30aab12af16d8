"""The theorems: the laws that replace R are exact, and each check can fail."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from paper.experiments import Workspace
from paper.theorem1 import Head, RandomLowRank, generator, lemma, random_head, theorem_1, theorem_1_k
from paper.theorem2 import Construction, existence, proof_k, stated_k, theorem_2
from paper.theorems import layer_heads
from scipy import stats

from linformers.errors import UserError
from paper import page, report, theorem1, theorems

from ..analysis.conftest import encoder


def head(n=96, d=8, seed=0, mean=0.0):
    return random_head(n, d, generator(seed, n, d), mean)


def attention(own):
    return own.logits(torch.arange(own.n)).softmax(-1)


def assert_same_quantiles(ours, real, tolerance):
    for share in (0.1, 0.5, 0.9):
        assert float(ours.quantile(share)) == pytest.approx(float(real.quantile(share)), rel=tolerance)


def test_the_k_of_each_statement_by_hand():
    assert theorem_1_k(512, 0.5) == 250  # 5 · 6.2383 / 0.125 = 249.5
    assert theorem_1_k(128, 0.1) == 2696  # 5 · 4.8520 / 0.009 = 2695.6
    assert stated_k(16384, 64, 0.5) == 195  # 5 · 9.7041 / 0.25 = 194.1
    assert stated_k(16384, 3, 0.5) == 119  # 9 · 3 · 1.0986 / 0.25 = 118.6
    assert proof_k(512, 64, 0.5) == 416  # 5 · 10.397 / 0.125 = 415.9
    record = theorem_1(head(32, 4), [0.1], 10, generator(4))[0]
    assert (record["demanded"], record["k"]) == (1926, 32)  # 5 · 3.4657 / 0.009 = 1925.4, but k is at most n
    # The sides of Theorem 2's minimum meet at n = d^(9d/5) = 4^7.2 = 21,619.
    assert stated_k(1000, 4, 0.5) < stated_k(21619, 4, 0.5) == stated_k(10**9, 4, 0.5)


def test_a_record_is_contradicted_only_beyond_chance():
    """Wilson's interval (1927), as tabulated: 5 of 10 failures are compatible with a rate of 0.24."""
    errors = torch.tensor([0.0] * 5 + [1.0] * 4 + [math.nan])
    for bound, contradicted in ((0.24, False), (0.23, True)):
        record = theorem1.record("s", "|x|", head(), 0.5, 10, bound, errors, errors)
        assert (record["failures"], record["contradicted"]) == (5, contradicted)
        assert record["interval"] == pytest.approx([0.2366, 0.7634], abs=1e-4)


def test_the_lemma_fails_as_often_as_chi_square_says():
    records = [record for record in lemma(head(), [0.5], 40_000, generator(1)) if record["statement"] == "JL 1"]
    for record in records:
        above = 1.5 if record["norm"] == "|x|, squared" else 1.5**2
        exact = stats.chi2.sf(record["k"] * above, record["k"])
        assert stats.binomtest(record["failures"], record["draws"], exact).pvalue > 1e-4
        assert exact < record["bound"]
    assert max(record["failures"] for record in records) > 100  # so the comparison means something


def test_both_readings_of_the_second_inequality():
    records = lemma(head(512, 16), [0.5], 20_000, generator(1))
    holds = [record for record in records if record["norm"] in ("|x||y|", "|x||y|, y = x")]
    assert not any(record["contradicted"] for record in holds)
    assert all(record["contradicted"] for record in records if record["norm"] == "|xy|")


def test_the_law_of_inner_products_is_that_of_a_drawn_r():
    own, k = head(40, 4), 12
    rng = np.random.default_rng(0)
    x = torch.softmax(own.logits(torch.tensor([3])), -1)[0].double().numpy()
    y = own.value[:, 1].double().numpy()
    R = rng.standard_normal((20_000, k, 40)) / math.sqrt(k)
    size = np.linalg.norm(x) * np.linalg.norm(y)
    drawn, cosine = ((R @ x) * (R @ y)).sum(1) / size, x @ y / size
    one, other = (theorem1.chi_squares(k, 20_000, rng).numpy() for _ in range(2))
    law = ((1 + cosine) * one - (1 - cosine) * other) / 2
    assert stats.ks_2samp(drawn, law).pvalue > 1e-3
    assert law.var() == pytest.approx((1 + cosine**2) / k, rel=0.05)


def test_theorem_1_is_drawn_as_with_a_real_r(monkeypatch):
    monkeypatch.setattr("paper.theorem1.BLOCK", 150)  # P is computed three rows at a time
    own, k = head(48, 1), 10  # one column: every draw has the same w
    drawn = RandomLowRank(own, 4000, generator(2))
    ours, rows = (drawn.error(drawn.missed(k), norm) for norm in ("|Pw|", "|u||w|"))
    probs, w = attention(own), own.value[:, 0]
    R = torch.randn(4000, k, 48) / math.sqrt(k)
    missed = probs @ (R.mT @ (R @ w)[..., None])[..., 0].T - (probs @ w)[:, None]
    real = missed.norm(dim=0) / (probs @ w).norm()
    real_rows = (missed.abs() / probs.norm(dim=1)[:, None]).amax(0) / w.norm()
    assert_same_quantiles(ours, real, 0.06)
    assert_same_quantiles(rows, real_rows, 0.06)
    # The mean square error that the page states is exact.
    assert float(ours.square().mean()) == pytest.approx((1 + drawn.condition) / k, rel=0.08)


def test_theorem_1_fails_relative_to_pw_and_holds_relative_to_u_w():
    records = {own["norm"]: own for own in theorem_1(head(512, 8), [0.5], 100, generator(3))}
    assert records["|Pw|"]["contradicted"]
    assert records["|Pw|"]["zero"] == pytest.approx(1)
    assert (records["|u||w|"]["failures"], records["|u||w|"]["contradicted"]) == (0, False)
    assert records["|u||w|"]["zero"] < 0.5
    # κ is small if the values share a mean: then the statement holds.
    shifted = theorem_1(head(512, 8, mean=2.0), [0.5], 100, generator(3))[0]
    assert not shifted["contradicted"]
    assert shifted["error"] < 0.25


def test_theorem_2_is_drawn_as_with_a_real_r():
    own, k, delta = head(40, 4), 6, 0.7
    drawn = Construction(own, 8 * 2000, generator(5))
    ours = drawn.outputs(k, [delta])
    x, value, exact = drawn.x[0], drawn.value, drawn.exact[0]
    R = torch.randn(4000, k, 40, dtype=torch.double) / math.sqrt(k)
    logits, values = delta * (R @ x), math.exp(-delta) * (R @ value)
    outputs = {
        "softmax": (logits.softmax(-1)[:, None] @ values)[:, 0],
        "exp": (logits.exp()[:, None] @ values)[:, 0] / x.exp().sum(),
    }
    for form, output in outputs.items():
        real = (output - exact).norm(dim=1) / exact.norm()
        assert_same_quantiles(ours[form, delta]["|sV|"][:2000], real, 0.1)  # draws come row by row


def test_theorem_2_is_no_better_than_zeros():
    assert 0.8 < Construction(head(512, 8), 64, generator(9)).step_b(100, 1 / 512) < 1.3  # o(1) in the proof
    records = theorem_2(head(256, 16), [0.5], 64, generator(6), deltas=[0.0, 1.0])
    found = {(record["statement"], record["norm"], record["delta"]): record for record in records}
    for form in ("exp", "softmax"):
        assert found[f"Theorem 2, {form}, proof k", "|sV|", 1.0]["error"] > 0.9
    # As δ → 0 nothing changes: 2⁻ⁿ and 1/n give the same output.
    limits = [found["Theorem 2, exp, proof k", "|sV|", delta]["error"] for delta in (0.0, 1 / 256)]
    assert limits[0] == pytest.approx(limits[1], rel=0.05)


def test_theorem_2_fails_where_zeros_do_and_kept_tokens_hold():
    records = theorem_2(head(1024, 16, mean=2.0), [0.5], 64, generator(7))
    found = {(record["statement"], record["norm"]): record for record in records}
    for form in ("exp", "softmax"):
        record = found[f"Theorem 2, {form}, proof k", "|s||V|"]
        assert record["contradicted"]
        assert record["bound"] < 0.01 < 0.5 < record["zero_rate"]
    assert found["k tokens kept", "|s||V|"]["failures"] == 0
    assert found["k tokens kept", "|sV|"]["error"] < 0.2


def test_kept_tokens_are_exact_at_n_and_within_their_bound():
    drawn = Construction(head(64, 4, mean=1.0), 400, generator(8))
    assert float(drawn.kept(64)["|sV|"].max()) < 1e-12
    k, epsilon = 32, 1.5  # where the bound is below 1
    bound = 32 * drawn.flatness**2 / (k * epsilon**2)
    assert float((drawn.kept(k)["|s||V|"] > epsilon).double().mean()) <= bound
    assert drawn.flatness >= 1


def test_fits_are_better_than_their_start_on_their_own_input_alone():
    own, other = head(64, 4), head(64, 4, seed=1)
    few, full = existence(own, other, [8, 64], [0.1, 1.0], generator(11), steps=60)
    assert few["fitted"] < 0.9 * few["windows"]
    assert few["fitted"] < few["fitted_elsewhere"]
    assert few["constructed_best"] > 1
    probs = attention(own)
    left, values, right = torch.linalg.svd(probs)
    truncated = left[:, :8] * values[:8] @ right[:8] @ own.value
    exact = probs @ own.value
    assert few["best_rank"] == pytest.approx(float((truncated - exact).norm() / exact.norm()), rel=1e-4)
    assert max(full["windows"], full["best_rank"]) < 1e-5


def test_observed_heads_give_the_models_own_attention():
    model = encoder("bert").eval()
    model.set_attn_implementation("eager")
    ids = torch.arange(30) + 4
    heads = layer_heads(model, ids, 2, "tiny")
    with torch.no_grad():
        expected = model(ids[None], output_attentions=True).attentions[1][0]
    for own, probs in zip(heads, expected, strict=True):
        torch.testing.assert_close(attention(own), probs)
    assert [own.name for own in layer_heads(model, ids, None, "tiny")] == [own.name for own in heads]
    with pytest.raises(UserError, match="layer=4 must be between 1 and 3"):
        layer_heads(model, ids, 4, "tiny")


def test_entropy():
    own = head(32, 4)
    sharp, plain, flat = (Head("", scale * own.query, own.key, own.value).entropy() for scale in (9.0, 1.0, 0.0))
    assert sharp < plain < flat == pytest.approx(math.log(32), rel=1e-5)


ARGUMENTS = ["--quick", "--lengths", "16,32", "--dims", "4", "--draws", "12"]
OPTIONS = {"dims": [4], "epsilon": [0.5], "draws": 12}


def test_command(folder, text, tmp_path):
    model = folder("bert")
    report.main("theorems", [*ARGUMENTS, "--model", model, "--text", text, "--results", str(tmp_path)])
    found = json.loads((tmp_path / "theorems" / "theorems.json").read_text())
    assert {"command", "commit", "device", "torch", "seed"} <= found.keys()
    records = [dict(zip(found["columns"], row, strict=True)) for row in found["records"]]
    assert {record["n"] for record in records if record["inputs"].startswith("bert layer 2")} == {16, 32}
    assert {record["d"] for record in records} == {4, 8}
    kinds = {record["inputs"].split("(")[1] for record in records if record["inputs"].startswith("bert")}
    assert kinds == {"sharpest)", "median)", "most diffuse)"}
    for record in records:
        assert record["interval"][0] <= record["rate"] + 1e-9 <= record["interval"][1] + 2e-9
        assert record["k"] == min(record["demanded"], record["n"]) or record["statement"].startswith("JL")
    assert (tmp_path / "theorems" / "theorems.png").stat().st_size > 10_000


def test_a_model_that_is_too_short_limits_the_lengths_and_far_lengths_are_not_repeated(folder, text, monkeypatch):
    monkeypatch.setattr(theorems, "FULL", {"far": (48, 64), "fit_length": 16, "fit_steps": 2, "fit_k": (8,)})
    options = {**OPTIONS, "lengths": [16, 48], "seed": 0, "quick": False, "layer": None, "text": text}
    found = theorems.explore(argparse.Namespace(**options, model=Path(folder("bert"))))
    assert "n = 32" in found["limits"][0]
    sizes = {(record["inputs"].split()[0], record["n"]) for record in found["records"]}
    assert {n for name, n in sizes if name == "bert"} == {16}
    stated = theorems.pick(found["records"], "Theorem 2, softmax, stated", "|s||V|")
    assert [record["n"] for record in stated if record["inputs"] == "random"] == [16, 48, 64]


def test_one_seed_gives_one_result():
    options = {**OPTIONS, "lengths": [16], "quick": True, "model": None}
    first, again, other = (theorems.explore(argparse.Namespace(**options, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "1.5"], r"epsilon=\[1\.5\] must be between 0 and 1"),
        (["--model", "somewhere"], "text is missing"),
        (["--dims", "1"], "dims=1 must be at least 2"),
        (["--lengths", "4"], "lengths=4 at least 8"),
        (["--epsilon", "a"], "epsilon='a' must be numbers"),
    ],
)
def test_wrong_input_is_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_script", lambda command: command())
    with pytest.raises(UserError, match=message):
        report.main("theorems", [*ARGUMENTS, *arguments, "--results", str(tmp_path)])


def test_a_page_counts_what_its_records_say():
    work = Workspace(results=Path(__file__).parents[2] / "results")
    record = theorems.collect(work)
    settings = [own for own in theorems.pick(record["records"], "Theorem 1", "|Pw|") if own["bound"] < 1]
    broken = sum(own["contradicted"] for own in settings)
    assert broken > 0
    sound = [own | {"contradicted": False} for own in record["records"]]
    for records, count in ((record["records"], broken), (sound, 0)):
        rendered = page.section_text(page.environment(), "theorems", {**record, "records": records}, work)
        (row,) = (line for line in rendered.splitlines() if line.startswith("| Theorem 1: "))
        assert row.endswith(f"| {len(settings)} | {count} | 0 |")
