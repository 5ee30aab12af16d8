"""Linformer attention written a second time, one row, head and slot after the other, straight from its definition."""

import math

import torch
from torch import Tensor

from linformers.attention import ProjectedAttention
from linformers.maps import (
    ConvMap,
    DynamicMap,
    IdentityMap,
    LinearMap,
    MaxMap,
    MeanMap,
    NoMap,
    SequenceMap,
    Weights,
)


def owners(n: int, k: int) -> list[int]:
    return [math.floor(r * k / n) for r in range(n)]


def naive_attention(layer: ProjectedAttention, E: Weights, F: Weights, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """What `layer` must make of `x` (b, n, d) at real tokens; nan elsewhere."""
    result = torch.full_like(x, math.nan)
    for row in range(len(x)):
        real = torch.arange(x.shape[1]) if mask is None else mask[row].nonzero().squeeze(1)
        result[row, real] = _one_sequence(layer, E, F, x[row, real])
    return result


def _one_sequence(layer: ProjectedAttention, E: Weights, F: Weights, x: Tensor) -> Tensor:
    """Attention of one sequence (length, d) without padding."""
    h, dh = layer.num_heads, layer.head_dim
    lengths = {head: group.projected_length for group in layer.groups for head in group.heads}
    heads = []
    for i in range(h):
        rows = slice(i * dh, (i + 1) * dh)

        def project(linear, weights, i=i, rows=rows):
            shared = weights is None or getattr(weights, "ndim", 0) == 2
            own, tokens = weights if shared else weights[i], x @ linear.weight[rows].T
            if isinstance(layer.sequence_map, DynamicMap):
                own = ((x if shared else tokens) @ own).softmax(0)
            return _project(layer.sequence_map, own, tokens, lengths[i]) + linear.bias[rows]

        query = x @ layer.query.weight[rows].T + layer.query.bias[rows]
        keys, values = project(layer.key, E), project(layer.value, F)
        exact_keys, exact_values = (x @ w.weight[rows].T + w.bias[rows] for w in (layer.key, layer.value))
        results = []
        for r in range(len(x)):
            near = [j for j in range(len(x)) if abs(r - j) <= layer.local_window] if layer.local_window else []
            own_keys, own_values = torch.cat([keys, exact_keys[near]]), torch.cat([values, exact_values[near]])
            weights = torch.exp(own_keys @ query[r] / math.sqrt(dh))
            results.append(weights @ own_values / weights.sum())
        heads.append(torch.stack(results))
    return torch.cat(heads, dim=1) @ layer.output.weight.T + layer.output.bias


def _project(kind: SequenceMap, weights: Tensor | None, tokens: Tensor, k: int) -> Tensor:
    """The filled projected tokens of `tokens` (length, d_head)."""
    length, n = len(tokens), kind.max_length
    if isinstance(kind, IdentityMap):
        return tokens
    if isinstance(kind, NoMap):
        return tokens[:0]
    owner = owners(n, k)
    if isinstance(kind, LinearMap):
        filled = sorted({owner[max(r - kind.shift, 0)] for r in range(length)})
        ratio = weights.shape[1] // k
        columns = torch.stack([weights[:, ratio * j : ratio * (j + 1)].mean(1) for j in range(k)], 1)
        if isinstance(kind, DynamicMap):
            filled = list(range(k))
        elif kind.init == "gaussian":
            filled, columns = list(range(k)), columns * ratio**0.5
        return torch.stack([sum(columns[r, j] * tokens[r] for r in range(length)) for j in filled])
    filled = sorted({owner[r] for r in range(length)})
    members = [[r for r in range(length) if owner[r] == j] for j in filled]
    if isinstance(kind, MeanMap):
        return torch.stack([tokens[m].mean(0) for m in members])
    if isinstance(kind, MaxMap):
        return torch.stack([tokens[m].amax(0) for m in members])
    assert isinstance(kind, ConvMap)
    w = n // k
    return torch.stack([sum(weights[r % w] * tokens[r] for r in m) for m in members])
