"""E and F: the maps along the sequence from n tokens to k, and who shares which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .ops.ranks import Ranks, move_to_front, zero_padding

T = TypeVar("T", int, Tensor)


class SequenceProjection(nn.Module):
    r"""A map along the sequence from n tokens to k.

    Token r belongs to projected token $\lfloor r k / n \rfloor$, so an input of `length` tokens fills the first
    $\lfloor (\text{length} - 1) k / n \rfloor + 1$ of them.

    Args:
        max_length: n, the longest sequence accepted.
        projected_length: k, the length of the result for an input of n tokens.
    """

    commutes: ClassVar[bool]
    """Whether $(E^T x) W = E^T (x W)$: the map is linear and treats all channels alike."""

    needs_order: ClassVar[bool] = True
    """Whether tokens must be sorted by rank, since their positions matter."""

    def __init__(self, max_length: int, projected_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.projected_length = projected_length

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shorten `hidden_states` (b, n, d) to (b, k, d); masked positions contribute nothing."""
        if mask is None:
            return self.project(hidden_states)
        ranks = Ranks.of(mask)
        hidden_states = zero_padding(hidden_states, ranks.mask)
        return self.project(move_to_front(hidden_states, ranks), ranks.lengths)

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Shorten `tokens` (b, ..., n, d) along n.

        Args:
            tokens: sorted by rank, and 0 at padding.
            lengths: the number of real tokens in each row, (b,).
            projected_length: a smaller k than the module's own.
            weights: to be used instead of the module's own, with a leading axis where each head has its own.
        """
        raise NotImplementedError

    def weights(self, seq_len: int, projected_length: int | None = None) -> Tensor | None:
        """What `project` multiplies `seq_len` tokens with, if anything."""
        return None

    def num_slots(self, seq_len: int, projected_length: int | None = None) -> int:
        """The number of projected tokens made from `seq_len` tokens."""
        return self.filled_slots(seq_len, projected_length)

    def filled_slots(self, length: T, projected_length: int | None = None) -> T:
        """How many of them hold one of the first `length` tokens."""
        return (length - 1) * (projected_length or self.projected_length) // self.max_length + 1

    def slot_mask(
        self, tokens: Tensor, ranks: Ranks | None = None, projected_length: int | None = None
    ) -> Tensor | None:
        """Which projected tokens hold a real token, (b, slots) or (1, slots); `None` if all of them do."""
        seq_len, device = tokens.shape[1], tokens.device
        slots = self.num_slots(seq_len, projected_length)
        if ranks is not None:
            lengths = ranks.lengths
        else:
            # Each branch on the length costs a compiled graph, and an exported graph can have none.
            if not torch.compiler.is_exporting() and seq_len == self.max_length:
                return None
            if not torch.compiler.is_compiling() and self.filled_slots(seq_len, projected_length) == slots:
                return None
            lengths = torch.full((1,), seq_len, device=device)
        return torch.arange(slots, device=device) < self.filled_slots(lengths, projected_length)[:, None]

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}, projected_length={self.projected_length}"


class WindowProjection(SequenceProjection):
    """A map of windows of n/k tokens, each to one projected token; a shorter input has fewer windows."""

    def num_slots(self, seq_len: int, projected_length: int | None = None) -> int:
        filled = self.filled_slots(seq_len, projected_length)
        if (projected_length or self.projected_length) > 1 and torch.compiler.is_compiling():
            # Compiled graphs are made anew for an axis of length 1; with an empty window more they need not be.
            return max(filled, 2)
        return filled

    def windows(self, tokens: Tensor, projected_length: int | None = None, fill: float = 0.0) -> Tensor:
        """Cut `tokens` (..., n, d) into windows (..., slots, n/k, d), the last filled up with `fill`."""
        size = self.max_length // (projected_length or self.projected_length)
        slots = self.num_slots(tokens.shape[-2], projected_length)
        missing = slots * size - tokens.shape[-2]
        return functional.pad(tokens, (0, 0, 0, missing), value=fill).unflatten(-2, (slots, size))


class LinearProjection(SequenceProjection):
    r"""Shortens a sequence with a learned matrix: $\bar X = E^T X$, where $E = E_0 + s \Delta$ and Δ is learned.

    Under `init="window"`, $E_0$ averages the tokens of each window and Δ starts at 0; under `"gaussian"`, $E_0 = 0$
    and E starts as $N(0, 1/n)$. Since an optimiser like Adam moves all weights alike, s is the learning rate of E
    relative to that of other weights.

    Args:
        max_length: n, the longest sequence accepted; a shorter one uses the first rows of E.
        projected_length: k, the length of the result.
        init: `"window"` or `"gaussian"`.
        scale: s; `None` means $0.12\,k/n$.
    """

    commutes = True

    def __init__(
        self, max_length: int, projected_length: int, init: str = "window", scale: float | None = None
    ) -> None:
        super().__init__(max_length, projected_length)
        self.init = init
        self.scale = 0.12 * (projected_length / max_length) if scale is None else scale
        self.delta = nn.Parameter(torch.empty(max_length, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "window":
            nn.init.zeros_(self.delta)
        else:
            nn.init.normal_(self.delta, std=self.max_length**-0.5 / self.scale)

    def weights(self, seq_len: int, projected_length: int | None = None) -> Tensor:
        """The first `seq_len` rows of E, with adjacent columns averaged where a smaller k is asked for."""
        E = self.scale * self.delta[:seq_len]
        if self.init == "window":
            E = E + window_matrix(self.max_length, self.projected_length, seq_len, self.delta)
        return self.coarsen(E.mT, projected_length).mT  # (n, k)

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        E = self.weights(tokens.shape[-2], projected_length) if weights is None else weights
        E_T = E.mT.to(tokens.dtype)  # (k, n), or (h, k, n) where each head has its own
        return E_T.expand(*tokens.shape[:-2], *E_T.shape[-2:]) @ tokens

    def coarsen(self, projected: Tensor, projected_length: int | None) -> Tensor:
        """Average adjacent rows of `projected` (..., k, d) so that `projected_length` are left."""
        k = projected.shape[-2]
        if projected_length is None or projected_length == k:
            return projected
        ratio = k // projected_length
        means = projected.unflatten(-2, (projected_length, ratio)).mean(-2)
        # A mean of independent columns is smaller than each of them, a mean of windows is a larger window.
        return means if self.init == "window" else means * ratio**0.5

    def num_slots(self, seq_len: int, projected_length: int | None = None) -> int:
        return projected_length or self.projected_length

    def filled_slots(self, length: T, projected_length: int | None = None) -> T:
        if self.init == "window":
            return super().filled_slots(length, projected_length)
        # Every column of a dense E has a share of every token.
        return (length > 0) * (projected_length or self.projected_length)

    def load_resampled(self, other: LinearProjection) -> None:
        r"""Take what `other`, of another length, has learned: rows keep column sums, columns are averaged."""
        rows = overlap(self.max_length, other.max_length) * other.max_length
        columns = overlap(self.projected_length, other.projected_length) * self.projected_length
        if self.init == "gaussian":
            columns = columns / columns.norm(dim=1, keepdim=True)
        learned = other.scale * other.delta.cpu().double()
        self.delta.copy_(rows @ learned @ columns.mT / self.scale)

    def load_slice(self, other: LinearProjection) -> None:
        """Take the first rows and columns of `other`, whose n/k is the same."""
        self.delta.copy_(other.delta[: self.max_length, : self.projected_length])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, init={self.init!r}, scale={self.scale:g}"


class ConvProjection(WindowProjection):
    r"""Shortens a sequence with a depthwise convolution whose kernel and stride are n/k tokens.

    Its kernel, (n/k, d_head), starts as mean pooling.

    Args:
        max_length: n, the longest sequence accepted.
        projected_length: k, which divides n.
        head_dim: d_head, the number of channels; each has its own kernel.
    """

    commutes = False

    def __init__(self, max_length: int, projected_length: int, head_dim: int) -> None:
        super().__init__(max_length, projected_length)
        self.kernel = nn.Parameter(torch.empty(max_length // projected_length, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.kernel, 1 / len(self.kernel))

    def weights(self, seq_len: int, projected_length: int | None = None) -> Tensor:
        return self.kernel

    def load_resampled(self, other: ConvProjection) -> None:
        """Take the kernel of `other`, stretched to this one's size with its sums kept."""
        offsets = overlap(len(self.kernel), len(other.kernel)) * len(other.kernel)
        self.kernel.copy_(offsets @ other.kernel.cpu().double())

    def load_slice(self, other: ConvProjection) -> None:
        """Take the kernel of `other`, whose n/k is the same."""
        self.kernel.copy_(other.kernel)

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        kernel = self.kernel if weights is None else weights
        windows = self.windows(tokens, projected_length)  # (b, h, k, n/k, d_head)
        return (windows * kernel.unsqueeze(-3)).sum(-2).to(tokens.dtype)


