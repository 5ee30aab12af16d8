"""The time of a training step of each variant whose quality is measured, timed in turn in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from linformers import LinformerForMaskedLM, provenance
from linformers.benchmark.measure import DEVICE, interleaved, release
from linformers.training.recipe import Recipe, read
from linformers.training.trainer import compile_model

from .experiments import Workspace, changes_for, recipe_of
from .jobs import origin
from .quality import DRAWN, TWIN, VARIANTS
from .sections import main

TITLE = "Time of a training step, n = 512"
VOCABULARY = 16384


def measure(work: Workspace) -> dict[str, Any]:
    """Seconds of a step of every variant; how a model starts does not change its time."""
    recipes = {name: variant_recipe(work, name) for name in DRAWN if not name.endswith("plain start")}
    return seconds_of(recipes, "steps")


def seconds_of(recipes: Mapping[str, Recipe], section: str) -> dict[str, Any]:
    """The seconds of a training step by each recipe, timed in turn; all have the same number of tokens a step."""
    torch._dynamo.config.recompile_limit = 64  # each recipe is a graph of its own
    runs: dict[str, Callable[[], None]] = {}
    for name, recipe in recipes.items():
        print(f"compiling {name}", flush=True)
        runs[name] = training_step(recipe)
        for _ in range(3):
            runs[name]()
        release()
    seconds = interleaved(runs, min_seconds=1.0, rounds=5)
    where = {"command": f"python -m paper.{section}", "commit": provenance.commit(), **provenance.environment()}
    tokens = recipe.batch_size * recipe.max_length
    return {"runs": {section: origin(where)}, "tokens": tokens, "seconds": seconds}


def variant_recipe(work: Workspace, name: str) -> Recipe:
    own = VARIANTS[name]
    path, changes = recipe_of(own.variant)
    return read(path, [*changes, *changes_for(work, own.variant, own.changes)])


def training_step(recipe: Recipe) -> Callable[[], None]:
    """Loss, gradients, clipping and AdamW's update, as in pretraining, on random tokens."""
    config = recipe.config(vocab_size=VOCABULARY)
    n = config.max_position_embeddings
    with torch.device(DEVICE):
        model = LinformerForMaskedLM(config).train()
        ids = torch.randint(5, VOCABULARY, (recipe.batch_size, n))
        unlabeled = torch.rand(ids.shape).argsort() >= round(recipe.mask_share * n)  # the same number in each row
        labels = ids.masked_fill(unlabeled, -100)
    compile_model(model, recipe.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def collect(work: Workspace) -> dict[str, Any]:
    record = work.read("steps")
    if record is None:
        return {"runs": {}}
    seconds = {name: own for name, own in record["seconds"].items() if name in VARIANTS and "plain" not in name}
    return {**record, "rows": {name: (1000 * own, own / seconds[TWIN]) for name, own in seconds.items()}}


if __name__ == "__main__":
    main(["steps"])
