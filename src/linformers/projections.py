"""E and F: the weights of the maps from n tokens to k, and who shares which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .maps import Weights


class LinearProjection(nn.Module):
    r"""A learned matrix $E = E_0 + s \Delta$, (n, k), of which Δ is learned.

    Under `init="window"`, $E_0$ averages the tokens of each window of n/k and Δ starts at 0; under `"gaussian"`,
    $E_0 = 0$ and E starts as $N(0, 1/n)$. Since an optimiser like Adam moves all weights alike, s is the learning rate
    of E relative to that of other weights.

    Args:
        max_length: n.
        projected_length: k.
        init: `"window"` or `"gaussian"`.
        scale: s.
    """

    def __init__(self, max_length: int, projected_length: int, init: str = "window", scale: float = 1.0) -> None:
        super().__init__()
        self.init = init
        self.scale = scale
        self.delta = nn.Parameter(torch.empty(max_length, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "gaussian":
            nn.init.normal_(self.delta, std=len(self.delta) ** -0.5 / self.scale)
        else:
            nn.init.zeros_(self.delta)

    def forward(self, seq_len: int) -> Tensor:
        """The first `seq_len` rows of E."""
        E = self.scale * self.delta[:seq_len]
        if self.init == "window":
            n, k = self.delta.shape
            E = E + window_matrix(n, k, seq_len, E.device, E.dtype)
        return E

    @torch.no_grad()
    def load_resampled(self, other: LinearProjection) -> None:
        """Take what `other`, of another length, has learned: rows keep column sums, columns are averaged."""
        (n, k), (old_n, old_k) = self.delta.shape, other.delta.shape
        rows, columns = overlap(n, old_n) * old_n, overlap(k, old_k) * k
        if self.init == "gaussian":
            columns = columns / columns.norm(dim=1, keepdim=True)
        learned = other.scale * other.delta.cpu().double()
        self.delta.copy_(rows @ learned @ columns.mT / self.scale)

    @torch.no_grad()
    def load_slice(self, other: LinearProjection) -> None:
        """Take the first rows and columns of `other`, whose n/k is the same."""
        n, k = self.delta.shape
        self.delta.copy_(other.delta[:n, :k])

    def extra_repr(self) -> str:
        return f"n={self.delta.shape[0]}, k={self.delta.shape[1]}, init={self.init!r}, scale={self.scale:g}"


class DynamicProjection(nn.Module):
    """S, (d, k), from which the weights of a mean over all tokens are computed.

    Args:
        channels: d, those of a token, or of one head's share of it.
        projected_length: k.
    """

    sharpness = 28.0
    """The score at the start of a projected token with the positions of its window, were they all of a token."""

    def __init__(self, channels: int, projected_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Scores of normalised tokens then have a standard deviation of 2: a projected token prefers some of them.
        nn.init.normal_(self.weight, std=2 * len(self.weight) ** -0.5)

    def forward(self, seq_len: int) -> Tensor:
        """S, whatever the length."""
        return self.weight

    def windows(self, positions: Tensor) -> Tensor:
        """The S under which each mean is mostly of one window of n/k tokens, found by their positions (n, d)."""
        n, k = len(positions), self.weight.shape[1]
        means = window_matrix(n, k, n, positions.device, positions.dtype).mT @ positions  # (k, d)
        size = positions.square().mean().sqrt()
        return means.mT * (self.sharpness / (positions.shape[1] * size))

    @torch.no_grad()
    def load_resampled(self, other: DynamicProjection) -> None:
        """Take the columns of `other`, averaged or repeated where k differs."""
        k, old_k = self.weight.shape[1], other.weight.shape[1]
        self.weight.copy_(other.weight.cpu().double() @ (overlap(k, old_k) * k).mT)

    @torch.no_grad()
    def load_slice(self, other: DynamicProjection) -> None:
        """Take the first columns of `other`, whose n/k is the same: windows are where they were."""
        self.weight.copy_(other.weight[:, : self.weight.shape[1]])

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, k={self.weight.shape[1]}"


class ConvProjection(nn.Module):
    """A learned kernel, (n/k, d_head), which starts as mean pooling.

    Args:
        max_length: n.
        projected_length: k, which divides n.
        head_dim: d_head; each channel has its own kernel.
    """

    def __init__(self, max_length: int, projected_length: int, head_dim: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(max_length // projected_length, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.kernel, 1 / len(self.kernel))

    def forward(self, seq_len: int) -> Tensor:
        """The kernel, whatever the length."""
        return self.kernel

    @torch.no_grad()
    def load_resampled(self, other: ConvProjection) -> None:
        """Take the kernel of `other`, stretched to this one's size with its sums kept."""
        offsets = overlap(len(self.kernel), len(other.kernel)) * len(other.kernel)
        self.kernel.copy_(offsets @ other.kernel.cpu().double())

    @torch.no_grad()
    def load_slice(self, other: ConvProjection) -> None:
        """Take the kernel of `other`, whose n/k is the same."""
        self.kernel.copy_(other.kernel)

    def extra_repr(self) -> str:
        return f"size={len(self.kernel)}, channels={self.kernel.shape[1]}"


