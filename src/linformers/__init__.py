"""Linformer (Wang et al., 2020): self-attention whose keys and values are projected from n tokens to k.

Importing the package registers its models with transformers' Auto classes.
"""

import sys

if sys.argv[:1] == ["-m"] and "linformers" in sys.orig_argv:  # `python -m linformers` begins with the imports below
    import linformers_cli

    linformers_cli.answer_interrupts()

from .attention import LinformerAttention
from .auto import register
from .config import LinformerConfig
from .modeling import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    LinformerPreTrainedModel,
)
from .shipped import pretrained

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
    "pretrained",
]

register()
