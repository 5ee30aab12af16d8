"""The same shapes through other efficient encoders: two Linformer packages, and those of transformers.

    python benchmarks/peers.py --lengths 512,4096 --out results/efficiency

The packages `linformer` and `linformer-pytorch` are measured where they are installed. All models take embeddings
(b, n, d) and have the same layers, heads and feed-forward size; each is used as its authors publish it. The
Linformers named after `--compile` are measured compiled, too, and then stand against ours compiled;
`linformer-pytorch`, with a module for each head, takes minutes to compile. `--name` names the files, so that one run
does not replace another's.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from command import one_sentence
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from linformers import LinformerConfig, LinformerModel
from linformers.benchmark.measure import (
    OutOfMemoryError,
    best_device,
    interleaved,
    memory_errors,
    pass_of,
    peak_memory,
    release,
)
from linformers.benchmark.report import Settings, markdown
from linformers.checks import check_choice, check_size, make_folder, whole_numbers
from linformers.progress import steps
from linformers.provenance import commit, environment

PACKAGES = {"linformer": "linformer", "linformer-pytorch": "linformer_pytorch"}  # and the modules in them
OURS, COMPILED = "linformers", ", compiled"
LINFORMERS = (OURS, *PACKAGES)
OTHERS = ("ModernBERT", "Longformer", "BigBird", "Nyströmformer")


class Embedded(nn.Module):
    """A model of transformers that is given embeddings and gives hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


