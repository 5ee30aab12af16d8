"""Queries, keys and values of attention heads: drawn at random, or taken from a pretrained encoder."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from linformers.errors import UserError

RANDOM = "random"
# The number of entries of P that exist at once.
BLOCK = 2**24


@dataclass(frozen=True)
class Head:
    """One head on one input; `query`, `key` and `value` are (n, d)."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def n(self) -> int:
        return self.value.shape[0]

    @property
    def d(self) -> int:
        return self.value.shape[1]

    def logits(self, rows: Tensor) -> Tensor:
        """Rows of A = Q Kᵀ / √d, (rows, n)."""
        return self.query[rows] @ self.key.T / math.sqrt(self.d)

    def blocks(self) -> Iterator[Tensor]:
        """P, a few rows at a time."""
        for rows in torch.arange(self.n).split(max(1, BLOCK // self.n)):
            yield self.logits(rows).softmax(-1)

    def entropy(self) -> float:
        """Mean entropy of the rows of P in nats: log n if attention is uniform, 0 if it is sharp."""
        return sum(float(torch.special.entr(rows).sum()) for rows in self.blocks()) / self.n


def generator(seed: int, *words: object) -> np.random.Generator:
    """A random stream that depends on these words alone, not on what else is drawn."""
    return np.random.default_rng([seed, zlib.crc32(repr(words).encode())])


def normals(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def random_head(n: int, d: int, rng: np.random.Generator, mean: float = 0.0) -> Head:
    """Normal queries, keys and values of unit variance, so that logits have unit variance, too."""
    query, key, value = (normals(rng, n, d) for _ in range(3))
    return Head(f"{RANDOM}, values of mean {mean:g}" if mean else RANDOM, query, key, value + mean)


@contextmanager
def attention_as(model: PreTrainedModel, name: str, attend: Callable[..., Tensor]) -> Iterator[None]:
    """Let `attend(layer, query, key, value)` compute the attention of each layer in one pass; all are (b, h, n, d)."""
    layers = itertools.count()

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, scaling: float = 1, **_: Any
    ) -> Any:
        if mask is not None:
            raise UserError(f"model={name!r} adds a bias to its logits; use an encoder such as BERT or RoBERTa")
        query = query * (scaling * math.sqrt(query.shape[-1]))  # so that logits are always Q Kᵀ / √d
        return attend(next(layers), query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("paper", attention)
    model.set_attn_implementation("paper")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")
    if next(layers) == 0:
        raise UserError(f"model={name!r} does not use transformers' attention interface; use BERT or RoBERTa")


def observe(model: PreTrainedModel, ids: Tensor, name: str) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The last hidden states, and the queries, keys and values of each layer, (1, h, n, d), on tokens (n,)."""
    seen = []

    def attend(layer: int, *inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return scaled_dot_product_attention(*inputs)

    with torch.no_grad(), attention_as(model, name, attend):
        output = model(ids[None].to(model.device)).last_hidden_state
    return output, seen  # type: ignore[return-value]


def layer_heads(model: PreTrainedModel, ids: Tensor, layer: int | None, name: str) -> list[Head]:
    """All heads of a layer, counted from 1, on tokens (n,); without a layer, those of the middle one."""
    seen = observe(model, ids, name)[1]
    layer = (len(seen) + 1) // 2 if layer is None else layer
    if not 1 <= layer <= len(seen):
        raise UserError(f"layer={layer} must be between 1 and {len(seen)}, the number of layers of model={name!r}")
    per_head = zip(*(tensor[0].cpu().unbind(0) for tensor in seen[layer - 1]), strict=True)
    return [Head(f"{name} layer {layer} head {i}", *parts) for i, parts in enumerate(per_head, 1)]


def pick_heads(heads: list[Head]) -> dict[str, int]:
    """The sharpest, the median and the most diffuse head by the entropy of P."""
    order = sorted(range(len(heads)), key=lambda i: heads[i].entropy())
    return {"sharpest": order[0], "median": order[len(order) // 2], "most diffuse": order[-1]}
