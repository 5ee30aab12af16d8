"""The Linformer encoder and its heads: embeddings → layer → model → heads, in the order in which data flows."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention import FAR_BIAS_SCALE, TRITON, ProjectedAttention
from .checks import check_tensor, did_you_mean, nearest_name, refuse_length
from .config import NO_CAUSAL, LinformerConfig
from .errors import UserError
from .files import MODEL_FILES, write_manifest
from .losses import IGNORED, checked_labels, counted, span_loss
from .ops.gelu import gelu
from .ops.linear_gelu import linear_gelu, use_linear_gelu
from .ops.ranks import Ranks, reorder, zero_padding
from .ops.rotary import Rotation, Rotations
from .pooling import first_real_token, mean_of_real_tokens
from .projections import ConvProjection, LayerProjection, LinearProjection, Projections, can_use_weights
from .resizing import check_checkpoint, check_weights, refuse_other_length, remove_older_weights, resize_length

logger = logging.get_logger(__name__)

ALIGNMENT = 64  # bytes, of what torch allocates on a CPU

# Keyword arguments that `forward` accepts (`num_items_in_batch` is for the loss of a head), and those that it refuses.
KNOWN_ARGUMENTS = ("output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch")
REFUSED_ARGUMENTS = {
    "is_causal": NO_CAUSAL,
    "position_ids": "a token's position is its rank in attention_mask",
    "encoder_hidden_states": "the model is an encoder; the layer LinformerAttention takes a context",
}


class PositionEmbeddings(nn.Embedding):
    """Learned positions that may start as waves, as in Vaswani et al. (2017)."""

    def waves(self, longest: float, std: float) -> Tensor:
        """Sines in the even channels and cosines in the odd ones, scaled to a root mean square of `std`, (n, d).

        Args:
            longest: the wavelengths grow from 2π to 2π times this.
            std: the scale.
        """
        n, d = self.weight.shape
        channels = torch.arange(d)
        angles = torch.arange(n)[:, None] / longest ** ((channels - channels % 2) / d)
        return torch.where(channels % 2 == 0, angles.sin(), angles.cos()) * (std * math.sqrt(2))


class LinformerEmbeddings(nn.Module):
    """The sum of word, position and token type embeddings, normalized; projected if they are of another size."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        d = config.embedding_size or config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d, padding_idx=config.pad_token_id)
        self.position_embeddings = None if config.is_rotary else PositionEmbeddings(config.max_position_embeddings, d)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, d)
        self.norm = nn.LayerNorm(d, eps=config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = nn.Linear(d, config.hidden_size) if d != config.hidden_size else None

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        name, ids = "input_ids", input_ids
        try:
            words = inputs_embeds if input_ids is None else self.word_embeddings(input_ids)  # (b, n, d)
            assert words is not None
            if positions is None:  # rows are sorted by rank
                positions = torch.arange(words.shape[1], device=words.device)
            name, ids = "token_type_ids", torch.zeros_like(positions) if token_type_ids is None else token_type_ids
            types = self.token_type_embeddings(ids)
        except IndexError:  # raised on the CPU only
            assert ids is not None
            count = (self.word_embeddings if name == "input_ids" else self.token_type_embeddings).num_embeddings
            raise UserError(
                f"{name} ranges from {ids.min().item()} to {ids.max().item()}, expected 0 to {count - 1}"
            ) from None
        embeddings = words + types
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(positions)
        # Padding may hold NaN, which must not reach the norm; and the norm turns 0 into its bias.
        embeddings = self.dropout(self.norm(zero_padding(embeddings, mask)))
        return zero_padding(embeddings if self.project is None else self.project(embeddings), mask)


class FeedForward(nn.Module):
    """Two linear layers with an activation in between, applied to each token.

    The tensor in between is the largest of the model. Without gradients, tokens go through in chunks to save memory.
    """

    chunk_size = 16384  # tokens: enough to keep a GPU busy

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = gelu if config.hidden_act == "gelu" else ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        if config.chunk_size_feed_forward:
            self.chunk_size = config.chunk_size_feed_forward

    def forward(self, x: Tensor) -> Tensor:
        linear = self.intermediate
        # A compiler plans memory itself, and a loop over chunks would fix the number of tokens.
        in_chunks = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if in_chunks and x.shape[:-1].numel() > self.chunk_size:
            return torch.cat([self(chunk) for chunk in x.flatten(0, -2).split(self.chunk_size)]).view_as(x)
        if self.activation is gelu and use_linear_gelu(x, linear) and can_use_weights(linear, x):
            return self.output(linear_gelu(x, linear.weight, linear.bias))
        return self.output(self.activation(linear(x)))


class LinformerLayer(GradientCheckpointingLayer):
    """Attention onto projected keys and values, then a feed-forward network, each with a residual and a LayerNorm.

    The input of attention is 0 at padding; with post-norm, so are the input and output of the layer. Padding is set
    to 0 right after a norm, so that a compiler can fuse the two. Transformers' `capture_outputs` records attention
    probabilities with a hook.
    """

    def __init__(self, config: LinformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = ProjectedAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.attention_probs_dropout_prob,
            config.local_windows[layer_idx],
            config.far_biases[layer_idx],
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        x: Tensor,
        E: LayerProjection,
        F: LayerProjection,
        mask: Tensor | None,
        lengths: Tensor | None,
        ranks: Ranks | None,
        attn_implementation: str,
        rotations: Rotations | None,
    ) -> Tensor:
        """Map hidden states (b, n, d) to hidden states; see `ProjectedAttention.forward` for the arguments."""
        options: dict[str, Any] = {"lengths": lengths, "ranks": ranks, "rotations": rotations}
        options["attn_implementation"] = attn_implementation
        if self.norm_first:
            attended, _ = self.attention(zero_padding(self.attention_norm(x), mask), E, F, **options)
            x = x + self.dropout(attended)
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        attended, _ = self.attention(x, E, F, **options)
        x = self.attention_norm(x + self.dropout(attended))
        return zero_padding(self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), mask)


