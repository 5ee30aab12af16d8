"""Figure 3: validation perplexity during pretraining, against k, the kind of sharing, and n."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import plots
from .experiments import Workspace, corpus, pretraining
from .jobs import Job
from .sections import main

TITLE = "Figure 3: perplexity during pretraining"
STEPS = 4000
# Ratios of perplexities that count as equal: to the twin's, among kinds of sharing, and over n.
ON_PAR, SHARING, LENGTH = 1.05, 1.1, 1.1
# Perplexities this close are taken as equal when k grows.
NOISE = 1.01


class Run(NamedTuple):
    """A pretraining run: a variant of the recipe, changes to it, and a suffix for its name."""

    variant: str
    changes: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def name(self) -> str:
        return f"{self.variant}{self.suffix}"


def against_k(n: int, lengths: Sequence[int]) -> dict[str, Run]:
    """The twin, a Linformer for each k, and one with a local window."""
    own = {f"Linformer k={k}": Run(f"n{n}-k{k}-layerwise") for k in lengths}
    return {"Transformer": Run(f"n{n}-twin"), **own, "Linformer k=128 w=32": Run(f"n{n}-k128-w32")}


WAYS = ("none", "headwise", "key-value", "layerwise")
PANELS = {
    "a": ("n = 512", against_k(512, (64, 128, 256))),
    "b": ("n = 1024", against_k(1024, (128, 256))),
    "c": ("sharing, n = 512, k = 128", {way: Run(f"n512-k128-{way}") for way in WAYS}),
    "d": ("k = 256", {f"n={n}": Run(f"n{n}-k256-layerwise") for n in (512, 1024, 2048, 4096)}),
}
# More rows of panel d. An E that learns at the common rate has s = 1, that is c = n/k.
TWIN, FAST, LOCAL = "Transformer twin", "E at the common rate", "local window of 32"
ROWS_D = {
    TWIN: {f"n={n}": Run(f"n{n}-twin") for n in (512, 1024, 2048, 4096)},
    FAST: {"n=512": Run("n512-k256-layerwise")}
    | {f"n={n}": Run(f"n{n}-k256-layerwise", (f"model.projection_scale={n / 256}",), "-fast-E") for n in (2048, 4096)},
    LOCAL: {"n=4096": Run("n4096-k256-layerwise", ("model.local_window=32", "model.shifted_windows=false"), "-w32")},
}
# The rows that are drawn as well, and the suffixes of their labels.
DRAWN = {TWIN: ", twin", LOCAL: " w=32"}
RUNS = {run.name: run for _, curves in PANELS.values() for run in curves.values()}
RUNS |= {run.name: run for runs in ROWS_D.values() for run in runs.values()}


def names(work: Workspace) -> list[str]:
    return [f"figure3/{name}" for name in RUNS]


def jobs(work: Workspace) -> list[Job]:
    tokens = corpus(work, "wiki-books")
    return [pretraining_job(work, tokens, run) for run in RUNS.values()]


def pretraining_job(work: Workspace, tokens: Path, run: Run) -> Job:
    changes = [f"steps={STEPS}", *run.changes]
    return pretraining(work, tokens, run.variant, f"figure3/{run.name}", changes)


def collect(work: Workspace) -> dict[str, Any]:
    """The curves and final perplexities of all panels; `None` where a run is missing."""
    results, origins = work.records.results_of(names(work))

    def curve(run: Run) -> list[list[float]] | None:
        return results.get(f"figure3/{run.name}", {}).get("curve")

    panels: dict[str, dict[str, Any]] = {
        name: {"title": title, "curves": {label: curve(run) for label, run in runs.items()}}
        for name, (title, runs) in PANELS.items()
    }
    for panel in panels.values():
        panel["ends"] = {label: own and own[-1][1] for label, own in panel["curves"].items()}
    found = {row: {label: curve(run) for label, run in runs.items()} for row, runs in ROWS_D.items()}
    rows = {row: {label: own and own[-1][1] for label, own in curves.items()} for row, curves in found.items()}
    beside = {
        f"{label}{suffix}": own for row, suffix in DRAWN.items() for label, own in found[row].items() if own is not None
    }
    missing = [name for name in RUNS if f"figure3/{name}" not in results]
    record = {"runs": origins, "panels": panels, "rows": rows, "beside": beside, "missing": missing, "steps": STEPS}
    return {**record, "stuck": stuck(panels["d"]["curves"]), "claims": claims(record)}


def stuck(curves: Mapping[str, Any]) -> list[str]:
    """The lengths of panel d at which perplexity never fell below half of its first value."""
    return [label for label, curve in curves.items() if curve and curve[-1][1] > curve[0][1] / 2]


def verdict(holds: bool) -> str:
    return "confirmed" if holds else "not seen at this budget"


def claims(record: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's claims with our numbers; a claim whose runs are missing is left out."""
    ends = {name: panel["ends"] for name, panel in record["panels"].items()}
    ratios = {n: _ratios(ends[panel]) for panel, n in (("a", 512), ("b", 1024))}
    found: dict[str, Any] = {"better_with_k": None, "sharing": None, "k_decides": []}
    by_k = [ends["a"][f"Linformer k={k}"] for k in (64, 128, 256)]
    if all(by_k):
        better = by_k[0] > NOISE * by_k[1] > NOISE**2 * by_k[2]
        found["better_with_k"] = {"verdict": verdict(better), "values": by_k}
    found["on_par"] = [
        {"n": n, "k": k, "papers": papers, "verdict": verdict(ratios[n][k] < ON_PAR), "ratio": ratios[n][k]}
        for n, k, papers in ((512, 128, True), (1024, 256, True), (512, 256, False))
        if k in ratios[n]
    ]
    if all(ends["c"].values()):
        ratio = _spread(ends["c"].values())
        found["sharing"] = {"verdict": verdict(ratio < SHARING), "values": ends["c"], "ratio": ratio}
    found["length"] = length(record, ratios)
    if {64, 128, 256} <= ratios[512].keys() and {128, 256} <= ratios[1024].keys():
        found["k_decides"] = k_decides(ratios)
    return found


