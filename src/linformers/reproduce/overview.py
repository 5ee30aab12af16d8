"""What matters most, in one table and one plot: how good the models are, and how fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .. import plots
from ..markdown import table
from . import figure3, table2
from .jobs import origin
from .matrix import TASKS, Place

# Under the results: where `linformers bench` wrote what is shown here, each time beside the baseline.
BENCHMARKS = ("efficiency/compiled", "efficiency/compiled-k256")
BASELINE, COMPILED = "RoBERTa, SDPA", ", compiled"
LENGTHS = (512, 8192, 65536)


class Row(NamedTuple):
    """A model by its names in Figure 3, in Table 2 and in the benchmark."""

    curve: str
    tuned: str
    timed: str


ROWS = {
    table2.TWIN: Row("Transformer", table2.TWIN, "Transformer, fused"),
    "Linformer, k = 256": Row("Linformer k=256", "Linformer, 256, shared kv, layer", "Linformer k=256"),
    "Linformer, k = 128": Row("Linformer k=128", "Linformer, 128, shared kv, layer", "Linformer k=128"),
    "Linformer, k = 128, local window of 32": Row("Linformer k=128 w=32", table2.LOCAL, "Linformer k=128 w=32"),
}


def collect(place: Place) -> dict[str, Any]:
    """Of what other sections and the benchmark measured, the part that is shown; `None` where it is missing."""
    pretrained, tuned = figure3.collect(place), table2.collect(place)
    curves = pretrained["panels"]["a"]["curves"]
    accuracies = {row["model"]: row for row in tuned["rows"] if row["n"] == 512}
    runs = {**pretrained["runs"], **tuned["runs"]}
    times: dict[str, list[tuple[int, float]]] = {}
    speeds: dict[str, list[tuple[int, float]]] = {}
    for name in BENCHMARKS:
        path = place.results / name / "efficiency.json"
        if path.is_file():
            benchmark = json.loads(path.read_text())
            runs[name] = origin(benchmark)
            own = _inference(benchmark)
            base = dict(own.get(BASELINE, ()))
            times = own | times
            for model, points in own.items():
                speeds.setdefault(model, [(n, base[n] / ms) for n, ms in points if n in base])
    rows = {
        name: {
            "curve": curves[row.curve],
            "accuracy": accuracies[row.tuned]["ours"],
            "average": table2.average(accuracies[row.tuned]),
            "average_without_qnli": table2.average(accuracies[row.tuned], table2.WITHOUT_QNLI),
            "milliseconds": times.get(row.timed),
            "speeds": speeds.get(row.timed),
        }
        for name, row in ROWS.items()
    }
    best = table2.averages_at_best_rates(tuned).get((512, table2.TWIN))
    return {
        "runs": runs,
        "rows": rows,
        "baseline": times.get(BASELINE),
        "twin_at_best_rate": best,
        "stuck": figure3.stuck(pretrained),
    }


def measure(place: Place, console: Console) -> dict[str, Any]:
    """Nothing of its own."""
    return collect(place)


def _inference(benchmark: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Milliseconds of a pass over n, of each model compiled."""
    times: dict[str, list[tuple[int, float]]] = {}
    for cell in benchmark["lengths"]:
        name = cell["model"].removesuffix(COMPILED)
        if cell["task"] == "inference" and name != cell["model"] and cell["seconds"] is not None:
            times.setdefault(name, []).append((cell["n"], 1000 * cell["seconds"]))
    return times


def draw(record: Mapping[str, Any], path: Path) -> None:
    rows = record["rows"]
    times = {name: row["milliseconds"] for name, row in rows.items() if row["milliseconds"]}
    if record["baseline"]:
        times = {BASELINE: record["baseline"], **times}
    plots.overview(times, {name: row["curve"] for name, row in rows.items() if row["curve"]}, path)


def page(record: Mapping[str, Any]) -> list[str]:
    """The table, and what its columns are."""
    rows = []
    for name, row in record["rows"].items():
        perplexity = f"{row['curve'][-1][1]:.1f}" if row["curve"] else "–"
        tasks = [f"{own[0]:.1f}" if (own := row["accuracy"][task]) else "–" for task in TASKS]
        average = "–" if row["average"] is None else f"{row['average']:.1f}"
        speeds = dict(row["speeds"] or ())
        rows.append(
            (name, perplexity, *tasks, average, *(f"{speeds[n]:.1f}×" if n in speeds else "–" for n in LENGTHS))
        )
    header = ("", "perplexity", "SST-2", "IMDB", "QNLI", "QQP", "average", *(f"speed at n = {n:,}" for n in LENGTHS))
    return [
        *table(header, rows),
        f"- Quality: perplexity after {figure3.STEPS:,} steps on Wikipedia and books and then the accuracy on four "
        "tasks, 34M parameters, n = 512. The twin is a Transformer with everything but the projection equal. The "
        "training set of QNLI and the split of QQP are not GLUE's.",
        *spread(record),
        "- Speed: inference against transformers' RoBERTa with fused attention, 12 layers of 768 channels, all "
        f"compiled, on one H200. Longer models were not trained for this table{_stuck(record)}.",
        "",
    ]


def _stuck(record: Mapping[str, Any]) -> str:
    where = " and ".join(label.replace("=", " = ") for label in record["stuck"])
    return f", and k = 256 alone did not begin to learn at {where} on this text in as many steps" if where else ""


def spread(record: Mapping[str, Any]) -> list[str]:
    """How far seeds differ on the task where they differ most: a mean says little there."""
    found = {name: row["accuracy"]["qnli"] for name, row in record["rows"].items()}
    deviations = {name: own[1] for name, own in found.items() if own and own[1] is not None}
    if table2.TWIN not in deviations or len(deviations) == 1:
        return []
    twin, others = deviations.pop(table2.TWIN), max(deviations.values())
    best = record["twin_at_best_rate"]
    at_best = "" if best is None else f" At the best of three rates on QNLI, the twin's average is {best:.1f}."
    return [
        f"- On QNLI, seeds of the twin learn or do not (a deviation of {twin:.1f}, of the others of at most "
        f"{others:.1f}), so its mean says little.{at_best}{without_qnli(record)}"
    ]


def without_qnli(record: Mapping[str, Any]) -> str:
    """The averages of the other tasks, in the order of the rows, where all of them are there."""
    means = [row["average_without_qnli"] for row in record["rows"].values()]
    if None in means:
        return ""
    return f" Without QNLI, the averages of the rows are {', '.join(f'{own:.1f}' for own in means)}."
