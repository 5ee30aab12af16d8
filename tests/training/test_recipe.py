"""Recipes: what they say, and one sentence for what they cannot say."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from linformers.training import recipe as recipes
from linformers.training.monitor import read_metrics

from . import small

ROOT = Path(__file__).parents[2]


def write(folder, **values):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"data": "d", "out": "o", "steps": 10, **values}))
    return path


def test_changes(tmp_path):
    path = write(tmp_path, model={"projected_length": 64}, learning_rate=1e-3)
    changed = recipes.read(path, ["steps=20", "learning_rate=5e-4", "model.sharing=none", "model.num_hidden_layers=3"])
    assert (changed.steps, changed.learning_rate) == (20, 5e-4)
    assert changed.model == {"projected_length": 64, "sharing": "none", "num_hidden_layers": 3}


def test_base(tmp_path):
    write(tmp_path, model={"projected_length": 64, "hidden_size": 96}, learning_rate=1e-3)
    twin = tmp_path / "twin.yaml"
    twin.write_text("base: recipe.yaml\nlearning_rate: 2e-3\nmodel: {projection: identity}\n")
    read = recipes.read(twin)
    assert read.model == {"projected_length": 64, "hidden_size": 96, "projection": "identity"}
    assert read.learning_rate == 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["stepps=3"], "'stepps' is not a key of a recipe; did you mean 'steps'?"),
        (
            ["model.projcted_length=3"],
            "'model.projcted_length' is not a key of a recipe; did you mean 'model.project",
        ),
        (["modle.sharing=none"], "'modle' is not a key of a recipe; did you mean 'model'?"),
        (["model.vocab_size=3"], "model.vocab_size is not for a recipe to choose: the corpus has a vocabulary"),
        (["model.projected_length=1000"], "projected_length=1000 exceeds max_position_embeddings=512"),
        (["steps"], "'steps' is not of the form key=value, such as steps=100"),
        (["steps=0"], "steps=0 must be a positive integer"),
        (["steps=ten"], "steps='ten' must be a positive integer"),
        (["steps=[1"], "'steps=[1': the value is not YAML"),
        (["learning_rate=-1"], "learning_rate=-1 must be a positive number"),
        (["short_rows=1.5"], "short_rows=1.5 must be a probability"),
        (["mask_share=0"], "mask_share=0 must be a positive number"),
        (["schedule=linaer"], "schedule='linaer' is not one of 'linear', 'cosine', 'constant'; did you mean 'linear'?"),
        (["shard=maybe"], "shard='maybe' must be true or false"),
        (["workers=-1"], "workers=-1 must be 0 or a positive integer"),
        (["out="], "out=None must be the name of a folder"),
        (["model=3"], "model=3 must be fields of LinformerConfig"),
    ],
)
def test_what_cannot_be(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        recipes.read(write(tmp_path), changes)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        recipes.read(tmp_path / "none.yaml")
    (tmp_path / "child.yaml").write_text("base: none.yaml\n")
    with pytest.raises(ValueError, match=r"child.yaml has base='none.yaml', which does not exist beside it"):
        recipes.read(tmp_path / "child.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="holds no recipe"):
        recipes.read(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    with pytest.raises(ValueError, match=r"bad.yaml is not YAML: .* in line 2$"):
        recipes.read(tmp_path / "bad.yaml")
    (tmp_path / "short.yaml").write_text("data: d\nout: o\n")
    with pytest.raises(ValueError, match=re.escape("short.yaml has no 'steps'; add it, or pass steps=…")):
        recipes.read(tmp_path / "short.yaml")


def test_batch_that_cannot_be_shared_out():
    recipe = small.recipe("d", "o", batch_size=8, rows_at_once=3)
    with pytest.raises(ValueError, match="batch_size=8 is not a multiple of rows_at_once=3 times 2 processes"):
        recipe.accumulation(2)
    assert small.recipe("d", "o", batch_size=8).rows_per_pass(2) == 4


def test_nothing_is_written_for_a_wrong_recipe(corpus, tmp_path):
    with pytest.raises(ValueError, match="holds no corpus"):
        small.train(small.recipe(tmp_path / "nowhere", tmp_path / "out"))
    with pytest.raises(ValueError, match="rows of 16384 need at least"):
        small.train(small.recipe(corpus, tmp_path / "out", model={"max_position_embeddings": 16384}))
    assert not (tmp_path / "out" / "run.json").exists()


def test_damaged_shard_is_named(corpus, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    shard = data / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    size = f"{len(content)} bytes, expected {len(content)}"
    with pytest.raises(ValueError, match=rf"train-00000.bin has sha256 \w+, expected \w+ \({size}\)"):
        small.train(small.recipe(data, tmp_path / "out"))
    shard.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=f"train-00000.bin has {len(content) - 2} bytes, expected {len(content)}"):
        small.train(small.recipe(data, tmp_path / "out"))
    assert not (tmp_path / "out" / "run.json").exists()


def test_run_of_another_recipe(corpus, tmp_path):
    assert small.train(small.recipe(corpus, tmp_path, steps=4)) == 0
    message = r"holds a run of another recipe: learning_rate was 0.003 and is 0.1 now; choose another out"
    with pytest.raises(ValueError, match=message):
        small.train(small.recipe(corpus, tmp_path, steps=4, learning_rate=0.1))
    with pytest.raises(ValueError, match=r"model.projected_length was 8 and is 4 now; choose another out"):
        small.train(small.recipe(corpus, tmp_path, steps=4, model={"projected_length": 4}))
    assert small.train(small.recipe(corpus, tmp_path, steps=4, workers=1, log_every=1)) == 0
    assert [record["step"] for record in read_metrics(tmp_path)] == [3, 4, 4]


def test_corpus_with_another_tokenizer(corpus, tmp_path):
    from linformers.training.prepare import prepare

    other = tmp_path / "other"
    text = corpus.parent / "text.jsonl"
    prepare([str(text)], other, vocab_size=290, validation_share=0.1, workers=1, console=small.QUIET)
    assert small.train(small.recipe(corpus, tmp_path / "run", steps=4)) == 0
    with pytest.raises(ValueError, match="was made with another tokenizer than the run in out="):
        small.train(small.recipe(other, tmp_path / "run", steps=4))


RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_that_come_with_the_project(path):
    recipe = recipes.read(path)
    config = recipe.config(vocab_size=1000)
    if "twin" in path.stem:
        assert config.projection == "identity"
        base = recipes.read(path.parent / yaml.safe_load(path.read_text())["base"])
        assert {**base.to_dict(), "out": recipe.out} == {**recipe.to_dict(), "model": base.model}
        assert {**base.model, "projection": "identity"} == recipe.model


@pytest.mark.parametrize("name", ["paper/n512-k128-none", "paper/n512-twin", "small/n512-k128-layerwise", "small/cpu"])
def test_recipes_take_two_steps(name, corpus, tmp_path):
    tiny = ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=16"]
    changes = [f"model.{change}" for change in (*tiny, "max_position_embeddings=32", "projected_length=8")]
    sizes = ["steps=2", "batch_size=4", "rows_at_once=2", "eval_rows=2", "workers=0", "warmup_steps=1"]
    recipe = recipes.read(ROOT / "recipes" / f"{name}.yaml", [*changes, *sizes, f"data={corpus}", f"out={tmp_path}"])
    assert small.train(recipe) == 0
    assert " tokens for validation, held out of the same;\n" in (tmp_path / "model" / "README.md").read_text()
