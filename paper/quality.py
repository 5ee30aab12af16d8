"""Quality at equal steps: the twin, Linformers without and with a local window, and the window alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import plots
from .experiments import Workspace, corpus, pretraining, scale
from .jobs import Job
from .sections import main

TITLE = "Linformer and twin at equal steps"
TWIN, PLAIN_TWIN = "twin", "twin, plain start"
LONG = 10_000


class Variant(NamedTuple):
    """A variant of the recipe, changes to it, and the number of seeds."""

    variant: str
    changes: tuple[str, ...] = ()
    seeds: int = 3


K128, K256, HEADWISE, LOCAL = "n512-k128-layerwise", "n512-k256-layerwise", "n512-k128-headwise", "n512-k128-w32"
# RoBERTa's start with sinusoidal positions: queries and keys are independent.
INDEPENDENT, SINUSOIDAL = "model.initial_self_score=null", "model.position_init=sinusoidal"
PLAIN = (INDEPENDENT, SINUSOIDAL)
UNSHIFTED, ALONE = "model.shifted_windows=false", "model.projection=none"
FULL = "short_rows=0.0"  # all rows have n tokens
# E learns at 0.03 of the common rate, or at the common rate.
SLOW, SLOW_256, FAST = scale(0.03, 512, 128), scale(0.03, 512, 256), scale(1, 512, 128)

VARIANTS = {
    TWIN: Variant("n512-twin"),
    "k=128 w=32": Variant(LOCAL),
    "k=64 w=32": Variant(LOCAL, ("model.projected_length=64", scale(0.03, 512, 64))),
    "window alone, w=32": Variant(LOCAL, (ALONE,)),
    "window alone, w=96": Variant(LOCAL, (ALONE, "model.local_window=96")),
    "k=256": Variant(K256),
    "k=128": Variant(K128),
    "k=128 headwise": Variant(HEADWISE),
    "k=256, slow E": Variant(K256, (SLOW_256,)),
    "k=128, slow E": Variant(K128, (SLOW,)),
    "k=128 headwise, fast E": Variant(HEADWISE, (FAST,)),
    "k=256, slow E, unshifted": Variant(K256, (SLOW_256, UNSHIFTED)),
    "k=128, slow E, unshifted": Variant(K128, (SLOW, UNSHIFTED)),
    "k=128 headwise, unshifted": Variant(HEADWISE, (UNSHIFTED,)),
    PLAIN_TWIN: Variant("n512-twin", PLAIN),
    "k=128 w=32, plain start": Variant(LOCAL, PLAIN),
    # The effects of the defaults are large: one seed shows them.
    "twin, independent queries and keys": Variant("n512-twin", (INDEPENDENT,), 1),
    "twin, sinusoidal positions": Variant("n512-twin", (SINUSOIDAL,), 1),
    "k=256, plain start": Variant(K256, (*PLAIN, SLOW_256, UNSHIFTED), 1),
    "k=64 w=32, plain start": Variant(LOCAL, ("model.projected_length=64", scale(0.03, 512, 64), *PLAIN), 1),
    "window alone, w=32, plain start": Variant(LOCAL, (ALONE, *PLAIN), 1),
    "k=128 key-value": Variant("n512-k128-key-value", (), 1),
    "k=128 key-value, fast E": Variant("n512-k128-key-value", (FAST,), 1),
}
# The variants that are drawn and timed; the rate of E and the shift of its windows do not change the time of a step.
DRAWN = [
    name for name, own in VARIANTS.items() if own.seeds > 1 and not {SLOW, SLOW_256, FAST, UNSHIFTED} & set(own.changes)
]
# Rate of E × its initial values × those of the positions.
SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
SWEEP = list(itertools.product(SCALES, ("window", "gaussian"), ("waves", "normal")))
# These cells of the sweep are variants as well.
KNOWN = {(1.0, "window", "waves"): "k=128", (0.03, "window", "waves"): "k=128, slow E"}
LONGER = (TWIN, "k=128", "k=256", "k=128 w=32", "window alone, w=32", "k=128, slow E", "k=256, slow E")


def names(work: Workspace) -> list[str]:
    variants = [run_name(name, seed) for name, own in VARIANTS.items() for seed in range(own.seeds)]
    return [*variants, *(run_name(name, 0, LONG) for name in LONGER), *(sweep_name(cell) for cell in SWEEP)]


def jobs(work: Workspace) -> list[Job]:
    """The first seed of all variants, the other seeds, the sweep, and longer training."""
    tokens = corpus(work, "wiki")
    found = [
        variant_job(work, tokens, name, seed)
        for seed in range(max(own.seeds for own in VARIANTS.values()))
        for name, own in VARIANTS.items()
        if seed < own.seeds
    ]
    for s, init, positions in (cell for cell in SWEEP if cell not in KNOWN):
        changes = [FULL, scale(s, 512, 128), f"model.projection_init={init}", f"model.position_init={positions}"]
        found.append(pretraining(work, tokens, K128, sweep_name((s, init, positions)), changes))
    for own, name in ((VARIANTS[name], run_name(name, 0, LONG)) for name in LONGER):
        changes = [FULL, *own.changes, f"steps={LONG}", "eval_every=1000"]
        found.append(pretraining(work, tokens, own.variant, name, changes))
    return found


def variant_job(work: Workspace, tokens: Path, name: str, seed: int) -> Job:
    own = VARIANTS[name]
    return pretraining(work, tokens, own.variant, run_name(name, seed), [FULL, *own.changes, f"seed={seed}"])


def run_name(variant: str, seed: int, steps: int | None = None) -> str:
    plain = variant.replace(", ", "-").replace(" ", "-").replace("=", "")
    return f"quality/{plain}-s{seed}" if steps is None else f"quality/{plain}-{steps}-s{seed}"


def sweep_name(cell: tuple[float, str, str]) -> str:
    s, init, positions = cell
    return run_name(KNOWN[cell], 0) if cell in KNOWN else f"quality/sweep-{init}-{positions}-{s}"


def collect(work: Workspace) -> dict[str, Any]:
    """All variants over their seeds, the sweep, and longer training; `None` where a run is missing."""
    results, origins = work.records.results_of(names(work))

    def over(*every: str) -> dict[str, Any] | None:
        return summary([results[run] for run in every if run in results])

    variants = {name: over(*(run_name(name, seed) for seed in range(own.seeds))) for name, own in VARIANTS.items()}
    longer = {name: over(run_name(name, 0, LONG)) for name in LONGER}
    seconds = (work.read("steps") or {"seconds": {}})["seconds"]
    sweep = {cell: (over(sweep_name(cell)) or {"mean": None})["mean"] for cell in SWEEP}
    columns = list(dict.fromkeys(cell[1:] for cell in SWEEP))
    return {
        "runs": origins,
        "variants": variants,
        "longer": longer,
        "seconds": seconds,
        "rows": rows(variants, seconds),
        "longer_rows": rows(longer, seconds),
        "columns": columns,
        "sweep": {s: [sweep[s, *column] for column in columns] for s in SCALES},
        "missing": [run.partition("/")[2] for run in dict.fromkeys(names(work)) if run not in results],
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean curve over seeds, and the spread at its end."""
    if not results:
        return None
    curves = [dict(result["curve"]) for result in results]
    steps = sorted(set.intersection(*map(set, curves)))
    ends = [curve[steps[-1]] for curve in curves]
    return {
        "seeds": len(curves),
        "mean": statistics.mean(ends),
        "std": statistics.stdev(ends) if len(ends) > 1 else None,
        "curve": [[step, statistics.mean(curve[step] for curve in curves)] for step in steps],
    }


