"""Table 3 of the paper beside our own, from what `linformers bench` measured.

    linformers bench --models unfused,linformer --projected 128,256,512,1024,2048 --batches --memory 16 ... --out DIR
    python benchmarks/table3.py DIR [DIR ...]

The paper gives, for each (n, k), how many times less time and memory a Linformer takes in inference than a Transformer
with unfused attention; memory is measured by the largest batch that fits. Where our own is "none", it was not measured
or the Transformer did not fit into memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from linformers.benchmark.efficiency import UNFUSED
from linformers.benchmark.report import markdown, provenance

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


def savings(cells: list[dict[str, Any]], measure: str) -> dict[tuple[int, int], float]:
    """How many times less a Linformer takes than the unfused Transformer, by (n, k), where both fit."""
    field = {"time": "seconds", "memory": "largest_batch"}[measure]
    inference = [cell for cell in cells if cell["task"] == "inference" and cell[field]]
    unfused = {cell["n"]: cell[field] for cell in inference if cell["model"] == UNFUSED}
    return {
        (cell["n"], cell["k"]): unfused[n] / cell[field] if measure == "time" else cell[field] / unfused[n]
        for cell in inference
        if cell["model"] == f"Linformer k={cell['k']}" and (n := cell["n"]) in unfused
    }


def table_of(ours: dict[tuple[int, int], float], measure: str) -> Table:
    table = Table("n", *(f"k={k}" for k in PROJECTED), title=f"Inference, {measure} saved: ours (the paper's)")
    for n, row in PAPER[measure].items():
        cells = [
            f"{f'{ours[n, k]:.1f}×' if (n, k) in ours else 'none'} ({paper}×)"
            for k, paper in zip(PROJECTED, row, strict=False)
        ]
        table.add_row(str(n), *cells, *["–"] * (len(PROJECTED) - len(cells)))
    return table


def verdict(ours: dict[tuple[int, int], float], measure: str) -> str:
    """How many cells of the paper are beaten, and which are not."""
    paper = {(n, k): x for n, row in PAPER[measure].items() for k, x in zip(PROJECTED, row, strict=False)}
    both = [place for place in paper if place in ours]
    if not both:
        return f"{measure}: no cell of the paper's table was measured, for a Transformer and a Linformer alike."
    missed = [f"n={n}, k={k}" for n, k in both if ours[n, k] <= paper[n, k]]
    line = f"{measure}: {len(both) - len(missed)} of {len(both)} cells that were measured and fit are beaten"
    return f"{line}; not: {'; '.join(missed)}." if missed else f"{line}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folders", type=Path, nargs="+", help="what `linformers bench --out` was given, for each run")
    folders = parser.parse_args().folders
    for folder in folders:
        if not (folder / "efficiency.json").is_file():
            parser.error(f"{folder} has no efficiency.json, which `linformers bench --out {folder}` writes")
    records = [json.loads((folder / "efficiency.json").read_text()) for folder in folders]
    cells = [cell for record in records for cell in record["lengths"]]
    ours = {measure: savings(cells, measure) for measure in PAPER}
    tables = [table_of(ours[measure], measure) for measure in PAPER]
    lines = [verdict(ours[measure], measure) for measure in PAPER]
    console = Console()
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    where = {str(folder): provenance(record) for folder, record in zip(folders, records, strict=True)}
    (folders[0] / "table3.md").write_text(markdown(tables, lines, where, title="Table 3"), encoding="utf-8")


if __name__ == "__main__":
    main()
