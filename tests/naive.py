"""Linformer attention written a second time, one row, head and slot after the other, straight from its definition."""

import math

import torch
from torch import Tensor

from linformers.attention import ProjectedAttention
from linformers.projections import LayerProjections


def owners(n: int, k: int) -> list[int]:
    return [math.floor(r * k / n) for r in range(n)]


def naive_attention(
    layer: ProjectedAttention, projections: LayerProjections, x: Tensor, mask: Tensor | None = None
) -> Tensor:
    """What `layer` must make of `x` (b, n, d) at real tokens; nan elsewhere."""
    result = torch.full_like(x, math.nan)
    for row in range(len(x)):
        real = torch.arange(x.shape[1]) if mask is None else mask[row].nonzero().squeeze(1)
        result[row, real] = _one_sequence(layer, projections, x[row, real])
    return result


def _one_sequence(layer: ProjectedAttention, projections: LayerProjections, x: Tensor) -> Tensor:
    """Attention of one sequence (length, d) without padding."""
    h, dh = layer.num_heads, layer.head_dim
    lengths = {head: group.projected_length for group in layer.groups for head in group.heads}
    E_modules, F_modules = projections
    heads = []
    for i in range(h):
        rows = slice(i * dh, (i + 1) * dh)

        def project(linear, modules, i=i, rows=rows):
            module = modules[0] if len(modules) == 1 else modules[i]
            return _project(module, x @ linear.weight[rows].T, lengths[i]) + linear.bias[rows]

        query = x @ layer.query.weight[rows].T + layer.query.bias[rows]
        keys, values = project(layer.key, E_modules), project(layer.value, F_modules)
        scores = query @ keys.T / math.sqrt(dh)
        heads.append(torch.softmax(scores, dim=-1) @ values)
    return torch.cat(heads, dim=1) @ layer.output.weight.T + layer.output.bias


def _project(module, tokens: Tensor, k: int) -> Tensor:
    """The filled projected tokens of `tokens` (length, d_head)."""
    kind, length, n = type(module).__name__, len(tokens), module.max_length
    if kind == "IdentityProjection":
        return tokens
    owner = owners(n, k)
    filled = sorted({owner[r] for r in range(length)})
    if kind == "LinearProjection":
        E = _matrix(module, k)
        if module.init == "gaussian":
            filled = list(range(k))
        return torch.stack([sum(E[r, j] * tokens[r] for r in range(length)) for j in filled])
    members = [[r for r in range(length) if owner[r] == j] for j in filled]
    if kind == "MeanProjection":
        return torch.stack([tokens[m].mean(0) for m in members])
    if kind == "MaxProjection":
        return torch.stack([tokens[m].amax(0) for m in members])
    assert kind == "ConvProjection"
    w = n // k
    return torch.stack([sum(module.kernel[r % w] * tokens[r] for r in m) for m in members])


def _matrix(module, k: int) -> Tensor:
    """E with the columns of a smaller k, (n, k)."""
    n, k_max = module.delta.shape
    E = module.scale * module.delta
    if module.init == "window":
        owner = owners(n, k_max)
        E = E.clone()
        for r in range(n):
            E[r, owner[r]] += 1 / owner.count(owner[r])
    ratio = k_max // k
    columns = [E[:, ratio * j : ratio * (j + 1)].mean(1) for j in range(k)]
    return torch.stack(columns, 1) * (ratio**0.5 if module.init == "gaussian" else 1)
