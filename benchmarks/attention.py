"""Attention onto k keys alone: our kernels, and what the dispatch makes of them, beside each backend of SDPA.

    python benchmarks/attention.py --lengths 512,2048,8192,65536 --projected 64,128,256,512,1024,2048

A forward pass, and a forward with its backward pass, are captured in graphs, so that only the device's time counts; the
backward pass is their difference. All of this is about a GPU: without one, the dispatch alone is measured, which takes
torch's own attention there.
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
from command import one_sentence
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from linformers.attention import triton_attention
from linformers.benchmark.measure import (
    OutOfMemoryError,
    Run,
    best_device,
    captured,
    fitting,
    interleaved,
    memory_errors,
)
from linformers.benchmark.report import check_whole_sequences, markdown
from linformers.checks import check_size, make_folder, whole_numbers
from linformers.ops.attend import attend
from linformers.ops.dispatch import use_triton
from linformers.progress import steps
from linformers.provenance import commit, environment

OURS, DISPATCH = "our kernels", "through the dispatch"
BACKENDS = {
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PASSES = ("forward", "backward")
OUT_OF_MEMORY = "out of memory"


def measure(n: int, k: int, tokens: int, heads: int, channels: int) -> list[dict[str, Any]]:
    """Seconds of a forward and of a backward pass of each implementation; none where it does not serve."""
    device = best_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def of(length: int) -> Tensor:
        shape = (max(1, tokens // n), length, heads, channels)
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    names = (DISPATCH, OURS, *BACKENDS) if device == "cuda" else (DISPATCH,)
    cells: dict[str, dict[str, Any]] = {name: {"model": name, "n": n, "k": k} for name in names}
    inputs = fitting(lambda: (of(n), of(k), of(k)))
    if inputs is None:
        return [{**cell, "failure": OUT_OF_MEMORY} for cell in cells.values()]
    query, key, value = inputs
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
        DISPATCH: (dispatched, [*SDPBackend.__members__.values()]),
        OURS: (lambda: attend(query, key, value, scaling=scaling), [SDPBackend.MATH]),
        **{name: (sdpa, [backend]) for name, backend in BACKENDS.items()},
    }
    graphs: dict[tuple[str, str], tuple[Run, int]] = {}
    for name, cell in cells.items():
        function, backends = runs[name]
        cell["served_by_triton"] = use_triton(query, key)
        try:
            with memory_errors(), sdpa_kernel(backends):
                graphs |= {(name, what): replay for what, replay in replays(function).items()}
        except OutOfMemoryError:
            cell["failure"] = OUT_OF_MEMORY
        except RuntimeError as error:  # a backend that does not serve
            cell["failure"] = str(error).splitlines()[0]
    replayed = {place: replay for place, (replay, _) in graphs.items()}
    times = interleaved(replayed, min_seconds=0.15, queued=0, may_run_out=True)
    seconds = {place: time / graphs[place][1] for place, time in times.items()}
    for name in dict.fromkeys(name for name, _ in graphs):
        if all((name, what) in seconds for what in ("forward", "saving", "both")):
            cells[name]["forward"] = seconds[name, "forward"]
            cells[name]["backward"] = seconds[name, "both"] - seconds[name, "saving"]
        else:
            cells[name]["failure"] = OUT_OF_MEMORY
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
    """Milliseconds; in brackets how many times faster than the best backend of SDPA, where those were measured."""
    tables = []
    compared = any(cell["model"] in BACKENDS for cell in cells)
    projected = list(dict.fromkeys(cell["k"] for cell in cells))
    for direction in PASSES:
        table = Table("n", "implementation", *(f"k={k}" for k in projected))
        title = f"Attention, {direction}: milliseconds"
        table.title = f"{title} (× faster than the best backend of SDPA)" if compared else title
        for n in dict.fromkeys(cell["n"] for cell in cells):
            for name in dict.fromkeys(cell["model"] for cell in cells):
                gains = ratios(cells, name, direction)
                row = []
                for k in projected:
                    cell = next((c for c in cells if (c["model"], c["n"], c["k"]) == (name, n, k)), {})
                    gain = f" ({gains[n, k]:.2f}×)" if name in (OURS, DISPATCH) and (n, k) in gains else ""
                    missing = OUT_OF_MEMORY if cell.get("failure") == OUT_OF_MEMORY else "–"
                    row.append(f"{1000 * cell[direction]:.3f}{gain}" if direction in cell else missing)
                table.add_row(str(n), name, *row)
        tables.append(table)
    return tables


def sentences(cells: list[dict[str, Any]]) -> list[str]:
    if not any(cell["model"] in BACKENDS for cell in cells):
        return ["This compares kernels of a GPU, and there is none here: the times are those of torch's own attention."]
    lines = []
    for direction in PASSES:
        gains = ratios(cells, DISPATCH, direction)
        if gains:
            (n, k), least = min(gains.items(), key=lambda item: item[1])
            lines.append(f"{direction}: through the dispatch at least {least:.2f}× the best backend (n={n}, k={k}).")
    return lines


def parse() -> argparse.Namespace:
    """The options, with what cannot be measured refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--lengths", default="512,2048", help="n, separated by commas")
    parser.add_argument("--projected", default="64,128", help="k, separated by commas")
    parser.add_argument("--tokens", type=int, default=65536, help="in a pass")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--channels", type=int, default=64, help="of a head")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for what is written")
    options = parser.parse_args()
    for name in ("lengths", "projected"):
        setattr(options, name, whole_numbers(name, getattr(options, name)))
    for name in ("tokens", "heads", "channels"):
        check_size(name, getattr(options, name))
    check_whole_sequences(options.lengths, options.tokens)
    make_folder("out", options.out)
    return options


def main() -> None:
    with one_sentence():
        run(parse())


def run(options: argparse.Namespace) -> None:
    console, cells, tables, lines = Console(), [], [], []
    where = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **environment()}
    places = [(n, k) for n in options.lengths for k in options.projected]
    with steps(console, len(places)) as begin:
        for n, k in places:
            begin(f"attention, n={n}, k={k}")
            cells += measure(n, k, options.tokens, options.heads, options.channels)
            tables, lines = tables_of(cells), sentences(cells)
            (options.out / "attention.json").write_text(json.dumps({**where, "cells": cells}, indent=1) + "\n")
            (options.out / "attention.md").write_text(markdown(tables, lines, where, "Attention"), encoding="utf-8")
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    console.print(f"Written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
