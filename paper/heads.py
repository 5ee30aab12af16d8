"""Queries, keys and values of attention heads: drawn at random, or taken from a pretrained encoder."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linformers.errors import UserError

# What encoders call the linear maps of queries, keys and values.
NAMES = (("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
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
def recording(model: PreTrainedModel, name: str) -> Iterator[list[list[Tensor]]]:
    """Keep the queries, keys and values (b, h, n, d) of each layer while a model computes."""
    maps, heads = find_maps(model, name), model.config.num_attention_heads
    seen = [[torch.empty(0)] * 3 for _ in maps]

    def keep(layer: int, place: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen[layer][place] = output.detach().unflatten(-1, (heads, -1)).transpose(1, 2).float()

        return hook

    places = [(layer, place, module) for layer, own in enumerate(maps) for place, module in enumerate(own)]
    handles = [module.register_forward_hook(keep(layer, place)) for layer, place, module in places]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def find_maps(model: PreTrainedModel, name: str) -> list[list[nn.Module]]:
    """The maps of queries, keys and values of each layer, found by their names."""
    modules = dict(model.named_modules())
    for names in NAMES:
        parents = [path.removesuffix(names[0]) for path in modules if path.split(".")[-1] == names[0]]
        layers = [[modules[parent + own] for own in names] for parent in parents if parent + names[2] in modules]
        if layers and all(isinstance(module, nn.Linear) for layer in layers for module in layer):
            return layers
    raise UserError(
        f"model={name!r} has no linear maps named {', '.join('/'.join(names) for names in NAMES)}; use an encoder such "
        "as BERT, RoBERTa, DistilBERT or MPNet"
    )


def layer_heads(model: PreTrainedModel, ids: Tensor, layer: int, name: str) -> list[Head]:
    """All heads of a layer, counted from 1, on tokens (n,); a bias on the logits, such as MPNet's, is left out."""
    layers = len(find_maps(model, name))
    if not 1 <= layer <= layers:
        raise UserError(f"layer={layer} must be between 1 and {layers}, the number of layers of model={name!r}")
    with torch.no_grad(), recording(model, name) as seen:
        model(ids[None].to(model.device))
    per_head = [tensor[0].cpu().unbind(0) for tensor in seen[layer - 1]]
    return [Head(f"layer {layer} head {i}", *parts) for i, parts in enumerate(zip(*per_head, strict=True), 1)]


def pick_heads(heads: list[Head]) -> dict[str, int]:
    """The sharpest, the median and the most diffuse head by the entropy of P."""
    order = sorted(range(len(heads)), key=lambda i: heads[i].entropy())
    return {"sharpest": order[0], "median": order[len(order) // 2], "most diffuse": order[-1]}
