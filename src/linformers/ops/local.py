"""Attention onto projected keys plus a sliding window of exact keys, computed in blocks at linear cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .compiling import is_exporting

# A block has at least w queries. Larger blocks compute more masked scores, smaller blocks copy more keys.
SMALLEST_BLOCK = 64

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend_locally(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor,
    near_value: Tensor,
    *,
    window: int,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Equals `reference.attend_locally`: each block of queries attends to all keys that one of them may see.

    Args:
        attend: maps queries, keys, values and a mask (b, 1, s, K) to the output (b, s, h, d_head) and $\bar P$ or None.
        query, key, value, near_key, near_value, window, mask, lengths: as in `reference.attend_locally`.

    Returns:
        The output (b, n, h, d_head) and, if `attend` returns it, $\bar P$ (b, h, n, k + 2w + 1): the projected keys,
        then the exact keys from w positions before the query to w after it.
    """
    (b, h, n, _), k, device = query.shape, key.shape[2], query.device
    size = max(window, SMALLEST_BLOCK)
    # An exported graph serves every length, so it must not depend on whether n fills its blocks or has only one: there
    # are always spare blocks, and indexing replaces views.
    exporting = is_exporting()
    count = n // size + 2 if exporting else (n + size - 1) // size

    def split(x: Tensor, margin: int = 0) -> Tensor:
        """(b, h, n, d) to blocks (b, count + 2 · margin, size, h, d), with `margin` empty blocks on each side."""
        padded = functional.pad(x.transpose(1, 2), (0, 0, 0, 0, margin * size, (count + margin) * size - n))
        if exporting:
            starts = size * torch.arange(count + 2 * margin, device=device)
            return padded[:, starts[:, None] + torch.arange(size, device=device)]
        return padded.unflatten(1, (count + 2 * margin, size))

    def join(projected: Tensor, near: Tensor) -> Tensor:
        """The keys of each block, (b · count, h, k + 3 · size, d): projected, previous, own and next block."""
        blocks = split(near, margin=1)
        everywhere = projected.transpose(1, 2)[:, None].expand(-1, count, -1, -1, -1)
        keys = torch.cat([everywhere, blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], 2)
        return keys.flatten(0, 1).transpose(1, 2)

    visible = _visible(query, key, window, size, count, mask, lengths)  # (b · count, h or 1, size, k + 3 · size)
    sees_any = visible.any(-1, keepdim=True)
    queries = split(query).flatten(0, 1).transpose(1, 2)
    # A query without visible keys attends to all of them, since some kernels return NaN otherwise; then it gets zeros.
    output, probs = attend(queries, join(key, near_key), join(value, near_value), visible | ~sees_any)
    output = torch.where(sees_any.transpose(1, 2), output, 0).unflatten(0, (b, count)).flatten(1, 2)
    output = output.index_select(1, torch.arange(n, device=device)) if exporting else output[:, :n]
    if probs is None:
        return output, None
    probs = torch.where(sees_any, probs, 0).unflatten(0, (b, count)).transpose(1, 2)  # (b, h, count, size, ...)
    # The key at offset o from query i of a block is in column size + i + o, because the previous block comes first.
    columns = torch.arange(size, device=device)[:, None] + torch.arange(size - window, size + window + 1, device=device)
    near = probs[..., k:].gather(-1, columns.expand(b, h, count, -1, -1))
    return output, torch.cat([probs[..., :k], near], -1).flatten(2, 3)[:, :, :n]


def _visible(
    query: Tensor, key: Tensor, window: int, size: int, count: int, mask: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """The mask of each block: projected keys, then exact keys of the previous, own and next block."""
    (b, _, n, _), k, device = query.shape, key.shape[2], query.device
    columns = torch.arange(-size, 2 * size, device=device)
    in_window = (torch.arange(size, device=device)[:, None] - columns).abs() <= window
    positions = size * torch.arange(count, device=device)[:, None] + columns
    end = n if lengths is None else lengths[:, None, None]
    exists = (positions >= 0) & (positions < end)  # ([b,] count, 3 · size)
    near = (in_window & exists[..., None, :]).expand(b, count, size, -1)[:, :, None]
    slots = torch.ones(1, 1, 1, k, dtype=torch.bool, device=device) if mask is None else mask
    shape = (b, count, slots.shape[1], size, -1)
    return torch.cat([slots[:, None].expand(shape), near.expand(shape)], -1).flatten(0, 1)
