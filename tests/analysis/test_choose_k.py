"""The choice of k: rounding, budgets, and a config that can be trained."""

import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from linformers import LinformerConfig, LinformerModel, pretrained
from linformers.analysis import choose_k
from linformers.analysis.choose_k import choose, kept_energy, round_to_divisors, variants, within_budget
from linformers.errors import UserError
from linformers.training.recipe import read

ROOT = Path(__file__).parents[2]
N = 24
DEFAULTS = {"energy": None, "budget": None, "per": "layer", "sharing": "headwise", "length": N, "sentences": 4}
DEFAULTS |= {"seed": 0, "text_column": "text", "command": "test"}


def run(model, text, out, **options):
    console = Console(file=io.StringIO(), width=100)
    choose_k.run(model, [text], out=out, console=console, **{**DEFAULTS, **options})
    return console.file.getvalue()


def curves(*rates):
    """Energies (layers, heads, 512) that fall by these factors."""
    energy = 1 - np.array(rates)[..., None] ** np.arange(1, 513)
    return energy / energy[..., -1:]


ENERGY = curves([0.98, 0.96], [0.9, 0.95], [0.5, 0.8])


@pytest.mark.parametrize(("share", "k"), [(0.5, 32), (0.51, 40), (0.999, 64)])
def test_the_smallest_k_that_reaches_a_share_is_rounded_up(share, k):
    energy = np.linspace(1 / 64, 1, 64)[None, None]  # i of 64 values hold i/64
    assert choose(energy, share, per="layer", sharing="headwise") == [k]


def test_rounding_to_divisors():
    assert round_to_divisors(np.array([100, 65, 64, 3, 1]), 512).tolist() == [128, 128, 64, 4, 1]
    assert round_to_divisors(np.array([130, 65, 50]), 512).tolist() == [192, 96, 64]
    assert round_to_divisors(np.array([499, 200]), 500).tolist() == [500, 250]


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
def test_choices_are_valid_and_keep_what_was_asked_for(per, sharing):
    lengths = choose(ENERGY, 0.9, per=per, sharing=sharing)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    LinformerConfig(**sizes, max_position_embeddings=512, projected_length=lengths, sharing=sharing)
    means = [np.mean(layer) for layer in lengths]
    assert means == sorted(means, reverse=True)
    reached = kept_energy(lengths, ENERGY)
    assert (reached >= 0.9).all() if per == "head" else (reached.mean(1) >= 0.9).all()
    assert reached[1, 1] == ENERGY[1, 1, np.array(lengths).reshape(3, -1)[1, -1] - 1]


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_a_budget_is_used_and_kept(sharing):
    lengths, share = within_budget(ENERGY, 64, per="layer", sharing=sharing)
    assert 48 <= np.mean(lengths) <= 64
    kept = kept_energy(lengths, ENERGY).mean()
    assert kept >= share
    assert kept > kept_energy([64, 64, 64], ENERGY).mean() or sharing == "layerwise"
    with pytest.raises(UserError, match="budget=1 is too small"):
        within_budget(ENERGY, 1, per="layer", sharing=sharing)


def test_variants_cost_the_same():
    found = variants([64, 128, 32, 16], 512)
    assert list(found) == ["uniform", "chosen", "decreasing", "increasing"]
    assert list(found.values()) == [[64] * 4, [64, 128, 32, 16], [128, 64, 32, 16], [16, 32, 64, 128]]
    assert list(variants([[8, 16], [8, 8]], 512)) == ["uniform", "chosen"]
    assert list(variants([64, 32], 512)) == ["uniform", "chosen", "increasing"]  # the choice decreases already
    assert variants([508, 510], 510)["uniform"] == [510, 510]


@pytest.mark.parametrize("options", [{"energy": 0.8}, {"budget": 16, "per": "head", "sharing": "none"}])
def test_run_writes_a_config_that_the_printed_command_trains(options, folder, text, tmp_path):
    output = run(folder("distilbert"), text, tmp_path, **options)
    record = json.loads((tmp_path / "choose-k.json").read_text())
    config = LinformerConfig.from_pretrained(tmp_path)
    assert config.projected_length == record["choices"]["chosen"]
    assert LinformerModel(config).config.max_position_embeddings == N
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 3)  # the tokenizer's
    (line,) = (line for line in output.splitlines() if line.startswith("linformers pretrain RECIPE "))
    for name in ("n512-twin", "n512-k128-layerwise"):  # whatever the recipe sets
        recipe = read(ROOT / "recipes" / "small.yaml", [f"variant={name}", *shlex.split(line)[3:]])
        trained = recipe.config(vocab_size=100).resolved()
        for field in ("projection", "projected_length", "sharing", "projection_scale", "max_position_embeddings"):
            assert getattr(trained, field) == getattr(config, field)


def test_a_spectrum_is_reused(folder, text, tmp_path, monkeypatch):
    model = folder("bert")
    run(model, text, tmp_path, sentences=5, energy=0.8)
    monkeypatch.setattr("linformers.analysis.spectrum.singular_values", None)  # nothing is measured again
    run(model, text, tmp_path, sentences=3, energy=0.8)
    assert json.loads((tmp_path / "spectrum.json").read_text())["sentences"] == 5


def test_another_config_is_not_overwritten(folder, text, tmp_path):
    model, path = folder("bert"), tmp_path / "out" / "config.json"
    run(model, text, path.parent, budget=16)
    kept = path.read_text()
    path.write_text(re.sub(r'"transformers_version": ".*"', '"transformers_version": "1.0"', kept))
    run(model, text, path.parent, budget=16)  # the same choice, written by another version of transformers
    assert path.read_text() == kept
    with pytest.raises(UserError, match=f"{path} is another choice or another model"):
        run(model, text, path.parent, budget=8)
    assert path.read_text() == kept
    path.unlink()
    run(model, text, path.parent, budget=8)
    assert path.read_text() != kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "energy=None and budget=None"),
        ({"energy": 0.9, "budget": 8}, "energy=0.9 and budget=8"),
        ({"energy": 1.5}, "energy=1.5 must be above 0 and below 1"),
        ({"budget": 24}, "budget=24 must be .* below length=24"),
        ({"budget": 0}, "budget=0 must be at least 1"),
        ({"energy": 0.9, "per": "heads"}, "per='heads' is not one of 'layer', 'head'"),
        ({"energy": 0.9, "sharing": "all"}, "sharing='all' is not one of"),
    ],
)
def test_wrong_input_is_named(options, message, folder, text, tmp_path):
    with pytest.raises(UserError, match=message):
        run(folder("bert"), text, tmp_path / "out", **options)


def test_the_config_takes_over_what_the_encoder_is():
    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    kind = {"norm_first": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.2}
    fields = choose_k.model_fields(LinformerConfig(projection="identity", **kind), tokenizer)
    assert {name: fields[name] for name in kind} == kind
