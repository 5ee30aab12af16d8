"""Table 3 and Figure 2: time and memory over (n, k) against unfused attention, measured by `linformers bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import linformers.plots
from linformers.benchmark.measure import DEVICE
from linformers.errors import UserError

from . import plots
from .experiments import Workspace, bench, flags
from .sections import main

TITLE = "Table 3 and Figure 2: time and memory"
UNFUSED, FUSED = "Transformer, unfused", "Transformer, fused"
PROJECTED = (128, 256, 512, 1024, 2048)
PAPER = {
    "time": {
        512: (1.5, 1.3),
        1024: (1.7, 1.6, 1.3),
        2048: (2.6, 2.4, 2.1, 1.3),
        4096: (3.4, 3.2, 2.8, 2.2, 1.3),
        8192: (5.5, 5.0, 4.4, 3.5, 2.1),
        16384: (8.6, 7.8, 7.0, 5.6, 3.3),
        32768: (13, 12, 11, 8.8, 5.0),
        65536: (20, 18, 16, 14, 7.9),
    },
    "memory": {
        512: (1.7, 1.5),
        1024: (3.0, 2.9, 1.8),
        2048: (6.1, 5.6, 3.6, 2.0),
        4096: (14, 13, 8.3, 4.3, 2.3),
        8192: (28, 26, 17, 8.5, 4.5),
        16384: (56, 48, 32, 16, 8),
        32768: (56, 48, 36, 18, 16),
        65536: (60, 52, 40, 20, 18),
    },
}


def options(work: Workspace) -> list[str]:
    """The paper's lengths with all of its k, 65,536 tokens per pass, and 16 GiB for the batches."""
    if work.small:
        sizes: dict[str, Any] = {"lengths": "512,1024", "projected": "128,256"}
        return [*flags({**sizes, "tokens": 1024, "layers": 2, "hidden": 64}), "--models", "unfused,twin,linformer"]
    if DEVICE != "cuda":
        raise UserError("table3 needs a GPU; use --small, or measure sizes of your own with `linformers bench`")
    sizes = {"lengths": ",".join(map(str, PAPER["time"])), "projected": ",".join(map(str, PROJECTED))}
    sizes |= {"tokens": 65536, "layers": 12, "hidden": 768, "memory": 16}
    return [*flags(sizes), "--models", "unfused,twin,linformer", "--batches"]


def measure(work: Workspace) -> dict[str, Any]:
    where, cells = bench(work, "table3", options(work))
    return {"runs": {"table3": where}, "cells": cells}


def collect(work: Workspace) -> dict[str, Any]:
    record = work.read("table3")
    return {"runs": {}} if record is None else {**record, **summary(record["cells"])}


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Our savings next to the paper's, and the comparison with fused attention."""
    saved = {measure: savings(cells, measure) for measure in PAPER}
    inference = [cell for cell in cells if cell["task"] == "inference"]
    seconds = {(cell["model"], cell["n"]): cell["seconds"] for cell in inference if cell["seconds"]}
    batches = {(cell["model"], cell["n"]): cell["largest_batch"] for cell in inference if cell["largest_batch"]}
    least = min((cell["k"] for cell in inference if cell["k"]), default=None)
    own = f"Linformer k={least}"
    fusion = {n: seconds[UNFUSED, n] / seconds[FUSED, n] for model, n in seconds if model == UNFUSED}
    return {
        "by_batch": any(cell["largest_batch"] is not None for cell in cells),
        "projected": PROJECTED,
        "tables": {measure: table(saved[measure], measure) for measure in PAPER},
        "beaten": {measure: beaten(saved[measure], measure) for measure in PAPER},
        "fusion": {n: gain for n, gain in fusion.items() if round(gain, 1) > 1},
        "least": least,
        "against_fused": {n: seconds[FUSED, n] / own_time for (model, n), own_time in seconds.items() if model == own},
        "batch_ratios": {n: size / batches[FUSED, n] for (model, n), size in batches.items() if model == own},
    }


def savings(cells: Sequence[Mapping[str, Any]], measure: str) -> dict[tuple[int, int], float]:
    """How many times less a Linformer needs than the unfused Transformer, by (n, k), where both fit.

    Memory is compared by the largest batch that fits, as in the paper; where none was searched for, as on a CPU, by
    the peak of a pass.
    """
    inference = [cell for cell in cells if cell["task"] == "inference" and cell["seconds"] is not None]

    def cost(cell: Mapping[str, Any]) -> float | None:
        if measure == "time":
            return cell["seconds"]
        if cell["largest_batch"] is not None:
            return 1 / cell["largest_batch"] if cell["largest_batch"] else None
        return cell["peak_bytes"]

    unfused = {cell["n"]: own for cell in inference if cell["model"] == UNFUSED and (own := cost(cell))}
    return {
        (cell["n"], cell["k"]): unfused[cell["n"]] / own
        for cell in inference
        if cell["model"] == f"Linformer k={cell['k']}" and cell["n"] in unfused and (own := cost(cell))
    }


def table(ours: Mapping[tuple[int, int], float], measure: str) -> dict[int, list[tuple[float | None, float]]]:
    """Ours and the paper's saving for each k, by n."""
    return {
        n: [(ours.get((n, k)), paper) for k, paper in zip(PROJECTED, row, strict=False)]
        for n, row in PAPER[measure].items()
    }


def beaten(ours: Mapping[tuple[int, int], float], measure: str) -> dict[str, Any]:
    """In how many of the measured cells we save more than the paper, and in which we do not."""
    paper = {(n, k): own for n, row in PAPER[measure].items() for k, own in zip(PROJECTED, row, strict=False)}
    both = [cell for cell in paper if cell in ours]
    missed = [cell for cell in both if ours[cell] <= paper[cell]]
    return {"count": len(both) - len(missed), "of": len(both), "missed": missed}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Figure 2: where E and F are (left), and time and memory against n (right)."""
    cells = [cell for cell in record["cells"] if cell["task"] == "inference" and cell["seconds"] is not None]
    milliseconds: dict[str, list[tuple[float, float]]] = {}
    mebibytes: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        milliseconds.setdefault(cell["model"], []).append((cell["n"], 1000 * cell["seconds"]))
        if cell["peak_bytes"]:
            mebibytes.setdefault(cell["model"], []).append((cell["n"], cell["peak_bytes"] / 2**20))
    xlabel = "sequence length n (tokens per pass fixed)"
    linformers.plots.efficiency(milliseconds, mebibytes, folder / "table3.png", xlabel)
    plots.architecture(folder / "architecture.png")


if __name__ == "__main__":
    main(["table3"])
