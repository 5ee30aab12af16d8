"""Recipes: keys, changes, bases and variants, and errors that name the key and its value."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from linformers import LinformerForMaskedLM
from linformers.training import recipe as recipes

from ..modes import refused
from . import small

RECIPES = Path(__file__).parents[2] / "recipes"


def variant_names(path):
    return list(recipes._load(path)[1])


SHIPPED = [
    (path, [f"variant={name}"] if name else [])
    for path in sorted(RECIPES.glob("*.yaml"))
    for name in variant_names(path) or [None]
]


def write(folder, name="recipe.yaml", **values):
    (folder / name).write_text(yaml.safe_dump({"data": "d", "out": "o", "steps": 10, **values}))
    return folder / name


@pytest.mark.parametrize("compile", ["yes", "no", "auto"])
def test_changes(compile, tmp_path):
    path = write(tmp_path, model={"projected_length": 64}, learning_rate=1e-3)
    changes = ["steps=20", "learning_rate=5e-4", "model.sharing=none", f"compile={compile}"]
    changed = recipes.read(path, [*changes, "model.num_hidden_layers=3"])
    assert (changed.steps, changed.learning_rate, changed.compile) == (20, 5e-4, compile)
    assert changed.model == {"projected_length": 64, "sharing": "none", "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), (".5", 0.5), ("2.", 2.0), ("2", 2), ("017", 17), ("1_000", 1000), ("+3", 3)]
)
def test_numbers_are_decimal(text, value, tmp_path):
    """Also where YAML 1.1 reads octal numbers, or text."""
    read = recipes.read(write(tmp_path), [f"model.projection_scale={text}"]).model["projection_scale"]
    assert (type(read), read) == (type(value), value)


def test_base(tmp_path):
    write(tmp_path, model={"projected_length": 64, "hidden_size": 96}, learning_rate=1e-3)
    write(tmp_path, "empty.yaml", model=None)
    child = tmp_path / "child.yaml"
    child.write_text("base: recipe.yaml\nlearning_rate: 2e-3\nmodel: {projection: identity}\n")
    read = recipes.read(child)
    assert read.model == {"projected_length": 64, "hidden_size": 96, "projection": "identity"}
    assert read.learning_rate == 2e-3
    child.write_text("base: empty.yaml\nmodel:\n  hidden_size: 24\n")
    assert recipes.read(tmp_path / "empty.yaml").model == {}
    assert recipes.read(child).model == {"hidden_size": 24}
    with refused("model=3 must be fields"):
        recipes.read(child, ["model=3", "model.hidden_size=16"])


WRONG_VALUES = {"steps": 0, "workers": -1, "learning_rate": -1, "short_rows": 1.5, "mask_share": 0, "model": 3}
WRONG_VALUES |= {"shard": "maybe", "out": None, "schedule": "linaer", "precision": "fp8", "compile": "maybe"}
WRONG_VALUES |= {"optimizer": "muno", "decay_share": 1.0, "final_mask_share": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((f"{name}={json.dumps(value)}", f"{name}={value!r} ") for name, value in WRONG_VALUES.items()),
        ("start=''", "start='' must be a folder"),
        ("out=d", "out='d' and data='d' must not contain each other"),
        ("out=x/../d/run", "out='x/../d/run' and data='d' must not contain each other"),
        ("out=.", "out='.' and data='d' must not contain each other"),
        ("stepps=3", "'stepps' is not a key of a recipe; did you mean 'steps'?"),
        ("model.projcted_length=3", "did you mean 'model.projected_length'?"),
        ("modle.sharing=none", "'modle' is not a key of a recipe; did you mean 'model'?"),
        ("variant=a", "'variant' is not a key"),
        ("model.vocab_size=3", "model.vocab_size cannot be set"),
        ("model.projected_length=5000", "projected_length=5000"),
        ("steps", "'steps' is not of the form key=value"),
        ("steps=[1", "'steps=[1': the value is not YAML"),
        ("steps=2026-99-99", "steps='2026-99-99' must be a positive integer"),
        ("steps=1:30", "steps='1:30' must be a positive integer"),
        ("steps=0x10", "steps='0x10' must be a positive integer"),
        ("steps={a: 1, a: 2}", "the value is not YAML"),
        ("start=", "'start=' has no value; for none, write start=null"),
        ("workers=257", "workers=257 must be an integer from 0 to 256"),
    ],
)
def test_wrong_changes(tmp_path, change, message):
    with refused(message):
        recipes.read(write(tmp_path), [change])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((f"base: {base}\n", f"base={base!r}") for base in ("none.yaml", "r.yaml", "../r.yaml", "/etc/passwd", 5)),
        ("- 1\n", "r.yaml is not a recipe"),
        ("a: [\n", "r.yaml cannot be parsed"),
        ("a: \udcff\n", "r.yaml cannot be parsed"),
        ("a: 1\nb: 2\na: 3\n", "r.yaml cannot be parsed: the key 'a' occurs twice"),
        ("model: {a: 1, a: 2}\n", "r.yaml cannot be parsed: the key 'a' occurs twice"),
        ("a: &a [1]\nb: [*a, *a]\n", "r.yaml cannot be parsed: a recipe cannot have aliases"),
        ("a: " + "[" * 10**5, "r.yaml cannot be parsed: its lists and tables are nested more than 16 deep"),
        (f"a: {'9' * 1001}\n", "r.yaml cannot be parsed: a value has more than 1,000 characters"),
        ("#" * (2**20 + 1), "r.yaml has more than the 1,048,576 bytes"),
        ("variants: [" + "{a: {}, b: {}}, " * 60 + "]", "r.yaml has more than 10,000 variants"),
        ("data: d\nout: o\n", "r.yaml has no 'steps'"),
        ("data: d\nout: o\nsteps: 1\n1: 2\n", "'1' is not a key of a recipe"),
        ("data: d\nout: o\nsteps: 1\nmodel: 5\n", "model=5 must be fields of LinformerConfig"),
        ("variants: [1]\n", "variants=[1]"),
    ],
)
def test_wrong_files(content, message, tmp_path):
    (tmp_path / "r.yaml").write_bytes(content.encode(errors="surrogateescape"))
    with refused(message):
        recipes.read(tmp_path / "r.yaml")
    for path in (tmp_path / "none.yaml", tmp_path):
        with refused(f"{path} is missing or not a file"):
            recipes.read(path)


def test_variants(tmp_path):
    table = {"long": {"batch_size": 8, "model": {"max_position_embeddings": 1024}}, "short": {}}
    path = write(tmp_path, out="runs/{variant}", model={"hidden_size": 96}, variants=table)
    assert variant_names(path) == ["long", "short"]
    long = recipes.read(path, ["variant=long", "model.hidden_size=48"])
    assert (long.out, long.batch_size) == ("runs/long", 8)
    assert long.model == {"hidden_size": 48, "max_position_embeddings": 1024}
    assert recipes.read(path, ["steps=3", "variant=short", "out=x"]).out == "x"
    with refused("add variant=NAME, one of long, short"):
        recipes.read(path)
    with refused("did you mean 'long'"):
        recipes.read(path, ["variant=lnog"])
    child = tmp_path / "child.yaml"
    child.write_text("base: recipe.yaml\nout: x\n")
    assert recipes.read(child).model == {"hidden_size": 96}  # variants are not inherited


def test_grid_of_variants(tmp_path):
    axes = [{"n64": {"model": {"max_position_embeddings": 64}}, "n32": {}}, {"a": {"steps": 1}, "b-c": {"model": {}}}]
    path = write(tmp_path, model={"max_position_embeddings": 32, "projected_length": 8}, variants=axes)
    assert set(variant_names(path)) == {"n64-a", "n64-b-c", "n32-a", "n32-b-c"}
    assert recipes.read(path, ["variant=n64-a"]).steps == 1
    assert recipes.read(path, ["variant=n64-b-c"]).max_length == 64


def test_options_that_exclude_each_other():
    with refused("optimizer='muon' needs whole matrices: it cannot be combined with shard=True"):
        small.recipe("d", "o", optimizer="muon", shard=True)
    with refused("warmup_steps=15 and decay_share=0.5 take more than steps=24"):
        small.recipe("d", "o", schedule="wsd", warmup_steps=15, decay_share=0.5)


def test_batch_that_cannot_be_divided():
    with refused("batch_size=8 is not a multiple of rows_at_once=3 times 2 processes"):
        small.recipe("d", "o", batch_size=8, rows_at_once=3).accumulation_steps(2)
    assert small.recipe("d", "o", batch_size=8).rows_per_pass(2) == 4


@pytest.mark.parametrize(("path", "changes"), SHIPPED, ids=lambda own: own.stem if isinstance(own, Path) else own)
def test_shipped_recipes(path, changes):
    recipe = recipes.read(path, changes)
    config = recipe.config(vocab_size=1000)
    name = changes[0].removeprefix("variant=") if changes else path.stem
    assert recipe.out == f"runs/{path.stem}/{name}" if changes else f"runs/{name}"
    if match := re.match(r"n(\d+)-", name):
        assert config.max_position_embeddings == int(match[1])
    if match := re.search(r"-k(\d+)-(.*)", name):
        sharing, window = ("layerwise", 32) if match[2] == "w32" else (match[2], 0)
        found = (config.projection, config.projected_length, config.sharing, config.local_window)
        assert found == ("linear", int(match[1]), sharing, window)
    assert (config.projection == "identity") == name.endswith("twin")


@pytest.mark.parametrize("variant", variant_names(RECIPES / "english-long.yaml"))
def test_the_long_english_model_has_at_most_32_megabytes(variant):
    recipe = recipes.read(RECIPES / "english-long.yaml", [f"variant={variant}"])
    with torch.device("meta"):
        model = LinformerForMaskedLM(recipe.config(vocab_size=16_384))
    short = variant.startswith("short")
    assert recipe.max_length == (1024 if short else 8192)
    assert 12e6 < model.num_parameters() <= 16e6  # 2 bytes each
    assert recipe.batch_size * recipe.max_length == 2**16
    tokens = recipe.steps * 2**16
    if recipe.start:
        first = recipes.read(RECIPES / "english-long.yaml", [f"variant={variant.replace('long', 'short')}"])
        assert recipe.start == f"{first.out}/model"
        tokens += first.steps * 2**16
    assert tokens == (1600 if short else 2000) * 2**16


def test_paper_grid_is_complete():
    sharings = ("none", "headwise", "key-value", "layerwise")
    models = ["twin", *(f"k{k}-{sharing}" for k in (128, 256) for sharing in sharings)]
    grid = {f"n{n}-{model}" for n in (512, 1024, 2048, 4096) for model in models}
    assert set(variant_names(RECIPES / "paper.yaml")) == grid


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("paper", "n512-k128-none"),
        ("paper", "n512-twin"),
        ("small", "n512-k128-layerwise"),
        ("cpu", None),
        *(("english-long", variant) for variant in ("base", "muon", "masks", "wsd", "short")),
    ],
)
def test_shipped_recipes_train(name, variant, corpus, tmp_path):
    tiny = ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=16"]
    changes = [f"model.{change}" for change in (*tiny, "max_position_embeddings=32", "projected_length=8")]
    changes += ["steps=2", "batch_size=4", "rows_at_once=2", "eval_rows=2", "workers=0", "warmup_steps=1"]
    changes += [f"data={corpus}", f"out={tmp_path}", *([f"variant={variant}"] if variant else [])]
    assert small.train(recipes.read(RECIPES / f"{name}.yaml", changes)) == 0
