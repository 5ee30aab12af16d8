"""Table 1: how the time of one layer grows with n, measured next to the theory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from linformers import LinformerAttention, provenance
from linformers.benchmark.measure import DEVICE, DTYPE, interleaved, release

from . import plots
from .experiments import Workspace
from .figure3 import verdict
from .jobs import origin
from .sections import main

TITLE = "Table 1: how time grows with n"
HIDDEN, HEADS, PROJECTED = 512, 8, 128
LENGTHS = {"cuda": (8192, 16384, 32768, 65536, 131072, 262144), "cpu": (2048, 4096, 8192, 16384, 32768)}
TINY_LENGTHS = (128, 256, 512)
# The exponent is fitted to the longest lengths: at short ones, constant costs are a part of the time.
FITTED = 4
# An exponent up to which growth counts as linear.
LINEAR = 1.2


# The paper's rows: time of a layer, its exponent of n, and the longest chain of sequential operations.
THEORY = {
    "recurrent (LSTM)": ("n", 1, "n"),
    "Transformer": ("n²", 2, "1"),
    "Sparse Transformer": ("n√n", 1.5, "1"),
    "Reformer": ("n log n", 1, "log n"),
    "Linformer": ("n", 1, "1"),
}


class Recurrent(nn.Module):
    """An LSTM layer. cuDNN takes fewer than 65,536 tokens at a time, so long inputs are cut into pieces."""

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
        side = 2 ** (n.bit_length() // 2)  # close to √n, and divides n
        q, k, v = self.inward(x).view(b, n // side, side, 3, HEADS, -1).permute(3, 4, 0, 1, 2, 5)  # (h, b, n/s, s, d)
        near = functional.scaled_dot_product_attention(q, k, v)
        far = functional.scaled_dot_product_attention(*(t.transpose(2, 3) for t in (q, k, v))).transpose(2, 3)
        return self.outward((near + far).permute(1, 2, 3, 0, 4).reshape(b, n, -1))


class Hashing(nn.Module):
    """The hashing attention of transformers' Reformer; the number of buckets grows with n."""

    def __init__(self, n: int) -> None:
        from transformers import ReformerConfig
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention

        super().__init__()
        buckets = 2 * n // 64
        side = 2 ** (buckets.bit_length() // 2)
        sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS}
        sizes |= {"attention_head_size": HIDDEN // HEADS, "lsh_attn_chunk_length": 64, "attn_layers": ["lsh"]}
        config = ReformerConfig(**sizes, num_hashes=1, num_buckets=[side, buckets // side], is_decoder=False)
        self.attention = LSHSelfAttention(config, layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).hidden_states


def layers(n: int) -> dict[str, Callable[[], nn.Module]]:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "max_length": n, "dropout": 0.0}
    return {
        "recurrent (LSTM)": Recurrent,
        "Transformer": lambda: LinformerAttention(**sizes, projected_length=n, projection="identity"),
        "Sparse Transformer": Sparse,
        "Reformer": lambda: Hashing(n),
        "Linformer": lambda: LinformerAttention(**sizes, projected_length=min(PROJECTED, n), sharing="key-value"),
    }


def measure(work: Workspace) -> dict[str, Any]:
    """Seconds of a pass of one sequence through each layer at each n; `None` where memory runs out."""
    lengths = list(TINY_LENGTHS if work.small else LENGTHS[DEVICE])
    seconds: dict[str, list[float | None]] = {name: [] for name in THEORY}
    for n in lengths:
        print(f"Table 1: n = {n:,}", flush=True)
        found = _seconds(n)
        for name, values in seconds.items():
            values.append(found.get(name))
    where = {"command": "python -m paper.table1", "commit": provenance.commit(), **provenance.environment()}
    sizes = {"hidden": HIDDEN, "projected": PROJECTED, "dtype": str(DTYPE), "threads": where["threads"]}
    return {"runs": {"table1": origin(where)}, "lengths": lengths, **sizes, "seconds": seconds}


@torch.no_grad()
def _seconds(n: int) -> dict[str, float]:
    x = torch.randn(1, n, HIDDEN, device=DEVICE, dtype=DTYPE)
    runs: dict[str, Callable[[], Any]] = {}
    for name, make in layers(n).items():
        try:
            with torch.device(DEVICE):
                layer = make().to(DTYPE).eval()
                layer(x)
        except torch.OutOfMemoryError:
            continue
        runs[name] = functools.partial(layer, x)
        release()
    return interleaved(runs)


def exponent(lengths: Sequence[int], seconds: Sequence[float | None]) -> float | None:
    """The slope of log time over log n at the longest lengths, by least squares."""
    points = [(n, s) for n, s in zip(lengths, seconds, strict=True) if s is not None][-FITTED:]
    n, s = np.log(points).T if len(points) > 1 else (np.empty(0), np.empty(0))
    return float(np.polyfit(n, s, 1)[0]) if len(n) else None


def collect(work: Workspace) -> dict[str, Any]:
    record = work.read("table1")
    if record is None:
        return {"runs": {}}
    found = {name: exponent(record["lengths"], record["seconds"][name]) for name in THEORY}
    rows = [
        {"name": name, "theory": own, "exponent": found[name], "last": record["seconds"][name][-1]}
        for name, own in THEORY.items()
    ]
    return {**record, "rows": rows, "fitted": FITTED, "claim": claim(record, found)}


def claim(record: Mapping[str, Any], exponents: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Whether a Linformer is linear in n, and how much faster than the Transformer at the shortest and longest n."""
    own, dense = exponents["Linformer"], exponents["Transformer"]
    if own is None or dense is None:
        return None
    pairs = zip(record["lengths"], record["seconds"]["Linformer"], record["seconds"]["Transformer"], strict=True)
    ratios = {n: theirs / ours for n, ours, theirs in pairs if ours is not None and theirs is not None}
    ends = {n: ratio for n, ratio in ratios.items() if n in (record["lengths"][0], record["lengths"][-1])}
    return {"verdict": verdict(own <= LINEAR), "limit": LINEAR, "own": own, "dense": dense, "ratios": ends}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    curves = {
        name: [(n, 1000 * s) for n, s in zip(record["lengths"], values, strict=True) if s is not None]
        for name, values in record["seconds"].items()
    }
    plots.growth({name: points for name, points in curves.items() if points}, folder / "table1.png")


if __name__ == "__main__":
    main(["table1"])
