"""Attention onto projected keys and, in the same softmax, the exact keys nearby: in blocks, at linear cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# A window of w needs blocks of at least w queries. Larger ones see more keys in vain, smaller ones copy more keys.
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
    r"""`reference.attend_locally`, by an `attend` that is given blocks of queries and all keys that they may see.

    Args:
        attend: makes of queries, keys, values and a mask (b, 1, s, K) the result (b, s, h, d_head) and maybe $\bar P$.
        query: (b, h, n, d_head), sorted by rank.
        key: the projected keys, (b, h, k, d_head).
        value: the projected values, (b, h, k, d_head).
        near_key: the exact keys, (b, h, n, d_head).
        near_value: the exact values, (b, h, n, d_head).
        window: w, how many positions away a query sees exact keys.
        mask: true where a projected key may be seen, (b or 1, 1, 1, k).
        lengths: the number of real tokens in each row, (b,).

    Returns:
        The result (b, n, h, d_head) and, where `attend` gives it, $\bar P$ (b, h, n, k + 2w + 1): of the projected
        keys, then of the exact ones from w positions before a query to w behind it.
    """
    (b, h, n, _), k, device = query.shape, key.shape[2], query.device
    size = max(window, SMALLEST_BLOCK)
    count = (n + size - 1) // size  # not -(-n // size): ONNX rounds what is negative up
    # A graph for all lengths must not ask what is true of some only, nor what is true of all and cannot be proved: none
    # has a single block, or fills its blocks, and blocks are chosen by numbers instead of viewed.
    exporting = torch.compiler.is_exporting()
    if exporting:
        count = n // size + 2
    missing = count * size - n

    def cut(x: Tensor, before: int = 0, behind: int = 0) -> Tensor:
        """(b, h, n, d) to blocks (b, count, size, h, d), with empty blocks before and behind."""
        padding = (0, 0, 0, 0, before * size, missing + behind * size)
        padded = functional.pad(x.transpose(1, 2), padding)
        if exporting:
            starts = size * torch.arange(before + count + behind, device=device)
            return padded[:, starts[:, None] + torch.arange(size, device=device)]
        return padded.unflatten(1, (before + count + behind, size))

    def join(projected: Tensor, near: Tensor) -> Tensor:
        """The keys that each block may see, (b · count, h, k + 3 · size, d)."""
        blocks = cut(near, 1, 1)
        everywhere = projected.transpose(1, 2)[:, None].expand(-1, count, -1, -1, -1)
        seen = torch.cat([everywhere, blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], 2)
        return seen.flatten(0, 1).transpose(1, 2)

    visible = _visible(b, n, k, window, size, count, mask, lengths, device)
    visible = visible.flatten(0, 1)  # (b · count, h or 1, size, k + 3 · size)
    sees_something = visible.any(-1, keepdim=True)
    # Whoever sees nothing looks at anything, since some kernels make NaN of it, and gets zeros afterwards.
    queries = cut(query).flatten(0, 1).transpose(1, 2)
    result, probs = attend(queries, join(key, near_key), join(value, near_value), visible | ~sees_something)
    result = torch.where(sees_something.transpose(1, 2), result, 0).unflatten(0, (b, count)).flatten(1, 2)
    result = result.index_select(1, torch.arange(n, device=device)) if exporting else result[:, :n]
    if probs is None:
        return result, None
    probs = torch.where(sees_something, probs, 0).unflatten(0, (b, count)).transpose(1, 2)  # (b, h, count, size, ...)
    # Query i of a block has the key o positions away in column size + i + o, the block before its own being the first.
    places = torch.arange(size, device=device)[:, None] + torch.arange(size - window, size + window + 1, device=device)
    near = probs[..., k:].gather(-1, places.expand(b, h, count, -1, -1))
    return result, torch.cat([probs[..., :k], near], -1).flatten(2, 3)[:, :, :n]


def _visible(
    b: int,
    n: int,
    k: int,
    window: int,
    size: int,
    count: int,
    mask: Tensor | None,
    lengths: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Which projected keys and which keys of the blocks around it each query sees, (b, count, h, size, …)."""
    columns = torch.arange(-size, 2 * size, device=device)
    is_near = (torch.arange(size, device=device)[:, None] - columns).abs() <= window
    places = size * torch.arange(count, device=device)[:, None] + columns
    is_there = (places >= 0) & (places < (n if lengths is None else lengths[:, None, None]))  # (count, ...) or (b, ...)
    near = (is_near & is_there[..., None, :]).expand(b, count, size, -1)[:, :, None]
    slots = torch.ones(1, 1, 1, k, dtype=torch.bool, device=device) if mask is None else mask
    heads = slots.shape[1]
    return torch.cat([slots[:, None].expand(b, count, heads, size, -1), near.expand(b, count, heads, size, -1)], -1)
