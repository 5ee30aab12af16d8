"""Linear attention as a layer for anybody's model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attention import ProjectedAttention, check_attention, ranks_of
from .checks import check_choice, check_probability, check_shape, check_size, refuse_length
from .config import (
    FIXED_LENGTHS,
    NO_CAUSAL,
    PROJECTION_INITS,
    PROJECTIONS,
    SHARINGS,
    check_heads,
    check_projected_lengths,
    check_scale,
    check_shift,
    check_window,
    default_scale,
    plain,
)
from .errors import UserError
from .maps import sequence_map
from .ops.ranks import zero_padding
from .projections import Projections


class LinformerAttention(ProjectedAttention):
    r"""Multi-head linear attention with its own E and F: a layer for anybody's model.

    ```python
    attention = LinformerAttention(hidden_size=768, num_heads=12, max_length=4096, projected_length=256)
    y = attention(x, attention_mask)                    # self-attention
    y = attention(x, context=z, context_mask=z_mask)    # queries from x, projected keys and values from z
    ```

    Args:
        hidden_size: d, the channels of input and output.
        num_heads: h.
        max_length: n, the longest sequence that keys and values may come from.
        projected_length: k, or one for each head.
        sharing: `"none"`, `"headwise"` or `"key-value"`; `"layerwise"` is `"key-value"` in a single layer.
        projection: `"linear"`, `"mean"`, `"max"`, `"conv"`, `"dynamic"`, `"identity"` (standard attention) or `"none"`
            (no projected keys, only the local window).
        projection_init: `"window"` or `"gaussian"`.
        projection_scale: s in $E = E_0 + s \Delta$; `None` means $0.12\,k/n$ for the largest k.
        window_shift: how many tokens later the windows begin that E starts as, less than ⌊n/k⌋. Where layers have
            different ones, tokens that one sees as one mean are told apart by another.
        local_window: w: each query also sees the exact keys at most w positions away; 0 is the paper's layer.
        dropout: the probability with which an entry of $\bar P$ is dropped in training.
        attn_implementation: `"triton"` (our kernels where they are faster, SDPA elsewhere), `"sdpa"`, `"eager"`, or any
            other that transformers knows.
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
        hidden_size, num_heads, max_length, window_shift, local_window = plain(
            (hidden_size, num_heads, max_length, window_shift, local_window)
        )
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("max_length", max_length)):
            check_size(name, size)
        check_heads(hidden_size, num_heads, "num_heads")
        check_probability("dropout", dropout)
        check_choice("sharing", sharing, SHARINGS)
        check_choice("projection", projection, PROJECTIONS)
        check_choice("projection_init", projection_init, PROJECTION_INITS)
        check_scale(projection_scale)
        check_window(local_window, projection)
        check_attention(attn_implementation)
        lengths = plain(projected_length)
        if not isinstance(lengths, list):
            lengths = [lengths] * num_heads
        if projection in FIXED_LENGTHS:
            lengths = [max_length if projection == "identity" else 0] * num_heads
        if len(lengths) != num_heads:
            raise UserError(f"projected_length has {len(lengths)} entries, one per head, but num_heads={num_heads}")
        if projection != "none":
            check_projected_lengths(
                [lengths], max_length, projection=projection, sharing=sharing, length_name="max_length"
            )
        has_windows = projection == "linear" and projection_init == "window"
        check_shift(window_shift, max_length // max(lengths) if has_windows else 1)
        super().__init__(
            hidden_size,
            num_heads,
            lengths,
            sequence_map(projection, max_length, projection_init, window_shift),
            dropout,
            local_window=local_window,
        )
        self.max_length = max_length
        self.attn_implementation = attn_implementation
        self.projections = Projections(
            [lengths],
            max_length,
            self.head_dim,
            projection=projection,
            sharing=sharing,
            init=projection_init,
            scale=projection_scale or default_scale(max(lengths), max_length, quick=False),
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
            hidden_states: where the queries come from and, without `context`, the keys and values too.
            attention_mask: true or 1 at the real tokens of `hidden_states`, (b, n); what the others hold is ignored.
            context: where keys and values come from instead.
            context_mask: true or 1 at the real tokens of `context`, (b, m).
            is_causal: refused, for a reason.
            output_attentions: also return $\bar P$ (b, h, n, k).
        """
        if is_causal:
            raise UserError(f"is_causal=True is not possible: {NO_CAUSAL}")
        if context is not None and self.local_window:
            raise UserError(
                f"local_window={self.local_window} is for self-attention: positions of hidden_states and context have "
                "nothing to do with each other"
            )
        if context_mask is not None and context is None:
            raise UserError("context_mask was given without context; the mask of hidden_states is attention_mask")
        source, source_name = (hidden_states, "hidden_states") if context is None else (context, "context")
        check_shape("hidden_states", hidden_states, ("batch", "length", self.hidden_size))
        if context is not None:
            check_shape("context", context, (hidden_states.shape[0], "length", self.hidden_size))
        if source.shape[1] > self.max_length:
            refuse_length(source_name, source.shape[1], self.max_length, "make the layer with a larger max_length")
        ((E, F),) = self.projections(source.shape[1])
        ranks = ranks_of("attention_mask", attention_mask, hidden_states)
        context_ranks = ranks_of("context_mask", context_mask, source)
        output, probs = super().forward(
            zero_padding(hidden_states, ranks),
            E,
            F,
            ranks,
            None if context is None else zero_padding(context, context_ranks),
            context_ranks,
            "eager" if output_attentions else self.attn_implementation,
        )
        return (output, probs) if output_attentions else output
