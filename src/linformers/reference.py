"""Attention onto projected keys and values, the specification that every faster kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""$\bar P\,V$ with $\bar P = \mathrm{softmax}(Q K^T \cdot \text{scaling})$, equation 7 of the paper.

    Args:
        query: (b, h, n, d_head).
        key: the projected keys $E^T K W_K$, (b, h, k, d_head).
        value: the projected values $F^T V W_V$, (b, h, k, d_head).
        mask: true where a projected key may be seen, broadcastable to (b, h, n, k). A query that may see none
            gets zeros.
        scaling: usually $d_{head}^{-1/2}$.
        dropout: the probability with which an entry of $\bar P$ is dropped.

    Returns:
        The result (b, h, n, d_head) and $\bar P$ (b, h, n, k), which is exactly 0 where `mask` is false.
    """
    dtype, precise = query.dtype, torch.promote_types(query.dtype, torch.float32)
    # Autocast would round scores to half precision, and unscaled ones can exceed what float16 holds.
    device = query.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        query, key, value = (x.to(precise) for x in (query, key, value))
        scores = query @ key.mT * scaling  # (b, h, n, k)
        if mask is not None:
            # The lowest finite score, not -inf: a row without any visible key must not turn into NaN.
            scores = scores.masked_fill(~mask, torch.finfo(precise).min)
        probs = scores.softmax(-1)
        if mask is not None:
            probs = probs.masked_fill(~mask, 0.0)
        probs = functional.dropout(probs, dropout)
        return (probs @ value).to(dtype), probs.to(dtype)


def attend_locally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor,
    near_value: Tensor,
    *,
    window: int,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    scaling: float,
) -> Tensor:
    r"""One softmax over the k projected keys and the exact keys at most `window` positions away.

    Args:
        query: (b, h, n, d_head), sorted by rank.
        key: the projected keys, (b, h, k, d_head).
        value: the projected values, (b, h, k, d_head).
        near_key: the exact keys, (b, h, n, d_head).
        near_value: the exact values, (b, h, n, d_head).
        window: w.
        mask: true where a projected key may be seen, (b or 1, 1, 1, k).
        lengths: the number of real tokens in each row, (b,).
        scaling: usually $d_{head}^{-1/2}$.

    Returns:
        The result (b, h, n, d_head). Scores are (n, k + n) here; `local.attend_locally` has linear cost.
    """
    (b, _, n, _), k = query.shape, key.shape[2]
    places = torch.arange(n, device=query.device)
    near = (places[:, None] - places).abs() <= window  # (n, n)
    if lengths is not None:
        near = near & (places < lengths[:, None, None, None])
    slots = torch.ones(1, 1, 1, k, dtype=torch.bool, device=query.device) if mask is None else mask
    seen = torch.cat([slots.expand(b, 1, n, k), near.expand(b, 1, n, n)], -1)
    keys, values = torch.cat([key, near_key], 2), torch.cat([value, near_value], 2)
    return attend(query, keys, values, seen, scaling=scaling)[0]
