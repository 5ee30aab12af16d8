"""Attention onto k keys alone: our kernels, and what the dispatch makes of them, beside each backend of SDPA.

    python benchmarks/attention.py --lengths 512,2048,8192,65536 --projected 64,128,256,512,1024,2048

On a GPU a forward pass, and a forward with its backward pass, are captured in graphs, so that only the device's time
counts; the backward pass is their difference.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from linformers.attention import triton_attention
from linformers.benchmark.measure import Run, best_device, captured, interleaved
from linformers.benchmark.report import markdown
from linformers.ops.attend import attend
from linformers.ops.dispatch import use_triton
from linformers.provenance import commit, environment

OURS, DISPATCH = "our kernels", "through the dispatch"
BACKENDS = {
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PASSES = ("forward", "backward")


def measure(n: int, k: int, tokens: int, heads: int, channels: int) -> list[dict[str, Any]]:
    """Seconds of a forward and of a backward pass of each implementation; none where it does not serve."""
    device = best_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def of(length: int) -> Tensor:
        shape = (max(1, tokens // n), length, heads, channels)
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    query, key, value = of(n), of(k), of(k)
    scaling = channels**-0.5

    def dispatched() -> Tensor:
        return triton_attention(torch.nn.Module(), query, key, value, None, scaling=scaling, is_causal=False)[0]

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(query, key, value).transpose(1, 2)

    def replays(function: Callable[[], Tensor]) -> dict[str, tuple[Run, int]]:
        gradient = torch.randn_like(function())

        def both() -> None:
            torch.autograd.grad(function(), (query, key, value), gradient)

        with torch.no_grad():
            forward = captured(function)
        # What the forward pass takes when it saves something for the backward pass belongs to the former.
        return {"forward": forward, "saving": captured(function), "both": captured(both)}

    runs: dict[str, tuple[Callable[[], Tensor], list[SDPBackend]]] = {
        DISPATCH: (dispatched, [*SDPBackend.__members__.values()])
    }
    if device == "cuda":
        runs[OURS] = (lambda: attend(query, key, value, scaling=scaling), [SDPBackend.MATH])
        runs |= {name: (sdpa, [backend]) for name, backend in BACKENDS.items()}
    cells: dict[str, dict[str, Any]] = {}
    graphs: dict[tuple[str, str], tuple[Run, int]] = {}
    for name, (function, backends) in runs.items():
        cells[name] = {"model": name, "n": n, "k": k, "served_by_triton": use_triton(query, key)}
        try:
            with sdpa_kernel(backends):
                graphs |= {(name, what): replay for what, replay in replays(function).items()}
        except RuntimeError as error:  # a backend that does not serve, or too little memory
            cells[name]["failure"] = str(error).splitlines()[0]
    times = interleaved({place: replay for place, (replay, _) in graphs.items()}, min_seconds=0.15, queued=0)
    seconds = {place: times[place] / count for place, (_, count) in graphs.items()}
    for name in {name for name, _ in graphs}:
        cells[name]["forward"] = seconds[name, "forward"]
        cells[name]["backward"] = seconds[name, "both"] - seconds[name, "saving"]
    return list(cells.values())


def ratios(cells: list[dict[str, Any]], name: str, direction: str) -> dict[tuple[int, int], float]:
    """How many times faster than the best backend of SDPA an implementation is, by (n, k)."""
    found = {}
    for cell in cells:
        if cell["model"] != name or direction not in cell:
            continue
        place = cell["n"], cell["k"]
        others = [
            c[direction] for c in cells if (c["n"], c["k"]) == place and c["model"] in BACKENDS and direction in c
        ]
        if others:
            found[place] = min(others) / cell[direction]
    return found


def tables_of(cells: list[dict[str, Any]]) -> list[Table]:
    """Milliseconds; in brackets how many times faster than the best backend of SDPA."""
    tables = []
    projected = list(dict.fromkeys(cell["k"] for cell in cells))
    for direction in PASSES:
        table = Table("n", "implementation", *(f"k={k}" for k in projected))
        table.title = f"Attention, {direction}: milliseconds (× faster than the best backend of SDPA)"
        for n in dict.fromkeys(cell["n"] for cell in cells):
            for name in dict.fromkeys(cell["model"] for cell in cells):
                gains = ratios(cells, name, direction)
                row = []
                for k in projected:
                    cell = next(c for c in cells if (c["model"], c["n"], c["k"]) == (name, n, k))
                    gain = f" ({gains[n, k]:.2f}×)" if name in (OURS, DISPATCH) and (n, k) in gains else ""
                    row.append(f"{1000 * cell[direction]:.3f}{gain}" if direction in cell else "–")
                table.add_row(str(n), name, *row)
        tables.append(table)
    return tables


def sentences(cells: list[dict[str, Any]]) -> list[str]:
    lines = []
    for direction in PASSES:
        gains = ratios(cells, DISPATCH, direction)
        if gains:
            (n, k), least = min(gains.items(), key=lambda item: item[1])
            lines.append(f"{direction}: through the dispatch at least {least:.2f}× the best backend (n={n}, k={k}).")
    return lines


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--lengths", type=numbers, default="512,2048", help="n, separated by commas")
    parser.add_argument("--projected", type=numbers, default="64,128", help="k, separated by commas")
    parser.add_argument("--tokens", type=int, default=65536, help="in a pass")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--channels", type=int, default=64, help="of a head")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    console = Console()
    places = [(n, k) for n in options.lengths for k in options.projected]
    cells = [
        cell
        for n, k in track(places, "attention", console=console)
        for cell in measure(n, k, options.tokens, options.heads, options.channels)
    ]
    tables, lines = tables_of(cells), sentences(cells)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    where = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **environment()}
    (options.out / "attention.json").write_text(json.dumps({**where, "cells": cells}, indent=1) + "\n")
    (options.out / "attention.md").write_text(markdown(tables, lines, where, "Attention"), encoding="utf-8")
    console.print(f"Written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