class MeanProjection(WindowProjection):
    """Shortens a sequence to the means of its windows of n/k tokens; padding does not count."""

    commutes = True

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        windows = self.windows(tokens, projected_length)  # (b, k, n/k, d)
        slots, size = windows.shape[-3:-1]
        end = tokens.shape[-2] if lengths is None else lengths[:, None]
        counts = (end - size * torch.arange(slots, device=tokens.device)).clamp(1, size)  # (k,) or (b, k)
        return windows.sum(-2) / counts[..., None].to(tokens.dtype)


class MaxProjection(WindowProjection):
    """Shortens a sequence to the maxima of its windows of n/k tokens; padding does not count."""

    commutes = False

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        lowest = torch.finfo(tokens.dtype).min
        if lengths is not None:
            padding = torch.arange(tokens.shape[-2], device=tokens.device) >= lengths[:, None]  # (b, n)
            padding = padding[:, None] if tokens.dim() == 4 else padding
            tokens = tokens.masked_fill(padding[..., None], lowest)
        maxima = self.windows(tokens, projected_length, fill=lowest).amax(-2)  # (b, h, k, d_head)
        return torch.where(maxima == lowest, 0, maxima)  # an empty window


class IdentityProjection(SequenceProjection):
    """Shortens nothing: each token is its own projected token, as in the standard Transformer."""

    commutes = True
    needs_order = False

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, max_length)

    def project(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        projected_length: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        return tokens

    def slot_mask(
        self, tokens: Tensor, ranks: Ranks | None = None, projected_length: int | None = None
    ) -> Tensor | None:
        return None if ranks is None else ranks.mask


class LayerProjections(NamedTuple):
    """E and F of one layer: one for all its heads, or one for each."""

    keys: Sequence[SequenceProjection]
    values: Sequence[SequenceProjection]


class Projections(nn.ModuleList):
    """All projections of a model, and which layer uses which: 2·layers·heads, 2·layers, layers or 1 of them.

    Args:
        projected_lengths: k of each head of each layer.
        max_length: n.
        head_dim: d_head.
        projection, sharing, init, scale: the fields `projection`, `sharing`, `projection_init` and
            `projection_scale` of `LinformerConfig`.
    """

    def __init__(
        self,
        projected_lengths: Sequence[Sequence[int]],
        max_length: int,
        head_dim: int,
        *,
        projection: str = "linear",
        sharing: str = "layerwise",
        init: str = "window",
        scale: float | None = None,
    ) -> None:
        def build(projected_length: int) -> SequenceProjection:
            match projection:
                case "linear":
                    return LinearProjection(max_length, projected_length, init, scale)
                case "conv":
                    return ConvProjection(max_length, projected_length, head_dim)
                case "mean":
                    return MeanProjection(max_length, projected_length)
                case "max":
                    return MaxProjection(max_length, projected_length)
            return IdentityProjection(max_length)

        self.sharing = sharing if projection in ("linear", "conv") else "layerwise"
        largest = [max(heads) for heads in projected_lengths]
        match self.sharing:
            case "none":
                sizes = [k for heads in projected_lengths for k in (*heads, *heads)]
            case "headwise":
                sizes = [k for k in largest for _ in ("E", "F")]
            case "key-value":
                sizes = largest
            case _:
                sizes = [max(largest)]
        super().__init__(build(k) for k in sizes)
        self.num_heads = len(projected_lengths[0])

    def of_layer(self, layer_idx: int) -> LayerProjections:
        """The projections of one layer's keys and values."""
        modules = cast(list[SequenceProjection], list(self))
        match self.sharing:
            case "none":
                first, h = 2 * self.num_heads * layer_idx, self.num_heads
                return LayerProjections(modules[first : first + h], modules[first + h : first + 2 * h])
            case "headwise":
                return LayerProjections([modules[2 * layer_idx]], [modules[2 * layer_idx + 1]])
            case "key-value":
                return LayerProjections([modules[layer_idx]], [modules[layer_idx]])
        return LayerProjections(modules, modules)


def window_matrix(max_length: int, projected_length: int, seq_len: int, like: Tensor) -> Tensor:
    """The first `seq_len` rows of E₀: column j averages the rows r with ⌊r·k/n⌋ = j, also where k does not divide n."""
    n, k = max_length, projected_length
    owner = torch.arange(seq_len, device=like.device) * k // n  # (n,)
    size = ((owner + 1) * n + k - 1) // k - (owner * n + k - 1) // k
    owned = owner[:, None] == torch.arange(k, device=like.device)  # (n, k)
    return torch.where(owned, 1 / size[:, None].to(like.dtype), 0)


def overlap(new: int, old: int) -> Tensor:
    """How much of each of `new` equal parts of the unit interval lies in each of `old` parts, (new, old)."""
    new_edges = torch.arange(new + 1, dtype=torch.float64)[:, None] / new
    old_edges = torch.arange(old + 1, dtype=torch.float64) / old
    shared = torch.minimum(new_edges[1:], old_edges[1:]) - torch.maximum(new_edges[:-1], old_edges[:-1])
    return shared.clamp(min=0)
