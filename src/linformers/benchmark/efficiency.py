"""`linformers bench`: time and memory of Linformers beside the Transformers that you would use instead."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, RobertaConfig, RobertaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import LinformerConfig, LinformerModel, plots
from ..checks import check_choice, make_folder
from ..config import WINDOWED
from ..convert import SAME_FIELDS
from ..errors import UserError
from ..progress import steps
from ..provenance import commit, environment
from . import measure
from .measure import DEVICE, DTYPE, Run

UNFUSED, FUSED, ROBERTA, COMPILED = "Transformer, unfused", "Transformer, fused", "RoBERTa, SDPA", ", compiled"
MODELS, TASKS = ("unfused", "roberta", "twin", "linformer"), ("inference", "training")
VOCABULARY = 1000


def plain_attention(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):  # type: ignore[no-untyped-def]
    """softmax(Q Kᵀ · scaling) V without fusion; eager attention computes in float32, an unfairly slow baseline."""
    probs = nn.functional.dropout((query * scaling @ key.mT).softmax(-1), dropout)
    return (probs @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("plain", plain_attention)
# Under this name transformers makes no mask: with one, a compiled RoBERTa would not use a fused kernel.
ALL_ATTENTION_FUNCTIONS.register("sdpa_without_mask", ALL_ATTENTION_FUNCTIONS["sdpa"])


@dataclass(frozen=True)
class Cell:
    """The cost of a pass through one model at one length; `seconds` is `None` where memory ran out."""

    model: str
    n: int
    k: int | None  # of a Linformer
    batch: int
    task: str  # "inference", or "training": a forward and a backward pass
    seconds: float | None  # median time of a pass
    peak_bytes: int | None  # peak memory of a pass, without weights and input
    largest_batch: int | None = None  # that fits into memory, if it was searched for

    @property
    def milliseconds(self) -> float:
        return 1000 * (self.seconds or 0)

    @property
    def mebibytes(self) -> float:
        return (self.peak_bytes or 0) / 2**20


def curves(cells: Sequence[Cell], value: str) -> dict[str, list[tuple[float, float]]]:
    """Points (n, value) of each model, where memory sufficed; `value` is a property of `Cell`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.seconds is not None:
            points.setdefault(cell.model, []).append((cell.n, getattr(cell, value)))
    return points


def model_configs(
    n: int,
    projected: Sequence[int],
    *,
    models: Any = MODELS,
    windows: Any = (),
    rotary: bool = False,
    ragged: bool = False,
    compile: bool = False,
    **fields: Any,
) -> dict[str, PreTrainedConfig]:
    """The models to measure at length n, by name; `fields` are fields of `LinformerConfig`.

    Under `compile`, all models but the unfused one appear a second time, to be measured compiled; under `rotary`, all
    but RoBERTa have rotary positions, and E starts as samples.
    """

    def config(**changes: Any) -> LinformerConfig:
        own: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": n, "norm_first": False}
        if not rotary:
            own |= {"projection_init": "window", "position_embedding_type": "absolute"}
        return LinformerConfig(**{**own, **fields, **changes})

    twin = config(projection="identity")
    roberta = RobertaConfig(max_position_embeddings=n + 2, **{name: getattr(twin, name) for name in SAME_FIELDS})
    roberta._attn_implementation = "sdpa" if ragged else "sdpa_without_mask"
    unfused = config(projection="identity", attn_implementation="plain")
    known = {"unfused": {UNFUSED: unfused}, "roberta": {ROBERTA: roberta}, "twin": {FUSED: twin}, "linformer": {}}
    for k, w in itertools.product([k for k in projected if k < n], (0, *windows)):
        known["linformer"][f"Linformer k={k}" + (f" w={w}" if w else "")] = config(projected_length=k, local_window=w)
    configs = {name: config for model in MODELS if model in models for name, config in known[model].items()}
    endings = ("", COMPILED) if compile else ("",)
    pairs = itertools.product(configs, endings)
    return {name + ending: configs[name] for name, ending in pairs if (name, ending) != (UNFUSED, COMPILED)}


def build(config: PreTrainedConfig, compile: bool = False) -> nn.Module:
    """A model with random weights, in bfloat16 on a GPU and in float32 on a CPU."""
    with torch.device(DEVICE):
        is_roberta = isinstance(config, RobertaConfig)
        model = RobertaModel(config, add_pooling_layer=False) if is_roberta else LinformerModel(config)
    model = model.to(DTYPE)
    return torch.compile(model, dynamic=False) if compile else model  # type: ignore[return-value]


