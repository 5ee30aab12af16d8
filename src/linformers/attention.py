r"""Multi-head linear attention, equation 7: $\mathrm{softmax}(Q W_Q (E^T K W_K)^T / \sqrt{d})\, F^T V W_V$."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import reference
from .checks import check_choice, check_shape
from .errors import UserError
from .maps import LinearMap, SequenceMap, Weights
from .ops.attend import attend
from .ops.dispatch import use_triton
from .ops.local import attend_locally
from .ops.ranks import Ranks, move_back, move_to_front

# The name of our kernels among transformers' attention functions, whose registry is global; ours is "triton".
TRITON = "linformer_triton"

# transformers' other attention functions take masks of n by n tokens, where projected keys need n by k slots.
MASKING_IMPLEMENTATIONS = ("eager", "sdpa", "triton")


class ProjectedAttention(nn.Module):
    r"""Attention onto projected keys and values, with E and F handed in at each call.

    $$\mathrm{head}_i = \mathrm{softmax}\left(\frac{(x W_Q + b_Q)\,(E^T x W_K + b_K)^T}{\sqrt{d_{head}}}\right)
    (F^T x W_V + b_V)$$

    The biases are added after projecting. Where one E serves all heads it commutes with W, and $(E^T x) W$ costs k
    rows of W instead of n; otherwise the order is the paper's, $E^T (x W)$. With a local window, each query also sees,
    in the same softmax, the exact keys $x W_K + b_K$ at most w positions away.

    Args:
        hidden_size: d, the channels of input and output.
        num_heads: h.
        projected_lengths: k of each head. Heads of equal k attend together, so that a smaller k costs less.
        sequence_map: what multiplying with $E^T$ is here: a matrix product, pooling, a convolution.
        dropout: the probability with which an entry of $\bar P$ is dropped in training.
        layer_idx: the number of the layer in its model, if it has one.
        local_window: w, or 0 for none.
    """

    is_causal = False  # transformers' attention functions read it

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        projected_lengths: Sequence[int],
        sequence_map: SequenceMap,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        local_window: int = 0,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.groups = group_heads(projected_lengths)
        self.sequence_map = sequence_map
        self.dropout = dropout
        self.layer_idx = layer_idx
        self.local_window = local_window
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    @property
    def tokens_per_key(self) -> float:
        """How many tokens the finest keys hold: 1 where there are exact ones, n/k otherwise."""
        return 1 if self.local_window else self.sequence_map.max_length / self.finest_length

    @property
    def finest_length(self) -> int:
        """The largest k of a head."""
        return max(group.projected_length for group in self.groups)

    def forward(
        self,
        hidden_states: Tensor,
        E: Weights,
        F: Weights,
        ranks: Ranks | None = None,
        context: Tensor | None = None,
        context_ranks: Ranks | None = None,
        attn_implementation: str = "triton",
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from `hidden_states` (b, n, d) to its own projection, or to that of `context`.

        Both are 0 at padding: whoever calls has seen to that, at a place where it costs nothing.

        Returns:
            The result (b, n, d) and, from `attn_implementation="eager"`, $\bar P$ (b, h, n, k), with a local window
            (b, h, n, k + 2w + 1): behind the projected keys the exact ones, from w positions before a query on.
        """
        moved_by = None
        if self.local_window and ranks is not None:  # neighbours must stand side by side
            moved_by, hidden_states, ranks = ranks, move_to_front(hidden_states, ranks), ranks.sorted()
        if context is None:
            context, context_ranks = hidden_states, ranks

        query = self._split_heads(self.query(hidden_states))  # (b, h, n, d_head)
        lengths = None if ranks is None else ranks.lengths
        results = [
            self._attend(projected.group.of(query, dim=1), projected, lengths, attn_implementation)
            for projected in self.project(context, E, F, context_ranks)
        ]
        heads = self._in_order([result for result, _ in results], dim=2)  # (b, n, h, d_head)
        output, probs = self.output(heads.flatten(2)), self._merge_probs([probs for _, probs in results])
        if moved_by is not None:
            output = move_back(output, moved_by)
            if probs is not None:
                by_query = move_back(probs.transpose(1, 2).flatten(2), moved_by)
                probs = by_query.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return output, probs

    def project(self, context: Tensor, E: Weights, F: Weights, ranks: Ranks | None) -> list[Projected]:
        """The projected keys and values of each group of heads and, with a local window, the exact ones."""
        lengths = None if ranks is None else ranks.lengths
        if ranks is not None and self.sequence_map.needs_order:
            context = move_to_front(context, ranks)

        shared_by_heads = E is None or (isinstance(E, Tensor) and E.dim() == 2)
        if shared_by_heads and self.sequence_map.commutes:
            short_keys = self._shorten(context, E, lengths)  # type: ignore[arg-type]
            short_values = short_keys if F is E else self._shorten(context, F, lengths)  # type: ignore[arg-type]
            keys = [self._linear(self.key, x, group) for x, group in zip(short_keys, self.groups, strict=True)]
            values = [self._linear(self.value, x, group) for x, group in zip(short_values, self.groups, strict=True)]
            near_key = self._split_heads(self.key(context)) if self.local_window else None
            near_value = self._split_heads(self.value(context)) if self.local_window else None
        else:
            keys, near_key = self._linear_then_shorten(self.key, context, E, lengths)
            values, near_value = self._linear_then_shorten(self.value, context, F, lengths)
        return [
            Projected(
                group,
                key,
                value,
                self.sequence_map.slot_mask(context, group.projected_length, ranks),
                None if near_key is None else group.of(near_key, dim=1),
                None if near_value is None else group.of(near_value, dim=1),
            )
            for group, key, value in zip(self.groups, keys, values, strict=True)
        ]

    def _shorten(self, context: Tensor, E: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
        """$E^T x$ for each group of heads, (b, k, d)."""
        finest = self.finest_length
        if isinstance(self.sequence_map, LinearMap) and all(finest % g.projected_length == 0 for g in self.groups):
            # Averaging the finest projected tokens is cheaper than projecting the whole input again.
            projected = self.sequence_map(context, finest, E, lengths)
            return [self.sequence_map.coarsen(projected, group.projected_length) for group in self.groups]
        return [self.sequence_map(context, group.projected_length, E, lengths) for group in self.groups]

    def _linear(self, linear: nn.Linear, tokens: Tensor, group: HeadGroup) -> Tensor:
        """$x W + b$ for the heads of a group: (b, k, d) to (b, h, k, d_head)."""
        if len(self.groups) == 1:
            return self._split_heads(linear(tokens))
        if not is_plain(linear, tokens):
            return group.of(self._split_heads(linear(tokens)), dim=1)
        weight = group.of(linear.weight.unflatten(0, (self.num_heads, -1)), dim=0).flatten(0, 1)
        bias = group.of(linear.bias.unflatten(0, (self.num_heads, -1)), dim=0).flatten()
        return self._split_heads(functional.linear(tokens, weight, bias))

    def _linear_then_shorten(
        self, linear: nn.Linear, context: Tensor, E: Weights, lengths: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """$E^T (x W) + b$ for each group of heads, (b, h, k, d_head); for a local window, $x W + b$ of all tokens."""
        if is_plain(linear, context):
            tokens, bias = functional.linear(context, linear.weight), linear.bias
        else:
            bias = linear(context.new_zeros(self.hidden_size))
            tokens = linear(context) - bias
        heads = self._split_heads(tokens)  # (b, h, n, d_head)
        bias = bias.unflatten(0, (self.num_heads, 1, -1)).to(heads.dtype)  # (h, 1, d_head)
        results = []
        for group in self.groups:
            k = group.projected_length
            short = self.sequence_map(group.of(heads, dim=1), k, group.weights(E), lengths)
            results.append(short + group.of(bias, dim=0))
        return results, heads + bias if self.local_window else None

    def _attend(
        self, query: Tensor, projected: Projected, lengths: Tensor | None, attn_implementation: str
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' output (b, n, h, d_head) and, from the eager implementation, P̄."""
        _, key, value, slots, near_key, near_value = projected
        mask = None
        if slots is not None or self.local_window:
            if attn_implementation not in (*MASKING_IMPLEMENTATIONS, TRITON):
                reason = "padding or an input shorter than n" if slots is not None else "a local window"
                raise UserError(
                    f"attn_implementation={attn_implementation!r} cannot leave out keys, and {reason} makes that "
                    f"necessary here; use one of {MASKING_IMPLEMENTATIONS}"
                )
            mask = None if slots is None else slots[:, None, None, :]
            if attn_implementation == "sdpa" and mask is not None and not self.local_window:
                value, mask = show_zeros(value, mask)
        name, dropout = full_name(attn_implementation), self.dropout if self.training else 0.0

        def attend_all(*inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
            return interface(self, *inputs, scaling=self.scaling, dropout=dropout, is_causal=False)

        if near_key is None or near_value is None:
            return attend_all(query, key, value, mask)
        inputs = (query, key, value, near_key, near_value)
        options: dict[str, Any] = {"window": self.local_window, "mask": mask, "lengths": lengths}
        if name == TRITON:
            if use_triton(query, key, mask, local=True):
                return attend(*inputs, **options, scaling=self.scaling, dropout=dropout), None
            name = "sdpa"
        return attend_locally(attend_all, *inputs, **options)

    def _split_heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, n, d_head)

    def _in_order(self, parts: list[Tensor], dim: int) -> Tensor:
        """Join what the groups made along their axis of heads, in the order of the heads."""
        if len(parts) == 1:
            return parts[0]
        by_number = {
            head: part.select(dim, place)
            for group, part in zip(self.groups, parts, strict=True)
            for place, head in enumerate(group.heads)
        }
        return torch.stack([by_number[head] for head in range(self.num_heads)], dim)

    def _merge_probs(self, probs: list[Any]) -> Tensor | None:
        if len(probs) == 1 or probs[0] is None:
            return probs[0]
        near = 2 * self.local_window + 1 if self.local_window else 0
        widest = max(p.shape[-1] for p in probs) - near
        padded = []
        for p in probs:
            projected, exact = p.split([p.shape[-1] - near, near], -1)
            padded.append(torch.cat([functional.pad(projected, (0, widest - projected.shape[-1])), exact], -1))
        return self._in_order(padded, dim=1)


class Projected(NamedTuple):
    """What a group of heads attends to.

    Attributes:
        group: the heads.
        key: the projected keys, (b, h, k, d_head).
        value: the projected values, (b, h, k, d_head).
        slots: which of them are filled, (b or 1, k); `None` if all are.
        near_key: the exact keys, (b, h, n, d_head), where there is a local window.
        near_value: the exact values, (b, h, n, d_head), likewise.
    """

    group: HeadGroup
    key: Tensor
    value: Tensor
    slots: Tensor | None
    near_key: Tensor | None
    near_value: Tensor | None


class HeadGroup(NamedTuple):
    """Heads that have the same projected length and attend together."""

    projected_length: int
    heads: list[int]

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The part of `tensor` that belongs to these heads; no copy where they are neighbours."""
        first, last = self.heads[0], self.heads[-1]
        if last - first + 1 == len(self.heads):
            return tensor.narrow(dim, first, len(self.heads))
        # Not by a list of numbers as index, which would have to travel to the device each time.
        return torch.stack([tensor.select(dim, head) for head in self.heads], dim)

    def weights(self, E: Weights) -> Tensor | None:
        """These heads' own E, (h, n, k), or the one (n, k) that all heads share."""
        if E is None or (isinstance(E, Tensor) and E.dim() == 2):
            return E
        return torch.stack([E[head] for head in self.heads])


def is_plain(linear: nn.Linear, tokens: Tensor) -> bool:
    """Whether a layer is no more than its weight: only calling is right for others: adapted, offloaded, hooked."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and linear.weight.device == tokens.device and not hooked


def group_heads(projected_lengths: Sequence[int]) -> list[HeadGroup]:
    return [
        HeadGroup(k, [head for head, length in enumerate(projected_lengths) if length == k])
        for k in dict.fromkeys(projected_lengths)
    ]


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.attend` behind transformers' attention interface."""
    output, probs = reference.attend(query, key, value, attention_mask, scaling=scaling, dropout=dropout)
    return output.transpose(1, 2), probs


def triton_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`ops.attend.attend` behind transformers' attention interface, and SDPA where that serves better."""
    if use_triton(query, key, attention_mask):
        return attend(query, key, value, mask=attention_mask, scaling=scaling, dropout=dropout), None
    if attention_mask is not None:
        value, attention_mask = show_zeros(value, attention_mask)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


ALL_ATTENTION_FUNCTIONS.register(TRITON, triton_attention)


def check_attention(attn_implementation: str) -> None:
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    if attn_implementation not in known:
        named = [name for name in known if name != TRITON and "|" not in name]  # those with | are for generating text
        check_choice("attn_implementation", attn_implementation, ["eager", "triton", *named])


def full_name(attn_implementation: str) -> str:
    """The name under which transformers knows an attention function."""
    return TRITON if attn_implementation == "triton" else attn_implementation


def show_zeros(value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Let a row without any real token attend to zeros, since SDPA would make NaN of it.

    Args:
        value: (b, h, k, d_head).
        mask: true at visible slots, (b or 1, 1, 1, k).
    """
    return torch.where(mask.mT, value, 0), mask | ~mask.any(-1, keepdim=True)


def ranks_of(name: str, mask: Tensor | None, tokens: Tensor) -> Ranks | None:
    """The ranks of the real tokens of `tokens` (b, n, ...), once its mask has been checked."""
    if mask is None:
        return None
    check_shape(name, mask, tokens.shape[:2])
    if mask.is_floating_point() or mask.is_complex():
        raise UserError(f"{name} has type {mask.dtype}, expected bool or integers: 1 for a real token, 0 for padding")
    return Ranks.of(mask)
