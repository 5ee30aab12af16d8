"""The same shapes through other efficient encoders: two Linformer packages, and models of transformers.

    pip install linformer==0.2.3 linformer-pytorch==0.19.3
    python benchmarks/peers.py --lengths 512,4096 --out results/efficiency

The Linformer packages are measured where they are installed. All models take embeddings (b, n, d) and have the same
number of layers, heads and feed-forward channels; otherwise each is built as its authors publish it. The Linformers
named in `--compile` are also measured compiled (minutes for `linformer-pytorch`, which has a module for each head).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from linformers import LinformerConfig, LinformerModel
from linformers.benchmark.measure import (
    DEVICE,
    DTYPE,
    Run,
    interleaved,
    make_run,
    memory_errors,
    peak_memory,
    release,
)
from linformers.checks import check_choice, make_folder
from linformers.errors import UserError
from linformers.progress import steps
from linformers.provenance import commit, environment
from linformers_cli import run_script, whole_numbers

OURS, COMPILED = "linformers", ", compiled"
PACKAGES = {"linformer": "linformer", "linformer-pytorch": "linformer_pytorch"}  # module names
OTHERS = ("ModernBERT", "Longformer", "BigBird", "Nyströmformer")


class Embedded(nn.Module):
    """A model of transformers from embeddings to hidden states; `autocast` for one that creates float32 tensors."""

    def __init__(self, model: nn.Module, autocast: bool = False) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=x.dtype, enabled=self.autocast and x.dtype != torch.float32):
            return self.model(inputs_embeds=x).last_hidden_state


def peers(n: int, k: int, layers: int, hidden: int, compiled: Sequence[str] = ()) -> dict[str, Callable[[], nn.Module]]:
    """A function for each model that builds it."""
    heads = hidden // 64 or 1
    common: dict[str, Any] = {"vocab_size": 100, "num_hidden_layers": layers, "num_attention_heads": heads}
    common |= {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    common |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def ours() -> nn.Module:
        fields = {**common, "max_position_embeddings": n, "projected_length": k, "sharing": "layerwise"}
        fields |= {"norm_first": False, "position_embedding_type": "absolute", "projection_init": "window"}
        return Embedded(LinformerModel(LinformerConfig(**fields, local_window=0)))

    def linformer() -> nn.Module:
        from linformer import Linformer

        return Linformer(dim=hidden, seq_len=n, depth=layers, k=k, heads=heads)

    def linformer_pytorch() -> nn.Module:
        from linformer_pytorch import Linformer

        sizes = {"input_size": n, "channels": hidden, "dim_k": k, "dim_ff": 4 * hidden, "nhead": heads, "depth": layers}
        return Linformer(**sizes, dropout=0.0, dropout_ff=0.0, parameter_sharing="layerwise")

    def from_transformers(name: str, autocast: bool = False, **fields: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**common, "max_position_embeddings": n, **fields})
        return Embedded(getattr(transformers, f"{name}Model")(config), autocast)

    makers = {OURS: ours, "linformer": linformer, "linformer-pytorch": linformer_pytorch}
    found: dict[str, Callable[[], nn.Module]] = {}
    for name, make in makers.items():
        if name == OURS or is_installed(name):
            found[name] = make
            if name in compiled:
                found[name + COMPILED] = lambda make=make: torch.compile(make(), dynamic=False)  # type: ignore[misc]
    window, block = min(512, n), 64 if n >= 1024 else 16
    landmarks: dict[str, Any] = {"segment_means_seq_len": n, "num_landmarks": 64}
    positions = {"max_position_embeddings": n + 2}
    others = (
        functools.partial(from_transformers, "ModernBert", pad_token_id=1),
        functools.partial(from_transformers, "Longformer", attention_window=window, **positions),
        functools.partial(from_transformers, "BigBird", block_size=block),
        functools.partial(from_transformers, "Nystromformer", autocast=True, **landmarks),
    )
    return found | dict(zip(OTHERS, others, strict=True))


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(PACKAGES[package]) is not None


def measure(
    models: dict[str, Callable[[], nn.Module]],
    n: int,
    batch: int,
    hidden: int,
    task: str,
    on_model: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Seconds and peak bytes of a pass of each model, or why it failed."""
    runs, peaks, failures = dict[str, Run](), dict[str, int](), dict[str, str]()
    torch._dynamo.reset()
    for name, make in models.items():
        on_model(f"{name}, n={n}, {task}")
        try:
            with memory_errors(), torch.device(DEVICE):
                x = torch.randn(batch, n, hidden, dtype=DTYPE)
                run = make_run(make().to(DTYPE), x, task)
                run()  # compilation and autotuning do not count
                peaks[name], runs[name] = peak_memory(run, DEVICE), run
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except Exception as error:  # another package's error is a result, too
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        release()
    seconds = interleaved(runs)
    failures |= {name: "out of memory" for name in runs if name not in seconds}
    where = {"n": n, "task": task, "batch": batch}
    costs = {name: (seconds.get(name), peaks.get(name), failures.get(name)) for name in models}
    return [
        {"model": name, **where, "seconds": own[0], "peak_bytes": own[1], "failure": own[2]}
        for name, own in costs.items()
    ]


