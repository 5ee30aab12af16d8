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
    far_bias: Tensor | None = None,
    positions: Tensor | None = None,
    rotate_first: bool = False,
    rope_theta: float = 10_000.0,
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
        far_bias: with a window, what is added to the scores of projected keys, (h,).
        positions: with rotary positions, those of the projected keys, (k,) or per head (h, k): queries and exact keys
            are rotated by their rank, projected keys by these.
        rotate_first: rotary positions of a layer without a window. Keys and values are rotated by their rank before
            they are projected, and the result is rotated back by the rank of the query, so that each token enters it
            rotated by its distance to the query. Values turn with the frequencies of a discrete Fourier transform: the
            sum over a window of at most d_head / 2 tokens keeps them apart, and W^O can pick one by its distance.
        rope_theta: the base of the rotary frequencies.

    Returns:
        The heads' outputs side by side, (n, d); the layer multiplies them with $W^O$.
    """
    n, size = len(x), query[0].shape[1] // num_heads  # n and d_head
    ranks = torch.arange(n)
    near = (ranks[:, None] - ranks).abs() <= window  # (n, n)
    heads = []
    for i in range(num_heads):
        channels = slice(i * size, (i + 1) * size)
        (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = ((W[:, channels], b[channels]) for W, b in (query, key, value))
        E_i, F_i = (matrix if matrix.dim() == 2 else matrix[i] for matrix in (E, F))
        Q = x @ W_Q + b_Q  # (n, d_head)
        K = E_i.T @ (x @ W_K) + b_K  # (k, d_head)
        V = F_i.T @ (x @ W_V) + b_V  # (k, d_head)
        K_near, V_near = x @ W_K + b_K, x @ W_V + b_V  # (n, d_head)
        if rotate_first:
            Q = rotate(Q, ranks, rope_theta)
            K, V = E_i.T @ rotate(K_near, ranks, rope_theta), F_i.T @ rotate_value(V_near, ranks)
        if positions is not None:
            Q, K_near = (rotate(tokens, ranks, rope_theta) for tokens in (Q, K_near))
            K = rotate(K, positions if positions.dim() == 1 else positions[i], rope_theta)
        scores = Q @ K.T / math.sqrt(size)  # (n, k)
        if window:
            if far_bias is not None:
                scores = scores + far_bias[i]
            near_scores = (Q @ K_near.T / math.sqrt(size)).masked_fill(~near, -math.inf)
            scores, V = torch.cat([scores, near_scores], 1), torch.cat([V, V_near])
        P = scores.softmax(-1)  # (n, k), with a window (n, k + n)
        heads.append(rotate_value(P @ V, -ranks) if rotate_first else P @ V)
    return torch.cat(heads, 1)


def rotate(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    r"""Rotary positions (Su et al., 2021): turn channels j and j + d/2 of `x` by the angle $p\,\theta^{-2j/d}$.

    Args:
        x: queries or keys of one head, (..., n, d) with an even d.
        positions: p of each row, (..., n).
        theta: the base of the frequencies.
    """
    half = x.shape[-1] // 2
    return turn(x, positions, theta ** (-torch.arange(half, dtype=torch.float64) / half))


def rotate_value(x: Tensor, positions: Tensor) -> Tensor:
    r"""Turn channels j and j + d/2 of values `x` (..., n, d) by the angle $2 \pi p j / (d/2)$, p of `positions`."""
    half = x.shape[-1] // 2
    return turn(x, positions, 2 * math.pi * torch.arange(half, dtype=torch.float64) / half)


def turn(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn channels j and j + d/2 of `x` (..., n, d) by the angle `positions` (..., n) times `frequencies` (d/2,)."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * frequencies  # (..., n, d/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
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
        bias: what is added to the scores, broadcastable to (b, h, n, k).
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
        if bias is not None:
            scores = scores + bias.to(precise)
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
    far_bias: Tensor | None = None,
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
        far_bias: what is added to the scores of projected keys, (h,).
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
    bias = None if far_bias is None else functional.pad(far_bias[:, None, None].expand(h, 1, k), (0, n))
    return attend(query, keys, values, seen, bias, scaling=scaling)[0]