def random_run(model: nn.Module, n: int, task: str, ragged: bool, batch: int) -> Run:
    """A pass over a batch of random tokens; `ragged` rows have from n/4 to n real tokens."""
    mask = None
    if ragged:
        lengths = torch.linspace(n // 4, n, batch + 2, device=DEVICE)[1:-1].round()
        mask = (torch.arange(n, device=DEVICE) < lengths[:, None]).long()
    return measure.make_run(model, torch.randint(5, VOCABULARY, (batch, n), device=DEVICE), task, mask)


def compare(
    lengths: Sequence[int],
    projected: Sequence[int],
    *,
    tokens: int | None,
    console: Console,
    tasks: Sequence[str] = ("inference",),
    batches: bool = False,
    memory: int | None = None,
    ragged: bool = False,
    **which: Any,
) -> Iterator[list[Cell]]:
    """Measure the models `which` (see `model_configs`) at each n and task, timed in turn.

    A pass has `tokens` tokens (`None`: one sequence), of which some are padding if it is `ragged`. `batches` asks for
    the largest batch in `memory` GiB.
    """
    torch._dynamo.config.recompile_limit = 64  # each model is a graph of its own
    # An invalid configuration fails here, before anything is measured.
    all_configs = {n: model_configs(n, projected, ragged=ragged, **which) for n in lengths}
    with steps(console, len(tasks) * sum(len(configs) + 1 for configs in all_configs.values())) as begin:
        for (n, configs), task in itertools.product(all_configs.items(), tasks):
            torch._dynamo.reset()
            measure.release()
            batch = 1 if tokens is None else max(1, tokens // n)
            runs, peaks, largest = dict[str, Run](), dict[str, int](), dict[str, int]()
            for name, config in configs.items():
                begin(f"{name}, n={n}, {task}")
                with suppress(torch.OutOfMemoryError), measure.memory_errors():
                    compiled = name.endswith(COMPILED)
                    make = partial(random_run, build(config, compiled), n, task, ragged)
                    if batches and not compiled:
                        largest[name] = measure.largest_batch(make, batch, memory)
                    run = make(batch)
                    run()  # compilation and autotuning do not count
                    peaks[name], runs[name] = measure.peak_memory(run, DEVICE), run
                measure.release()
            begin(f"timing all models, n={n}, {task}")
            seconds = measure.interleaved(runs)
            ks = {m: config.projected_length if m.startswith("Linformer") else None for m, config in configs.items()}
            yield [Cell(m, n, k, batch, task, seconds.get(m), peaks.get(m), largest.get(m)) for m, k in ks.items()]


def run(
    lengths: Sequence[int],
    projected: Sequence[int],
    *,
    tokens: int | None,
    layers: int,
    hidden: int,
    dropout: float,
    task: Sequence[str],
    out: Path,
    command: str,
    console: Console,
    **options: Any,
) -> None:
    """Measure, show, and write `efficiency.json` and plots to `out`; `options` are those of `compare`."""
    for name, values, choices in (("task", task, TASKS), ("models", options["models"], MODELS)):
        for value in values:
            check_choice(name, value, choices)
    check_choice("projection", options["projection"], (*WINDOWED, "linear"))  # those that k matters to
    if options["ragged"] and "unfused" in options["models"]:
        raise UserError("models='unfused' ignores padding, so it cannot be measured with --ragged")
    if hidden % 64:
        raise UserError(f"hidden={hidden} must be a multiple of 64, the channels of a head")
    if min(projected) >= max(lengths):
        raise UserError(f"projected={min(projected)} leaves nothing to measure: no length exceeds it")
    if options["batches"] and DEVICE != "cuda":
        raise UserError("--batches needs a GPU")
    if options["memory"] is not None and not options["batches"]:
        raise UserError(f"memory={options['memory']} has no effect without --batches")
    make_folder("out", out)
    options |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    options |= {"num_attention_heads": hidden // 64, "tokens": tokens}
    options |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    record = {"command": command, "commit": commit(), **environment(), "dtype": str(DTYPE).split(".")[1]}
    cells: list[Cell] = []
    for measured in compare(lengths, projected, tasks=task, console=console, **options):
        cells += measured
        text = json.dumps({**record, **options, "cells": [asdict(cell) for cell in cells]}, indent=1)
        (out / "efficiency.json").write_text(text + "\n")  # now, so that a crash loses nothing
    axis = f"sequence length n ({'one sequence' if tokens is None else f'{tokens:,} tokens'} per pass)"
    for kind in task:
        measured = [cell for cell in cells if cell.task == kind]
        for table in tables(measured, kind):
            console.print(table)
        if points := curves(measured, "milliseconds"):
            plots.efficiency(points, curves(measured, "mebibytes"), out / f"{kind}.png", axis)
    console.print(f"Results are in {out}", markup=False)


def tables(cells: Sequence[Cell], task: str) -> Iterator[Table]:
    """Time, memory and largest batch over n; in parentheses, a Linformer's relative to those of its rivals."""
    by_model = {(cell.model, cell.n): cell for cell in cells}
    names, lengths = (list(dict.fromkeys(getattr(cell, key) for cell in cells)) for key in ("model", "n"))
    best = (next((name for name in (rival + COMPILED, rival) if name in names), None) for rival in (ROBERTA, FUSED))
    rivals = [name for name in best if name] or [name for name in names if name == UNFUSED]
    relative = f" (times that of {' / '.join(rivals)})" if rivals else ""
    values = {"milliseconds": "Milliseconds", "mebibytes": "MiB without weights", "largest_batch": "Largest batch"}

    def text(cell: Cell | None, value: str) -> str:
        if cell is None or cell.seconds is None:
            return "–" if cell is None else "out of memory"
        cost, others = getattr(cell, value) or 0, [getattr(by_model[r, cell.n], value) for r in rivals if cell.k]
        ratios = " / ".join(f"{cost / other:.2f}" if other else "–" for other in others)
        return (f"{cost:,}" if isinstance(cost, int) else f"{cost:,.1f}") + (f" ({ratios})" if ratios else "")

    for value, title in values.items():
        if any(getattr(cell, value) is not None for cell in cells):
            table = Table("model", *(f"n={n}" for n in lengths), title=f"{title}, {task}{relative}")
            for name in names:
                table.add_row(name, *(text(by_model.get((name, n)), value) for n in lengths))
            yield table
