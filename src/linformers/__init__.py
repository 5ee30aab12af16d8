"""Linformer (Wang et al., 2020): self-attention whose keys and values are projected from n tokens to k.

Importing the package registers its models with transformers' Auto classes. Only `linformers prepare` imports it without
the models, which take twice the memory of its own work.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .training.embed import embed

if sys.argv[:1] == ["-m"] and "linformers" in sys.orig_argv:  # `python -m linformers` begins with the imports below
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_, exit=os._exit: exit(130))  # until the command line can answer Ctrl-C
    import linformers_cli

    linformers_cli.answer_interrupts()

from .shipped import pretrained

if getattr(sys.modules.get("linformers_cli"), "needs_models", True):
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

    register()


def __getattr__(name: str) -> object:
    if name == "embed":  # imports pyarrow and more, which no model needs
        from .training.embed import embed

        return embed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "embed",
    "pretrained",
]
