"""Table 1: how the time of one layer grows with n, measured, beside the theory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from .. import plots
from ..benchmark.measure import OutOfMemoryError, Run, best_device, captured, interleaved, memory_errors, release
from ..layer import LinformerAttention
from ..markdown import table
from ..provenance import commit, environment
from .figure3 import verdict
from .jobs import origin
from .matrix import Place

HIDDEN, HEADS, PROJECTED = 512, 8, 128
LENGTHS = {"cuda": (8192, 16384, 32768, 65536, 131072, 262144), "cpu": (2048, 4096, 8192, 16384, 32768)}
TINY_LENGTHS = (128, 256, 512)
# Below, what does not grow with n is a part of the time.
FITTED = 4
# An exponent up to which growth passes for linear.
LINEAR = 1.2
# Launching their kernels takes longer than these take on a GPU, which replays them from a graph instead.
LAUNCH_BOUND = ("Transformer", "Sparse Transformer", "Linformer")


class Theory(NamedTuple):
    """What the paper says of an architecture: time of a layer, and its longest chain of sequential operations."""

    time: str
    exponent: float
    chain: str


THEORY = {
    "recurrent (LSTM)": Theory("n", 1, "n"),
    "Transformer": Theory("n²", 2, "1"),
    "Sparse Transformer": Theory("n√n", 1.5, "1"),
    "Reformer": Theory("n log n", 1, "log n"),
    "Linformer": Theory("n", 1, "1"),
}


class Recurrent(nn.Module):
    """A layer of long short-term memory; cuDNN takes fewer than 65,536 tokens at a time."""

    PIECE = 2**15

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        state, outputs = None, []
        for piece in x.split(self.PIECE, dim=1):
            output, state = self.lstm(piece, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


class Sparse(nn.Module):
    """Strided sparse attention (Child et al., 2019): each token sees its block of √n and every √n-th token."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        side = 2 ** (n.bit_length() // 2)  # near √n, and divides n
        q, k, v = self.inward(x).view(b, n // side, side, 3, HEADS, -1).permute(3, 4, 0, 1, 2, 5)  # (h, b, n/s, s, d)
        near = functional.scaled_dot_product_attention(q, k, v)
        far = functional.scaled_dot_product_attention(*(t.transpose(2, 3) for t in (q, k, v))).transpose(2, 3)
        return self.outward((near + far).permute(1, 2, 3, 0, 4).reshape(b, n, -1))


def reformer(n: int) -> nn.Module:
    """The hashing attention of transformers' Reformer; its number of buckets grows with n."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    class Hashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            buckets = 2 * n // 64
            config = ReformerConfig(
                hidden_size=HIDDEN,
                num_attention_heads=HEADS,
                attention_head_size=HIDDEN // HEADS,
                num_hashes=1,
                num_buckets=[2 ** (buckets.bit_length() // 2), buckets // 2 ** (buckets.bit_length() // 2)],
                lsh_attn_chunk_length=64,
                is_decoder=False,
                attn_layers=["lsh"],
            )
            self.attention = LSHSelfAttention(config, layer_idx=0)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x).hidden_states

    return Hashing()


def layers(n: int) -> dict[str, Callable[[], nn.Module]]:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "max_length": n, "dropout": 0.0}
    return {
        "recurrent (LSTM)": Recurrent,
        "Transformer": lambda: LinformerAttention(**sizes, projected_length=n, projection="identity"),
        "Sparse Transformer": Sparse,
        "Reformer": lambda: reformer(n),
        "Linformer": lambda: LinformerAttention(**sizes, projected_length=min(PROJECTED, n), sharing="key-value"),
    }


@torch.no_grad()
def measure(place: Place, console: Console) -> dict[str, Any]:
    """Seconds of a pass of one sequence through each layer at each n; `None` where memory runs out."""
    device = best_device()
    lengths = list(TINY_LENGTHS if place.small else LENGTHS[device])
    if (before := collect(place)).get("lengths") == lengths:
        path = place.record("table1")
        console.print(f"{path} is there already; delete it to measure again", highlight=False, markup=False)
        return before
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    seconds: dict[str, list[float | None]] = {name: [] for name in THEORY}
    for n in lengths:
        with console.status(f"n={n}"):
            found = _seconds(n, device, dtype)
        for name, values in seconds.items():
            values.append(found.get(name))
    where = {"command": "linformers reproduce table1", "commit": commit(), **environment()}
    sizes = {"hidden": HIDDEN, "projected": PROJECTED, "dtype": str(dtype), "threads": where["threads"]}
    return {"runs": {"table1": origin(where)}, "lengths": lengths, **sizes, "seconds": seconds}


def collect(place: Place) -> dict[str, Any]:
    """What was measured before, if anything."""
    return place.read("table1") or {"runs": {}}


def _seconds(n: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(1, n, HIDDEN, device=device, dtype=dtype)
    runs: dict[str, Run] = {}
    counts: dict[str, int] = {}
    for name, make in layers(n).items():
        try:
            with memory_errors(), torch.device(device):
                layer = make().to(dtype).eval()
                layer(x)
                run: Run = functools.partial(layer, x)
                runs[name], counts[name] = captured(run) if name in LAUNCH_BOUND else (run, 1)
        except OutOfMemoryError:
            pass
        release()
    return {name: seconds / counts[name] for name, seconds in interleaved(runs, may_run_out=True).items()}


def exponent(lengths: Sequence[int], seconds: Sequence[float | None]) -> float | None:
    """The slope of log time over log n at the longest lengths, by least squares."""
    points = [(math.log(n), math.log(s)) for n, s in zip(lengths, seconds, strict=True) if s is not None][-FITTED:]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def draw(record: Mapping[str, Any], path: Path) -> None:
    curves = {
        name: [(n, 1000 * s) for n, s in zip(record["lengths"], values, strict=True) if s is not None]
        for name, values in record["seconds"].items()
    }
    plots.growth({name: points for name, points in curves.items() if points}, path)


def page(record: Mapping[str, Any]) -> list[str]:
    """The table, with the exponent of n that was measured."""
    lengths = record["lengths"]
    header = (
        "architecture",
        "time, in theory",
        "exponent, in theory",
        "exponent, measured",
        "longest chain",
        "last ms",
    )
    on_gpu = record["dtype"] == "torch.bfloat16"
    graphs = "on a GPU, which replays kernels that take less time than their launch from a graph"
    where = graphs if on_gpu else f"on {record['threads']} CPU cores"
    rows = []
    for name, (time, theory, chain) in THEORY.items():
        values = record["seconds"][name]
        own = exponent(lengths, values)
        measured = "–" if own is None else f"{own:.1f}"
        last = "out of memory" if values[-1] is None else f"{1000 * values[-1]:.2f}"
        rows.append((name, f"O({time})", f"{theory:g}", measured, f"O({chain})", last))
    return [
        f"A forward pass of one sequence through one layer of {record['hidden']} channels (a Linformer's has "
        f"k = {record['projected']}, E = F) in {record['dtype'].removeprefix('torch.')}, {where}. The exponent of n is "
        f"fitted to the {FITTED} longest of n = {', '.join(f'{n:,}' for n in lengths)}, and the last column is of the "
        "longest; the chains are the theory's.",
        "",
        *table(header, rows),
        *(f"- {line}" for line in claims(record)),
        "",
    ]


def claims(record: Mapping[str, Any]) -> list[str]:
    """Whether a Linformer is linear in n where the Transformer is not."""
    found = {name: exponent(record["lengths"], record["seconds"][name]) for name in THEORY}
    own, dense = found["Linformer"], found["Transformer"]
    if own is None or dense is None:
        return []
    ratios = (
        f"{theirs / ours:.1f} times at n = {n:,}"
        for n, ours, theirs in zip(
            record["lengths"], record["seconds"]["Linformer"], record["seconds"]["Transformer"], strict=True
        )
        if ours is not None and theirs is not None and n in (record["lengths"][0], record["lengths"][-1])
    )
    return [
        f"“Linear time” (an exponent of at most {LINEAR}): {verdict(own <= LINEAR)}, {own:.1f} where the Transformer "
        f"has {dense:.1f}; the Transformer, with fused attention, takes {' and '.join(ratios)} as long."
    ]
