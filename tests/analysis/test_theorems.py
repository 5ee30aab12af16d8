"""The theorems, tested: that the laws they are drawn from are exact, and that each checker can fail."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from linformers import plots
from linformers.analysis import existence, linear_attention, qkv, theorem_page, theorem_report, theorems
from linformers.analysis.linear_attention import Construction, proved_k, stated_k, theorem_2
from linformers.analysis.qkv import Head, generator, random_head
from linformers.analysis.theorem_tables import SOFTMAX, pick, rate
from linformers.analysis.theorems import RandomLowRank, theorem_1, theorem_1_k, wilson
from linformers.checks import whole_numbers
from linformers.cli import app

KEPT = Path(__file__).parents[2] / "results" / "theorems"


def head(n=96, d=8, seed=0, mean=0.0):
    return random_head(n, d, generator(seed, n, d), mean)


def attention(own):
    return own.logits(torch.arange(own.n)).softmax(-1)


def test_wilson():
    # Wilson (1927), as tabulated: 0 of 10, and 5 of 10.
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_demanded_k_by_hand():
    assert theorem_1_k(512, 0.5) == 250  # 5 · 6.2383 / 0.125 = 249.5
    assert theorem_1_k(128, 0.1) == 2696  # 5 · 4.8520 / 0.009 = 2695.6
    assert stated_k(16384, 64, 0.5) == (linear_attention.Demand(195, "5 log n"))  # 5 · 9.7041 / 0.25 = 194.1
    assert stated_k(16384, 3, 0.5).branch == "9 d log d"  # 27 · 1.0986 = 29.66 < 48.52
    assert stated_k(16384, 3, 0.5).k == 119  # 29.66 / 0.25 = 118.6
    # The sides meet at n = d^(9d/5) = 4^7.2 = 21,619.
    assert stated_k(21600, 4, 0.5).branch == "5 log n"
    assert stated_k(21640, 4, 0.5).branch == "9 d log d"
    assert proved_k(512, 64, 0.5).k == 416  # 5 · 10.397 / 0.125 = 415.9


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -0.5])
def test_epsilon_is_checked(epsilon):
    with pytest.raises(ValueError, match=f"epsilon={epsilon!r} must lie between 0 and 1"):
        theorem_1_k(512, epsilon)


def chi_square_tail(k, above):
    """Pr(χ² of k degrees of freedom > above), exactly."""
    return float(torch.special.gammaincc(torch.tensor(k / 2.0), torch.tensor(above / 2.0)))


def test_the_lemma_fails_as_often_as_chi_square_says():
    records = theorems.johnson_lindenstrauss(head(), [0.5], 40_000, generator(1))
    for record in records:
        if record.statement == "JL 1":
            above = 1.5 if record.norm == "|x|, squared" else 1.5**2
            exact = chi_square_tail(record.k, record.k * above)
            low, high = wilson(record.failures, record.draws, z=4)
            assert low <= exact <= high
            assert exact < record.bound
    squared = [record for record in records if record.norm == "|x|, squared"]
    assert squared[0].failures > 100  # the tail was seen, so the comparison means something


def test_the_law_of_inner_products_is_that_of_a_drawn_r():
    own, k, epsilon = head(40, 4), 12, 0.5
    rng = np.random.default_rng(0)
    x = torch.softmax(own.logits(torch.tensor([3])), -1)[0].double().numpy()
    y = own.value[:, 1].double().numpy()
    R = rng.standard_normal((20_000, k, 40)) / math.sqrt(k)
    size = np.linalg.norm(x) * np.linalg.norm(y)
    drawn = ((R @ x) * (R @ y)).sum(1) / size
    cosine = x @ y / size
    one, other = (theorems.chi_squares(k, 20_000, rng).numpy() for _ in range(2))
    law = ((1 + cosine) * one - (1 - cosine) * other) / 2
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(law, share), abs=0.02)
    assert law.var() == pytest.approx((1 + cosine**2) / k, rel=0.05)
    assert abs((abs(drawn - cosine) > epsilon).mean() - (abs(law - cosine) > epsilon).mean()) < 0.01


def test_theorem_1_is_drawn_as_with_a_real_r():
    own, k = head(48, 1), 10  # one column: every draw has the same w
    drawn = RandomLowRank(own, 4000, generator(2))
    ours = drawn.measure(drawn.missed(k), "|Pw|")
    rows = drawn.measure(drawn.missed(k), "|u||w|")
    probs, w = attention(own), own.value[:, 0]
    R = torch.randn(4000, k, 48) / math.sqrt(k)
    missed = probs @ (R.mT @ (R @ w)[..., None])[..., 0].T - (probs @ w)[:, None]
    real = missed.norm(dim=0) / (probs @ w).norm()
    real_rows = (missed.abs() / probs.norm(dim=1)[:, None]).amax(0) / w.norm()
    for share in (0.1, 0.5, 0.9):
        assert ours.quantile(share) == pytest.approx(float(real.quantile(share)), rel=0.06)
        assert rows.quantile(share) == pytest.approx(float(real_rows.quantile(share)), rel=0.06)
    # The mean square that the page states is exact.
    assert float(ours.square().mean()) == pytest.approx((1 + drawn.condition) / k, rel=0.08)


def test_theorem_1_fails_relative_to_pw_and_holds_relative_to_u_w():
    records = {record.norm: record for record in theorem_1(head(512, 8), [0.5], 100, generator(3))}
    assert records["|Pw|"].contradicted
    assert records["|Pw|"].zero == pytest.approx(1)
    assert records["|Pw|"].smallest > 512
    assert records["|u||w|"].failures == 0
    assert not records["|u||w|"].contradicted
    assert records["|u||w|"].zero < 0.5
    assert 20 < records["|u||w|"].smallest < 250
    # κ is small where the values share a mean: there the statement holds.
    shifted = {record.norm: record for record in theorem_1(head(512, 8, mean=2.0), [0.5], 100, generator(3))}
    assert not shifted["|Pw|"].contradicted
    assert shifted["|Pw|"].error < 0.25


def test_k_beyond_n_is_said_and_n_is_used():
    record = theorem_1(head(32, 4), [0.1], 10, generator(4))[0]
    assert (record.demanded, record.k, record.n) == (1926, 32, 32)  # 5 · 3.4657 / 0.009 = 1925.4


def test_no_p_is_ever_whole(monkeypatch):
    own = head(50, 4)
    monkeypatch.setattr(qkv, "BLOCK", 150)
    parts = list(qkv.blocks(own))
    assert [len(part) for part in parts] == [3] * 16 + [2]
    torch.testing.assert_close(torch.cat(parts), attention(own))


def test_smallest_k():
    assert theorems.smallest_k(lambda k: 0.0 if k >= 37 else 1.0) == 37
    assert theorems.smallest_k(lambda k: 1.0, limit=100) is None


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
        first = ours[form, delta]["|sV|"][:2000]  # draws come row by row
        for share in (0.1, 0.5, 0.9):
            assert float(first.quantile(share)) == pytest.approx(float(real.quantile(share)), rel=0.1)


def test_the_mean_of_the_construction_is_linear_in_the_logits():
    # E[e^{−δ} exp(δ x Rᵀ) R y] = δ e^{−δ + δ²‖x‖²/2k} ⟨x, y⟩, whatever exp(x) is.
    rng = np.random.default_rng(0)
    n, k, delta = 10, 8, 0.9
    x, y = rng.standard_normal(n), rng.standard_normal(n) + 1
    R = rng.standard_normal((200_000, k, n)) / math.sqrt(k)
    drawn = math.exp(-delta) * (np.exp(delta * (R @ x)) * (R @ y)).sum(1)
    law = delta * math.exp(-delta + delta**2 * (x @ x) / (2 * k)) * (x @ y)
    assert drawn.mean() == pytest.approx(law, abs=4 * drawn.std() / math.sqrt(len(drawn)))
    assert abs(law - np.exp(x) @ y) > 1


def test_zeros_and_the_mean_have_the_errors_that_they_should():
    own = head(40, 4)
    drawn = Construction(own, 8, generator(6))
    zero, uniform = drawn.others()
    torch.testing.assert_close(zero["|sV|"], torch.ones(8, dtype=torch.double))
    s = drawn.probs[2]
    expected = (s @ drawn.value).norm() / (s.norm() * drawn.value.norm())
    torch.testing.assert_close(zero["|s||V|"][2], expected)
    missed = drawn.value.mean(0) - s @ drawn.value
    torch.testing.assert_close(uniform["|sV|"][2], missed.norm() / (s @ drawn.value).norm())


def test_theorem_2_asks_no_more_than_zeros_and_fails_where_they_fail():
    records = theorem_2(head(256, 16), [0.5], 64, generator(7), [0.0, 1.0])
    by_name = {(record.statement, record.norm, record.delta): record for record in records}
    exp = by_name["Theorem 2, exp, proof k", "|s||V|", 1 / 256]
    assert (exp.failures, exp.zero_rate, exp.smallest) == (0, 0.0, 1)
    relative = by_name["Theorem 2, softmax, proof k", "|sV|", 1 / 256]
    assert relative.failures == 64
    assert relative.error > 0.9
    # As δ → 0 nothing changes any more: 2⁻ⁿ and 1/n are the same output.
    assert by_name["Theorem 2, exp, proof k", "|sV|", 0.0].error == pytest.approx(
        by_name["Theorem 2, exp, proof k", "|sV|", 1 / 256].error, rel=0.05
    )
    # Values that share a mean: zeros miss the bound, and so does the construction; tokens that are kept meet it.
    shifted = theorem_2(head(1024, 16, mean=2.0), [0.5], 64, generator(7))
    by_name = {(record.statement, record.norm): record for record in shifted}
    for form in ("exp", "softmax"):
        record = by_name[f"Theorem 2, {form}, proof k", "|s||V|"]
        assert record.bound < 0.01
        assert record.contradicted
        assert record.zero_rate > 0.5
    assert by_name["k tokens kept", "|s||V|"].failures == 0
    assert by_name["k tokens kept", "|sV|"].error < 0.2


def test_kept_tokens_are_exact_at_n_and_within_their_bound():
    own = head(64, 4, mean=1.0)
    drawn = Construction(own, 400, generator(8))
    assert float(drawn.kept(64)["|sV|"].max()) < 1e-12
    k, epsilon = 32, 1.5  # where the bound is below 1
    bound = 32 * drawn.flatness**2 / (k * epsilon**2)
    assert float((drawn.kept(k)["|s||V|"] > epsilon).double().mean()) <= bound
    assert drawn.flatness >= 1


def test_step_b_is_not_small():
    drawn = Construction(head(512, 8), 64, generator(9))
    needed, written = drawn.step_b(100, 1 / 512)
    assert 0.8 < needed < 1.3
    assert written > 0.2


def test_gamma():
    # With all n = 2d rows chosen, Γ is the identity; rows that were chosen always have length 1.
    assert linear_attention.gamma(head(8, 4), 16, 1.0, generator(10)) == pytest.approx(1 / 4, rel=1e-6)
    assert linear_attention.gamma(head(64, 4), 16, 1.0, generator(10)) > 1 / 4


def test_windows_are_mean_pooling():
    E = existence.window_matrix(10, 4, 10)
    torch.testing.assert_close(E.sum(0), torch.ones(4))
    torch.testing.assert_close(E.T @ torch.arange(10.0), torch.tensor([1.0, 3.5, 6.0, 8.5]))


def test_fits_beat_what_they_start_from():
    own, other = head(64, 4), head(64, 4, seed=1)
    few, all_of_them = existence.existence(own, other, [8, 64], [0.1, 1.0], generator(11), steps=60)
    assert few.fitted < 0.9 * few.windows
    assert few.fitted < few.fitted_elsewhere
    assert few.constructed > 1
    probs = attention(own)
    left, values, right = torch.linalg.svd(probs)
    truncated = left[:, :8] * values[:8] @ right[:8] @ own.value
    exact = probs @ own.value
    assert few.best_rank == pytest.approx(float((truncated - exact).norm() / exact.norm()), rel=1e-4)
    for error in (all_of_them.windows, all_of_them.kept, all_of_them.best_rank):
        assert error < 1e-5
    with pytest.raises(ValueError, match="projected=65 must lie between 1 and n=64"):
        existence.existence(own, other, [65], [0.1], generator(11), steps=1)


WORDS = [f"w{i}" for i in range(40)]


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 16}
    config = BertConfig(vocab_size=50, max_position_embeddings=40, **sizes, attn_implementation="eager")
    model = BertModel(config).eval()
    for parameter in model.parameters():  # far from uniform attention
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture
def folder(tmp_path):
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<pad>", *WORDS])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=40)
    bert().save_pretrained(tmp_path / "tiny")
    tokens.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[i % 37] for i in range(500)))
    return path


def test_captured_heads_give_the_models_own_attention():
    model = bert()
    ids = torch.arange(30) % 50
    heads = qkv.layer_heads(model, ids, 2, "tiny")
    with torch.no_grad():
        expected = model(ids[None], output_attentions=True).attentions[1][0]
    assert len(heads) == 4
    for own, probs in zip(heads, expected, strict=True):
        torch.testing.assert_close(attention(own), probs)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Linear))


def test_heads_of_other_encoders_are_found_and_what_has_none_is_named():
    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=40)
    assert len(qkv.layer_heads(DistilBertModel(config).eval(), torch.arange(8), 1, "small")) == 2
    gpt = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=40))
    with pytest.raises(ValueError, match="model='gpt' has no linear maps called query/key/value"):
        qkv.layer_heads(gpt, torch.arange(8), 1, "gpt")
    with pytest.raises(ValueError, match="layer=4 must lie between 1 and 3, the layers of model='tiny'"):
        qkv.layer_heads(bert(), torch.arange(8), 4, "tiny")


def test_heads_are_picked_by_entropy():
    own = head(32, 4)
    heads = [Head(str(scale), scale * own.query, own.key, own.value) for scale in (1.0, 9.0, 0.0)]
    assert qkv.pick_heads(heads) == {"sharpest": 1, "median": 0, "most diffuse": 2}
    assert qkv.entropy(heads[2]) == pytest.approx(math.log(32), rel=1e-5)


def test_a_short_text_is_not_repeated(folder, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(" ".join(WORDS[:25]))
    passages = qkv.read_passages(folder, short, 512)
    assert passages.longest == 12
    assert passages.first.tolist() + passages.second.tolist() == list(range(2, 26))
    settings = theorem_report.quick(theorem_report.Settings(lengths=[16], model=folder, text=short))
    found = theorem_report.explore(replace(settings, steps=2))
    assert "allows n = 12" in found.limits[0]
    assert {record.n for record in found.records if record.inputs.startswith("tiny")} == {12}
    with pytest.raises(ValueError, match="does not exist"):
        qkv.read_passages(folder, tmp_path / "nothing.txt", 8)


def test_no_file_behind_the_passages_is_opened(folder, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(" ".join(WORDS[i % 37] for i in range(500)))
    (texts / "b.txt.gz").write_bytes(b"no archive")
    assert qkv.read_passages(folder, texts, 8).longest == 8
    with pytest.raises(ValueError, match=r"b\.txt\.gz is damaged"):
        qkv.read_passages(folder, texts, 400)


ARGUMENTS = ["theorems", "--quick", "--lengths", "16,32", "--dims", "4", "--draws", "12"]


def test_command(folder, text, tmp_path):
    arguments = [*ARGUMENTS, "--model", str(folder), "--text", str(text), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert re.search(r"The tables are 1\d\d columns wide: they are in .*theorems\.md", result.output.replace("\n", ""))
    found = json.loads((tmp_path / "out" / "theorems.json").read_text())
    assert {"command", "commit", "device", "torch", "seed", "settings"} <= found.keys()
    records = [dict(zip(found["columns"], row, strict=True)) for row in found["records"]]
    assert {record["n"] for record in records if record["inputs"].startswith("tiny layer 2")} == {16, 32}
    for record in records:
        assert record["interval"][0] <= record["rate"] <= record["interval"][1] + 1e-9
        assert record["k"] == min(record["demanded"], record["n"]) or record["statement"].startswith("JL")
    assert (tmp_path / "out" / "theorems.png").stat().st_size > 10_000
    page = (tmp_path / "out" / "theorems.md").read_text()
    assert "## What was found\n\nNeither construction " in page
    for part in ("## Where the proofs break", "## What holds", "### The lemma", "(median)"):
        assert part in page


def test_the_figure_tells_what_is_to_be_beaten_apart_and_shows_its_lengths(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    curves = {name: [(128, 1), (256, 2)] for name in ("random", "zeros", "mean of the values", "ε = 0.5")}
    plots.theorems([({**curves, "none at these n": []}, {"xlabel": "n"})] * 4, Path())
    axes = figures[0].axes[0]
    drawn = {line.get_label(): (line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
    assert drawn.keys() == curves.keys()
    assert len(set(drawn.values())) == 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "256"]
    figures[0].draw_without_rendering()
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0  # below, where no line is
    plots.plt.close(figures[0])


def test_a_length_that_is_named_twice():
    settings = theorem_report.Settings(lengths=[16, 32], far=[32, 48], dims=[4], draws=12, steps=2, projected=[8])
    records = theorem_report.explore(settings).records
    assert {each.n for each in records} == {16, 32, 48}
    assert len(pick(records, f"{SOFTMAX}, stated", "|s||V|", n=32, d=4, epsilon=0.5, inputs="random")) == 1
    assert whole_numbers("lengths", "128,128,64") == [128, 64]


def test_one_seed_one_result():
    settings = theorem_report.quick(theorem_report.Settings(lengths=[16], dims=[4], draws=12))
    first, again, other = (theorem_report.explore(replace(settings, seed=seed)) for seed in (3, 3, 4))
    assert first.as_dict() == again.as_dict()
    assert first.as_dict() != other.as_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "1.5"], "epsilon=1.5 must lie between 0 and 1"),
        (["--epsilon", "a"], "epsilon='a' must be numbers separated by commas"),
        (["--model", "somewhere"], "text is missing: model was given"),
        (["--dims", "1"], "dims=1 and lengths=16 must be at least 2"),
        (["--draws", "0"], "draws=0 must be a positive integer"),
        (["--lengths", "4", "--dims", "2"], "n=4 is too short to fit E and F at k=8"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, message, tmp_path):
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments, "--out", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("failures", "draws", "expected"),
    [
        (0, 200, "0 of 200 (at most 1.9%)"),
        (200, 200, "200 of 200 (at least 98.1%)"),
        (135, 200, "67.5% (60.7% to 73.6%)"),
        (1, 20_000, "0.005% (0.0009% to 0.03%)"),
        (0, 20_000, "0 of 20,000 (at most 0.02%)"),
        (19_999, 20_000, ">99.9% (>99.9% to >99.9%)"),
    ],
)
def test_a_rate_claims_no_more_than_was_drawn(failures, draws, expected):
    record = theorem_1(head(32, 4), [0.5], 2, generator(12))[0]
    assert rate(replace(record, failures=failures, draws=draws)) == expected


def test_what_is_kept_gives_the_page(tmp_path):
    (tmp_path / "theorems.json").write_bytes((KEPT / "theorems.json").read_bytes())
    theorem_report.write_page(tmp_path)
    assert (tmp_path / "theorems.md").read_text() == (KEPT / "theorems.md").read_text()
    assert (tmp_path / "theorems.png").stat().st_size > 10_000


def test_a_verdict_can_go_either_way():
    records = theorem_1(head(512, 8), [0.5], 50, generator(12))
    by_norm = {record.norm: record for record in records}
    assert theorem_page.verdict([by_norm["|Pw|"]]).startswith("fails: the rate of failure is above the bound in 1 of")
    assert theorem_page.verdict([by_norm["|u||w|"]]).startswith("holds")
    assert theorem_page.verdict([replace(by_norm["|Pw|"], bound=1.0)]).startswith("cannot be judged")


def test_a_conclusion_can_go_either_way():
    own = head(32, 4)
    fits = existence.existence(own, head(32, 4, 1), [4, 8], [0.1], generator(13), steps=2)
    one = next(each for each in theorem_1(own, [0.5], 20, generator(14)) if each.norm == "|Pw|")
    two = pick(linear_attention.theorem_2(own, [0.5], 20, generator(15)), SOFTMAX, "|s||V|", delta=1 / 32)[0]
    first, second = ([replace(each, bound=0.5, failures=count) for count in (0, 20)] for each in (one, two))

    def said(*records):
        return theorem_page.conclusion(records, fits)

    assert said(first[0], second[0]).startswith("Neither construction was seen to miss what its theorem states")
    assert said(first[1], second[0]).startswith("The construction of Theorem 1 does not give")
    assert said(first[0], second[1]).startswith("The construction of Theorem 2 does not give")
    assert said(*first, second[1]).startswith("Neither construction gives what its theorem states")
    assert "in 1 of 2 settings of Theorem 1 (P RᵀR, relative to |Pw|) and in 1 of 1 of Theorem 2" in said(
        *first, second[1]
    )
    assert f"an error of {fits[1].fitted:.3g} |PV| at k = 8" in said(*first, *second)
