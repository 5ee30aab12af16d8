"""The spectrum of P: exact, streaming, resumable, and of any encoder."""

import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformers.analysis import attentions, equation6, figure1, spectrum
from linformers.cli import app

from .conftest import tokenizer

N = 24
KEPT = sorted(Path(__file__).parents[2].glob("results/spectrum/*/spectrum.json"))


@pytest.mark.parametrize("shape", [(3, 2, 50, 50), (40, 30), (30, 40), (300, 300)])
def test_singular_values(shape):
    torch.manual_seed(0)
    matrices = (4 * torch.randn(shape)).softmax(-1)
    matrices[..., -5:, :] = matrices[..., :5, :]  # some are 0
    expected = torch.linalg.svdvals(matrices.double())
    torch.testing.assert_close(spectrum.singular_values(matrices), expected, rtol=0, atol=1e-6)


def test_streaming_is_exact():
    arrays = np.random.default_rng(0).normal(3.0, 2.0, (17, 4, 5))
    moments = spectrum.Moments()
    for part in np.split(arrays, [1, 4, 5, 11]):
        moments.add(part)
    assert moments.count == 17
    np.testing.assert_allclose(moments.mean, arrays.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std, arrays.std(0, ddof=1), rtol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "distilbert", "twin"])
def test_any_encoder(kind, folder):
    """What is watched is what the model returns as its attentions."""
    model, _ = attentions.load_encoder(folder(kind))
    ids = torch.randint(4, 90, (5, N))
    result = spectrum.measure(model, ids, workers=2)
    with torch.no_grad():
        returned = torch.stack(model(ids, output_attentions=True).attentions)  # (layers, b, h, n, n)
    values = torch.linalg.svdvals(returned.double())
    shares = spectrum.cumulative(values)
    assert result.sentences == 5
    np.testing.assert_allclose(result.values, values.mean(1), atol=1e-5)
    np.testing.assert_allclose(result.cumulative, shares.mean(1), atol=1e-5)
    np.testing.assert_allclose(result.cumulative_std, shares.std(1), atol=1e-5)
    np.testing.assert_allclose(result.energy, spectrum.cumulative(values**2).mean(1), atol=1e-5)
    assert result.cumulative.std() > 0.01


def test_weights_of_fewer_bits_are_computed_with_in_float32(folder, tmp_path):
    """Singular values are small numbers behind large ones, which roundings of P would drown."""
    model, tokenizer = attentions.load_encoder(str(folder("bert")))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert attentions.load_encoder(str(tmp_path))[0].dtype == torch.float32


def test_goes_on_from_where_it_was(folder, tmp_path):
    model, _ = attentions.load_encoder(folder("bert"))
    ids = torch.randint(4, 90, (6, N))
    whole = spectrum.measure(model, ids)
    seen = []

    def stop():
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    state = tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt):
        spectrum.measure(model, ids, state_file=state, on_sentence=stop)
    seen.clear()
    starts = []
    result = spectrum.measure(
        model, ids, state_file=state, on_start=lambda *s: starts.append(s), on_sentence=lambda: seen.append(1)
    )
    assert starts == [(3, 3, 2)]
    assert len(seen) == 3
    for name in ("values", "cumulative", "cumulative_std", "energy", "energy_std"):
        np.testing.assert_array_equal(getattr(result, name), getattr(whole, name))
    fewer = spectrum.measure(model, ids[:5], state_file=state)  # more are there
    assert fewer.sentences == 6
    np.testing.assert_array_equal(fewer.energy, whole.energy)
    more = torch.cat([ids, torch.randint(4, 90, (2, N))])
    grown = spectrum.measure(model, more, state_file=state)
    np.testing.assert_array_equal(grown.energy, spectrum.measure(model, more).energy)
    other, _ = attentions.load_encoder(folder("roberta"))
    for their_model, their_ids in ((model, more.flip(0)), (model, more[:, :-1]), (other, more)):
        with pytest.raises(ValueError, match="is of another model, other texts or another length or seed"):
            spectrum.measure(their_model, their_ids, state_file=state)


