"""Quality at equal steps: the twin, pure Linformers, and those with a local window beside the window alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .. import plots
from ..markdown import table
from .jobs import Job
from .matrix import Place, corpus, pretraining

GROUP = "quality"
TWIN, PLAIN_TWIN = "twin", "twin, plain start"
LINFORMER = "n512-k128-layerwise"
LONG = 10_000


class Variant(NamedTuple):
    """A recipe, what is changed in it, and with how many seeds it is run."""

    recipe: str
    changes: tuple[str, ...] = ()
    seeds: int = 3


# How a RoBERTa with sinusoidal positions starts: queries and keys independently.
INDEPENDENT, SINUSOIDAL = "model.initial_self_score=null", "model.position_init=sinusoidal"
UNSHIFTED = "model.shifted_windows=false"
SLOW, FAST = "model.projection_scale=0.03", "model.projection_scale=1.0"
PLAIN = (INDEPENDENT, SINUSOIDAL)

VARIANTS = {
    TWIN: Variant("n512-twin"),
    "k=128 w=32": Variant("n512-k128-w32"),
    "k=64 w=32": Variant("n512-k128-w32", ("model.projected_length=64",)),
    "window alone, w=32": Variant("n512-k128-w32", ("model.projection=none",)),
    "window alone, w=96": Variant("n512-k128-w32", ("model.projection=none", "model.local_window=96")),
    "k=256": Variant("n512-k256-layerwise"),
    "k=128": Variant(LINFORMER),
    "k=128 headwise": Variant("n512-k128-headwise"),
    "k=256, slow E": Variant("n512-k256-layerwise", (SLOW,)),
    "k=128, slow E": Variant(LINFORMER, (SLOW,)),
    "k=128 headwise, fast E": Variant("n512-k128-headwise", (FAST,)),
    "k=256, slow E, unshifted": Variant("n512-k256-layerwise", (SLOW, UNSHIFTED)),
    "k=128, slow E, unshifted": Variant(LINFORMER, (SLOW, UNSHIFTED)),
    "k=128 headwise, unshifted": Variant("n512-k128-headwise", (UNSHIFTED,)),
    "k=128 dynamic": Variant(LINFORMER, ("model.projection=dynamic",)),
    PLAIN_TWIN: Variant("n512-twin", PLAIN),
    "k=128 w=32, plain start": Variant("n512-k128-w32", PLAIN),
    # What each default gains: large effects, for which one seed will do.
    "twin, independent queries and keys": Variant("n512-twin", (INDEPENDENT,), 1),
    "twin, sinusoidal positions": Variant("n512-twin", (SINUSOIDAL,), 1),
    "k=256, plain start": Variant("n512-k256-layerwise", (*PLAIN, SLOW, UNSHIFTED), 1),
    "k=64 w=32, plain start": Variant("n512-k128-w32", ("model.projected_length=64", *PLAIN), 1),
    "window alone, w=32, plain start": Variant("n512-k128-w32", ("model.projection=none", *PLAIN), 1),
    "k=128 w=32 dynamic": Variant("n512-k128-w32", ("model.projection=dynamic",), 1),
    "k=128 key-value": Variant("n512-k128-key-value", (), 1),
    "k=128 key-value, fast E": Variant("n512-k128-key-value", (FAST,), 1),
}
# What is drawn, and timed: a rate or a shift of E makes no picture of its own.
DRAWN = [name for name, own in VARIANTS.items() if own.seeds > 1 and not {SLOW, FAST, UNSHIFTED} & set(own.changes)]
# The cells that were missing of learning rate of E × its initial values × those of the positions.
SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
SWEEP = {
    (scale, init, positions): (
        f"model.projection_scale={scale}",
        f"model.projection_init={init}",
        f"model.position_init={positions}",
    )
    for scale, init, positions in itertools.product(SCALES, ("window", "gaussian"), ("waves", "normal"))
}
# These cells are variants, too.
KNOWN = {(1.0, "window", "waves"): "k=128", (0.03, "window", "waves"): "k=128, slow E"}
LONGER = {
    name: VARIANTS[name]
    for name in (TWIN, "k=128", "k=256", "k=128 w=32", "window alone, w=32", "k=128, slow E", "k=256, slow E")
}


def names(place: Place) -> list[str]:
    """What its runs are called."""
    variants = [run_name(name, seed) for name, own in VARIANTS.items() for seed in range(own.seeds)]
    longer = [run_name(name, 0, LONG) for name in LONGER]
    return [f"{GROUP}/{name}" for name in (*variants, *longer, *(sweep_name(*cell) for cell in SWEEP))]


def jobs(place: Place, console: Console) -> list[Job]:
    """The first seed of all variants, further seeds, the sweep, and longer training."""
    tokens = corpus(place, "wiki", console)
    found = [
        variant_job(place, tokens, name, seed)
        for seed in range(max(own.seeds for own in VARIANTS.values()))
        for name, own in VARIANTS.items()
        if seed < own.seeds
    ]
    for cell, changes in SWEEP.items():
        if cell not in KNOWN:
            found.append(one(place, tokens, LINFORMER, sweep_name(*cell), changes))
    longer = (f"steps={LONG}", "eval_every=1000")
    return found + [
        one(place, tokens, own.recipe, run_name(name, 0, LONG), (*own.changes, *longer)) for name, own in LONGER.items()
    ]


def variant_job(place: Place, tokens: Path, name: str, seed: int) -> Job:
    own = VARIANTS[name]
    return one(place, tokens, own.recipe, run_name(name, seed), (*own.changes, f"seed={seed}"))


def one(place: Place, tokens: Path, recipe: str, name: str, changes: Sequence[str]) -> Job:
    """A run on rows of n tokens, none of them cut short."""
    return pretraining(place, tokens, recipe, group=GROUP, name=name, changes=["short_rows=0.0", *changes])


def run_name(variant: str, seed: int, steps: int | None = None) -> str:
    plain = variant.replace(", ", "-").replace(" ", "-").replace("=", "")
    return f"{plain}-s{seed}" if steps is None else f"{plain}-{steps}-s{seed}"


def sweep_name(scale: float, init: str, positions: str) -> str:
    if (variant := KNOWN.get((scale, init, positions))) is not None:
        return run_name(variant, 0)
    return f"sweep-{init}-{positions}-{scale}"


def collect(place: Place) -> dict[str, Any]:
    """Each variant over its seeds, the sweep's perplexities, and the longer runs; `None` where a run is missing."""
    results, runs = place.store.results(names(place))

    def over(*every: str) -> dict[str, Any] | None:
        return summary([result for run in every if (result := results.get(f"{GROUP}/{run}"))])

    sweep = [
        {"scale": s, "init": i, "positions": p, **(over(sweep_name(s, i, p)) or {"mean": None})} for s, i, p in SWEEP
    ]
    return {
        "runs": runs,
        "variants": {
            name: over(*(run_name(name, seed) for seed in range(own.seeds))) for name, own in VARIANTS.items()
        },
        "sweep": sweep,
        "longer": {name: over(run_name(name, 0, LONG)) for name in LONGER},
        "seconds": step_seconds(place),
    }