class LinformerPreTrainedModel(PreTrainedModel):
    """What all Linformer models share: initialization, loading, saving, and resizing."""

    config: LinformerConfig
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
                "linformers.convert.from_pretrained converts other encoders"
            )
        config.check_buildable()  # fields may have been assigned since it was created
        super().__init__(config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        name = "eager" if attn_implementation is None else attn_implementation
        if not isinstance(name, str) or not name.isprintable():
            raise UserError(f"attn_implementation={attn_implementation!r} must be a name, such as 'sdpa'")
        if attn_implementation == "triton" or (attn_implementation is None and torch.cuda.is_available()):
            attn_implementation = TRITON
        try:
            return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        except ValueError as error:
            raise UserError(f'{error} Linformer adds `attn_implementation="triton"`.') from None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LinearProjection | ConvProjection):
            module.reset_parameters()
        elif isinstance(module, ProjectedAttention) and module.initial_far_bias is not None:
            init.constant_(module.scaled_far_bias, module.initial_far_bias / FAR_BIAS_SCALE)
        elif isinstance(module, PositionEmbeddings) and self.config.position_init != "normal":
            longest = 10000 if self.config.position_init == "sinusoidal" else len(module.weight)
            init.copy_(module.weight, module.waves(longest, self.config.initializer_range))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialize as transformers does; then, with `initial_self_score`, copy queries to keys."""
        # Only new layers: others were loaded, or initialized with the inner LinformerModel of a head.
        new = [module for module in self.modules() if not hasattr(module, "_is_hf_initialized")]
        super().initialize_weights()
        config = self.config
        if config.initial_self_score is None or not hasattr(self.base_model, "layers"):
            return
        for layer, lengths in zip(self.base_model.layers, config.projected_lengths, strict=True):
            attention = layer.attention
            if attention not in new:
                continue
            # A normalized token x has |x|² = d, so its score with itself is std² d √d_head for a key of its own; the
            # mean of n/k tokens needs √(n/k) times as much.
            averages = config.resolved_projection_init != "sample" and not attention.local_window
            tokens_per_key = config.max_position_embeddings / max(lengths) if averages else 1
            score = config.initial_self_score * math.sqrt(tokens_per_key)
            init.normal_(attention.query.weight, std=math.sqrt(score / (config.hidden_size * attention.head_dim**0.5)))
            init.copy_(attention.key.weight, attention.query.weight)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model; see `PreTrainedModel.from_pretrained`.

        In a folder with a manifest, the config and the weights must be what it says. Pickled weights are loaded only
        with `use_safetensors=False`.

        Raises:
            UserError: the checkpoint is damaged or pickled, is for another n or k than requested, or its weights would
                mean something else.
        """
        kwargs.setdefault("use_safetensors", True)
        check_weights(pretrained_model_name_or_path, kwargs)
        if pretrained_model_name_or_path is not None and not kwargs.get("ignore_mismatched_sizes"):
            with contextlib.suppress(OSError):  # an adapter or nothing at all, which transformers explains better
                check_checkpoint(cls.__name__, pretrained_model_name_or_path, kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for parameter in (loaded[0] if isinstance(loaded, tuple) else loaded).parameters():
            # CPUs round differently where memory is not aligned, as in a file: outputs would change by saving.
            is_local = parameter.device.type == "cpu" and not hasattr(parameter, "device_mesh")
            if is_local and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        return loaded

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Save a model with its resolved config, the values that its weights were trained with, and a manifest."""
        config = self.config
        self.config = config.resolved()
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        finally:
            self.config = config
        first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        if is_main_process and first and os.path.isdir(save_directory):
            remove_older_weights(Path(save_directory))
            write_manifest(Path(save_directory), MODEL_FILES)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing; see `LinformerConfig`."""

    def resize_length(self, max_length: int, projected_length: int | Sequence[Any] | None = None) -> None:
        """Make a trained model accept sequences of up to `max_length` tokens.

        If n/k stays the same, outputs for inputs of up to the smaller n do not change, except with
        `projection_init="gaussian"`, where every token belongs to every slot. Otherwise E is interpolated. Learned
        positions are repeated; rotary ones have no limit. A little training helps. Create a new optimizer afterwards.

        Args:
            max_length: the new n.
            projected_length: the new k, in any form that `LinformerConfig` accepts; `None` keeps it.
        """
        resize_length(self, max_length, projected_length)


class LinformerModel(LinformerPreTrainedModel):
    """The Linformer encoder, from tokens to hidden states.

    A token's position is its rank among the real tokens of its row. The model sorts each row by rank, real tokens
    first, and restores the order at the end, so padding may be on either side or in between.
    """

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.embeddings = LinformerEmbeddings(config)
        self.projections = Projections.from_config(config)
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
            input_ids: token ids, (b, n).
            attention_mask: 1 at real tokens and 0 at padding, (b, n), in any arrangement.
            token_type_ids: segment ids, (b, n).
            inputs_embeds: embeddings to use instead of `input_ids`, (b, n, d).
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`, `num_items_in_batch`.
        """
        self.check_inputs(input_ids, attention_mask, token_type_ids, inputs_embeds, kwargs)
        attn_implementation = self.config._attn_implementation
        output_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        output_hidden_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        if output_attentions and attn_implementation != "eager":
            logger.warning_once(f"output_attentions=True: attn_implementation='eager' replaces {attn_implementation!r}")
            attn_implementation = "eager"

        # Rows are sorted by rank once, here. If intermediate outputs are requested, every token stays in its place
        # instead, and each layer sorts the input of its attention.
        sort_here = attention_mask is not None and not (output_attentions or output_hidden_states)
        ranks = positions = mask = lengths = None
        if attention_mask is not None:
            ranks = Ranks.of(attention_mask)
            lengths, mask, positions = ranks.lengths, ranks.mask, ranks.places
        if ranks is not None and sort_here:
            mask, positions = ranks.sorted_mask, None
            input_ids = None if input_ids is None else reorder(input_ids, ranks.order)
            token_type_ids = None if token_type_ids is None else reorder(token_type_ids, ranks.order)
            inputs_embeds = None if inputs_embeds is None else reorder(inputs_embeds, ranks.order)

        x = self.embeddings(input_ids, token_type_ids, inputs_embeds, positions, mask)  # (b, n, d)
        rotations = None
        if (theta := self.projections.rope_theta) is not None:
            places, head_dim = torch.arange(x.shape[1], device=x.device), self.projections.head_dim
            turn_keys = Rotation.of(places, head_dim, theta, x.dtype)
            rotations = Rotations(turn_keys, values=Rotation.of(places, head_dim, None, x.dtype))
        projections = self.projections(x.shape[1], lengths, x.device, x.dtype)
        for layer, (E, F) in zip(self.layers, projections, strict=True):
            x = layer(x, E, F, mask, lengths, None if sort_here else ranks, attn_implementation, rotations)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return BaseModelOutput(reorder(x, ranks.places) if ranks is not None and sort_here else x)

    def check_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Check the arguments of `forward`."""
        for name, value in kwargs.items():
            if name in KNOWN_ARGUMENTS or value is None or value is False:
                continue
            if name in REFUSED_ARGUMENTS:
                raise UserError(f"{name} is not supported: {REFUSED_ARGUMENTS[name]}")
            names = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds", *KNOWN_ARGUMENTS)
            raise TypeError(f"unexpected keyword argument {name!r}{did_you_mean(nearest_name(name, names))}")
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            name, tokens = "input_ids", input_ids
            check_tensor(name, tokens, ("batch", "length"), "ids")
        else:
            name, tokens = "inputs_embeds", inputs_embeds
            check_tensor(name, tokens, ("batch", "length", self.config.embedding_size or self.config.hidden_size))
            weight = self.embeddings.token_type_embeddings.weight
            if tokens.dtype == torch.float64 and weight.dtype != torch.float64:
                raise UserError(f"inputs_embeds has type {tokens.dtype}, but the model has {weight.dtype}: convert one")
        assert tokens is not None
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask, tokens.shape[:2], "mask")
        if token_type_ids is not None:
            check_tensor("token_type_ids", token_type_ids, tokens.shape[:2], "ids")
        if tokens.shape[1] > self.config.max_position_embeddings:
            longer = self.config.next_valid_length(tokens.shape[1])
            remedy = f"lengthen the model: model.resize_length({longer}), or linformers resize DIR --length {longer}"
            refuse_length(name, tokens.shape[1], self.config.max_position_embeddings, remedy)


class MaskedLMHead(nn.Module):
    """Maps hidden states to logits over the vocabulary, by default with the weights of the word embeddings."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.norm(gelu(self.dense(hidden_states))))


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """Linformer with a masked-language-modeling head."""

    _tied_weights_keys: ClassVar = {"head.decoder.weight": "linformer.embeddings.word_embeddings.weight"}

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the logits of each position; see `LinformerModel.forward` for the other arguments.

        Args:
            labels: the token ids to predict, (b, n), and -100 at positions that do not count. With
                `config.sparse_prediction`, the logits are those of the labeled positions, (labeled, vocab).
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None:
            labels = checked_labels("labels", labels, hidden_states.shape[:2], self.config.vocab_size)
            labels = labels.to(hidden_states.device)
        if labels is not None and self.config.sparse_prediction:
            labeled = (labels != IGNORED).flatten().nonzero().squeeze(1)
            hidden_states, labels = hidden_states.flatten(0, 1)[labeled], labels.flatten()[labeled]
        logits = self.head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **counted(labels, kwargs))
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class ClassificationHead(nn.Module):
    """Maps one hidden state per text to the logits of all classes."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.classifier_activation]
        self.output = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.activation(self.dense(self.dropout(hidden_states)))
        return self.output(self.dropout(hidden_states))


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """Linformer with a sequence-classification or regression head."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.linformer = LinformerModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute the logits of each text; see `LinformerModel.forward` for the other arguments.

        Args:
            labels: class ids (b,), or values (b,) where `config.num_labels` is 1, or (b, labels) for several at once:
                values with `config.problem_type="regression"`, otherwise 0 or 1 for each.
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        hidden_states = outputs.last_hidden_state
        if not hidden_states.shape[1]:
            raise UserError("the input has length 0: a text needs at least one token to be classified")
        pool = mean_of_real_tokens if self.config.classifier_pooling == "mean" else first_real_token
        logits = self.classifier(pool(hidden_states, attention_mask))
        loss = None
        if labels is not None:
            labels = self.checked_labels(labels, logits)
            kwargs = counted(labels, kwargs)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def checked_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Class ids (b,), values (b,) where there is one label, or floats (b, labels) for several at once."""
        batch, count = logits.shape
        kind = self.config.problem_type
        two_dims = isinstance(labels, Tensor) and labels.dim() == 2
        several = kind == "multi_label_classification" or (kind == "regression" and count > 1)
        if several or (kind is None and count > 1 and two_dims and labels.is_floating_point()):
            check_tensor("labels", labels, (batch, count))
            return labels.to(logits.dtype)
        if two_dims:
            check_tensor("labels", labels, (batch, 1))
            labels = labels.squeeze(1)
        if count == 1:
            check_tensor("labels", labels, (batch,))
            return labels
        return checked_labels("labels", labels, (batch,), count)


class LinformerForTokenClassification(LinformerPreTrainedModel):
    """Linformer with a token-classification head."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.linformer = LinformerModel(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Compute the logits of each token; see `LinformerModel.forward` for the other arguments.

        Args:
            labels: class ids, (b, n), with -100 where a token does not count.
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            labels = checked_labels("labels", labels, logits.shape[:2], self.num_labels)
            loss = self.loss_function(logits, labels, self.config, **counted(labels, kwargs))
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """Linformer with an extractive question-answering head."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.loss_function = span_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Compute the logits of the start and end of the answer; see `LinformerModel.forward` for the other arguments.

        Args:
            start_positions: the index of the first token of the answer, (b,); n or more if it is not in the text.
            end_positions: the index of its last token, (b,).
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        start_logits, end_logits = self.classifier(outputs.last_hidden_state).unbind(-1)
        loss = None
        if (start_positions is None) != (end_positions is None):
            missing = "start_positions" if start_positions is None else "end_positions"
            raise UserError(f"{missing} is missing: an answer has a start and an end")
        if start_positions is not None and end_positions is not None:
            batch = start_logits.shape[:1]
            start_positions = checked_labels("start_positions", start_positions.flatten(), batch)
            end_positions = checked_labels("end_positions", end_positions.flatten(), batch)
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss, start_logits.contiguous(), end_logits.contiguous(), outputs.hidden_states, outputs.attentions
        )


def classifier_dropout(config: LinformerConfig) -> nn.Dropout:
    own = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if own is None else own)