def rows(variants: Mapping[str, Any], seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rows of a table, best first."""
    twin, plain = variants[TWIN], variants.get(PLAIN_TWIN)
    found = {name: own for name, own in variants.items() if own is not None}
    return [
        {
            "name": name,
            **own,
            "of_twin": own["mean"] / twin["mean"] if twin else None,
            "of_plain": own["mean"] / plain["mean"] if plain else None,
            "time": seconds[name] / seconds[TWIN] if name in seconds else None,
        }
        for name, own in sorted(found.items(), key=lambda item: item[1]["mean"])
    ]


def draw(record: Mapping[str, Any], folder: Path) -> None:
    found = {name: own for name in DRAWN if (own := record["variants"][name])}
    against_time = {
        name: [(step * record["seconds"][name] / 60, value) for step, value in own["curve"]]
        for name, own in found.items()
        if name in record["seconds"]
    }
    longer = {name: own["curve"] for name in DRAWN if (own := record["longer"].get(name))}
    panels = {
        "2,000 steps": ("step", {name: own["curve"] for name, own in found.items()}),
        "against wall-clock time": ("minutes on one GPU", against_time),
        f"{LONG:,} steps": ("step", longer),
    }
    if drawn := {title: panel for title, panel in panels.items() if panel[1]}:
        plots.quality(drawn, folder / "quality.png")


if __name__ == "__main__":
    main(["quality"])
