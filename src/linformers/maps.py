"""Maps along the sequence from n tokens to k: the arithmetic, which holds no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .ops.compiling import is_exporting
from .ops.ranks import Ranks

T = TypeVar("T", int, Tensor)
# What a layer's keys or values are projected with: one tensor for all heads, one for each, or none at all.
Weights = Tensor | Sequence[Tensor] | None


class SequenceMap:
    r"""A map along the sequence from n tokens to k; its weights, if it has any, are handed in at each call.

    Token r belongs to projected token $\lfloor r k / n \rfloor$, so `length` tokens fill the first
    $\lfloor (\text{length} - 1) k / n \rfloor + 1$ projected ones.

    Args:
        max_length: n, the longest sequence accepted.
    """

    commutes: ClassVar[bool]
    """Whether $(E^T x) W = E^T (x W)$: the map is linear and treats all channels alike."""

    needs_order: ClassVar[bool] = True
    """Whether tokens must be sorted by rank, since their positions matter."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Shorten `tokens` (b, ..., n, d) along n.

        Args:
            tokens: sorted by rank, and 0 at padding.
            k: the projected length.
            weights: E or a kernel; with a leading axis where each head has its own.
            lengths: the number of real tokens in each row, (b,).
        """
        raise NotImplementedError

    def num_slots(self, seq_len: int, k: int) -> int:
        """The number of projected tokens made from `seq_len` tokens."""
        return self.filled_slots(seq_len, k)

    def filled_slots(self, length: T, k: int) -> T:
        """The number of projected tokens that hold one of the first `length` tokens."""
        return (length - 1) * k // self.max_length + 1

    def slot_mask(self, tokens: Tensor, k: int, ranks: Ranks | None = None) -> Tensor | None:
        """Which projected tokens hold a real token, (b, slots) or (1, slots); `None` if all of them do."""
        seq_len, device = tokens.shape[1], tokens.device
        slots = self.num_slots(seq_len, k)
        if ranks is not None:
            lengths = ranks.lengths
        else:
            # Each branch on the length costs a compiled graph, and an exported graph can have none.
            if not is_exporting() and seq_len == self.max_length:
                return None
            if not torch.compiler.is_compiling() and self.filled_slots(seq_len, k) == slots:
                return None
            lengths = torch.full((1,), seq_len, device=device)
        return torch.arange(slots, device=device) < self.filled_slots(lengths, k)[:, None]


class LinearMap(SequenceMap):
    r"""A matrix: $\bar X = E^T X$. A sequence shorter than n uses the first rows of E.

    Args:
        max_length: n.
        init: how E started; under `"gaussian"` every column has a share of every token.
        shift: how many tokens later the windows of E begin; the first one has all tokens before.
    """

    commutes = True

    def __init__(self, max_length: int, init: str = "window", shift: int = 0) -> None:
        super().__init__(max_length)
        self.init = init
        self.shift = shift

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        assert weights is not None
        E_T = self.coarsen(weights.mT, k)  # (k, n), or (h, k, n) where each head has its own
        # Cast before expanding: autocast would make a copy for each row of the batch.
        dtype = working_dtype(tokens)
        return E_T.to(dtype).expand(*tokens.shape[:-2], *E_T.shape[-2:]) @ tokens.to(dtype)

    def coarsen(self, projected: Tensor, k: int) -> Tensor:
        """Average adjacent rows of `projected` (..., more than k, d) so that k are left."""
        ratio = projected.shape[-2] // k
        if ratio == 1:
            return projected
        means = projected.unflatten(-2, (k, ratio)).mean(-2)
        # A mean of independent columns is smaller than each of them, a mean of windows is a larger window.
        return means * ratio**0.5 if self.init == "gaussian" else means

    def num_slots(self, seq_len: int, k: int) -> int:
        return k

    def filled_slots(self, length: T, k: int) -> T:
        if self.init == "gaussian":
            return (length > 0) * k
        filled = super().filled_slots(length - self.shift, k)
        return filled + ((filled < 1) & (length > 0))  # up to `shift` tokens: they are in the first window


class DynamicMap(LinearMap):
    r"""A mean of all tokens, weighted by a softmax whose scores come from the tokens: $E = \mathrm{softmax}_n(x S)$.

    The weights are S, (d, k): they do not grow with n, and padding has no share in a mean.
    """

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        assert weights is not None
        dtype = working_dtype(tokens)
        precise = torch.promote_types(dtype, torch.float32)
        scores = (tokens.to(dtype) @ weights.to(dtype)).to(precise)  # (b, n, k), or (b, h, n, k)
        if lengths is not None:
            padding = torch.arange(tokens.shape[-2], device=tokens.device) >= lengths[:, None]  # (b, n)
            padding = padding if tokens.dim() == 3 else padding[:, None]
            scores = scores.masked_fill(padding[..., None], torch.finfo(scores.dtype).min)
        E = scores.softmax(-2).to(dtype)
        return self.coarsen(E.mT @ tokens.to(dtype), k)

    def filled_slots(self, length: T, k: int) -> T:
        return (length > 0) * k


class WindowMap(SequenceMap):
    """A map of windows of n/k tokens, each to one projected token; a shorter input has fewer windows."""

    def num_slots(self, seq_len: int, k: int) -> int:
        filled = self.filled_slots(seq_len, k)
        if k > 1 and torch.compiler.is_compiling():
            # Compiled graphs are made anew for an axis of length 1; with an empty window more they need not be.
            return max(filled, 2)
        return filled

    def windows(self, tokens: Tensor, k: int, fill: float = 0.0) -> Tensor:
        """Cut `tokens` (..., n, d) into windows (..., slots, n/k, d), the last filled up with `fill`."""
        size, slots = self.max_length // k, self.num_slots(tokens.shape[-2], k)
        missing = slots * size - tokens.shape[-2]
        return functional.pad(tokens, (0, 0, 0, missing), value=fill).unflatten(-2, (slots, size))


class ConvMap(WindowMap):
    """A depthwise convolution over the channels of a head, kernel and stride being n/k tokens."""

    commutes = False

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        assert weights is not None
        windows = self.windows(tokens, k)  # (b, h, k, n/k, d_head)
        return (windows * weights.unsqueeze(-3)).sum(-2).to(tokens.dtype)


class MeanMap(WindowMap):
    """The mean of each window; padding does not count."""

    commutes = True

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        windows = self.windows(tokens, k)  # (b, k, n/k, d)
        slots, size = windows.shape[-3:-1]
        end = tokens.shape[-2] if lengths is None else lengths[:, None]
        counts = (end - size * torch.arange(slots, device=tokens.device)).clamp(1, size)  # (k,) or (b, k)
        # The sum of a long window can exceed what float16 holds.
        totals = windows.sum(-2, dtype=torch.promote_types(tokens.dtype, torch.float32))
        return (totals / counts[..., None]).to(tokens.dtype)


class MaxMap(WindowMap):
    """The maximum of each window; padding does not count."""

    commutes = False

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        lowest = torch.finfo(tokens.dtype).min
        if lengths is not None:
            padding = torch.arange(tokens.shape[-2], device=tokens.device) >= lengths[:, None]  # (b, n)
            tokens = tokens.masked_fill(padding[:, None, :, None], lowest)
        maxima = self.windows(tokens, k, fill=lowest).amax(-2)  # (b, h, k, d_head)
        return torch.where(maxima == lowest, 0, maxima)  # an empty window


class IdentityMap(SequenceMap):
    """No projection: each token is its own projected token, as in the standard Transformer."""

    commutes = True
    needs_order = False

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        return tokens

    def slot_mask(self, tokens: Tensor, k: int, ranks: Ranks | None = None) -> Tensor | None:
        return None if ranks is None else ranks.mask


class NoMap(SequenceMap):
    """No projected tokens at all."""

    commutes = True

    def __call__(self, tokens: Tensor, k: int, weights: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        return tokens[..., :0, :]

    def slot_mask(self, tokens: Tensor, k: int, ranks: Ranks | None = None) -> Tensor | None:
        return None


def sequence_map(projection: str, max_length: int, init: str, shift: int = 0) -> SequenceMap:
    """The map that `LinformerConfig.projection` names."""
    match projection:
        case "linear":
            return LinearMap(max_length, init, shift)
        case "dynamic":
            return DynamicMap(max_length)
        case "conv":
            return ConvMap(max_length)
        case "mean":
            return MeanMap(max_length)
        case "max":
            return MaxMap(max_length)
        case "none":
            return NoMap(max_length)
    return IdentityMap(max_length)


def working_dtype(tokens: Tensor) -> torch.dtype:
    """The type in which a matrix product with `tokens` is computed."""
    device = tokens.device.type
    if device == "meta":  # which knows of no autocast
        return tokens.dtype
    casts = torch.is_autocast_enabled(device) and tokens.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(device) if casts else tokens.dtype
