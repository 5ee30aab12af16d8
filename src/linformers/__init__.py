"""Linformer (Wang et al., 2020): self-attention whose keys and values are projected from n tokens to k.

Importing the package registers its models with transformers' Auto classes.
"""

import sys
from pathlib import Path

try:
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
    from .shipped import pretrained
except KeyboardInterrupt:
    # Torch and transformers take seconds: a command ends there without a traceback. Under -m that is its name as yet.
    if Path(sys.argv[0]).stem in ("linformers", "-m"):
        sys.exit(130)
    raise

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
    "pretrained",
]