def length(record: Mapping[str, Any], ratios: Mapping[int, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Whether the ratio to the twin's perplexity stays the same as n grows, at k = 256 and at k = 128."""
    ours, twins = record["panels"]["d"]["ends"], record["rows"][TWIN]
    own = {256: {label: ours[label] / twins[label] for label in ours if ours[label] and twins[label]}}
    own[128] = {f"n={n}": by_k[128] for n, by_k in ratios.items() if 128 in by_k}
    return [
        {"k": k, "verdict": verdict(_spread(values.values()) < LENGTH), "ratios": values}
        for k, values in own.items()
        if len(values) > 1
    ]


def k_decides(ratios: Mapping[int, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Whether the ratio to the twin changes less from n = 512 to 1024 at the same k than at the same n/k."""
    found = []
    for k in (128, 256):
        same_k, same_ratio = [(ratios[512][own], ratios[1024][k]) for own in (k, k // 2)]
        holds = _spread(same_k) < _spread(same_ratio)
        found.append({"k": k, "verdict": verdict(holds), "same_k": same_k, "same_ratio": same_ratio})
    return found


def _ratios(ends: Mapping[str, float | None]) -> dict[int, float]:
    """By k, the perplexity of the Linformers without a window, relative to their twin's."""
    own = {k: ends.get(f"Linformer k={k}") for k in (64, 128, 256)}
    twin = ends["Transformer"]
    return {k: value / twin for k, value in own.items() if value and twin}


def _spread(values: Collection[float] | Sequence[float]) -> float:
    return max(values) / min(values)


def draw(record: Mapping[str, Any], folder: Path) -> None:
    found = {}
    for name, panel in record["panels"].items():
        curves = {label: curve for label, curve in panel["curves"].items() if curve}
        found[f"3{name}, {panel['title']}"] = curves | record["beside"] if name == "d" and curves else curves
    plots.perplexities(found, folder / "figure3.png")


if __name__ == "__main__":
    main(["figure3"])
