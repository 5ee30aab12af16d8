"""Attention onto k keys alone: our Triton kernels beside each backend of SDPA, on a GPU.

    python benchmarks/attention.py --lengths 512,2048,8192,65536 --projected 64,128,256,512,1024,2048

Passes are replayed from CUDA graphs, so that only the GPU's time counts.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from linformers.benchmark.measure import (
    DEVICE,
    DTYPE,
    Run,
    interleaved,
    memory_errors,
    runs_at_once,
)
from linformers.checks import make_folder
from linformers.ops.attend import attend
from linformers.ops.dispatch import use_triton
from linformers.progress import steps
from linformers.provenance import commit, environment
from linformers_cli import run_script, whole_numbers

DISPATCH, KERNELS = "dispatch", "Triton kernels"
BACKENDS = {
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure(n: int, k: int, tokens: int, heads: int, channels: int) -> list[dict[str, Any]]:
    """Seconds of a forward and of a backward pass of each implementation, or why it failed."""
    names = (DISPATCH, KERNELS, *BACKENDS) if DEVICE == "cuda" else (DISPATCH,)
    cells: dict[str, dict[str, Any]] = {
        name: {"model": name, "n": n, "k": k, "failure": "out of memory"} for name in names
    }
    graphs: dict[tuple[str, str], tuple[Run, int]] = {}
    with suppress(torch.OutOfMemoryError), memory_errors():
        shapes = [(max(1, tokens // n), length, heads, channels) for length in (n, k, k)]
        tensors = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
        inputs = [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]
        for name, cell in cells.items():
            try:
                with memory_errors():
                    graphs |= {(name, key): graph for key, graph in passes(name, inputs).items()}
            except torch.OutOfMemoryError:
                continue
            except RuntimeError as error:  # a backend that does not support the shape
                cell["failure"] = str(error).splitlines()[0]
    replays = {key: replay for key, (replay, _) in graphs.items()}
    seconds = {key: time / graphs[key][1] for key, time in interleaved(replays, min_seconds=0.15, queued=0).items()}
    for name, cell in cells.items():
        if {(name, key) for key in ("forward", "saving", "both")} <= seconds.keys():
            del cell["failure"]
            cell["forward"] = seconds[name, "forward"]
            cell["backward"] = seconds[name, "both"] - seconds[name, "saving"]
    return list(cells.values())


def passes(name: str, inputs: Sequence[Tensor]) -> dict[str, tuple[Run, int]]:
    """An implementation's graphs: forward, forward that saves tensors for backward, and both passes."""
    query, key, value = inputs

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(query, key, value).transpose(1, 2)

    def kernels() -> Tensor:
        return attend(query, key, value, scaling=query.shape[-1] ** -0.5)

    function = kernels if name == KERNELS or (name == DISPATCH and use_triton(query, key)) else sdpa
    with sdpa_kernel(BACKENDS.get(name, [*SDPBackend.__members__.values()])):
        gradient = torch.randn_like(function())

        def both() -> None:
            torch.autograd.grad(function(), (query, key, value), gradient)

        with torch.no_grad():
            forward = captured(function)
        return {"forward": forward, "saving": captured(function), "both": captured(both)}


def captured(run: Callable[[], Any]) -> tuple[Run, int]:
    """A function that replays `run` from a CUDA graph, and how often it does so; on a CPU, `run` itself."""
    run()  # compilation and autotuning cannot be captured
    if not torch.cuda.is_available():
        return run, 1
    count = runs_at_once(run, seconds=0.01, most=20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()

    def replay(_: Run = run) -> None:  # the graph uses the tensors of `run`, which must live as long as the graph
        graph.replay()

    return replay, count


def tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Milliseconds of each pass; in parentheses, how many times faster than the best backend of SDPA."""
    by_place = {(cell["n"], cell["model"], cell["k"]): cell for cell in cells}
    lengths, names, projected = (list(dict.fromkeys(places)) for places in zip(*by_place, strict=True))

    def text(n: int, name: str, k: int, direction: str) -> str:
        cell = by_place[n, name, k]
        if "failure" in cell:
            return "out of memory" if cell["failure"] == "out of memory" else "–"
        others = [own[direction] for backend in BACKENDS if direction in (own := by_place.get((n, backend, k), {}))]
        gain = f" ({min(others) / cell[direction]:.2f}×)" if others and name not in BACKENDS else ""
        return f"{1000 * cell[direction]:.3f}{gain}"

    found = []
    for direction in ("forward", "backward"):
        table = Table("n", "implementation", *(f"k={k}" for k in projected), title=f"{direction}: milliseconds")
        for n in lengths:
            for name in names:
                table.add_row(str(n), name, *(text(n, name, k, direction) for k in projected))
        found.append(table)
    return found


def main(
    lengths: Annotated[str, typer.Option(help="Sequence lengths n, separated by commas.")] = "512,2048",
    projected: Annotated[str, typer.Option(help="Projected lengths k, separated by commas.")] = "64,128",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per pass.")] = 65536,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 12,
    channels: Annotated[int, typer.Option(min=1, help="Channels per head.")] = 64,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/bench"),
) -> None:
    """Measure attention onto k keys: our Triton kernels beside each backend of SDPA."""
    places = [(n, k) for n in whole_numbers("--lengths", lengths) for k in whole_numbers("--projected", projected)]
    make_folder("out", out)
    console, cells = Console(), list[dict[str, Any]]()
    record = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **environment(), "cells": cells}
    with steps(console, len(places)) as begin:
        for n, k in places:
            begin(f"attention, n={n}, k={k}")
            cells += measure(n, k, tokens, heads, channels)
            (out / "attention.json").write_text(json.dumps(record, indent=1) + "\n")
    for table in tables(cells):
        console.print(table)
    if DEVICE != "cuda":
        console.print("There is no GPU: these are the times of torch's own attention.", highlight=False)


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