class Autocast(Embedded):
    """The same for a model that makes float32 tensors of its own, which bfloat16 weights refuse."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=x.dtype, enabled=x.dtype != torch.float32):
            return super().forward(x)


def peers(n: int, k: int, sizes: dict[str, int], compiled: Sequence[str] = ()) -> dict[str, Callable[[], nn.Module]]:
    """How to make each model that can be made here."""
    layers, heads, d, f = (sizes[name] for name in ("layers", "heads", "hidden", "intermediate"))
    common: dict[str, Any] = {
        "vocab_size": 100,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": d,
        "intermediate_size": f,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }

    def ours() -> nn.Module:
        config = LinformerConfig(
            **common,
            max_position_embeddings=n,
            projected_length=k,
            sharing="layerwise",
        )
        return Embedded(LinformerModel(config))

    def of_transformers(name: str, wrapper: type[Embedded] = Embedded, **fields: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**common, **fields)
        return wrapper(getattr(transformers, f"{name}Model")(config))

    def linformer() -> nn.Module:
        from linformer import Linformer

        return Linformer(dim=d, seq_len=n, depth=layers, k=k, heads=heads)

    def linformer_pytorch() -> nn.Module:
        from linformer_pytorch import Linformer

        return Linformer(
            input_size=n,
            channels=d,
            dim_k=k,
            dim_ff=f,
            nhead=heads,
            depth=layers,
            dropout=0.0,
            dropout_ff=0.0,
            parameter_sharing="layerwise",
        )

    makers: list[Callable[[], nn.Module]] = [
        lambda: of_transformers("ModernBert", max_position_embeddings=n, pad_token_id=1),
        lambda: of_transformers("Longformer", max_position_embeddings=n + 2, attention_window=min(512, n)),
        lambda: of_transformers("BigBird", max_position_embeddings=n, block_size=64 if n >= 1024 else 16),
        lambda: of_transformers(
            "Nystromformer", Autocast, max_position_embeddings=n, segment_means_seq_len=n, num_landmarks=64
        ),
    ]
    others = dict(zip(OTHERS, makers, strict=True))
    linformers: dict[str, Callable[[], nn.Module]] = {OURS: ours}
    for package, make in zip(PACKAGES, (linformer, linformer_pytorch), strict=True):
        if is_installed(package):
            linformers[package] = make
    linformers |= {
        f"{name}{COMPILED}": functools.partial(compile_made, make)
        for name, make in linformers.items()
        if name in compiled
    }
    return linformers | others


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(PACKAGES[package]) is not None


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def compile_made(make: Callable[[], nn.Module]) -> nn.Module:
    return torch.compile(make(), dynamic=False)  # type: ignore[return-value]


def measure(
    n: int,
    k: int,
    tokens: int,
    task: str,
    sizes: dict[str, int],
    compiled: Sequence[str],
    only: Sequence[str] = (),
    on_model: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Seconds and bytes of a pass of each model, or of `only` some; what fails says why.

    `on_model` is called with the name of each that is about to be measured.
    """
    device = best_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch = max(1, tokens // n)
    x: Tensor | None = None
    runs, peaks, failures = {}, {}, {}
    torch._dynamo.reset()
    for name, make in peers(n, k, sizes, compiled).items():
        if only and name.removesuffix(COMPILED) not in only:
            continue
        on_model(f"{name}, n={n}, {task}")
        try:
            with memory_errors(), torch.device(device):
                if x is None:
                    x = torch.randn(batch, n, sizes["hidden"], dtype=dtype)
                model = make().to(dtype)
                run = pass_of(model, lambda model=model, x=x: model(x), task)  # type: ignore[misc]
                run()
                peaks[name] = peak_memory(run, device)
                runs[name] = run
        except OutOfMemoryError:
            failures[name] = "out of memory"
        except Exception as error:  # what another package raises is its own affair, and an entry
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        release()
    seconds = interleaved(runs, may_run_out=True)
    failures |= {name: "out of memory" for name in runs if name not in seconds}
    return [
        {
            "model": name,
            "n": n,
            "k": k,
            "task": task,
            "batch": batch,
            "seconds": seconds.get(name),
            "peak_bytes": peaks.get(name),
            "failure": failures.get(name),
        }
        for name in {**runs, **failures}
    ]


def table_of(cells: list[dict[str, Any]]) -> Table:
    """Milliseconds, how many times as long as ours in the same way (compiled or not), and MiB."""
    first = cells[0]
    table = Table("model", "ms", "of ours", "MiB", title=f"{first['task']}, n={first['n']}, batch {first['batch']}")
    ours = {cell["model"]: cell["seconds"] for cell in cells if cell["model"].split(",")[0] == OURS}
    for cell in sorted(cells, key=lambda cell: cell["seconds"] or float("inf")):
        if cell["failure"]:
            table.add_row(cell["model"], cell["failure"], "", "")
        else:
            seconds = cell["seconds"]
            base = ours.get(f"{OURS}{COMPILED}" if cell["model"].endswith(COMPILED) else OURS)
            ratio = f"{seconds / base:.2f}×" if base else "–"
            table.add_row(cell["model"], f"{1000 * seconds:.1f}", ratio, f"{cell['peak_bytes'] / 2**20:,.0f}")
    return table


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before anything is."""
    check_size("projected", options.projected)
    for n in options.lengths:
        if options.projected >= n:
            raise ValueError(f"projected={options.projected} must be below lengths={n}")
    Settings(
        options.lengths,
        [options.projected],
        tokens=options.tokens,
        layers=options.layers,
        hidden=options.hidden,
        tasks=options.task,
    ).check()
    for name in options.only:
        check_choice("only", name, (*LINFORMERS, *OTHERS))
    for name in options.compile:
        check_choice("compile", name, LINFORMERS)
    if Path(options.name).name != options.name:
        raise ValueError(f"name={options.name!r} must be the name of a file without its folder, which is --out")
    make_folder("out", options.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--lengths", default="512,4096", help="n, separated by commas")
    parser.add_argument("--projected", type=int, default=128, help="k")
    parser.add_argument("--tokens", type=int, default=8192, help="in a pass")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="d; heads have 64 channels")
    parser.add_argument("--task", default="inference,training", help="either, or both with a comma between")
    parser.add_argument("--compile", default="", help=f"Linformers to measure compiled, too: {','.join(LINFORMERS)}")
    parser.add_argument("--only", default="", help=f"models to measure, beside ours: {','.join(OTHERS)} or Linformers")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for what is written")
    parser.add_argument("--name", default="peers", help="of the files there, without .json and .md")
    options = parser.parse_args()
    options.lengths = whole_numbers("lengths", options.lengths)
    options.task = options.task.split(",")
    options.compile, options.only = (text.split(",") if text else [] for text in (options.compile, options.only))
    check(options)
    return options


def main() -> None:
    with one_sentence():
        run(parse())


def run(options: argparse.Namespace) -> None:
    only = [OURS, *options.only] if options.only else []
    sizes = {
        "layers": options.layers,
        "heads": options.hidden // 64,
        "hidden": options.hidden,
        "intermediate": 4 * options.hidden,
    }
    transformers.utils.logging.set_verbosity_error()
    console, cells, tables = Console(), [], []
    for package in PACKAGES:
        if not is_installed(package):
            console.print(f"{package} is not installed and is left out", highlight=False)
    record = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), **environment(), **versions(), **sizes}
    names = peers(options.lengths[0], options.projected, sizes, options.compile)
    count = sum(not only or name.removesuffix(COMPILED) in only for name in names)
    with steps(console, count * len(options.lengths) * len(options.task)) as begin:
        for n in options.lengths:
            for task in options.task:
                measured = measure(n, options.projected, options.tokens, task, sizes, options.compile, only, begin)
                tables.append(table_of(measured))
                console.print(tables[-1])
                cells += measured
                text = json.dumps({**record, "cells": cells}, indent=1) + "\n"
                (options.out / f"{options.name}.json").write_text(text)
                page = markdown(tables, [], record, "Peers")
                (options.out / f"{options.name}.md").write_text(page, encoding="utf-8")
    console.print(f"Written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
