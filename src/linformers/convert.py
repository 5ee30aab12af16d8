"""Weights of other encoders into Linformers: RoBERTa becomes the Transformer twin, or the start of a Linformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .config import LinformerConfig
from .encoder import LinformerModel, LinformerPreTrainedModel
from .heads import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)

CLASSES: dict[str, type[LinformerPreTrainedModel]] = {
    "RobertaModel": LinformerModel,
    "RobertaForMaskedLM": LinformerForMaskedLM,
    "RobertaForSequenceClassification": LinformerForSequenceClassification,
    "RobertaForTokenClassification": LinformerForTokenClassification,
    "RobertaForQuestionAnswering": LinformerForQuestionAnswering,
}

SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "classifier_dropout",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
)

# Parts of RoBERTa's parameter names and ours, replaced in this order.
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
def from_roberta(roberta: PreTrainedModel, **config: Any) -> LinformerPreTrainedModel:
    """Copy a RoBERTa model into the Linformer class with the same head.

    By default the result is the Transformer twin (`projection="identity"`) and computes what RoBERTa computes. Any
    field of `LinformerConfig` can be given instead, such as `projection="linear", projected_length=256`: the weights
    are then RoBERTa's, and E is new.

    Args:
        roberta: a `RobertaModel`, or one for masked words, sequences, tokens or questions.
        **config: fields of `LinformerConfig` that are to differ from RoBERTa's.
    """
    name = type(roberta).__name__
    if name not in CLASSES:
        raise ValueError(f"from_roberta takes one of {', '.join(CLASSES)}, not {name}")
    # RoBERTa counts positions from pad_token_id + 1 and never uses the rows before.
    unused = roberta.config.pad_token_id + 1
    fields = {field: getattr(roberta.config, field) for field in SAME_FIELDS}
    fields |= {"max_position_embeddings": roberta.config.max_position_embeddings - unused, "projection": "identity"}
    model = CLASSES[name](LinformerConfig(**{**fields, **config}))

    weights = {}
    for key, weight in roberta.state_dict().items():
        if key == "lm_head.bias" or "pooler." in key or key.endswith("_ids"):
            continue  # the decoder's bias under a second name; parts that a Linformer does not have
        weights[_renamed(key)] = weight[unused:] if "position_embeddings" in key else weight
    _load(model, weights)
    return model.to(roberta.device, roberta.dtype).train(roberta.training)


def _renamed(key: str) -> str:
    for theirs, ours in NAMES:
        key = key.replace(theirs, ours)
    return key


def _load(model: LinformerPreTrainedModel, weights: dict[str, Tensor]) -> None:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    lost = unexpected + [key for key in missing if "projections." not in key]
    assert not lost, f"not converted: {lost}"
