"""The efficiency benchmark as a table, a plot and json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import plots
from ..checks import check_size, make_folder
from ..provenance import commit, environment
from .efficiency import (
    FUSED,
    UNFUSED,
    Cell,
    as_records,
    best_device,
    compare_lengths,
    compare_projected_lengths,
    curves,
    mebibytes,
    milliseconds,
    variants,
)


def run(
    lengths: Sequence[int],
    projected: Sequence[int],
    *,
    tokens: int,
    layers: int,
    hidden: int,
    out: Path,
    command: str,
    console: Console,
) -> None:
    """Measure, show, and write `efficiency.json` and `efficiency.png` to `out`."""
    for name, size in (("tokens", tokens), ("layers", layers), ("hidden", hidden)):
        check_size(name, size)
    if hidden % 64:
        raise ValueError(f"hidden={hidden} must be a multiple of 64, the channels of a head")
    for n in lengths:
        if tokens % n:
            raise ValueError(f"lengths={n} does not divide tokens={tokens}: each pass holds whole sequences")
    if min(projected) >= max(lengths):
        raise ValueError(f"projected={min(projected)} leaves nothing to measure: no length exceeds it")
    make_folder("out", out)
    device = best_device()
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
    }
    count = sum(len(variants(n, projected)) for n in lengths)
    measured = compare_lengths(lengths, projected, tokens=tokens, device=device, **fields)
    cells = list(track(measured, "lengths", total=count, console=console))
    console.print(length_table(cells, milliseconds, "Milliseconds of a pass (× faster than fused)", FUSED))
    console.print(length_table(cells, mebibytes, "MiB of a pass (× smaller than unfused)", UNFUSED))

    n, k, smaller = max(lengths), max(projected), min(projected)
    mixed: list[Cell] = []
    if smaller < k < n and k % smaller == 0:
        measured = compare_projected_lengths(k, smaller, n, tokens=tokens, device=device, **fields)
        mixed = list(track(measured, "smaller k", total=4, console=console))
        console.print(saving_table(mixed, n))

    record = {"command": command, "commit": commit(), **environment(), **fields, "tokens": tokens}
    record |= {"lengths": as_records(cells), "projected_lengths": as_records(mixed)}
    (out / "efficiency.json").write_text(json.dumps(record, indent=1) + "\n")
    plots.efficiency(curves(cells, milliseconds), curves(cells, mebibytes), out / "efficiency.png")
    console.print(f"Written to {out}", markup=False)


def length_table(cells: Sequence[Cell], value: Callable[[Cell], float], title: str, baseline: str) -> Table:
    """One measure of a pass at each n; in brackets, how many times less a Linformer needs than the baseline."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    table = Table("n", *models, title=title)
    for n in dict.fromkeys(cell.n for cell in cells):
        own = {cell.model: value(cell) for cell in cells if cell.n == n}

        def entry(model: str, own: dict[str, float] = own) -> str:
            if model not in own:
                return "–"
            gain = "" if model in (UNFUSED, FUSED) else f" ({own[baseline] / own[model]:.2f}×)"
            return f"{own[model]:.0f}{gain}"

        table.add_row(str(n), *map(entry, models))
    return table


def saving_table(cells: Sequence[Cell], n: int) -> Table:
    table = Table("projected length", "time", "of the first", title=f"What a smaller k saves at n={n}")
    for cell in cells:
        table.add_row(cell.model, f"{milliseconds(cell):.0f} ms", f"{cell.seconds / cells[0].seconds:.2f}")
    return table
