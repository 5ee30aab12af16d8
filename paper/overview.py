"""The main results in one table and one plot: how good the models are, and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linformers.benchmark.measure import DEVICE

from . import figure3, plots, table2
from .experiments import TASKS, Workspace, bench, flags
from .sections import main

TITLE = "What matters most"
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


def measure(work: Workspace) -> dict[str, Any] | None:
    """The time of inference, compiled, on a GPU. The rest of the table comes from other sections."""
    if DEVICE != "cuda" and not work.small:
        return None
    sizes: dict[str, Any] = {"lengths": ",".join(map(str, LENGTHS)), "projected": "128,256", "windows": 32}
    sizes |= {"tokens": 65536, "layers": 12, "hidden": 768}
    if work.small:
        sizes |= {"lengths": "512,1024", "tokens": 1024, "layers": 1, "hidden": 64}
    compiled = [] if work.small else ["--compile"]
    where, cells = bench(work, "overview", [*flags(sizes), "--models", "roberta,twin,linformer", *compiled])
    return {"runs": {"overview": where}, **times(cells, work.small)}


def times(cells: Sequence[Mapping[str, Any]], eager: bool = False) -> dict[str, Any]:
    """Milliseconds of inference by model, as pairs (n, ms), and the speed relative to the baseline."""
    found: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        name = cell["model"] if eager else cell["model"].removesuffix(COMPILED)
        if cell["task"] == "inference" and cell["seconds"] and (eager or name != cell["model"]):
            found.setdefault(name, []).append((cell["n"], 1000 * cell["seconds"]))
    base = dict(found.get(BASELINE, ()))
    speeds = {name: [(n, base[n] / ms) for n, ms in points if n in base] for name, points in found.items()}
    return {"milliseconds": found, "speeds": speeds}


def collect(work: Workspace) -> dict[str, Any]:
    """The numbers of other sections that the table shows; `None` where they are missing."""
    pretrained, tuned = figure3.collect(work), table2.collect(work)
    timed = work.read("overview") or {"runs": {}, "milliseconds": {}, "speeds": {}}
    models = {row["model"]: row for row in tuned["rows"] if row["n"] == 512}
    rows = {
        name: {
            "curve": pretrained["panels"]["a"]["curves"][row.curve],
            "perplexity": pretrained["panels"]["a"]["ends"][row.curve],
            "accuracies": [own and own[0] for own in (models[row.tuned]["ours"][task] for task in TASKS)],
            "qnli": models[row.tuned]["ours"]["qnli"],
            "average": models[row.tuned]["average"],
            "without_qnli": table2.average(models[row.tuned]["ours"], table2.WITHOUT_QNLI),
            "milliseconds": timed["milliseconds"].get(row.timed),
            "speeds": [dict(timed["speeds"].get(row.timed, ())).get(n) for n in LENGTHS],
        }
        for name, row in ROWS.items()
    }
    return {
        "runs": {**pretrained["runs"], **tuned["runs"], **timed["runs"]},
        "rows": rows,
        "baseline": timed["milliseconds"].get(BASELINE),
        "lengths": LENGTHS,
        "steps": figure3.STEPS,
        "twin_at_best_rate": tuned["claims"]["twin"],
        "stuck": pretrained["stuck"],
        "deviations": deviations(rows),
    }


def deviations(rows: Mapping[str, Any]) -> tuple[float, float] | None:
    """The standard deviation over seeds on QNLI: the twin's, and the largest of the others."""
    found = {name: row["qnli"][1] for name, row in rows.items() if row["qnli"] and row["qnli"][1] is not None}
    twin = found.pop(table2.TWIN, None)
    return (twin, max(found.values())) if twin is not None and found else None


def draw(record: Mapping[str, Any], folder: Path) -> None:
    rows = record["rows"]
    milliseconds = {name: row["milliseconds"] for name, row in rows.items() if row["milliseconds"]}
    if record["baseline"]:
        milliseconds = {BASELINE: record["baseline"], **milliseconds}
    perplexity = {name: row["curve"] for name, row in rows.items() if row["curve"]}
    plots.overview(milliseconds, perplexity, folder / "overview.png")


if __name__ == "__main__":
    main(["overview"])
