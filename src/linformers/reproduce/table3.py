"""Table 3 and Figure 2: time and memory over (n, k) against unfused attention, by `linformers bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import plots
from ..benchmark import report
from ..benchmark.efficiency import FUSED, UNFUSED, Cell, curves, mebibytes, milliseconds
from ..benchmark.measure import best_device
from ..errors import UserError
from ..markdown import table
from .jobs import origin
from .matrix import Place

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


def settings(place: Place) -> report.Settings:
    """What is measured: the paper's lengths with all of its k, 65,536 tokens in a pass, 16 GiB for the batches.

    A test of the whole path has the paper's first lengths and k, and little of everything else.
    """
    models = ("unfused", "twin", "linformer")
    if place.small:
        return report.Settings((512, 1024), PROJECTED[:2], tokens=1024, layers=2, hidden=64, models=models)
    if best_device() != "cuda":
        raise UserError(
            "table3 has 12 layers and 65,536 tokens in a pass, which needs a GPU; without one, test the path with "
            "--small, or measure sizes of your own with `linformers bench`"
        )
    return report.Settings(
        lengths=tuple(PAPER["time"]),
        projected=PROJECTED,
        tokens=65536,
        layers=12,
        hidden=768,
        models=models,
        batches=True,
        memory=16,
    )


def folders(place: Place) -> list[Path]:
    """Where what was measured lies: one run or several, over different n."""
    return sorted(path.parent for path in (place.results / "efficiency").glob("table3*/efficiency.json"))


def measure(place: Place, console: Console) -> dict[str, Any]:
    """Run the benchmark, unless that has been done, and collect."""
    if before := folders(place):
        console.print(f"taken from {', '.join(map(str, before))}", highlight=False, markup=False)
    else:
        out = place.results / "efficiency" / "table3"
        command = f"linformers reproduce table3{' --small' if place.small else ''}"
        report.run(settings(place), out=out, command=command, console=console)
    return collect(place)


def collect(place: Place) -> dict[str, Any]:
    """All cells, and the runs that they come from."""
    records = {folder.name: json.loads((folder / "efficiency.json").read_text()) for folder in folders(place)}
    return {
        "runs": {name: origin(record) for name, record in records.items()},
        "cells": [cell for record in records.values() for cell in record["lengths"]],
    }


def savings(cells: Sequence[Mapping[str, Any]], measure: str) -> dict[tuple[int, int], float]:
    """How many times less a Linformer takes than the unfused Transformer, by (n, k), where both fit.

    Memory is measured by the largest batch that fits, as in the paper; where none was looked for, as on a CPU, by the
    peak of a pass.
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


def verdict(ours: Mapping[tuple[int, int], float], measure: str) -> str:
    """How many cells of the paper are beaten, and which are not."""
    paper = {(n, k): x for n, row in PAPER[measure].items() for k, x in zip(PROJECTED, row, strict=False)}
    both = [place for place in paper if place in ours]
    if not both:
        return f"{measure}: no cell of the paper's table was measured, for a Transformer and a Linformer alike."
    missed = [f"n={n}, k={k}" for n, k in both if ours[n, k] <= paper[n, k]]
    line = f"{measure}: {len(both) - len(missed)} of {len(both)} cells that were measured and fit are beaten"
    return f"{line}; not: {'; '.join(missed)}." if missed else f"{line}."


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Figure 2, right: time and memory against n, a line for each k."""
    cells = [Cell(**cell) for cell in record["cells"] if cell["task"] == "inference"]
    plots.efficiency(curves(cells, milliseconds), curves(cells, mebibytes), path)


def page(record: Mapping[str, Any]) -> list[str]:
    """Both halves of the table: ours and (the paper's)."""
    if any(cell["largest_batch"] is not None for cell in record["cells"]):
        lines = ["Memory is compared, as in the paper, by the largest batch that fits: here into 16 GiB.", ""]
    else:
        lines = ["Memory is compared by the peak of a pass: the largest batch that fits was not looked for.", ""]
    for measure in PAPER:
        ours = savings(record["cells"], measure)
        lines += [f"**{measure.capitalize()} saved in inference against unfused attention: ours (the paper's)**", ""]
        rows = []
        for n, row in PAPER[measure].items():
            cells = [
                f"{f'{ours[n, k]:.1f}×' if (n, k) in ours else 'none'} ({paper}×)"
                for k, paper in zip(PROJECTED, row, strict=False)
            ]
            rows.append((str(n), *cells, *["–"] * (len(PROJECTED) - len(cells))))
        lines += table(("n", *(f"k={k}" for k in PROJECTED)), rows)
    lines += [f"- {verdict(savings(record['cells'], measure), measure)}" for measure in PAPER]
    fused = {cell["n"]: cell["seconds"] for cell in record["cells"] if cell["model"] == FUSED}
    unfused = {cell["n"]: cell["seconds"] for cell in record["cells"] if cell["model"] == UNFUSED}
    gains = {n: round(unfused[n] / fused[n], 1) for n in fused if fused[n] and unfused.get(n)}
    saved = [f"{gain:.1f}× at n = {n}" for n, gain in gains.items() if gain > 1]
    if saved:
        lines.append(f"- Fused attention alone saves {', '.join(saved)}: today's baseline is not the paper's.")
    least = min((cell["k"] for cell in record["cells"] if cell["k"]), default=None)
    own = {c["n"]: c["seconds"] for c in record["cells"] if c["model"] == f"Linformer k={least}" and c["seconds"]}
    against = [f"{fused[n] / own[n]:.2f} at n = {n}" for n in own if fused.get(n)]
    if against:
        lines.append(f"- Times as fast as fused attention at k = {least}, nothing compiled: {', '.join(against)}.")
    batches = {(c["model"], c["n"]): c["largest_batch"] for c in record["cells"] if c["largest_batch"]}
    room = [
        f"{batches[name, n] / batches[FUSED, n]:.2f} at n = {n}"
        for name, n in batches
        if name == f"Linformer k={least}" and (FUSED, n) in batches
    ]
    if room:
        lines.append(f"- Largest batch in multiples of fused attention's, at k = {least}: {', '.join(room)}.")
    return [*lines, "- “None” was not measured, or the Transformer did not fit into memory.", ""]