class Projections(nn.ModuleList):
    """All projections of a model that are learned: 2·layers·heads, 2·layers, layers or 1 of them, or none.

    Args:
        projected_lengths: k of each head of each layer.
        max_length: n.
        head_dim: d_head.
        projection, sharing, init, scale: the fields `projection`, `sharing`, `projection_init` and
            `projection_scale` of `LinformerConfig`.
        shifts: by how many rows the E and F of each layer are moved down. The first row stands for all tokens before:
            the first window has more of them, each with the weight of one, and the last window less.
    """

    def __init__(
        self,
        projected_lengths: Sequence[Sequence[int]],
        max_length: int,
        head_dim: int,
        *,
        projection: str,
        sharing: str,
        init: str,
        scale: float | None,
        shifts: Sequence[int],
    ) -> None:
        largest = [max(heads) for heads in projected_lengths]
        match sharing:
            case "none":
                sizes = [k for heads in projected_lengths for _ in ("E", "F") for k in heads]
            case "headwise":
                sizes = [k for k in largest for _ in ("E", "F")]
            case "key-value":
                sizes = largest
            case _:
                sizes = [max(largest)]
        match projection:
            case "linear":
                assert scale is not None
                modules: list[nn.Module] = [LinearProjection(max_length, k, init, scale) for k in sizes]
            case "conv":
                modules = [ConvProjection(max_length, k, head_dim) for k in sizes]
            case "dynamic":
                channels = head_dim if sharing == "none" else head_dim * len(projected_lengths[0])
                modules = [DynamicProjection(channels, k) for k in sizes]
            case _:
                modules = []
        super().__init__(modules)
        self.sharing = sharing
        self.shifts = list(shifts)
        self.num_heads = len(projected_lengths[0])

    def forward(self, seq_len: int) -> list[tuple[Weights, Weights]]:
        """E and F of each layer for `seq_len` tokens; each is made once, however many layers share it."""
        if not len(self):
            return [(None, None)] * len(self.shifts)
        most = max(self.shifts) if seq_len else 0
        every = [module(seq_len) for module in self]
        if most:  # each layer sees a part of what this makes
            every = [torch.cat([E[:1].expand(most, -1), E]) for E in every]

        def part(E: Tensor, shift: int) -> Tensor:
            return E.narrow(0, most - shift, seq_len) if most else E

        pairs: list[tuple[Weights, Weights]] = []
        h = self.num_heads
        for layer, shift in enumerate(self.shifts):
            E: Weights
            F: Weights
            match self.sharing:
                case "none":
                    own = [part(E, shift) for E in every[2 * h * layer : 2 * h * (layer + 1)]]
                    E, F = _stacked(own[:h]), _stacked(own[h:])
                case "headwise":
                    E, F = part(every[2 * layer], shift), part(every[2 * layer + 1], shift)
                case "key-value":
                    E = F = part(every[layer], shift)
                case _:
                    E = F = part(every[0], shift)
            pairs.append((E, F))
        return pairs


def _stacked(weights: list[Tensor]) -> Weights:
    """One tensor (h, n, k) for the heads of a layer, or a list of them where k differs."""
    return torch.stack(weights) if all(w.shape == weights[0].shape for w in weights) else weights


def window_matrix(
    n: int, k: int, seq_len: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The first `seq_len` rows of E₀: column j averages the rows r with ⌊r·k/n⌋ = j, also where k does not divide n."""
    owner = torch.arange(seq_len, device=device) * k // n  # (n,)
    size = ((owner + 1) * n + k - 1) // k - (owner * n + k - 1) // k
    owned = owner[:, None] == torch.arange(k, device=device)  # (n, k)
    return owned.to(dtype) / size[:, None]


def overlap(new: int, old: int) -> Tensor:
    """How much of each of `new` equal parts of the unit interval lies in each of `old` parts, (new, old)."""
    new_edges = torch.arange(new + 1, dtype=torch.float64)[:, None] / new
    old_edges = torch.arange(old + 1, dtype=torch.float64) / old
    shared = torch.minimum(new_edges[1:], old_edges[1:]) - torch.maximum(new_edges[:-1], old_edges[:-1])
    return shared.clamp(min=0)
