"""Registers every Linformer class with transformers' Auto classes."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from . import modeling
from .config import LinformerConfig

AUTO_CLASSES = {
    AutoModel: modeling.LinformerModel,
    AutoModelForPreTraining: modeling.LinformerForMaskedLM,
    AutoModelForMaskedLM: modeling.LinformerForMaskedLM,
    AutoModelForSequenceClassification: modeling.LinformerForSequenceClassification,
    AutoModelForTokenClassification: modeling.LinformerForTokenClassification,
    AutoModelForQuestionAnswering: modeling.LinformerForQuestionAnswering,
}


def register() -> None:
    """Let the Auto classes build and load every Linformer."""
    AutoConfig.register(LinformerConfig.model_type, LinformerConfig, exist_ok=True)
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(LinformerConfig, model_class, exist_ok=True)
        # Pipelines and transformers' common tests look model classes up by name.
        auto_class._model_mapping._model_mapping[LinformerConfig.model_type] = model_class.__name__
