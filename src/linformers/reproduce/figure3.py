"""Figure 3: validation perplexity while pretraining, over k, over ways of sharing, and over n."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .. import plots
from ..markdown import table
from .jobs import Job
from .matrix import Place, corpus, pretraining, to_fill

GROUP = "pretraining"
STEPS = 4000

PANELS = {
    "a": (
        "n = 512",
        {
            "Transformer": "n512-twin",
            "Linformer k=64": "n512-k64-layerwise",
            "Linformer k=128": "n512-k128-layerwise",
            "Linformer k=256": "n512-k256-layerwise",
            "Linformer k=128 w=32": "n512-k128-w32",
        },
    ),
    "b": (
        "n = 1024",
        {
            "Transformer": "n1024-twin",
            "Linformer k=128": "n1024-k128-layerwise",
            "Linformer k=256": "n1024-k256-layerwise",
            "Linformer k=128 w=32": "n1024-k128-w32",
        },
    ),
    "c": (
        "sharing, n = 512, k = 128",
        {
            "none": "n512-k128-none",
            "headwise": "n512-k128-headwise",
            "key-value": "n512-k128-key-value",
            "layerwise": "n512-k128-layerwise",
        },
    ),
    "d": (
        "k = 256",
        {
            "n=512": "n512-k256-layerwise",
            "n=1024": "n1024-k256-layerwise",
            "n=2048": "n2048-k256-layerwise",
            "n=4096": "n4096-k256-layerwise",
        },
    ),
}


class Run(NamedTuple):
    """A pretraining run: its recipe, what is changed there, and how its name then ends."""

    recipe: str
    change: str = ""
    ending: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe}{self.ending}"


# More rows of panel d.
TWIN, FAST, LOCAL = "Transformer twin", "E at the common rate", "local window of 32"
BELOW = {
    TWIN: {f"n={n}": Run(f"n{n}-twin") for n in (512, 1024, 2048, 4096)},
    FAST: {"n=512": Run("n512-k256-layerwise")}
    | {f"n={n}": Run(f"n{n}-k256-layerwise", "model.projection_scale=1.0", "-fast-E") for n in (2048, 4096)},
    LOCAL: {f"n={n}": Run(f"n{n}-k256-layerwise", "model.local_window=32", "-w32") for n in (4096,)},
}
# Those of them that are drawn there, too, and how their labels end.
BESIDE = {TWIN: ", twin", LOCAL: " w=32"}
# Each once, in the order of the panels, then of the other rows.
RUNS = {run.name: run for _, curves in PANELS.values() for run in map(Run, curves.values())}
RUNS |= {run.name: run for runs in BELOW.values() for run in runs.values()}


def names(place: Place) -> list[str]:
    """What its runs are called."""
    return [f"{GROUP}/{name}" for name in RUNS]


def jobs(place: Place, console: Console) -> list[Job]:
    """All pretraining runs."""
    tokens = corpus(place, "wiki-books", console)
    return [pretraining_job(place, tokens, *run) for run in RUNS.values()]


def pretraining_job(place: Place, tokens: Path, recipe: str, change: str = "", ending: str = "") -> Job:
    changes = [f"steps={STEPS}", *([change] if change else [])]
    return pretraining(place, tokens, recipe, group=GROUP, name=f"{recipe}{ending}", changes=changes)


def collect(place: Place) -> dict[str, Any]:
    """The curves of all panels, and where each comes from; `None` where a run is missing."""
    results, runs = place.store.results(names(place))
    panels = {
        panel: {
            "title": title,
            "curves": {label: results.get(f"{GROUP}/{name}", {}).get("curve") for label, name in curves.items()},
        }
        for panel, (title, curves) in PANELS.items()
    }
    below = {
        row: {label: results.get(f"{GROUP}/{run.name}", {}).get("perplexity") for label, run in own.items()}
        for row, own in BELOW.items()
    }
    beside = {
        f"{label}{ending}": results[name]["curve"]
        for row, ending in BESIDE.items()
        for label, run in BELOW[row].items()
        if (name := f"{GROUP}/{run.name}") in results
    }
    return {"runs": runs, "panels": panels, "below": below, "beside": beside}


def draw(record: Mapping[str, Any], path: Path) -> None:
    found = {}
    for name, panel in record["panels"].items():
        curves = {label: curve for label, curve in panel["curves"].items() if curve}
        found[f"3{name}, {panel['title']}"] = curves | record["beside"] if name == "d" and curves else curves
    plots.perplexities(found, path)


def ends(record: Mapping[str, Any], panel: str) -> dict[str, float]:
    """The perplexity at the end of each curve of a panel that is there."""
    return {label: curve[-1][1] for label, curve in record["panels"][panel]["curves"].items() if curve}


def claims(record: Mapping[str, Any]) -> list[str]:
    """What the paper says of the figure, each with our numbers, where all of them are there."""
    short = ends(record, "a")
    twin, ours = "Transformer", "Linformer k={}".format
    lines = []
    if all(ours(k) in short for k in (64, 128, 256)):
        by_k = [short[ours(k)] for k in (64, 128, 256)]
        numbers = f"{by_k[0]:.1f}, {by_k[1]:.1f} and {by_k[2]:.1f}"
        holds = by_k[0] > 1.01 * by_k[1] > 1.01**2 * by_k[2]
        lines.append(f"“Better with k”: {verdict(holds)}. At n = 512, k = 64, 128 and 256 end at {numbers}.")
    if twin in short and ours(256) in short:
        own, other = short[ours(256)], short[twin]
        lines.append(
            f"“Nearly on par” with the Transformer at k = 256: {verdict(own < 1.05 * other)} at this budget. "
            f"{own:.1f} is {own / other:.2f} times the twin's {other:.1f}."
        )
    sharing = ends(record, "c")
    if len(sharing) == len(PANELS["c"][1]):
        lines.append(f"“Sharing costs little”: {_nearly_equal(sharing)}.")
    return [*lines, *length_claims(record)]


def stuck(record: Mapping[str, Any]) -> list[str]:
    """The lengths of panel d at which nothing was learned from context."""
    curves = record["panels"]["d"]["curves"]
    return [label for label, curve in curves.items() if curve and curve[-1][1] > curve[0][1] / 2]


def length_claims(record: Mapping[str, Any]) -> list[str]:
    """What the paper says of n: that at fixed k it does not matter, and that n/k does not, either."""
    by_n, lines = ends(record, "d"), []
    short, long = _of_the_twins(record, "a"), _of_the_twins(record, "b")
    if len(by_n) == len(PANELS["d"][1]) and {128, 256} <= short.keys() & long.keys():
        lines.append(_length(record, by_n, [short[128], long[128]]))
    if {64, 128, 256} <= short.keys() and {128, 256} <= long.keys():
        same_k = [(short[128], long[128]), (short[256], long[256])]
        same_ratio = [(short[64], long[128]), (short[128], long[256])]
        smaller = [_change(a) < _change(b) for a, b in zip(same_k, same_ratio, strict=True)]
        found = verdict(smaller[0])
        if smaller[0] != smaller[1]:
            found = f"{verdict(smaller[0])} at k = 128, {verdict(smaller[1])} at k = 256"
        words = [f"from {before:.2f} to {after:.2f}" for before, after in (*same_k, *same_ratio)]
        before, after = (ends(record, panel)["Transformer"] for panel in "ab")
        lines.append(
            f"“k, not n/k, decides”: {found}. From n = 512 to 1024 the twin itself goes from {before:.1f} "
            f"to {after:.1f}, and E learns at a lower rate; perplexity in multiples of the twin's goes {words[0]} "
            f"where k stays 128 and {words[1]} where it stays 256, {words[2]} where n/k stays 8 and {words[3]} where "
            "it stays 4."
        )
    return lines


def _length(record: Mapping[str, Any], by_n: Mapping[str, float], smaller: Sequence[float]) -> str:
    """Whether perplexity in multiples of the twin's stays within a tenth: at k = 256, and at the `smaller` 128."""
    begins = {label: curve[0][1] for label, curve in record["panels"]["d"]["curves"].items()}
    twins = {label: own for label, own in record["below"][TWIN].items() if own is not None}
    learned = [label for label, own in twins.items() if own < begins[label] / 2]
    multiples = [by_n[label] / twins[label] for label in learned]
    ways = [
        f"{verdict(_change(own) < 1.1)} at k = {k} ({', '.join(f'{one:.2f}' for one in own)}) for {', '.join(labels)}"
        for k, labels, own in ((256, learned, multiples), (128, list(by_n)[:2], smaller))
        if own
    ]
    lacking = {"no twin was run": [label for label in by_n if label not in twins]}
    lacking["the twin did not learn, either"] = [label for label in twins if label not in learned]
    held = " and ".join(stuck(record))
    return (
        f"“Length does not matter at fixed k” (perplexity in multiples of the twin's, within a tenth): "
        f"{', and '.join(ways)}. At k = 256 the perplexity itself is {', '.join(map(_one, by_n.items()))}."
        + "".join(f" Open at {' and '.join(where)}, where {why}." for why, where in lacking.items() if where)
        + (f" {held} did not leave the plateau on which every run begins." if held else "")
    )