def step_seconds(place: Place) -> dict[str, float]:
    """Of a step of those variants that were timed."""
    return (place.read("steps") or {"seconds": {}})["seconds"]


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean curve of several seeds' perplexity, and its spread at the end."""
    if not results:
        return None
    curves = [dict(result["curve"]) for result in results]
    steps = sorted(set.intersection(*map(set, curves)))
    ends = [curve[steps[-1]] for curve in curves]
    return {
        "seeds": len(curves),
        "ends": ends,
        "mean": statistics.mean(ends),
        "std": statistics.stdev(ends) if len(ends) > 1 else 0.0,
        "curve": [[step, statistics.mean(curve[step] for curve in curves)] for step in steps],
    }


def draw(record: Mapping[str, Any], path: Path) -> None:
    found = {name: own for name in DRAWN if (own := record["variants"][name])}
    against_time = {
        name: [(step * record["seconds"][name] / 60, value) for step, value in own["curve"]]
        for name, own in found.items()
        if name in record["seconds"]
    }
    panels = {
        "2,000 steps": ("step", {name: own["curve"] for name, own in found.items()}),
        "by the time they take": ("minutes on one GPU", against_time),
        f"{LONG:,} steps": ("step", {name: own["curve"] for name in DRAWN if (own := record["longer"].get(name))}),
    }
    if drawn := {title: panel for title, panel in panels.items() if panel[1]}:
        plots.quality(drawn, path)


def page(record: Mapping[str, Any]) -> list[str]:
    """Tables over variants, over the sweep, and over longer training."""
    lines = [
        "Perplexity after 2,000 steps of 32,768 tokens. Unless a row says otherwise, models start with waves as "
        "positions and with queries and keys alike, and, without a local window, the windows that E starts as begin at "
        "other tokens in other layers. E learns at the common rate where all layers share it or it is “fast”, and at "
        "0.03 of it "
        "where each layer has its own, beside a local window, or where it is “slow”. “Plain start”: sinusoidal "
        "positions, queries and keys independent, windows unshifted, E slow.",
        "",
        *_table(record["variants"], record["seconds"]),
    ]
    if any(cell["mean"] for cell in record["sweep"]):
        columns = list(dict.fromkeys((cell["init"], cell["positions"]) for cell in record["sweep"]))
        by_place = {(cell["scale"], cell["init"], cell["positions"]): cell["mean"] for cell in record["sweep"]}
        lines += [
            "Pure Linformer, k = 128, layerwise: the rate s of E, its initial values, those of the positions:",
            "",
        ]
        rows = []
        for scale in SCALES:
            values = [by_place[scale, *column] for column in columns]
            rows.append((f"{scale:g}", *("missing" if value is None else f"{value:.1f}" for value in values)))
        lines += table(("s", *map(", ".join, columns)), rows)
    if any(record["longer"].values()):
        lines += [f"After {LONG:,} steps:", "", *_table(record["longer"], record["seconds"])]
    return lines


def _table(variants: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    twin, plain = variants[TWIN], variants.get(PLAIN_TWIN)
    rows = []
    for name, own in sorted(variants.items(), key=lambda item: item[1]["mean"] if item[1] else float("inf")):
        if own is None:
            rows.append((name, "0", "missing", "", "", ""))
            continue
        ratio, to_plain = (f"{own['mean'] / other['mean']:.2f}" if other else "–" for other in (twin, plain))
        time = f"{seconds[name] / seconds[TWIN]:.2f}" if name in seconds else "–"
        spread = f" ± {own['std']:.1f}" if own["seeds"] > 1 else ""
        rows.append((name, str(own["seeds"]), f"{own['mean']:.1f}{spread}", ratio, to_plain, time))
    header = ("model", "seeds", "perplexity", "of the twin's", "of the plain twin's", "time of a step, of the twin's")
    return table(header, rows)
