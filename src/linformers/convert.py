"""Converts RoBERTa models: to the Transformer twin, which computes the same, or to the start of a Linformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import modeling
from .checks import did_you_mean, nearest_name
from .config import ALIASES, NO_CAUSAL, LinformerConfig
from .errors import UserError

CLASSES: dict[str, type[modeling.LinformerPreTrainedModel]] = {
    "RobertaModel": modeling.LinformerModel,
    "RobertaForMaskedLM": modeling.LinformerForMaskedLM,
    "RobertaForSequenceClassification": modeling.LinformerForSequenceClassification,
    "RobertaForTokenClassification": modeling.LinformerForTokenClassification,
    "RobertaForQuestionAnswering": modeling.LinformerForQuestionAnswering,
}

DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
SAME_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("type_vocab_size", "initializer_range", "layer_norm_eps", "tie_word_embeddings", *DROPOUT_FIELDS),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type"),
)
PROJECTION_FIELDS = (
    *("projected_length", "sharing", "projection_init", "projection_scale"),
    *("shifted_windows", "local_window"),
)
# Fields that may differ from RoBERTa's: they change neither the shape nor the meaning of a weight.
FREE_FIELDS = (
    *("max_position_embeddings", "projection", *PROJECTION_FIELDS, *DROPOUT_FIELDS),
    *("sparse_prediction", "problem_type", "attn_implementation"),
)

# Parts of RoBERTa's parameter names and of ours, replaced in this order.
NAMES = (
    ("roberta.", "linformer."),
    ("embeddings.LayerNorm", "embeddings.norm"),
    ("encoder.layer.", "layers."),
    ("attention.self.", "attention."),
    ("attention.output.dense", "attention.output"),
    ("attention.output.LayerNorm", "attention_norm"),
    ("intermediate.dense", "feed_forward.intermediate"),
    (".output.LayerNorm", ".feed_forward_norm"),
    (".output.dense", ".feed_forward.output"),
    ("lm_head.layer_norm", "head.norm"),
    ("lm_head.", "head."),
    ("classifier.out_proj", "classifier.output"),
    ("qa_outputs", "classifier"),
)


@torch.no_grad()
def from_roberta(roberta: PreTrainedModel, **config: Any) -> modeling.LinformerPreTrainedModel:
    """Copy a RoBERTa model into the Linformer class with the same head.

    By default the result is the Transformer twin (`projection="identity"`), which computes what RoBERTa computes if the
    mask is `input_ids != pad_token_id`: RoBERTa derives positions from that, whatever mask it is given. RoBERTa's
    pooler has no counterpart.

    With `projection="linear", projected_length=256`, the weights are RoBERTa's and E is new. With another
    `max_position_embeddings`, positions are cut off or interpolated, as by `resize_length`.

    Args:
        roberta: a `RobertaModel`, or one for masked words, sequences, tokens or questions.
        **config: fields of `LinformerConfig` that differ from RoBERTa's.
    """
    name = type(roberta).__name__
    if name not in CLASSES:
        raise UserError(f"from_roberta takes one of {', '.join(CLASSES)}, not {name}")
    fields = fields_of(roberta.config)
    check_changes(fields, roberta.config, config)
    twin = load(CLASSES[name](LinformerConfig(**fields)), weights_of(roberta))
    if "max_position_embeddings" in config:
        twin.resize_length(config["max_position_embeddings"])
    model = load(CLASSES[name](LinformerConfig(**{**fields, **config})), twin.state_dict())
    return model.to(roberta.device, roberta.dtype).train(roberta.training)


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of the twin of a RoBERTa model."""
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise UserError(f"the RoBERTa model has {name}=True: {NO_CAUSAL}")
    if config.pad_token_id is None:
        raise UserError("the RoBERTa model has pad_token_id=None, but its positions are counted from pad_token_id + 1")
    fields = {field: getattr(config, field) for field in SAME_FIELDS}
    fields |= {
        "norm_first": False,
        "position_embedding_type": "absolute",
        "projection_init": "window",
        "local_window": 0,
    }
    return {**fields, "max_position_embeddings": num_positions(config), "projection": "identity"}


def check_changes(fields: dict[str, Any], theirs: PreTrainedConfig, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if name in PROJECTION_FIELDS and changes.get("projection", "identity") == "identity":
            raise UserError(f"{name}={value!r} has no effect on a Transformer; pass projection='linear' as well")
        if name in FREE_FIELDS:
            continue
        if not hasattr(LinformerConfig, name):
            nearest = ALIASES.get(name) or nearest_name(name, FREE_FIELDS, cutoff=0.8)
            raise UserError(f"{name}={value!r} is not a field of LinformerConfig{did_you_mean(nearest)}")
        own = fields.get(name, getattr(theirs, name, getattr(LinformerConfig, name)))
        if own != value:
            raise UserError(f"{name}={value!r} is not supported: RoBERTa's weights are for {own!r}")


def num_positions(config: PreTrainedConfig) -> int:
    """RoBERTa counts positions from pad_token_id + 1 and never uses the rows before."""
    return config.max_position_embeddings - config.pad_token_id - 1


def weights_of(roberta: PreTrainedModel) -> dict[str, Tensor]:
    """RoBERTa's weights under our names."""
    weights = {}
    for key, weight in roberta.state_dict().items():
        if key == "lm_head.bias" or "pooler." in key or key.endswith("_ids"):
            continue  # a second name of the decoder's bias, and parts that a Linformer does not have
        if "position_embeddings" in key:
            weight = weight[-num_positions(roberta.config) :]
        for theirs, ours in NAMES:
            key = key.replace(theirs, ours)
        weights[key] = weight
    return weights


def load(model: modeling.LinformerPreTrainedModel, weights: dict[str, Tensor]) -> modeling.LinformerPreTrainedModel:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    lost = unexpected + [key for key in missing if "projections." not in key]
    assert not lost, f"not converted: {lost}"
    return model
