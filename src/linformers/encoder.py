"""The Linformer encoder: layers, and the model that sorts tokens by rank and hands out E and F."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from .attention import ProjectedAttention, full_name, group_heads, is_plain, ranks_of
from .checks import check_integers, check_shape, check_size, did_you_mean, nearest_name, refuse_length
from .config import FIXED_LENGTHS, NO_CAUSAL, LinformerConfig, check_heads
from .embeddings import LinformerEmbeddings, PositionEmbeddings
from .errors import UserError
from .loading import (
    WHERE_TO_LOAD_FROM,
    asked_config,
    refuse_other_length,
    refuse_other_model,
    refuse_other_projection,
)
from .maps import SequenceMap, Weights, sequence_map
from .ops.gelu import gelu
from .ops.linear_gelu import linear_gelu, serves
from .ops.ranks import Ranks, move_back, move_to_front, zero_padding
from .projections import ConvProjection, DynamicProjection, LinearProjection, Projections

logger = logging.get_logger(__name__)


class FeedForward(nn.Module):
    """Two linear maps with an activation between, applied to each token.

    Without gradients the tokens go through in slices: what stands between the maps is the largest tensor of the model,
    and need not be there for all tokens at once.
    """

    slice_size = 16384  # tokens: enough to keep a GPU busy

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = gelu if config.hidden_act == "gelu" else ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.chunk_size = config.chunk_size_feed_forward

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.chunk_size:
            return self.in_parts(hidden_states, self.chunk_size, dim=1)
        # Compilers plan memory themselves, and a loop over slices would fix the number of tokens.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.transform(hidden_states)
        tokens = hidden_states.flatten(0, -2)
        if len(tokens) <= self.slice_size:
            return self.transform(hidden_states)
        return self.in_parts(tokens, self.slice_size, dim=0).view(*hidden_states.shape[:-1], -1)

    def in_parts(self, tokens: Tensor, size: int, dim: int) -> Tensor:
        return torch.cat([self.transform(part) for part in tokens.split(size, dim)], dim)

    def transform(self, tokens: Tensor) -> Tensor:
        linear = self.intermediate
        if self.activation is gelu and is_plain(linear, tokens) and serves(tokens, linear):
            return self.output(linear_gelu(tokens, linear.weight, linear.bias))
        return self.output(self.activation(linear(tokens)))


class LinformerLayer(GradientCheckpointingLayer):
    """Attention onto projected keys and values, then a feed-forward network, each with a residual and a LayerNorm.

    What attention sees is 0 at padding. That is seen to where a norm has just passed over it: a compiler makes one pass
    of the two.
    """

    def __init__(self, config: LinformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.attention = ProjectedAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.projected_lengths[layer_idx],
            build_map(config, layer_idx),
            config.attention_probs_dropout_prob,
            layer_idx,
            config.local_windows[layer_idx],
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        E: Weights,
        F: Weights,
        ranks: Ranks | None = None,
        attn_implementation: str = "triton",
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            output, _ = self.attention(x, E, F, ranks, attn_implementation=attn_implementation)
            return self.dropout(output)

        def transform(x: Tensor) -> Tensor:
            return self.dropout(self.feed_forward(x))

        x = hidden_states  # (b, n, d)
        if self.config.norm_first:
            x = x + attend(zero_padding(self.attention_norm(x), ranks))
            return x + transform(self.feed_forward_norm(x))
        x = self.attention_norm(x + attend(x))
        return zero_padding(self.feed_forward_norm(x + transform(x)), ranks)


class LinformerPreTrainedModel(PreTrainedModel):
    """What all Linformer models share: initial values, loading, and changing their length."""

    config_class = LinformerConfig
    base_model_prefix = "linformer"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["LinformerEmbeddings", "LinformerLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar = {"hidden_states": LinformerLayer, "attentions": ProjectedAttention}

    def __init__(self, config: LinformerConfig, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, LinformerConfig):
            raise TypeError(
                f"{type(self).__name__} takes a LinformerConfig, not {type(config).__name__}; "
                "linformers.convert.from_roberta makes a Linformer from a RoBERTa model"
            )
        config.check()  # its fields may have been assigned to since it was made
        # Not in the config: transformers builds configs that have a hidden size only, as in `ConfigTester`.
        check_heads(config.hidden_size, config.num_attention_heads, "num_attention_heads")
        super().__init__(config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation is None and torch.cuda.is_available():
            attn_implementation = "triton"
        name = None if attn_implementation is None else full_name(attn_implementation)
        try:
            return super()._check_and_adjust_attn_implementation(name, *args, **kwargs)
        except ValueError as error:  # transformers' message, which does not know of ours
            raise UserError(f'{error} Linformer adds `attn_implementation="triton"`.') from None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LinearProjection | ConvProjection | DynamicProjection):
            module.reset_parameters()
        elif isinstance(module, PositionEmbeddings) and self.config.position_init != "normal":
            longest = 10000 if self.config.position_init == "sinusoidal" else len(module.weight)
            init.copy_(module.weight, module.waves(longest, self.config.initializer_range))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """As transformers does it; then what starts as something else of the same model does.

        Keys are copies of queries, of the size that the config asks for; dynamic projections know windows by their
        positions.
        """
        # Of modules without weights of their own transformers does not ask `_init_weights`.
        new = [module for module in self.modules() if not hasattr(module, "_is_hf_initialized")]
        super().initialize_weights()
        self.find_windows(new)
        for module in new:
            if isinstance(module, ProjectedAttention) and self.config.initial_self_score is not None:
                # A normalised token x has |x|² = d, hence a score with itself of std² d √d_head.
                size = module.hidden_size * math.sqrt(module.head_dim)
                score = self.config.initial_self_score * math.sqrt(module.tokens_per_key)
                init.normal_(module.query.weight, std=math.sqrt(score / size))
                init.copy_(module.key.weight, module.query.weight)

    @torch.no_grad()
    def find_windows(self, modules: Iterable[nn.Module]) -> None:
        """Let the dynamic projections among modules know windows by the positions that the model has now."""
        for module in modules:
            if isinstance(module, DynamicProjection) and self.config.sharing != "none":  # one head's share has none
                init.copy_(module.weight, module.windows(self.base_model.embeddings.position_embeddings.weight))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint's E is for another n or k than was asked for, or means something else.
        """
        if pretrained_model_name_or_path is not None and not kwargs.get("ignore_mismatched_sizes"):
            where = {name: value for name, value in kwargs.items() if name in WHERE_TO_LOAD_FROM}
            with contextlib.suppress(OSError):  # an adapter, or nothing at all, of which transformers knows more
                values, _ = LinformerConfig.get_config_dict(pretrained_model_name_or_path, **where)
                refuse_other_model(cls.__name__, values)
                saved = LinformerConfig.from_pretrained(pretrained_model_name_or_path, **where)
                refuse_other_projection(saved, asked_config(saved, kwargs, where))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @torch.no_grad()
    def resize_length(self, max_length: int, projected_length: int | Sequence[Any] | None = None) -> None:
        """Make a trained model take sequences of up to `max_length` tokens.

        Where n shrinks at an unchanged n/k, rows and columns of E are cut off: outputs do not change, except under
        `projection_init="gaussian"` and `projection="dynamic"`, where every column has a share of every token.
        Otherwise E and the positions are interpolated, windows are shifted by their shares of the new n/k, and a little
        training helps. Optimisers must be made anew.

        Args:
            max_length: the new n.
            projected_length: the new k, in any of the forms that `LinformerConfig` takes; `None` keeps it.
        """
        check_size("max_length", max_length)
        old = self.config
        changes: dict[str, Any] = {"max_position_embeddings": max_length}
        if projected_length is not None:
            changes["projected_length"] = projected_length
        elif old.projection not in FIXED_LENGTHS and max_length < (k := old.largest_projected_length):
            raise UserError(f"max_length={max_length} is below k={k}: name a new projected_length, too")
        new = LinformerConfig(**{**old.to_dict(), **changes})
        n, new_n = old.max_position_embeddings, new.max_position_embeddings
        if (n, old.projected_lengths) == (new_n, new.projected_lengths):
            return
        if new.projection_scale is not None and new.projection not in FIXED_LENGTHS:
            # s stays in proportion to the entries of E₀.
            new.projection_scale *= (new.largest_projected_length / new_n) / (old.largest_projected_length / n)
        ratios_hold = all(
            k * new_n == new_k * n
            for heads, new_heads in zip(old.projected_lengths, new.projected_lengths, strict=True)
            for k, new_k in zip(heads, new_heads, strict=True)
        )
        knows_no_n = old.projection == "dynamic" and old.projected_lengths == new.projected_lengths
        cut = new_n <= n and (ratios_hold or knows_no_n)

        model = self.base_model
        with torch.device("meta"):
            projections = build_projections(new)
        for projection, source in zip(projections, model.projections, strict=True):
            like = next(source.parameters())
            projection.to_empty(device=like.device).to(like.dtype).requires_grad_(like.requires_grad)
            load: Any = projection.load_slice if cut else projection.load_resampled
            load(source)
        model.projections = projections
        for number, layer in enumerate(model.layers):
            layer.attention.groups = group_heads(new.projected_lengths[number])
            layer.attention.sequence_map = build_map(new, number)
        model.embeddings.position_embeddings = model.embeddings.position_embeddings.resized(new_n, cut)
        for name in ("max_position_embeddings", "projected_length", "projection_scale"):
            setattr(old, name, getattr(new, name))


