"""Long input: n = 4096 and more on Wikipedia and books, with rotary positions, beside the twin and windows alone."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from linformers import LinformerConfig
from linformers.benchmark.measure import DEVICE
from linformers.training.predict import BRANCHES, evaluate, perplexity
from linformers.training.recipe import Recipe, read

from . import plots, recall, steps
from .experiments import (
    Task,
    Tuning,
    Workspace,
    changes_for,
    corpus,
    finetuning,
    hashes,
    prepare,
    pretraining,
    recipe_of,
)
from .jobs import Job
from .sections import main

TITLE = "Long input: n = 4096 and more"
RECIPE, STEPS, LONG = "long", 4000, 12000
ROWS = 128  # of 4,096 tokens, of each validation set; fewer of longer rows
RATES = (5e-4, 1e-3, 2e-3)
MASK_SHARE = 0.15


class Variant(NamedTuple):
    """A variant of the recipe, changes to it, its steps and seeds, and the run whose model it starts from."""

    variant: str
    changes: tuple[str, ...] = ()
    steps: int = STEPS
    seeds: int = 1
    start: str = ""


LINFORMER, UPPER, WINDOW, WIDE, TWIN = "k=256 w=64", "k=256 w=64 upper", "w=64", "w=192", "twin"
RECIPES = {LINFORMER: "k256-w64", UPPER: "k256-w64-upper", WINDOW: "w64", WIDE: "w192", TWIN: "twin"}
VARIANTS: dict[str, Variant] = {
    **{name: Variant(RECIPES[name], seeds=1 if name == TWIN else 3) for name in RECIPES},
    **{f"twin, rate {rate:g}": Variant("twin", (f"learning_rate={rate}",)) for rate in RATES if rate != 1e-3},
    **{f"{name}, {LONG:,} steps": Variant(RECIPES[name], steps=LONG) for name in (LINFORMER, WINDOW)},
}
# The same number of tokens: 80% in rows of 1,024 tokens at a constant learning rate, the rest in longer ones.
SHORT = "k=256 w=64, n=1024"
VARIANTS[SHORT] = Variant(
    "k256-w64", ("model.max_position_embeddings=1024", "batch_size=32", "schedule=constant"), STEPS * 4 // 5
)
for _n, _k in ((4096, 256), (8192, 256), (8192, 512), (16384, 256), (16384, 1024)):
    _changes = (f"model.max_position_embeddings={_n}", f"batch_size={2**15 // _n}", f"model.projected_length={_k}")
    VARIANTS[f"k={_k} w=64, n=1024 to {_n}"] = Variant("k256-w64", _changes, STEPS // 5, start=SHORT)
# Without a window.
for _name in ("n=2048 k=256", "n=2048 twin", "n=4096 k=256"):
    VARIANTS[_name] = Variant(_name.replace("=", "").replace(" ", "-"))
# For the plot: perplexity against time.
PLOTTED = {
    4096: {TWIN: TWIN, WINDOW: WINDOW, LINFORMER: LINFORMER},
    8192: {name: f"{name}, n=8192" for name in (TWIN, WINDOW, LINFORMER)},
}
for _name, _long in PLOTTED[8192].items():
    VARIANTS[_long] = Variant(RECIPES[_name], ("model.max_position_embeddings=8192", "batch_size=4"), STEPS // 2)

# Recall of a word hidden in texts of about n tokens, further from the answer than any window reaches in 8 layers.
SECRETS = {4096: recall.Sizes(16000, 500, 2700, 1350, 2650), 8192: recall.Sizes(6400, 500, 5400, 2700, 5300)}
READERS = {4096: (LINFORMER, WINDOW), 8192: ("k=256 w=64, n=1024 to 8192", WINDOW)}


def run_name(name: str, seed: int = 0) -> str:
    return f"length/{name.replace(', ', '-').replace(' ', '-').replace('=', '').replace(',', '')}-s{seed}"


def variants(work: Workspace) -> dict[str, Variant]:
    """Tiny models have two layers, and no upper half."""
    return {name: own for name, own in VARIANTS.items() if not (work.small and own.variant == RECIPES[UPPER])}


def names(work: Workspace) -> list[str]:
    trained = [run_name(name, seed) for name, own in variants(work).items() for seed in range(own.seeds)]
    return trained + [recall_name(name, n) for n, own in READERS.items() for name in own if name in variants(work)]


def recall_name(name: str, n: int) -> str:
    return run_name(name).replace("length/", f"length/recall-{n}-")


def jobs(work: Workspace) -> list[Job]:
    """All first seeds, then the others; a run that starts from another comes after it."""
    tokens = corpus(work, "wiki-books")
    held, found = held_out(work, tokens), dict[str, Job]()
    for seed in range(max(own.seeds for own in VARIANTS.values())):
        for name, own in variants(work).items():
            if seed < own.seeds:
                found[run_name(name, seed)] = variant_job(work, tokens, held, name, seed, found)
    readers = [(name, n) for n, own in READERS.items() for name in own if name in variants(work)]
    return [*found.values(), *(recall_job(work, name, n, found[run_name(name)]) for name, n in readers)]


def recall_job(work: Workspace, name: str, n: int, first: Job) -> Job:
    """A model fine-tuned to name the secret, and what it knows without one kind of keys."""
    folder = recall.files(work, SECRETS[n], f"recall-{n}", ("wiki", "books"))
    task = Task([str(folder / "train.jsonl"), "--test", str(folder / "test.jsonl")], hashes(folder))
    tuning = (
        recall.TINY
        if work.small
        else Tuning(seeds=1, epochs=2, batch_size=2**15 // n, learning_rate=1e-3, max_length=n)
    )
    job = finetuning(work, recall_name(name, n), task, tuning, first)

    def collect() -> dict[str, Any]:
        scores = {
            f"without {branch}": evaluate(
                job.model, task=str(folder / "test.jsonl"), without=branch, console=Console(quiet=True)
            )["accuracy"]
            for branch in (BRANCHES if has_branches(job.model) else ())
        }
        return {**job.collect(), **scores}

    return dataclasses.replace(job, collect=collect)


def held_out(work: Workspace, tokens: Path) -> dict[str, Path]:
    """A corpus for each validation set; what it would train on is the other one's text."""
    files = {name: sorted(work.folder(name).glob("validation*")) for name in ("wiki", "books")}
    options = {"tokenizer": tokens / "tokenizer"}
    return {
        name: prepare(work, f"held-out-{name}", files[other], files[name], options)
        for name, other in (("wiki", "books"), ("books", "wiki"))
    }


