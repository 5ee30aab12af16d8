"""The specification: equation 7 in full, slow and plain. Every faster path is tested against it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

WeightAndBias = tuple[Tensor, Tensor]


def linformer_attention(
    x: Tensor,
    query: WeightAndBias,
    key: WeightAndBias,
    value: WeightAndBias,
    E: Tensor,
    F: Tensor,
    *,
    num_heads: int,
    window: int = 0,
) -> Tensor:
    r"""Multi-head linear attention of one sequence without padding: equation 7 for each head.

    $$\mathrm{head}_i = \mathrm{softmax}\left(\frac{x W^Q_i\,(E_i^T x W^K_i)^T}{\sqrt{d_{head}}}\right) F_i^T x W^V_i$$

    The paper writes E K; with E of shape (n, k), this is $E^T K$. Biases are added after projecting. With a window, the
    softmax is also over the exact keys at most `window` positions away. In a batch with padding, x holds the real
    tokens of one row: a token's position is its rank among them.

    Args:
        x: the tokens, (n, d).
        query, key, value: W (d, d), which multiplies from the right, and b (d,).
        E, F: (n, k) or per head (h, n, k), restricted to the rows of x's tokens and the columns of live slots: the
            projected positions to which at least one token belongs.
        num_heads: h.
        window: w, or 0 for none.

    Returns:
        The heads' outputs side by side, (n, d); the layer multiplies them with $W^O$.
    """
    n, size = len(x), query[0].shape[1] // num_heads  # n and d_head
    positions = torch.arange(n)
    near = (positions[:, None] - positions).abs() <= window  # (n, n)
    heads = []
    for i in range(num_heads):
        channels = slice(i * size, (i + 1) * size)
        (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = ((W[:, channels], b[channels]) for W, b in (query, key, value))
        E_i, F_i = (matrix if matrix.dim() == 2 else matrix[i] for matrix in (E, F))
        Q = x @ W_Q + b_Q  # (n, d_head)
        K = E_i.T @ (x @ W_K) + b_K  # (k, d_head)
        V = F_i.T @ (x @ W_V) + b_V  # (k, d_head)
        seen = torch.ones(n, len(K), dtype=torch.bool)
        if window:
            K, V = torch.cat([K, x @ W_K + b_K]), torch.cat([V, x @ W_V + b_V])
            seen = torch.cat([seen, near], 1)
        scores = (Q @ K.T / math.sqrt(size)).masked_fill(~seen, -math.inf)
        P = scores.softmax(-1)  # (n, k), with a window (n, k + n)
        heads.append(P @ V)
    return torch.cat(heads, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""$\bar P\,V$ with $\bar P = \mathrm{softmax}(Q K^T \cdot \text{scaling})$, for a batch with padding.

    Args:
        query: (b, h, n, d_head).
        key: the projected keys $E^T K W_K$, (b, h, k, d_head).
        value: the projected values $F^T V W_V$, (b, h, k, d_head).
        mask: true at the keys to attend to, broadcastable to (b, h, n, k). The output is 0 for a query without any.
        scaling: usually $d_{head}^{-1/2}$.
        dropout: the probability of dropping an entry of $\bar P$.

    Returns:
        The result (b, h, n, d_head) and $\bar P$ after dropout (b, h, n, k), exactly 0 where `mask` is false.
    """
    dtype, precise = query.dtype, torch.promote_types(query.dtype, torch.float32)
    # Autocast would round scores to half precision, and unscaled ones can exceed the range of float16.
    device = query.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        query, key, value = (x.to(precise) for x in (query, key, value))
        scores = query @ key.mT * scaling  # (b, h, n, k)
        if mask is not None:
            # The lowest finite score, not -inf: a row without any visible key must not become NaN.
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
        mask: true at the projected keys to attend to, (b or 1, h or 1, 1, k).
        lengths: the number of real tokens of each row, (b,).
        scaling: usually $d_{head}^{-1/2}$.

    Returns:
        The result (b, h, n, d_head). Scores are (n, k + n) here; `ops.local.attend_locally` has linear cost.
    """
    (b, h, n, _), k = query.shape, key.shape[2]
    positions = torch.arange(n, device=query.device)
    near = (positions[:, None] - positions).abs() <= window  # (n, n)
    if lengths is not None:
        near = near & (positions < lengths[:, None, None, None])
    slots = torch.ones(1, 1, 1, k, dtype=torch.bool, device=query.device) if mask is None else mask
    seen = torch.cat([slots.expand(b, h, n, k), near.expand(b, h, n, n)], -1)
    keys, values = torch.cat([key, near_key], 2), torch.cat([value, near_value], 2)
    return attend(query, keys, values, seen, scaling=scaling)[0]