class LinformerModel(LinformerPreTrainedModel):
    r"""The Linformer encoder, from tokens to hidden states.

    Positions are ranks: the model moves the real tokens of each row to its front, so that padding may stand on
    either side or between tokens, and moves the result back.
    """

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.embeddings = LinformerEmbeddings(config)
        self.projections = build_projections(config)
        self.layers = nn.ModuleList(LinformerLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else None
        self.gradient_checkpointing = False
        self.register_load_state_dict_pre_hook(refuse_other_length)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode a batch.

        Args:
            input_ids: token numbers, (b, n).
            attention_mask: 1 at real tokens, 0 at padding, (b, n), in any arrangement.
            token_type_ids: segment numbers, (b, n).
            inputs_embeds: embeddings to use instead of `input_ids`, (b, n, d).
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`, `num_items_in_batch`.
        """
        check_arguments(kwargs)
        tokens = check_inputs(input_ids, inputs_embeds, token_type_ids, self.config)
        ranks = ranks_of("attention_mask", attention_mask, tokens)

        def asked_for(name: str) -> bool:
            return bool(kwargs.get(name, getattr(self.config, name, False)))

        attn_implementation = self.config._attn_implementation
        if asked_for("output_attentions") and attn_implementation != "eager":
            logger.warning_once(f"output_attentions=True: attn_implementation='eager' replaces {attn_implementation!r}")
            attn_implementation = "eager"
        # Whoever looks into the layers wants each token where it was, so there each layer sorts its keys itself.
        looks_inside = asked_for("output_attentions") or asked_for("output_hidden_states")
        moved_by = None if looks_inside else ranks
        if moved_by is not None:
            ranks = moved_by.sorted()
            input_ids, token_type_ids, inputs_embeds = (
                None if x is None else move_to_front(x, moved_by) for x in (input_ids, token_type_ids, inputs_embeds)
            )

        hidden_states = self.embeddings(input_ids, token_type_ids, inputs_embeds, ranks)  # (b, n, d)
        for layer, (E, F) in zip(self.layers, self.projections(tokens.shape[1]), strict=True):
            hidden_states = layer(hidden_states, E, F, ranks, attn_implementation)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
        if moved_by is not None:
            hidden_states = move_back(hidden_states, moved_by)
        return BaseModelOutput(last_hidden_state=hidden_states)


# The keyword arguments of transformers that mean something to an encoder.
KNOWN_ARGUMENTS = ("output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch")

# Those that a Linformer cannot follow, and why.
REFUSED_ARGUMENTS = {
    "is_causal": NO_CAUSAL,
    "position_ids": "a token's position is its rank in attention_mask",
    "encoder_hidden_states": "the model is an encoder; the layer LinformerAttention takes a context",
}


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse a keyword argument that would have no effect, unless it asks for nothing (`None` or `False`)."""
    for name, value in list(kwargs.items()):
        if name in KNOWN_ARGUMENTS:
            continue
        if value is None or value is False:
            del kwargs[name]
        elif name in REFUSED_ARGUMENTS:
            raise UserError(f"{name} is not possible: {REFUSED_ARGUMENTS[name]}")
        else:
            names = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds", *KNOWN_ARGUMENTS)
            hint = did_you_mean(nearest_name(name, names))
            raise TypeError(f"a Linformer takes no argument {name!r}{hint}")


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, token_type_ids: Tensor | None, config: LinformerConfig
) -> Tensor:
    """The one of `input_ids` and `inputs_embeds` that was given, once all have been checked."""
    if input_ids is not None and inputs_embeds is None:
        name, tokens = "input_ids", input_ids
        check_shape(name, tokens, ("batch", "length"))
        check_integers(name, tokens)
    elif inputs_embeds is not None and input_ids is None:
        name, tokens = "inputs_embeds", inputs_embeds
        check_shape(name, tokens, ("batch", "length", config.hidden_size))
    else:
        raise UserError("pass exactly one of input_ids and inputs_embeds")
    if token_type_ids is not None:
        check_shape("token_type_ids", token_type_ids, tokens.shape[:2])
        check_integers("token_type_ids", token_type_ids)
    if tokens.shape[1] > config.max_position_embeddings:
        longer = config.possible_length(tokens.shape[1])
        refuse_length(name, tokens.shape[1], config.max_position_embeddings, f"call model.resize_length({longer})")
    return tokens


def build_map(config: LinformerConfig, layer: int) -> SequenceMap:
    shift = config.shift_of_layer(layer)
    return sequence_map(config.projection, config.max_position_embeddings, config.projection_init, shift)


def build_projections(config: LinformerConfig) -> Projections:
    return Projections(
        config.projected_lengths,
        config.max_position_embeddings,
        config.hidden_size // config.num_attention_heads,
        projection=config.projection,
        sharing=config.sharing,
        init=config.projection_init,
        scale=config.projection_scale,
        shifts=[config.shift_of_layer(layer) for layer in range(config.num_hidden_layers)],
    )
