"""Linformer (Wang et al., 2020): self-attention whose keys and values are projected from n tokens to k.

Importing the package registers its models with transformers' Auto classes.
"""

import sys

if sys.argv[:1] == ["-m"] and "linformers" in sys.orig_argv:  # `python -m linformers` begins with the imports below
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_, exit=os._exit: exit(130))  # until the command line can answer Ctrl-C
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