def table_of(cells: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds, also relative to ours (compiled if the model is), and MiB."""
    first = cells[0]
    table = Table("model", "ms", "of ours", "MiB", title=f"{first['task']}, n={first['n']}, batch {first['batch']}")
    seconds = {cell["model"]: cell["seconds"] for cell in cells}
    for cell in sorted(cells, key=lambda cell: cell["seconds"] or float("inf")):
        name, own = cell["model"], cell["seconds"]
        base = seconds.get(OURS + COMPILED if name.endswith(COMPILED) else OURS)
        if cell["failure"]:
            table.add_row(name, cell["failure"], "", "")
        else:
            ratio = f"{own / base:.2f}×" if base else "–"
            table.add_row(name, f"{1000 * own:.1f}", ratio, f"{cell['peak_bytes'] / 2**20:,.0f}")
    return table


def main(
    lengths: Annotated[str, typer.Option(help="Sequence lengths n, separated by commas.")] = "512,4096",
    projected: Annotated[int, typer.Option(min=1, help="Projected length k.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per pass.")] = 8192,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    hidden: Annotated[int, typer.Option(min=64, help="Hidden size; each head has 64 channels.")] = 256,
    task: Annotated[
        str, typer.Option(help="inference, training, or both separated by a comma.")
    ] = "inference,training",
    compile: Annotated[str, typer.Option(help="Linformers to measure compiled too, separated by commas.")] = "",
    only: Annotated[str, typer.Option(help="Models to measure beside ours, separated by commas.")] = "",
    name: Annotated[str, typer.Option(help="Name of the json file.")] = "peers",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/bench"),
) -> None:
    """Measure other efficient encoders beside ours."""
    numbers, tasks = whole_numbers("--lengths", lengths), task.split(",")
    compiled, chosen = (text.split(",") if text else [] for text in (compile, only))
    for option, values, known in (
        ("task", tasks, ("inference", "training")),
        ("compile", compiled, (OURS, *PACKAGES)),
        ("only", chosen, (OURS, *PACKAGES, *OTHERS)),
    ):
        for value in values:
            check_choice(option, value, known)
    if projected >= min(numbers):
        raise UserError(f"projected={projected} must be below lengths={min(numbers)}")
    make_folder("out", out)
    transformers.utils.logging.set_verbosity_error()
    console, cells = Console(), list[dict[str, Any]]()
    record = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **environment()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            record[package] = importlib.metadata.version(package)
        if package not in record:
            console.print(f"{package} is not installed and left out", highlight=False)
    record |= {"layers": layers, "hidden": hidden, "k": projected, "cells": cells}

    def models(n: int) -> dict[str, Callable[[], nn.Module]]:
        found = peers(n, projected, layers, hidden, compiled)
        return {own: make for own, make in found.items() if not only or own.removesuffix(COMPILED) in (OURS, *chosen)}

    with steps(console, len(models(numbers[0])) * len(numbers) * len(tasks)) as begin:
        for n in numbers:
            for kind in tasks:
                measured = measure(models(n), n, max(1, tokens // n), hidden, kind, begin)
                console.print(table_of(measured))
                cells += measured
                (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
