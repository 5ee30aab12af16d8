"""The time of a training step of each variant whose quality is measured: all in one process, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..benchmark.measure import Run, best_device, interleaved, release
from ..heads import IGNORED, LinformerForMaskedLM
from ..markdown import table
from ..provenance import commit, environment
from ..training.compiled import compile_parts
from ..training.recipe import Recipe, read
from . import quality
from .jobs import origin
from .matrix import Place, changes_for

VOCABULARY = 16384


def measure(place: Place, console: Console) -> dict[str, Any]:
    """Seconds of a step of every variant that has a shape of its own; where it starts from makes no difference."""
    if (before := collect(place))["runs"]:
        path = place.record("steps")
        console.print(f"{path} is there already; delete it to measure again", highlight=False, markup=False)
        return before
    place.check_recipes()
    torch._dynamo.config.recompile_limit = 64  # each variant is a graph of its own
    recipes = {name: variant_recipe(place, name) for name in quality.DRAWN}
    runs: dict[str, Run] = {}
    shapes = first_of_shape(recipes)
    for name in shapes:
        with console.status(f"compiling {name}"):
            runs[name] = training_step(recipes[name])
            for _ in range(3):
                runs[name]()
        release()
    with console.status("timing all in turn"):
        seconds = interleaved(runs, min_seconds=1.0, rounds=5)
    timed = {name: seconds[first] for first, names in shapes.items() for name in names}
    where = {"command": "linformers reproduce steps", "commit": commit(), **environment()}
    tokens = recipes[quality.TWIN].batch_size * recipes[quality.TWIN].max_length
    return {"runs": {"steps": origin(where)}, "tokens": tokens, "seconds": timed}


def collect(place: Place) -> dict[str, Any]:
    """What was measured before, if anything."""
    return place.read("steps") or {"runs": {}, "seconds": {}}


def variant_recipe(place: Place, name: str) -> Recipe:
    own = quality.VARIANTS[name]
    path = place.recipes / f"{own.recipe}.yaml"
    return read(path, changes_for(place, path, own.changes))


def first_of_shape(recipes: Mapping[str, Recipe]) -> dict[str, list[str]]:
    """The names of variants that do the same computations, under the first of them."""
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for name, recipe in recipes.items():
        config = recipe.config(vocab_size=VOCABULARY)
        shape = (config.projection, config.projected_lengths, config.local_windows, config.sharing)
        shapes.setdefault(tuple(map(str, shape)), []).append(name)
    return {names[0]: names for names in shapes.values()}


def training_step(recipe: Recipe) -> Run:
    """Loss, gradients, clipping and AdamW's update, as in pretraining, on tokens at random."""
    device = best_device()
    config = recipe.config(vocab_size=VOCABULARY)
    n = config.max_position_embeddings
    with torch.device(device):
        model = LinformerForMaskedLM(config).train()
        ids = torch.randint(5, VOCABULARY, (recipe.batch_size, n))
        unseen = torch.rand(ids.shape).argsort() >= round(recipe.mask_share * n)  # as many are predicted in each row
        labels = ids.masked_fill(unseen, IGNORED)
    compile_parts(model, recipe.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def page(record: Mapping[str, Any]) -> list[str]:
    """Milliseconds, and against the twin's."""
    twin = record["seconds"][quality.TWIN]
    first: dict[float, str] = {}  # of variants that compute the same, and so were timed once
    for name, own in record["seconds"].items():
        first.setdefault(own, name)
    rows = [(name, f"{1000 * own:.1f}", f"{own / twin:.2f}") for own, name in first.items()]
    return [
        f"Steps of {record['tokens']:,} tokens as the section below trains them, without the loading of data: loss, "
        "gradients, clipping and AdamW, timed in turn in one process that has the machine to itself.",
        "",
        *table(("model", "ms", "of the twin's"), rows),
    ]