def variant_job(
    work: Workspace, tokens: Path, held: dict[str, Path], name: str, seed: int, others: dict[str, Job]
) -> Job:
    own = VARIANTS[name]
    first = others[run_name(own.start)] if own.start else None
    changes = [f"variant={own.variant}", f"steps={own.steps}", *own.changes, f"seed={seed}"]
    if first is not None:
        changes += [f"start={first.model}", "warmup_steps=50"]
    job = pretraining(work, tokens, RECIPE, run_name(name, seed), changes)
    description = {**job.description, **({"start": first.key} if first is not None else {})}

    def collect() -> dict[str, Any]:
        return {**job.collect(), "validation": validation(job.model, held, with_branches=seed == 0)}

    return dataclasses.replace(job, description=description, collect=collect, after=first)


def validation(model: Path, held: dict[str, Path], with_branches: bool) -> dict[str, dict[str, float]]:
    """The perplexity on each validation set and, if the model has both kinds of keys, without each of them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows = max(1, ROWS * 4096 // LinformerConfig.from_pretrained(model).max_position_embeddings)
    branches = (None, *(BRANCHES if with_branches and has_branches(model) else ()))
    return {
        name: {
            f"without {branch}" if branch else "perplexity": perplexity(
                model, data, Console(quiet=True), rows, MASK_SHARE, branch
            )["perplexity"]
            for branch in branches
        }
        for name, data in held.items()
    }


def has_branches(model: Path) -> bool:
    """Whether each layer has projected keys and a window."""
    config = LinformerConfig.from_pretrained(model)
    return config.projection == "linear" and all(config.local_windows) and all(map(any, config.projected_lengths))


def measure(work: Workspace) -> dict[str, Any] | None:
    """Seconds of a training step of the models in the plot, on a GPU that does nothing else."""
    if DEVICE != "cuda" and not work.small:
        return None
    wanted = [name for own in PLOTTED.values() for name in own.values()]
    return steps.seconds_of({name: recipe_of_variant(work, VARIANTS[name]) for name in wanted}, "length")


def recipe_of_variant(work: Workspace, own: Variant) -> Recipe:
    path, changes = recipe_of(RECIPE)
    changes += changes_for(work, RECIPE, [f"variant={own.variant}", *own.changes])
    return read(path, changes)


def curves(record: Mapping[str, Any], n: int) -> dict[str, list[tuple[float, float]]]:
    """Validation perplexity against minutes of training at length n, by model."""
    seconds, variants = record["seconds"], record["variants"]
    return {
        name: [(step * seconds[own] / 60, value) for step, value in variants[own][0]["curve"]]
        for name, own in PLOTTED[n].items()
        if own in seconds and own in variants
    }


def draw(record: Mapping[str, Any], folder: Path) -> None:
    panels = {f"n = {n:,}": ("minutes of training on one GPU", curves(record, n)) for n in PLOTTED}
    if any(own for _, own in panels.values()):
        plots.quality(panels, folder / "length.png")


def collect(work: Workspace) -> dict[str, Any]:
    """The result of each seed of each variant; variants without any are missing."""
    results, origins = work.records.results_of(names(work))
    found = {
        name: [results[run] for run in (run_name(name, seed) for seed in range(own.seeds)) if run in results]
        for name, own in variants(work).items()
    }
    missing = [run.partition("/")[2] for run in names(work) if run not in results]
    readers = {n: {name: results.get(recall_name(name, n)) for name in own} for n, own in READERS.items()}
    finished = {name: own for name, own in found.items() if own}
    timed = work.read("length") or {"runs": {}, "seconds": {}}
    rows = {name: row_of(own) for name, own in finished.items()}
    tables = {"variants": finished, "rows": rows, "recall": readers, "seconds": timed["seconds"]}
    return {"runs": {**origins, **timed["runs"]}, **tables, "missing": missing}


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and, of several values, standard deviation."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def row_of(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table: mean and standard deviation over seeds, and what the first one has without each branch."""
    return {
        name: {
            "perplexity": spread([own["validation"][name]["perplexity"] for own in seeds]),
            "without": [seeds[0]["validation"][name].get(f"without {branch}") for branch in BRANCHES],
        }
        for name in ("wiki", "books")
    }


if __name__ == "__main__":
    main(["length"])