def test_a_stopped_measurement_says_how_far_it_came(folder, text, tmp_path, monkeypatch):
    settings = figure1.Settings(folder("bert"), [text], N, sentences=4, at=8)
    console, add, added = Console(file=io.StringIO(), width=100), spectrum.Moments.add, []

    def stop(moments, batch):
        added.append(1)
        if len(added) == 8:  # in the midst of the third passage, of which the first of three is taken in
            signal.raise_signal(signal.SIGTERM)
        add(moments, batch)

    whole = figure1.run(settings, out=tmp_path / "whole", command="", console=console)
    monkeypatch.setattr(spectrum.Moments, "add", stop)
    with pytest.raises(SystemExit, match="143"):
        figure1.run(settings, out=tmp_path / "out", command="", console=console)
    assert "Stopped after 2 of 4 passages; run again, it goes on from there\n" in console.file.getvalue()
    result = figure1.run(settings, out=tmp_path / "out", command="", console=console)
    assert "2 passages were measured before" in console.file.getvalue()
    np.testing.assert_array_equal(result.values, whole.values)


@pytest.mark.parametrize("junk", [b"", b"no arrays", b"PK\x03\x04 no arrays"])
def test_a_state_that_is_none(junk, folder, tmp_path):
    (tmp_path / "state.npz").write_bytes(junk)
    model, _ = attentions.load_encoder(folder("bert"))
    with pytest.raises(ValueError, match=r"state\.npz is no state of a measurement; give another --out, or remove it$"):
        spectrum.measure(model, torch.randint(4, 90, (1, N)), state_file=tmp_path / "state.npz")


def test_choose_k_reuses_a_spectrum(folder, text, tmp_path):
    """Whichever of them has more passages."""
    own, out = folder("bert"), ["--length", str(N), "--text", text, "--out", str(tmp_path / "out")]

    def told(*arguments):
        result = CliRunner().invoke(app, [*arguments, *out], catch_exceptions=False)
        assert result.exit_code == 0
        return " ".join(result.output.split())

    told("spectrum", own, "--sentences", "5")
    few = told("choose-k", own, "--sentences", "3", "--energy", "0.8")
    assert "5 passages were measured before, more than the 3 asked for: the result is of all" in few
    assert "5 passages were measured before " in told("choose-k", own, "--sentences", "7", "--energy", "0.8")
    told("spectrum", own, "--sentences", "2")
    assert json.loads((tmp_path / "out" / "spectrum.json").read_text())["sentences"] == 7


def test_passages(text, monkeypatch):
    own = tokenizer()
    ids = attentions.passages([text], own, N, 20)
    assert ids.shape == (20, N)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    for texts in ([text], text, Path(text)):  # one needs no list
        assert torch.equal(ids, attentions.passages(texts, own, N, 20))
    assert not torch.equal(ids, attentions.passages([text], own, N, 20, seed=1))
    for pool in (attentions.POOL, 4 * N):  # all at once, and four at a time
        monkeypatch.setattr(attentions, "POOL", pool)
        many = attentions.passages([text], own, N, 20)
        for count in (1, 3, 9):
            assert torch.equal(attentions.passages([text], own, N, count), many[:count])
        assert len(many.unique(dim=0)) == 20
    own.model_max_length = 300
    message = r"length=300 is too long for these texts: the longest of 30 documents has (19\d|20[0-2]) tokens"
    with pytest.raises(ValueError, match=message):
        attentions.passages([text], own, 300, 20)


