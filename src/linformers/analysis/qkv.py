"""The Q W_Q, K W_K and V W_V of one head: drawn at random, or of a layer of a pretrained encoder."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checks import check_size
from ..errors import UserError
from ..training import sources
from .attentions import check_watchable, load_encoder, watching

# What encoders call the maps of queries, keys and values.
NAMES = (("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
RANDOM = "random"
# Entries of P that exist at once.
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
        """The chosen rows of A = Q Kᵀ / √d, (rows, n)."""
        return self.query[rows] @ self.key.T / math.sqrt(self.d)


def random_head(n: int, d: int, rng: np.random.Generator, mean: float = 0.0) -> Head:
    """Independent normal queries, keys and values of unit variance, so that logits have it, too; values have a mean."""
    check_size("n", n)
    check_size("d", d)
    query, key, value = (normals(rng, n, d) for _ in range(3))
    return Head(f"{RANDOM}, values of mean {mean:g}" if mean else RANDOM, query, key, value + mean)


def generator(seed: int, *words: object) -> np.random.Generator:
    """The stream of random numbers that belongs to these words: what is drawn elsewhere does not change it."""
    return np.random.default_rng([seed, zlib.crc32(repr(words).encode())])


def normals(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def blocks(head: Head) -> Iterator[Tensor]:
    """P, a few rows at a time, so that it never exists as a whole."""
    for rows in torch.arange(head.n).split(max(1, BLOCK // head.n)):
        yield head.logits(rows).softmax(-1)


def layer_heads(model: PreTrainedModel, ids: Tensor, layer: int, name: str) -> list[Head]:
    """All heads of a layer, counted from 1, on the tokens `ids` (n,).

    A bias on the logits, such as MPNet's relative positions, belongs to neither Q nor K and is left out.
    """
    maps = maps_of(model, name)
    if not 1 <= layer <= len(maps):
        raise UserError(f"layer={layer} must lie between 1 and {len(maps)}, the layers of model={name!r}")
    with torch.no_grad(), Recorder(model, name) as recorder:
        model(ids[None].to(model.device))
    per_head = [tensor[0].cpu().unbind(0) for tensor in recorder.seen[layer - 1]]
    return [Head(f"layer {layer} head {i}", *parts) for i, parts in enumerate(zip(*per_head, strict=True), 1)]


class Recorder:
    """Keeps the queries, keys and values (b, h, n, d) of each layer while a model computes."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.maps, self.heads = maps_of(model, name), model.config.num_attention_heads
        self.seen: list[list[Tensor]] = [[torch.empty(0)] * len(modules) for modules in self.maps]
        self.handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for layer, modules in enumerate(self.maps):
            for place, module in enumerate(modules):
                self.handles.append(module.register_forward_hook(self._keep(layer, place)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _keep(self, layer: int, place: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[layer][place] = output.detach().unflatten(-1, (self.heads, -1)).transpose(1, 2).float()

        return keep


def maps_of(model: PreTrainedModel, name: str) -> list[list[nn.Module]]:
    """The maps of queries, keys and values of each layer, found by their names."""
    modules = dict(model.named_modules())
    for names in NAMES:
        parents = [path.removesuffix(names[0]) for path in modules if path.split(".")[-1] == names[0]]
        layers = [[modules[parent + own] for own in names] for parent in parents if parent + names[2] in modules]
        if layers and all(isinstance(module, nn.Linear) for layer in layers for module in layer):
            return layers
    raise UserError(
        f"model={name!r} has no linear maps called {', '.join('/'.join(names) for names in NAMES)}, so its queries, "
        "keys and values cannot be taken; take an encoder such as BERT, RoBERTa, DistilBERT or MPNet"
    )


def check_plain(model: PreTrainedModel, ids: Tensor, name: str) -> None:
    r"""Refuse a model whose P is more than $\mathrm{softmax}(Q K^T / \sqrt{d})$ of a layer's own maps, on passages."""
    seen: list[bool] = []
    with torch.no_grad(), Recorder(model, name) as recorder:

        def compare(layer: int, probs: Tensor) -> None:
            query, key, _ = recorder.seen[min(layer, len(recorder.seen) - 1)]
            plain = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
            seen.append(bool((plain - probs).abs().max() < 1e-4))

        with watching(compare, ids.shape[1]):
            model(ids[:1].to(model.device))
    if len(seen) != len(recorder.seen):
        raise UserError(
            f"model={name!r} has {len(seen)} layers but maps of queries, keys and values for {len(recorder.seen)}: "
            "take an encoder whose layers share none, such as BERT or RoBERTa"
        )
    if not all(seen):
        raise UserError(
            f"model={name!r} adds a bias to its logits or turns queries and keys by their positions, which E and F "
            "leave out; take an encoder whose P is softmax(Q K'/√d), such as BERT, RoBERTa or DistilBERT"
        )


def entropy(head: Head) -> float:
    """The mean over rows of the entropy of P, in nats: log n where attention is uniform, 0 where it is sharp."""
    return sum(float(torch.special.entr(rows).sum()) for rows in blocks(head)) / head.n


@dataclass(frozen=True)
class Passages:
    """What real inputs are made of: an encoder and the tokens of two passages that follow each other."""

    name: str
    model: PreTrainedModel
    first: Tensor
    second: Tensor

    @property
    def longest(self) -> int:
        return len(self.first)

    def heads(self, n: int, layer: int, *, other: bool = False) -> list[Head]:
        ids = self.second if other else self.first
        return layer_heads(self.model, ids[:n], layer, self.name)

    @property
    def middle(self) -> int:
        """The layer halfway up."""
        return (len(maps_of(self.model, self.name)) + 1) // 2


def read_passages(folder: Path, text: Path, length: int) -> Passages:
    """Load an encoder and cut two passages of up to `length` tokens from the start of a text, file or folder."""
    start = ""
    for document in chain.from_iterable(map(sources.documents, sources.find_files([text]))):
        start += document if not start else "\n" + document
        if len(start) >= 100 * length:  # files behind are not opened
            break
    model, tokenizer = load_encoder(str(folder))
    ids = torch.tensor(tokenizer(start[: 100 * length], add_special_tokens=False, verbose=False)["input_ids"])
    n = min(length, tokenizer.model_max_length, len(ids) // 2)
    if n < 2:
        raise UserError(f"text={str(text)!r} has {len(ids)} tokens; at least 4 are needed for two passages")
    check_watchable(model, ids[None, :n], str(folder))
    return Passages(folder.name, model, ids[:n], ids[n : 2 * n])


def pick_heads(heads: list[Head]) -> dict[str, int]:
    """The sharpest, the median and the most diffuse head, by the entropy of P."""
    order = sorted(range(len(heads)), key=lambda i: entropy(heads[i]))
    return {"sharpest": order[0], "median": order[len(order) // 2], "most diffuse": order[-1]}
