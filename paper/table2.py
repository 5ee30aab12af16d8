"""Table 2: pretrained models fine-tuned on four tasks, next to the paper's numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .experiments import TASKS, Tuning, Workspace, corpus, finetuning, known_task
from .figure3 import Run, pretraining_job, verdict
from .jobs import REPEATED, Job
from .sections import main

TITLE = "Table 2: fine-tuning"
TUNING = Tuning(seeds=3, epochs=3, batch_size=128, learning_rate=2e-4)
TINY = Tuning(seeds=1, epochs=1, batch_size=64, learning_rate=1e-3)
TWIN, LOCAL = "Transformer twin", "Linformer, 128, local window 32"
# Differences of averages below this many points decide nothing: seeds differ by as much.
NOISE = 0.5
# The paper's names for the kinds of sharing.
SHARING = {"headwise": "", "key-value": ", shared kv", "layerwise": ", shared kv, layer"}

# By n and model.
Averages = Mapping[tuple[int, str], float]


class Row(NamedTuple):
    """A model of the table: its variant of the recipe, and the paper's accuracies, if it has them."""

    n: int
    model: str
    variant: str | None
    paper: tuple[float, float, float, float] | None


ROWS = (
    Row(512, TWIN, "n512-twin", (93.1, 94.1, 90.9, 90.9)),
    Row(512, "Linformer, 128", "n512-k128-headwise", (92.4, 94.0, 90.4, 90.2)),
    Row(512, "Linformer, 128, shared kv", "n512-k128-key-value", (93.4, 93.4, 90.3, 90.3)),
    Row(512, "Linformer, 128, shared kv, layer", "n512-k128-layerwise", (93.2, 93.8, 90.1, 90.2)),
    Row(512, "Linformer, 256", "n512-k256-headwise", (93.2, 94.0, 90.6, 90.5)),
    Row(512, "Linformer, 256, shared kv", "n512-k256-key-value", (93.3, 93.6, 90.6, 90.6)),
    Row(512, "Linformer, 256, shared kv, layer", "n512-k256-layerwise", (93.1, 94.1, 91.2, 90.8)),
    Row(512, LOCAL, "n512-k128-w32", None),
    Row(512, "BERT-base", None, (92.7, 93.5, 91.8, 89.6)),
    Row(512, "DistilBERT", None, (91.3, 92.8, 89.2, 88.5)),
    Row(1024, "Linformer, 256", "n1024-k256-headwise", (93.0, 93.8, 90.4, 90.4)),
    Row(1024, "Linformer, 256, shared kv", "n1024-k256-key-value", (93.0, 93.6, 90.3, 90.4)),
    Row(1024, "Linformer, 256, shared kv, layer", "n1024-k256-layerwise", (93.2, 94.2, 90.8, 90.5)),
)
VARIANTS = [row.variant for row in ROWS if row.variant is not None]
# On QNLI the twin's seeds differ by ten points, so it is also tuned at other learning rates.
AGAIN, OTHER_RATES = "table2/n512-twin-qnli", {"half": 0.5, "double": 2.0}
WITHOUT_QNLI = [task for task in TASKS if task != "qnli"]
# The rows that decide the claims run first.
FIRST = ("n512-twin", "n512-k256-layerwise", "n512-k128-w32")


def names(work: Workspace) -> list[str]:
    found = [f"figure3/{variant}" for variant in VARIANTS]
    found += [f"table2/{variant}-{task}" for variant in VARIANTS for task in TASKS]
    return found if work.small else [*found, *map(again_name, OTHER_RATES)]


def again_name(rate: str) -> str:
    return f"{AGAIN}-{rate}-rate"


