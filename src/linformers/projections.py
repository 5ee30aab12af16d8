"""E and F: the projections along the sequence from n tokens to k, and which heads and layers share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import LinformerConfig
from .ops.compiling import is_exporting
from .ops.ranks import zero_padding
from .ops.rotary import Rotation, Rotations

T = TypeVar("T", int, Tensor)


class Projection(nn.Module):
    r"""A map along the sequence from n tokens to k slots, $x \mapsto E^T x$: its weights and its arithmetic.

    Token r belongs to slot $\lfloor r k / n \rfloor$. A slot is live if at least one real token belongs to it. The
    paper assumes inputs of length n; for a shorter input, attention masks the slots that are not live.

    Args:
        max_length: n.
    """

    commutes: ClassVar[bool] = True
    """Whether $(E^T x) W = E^T (x W)$: the map is linear and the same for all channels."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def forward(self, seq_len: int, windows: dict[Any, Tensor] | None = None) -> Tensor | None:
        """The weights for `seq_len` tokens, computed once per pass however many layers share them.

        Args:
            seq_len: the number of tokens in a row.
            windows: a cache of window matrices that all projections of a model share.
        """
        return None

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        """$E^T x$: (b, n, d) to (b, k, d), or (b, h, n, d_head) to (b, h, k, d_head).

        Args:
            tokens: sorted by rank, and 0 at padding.
            k: the projected length.
            weights: from `forward`, with columns merged where k is smaller.
            lengths: the number of real tokens of each row, (b,); `None` if there is no padding.
        """
        raise NotImplementedError

    def num_slots(self, seq_len: int, k: int) -> int:
        """The number of slots of a sequence of `seq_len` tokens, of which the first are live."""
        return k

    def live_slots(self, length: T, k: int, shift: int = 0) -> T:
        """The number of live slots of a sequence of `length` tokens."""
        return (length - 1) * k // self.max_length + 1

    def slot_positions(self, k: int, shift: int, device: torch.device) -> Tensor:
        """The position of each of the k slots, for rotary positions: the mean rank of its window."""
        return (torch.arange(k, device=device) + 0.5) * (self.max_length / k) - 0.5 + shift

    def slot_mask(
        self, seq_len: int, k: int, shift: int, lengths: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Which slots are live, (b or 1, slots); `None` if all of them are."""
        slots = self.num_slots(seq_len, k)
        if lengths is None:
            # Every branch on the length costs a compiled graph, and an exported graph can have none.
            if not is_exporting() and seq_len == self.max_length:
                return None
            if not torch.compiler.is_compiling() and self.live_slots(seq_len, k, shift) == slots:
                return None
            lengths = torch.full((1,), seq_len, device=device)
        return torch.arange(slots, device=device) < self.live_slots(lengths, k, shift)[:, None]

    def load_resized(self, other: Projection, same_ratio: bool) -> None:
        """Copy the learned weights of `other`, which has another n or k; `same_ratio`: n/k stays the same."""


class LinearProjection(Projection):
    r"""A learned matrix $E = E_0 + s \Delta$, (n, k), of which Δ is the parameter; a shorter input uses its first rows.

    With `init="window"`, $E_0$ averages the tokens of each window of n/k; with `"sample"`, it selects one of them; Δ
    starts at 0. With `"gaussian"`, $E_0 = 0$ and E starts as $N(0, 1/n)$. An optimizer like Adam moves all weights at
    the same rate, so s is the learning rate of E relative to that of the other weights.

    Args:
        max_length: n.
        projected_length: k.
        num_heads: if set, the number of heads with separate matrices: Δ is (n, h, k).
        init: `"window"`, `"sample"` or `"gaussian"`.
        scale: s.
    """

    def __init__(
        self,
        max_length: int,
        projected_length: int,
        num_heads: int | None = None,
        *,
        init: str = "window",
        scale: float = 1.0,
    ) -> None:
        super().__init__(max_length)
        self.init = init
        self.scale = scale
        # Rows first: slicing another axis than the first breaks torch.export with a dynamic length.
        heads = () if num_heads is None else (num_heads,)
        self.delta = nn.Parameter(torch.empty(max_length, *heads, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "gaussian":
            nn.init.normal_(self.delta, std=len(self.delta) ** -0.5 / self.scale)
        else:
            nn.init.zeros_(self.delta)

    def forward(self, seq_len: int, windows: dict[Any, Tensor] | None = None) -> Tensor:
        """The first `seq_len` rows of E, (n, k) or (n, h, k); with `init="sample"`, those of s Δ alone."""
        delta = self.delta[:seq_len]
        # Not s * Δ: reentrant checkpointing runs backward through E once per layer, so autograd must not save a tensor.
        E = torch.add(delta.new_zeros(()), delta, alpha=self.scale)
        if self.init != "window":
            return E
        windows, k, device = {} if windows is None else windows, delta.shape[-1], delta.device
        if (k, device) not in windows:
            windows[k, device] = window_matrix(self.max_length, k, seq_len, device, delta.dtype)
        E_0 = windows[k, device]
        return E + (E_0 if delta.dim() == 2 else E_0[:, None])

    def add_samples(self, weights: Tensor, shift: int) -> Tensor:
        """$E_0 + s Δ$ from rows of s Δ: which tokens $E_0$ selects depends on the shift of the layer."""
        sampled = sampled_ranks(self.max_length, weights.shape[-1], shift, weights.device)
        ranks = torch.arange(weights.shape[0], device=weights.device)
        E_0 = (ranks[:, None] == sampled).to(weights.dtype)  # (n, k)
        return weights + (E_0 if weights.dim() == 2 else E_0[:, None])

    def slot_positions(self, k: int, shift: int, device: torch.device) -> Tensor:
        if self.init == "sample" and k == self.delta.shape[-1]:
            return sampled_ranks(self.max_length, k, shift, device).float()
        return super().slot_positions(k, shift, device)

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        assert weights is not None
        device, dtype = tokens.device.type, tokens.dtype
        # Autocast would cast E after it is expanded, once for each row of the batch. It leaves float64 alone.
        if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        E_T = weights.movedim(0, -1).to(dtype)  # (k, n) or (h, k, n)
        return E_T.expand(*tokens.shape[:-2], *E_T.shape[-2:]) @ tokens.to(dtype)

    def merge_columns(self, weights: Tensor, k: int) -> Tensor:
        """Average adjacent columns of E, for heads whose k is smaller than that of the matrix they share."""
        ratio = weights.shape[-1] // k
        means = weights.unflatten(-1, (k, ratio)).mean(-1)
        # A mean of windows is a wider window, but a mean of independent columns is smaller than each of them.
        return torch.add(means.new_zeros(()), means, alpha=ratio**0.5) if self.init == "gaussian" else means

    def live_slots(self, length: T, k: int, shift: int = 0) -> T:
        if self.init == "gaussian":
            return (length > 0) * k  # every token belongs to every slot
        live = (length - shift - 1) * k // self.max_length + 1
        return live + ((live < 1) & (length > 0))  # the first `shift` tokens belong to the first slot

    @torch.no_grad()
    def load_resized(self, other: LinearProjection, same_ratio: bool) -> None:  # type: ignore[override]
        """Cut or repeat Δ along its diagonal at the same n/k; else keep column sums of E, or average its columns."""
        n, k, old_n, old_k = len(self.delta), self.delta.shape[-1], len(other.delta), other.delta.shape[-1]
        if same_ratio and (self.init != "gaussian" or n < old_n):
            self.delta.zero_()
            for row, column in zip(range(0, n, old_n), range(0, k, old_k), strict=True):
                self.delta[row : row + old_n, ..., column : column + old_k] = other.delta[: n - row, ..., : k - column]
            return
        rows, columns = overlap(n, old_n) * old_n, overlap(k, old_k) * k
        if self.init == "gaussian":
            columns = columns / columns.norm(dim=1, keepdim=True)
        learned = other.scale * other.delta.cpu().double()
        self.delta.copy_(torch.einsum("mn,n...k,jk->m...j", rows, learned, columns) / self.scale)

    def extra_repr(self) -> str:
        return f"{tuple(self.delta.shape)}, init={self.init!r}, scale={self.scale:g}"


class WindowProjection(Projection):
    """A map of windows of n/k tokens, each to one slot. A shorter input has fewer slots."""

    def num_slots(self, seq_len: int, k: int) -> int:
        """The number of live slots, but at least 2 where k allows it: compilers specialize on an axis of length 1."""
        return min(k, max(2, self.live_slots(seq_len, k)))

    def windows(self, tokens: Tensor, k: int, fill: float = 0.0) -> Tensor:
        """Cut `tokens` (..., n, d) into windows (..., slots, n/k, d), the last one padded with `fill`."""
        size, slots = self.max_length // k, self.num_slots(tokens.shape[-2], k)
        missing = slots * size - tokens.shape[-2]
        return functional.pad(tokens, (0, 0, 0, missing), value=fill).unflatten(-2, (slots, size))


class ConvProjection(WindowProjection):
    """A depthwise convolution with kernel and stride n/k, (n/k, d_head), which starts as mean pooling.

    Args:
        max_length: n.
        projected_length: k, which divides n.
        num_heads: if set, the number of heads with separate kernels: (h, n/k, d_head).
        head_dim: d_head; each channel has its own kernel.
    """

    commutes = False

    def __init__(self, max_length: int, projected_length: int, num_heads: int | None, head_dim: int) -> None:
        super().__init__(max_length)
        heads = () if num_heads is None else (num_heads,)
        self.kernel = nn.Parameter(torch.empty(*heads, max_length // projected_length, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.kernel, 1 / self.kernel.shape[-2])

    def forward(self, seq_len: int, windows: dict[Any, Tensor] | None = None) -> Tensor:
        return self.kernel

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        assert weights is not None
        windows = self.windows(tokens, k)  # (b, h, k, n/k, d_head)
        return (windows * weights.unsqueeze(-3)).sum(-2).to(tokens.dtype)

    @torch.no_grad()
    def load_resized(self, other: ConvProjection, same_ratio: bool) -> None:  # type: ignore[override]
        """Stretch the kernel to another size, keeping its sums."""
        size, old_size = self.kernel.shape[-2], other.kernel.shape[-2]
        self.kernel.copy_(overlap(size, old_size) * old_size @ other.kernel.cpu().double())


class MeanProjection(WindowProjection):
    """The mean of each window. Padding does not count."""

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        windows = self.windows(tokens, k)  # (b, k, n/k, d)
        slots, size = windows.shape[-3:-1]
        end = tokens.shape[-2] if lengths is None else lengths[:, None]
        counts = (end - size * torch.arange(slots, device=tokens.device)).clamp(1, size)  # (k,) or (b, k)
        # The sum over a long window can exceed the range of float16.
        totals = windows.sum(-2, dtype=torch.promote_types(tokens.dtype, torch.float32))
        return (totals / counts[..., None]).to(tokens.dtype)


class MaxProjection(WindowProjection):
    """The maximum of each window. Padding does not count."""

    commutes = False

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        lowest = torch.finfo(tokens.dtype).min
        if lengths is not None:
            padding = torch.arange(tokens.shape[-2], device=tokens.device) >= lengths[:, None]  # (b, n)
            tokens = tokens.masked_fill(padding[:, None, :, None], lowest)
        maxima = self.windows(tokens, k, fill=lowest).amax(-2)  # (b, h, k, d_head)
        return torch.where(maxima == lowest, 0, maxima)  # a window without real tokens


class IdentityProjection(Projection):
    """No projection: each token has its own slot, as in the standard Transformer."""

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        return tokens

    def slot_mask(
        self, seq_len: int, k: int, shift: int, lengths: Tensor | None, device: torch.device
    ) -> Tensor | None:
        return None if lengths is None else torch.arange(seq_len, device=device) < lengths[:, None]


class NoProjection(Projection):
    """No slots at all: there is only the local window."""

    def shorten(self, tokens: Tensor, k: int, weights: Tensor | None, lengths: Tensor | None) -> Tensor:
        return tokens[..., :0, :]

    def slot_positions(self, k: int, shift: int, device: torch.device) -> Tensor:
        return torch.empty(0, device=device)

    def slot_mask(
        self, seq_len: int, k: int, shift: int, lengths: Tensor | None, device: torch.device
    ) -> Tensor | None:
        return None


WITHOUT_WEIGHTS = {"mean": MeanProjection, "max": MaxProjection, "identity": IdentityProjection, "none": NoProjection}


class SomeHeads(NamedTuple):
    """The part of a linear layer that belongs to some of its heads."""

    linear: nn.Linear
    heads: tuple[int, ...]
    num_heads: int

    @property
    def weight(self) -> Tensor:
        return self.part(self.linear.weight)

    @property
    def bias(self) -> Tensor:
        return self.part(self.linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if can_use_weights(self.linear, x):
            return functional.linear(x, self.weight, self.bias)
        return self.part(self.linear(x), x.dim() - 1)

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return select_heads(tensor.unflatten(dim, (self.num_heads, -1)), self.heads, dim).flatten(dim, dim + 1)


Linear = nn.Linear | SomeHeads


class ReadyProjection(NamedTuple):
    """E or F of one layer, ready to apply to its tokens.

    The weights are plain tensors, so that data parallelism, offloading and checkpointing can move and track them.

    Attributes:
        shorten: the arithmetic, `Projection.shorten`.
        k: the projected length.
        weights: E or a kernel, if there are weights.
        lengths: the number of real tokens of each row, (b,).
        mask: which slots are live, (b or 1, 1, 1, k); `None` if all of them are.
        num_heads: the number of heads that this projection serves.
        commutes: whether E can be applied before W.
        is_identity: whether each token is its own slot.
        rotation: with rotary positions, how to rotate the projected keys; `None` if a key's position is its token's.
    """

    shorten: Callable[[Tensor, int, Tensor | None, Tensor | None], Tensor]
    k: int
    weights: Tensor | None
    lengths: Tensor | None
    mask: Tensor | None
    num_heads: int
    commutes: bool
    is_identity: bool
    rotation: Rotation | None = None

    def __call__(self, x: Tensor, linear: Linear) -> Tensor:
        """$E^T (x W) + b$: (b, n, d) to (b, h, k, d_head)."""
        if self.commutes:  # (Eᵀ x) W applies W to k rows instead of n
            return split_heads(linear(self.shorten(x, self.k, self.weights, self.lengths)), self.num_heads)
        tokens, bias = apply_without_bias(linear, x, self.num_heads)
        return self.shorten(tokens, self.k, self.weights, self.lengths) + bias

    def of_rotated(self, x: Tensor, linear: Linear, rotate: Rotation) -> Tensor:
        r"""$E^T \mathrm{RoPE}(x W + b)$: (b, n, d) to (b, h, k, d_head)."""
        tokens = rotate(split_heads(linear(x), self.num_heads))  # (b, h, n, d_head)
        if self.lengths is not None:  # the bias has made padding nonzero
            real = torch.arange(x.shape[1], device=x.device) < self.lengths[:, None]
            tokens = zero_padding(tokens, real[:, None])
        if not self.commutes:
            return self.shorten(tokens, self.k, self.weights, self.lengths)
        shortened = self.shorten(tokens.transpose(1, 2).flatten(2), self.k, self.weights, self.lengths)
        return split_heads(shortened, self.num_heads)


class MixedProjection(NamedTuple):
    """E or F of one layer whose heads have different k: one `ReadyProjection` for each k.

    Attributes:
        parts: the projections.
        heads: the head indices of each part.
        slots: the number of slots of each of them.
        mask: which slots are live, (b or 1, h, 1, most slots).
        rotation: with rotary positions, how to rotate the projected keys.
    """

    parts: tuple[ReadyProjection, ...]
    heads: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    mask: Tensor
    is_identity: bool = False
    rotation: Rotation | None = None


LayerProjection = ReadyProjection | MixedProjection  # E or F of a layer


def project(
    x: Tensor, E: LayerProjection, F: LayerProjection, key: Linear, value: Linear, rotate: Rotations | None = None
) -> tuple[Tensor, Tensor]:
    """Projected keys and values, (b, h, k, d_head) each, zeros where a head's k is smaller; `rotate` applies first."""
    if isinstance(E, MixedProjection) and isinstance(F, MixedProjection):
        pairs = []
        for E_part, F_part, heads in zip(E.parts, F.parts, E.heads, strict=True):
            own_key, own_value = (SomeHeads(linear, heads, E.mask.shape[1]) for linear in (key, value))  # type: ignore[arg-type]
            pairs.append(project(x, E_part, F_part, own_key, own_value, rotate))
        keys, values = (join_heads(parts, E.heads) for parts in zip(*pairs, strict=True))
        return keys, values
    assert isinstance(E, ReadyProjection)
    assert isinstance(F, ReadyProjection)
    if rotate is not None:
        return E.of_rotated(x, key, rotate.keys), F.of_rotated(x, value, rotate.values)
    if not E.commutes or E.weights is not F.weights:
        return E(x, key), F(x, value)
    shortened = E.shorten(x, E.k, E.weights, E.lengths)  # E = F: once for keys and values
    return split_heads(key(shortened), E.num_heads), split_heads(value(shortened), E.num_heads)


class Projections(nn.ModuleList):
    """The projections of a model: 2·layers·heads, 2·layers, layers or 1 learned matrices, or none.

    Args:
        projected_lengths: k of each head of each layer; 0 in a layer that has only its local window.
        max_length: n.
        head_dim: d_head.
        projection, sharing, init: the fields `projection`, `sharing` and `projection_init` of `LinformerConfig`.
        scale: c; E learns at the relative rate s = c·k/n, with the largest k.
        shifts: by how many rows E and F are moved down in each layer. Row 0 is repeated for the first `shift` tokens,
            so the first window grows and the last one shrinks.
        rope_theta: the base of the frequencies of rotary positions; `None` without them.
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
        scale: float,
        shifts: Sequence[int],
        rope_theta: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = head_dim, rope_theta
        self.max_length = max_length
        self.shifts = tuple(shifts)
        self.groups = [group_heads(lengths) for lengths in projected_lengths]  # (k, heads) of each layer
        self.module_ids: list[tuple[list[int], list[int]]] = []  # of each layer: for E and for F, one per group
        largest = max(k for lengths in projected_lengths for k in lengths)

        def add(k: int, num_heads: int | None = None) -> int:
            if k == 0:
                self.append(NoProjection(max_length))
            elif projection == "linear":
                s = scale * largest / max_length
                self.append(LinearProjection(max_length, k, num_heads, init=init, scale=s))
            elif projection == "conv":
                self.append(ConvProjection(max_length, k, num_heads, head_dim))
            else:
                self.append(WITHOUT_WEIGHTS[projection](max_length))
            return len(self) - 1

        shared = add(largest) if sharing == "layerwise" or projection in WITHOUT_WEIGHTS else None
        for groups in self.groups:
            k = max(k for k, _ in groups)
            if k == 0:  # the local window alone
                E = F = [add(0)]
            elif shared is not None:
                E = F = [shared] * len(groups)
            elif sharing == "key-value":  # one module per layer
                E = F = [add(k)] * len(groups)
            elif sharing == "headwise":  # two modules per layer
                E, F = [add(k)] * len(groups), [add(k)] * len(groups)
            else:  # "none": two modules per layer and k, each with a matrix for every head
                E = [add(k, len(heads)) for k, heads in groups]
                F = [add(k, len(heads)) for k, heads in groups]
            self.module_ids.append((E, F))

    @classmethod
    def from_config(cls, config: LinformerConfig) -> Projections:
        return cls(
            config.projected_lengths,
            config.max_position_embeddings,
            config.hidden_size // config.num_attention_heads,
            projection=config.projection,
            sharing=config.sharing,
            init=config.resolved_projection_init,
            scale=config.resolved_projection_scale,
            shifts=config.window_shifts,
            rope_theta=config.rope_theta if config.is_rotary else None,
        )

    def forward(
        self,
        seq_len: int,
        lengths: Tensor | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> list[tuple[LayerProjection, LayerProjection]]:
        """E and F of each layer, for rows of `seq_len` tokens of which `lengths` (b,) are real, or all if `None`.

        `dtype` is that of the tokens, and matters to rotary positions only.
        """
        windows: dict[Any, Tensor] = {}
        weights: list[Any] = []
        max_shift = max(self.shifts) if seq_len else 0
        for module in self:
            E = module(seq_len, windows)
            # In a layer with shift s, token r uses row max(r - s, 0): prepend copies of row 0, then slice.
            weights.append(E if E is None or not max_shift else torch.cat([E[:1].expand(max_shift, *E.shape[1:]), E]))

        masks: dict[tuple[int, int], Tensor | None] = {}  # live slots by k and shift
        rotations: dict[tuple[int, int, int], Rotation | None] = {}  # of projected keys, by module, k and shift
        pairs: list[tuple[LayerProjection, LayerProjection]] = []
        for shift, groups, (E_ids, F_ids) in zip(self.shifts, self.groups, self.module_ids, strict=True):
            E_and_F: list[LayerProjection] = []
            for ids in (E_ids,) if F_ids is E_ids else (E_ids, F_ids):
                parts = []
                for module_id, (k, heads) in zip(ids, groups, strict=True):
                    projection: Any = self[module_id]
                    E = weights[module_id]
                    if max_shift and E is not None:
                        E = E.narrow(0, max_shift - shift, seq_len)
                    if isinstance(projection, LinearProjection):
                        E = projection.add_samples(E, shift) if projection.init == "sample" else E
                        E = projection.merge_columns(E, k) if E.shape[-1] != k else E
                    if (k, shift) not in masks:
                        mask = projection.slot_mask(seq_len, k, shift, lengths, device)
                        masks[k, shift] = None if mask is None else mask[:, None, None, :]
                    if self.rope_theta is not None and (module_id, k, shift) not in rotations:
                        rotations[module_id, k, shift] = self.rotation(projection, seq_len, k, shift, device, dtype)
                    commutes = projection.commutes and (E is None or E.dim() == 2)
                    part = ReadyProjection(
                        projection.shorten,
                        k,
                        weights=E,
                        lengths=lengths,
                        mask=masks[k, shift],
                        num_heads=len(heads),
                        commutes=commutes,
                        is_identity=isinstance(projection, IdentityProjection),
                        rotation=rotations.get((module_id, k, shift)),
                    )
                    parts.append(part)
                if len(parts) == 1:
                    E_and_F.append(parts[0])
                else:
                    slots = [projection.num_slots(seq_len, k) for k, _ in groups]
                    E_and_F.append(mixed(parts, [heads for _, heads in groups], slots, device))
            pairs.append((E_and_F[0], E_and_F[-1]))  # the same one twice where E = F
        return pairs

    def rotation(
        self, projection: Projection, seq_len: int, k: int, shift: int, device: torch.device, dtype: torch.dtype
    ) -> Rotation | None:
        """With rotary positions, how to rotate projected keys; `None` if each token has its own."""
        assert self.rope_theta is not None
        if isinstance(projection, IdentityProjection):
            return None
        positions = projection.slot_positions(k, shift, device)[: projection.num_slots(seq_len, k)]
        return Rotation.of(positions, self.head_dim, self.rope_theta, dtype)


def mixed(
    parts: Sequence[ReadyProjection], heads: Sequence[tuple[int, ...]], slots: Sequence[int], device: torch.device
) -> MixedProjection:
    """Join the projections of heads with different k."""
    masks = []
    for E, count in zip(parts, slots, strict=True):
        mask = torch.ones(1, 1, 1, count, dtype=torch.bool, device=device) if E.mask is None else E.mask
        masks.append(mask.mT.expand(-1, E.num_heads, -1, -1))
    rotation = None
    if parts[0].rotation is not None:
        tables = [[x.expand(1, E.num_heads, -1, -1) for x in E.rotation or ()] for E in parts]
        rotation = Rotation(*(join_heads(table, heads) for table in zip(*tables, strict=True)))
    joined = join_heads(masks, heads).mT
    return MixedProjection(tuple(parts), tuple(heads), tuple(slots), joined, rotation=rotation)


def group_heads(projected_lengths: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Group the heads of a layer by k."""
    return [
        (k, tuple(head for head, length in enumerate(projected_lengths) if length == k))
        for k in dict.fromkeys(projected_lengths)
    ]


def select_heads(tensor: Tensor, heads: Sequence[int], dim: int = 1) -> Tensor:
    """Some heads of `tensor`; a view if they are adjacent."""
    if heads[-1] - heads[0] + 1 == len(heads):
        return tensor.narrow(dim, heads[0], len(heads))
    # Indexing with a list would copy it to the device each time.
    return torch.stack([tensor.select(dim, head) for head in heads], dim)


def join_heads(parts: Sequence[Tensor], heads: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate parts (b, heads, slots, d) in head order, zero-padding each to the largest number of slots."""
    slots = max(part.shape[2] for part in parts)
    by_head = {
        head: functional.pad(part[:, i], (0, 0, 0, slots - part.shape[2]))
        for part, own in zip(parts, heads, strict=True)
        for i, head in enumerate(own)
    }
    return torch.stack([by_head[head] for head in range(len(by_head))], 1)


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """(b, n, d) to (b, h, n, d_head)."""
    return tokens.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def apply_without_bias(linear: Linear, x: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """$x W$ (b, h, n, d_head) and b (h, 1, d_head): the bias is added after projecting."""
    if can_use_weights(linear, x):
        tokens, bias = functional.linear(x, linear.weight), linear.bias
    else:
        bias = linear(x.new_zeros(x.shape[-1]))
        tokens = linear(x) - bias
    tokens = split_heads(tokens, num_heads)
    return tokens, bias.unflatten(0, (num_heads, 1, -1)).to(tokens.dtype)


def can_use_weights(linear: Linear, tokens: Tensor) -> bool:
    """Whether a layer can be computed from its weights; an adapted, offloaded or hooked layer must be called."""
    linear = linear.linear if isinstance(linear, SomeHeads) else linear
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and linear.weight.device == tokens.device and not hooked


def window_matrix(
    n: int, k: int, seq_len: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The first `seq_len` rows of E₀: column j averages the rows r with ⌊r·k/n⌋ = j, also where k does not divide n."""
    owner = torch.arange(seq_len, device=device) * k // n  # (n,)
    size = ((owner + 1) * n + k - 1) // k - (owner * n + k - 1) // k
    owned = owner[:, None] == torch.arange(k, device=device)  # (n, k)
    return owned.to(dtype) / size[:, None]


def sampled_ranks(n: int, k: int, shift: int, device: torch.device) -> Tensor:
    """The token that each column of E₀ selects, (k,): one from each window, and token 0, which every input has."""
    ranks = (torch.arange(k, device=device) * n + k - 1) // k + shift
    return ranks * (ranks > shift)


def overlap(new: int, old: int) -> Tensor:
    """How much of each of `new` equal parts of the unit interval lies in each of `old` parts, (new, old)."""
    new_edges = torch.arange(new + 1, dtype=torch.float64)[:, None] / new
    old_edges = torch.arange(old + 1, dtype=torch.float64) / old
    shared = torch.minimum(new_edges[1:], old_edges[1:]) - torch.maximum(new_edges[:-1], old_edges[:-1])
    return shared.clamp(min=0)