def _one(item: tuple[str, float]) -> str:
    return f"{item[0]} {item[1]:.1f}"


def _nearly_equal(values: Mapping[str, float]) -> str:
    ratio = _change(values.values())
    return f"{verdict(ratio < 1.1)}. {', '.join(map(_one, values.items()))}: at most {ratio:.2f} times"


def _of_the_twins(record: Mapping[str, Any], panel: str) -> dict[int, float]:
    """By k, the perplexity of the pure Linformers of a panel in multiples of their twin's."""
    values = ends(record, panel)
    own = {k: values.get(f"Linformer k={k}") for k in (64, 128, 256)}
    twin = values.get("Transformer")
    return {k: value / twin for k, value in own.items() if value and twin}


def _change(values: Collection[float]) -> float:
    return max(values) / min(values)


def verdict(holds: bool) -> str:
    return "confirmed" if holds else "refuted"


def page(record: Mapping[str, Any]) -> list[str]:
    """The figure in words."""
    lines = [
        "Validation perplexity after the last step, for each panel of the figure. One seed each; how far seeds differ "
        "stands in the section that compares a Linformer with its twin at equal steps. E learns at the common rate "
        "where all layers share it and n = 512, at 1.2·k/n of it where they share it and n is larger, and else, or "
        "beside a local window, at 0.03 of it (in the last row of panel d, at 0.12·k/n); so panel c compares ways of "
        "sharing, each at a rate that suits it. A row of panel d shows what the common rate "
        "(`model.projection_scale=1`) does to longer inputs.",
        "",
    ]
    for name, panel in record["panels"].items():
        values, labels = ends(record, name), list(panel["curves"])
        cells = [f"{values[label]:.1f}" if label in values else "missing" for label in labels]
        lines += [f"**3{name}, {panel['title']}**", ""]
        lines += (
            table(("", *labels), [("Linformer, layerwise", *cells), *below(record)])
            if name == "d"
            else table(labels, [cells])
        )
    absent = [
        name
        for panel, (_, curves) in PANELS.items()
        for label, name in curves.items()
        if label not in ends(record, panel)
    ]
    absent += [
        run.name for row, runs in BELOW.items() for label, run in runs.items() if record["below"][row][label] is None
    ]
    missing = list(dict.fromkeys(absent))
    return [*lines, *(f"- {line}" for line in claims(record)), *to_fill("figure3", missing), ""]


def below(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """More rows of panel d: its twin, and other choices that were tried at some of its lengths."""
    rows = []
    for row, found in record["below"].items():
        values = ((label in found, found.get(label)) for label in PANELS["d"][1])
        rows.append((row, *(("missing" if own is None else f"{own:.1f}") if tried else "–" for tried, own in values)))
    return rows
