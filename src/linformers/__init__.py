"""Linformer (Wang et al., 2020): self-attention whose keys and values are projected from n tokens to k.

Importing the package registers its models with transformers' Auto classes.
"""

from .config import LinformerConfig
from .encoder import LinformerModel, LinformerPreTrainedModel
from .heads import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    register,
)
from .layer import LinformerAttention

register()

__version__ = "0.1.0"

__all__ = [
    "LinformerAttention",
    "LinformerConfig",
    "LinformerForMaskedLM",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
]
