"""Linformer with a head for a task, and all of it registered with transformers' Auto classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .checks import check_integers, check_shape
from .config import LinformerConfig
from .encoder import LinformerModel, LinformerPreTrainedModel
from .errors import UserError
from .ops.gelu import gelu

IGNORED = -100  # the label of a position that does not count, as everywhere in transformers


class MaskedLMHead(nn.Module):
    """From hidden states to scores of all words, through the (tied) word embeddings."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.norm(gelu(self.dense(hidden_states))))


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """Linformer that predicts masked words."""

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
        """Score the words at each position; see `LinformerModel.forward` for the arguments not named here.

        Args:
            labels: the words to predict, (b, n), and -100 where nothing is to be predicted. Under
                `config.sparse_prediction` the scores are those of the labelled positions alone, (labelled, vocab).
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None:
            labels = class_numbers("labels", labels, hidden_states.shape[:2]).to(hidden_states.device)
        if labels is not None and self.config.sparse_prediction:
            labelled = (labels != IGNORED).flatten().nonzero().squeeze(1)
            hidden_states, labels = hidden_states.flatten(0, 1)[labelled], labels.flatten()[labelled]
        logits = self.head(hidden_states)
        loss = None
        if labels is not None:
            vocab_size = self.config.vocab_size
            loss = explain(self.loss_function, labels, vocab_size)(logits, labels, vocab_size=vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ClassificationHead(nn.Module):
    """From one hidden state for a text to scores of all labels."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(self.dropout(hidden_states)).tanh()
        return self.output(self.dropout(hidden_states))


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """Linformer that labels, or scores, a whole text."""

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
        """Score the labels of each text; see `LinformerModel.forward` for the arguments not named here.

        Args:
            labels: (b,) class numbers, or values where `config.num_labels` is 1, or (b, labels) for several at once:
                values under `config.problem_type="regression"`, else 0 or 1 for each.
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, **kwargs)
        pool = mean_of_real_tokens if self.config.classifier_pooling == "mean" else first_real_token
        logits = self.classifier(pool(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            labels = self._checked(labels, logits)
            loss_function = explain(self.loss_function, labels, self.num_labels)
            loss = loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _checked(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Class numbers (b,), values (b,) where there is one label, or (b, labels) floats for several at once."""
        batch, count = logits.shape
        kind = self.config.problem_type
        two_dims = isinstance(labels, Tensor) and labels.dim() == 2
        several = kind == "multi_label_classification" or (kind == "regression" and count > 1)
        if several or (kind is None and count > 1 and two_dims and labels.is_floating_point()):
            check_shape("labels", labels, (batch, count))
            return labels.to(logits.dtype)
        if two_dims:
            check_shape("labels", labels, (batch, 1))
            labels = labels.squeeze(1)
        if count == 1:
            check_shape("labels", labels, (batch,))
            return labels
        return class_numbers("labels", labels, (batch,))


class LinformerForTokenClassification(LinformerPreTrainedModel):
    """Linformer that labels each token."""

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
        """Score the labels of each token; see `LinformerModel.forward` for the arguments not named here.

        Args:
            labels: (b, n) class numbers, and -100 where a token does not count.
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            labels = class_numbers("labels", labels, logits.shape[:2])
            loss = explain(self.loss_function, labels, self.num_labels)(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """Linformer that finds the span of a text that answers a question."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
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
        """Score each token as start and as end of the answer; see `LinformerModel.forward` for the other arguments.

        Args:
            start_positions: (b,) the index of the first token of the answer; n or more where it is not in the text.
            end_positions: (b,) the index of its last token.
        """
        outputs = self.linformer(input_ids, attention_mask, token_type_ids, inputs_embeds, **kwargs)
        start_logits, end_logits = self.classifier(outputs.last_hidden_state).unbind(-1)
        loss = None
        if (start_positions is None) != (end_positions is None):
            missing = "start_positions" if start_positions is None else "end_positions"
            raise UserError(f"{missing} is missing: an answer has a start and an end")
        if start_positions is not None and end_positions is not None:
            batch = start_logits.shape[:1]
            start_positions = class_numbers("start_positions", start_positions.flatten(), batch)
            end_positions = class_numbers("end_positions", end_positions.flatten(), batch)
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def class_numbers(name: str, labels: Tensor, expected: Sequence[int]) -> Tensor:
    """Labels as torch's losses want them, once they have been checked."""
    check_shape(name, labels, expected)
    check_integers(name, labels)
    return labels.long()


def explain(loss_function: Callable[..., Tensor], labels: Tensor, count: int) -> Callable[..., Tensor]:
    """`loss_function`, but a label that there is not is named, where the device tells of it at all."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return loss_function(*args, **kwargs)
        except IndexError:
            real = labels[labels != IGNORED]
            raise UserError(
                f"labels has numbers from {real.min().item()} to {real.max().item()}, but there are only {count}, "
                f"from 0 on, and {IGNORED} where nothing is to be predicted"
            ) from None

    return loss


def classifier_dropout(config: LinformerConfig) -> nn.Dropout:
    own = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if own is None else own)


def first_real_token(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The hidden state (b, d) of the first real token of each row, wherever its padding stands."""
    if mask is None:
        return hidden_states[:, 0]
    first = mask.bool().int().argmax(1).to(hidden_states.device)  # (b,)
    return hidden_states.gather(1, first[:, None, None].expand(-1, 1, hidden_states.shape[2])).squeeze(1)


def mean_of_real_tokens(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (b, d) of the hidden states of the real tokens of each row; 0 where there is none."""
    if mask is None:
        return hidden_states.mean(1)
    real = mask.bool().to(hidden_states.device)[:, :, None]  # (b, n, 1)
    total = hidden_states.masked_fill(~real, 0).sum(1, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    return (total / real.sum(1).clamp(min=1)).to(hidden_states.dtype)


def register() -> None:
    """Let transformers' Auto classes build and load every Linformer."""
    AutoConfig.register(LinformerConfig.model_type, LinformerConfig, exist_ok=True)
    for auto_class, model_class in (
        (AutoModel, LinformerModel),
        (AutoModelForPreTraining, LinformerForMaskedLM),
        (AutoModelForMaskedLM, LinformerForMaskedLM),
        (AutoModelForSequenceClassification, LinformerForSequenceClassification),
        (AutoModelForTokenClassification, LinformerForTokenClassification),
        (AutoModelForQuestionAnswering, LinformerForQuestionAnswering),
    ):
        auto_class.register(LinformerConfig, model_class, exist_ok=True)
        # The names by which pipelines and transformers' own model tests tell what a model is for.
        auto_class._model_mapping._model_mapping[LinformerConfig.model_type] = model_class.__name__
