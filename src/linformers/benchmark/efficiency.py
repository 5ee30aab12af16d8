"""Section 5.3 of the paper: time and memory of an inference pass over (n, k), the number of tokens held fixed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import LinformerConfig
from ..encoder import LinformerModel

UNFUSED, FUSED = "Transformer, unfused", "Transformer, fused"


@dataclass(frozen=True)
class Cell:
    """One model at one length, and what a pass costs."""

    model: str
    n: int
    k: int | None
    batch: int
    seconds: float
    peak_bytes: int


def compare_lengths(
    lengths: Sequence[int],
    projected_lengths: Sequence[int],
    *,
    tokens: int,
    device: str = "cpu",
    **fields: Any,
) -> Iterator[Cell]:
    """Measure at each n the Transformer, unfused and fused, and a Linformer for each k < n.

    Each pass has `tokens` tokens; `fields` are fields of `LinformerConfig` for all of the models.
    """
    for n in lengths:
        batch = max(1, tokens // n)
        ids = torch.randint(5, 1000, (batch, n), device=device)
        for name, k, choice in variants(n, projected_lengths):
            model = _model(device, vocab_size=1000, max_position_embeddings=n, **choice, **fields)
            seconds, peak = measure(model, ids)
            yield Cell(name, n, k, batch, seconds, peak)


def variants(n: int, projected_lengths: Sequence[int]) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Name, k and config of each model to measure at n; unfused attention is the paper's baseline."""
    twin = {"projection": "identity"}
    return [
        (UNFUSED, None, {**twin, "attn_implementation": "eager"}),
        (FUSED, None, {**twin, "attn_implementation": "sdpa"}),
        *((f"Linformer k={k}", k, {"projected_length": k}) for k in projected_lengths if k < n),
    ]


def compare_projected_lengths(
    k: int, smaller: int, n: int, *, tokens: int, device: str = "cpu", **fields: Any
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
    ids = torch.randint(5, 1000, (batch, n), device=device)
    models = {
        name: _model(device, vocab_size=1000, max_position_embeddings=n, projected_length=choice, **fields)
        for name, choice in choices.items()
    }
    for name, seconds in interleaved({name: _pass(model, ids) for name, model in models.items()}).items():
        yield Cell(name, n, None, batch, seconds, peak_memory(_pass(models[name], ids), device))


def measure(model: LinformerModel, ids: Tensor) -> tuple[float, int]:
    """Median seconds of a pass, and the most memory it takes beside weights and input."""
    run = _pass(model, ids)
    return interleaved({"": run})[""], peak_memory(run, ids.device)


def interleaved(runs: dict[str, Callable[[], Any]], min_seconds: float = 0.3, rounds: int = 5) -> dict[str, float]:
    """Median seconds of each of several functions, timed in turn so that a slow moment hits all of them alike."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while time.perf_counter() - start < min_seconds * len(runs) or len(next(iter(times.values()))) < rounds:
        for name, run in runs.items():
            began = _now()
            run()
            times[name].append(_now() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(run: Callable[[], Any], device: str | torch.device) -> int:
    """The most bytes of tensors that live at once on `device` during `run`, beside those that lived before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its own start and end otherwise
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def curves(cells: Sequence[Cell], value: Callable[[Cell], float]) -> dict[str, list[tuple[float, float]]]:
    """The value of each cell against its n, by model."""
    models = dict.fromkeys(cell.model for cell in cells)
    return {model: [(cell.n, value(cell)) for cell in cells if cell.model == model] for model in models}


def milliseconds(cell: Cell) -> float:
    return 1000 * cell.seconds


def mebibytes(cell: Cell) -> float:
    return cell.peak_bytes / 2**20


def as_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]


def _model(device: str, **fields: Any) -> LinformerModel:
    return LinformerModel(LinformerConfig(**fields)).to(device).eval()


def _pass(model: LinformerModel, ids: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> Any:
        return model(ids).last_hidden_state

    return run


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
