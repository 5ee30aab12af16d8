"""Section 5.3 of the paper: time and memory over (n, k), the number of tokens held fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..config import LinformerConfig
from ..encoder import LinformerModel
from . import floor
from .measure import (
    OutOfMemoryError,
    Run,
    fitting,
    interleaved,
    joules,
    largest_batch,
    memory_errors,
    pass_of,
    peak_memory,
    release,
)

UNFUSED, FUSED, ROBERTA = "Transformer, unfused", "Transformer, fused", "RoBERTa, SDPA"
MODELS = ("unfused", "roberta", "twin", "linformer")
VOCABULARY = 1000

# transformers' SDPA under a name for which it makes no masks. There is nothing to mask here, and a compiled RoBERTa
# would otherwise be given an n by n mask, with which no fused kernel serves it: not the baseline that it can be.
SDPA_WITHOUT_MASK = "sdpa_without_mask"
ALL_ATTENTION_FUNCTIONS.register(SDPA_WITHOUT_MASK, ALL_ATTENTION_FUNCTIONS["sdpa"])

# Attention as it was written before there were fused kernels, in as few passes over P as torch allows. The eager
# implementation computes in float32, for the sake of precision: it would be no fair baseline.
PLAIN = "plain_softmax"


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """P V with P = softmax(Q Kᵀ · scaling), behind transformers' attention interface."""
    probs = nn.functional.dropout((query * scaling @ key.mT).softmax(-1), dropout)
    return (probs @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(PLAIN, plain_attention)


@dataclass(frozen=True)
class Cell:
    """One model at one length, and what a pass costs; no `seconds` where memory ran out.

    Attributes:
        model: its name.
        n: the sequence length.
        k: the projected length, where it has one.
        batch: sequences in a pass.
        task: `"inference"`, or `"training"`: a forward and a backward pass.
        seconds: the median time of a pass.
        peak_bytes: the most memory that a pass takes beside weights and input.
        floor: the least time that the hardware allows, in seconds, where it was looked for and memory sufficed.
        joules: what a pass takes, where the driver tells.
        largest_batch: the most sequences that fit into memory, where that was asked for.
    """

    model: str
    n: int
    k: int | None
    batch: int
    task: str
    seconds: float | None
    peak_bytes: int | None
    floor: float | None = None
    joules: float | None = None
    largest_batch: int | None = None


@dataclass(frozen=True)
class Contender:
    """A model to measure: how to make it, and whether to compile it."""

    name: str
    k: int | None
    fields: dict[str, Any]
    compiled: bool = False
    is_roberta: bool = False

    def config(self, n: int) -> LinformerConfig:
        return LinformerConfig(vocab_size=VOCABULARY, max_position_embeddings=n, **self.fields)

    def build(self, n: int, device: str, dtype: str) -> nn.Module:
        with torch.device(device):
            model = self._roberta(n) if self.is_roberta else LinformerModel(self.config(n))
        model = model.to(getattr(torch, dtype))
        return torch.compile(model, dynamic=False) if self.compiled else model  # type: ignore[return-value]

    def _roberta(self, n: int) -> nn.Module:
        """The same sizes in transformers' RoBERTa, whose first two positions are for padding."""
        ours = self.config(n)
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        others = ("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob")
        fields = {name: getattr(ours, name) for name in (*sizes, *others)}
        config = RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=n + 2, **fields)
        config._attn_implementation = SDPA_WITHOUT_MASK
        return RobertaModel(config, add_pooling_layer=False)


def contenders(
    n: int,
    projected_lengths: Sequence[int],
    *,
    compiled: bool = False,
    models: Sequence[str] = MODELS,
    windows: Sequence[int] = (),
    **fields: Any,
) -> list[Contender]:
    """What to measure at n: the paper's baseline, those that users have today, and a Linformer for each k < n.

    It is measured without a local window and with each of `windows`.
    """
    twin = {**fields, "projection": "identity"}
    ways = (False, True) if compiled else (False,)

    def name(model: str, compiled: bool) -> str:
        return f"{model}, compiled" if compiled else model

    found = {
        "unfused": [Contender(UNFUSED, None, {**twin, "attn_implementation": PLAIN})],
        "roberta": [Contender(name(ROBERTA, way), None, twin, way, is_roberta=True) for way in ways],
        "twin": [Contender(name(FUSED, way), None, twin, way) for way in ways],
        "linformer": [
            Contender(name(own, way), k, {**fields, "projected_length": k, "local_window": window}, way)
            for k in projected_lengths
            if k < n
            for own, window in {f"Linformer k={k}": 0, **{f"Linformer k={k} w={w}": w for w in windows}}.items()
            for way in ways
        ],
    }
    return [contender for model in MODELS if model in models for contender in found[model]]