def test_lengths_follow_the_model(folder, text, tmp_path):
    """This one takes 32 tokens."""
    for command, option in (("spectrum", ["--sentences", "2"]), ("choose-k", ["--sentences", "2", "--budget", "8"])):
        arguments = [command, folder("bert"), "--text", text, *option, "--out", str(tmp_path / "out")]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    record = json.loads((tmp_path / "out" / "spectrum.json").read_text())
    assert (record["n"], record["at"]) == (32, 8)
    options = ["--passages", "1", "--others", "2", "--steps", "2", "--out", str(tmp_path / "low")]
    arguments = ["lowrank", folder("bert"), "--text", text, *options]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    losses = json.loads((tmp_path / "low" / "lowrank.json").read_text())["losses"]
    assert list(dict.fromkeys(loss["k"] for loss in losses)) == [2, 4, 8, 16]


def test_command(folder, text, tmp_path):
    out = tmp_path / "out"
    arguments = ["spectrum", folder("bert"), "--text", text, "--length", str(N), "--at", "8", "--sentences", "6"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((out / "spectrum.json").read_text())
    assert {"command", "commit", "device", "torch", "model", "sentences"} <= record.keys()
    assert record["sentences"] == 6
    assert np.array(record["cumulative"]).shape == (3, 2, N)
    assert f"{np.array(record['cumulative'])[:, :, 7].mean():.3f} of their sum" in (out / "spectrum.md").read_text()
    for name in ("cumulative", "cumulative_std", "energy"):
        assert np.array(record[f"{name}_at"]).shape == (3, 2)
        assert np.array(record[f"{name}_by_layer"]).shape == (3, N)
        np.testing.assert_allclose(
            np.mean(record[f"{name}_at"], 1), np.array(record[f"{name}_by_layer"])[:, 7], atol=1e-6
        )
    for suffix in ("png", "svg"):
        assert (out / f"spectrum.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("path", KEPT, ids=[path.parent.name for path in KEPT])
def test_what_is_kept_is_small_and_gives_the_page(path):
    record = json.loads(path.read_text())
    assert path.stat().st_size < 8 * sum(np.size(own) for own in record.values() if isinstance(own, list))
    page = path.with_suffix(".md").read_text()
    for layer, (means, stds) in enumerate(zip(record["cumulative_at"], record["cumulative_std_at"], strict=True), 1):
        cells = (f"{mean:.3f} ± {std:.3f}" for mean, std in zip(means, stds, strict=True))
        assert f"| {layer} | {' | '.join(cells)} |" in page
    assert f"of their squares they hold {np.mean(record['energy_at']):.3f}" in page
    np.testing.assert_allclose(
        np.array(record["cumulative"])[:, :, record["at"] - 1], record["cumulative_at"], atol=5.1e-5
    )


def test_the_figure_says_what_it_is_of():
    record = {"model": "sentence-transformers/small", "texts": ["/data/imdb/test.parquet", "wiki.txt"]}
    record |= {"n": 512, "sentences": 1000}
    assert figure1.title(record) == (
        "sentence-transformers/small on imdb/test.parquet, wiki.txt: n = 512, 1,000 passages"
    )


def test_claims_are_put_into_words():
    """A spectrum that falls faster with each layer, and one that does the opposite."""
    rates = np.array([[1, 2], [3, 4], [5, 6], [7, 8.0]])  # of layers and heads
    shares = 1 - 0.9 ** (rates[:, :, None] * np.arange(1, 9))
    for sign, array, verdict in (("", shares, "are lower"), ("-", shares[::-1], "are not lower")):
        line = figure1.sentences(spectrum.Spectrum(10, *[array] * 5), 4)[2]
        assert f"its share: {sign}1.00 (over single heads {sign}0.98)" in line
        assert line.endswith(f"higher layers {verdict} in rank.")


def test_ties_share_their_rank():
    assert spectrum.rank_correlation([1, 1, 2, 2], [5, 6, 7, 8]) == pytest.approx(0.8944, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("linformer", {}, "is a Linformer, whose attention is onto projected keys"),
        ("fnet", {}, "computes no attention of 24 by 24 tokens"),
        ("gpt2", {}, "is causal"),
        ("bert", {"length": 33}, "length=33 is more than the 32 tokens that"),
        ("bert", {"length": 31, "texts": ["short.txt"]}, "length=31 is too long for these texts"),
        ("bert", {"at": 24}, "at=24 must be below length=24"),
        ("bert", {"texts": ["none.txt"]}, "text 'none.txt' does not exist"),
        ("bert", {"texts": ["empty.txt"]}, "the texts hold no document"),
        ("bert", {"length": 1, "at": 1}, "length=1 must be at least 2"),
        ("bert", {"length": 2, "at": 1}, "length=2 has no room for words beside 2 special tokens; take more"),
        ("bert", {"workers": 0}, "workers=0 must be a positive integer"),
        ("modernbert", {}, "has layers with a sliding window, whose P is a band; the analysis is of full attention"),
        ("t5", {}, "is an encoder-decoder; the analysis is of encoders"),
    ],
)
def test_one_sentence(kind, options, message, folder, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    (tmp_path / "empty.txt").touch()
    settings = figure1.Settings(**{"model": folder(kind), "texts": [text], "length": N, "at": 8, **options})
    with pytest.raises(ValueError, match=message):
        figure1.run(settings, out=tmp_path / "out", command="", console=Console(quiet=True))


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing"])
def test_no_such_folder(name):
    with pytest.raises(ValueError, match=f"model='{name}' is no folder"):
        attentions.load_encoder(name)


def test_the_folder_of_a_run(folder, tmp_path):
    (tmp_path / "model").symlink_to(folder("bert"))
    with pytest.raises(ValueError, match=f"model='{tmp_path}' is the folder of a run; its model is '{tmp_path}/model'"):
        attentions.load_encoder(str(tmp_path))


def test_a_model_without_its_tokenizer(folder, tmp_path):
    """Of transformers there would be one that knows no words, and P that of unknown ones."""
    own = Path(folder("bert"))
    for path in own.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer: save one beside the model$"):
        attentions.load_config(str(own))
    few = tokenizer(["w1", "w2"])
    few.save_pretrained(own)
    with pytest.raises(ValueError, match="has a tokenizer of 6 tokens for a vocabulary of 100; save the one that"):
        attentions.load_config(str(own))


@pytest.mark.parametrize(("kind", "most"), [("bert", 40), ("roberta", 38), ("mpnet", 38), ("distilbert", 40)])
def test_as_long_as_the_positions_reach(kind, most, folder):
    own = tokenizer()
    own.model_max_length = 10**30  # it does not know
    own.save_pretrained(path := folder(kind))
    assert attentions.usual_length(path) == most
    model, own = attentions.load_encoder(path)
    with torch.no_grad():
        model(torch.full((1, most), 5))
    with pytest.raises(ValueError, match=f"length={most + 1} is more than the {most} tokens that '.*{kind}' takes"):
        attentions.passages(["none.txt"], own, most + 1, 1)


def test_lowrank_of_too_long_passages(folder, text, tmp_path):
    settings = equation6.Settings(folder("bert"), [text], (2,), length=33)
    with pytest.raises(ValueError, match="length=33 is more than the 32 tokens that"):
        equation6.run(settings, out=tmp_path / "out", command="", console=Console(quiet=True))


def test_a_window_as_wide_as_the_passage_is_full_attention(folder):
    """This one reaches four tokens to either side."""
    model, _ = attentions.load_encoder(folder("modernbert"))
    assert attentions.check_watchable(model, torch.randint(4, 90, (1, 5)), "own") == (3, 2)
    with pytest.raises(ValueError, match="model='own' has layers with a sliding window"):
        attentions.check_watchable(model, torch.randint(4, 90, (1, 6)), "own")


@pytest.mark.parametrize("command", ["spectrum", "lowrank"])
def test_a_short_length_is_what_is_named(command, folder, text, tmp_path):
    arguments = [command, folder("bert"), "--text", text, "--length", "2", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert "length=2" in str(result.exception)
