r"""Multi-head linear attention, equation 7: $\mathrm{softmax}(Q W_Q (E^T K W_K)^T / \sqrt{d_{head}})\, F^T V W_V$."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import checks, reference
from .config import (
    NO_CAUSAL,
    PROJECTION_INITS,
    PROJECTIONS,
    SHARINGS,
    WITHOUT_K,
    check_heads,
    check_local_window,
    check_one_per,
    check_projected_lengths,
    default_scale,
)
from .errors import UserError
from .ops.attend import attend as triton_attend
from .ops.compiling import is_exporting
from .ops.dispatch import use_triton
from .ops.local import attend_locally
from .ops.local_cpu import attend_locally_on_cpu
from .ops.ranks import Ranks, reorder, zero_padding
from .ops.rotary import Rotations
from .projections import (
    LayerProjection,
    MixedProjection,
    Projections,
    join_heads,
    project,
    select_heads,
    split_heads,
)

# The name of our kernels in transformers' global registry of attention functions; users write "triton".
TRITON = "linformer_triton"
# The implementations that can mask slots. transformers' other ones expect masks of n by n tokens.
MASKING_IMPLEMENTATIONS = ("eager", "sdpa", TRITON)

FAR_BIAS_SCALE = 10.0


class ProjectedAttention(nn.Module):
    r"""Multi-head attention onto projected keys and values; each call is given E and F.

    $$\mathrm{head}_i = \mathrm{softmax}\left(\frac{(x W_Q + b_Q)\,(E^T x W_K + b_K)^T}{\sqrt{d_{head}}}\right)
    (F^T x W_V + b_V)$$

    With a local window, each query also attends, in the same softmax, to the exact keys $x W_K + b_K$ at most w
    positions away.

    Args:
        hidden_size: d, the channels of input and output.
        num_heads: h.
        dropout: the probability of dropping an entry of $\bar P$ in training.
        local_window: w, or 0 for none.
        far_bias: where each head's learned bias of the scores of its projected keys starts; `None` for no bias.
    """

    is_causal = False  # read by transformers' attention functions

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        local_window: int = 0,
        far_bias: float | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.local_window = local_window
        self.rotates_first = not local_window  # with rotary positions: see `reference.linformer_attention`
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        # In a whole run, Adam moves a parameter by about 2, too little for a bias of -6: it is a tenth of the bias.
        self.initial_far_bias = far_bias
        self.scaled_far_bias = None
        if far_bias is not None:
            self.scaled_far_bias = nn.Parameter(torch.full((num_heads,), far_bias / FAR_BIAS_SCALE))

    def forward(
        self,
        x: Tensor,
        E: LayerProjection,
        F: LayerProjection,
        lengths: Tensor | None = None,
        ranks: Ranks | None = None,
        context: Tensor | None = None,
        context_ranks: Ranks | None = None,
        attn_implementation: str = TRITON,
        rotations: Rotations | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from `x` (b, n, d) to its own projection, or to that of `context` (b, m, d).

        `x` and `context` must be 0 at padding. Rows are sorted by rank (real tokens first) unless `ranks` is given.

        Args:
            x: the source of the queries and, without `context`, of the keys and values.
            E, F: the projections of keys and values.
            lengths: the number of real tokens of each row of `x`, (b,), for the local window; E and F have their own.
            ranks: how to sort the rows of `x`, if they are not sorted.
            context: the source of keys and values, if it is not `x`.
            context_ranks: how to sort the rows of `context`.
            attn_implementation: a name in transformers' registry of attention functions.
            rotations: with rotary positions, how to rotate tokens that are sorted by rank.

        Returns:
            The result (b, n, d) and, with `attn_implementation="eager"`, $\bar P$ (b, h, n, k) or, with a local window,
            (b, h, n, k + 2w + 1): the projected keys, then the exact ones from w positions before the query to w after.
        """
        source, source_ranks = (x, ranks) if context is None else (context, context_ranks)
        if source_ranks is not None and E.is_identity:  # each token is a key, in any order
            E = E._replace(mask=source_ranks.mask[:, None, None])
        elif source_ranks is not None:
            source = reorder(source, source_ranks.order)
        if self.local_window and ranks is not None:  # neighbors must be adjacent
            x = source

        rotates_first = self.rotates_first and not E.is_identity
        query = split_heads(self.query(x), self.num_heads)  # Q W_Q                          (b, h, n, d_head)
        key, value = project(  # Eᵀ K W_K and Fᵀ V W_V                                       (b, h, k, d_head)
            source, E, F, self.key, self.value, rotations if rotates_first else None
        )
        if rotations is not None:  # of rows in order, or of tokens in their places
            in_order = ranks is None or self.local_window
            rotate = rotations if in_order else rotations.at(ranks.places)  # type: ignore[union-attr]
            query, key = rotate.keys(query), key if rotates_first else (E.rotation or rotate.keys)(key)
        near = None
        if self.local_window:  # the exact keys and values, K W_K and V W_V                  (b, h, n, d_head)
            near_key, near_value = split_heads(self.key(x), self.num_heads), split_heads(self.value(x), self.num_heads)
            near = near_key if rotations is None else rotations.keys(near_key), near_value
        far_bias = None
        if near is not None and self.scaled_far_bias is not None:
            far_bias = FAR_BIAS_SCALE * self.scaled_far_bias
        heads, probs = self.attend(query, key, value, near, far_bias, E, lengths, attn_implementation)
        if rotations is not None and rotates_first:  # values were rotated, too: back by the position of the query
            heads = rotate.values.inverse()(heads.transpose(1, 2)).transpose(1, 2)
        output = self.output(heads.flatten(2))  # from (b, n, h, d_head)

        if self.local_window and ranks is not None:
            output = reorder(output, ranks.places)
            probs = None if probs is None else reorder(probs.transpose(1, 2), ranks.places).transpose(1, 2)
        return output, probs

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        near: tuple[Tensor, Tensor] | None,
        far_bias: Tensor | None,
        E: LayerProjection,
        lengths: Tensor | None,
        attn_implementation: str,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attention as `reference.attend` and, with `near`, `reference.attend_locally` define it.

        E has the mask of slots and, if heads differ in k, their groups.

        Returns:
            The result (b, n, h, d_head) and, with `attn_implementation="eager"`, $\bar P$.
        """
        if isinstance(E, MixedProjection) and attn_implementation != "eager":
            parts = []
            for part, heads, slots in zip(E.parts, E.heads, E.slots, strict=True):  # a smaller k costs less
                own = functools.partial(select_heads, heads=heads)
                own_near = None if near is None else (own(near[0]), own(near[1]))
                own_key, own_value = own(key)[:, :, :slots], own(value)[:, :, :slots]
                own_bias = None if far_bias is None else select_heads(far_bias, heads, 0)
                inputs = own(query), own_key, own_value, own_near, own_bias, part, lengths
                result, _ = self.attend(*inputs, attn_implementation)
                parts.append(result.transpose(1, 2))
            return join_heads(parts, E.heads).transpose(1, 2), None

        mask, name, dropout = E.mask, attn_implementation, self.dropout if self.training else 0.0
        if name not in MASKING_IMPLEMENTATIONS and (mask is not None or near is not None):
            reason = "padding or an input shorter than n" if near is None else "a local window"
            raise UserError(
                f"attn_implementation={name!r} cannot mask keys, as {reason} requires; use 'eager', 'sdpa' or 'triton'"
            )
        if name == TRITON:
            if use_triton(query, key, mask, local=near is not None):
                near_key, near_value = near or (None, None)
                options = {"mask": mask, "lengths": lengths, "scaling": self.scaling, "dropout": dropout}
                options |= {"window": self.local_window, "far_bias": far_bias}
                return triton_attend(query, key, value, near_key, near_value, **options), None
            name = "sdpa"
        if name == "sdpa" and mask is not None and near is None:
            # SDPA returns NaN for a row without any live slot: let it attend to zeros instead.
            value, mask = torch.where(mask.mT, value, 0), mask | ~mask.any(-1, keepdim=True)
        if name == "sdpa" and near is not None and query.device.type == "cpu" and not dropout and not is_exporting():
            options = {"mask": mask, "lengths": lengths, "far_bias": far_bias, "scaling": self.scaling}
            return attend_locally_on_cpu(query, key, value, *near, window=self.local_window, **options), None
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        attend = functools.partial(interface, self, scaling=self.scaling, dropout=dropout, is_causal=False)
        if near is None:
            return attend(query, key, value, mask)
        if far_bias is not None:
            query, key, near = with_far_bias(query, key, near, far_bias / self.scaling)
        return attend_locally(attend, query, key, value, *near, window=self.local_window, mask=mask, lengths=lengths)


class LinformerAttention(ProjectedAttention):
    r"""Multi-head linear attention with its own E and F, as a layer for any model.

    ```python
    attention = LinformerAttention(hidden_size=768, num_heads=12, max_length=4096, projected_length=256)
    y = attention(x, attention_mask)                    # self-attention
    y = attention(x, context=z, context_mask=z_mask)    # queries from x, projected keys and values from z
    ```

    Args:
        hidden_size: d, the channels of input and output.
        num_heads: h.
        max_length: n, the longest sequence of keys and values.
        projected_length: k, or one per head.
        sharing, projection, projection_init, local_window: see `LinformerConfig`; in a single layer, `"layerwise"`
            sharing equals `"key-value"`.
        projection_scale: c in $E = E_0 + c \frac{k}{n} \Delta$; `None` means 0.12.
        window_shift: by how many tokens the initial windows of E are shifted, less than ⌊n/k⌋.
        dropout: the probability of dropping an entry of $\bar P$ in training.
        attn_implementation: `"triton"` (our kernels where they are faster, SDPA elsewhere), `"sdpa"`, `"eager"`, or any
            other name that transformers knows.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        projected_length: int | Sequence[int],
        *,
        sharing: str = "headwise",
        projection: str = "linear",
        projection_init: str = "window",
        projection_scale: float | None = None,
        window_shift: int = 0,
        local_window: int = 0,
        dropout: float = 0.0,
        attn_implementation: str = "triton",
    ) -> None:
        hidden_size, num_heads, max_length, window_shift, local_window = checks.to_builtin(
            (hidden_size, num_heads, max_length, window_shift, local_window)
        )
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("max_length", max_length)):
            checks.check_size(name, size)
        check_heads(hidden_size, num_heads, "num_heads")
        checks.check_probability("dropout", dropout)
        checks.check_choice("sharing", sharing, SHARINGS)
        checks.check_choice("projection", projection, PROJECTIONS)
        checks.check_choice("projection_init", projection_init, PROJECTION_INITS)
        if projection_scale is not None:
            checks.check_positive("projection_scale", projection_scale, " or None")
        check_local_window(local_window, projection)
        lengths = checks.to_builtin(projected_length)
        check_one_per("projected_length", lengths, "head", num_heads)
        if not isinstance(lengths, list):
            lengths = [lengths] * num_heads
        if projection in WITHOUT_K:
            lengths = [max_length if projection == "identity" else 0] * num_heads
        else:
            check_projected_lengths(
                [lengths], max_length, projection=projection, sharing=sharing, length_name="max_length"
            )
        has_windows = projection == "linear" and projection_init != "gaussian"
        max_shift = max_length // max(lengths) - 1 if has_windows else 0
        if not checks.is_number(window_shift, int) or not 0 <= window_shift <= max_shift:
            raise UserError(f"window_shift={window_shift!r} must be an integer from 0 to {max_shift}, below ⌊n/k⌋")
        super().__init__(hidden_size, num_heads, dropout, local_window)
        self.max_length = max_length
        self.attn_implementation = registered_name(attn_implementation)
        self.projections = Projections(
            [lengths],
            max_length,
            self.head_dim,
            projection=projection,
            sharing=sharing,
            init=projection_init,
            scale=projection_scale or default_scale("headwise", has_local_window=False),
            shifts=[window_shift],
        )

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        is_causal: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        r"""Attend from `hidden_states` (b, n, d) to its own projection, or to that of `context` (b, m, d).

        Args:
            hidden_states: the source of the queries and, without `context`, of the keys and values.
            attention_mask: true or 1 at the real tokens of `hidden_states`, (b, n); padding is ignored.
            context: the source of keys and values, if it is another sequence.
            context_mask: true or 1 at the real tokens of `context`, (b, m).
            is_causal: not supported; the error says why.
            output_attentions: also return $\bar P$ (b, h, n, k).
        """
        if is_causal:
            raise UserError(f"is_causal=True is not supported: {NO_CAUSAL}")
        if context is not None and self.local_window:
            raise UserError(f"local_window={self.local_window} supports only self-attention, not a context")
        if context_mask is not None and context is None:
            raise UserError("context_mask was given without context; the mask of hidden_states is attention_mask")
        checks.check_tensor("hidden_states", hidden_states, ("batch", "length", self.hidden_size))
        dtype, autocast = self.query.weight.dtype, torch.is_autocast_enabled(hidden_states.device.type)
        for name, tensor in (("hidden_states", hidden_states), ("context", context)):
            if tensor is not None and tensor.dtype != dtype and not autocast:
                raise UserError(f"{name} has type {tensor.dtype}, but the layer has {dtype}: convert one")
        ranks = checked_ranks("attention_mask", attention_mask, hidden_states)
        name, source, source_ranks, context_ranks = "hidden_states", hidden_states, ranks, None
        if context is not None:
            checks.check_tensor("context", context, (hidden_states.shape[0], "length", self.hidden_size))
            context_ranks = checked_ranks("context_mask", context_mask, context)
            name, source, source_ranks = "context", context, context_ranks
        if source.shape[1] > self.max_length:
            checks.refuse_length(name, source.shape[1], self.max_length, "create the layer with a larger max_length")
        lengths = None if source_ranks is None else source_ranks.lengths
        ((E, F),) = self.projections(source.shape[1], lengths, source.device)
        output, probs = super().forward(
            hidden_states if ranks is None else zero_padding(hidden_states, ranks.mask),
            E,
            F,
            None if ranks is None else ranks.lengths,
            ranks,
            context if context_ranks is None or context is None else zero_padding(context, context_ranks.mask),
            context_ranks,
            "eager" if output_attentions else self.attn_implementation,
        )
        return (output, probs) if output_attentions else output


