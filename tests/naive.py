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
    Projection,
    ReadyProjection,
)
from linformers.reference import attend, attend_locally, linformer_attention, rotate, rotate_value


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
    rotary: bool = False,
) -> Tensor:
    """What `layer` must return for `x` (b, n, d) at real tokens; NaN elsewhere. E and F are for rows of full length."""
    result = torch.full_like(x, math.nan)
    for row in range(len(x)):
        real = torch.arange(x.shape[1]) if mask is None else mask[row].nonzero().squeeze(1)
        heads = torch.cat(
            [one_head(layer, E, F, x[row, real], head, shift, rotary) for head in range(layer.num_heads)], 1
        )
        result[row, real] = heads @ layer.output.weight.T + layer.output.bias
    return result


def one_head(
    layer: ProjectedAttention, E: LayerProjection, F: LayerProjection, x: Tensor, head: int, shift: int, rotary: bool
) -> Tensor:
    """The output (n, d_head) of one head for one sequence without padding."""
    rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    query, key, value = ((w.weight[rows].T, w.bias[rows]) for w in (layer.query, layer.key, layer.value))
    (own_E, i), (own_F, _) = part_of(E, head), part_of(F, head)
    far_bias = None if layer.scaled_far_bias is None else 10 * layer.scaled_far_bias[head : head + 1]
    positions = None if own_E.rotation is None else slot_positions(own_E, len(x), shift)
    if own_E.is_identity and rotary:
        positions = torch.arange(len(x))
    rotate_first = rotary and layer.rotates_first and not own_E.is_identity
    if rotate_first:
        positions = None
    if isinstance(own_E.shorten.__self__, ConvProjection | MaxProjection):  # which are not matrices
        exact = [x @ W + b for W, b in (query, key, value)]
        ranks = torch.arange(len(x))
        if rotate_first:
            query, *rotated = rotate(exact[0], ranks), rotate(exact[1], ranks), rotate_value(exact[2], ranks)
            projected = [nonlinear(own, i, tokens) for own, tokens in zip((own_E, own_F), rotated, strict=True)]
            own = [own[None, None] for own in (query, *projected)]
            return rotate_value(attend(*own, scaling=layer.head_dim**-0.5)[0][0, 0], -ranks)
        projected = [nonlinear(own, i, x @ W) + b for own, (W, b) in ((own_E, key), (own_F, value))]
        if positions is not None:
            exact[:2] = (rotate(own, ranks) for own in exact[:2])
            projected[0] = rotate(projected[0], positions)
        heads = [own[None, None] for own in (exact[0], *projected, *exact[1:])]
        if layer.local_window:
            options = {"window": layer.local_window, "far_bias": far_bias, "scaling": layer.head_dim**-0.5}
            return attend_locally(*heads, **options)[0, 0]
        return attend(*heads[:3], scaling=layer.head_dim**-0.5)[0][0, 0]
    matrices = (matrix(own, i, len(x), shift) for own in (own_E, own_F))
    options = {"window": layer.local_window, "far_bias": far_bias, "positions": positions}
    options["rotate_first"] = rotate_first
    return linformer_attention(x, query, key, value, *matrices, num_heads=1, **options)


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
        live = range(k) if module.init == "gaussian" else live_columns(module, k, length, shift)
        return weights[:length][:, list(live)]
    assert isinstance(module, MeanProjection)
    columns = [torch.tensor([owner[r] == j for r in range(length)], dtype=dtype) for j in sorted({*owner[:length]})]
    return torch.stack([column / column.sum() for column in columns], 1)


def live_columns(module: LinearProjection, k: int, length: int, shift: int) -> list[int]:
    """The columns of windows or samples that a sequence has."""
    if samples(module, k):
        return [j for j, rank in enumerate(sampled(module.max_length, k, shift)) if rank < length]
    owner = owners(module.max_length, k)
    return sorted({owner[max(r - shift, 0)] for r in range(length)})


def samples(module: Projection, k: int) -> bool:
    """Whether each column starts as the choice of one token."""
    return isinstance(module, LinearProjection) and module.init == "sample" and module.delta.shape[-1] == k


def sampled(n: int, k: int, shift: int) -> list[int]:
    """The rank of the token that each column starts with."""
    return [0] + [math.ceil(j * n / k) + shift for j in range(1, k)]


def slot_positions(E: ReadyProjection, length: int, shift: int) -> Tensor:
    """The positions of the live slots."""
    module, k = E.shorten.__self__, E.k
    if isinstance(module, NoProjection):
        return torch.empty(0)
    n = module.max_length
    if isinstance(module, LinearProjection):
        live, start = live_columns(module, k, length, shift), shift
    else:
        live, start = sorted({*owners(n, k)[:length]}), 0
    if samples(module, k):
        return torch.tensor(sampled(n, k, shift))[live]
    return torch.tensor([(j + 0.5) * n / k - 0.5 + start for j in live], dtype=torch.float64)


def nonlinear(E: ReadyProjection, i: int, tokens: Tensor) -> Tensor:
    """The live slots of max pooling and of convolution."""
    module = E.shorten.__self__
    owner = owners(module.max_length, E.k)[: len(tokens)]
    members = [[r for r in range(len(tokens)) if owner[r] == j] for j in sorted({*owner})]
    if isinstance(module, MaxProjection):
        return torch.stack([tokens[m].amax(0) for m in members])
    kernel, size = E.weights if E.weights.dim() == 2 else E.weights[i], module.max_length // E.k
    return torch.stack([sum(kernel[r % size] * tokens[r] for r in m) for m in members])
