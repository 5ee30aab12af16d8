"""Linformer attention a second time: one row and one head after the other, through `reference`."""

import math

import torch
from torch import Tensor

from linformers.attention import LayerProjection, ProjectedAttention
from linformers.projections import (
    ConvProjection,
    IdentityProjection,
    LinearProjection,
    MaxProjection,
    MeanProjection,
    MixedProjection,
    NoProjection,
    ReadyProjection,
)
from linformers.reference import attend, attend_locally, linformer_attention


def owners(n: int, k: int) -> list[int]:
    """The slot of each token."""
    return [math.floor(r * k / n) for r in range(n)]


def naive_attention(
    layer: ProjectedAttention,
    E: LayerProjection,
    F: LayerProjection,
    x: Tensor,
    mask: Tensor | None = None,
    shift: int = 0,
) -> Tensor:
    """What `layer` must return for `x` (b, n, d) at real tokens; NaN elsewhere. E and F are for rows of full length."""
    result = torch.full_like(x, math.nan)
    for row in range(len(x)):
        real = torch.arange(x.shape[1]) if mask is None else mask[row].nonzero().squeeze(1)
        heads = torch.cat([one_head(layer, E, F, x[row, real], head, shift) for head in range(layer.num_heads)], 1)
        result[row, real] = heads @ layer.output.weight.T + layer.output.bias
    return result


def one_head(
    layer: ProjectedAttention, E: LayerProjection, F: LayerProjection, x: Tensor, head: int, shift: int
) -> Tensor:
    """The output (n, d_head) of one head for one sequence without padding."""
    rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    query, key, value = ((w.weight[rows].T, w.bias[rows]) for w in (layer.query, layer.key, layer.value))
    (own_E, i), (own_F, _) = part_of(E, head), part_of(F, head)
    if isinstance(own_E.shorten.__self__, ConvProjection | MaxProjection):  # which are not matrices
        exact = [x @ W + b for W, b in (query, key, value)]
        projected = [nonlinear(own, i, x @ W) + b for own, (W, b) in ((own_E, key), (own_F, value))]
        heads = [own[None, None] for own in (exact[0], *projected, *exact[1:])]
        if layer.local_window:
            return attend_locally(*heads, window=layer.local_window, scaling=layer.head_dim**-0.5)[0, 0]
        return attend(*heads[:3], scaling=layer.head_dim**-0.5)[0][0, 0]
    matrices = (matrix(own, i, len(x), shift) for own in (own_E, own_F))
    return linformer_attention(x, query, key, value, *matrices, num_heads=1, window=layer.local_window)


def part_of(E: LayerProjection, head: int) -> tuple[ReadyProjection, int]:
    """The projection of a head, and the head's number among those that it serves."""
    if not isinstance(E, MixedProjection):
        return E, head
    return next((part, own.index(head)) for part, own in zip(E.parts, E.heads, strict=True) if head in own)


def matrix(E: ReadyProjection, i: int, length: int, shift: int) -> Tensor:
    """E as a matrix: rows for the tokens, columns for the live slots."""
    module, k, dtype = E.shorten.__self__, E.k, torch.float64
    if isinstance(module, IdentityProjection):
        return torch.eye(length, dtype=dtype)
    if isinstance(module, NoProjection):
        return torch.zeros(length, 0, dtype=dtype)
    owner = owners(module.max_length, k)
    if isinstance(module, LinearProjection):
        weights = E.weights if E.weights.dim() == 2 else E.weights[:, i]
        live = sorted({owner[max(r - shift, 0)] for r in range(length)}) if module.init == "window" else range(k)
        return weights[:length][:, list(live)]
    assert isinstance(module, MeanProjection)
    columns = [torch.tensor([owner[r] == j for r in range(length)], dtype=dtype) for j in sorted({*owner[:length]})]
    return torch.stack([column / column.sum() for column in columns], 1)


def nonlinear(E: ReadyProjection, i: int, tokens: Tensor) -> Tensor:
    """The live slots of max pooling and of convolution."""
    module = E.shorten.__self__
    owner = owners(module.max_length, E.k)[: len(tokens)]
    members = [[r for r in range(len(tokens)) if owner[r] == j] for j in sorted({*owner})]
    if isinstance(module, MaxProjection):
        return torch.stack([tokens[m].amax(0) for m in members])
    kernel, size = E.weights if E.weights.dim() == 2 else E.weights[i], module.max_length // E.k
    return torch.stack([sum(kernel[r % size] * tokens[r] for r in m) for m in members])
