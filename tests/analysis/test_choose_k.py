"""Which k: rounding, budgets, and a config that can be trained."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from linformers import LinformerConfig, LinformerModel, pretrained
from linformers.analysis import choose_k, figure1
from linformers.analysis.choose_k import choose, kept, smallest, to_divisors, variants, within_budget
from linformers.cli import app
from linformers.training.recipe import read

ROOT = Path(__file__).parents[2]
N = 24


def curves(*rates):
    """Energies (layers, heads, 512) that fall by these factors."""
    places = np.arange(1, 513)
    energy = 1 - np.array(rates)[..., None] ** places
    return energy / energy[..., -1:]


ENERGY = curves([0.98, 0.96], [0.9, 0.95], [0.5, 0.8])


def test_smallest():
    energy = np.array([[0.5, 0.8, 0.9, 1.0], [0.9, 0.95, 0.99, 1.0]])
    assert smallest(energy, 0.9).tolist() == [3, 1]
    assert smallest(energy, 0.91).tolist() == [4, 2]


def test_rounding():
    assert to_divisors(np.array([100, 65, 64, 3, 1]), 512).tolist() == [128, 128, 64, 4, 1]
    assert to_divisors(np.array([130, 65, 50]), 512).tolist() == [192, 96, 64]
    assert to_divisors(np.array([499, 200]), 500).tolist() == [500, 250]


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
def test_choices_are_valid_and_keep_what_was_asked_for(per, sharing):
    lengths = choose(ENERGY, 0.9, per=per, sharing=sharing)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    LinformerConfig(**sizes, max_position_embeddings=512, projected_length=lengths, sharing=sharing)
    means = [np.mean(layer) for layer in lengths]
    assert means == sorted(means, reverse=True)
    by_head = np.broadcast_to(np.array(lengths).reshape(3, -1), (3, 2))
    reached = np.take_along_axis(ENERGY, by_head[:, :, None] - 1, -1)[..., 0]
    assert (reached >= 0.9).all() if per == "head" else (reached.mean(1) >= 0.9).all()
    assert kept(lengths, ENERGY).mean() == pytest.approx(reached.mean())


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_a_budget_is_used_and_kept(sharing):
    lengths, share = within_budget(ENERGY, 64, per="layer", sharing=sharing)
    assert 48 <= np.mean(lengths) <= 64
    assert kept(lengths, ENERGY).mean() >= share
    assert kept(lengths, ENERGY).mean() > kept([64, 64, 64], ENERGY).mean() or sharing == "layerwise"
    with pytest.raises(ValueError, match="budget=1 is too small: half of the energy takes a mean k of"):
        within_budget(ENERGY, 1, per="layer", sharing=sharing)


def test_variants_cost_the_same():
    found = variants([64, 128, 32, 16], 512)
    assert found == {
        "uniform": [64] * 4,
        "chosen": [64, 128, 32, 16],
        "decreasing": [128, 64, 32, 16],
        "increasing": [16, 32, 64, 128],
    }
    assert list(variants([[8, 16], [8, 8]], 512)) == ["uniform", "chosen"]
    assert list(variants([64, 32], 512)) == ["uniform", "chosen", "increasing"]  # it decreases by itself
    assert variants([508, 510], 510)["uniform"] == [510, 510]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([64, 64], "the same k"), ([64, 32], "needs less k"), ([[8, 8], [8, 16]], "needs more k")],
)
def test_verdict(lengths, expected):
    assert expected in choose_k.verdict(lengths)


@pytest.mark.parametrize("options", [["--energy", "0.8"], ["--budget", "16", "--per", "head", "--sharing", "none"]])
def test_command(options, folder, text, tmp_path):
    out = tmp_path / "out"
    arguments = ["choose-k", folder("distilbert"), "--text", text, "--length", str(N), "--sentences", "4"]
    result = CliRunner().invoke(app, [*arguments, *options, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((out / "choose-k.json").read_text())
    config = LinformerConfig.from_pretrained(out)
    assert config.projected_length == record["choices"]["chosen"]
    assert LinformerModel(config).config.max_position_embeddings == N
    assert all(cost["seconds"] > 0 and cost["peak_bytes"] > 0 for cost in record["costs"])
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 3)  # the tokenizer's
    assert "linformers pretrain RECIPE data=DATA out=OUT 'model.projected_length=[" in (out / "choose-k.md").read_text()
    # What is printed trains this model, whatever the recipe says.
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("linformers pretrain RECIPE "))
    for name in ("n512-twin", "n512-k128-layerwise"):
        trained = read(ROOT / "recipes" / "small" / f"{name}.yaml", shlex.split(line)[3:]).config(vocab_size=100)
        for field in ("projection", "projected_length", "sharing", "projection_scale", "max_position_embeddings"):
            assert getattr(trained, field) == getattr(config, field)


def test_costs_know_no_special_tokens():
    """Whose numbers may be beyond the few words of a benchmark."""
    fields = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    (cell,) = choose_k.costs({"chosen": [8]}, {**fields, "pad_token_id": 5000, "vocab_size": 6000}, 16)
    assert cell.seconds > 0


def test_a_config_is_not_replaced_by_another(folder, text, tmp_path):
    """The same choice is written again, whatever the version of transformers; another one is refused."""
    path = tmp_path / "out" / "config.json"

    def choose_again(budget):
        arguments = ["choose-k", folder("bert"), "--text", text, "--sentences", "2", "--budget", budget]
        return CliRunner().invoke(app, [*arguments, "--out", str(path.parent)])

    assert choose_again("16").exit_code == 0
    kept = path.read_text()
    path.write_text(re.sub(r'"transformers_version": ".*"', '"transformers_version": "1.0"', kept))
    assert choose_again("16").exit_code == 0
    assert path.read_text() == kept
    refused = choose_again("8").exception
    assert str(refused) == f"{path} is of another choice, or of a model; give another --out, or remove it"
    assert path.read_text() == kept
    path.unlink()
    assert choose_again("8").exit_code == 0
    assert path.read_text() != kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "energy=None and budget=None: give one of them"),
        ({"energy": 0.9, "budget": 8}, "energy=0.9 and budget=8: give one of them"),
        ({"energy": 1.5}, "energy=1.5 must be a share"),
        ({"budget": 24}, "budget=24 must be below length=24"),
        ({"energy": 0.9, "per": "heads"}, "per='heads' is not one of 'layer', 'head'; did you mean 'head'?"),
    ],
)
def test_one_sentence(options, message, tmp_path):
    settings = choose_k.Settings(figure1.Settings("x", ["y"], length=N, at=1), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_k.run(settings, out=tmp_path, command="", console=Console(quiet=True))


def test_the_config_is_of_the_kind_that_was_looked_at():
    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    kind = {"norm_first": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.2}
    fields = choose_k.model_fields(LinformerConfig(projection="identity", **kind), tokenizer)
    assert {name: fields[name] for name in kind} == kind