def jobs(work: Workspace) -> list[Job]:
    """Each model's pretraining, followed by its tasks."""
    tokens = corpus(work, "wiki-books")
    tuning = TINY if work.small else TUNING
    found = []
    for variant in sorted(VARIANTS, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        first = pretraining_job(work, tokens, Run(variant))
        found.append(first)
        for task in TASKS:
            name, data = f"table2/{variant}-{task}", known_task(work, task)
            found.append(finetuning(work, name, data, tuning, first))
            if name == AGAIN and not work.small:
                for rate, factor in OTHER_RATES.items():
                    other = tuning._replace(learning_rate=factor * tuning.learning_rate)
                    found.append(finetuning(work, again_name(rate), data, other, first))
    return found


def collect(work: Workspace) -> dict[str, Any]:
    """Accuracies in percent, mean and standard deviation over seeds; `None` where a run is missing."""
    tuned = [name for name in names(work) if name.startswith("table2/")]
    results, origins = work.records.results_of(tuned)

    def accuracy(name: str) -> list[float | None] | None:
        result = results.get(name)
        return None if result is None else [None if x is None else 100 * x for x in result["accuracy"]]

    rows = []
    for row in ROWS:
        ours = None if row.variant is None else {task: accuracy(f"table2/{row.variant}-{task}") for task in TASKS}
        rows.append({**row._asdict(), "ours": ours, "average": average(ours), "paper_average": _mean(row.paper)})
    record = {
        "runs": origins,
        "rows": rows,
        "again": {rate: accuracy(again_name(rate)) for rate in OTHER_RATES},
        "repeated": repeated(work),
        "notes": {
            task: r["note"] for task in TASKS for name, r in results.items() if name.endswith(task) and r["note"]
        },
        "missing": [name.partition("/")[2] for name in tuned if name not in results],
    }
    return {**record, "claims": claims(record)}


def repeated(work: Workspace) -> dict[str, list[float]]:
    """Final perplexities of the pretrainings that were run a second time for some of the tasks."""
    records = work.records.section("figure3")
    return {
        f"{row.model} (n = {row.n})": [records[row.variant]["result"]["perplexity"], again["result"]["perplexity"]]
        for row in ROWS
        if row.variant in records and (again := records.get(f"{row.variant}{REPEATED}"))
    }


def average(ours: Mapping[str, Any] | None, tasks: Sequence[str] = TASKS) -> float | None:
    """The mean accuracy over tasks, if all of them were run."""
    return _mean([ours[task][0] for task in tasks]) if ours and all(ours[task] for task in tasks) else None


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else statistics.mean(values)


def averages_of(record: Mapping[str, Any], tasks: Sequence[str] = TASKS) -> dict[tuple[int, str], float]:
    """The average of each model, by n and name."""
    own = {(row["n"], row["model"]): average(row["ours"], tasks) for row in record["rows"]}
    return {cell: value for cell, value in own.items() if value is not None}


def averages_at_best_rates(record: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    """The average of each model, by n and name; the twin's with the best of its learning rates on QNLI."""
    found = averages_of(record)
    if (512, TWIN) in found:
        common = next(row["ours"]["qnli"] for row in record["rows"] if row["model"] == TWIN)[0]
        best = max(common, *(own[0] for own in record["again"].values() if own is not None), common)
        found[512, TWIN] += (best - common) / len(TASKS)
    return found


def claims(record: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's claims with our numbers; claims whose runs are missing are left out."""
    averages, others = averages_at_best_rates(record), averages_of(record, WITHOUT_QNLI)
    pure = {cell: own for cell, own in averages.items() if cell[1] not in (TWIN, LOCAL)}
    twin, local = averages.get((512, TWIN)), averages.get((512, LOCAL))
    found: dict[str, Any] = {"twin": twin, "without_qnli": others, "comparable": None, "local": None}
    if twin is not None and pure:
        best = max(pure, key=lambda cell: pure[cell])
        found["comparable"] = {"verdict": verdict(pure[best] >= twin - NOISE), "best": best, "average": pure[best]}
    if twin is not None and local is not None:
        found["local"] = {"average": local, "others": others[512, LOCAL], "twin_others": others[512, TWIN]}
    found["layerwise"] = list(layerwise(averages, others))
    found["k_decides"] = list(k_decides(averages, others))
    return found


def layerwise(*averages: Averages) -> Iterator[dict[str, Any]]:
    """Whether layerwise sharing is best downstream, by each of the averages."""
    for n, k in ((512, 128), (512, 256), (1024, 256)):
        cells = {way: (n, f"Linformer, {k}{suffix}") for way, suffix in SHARING.items()}
        if all(cell in own for own in averages for cell in cells.values()):
            leads = [
                own[cells["layerwise"]] - max(own[cell] for way, cell in cells.items() if way != "layerwise")
                for own in averages
            ]
            values = {way: [own[cell] for own in averages] for way, cell in cells.items()}
            yield {"n": n, "k": k, "verdict": decided(*leads), "values": values}


def k_decides(*averages: Averages) -> Iterator[dict[str, Any]]:
    """Whether n = 1024, k = 256 is closer to n = 512 at the same k than at the same n/k, by each of the averages."""
    for way, suffix in SHARING.items():
        cells = {
            "long": (1024, f"Linformer, 256{suffix}"),
            "same_k": (512, f"Linformer, 256{suffix}"),
            "same_ratio": (512, f"Linformer, 128{suffix}"),
        }
        if all(cell in own for own in averages for cell in cells.values()):
            values = {name: [own[cell] for own in averages] for name, cell in cells.items()}
            triples = zip(values["long"], values["same_k"], values["same_ratio"], strict=True)
            closer = [abs(long - same_ratio) - abs(long - same_k) for long, same_k, same_ratio in triples]
            yield {"sharing": way, "verdict": decided(*closer), **values}


def decided(*points: float) -> str:
    """The verdict on a claim that these differences in points are positive."""
    if all(own >= NOISE for own in points):
        return verdict(True)
    if all(own <= -NOISE for own in points):
        return verdict(False)
    return f"undecided: the difference is below {NOISE} points"


if __name__ == "__main__":
    main(["table2"])