def compare(
    lengths: Sequence[int],
    projected_lengths: Sequence[int],
    *,
    tokens: int | None,
    device: str,
    dtype: str = "float32",
    tasks: Sequence[str] = ("inference",),
    compiled: bool = False,
    models: Sequence[str] = MODELS,
    windows: Sequence[int] = (),
    with_floor: bool = False,
    with_batches: bool = False,
    memory: int | None = None,
    on_model: Callable[[str], None] = lambda name: None,
    on_timing: Callable[[str], None] = lambda name: None,
    **fields: Any,
) -> Iterator[list[Cell]]:
    """Measure all contenders at each n and task; those of one n are timed in turn.

    Each pass has `tokens` tokens, or is one sequence where that is `None`; `fields` are fields of `LinformerConfig` for
    all of the models. The largest batches are those that fit into `memory` bytes, or into all of the GPU. `on_model` is
    called with a name whenever a model is about to be made and its memory measured, `on_timing` when all are timed.
    """
    torch._dynamo.config.recompile_limit = 64  # each model is a graph of its own
    for n in lengths:
        for task in tasks:
            torch._dynamo.reset()
            release()
            measured = contenders(n, projected_lengths, compiled=compiled, models=models, windows=windows, **fields)
            batch = 1 if tokens is None else max(1, tokens // n)
            found = _measure(
                measured, n, batch, task, device, dtype, with_floor, with_batches, memory, on_model, on_timing
            )
            yield list(found)


def _measure(
    models: Sequence[Contender],
    n: int,
    batch: int,
    task: str,
    device: str,
    dtype: str,
    with_floor: bool,
    with_batches: bool,
    memory: int | None,
    on_model: Callable[[str], None],
    on_timing: Callable[[str], None],
) -> Iterator[Cell]:
    runs: dict[str, Run] = {}
    peaks: dict[str, int] = {}
    for contender in models:
        on_model(f"{contender.name}, n={n}, {task}")
        try:
            with memory_errors():
                ids = torch.randint(5, VOCABULARY, (batch, n), device=device)
                run = make_run(contender.build(n, device, dtype), ids, task)
                run()  # what is compiled or chosen at the first run has no part in its memory
                peaks[contender.name] = peak_memory(run, device)
                runs[contender.name] = run
        except OutOfMemoryError:
            pass
        # Nothing refers to an error's tensors any more; and memory that was free is not to be cut up by later models.
        release()
    on_timing(f"timing all, n={n}, {task}")
    seconds = interleaved(runs, may_run_out=True)
    for contender in models:
        name = contender.name
        floors = energy = most = None
        if with_floor and name in seconds:
            options: dict[str, Any] = {"training": task == "training", "device": device, "dtype": dtype}
            floors = fitting(floor.floor_seconds, contender.config(n), batch, n, **options)
        if name in seconds and device == "cuda":
            energy = joules(runs[name], seconds[name])
        if with_batches and not contender.compiled:
            most = _most(contender, n, batch, task, device, dtype, peaks.get(name), memory)
        yield Cell(name, n, contender.k, batch, task, seconds.get(name), peaks.get(name), floors, energy, most)


def _most(
    contender: Contender, n: int, batch: int, task: str, device: str, dtype: str, peak: int | None, memory: int | None
) -> int:
    model = fitting(contender.build, n, device, dtype)
    if model is None:
        return 0

    def run(sequences: int) -> None:
        make_run(model, torch.randint(5, VOCABULARY, (sequences, n), device=device), task)()

    return largest_batch(run, batch, peak, memory)


def compare_projected_lengths(
    k: int, smaller: int, n: int, *, tokens: int, device: str = "cpu", dtype: str = "float32", **fields: Any
) -> Iterator[Cell]:
    """Measure what a smaller k saves in some of the heads, in some of the layers, and in all of them."""
    base = LinformerConfig(**fields)
    layers, heads = base.num_hidden_layers, base.num_attention_heads
    half_the_heads = [k] * (heads // 2) + [smaller] * (heads - heads // 2)
    choices: dict[str, Any] = {
        f"k={k}": k,
        f"k={smaller} in half the heads": [half_the_heads] * layers,
        f"k={smaller} in half the layers": [k] * (layers // 2) + [smaller] * (layers - layers // 2),
        f"k={smaller}": smaller,
    }
    batch = max(1, tokens // n)
    ids = torch.randint(5, VOCABULARY, (batch, n), device=device)
    runs = {
        name: make_run(
            Contender(name, None, {**fields, "projected_length": choice}).build(n, device, dtype), ids, "inference"
        )
        for name, choice in choices.items()
    }
    for run in runs.values():
        run()
    for name, seconds in interleaved(runs).items():
        yield Cell(name, n, None, batch, "inference", seconds, peak_memory(runs[name], device))


def make_run(model: nn.Module, ids: Tensor, task: str) -> Run:
    return pass_of(model, lambda: model(ids).last_hidden_state, task)


def curves(cells: Sequence[Cell], value: Callable[[Cell], float]) -> dict[str, list[tuple[float, float]]]:
    """The value of each cell against its n, by model; where memory ran out there is none."""
    measured = [cell for cell in cells if cell.seconds is not None]
    models = dict.fromkeys(cell.model for cell in measured)
    return {model: [(cell.n, value(cell)) for cell in measured if cell.model == model] for model in models}


def milliseconds(cell: Cell) -> float:
    return 1000 * (cell.seconds or 0)


def mebibytes(cell: Cell) -> float:
    return (cell.peak_bytes or 0) / 2**20


def as_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]