def with_far_bias(
    query: Tensor, key: Tensor, near: tuple[Tensor, Tensor], bias: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Add a channel whose product is `bias` (h,) for projected keys, and 0 for exact ones."""
    near_key, near_value = near
    column = bias.to(key.dtype)[:, None, None].expand(*key.shape[:3], 1)
    key, near_key = torch.cat([key, column], -1), functional.pad(near_key, (0, 1))
    return functional.pad(query, (0, 1), value=1.0), key, (near_key, near_value)


def checked_ranks(name: str, mask: Tensor | None, tokens: Tensor) -> Ranks | None:
    """How to sort `tokens` (b, n, d) by rank; `None` without a mask."""
    if mask is None:
        return None
    checks.check_tensor(name, mask, tokens.shape[:2], "mask")
    return Ranks.of(mask)


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
    """`reference.attend` with the signature of transformers' attention functions."""
    output, probs = reference.attend(query, key, value, attention_mask, scaling=scaling, dropout=dropout)
    return output.transpose(1, 2), probs


# transformers accepts only registered names; `ProjectedAttention.attend` handles this one itself.
ALL_ATTENTION_FUNCTIONS.register(TRITON, eager_attention)


def registered_name(attn_implementation: str) -> str:
    """The name in transformers' registry; an unknown one is refused."""
    name = TRITON if attn_implementation == "triton" else attn_implementation
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    if name not in known and name != "eager":
        choices = [name for name in known if name != TRITON and "|" not in name]  # those with | are for generation
        checks.check_choice("attn_implementation", attn_implementation, ["eager", "triton", *choices])
    return name
