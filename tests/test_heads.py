"""The heads: their losses written out by hand, pooling, labels, and how outputs are returned."""

import re

import pytest
import torch

from linformers import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)
from linformers.auto import AUTO_CLASSES
from linformers.errors import UserError
from linformers.pooling import mean_of_real_tokens

from . import modes
from .modes import random_model, refused

ONES = torch.ones(2, 12, dtype=torch.long)
VALUES = {"num_labels": 3, "problem_type": "regression"}


def cross_entropy(logits, labels):
    """The mean of -log p over all labels but -100, one after the other."""
    pairs = zip(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).tolist(), strict=True)
    losses = [scores.logsumexp(0) - scores[label] for scores, label in pairs if label != -100]
    return sum(losses) / len(losses)


def binary_cross_entropy(logits, labels):
    p = logits.sigmoid()
    return -torch.where(labels == 1, p, 1 - p).log().mean()


def squared_error(logits, values):
    return (logits - values.view_as(logits)).square().mean()


@pytest.mark.parametrize("model_class", [LinformerForMaskedLM, LinformerForTokenClassification])
def test_loss_of_each_token(model_class):
    model = random_model(model_class, num_labels=5)
    ids = torch.randint(31, (3, 8))
    labels = torch.where(torch.rand(3, 8) < 0.4, ids % 5, -100)
    outputs = model(ids, labels=labels)
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits, labels))
    assert torch.equal(model(ids, labels=labels.int()).loss, outputs.loss)


@pytest.mark.parametrize("count", [{}, {"num_items_in_batch": torch.tensor(0)}, {"num_items_in_batch": 0}])
@pytest.mark.parametrize(
    ("model_class", "fields", "labels"),
    [
        (LinformerForMaskedLM, {"sparse_prediction": False}, {"labels": -100 * ONES}),
        (LinformerForMaskedLM, {"sparse_prediction": True}, {"labels": -100 * ONES}),
        (LinformerForTokenClassification, {}, {"labels": -100 * ONES}),
        (LinformerForSequenceClassification, {}, {"labels": -100 * ONES[:, 0]}),
        (LinformerForQuestionAnswering, {}, {"start_positions": 12 * ONES[:, 0], "end_positions": 99 * ONES[:, 0]}),
    ],
)
def test_a_batch_without_labels_has_no_loss_and_no_gradients(model_class, fields, labels, count):
    model = random_model(model_class, **fields)
    loss = model(ONES, **labels, **count).loss
    loss.backward()
    assert loss.item() == 0
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)  # NaN counts as any


def test_an_answer_may_have_its_start_in_the_text_and_its_end_after_it():
    model = random_model(LinformerForQuestionAnswering)
    outputs = model(ONES, start_positions=ONES[:, 3], end_positions=12 * ONES[:, 0])
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.start_logits, ONES[:, 3]) / 2)


@pytest.mark.parametrize(
    ("fields", "labels", "expected"),
    [
        ({"num_labels": 4}, torch.tensor([0, 3]), cross_entropy),
        ({"num_labels": 4}, torch.tensor([[0], [3]]), cross_entropy),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), squared_error),
        ({"num_labels": 2}, torch.tensor([[1.0, 0.0], [1.0, 1.0]]), binary_cross_entropy),
        (VALUES, torch.tensor([[1.0, 0.5, 2.0], [0.0, -1.0, 1.0]]), squared_error),
        (VALUES, torch.ones(2, 3, dtype=torch.long), squared_error),
        ({"num_labels": 1, "problem_type": "multi_label_classification"}, ONES[:, :1], binary_cross_entropy),
    ],
    ids=["class", "column", "value", "classes", "values", "integer values", "one class or none"],
)
def test_loss_of_a_text(fields, labels, expected):
    model = random_model(LinformerForSequenceClassification, **fields)
    outputs = model(torch.randint(31, (2, 8)), labels=labels)
    torch.testing.assert_close(outputs.loss, expected(outputs.logits, labels))


def test_loss_of_a_span():
    model, ids = random_model(LinformerForQuestionAnswering), torch.randint(31, (3, 8))
    starts, ends = torch.tensor([0, 4, 8]), torch.tensor([2, 7, 9])  # the third answer is not in the text
    outputs = model(ids, start_positions=starts, end_positions=ends)
    expected = [
        cross_entropy(logits[:2], positions[:2])
        for logits, positions in ((outputs.start_logits, starts), (outputs.end_logits, ends))
    ]
    torch.testing.assert_close(outputs.loss, sum(expected) / 2)


WORDS, TEXT = LinformerForMaskedLM, LinformerForSequenceClassification
TOKENS, SPAN = LinformerForTokenClassification, LinformerForQuestionAnswering


@pytest.mark.parametrize(
    ("model_class", "fields", "arguments", "fragment"),
    [
        (WORDS, {}, {"labels": ONES[:, :11]}, "labels has shape (2, 11), expected (2, 12)"),
        (WORDS, {}, {"labels": ONES.float()}, "labels has type torch.float32, expected torch.int64"),
        (WORDS, {}, {"labels": 31 * ONES}, "labels contains 31, expected 0 to 30, or -100"),
        (WORDS, {}, {"labels": -ONES}, "labels contains -1, expected 0 to 30, or -100"),
        (TOKENS, {}, {"labels": ONES[:, 0]}, "labels has shape (2,), expected (2, 12)"),
        (TOKENS, {}, {"labels": 3 * ONES}, "labels contains 3, expected 0 to 2"),
        (TEXT, {}, {"labels": torch.tensor([0, 3])}, "labels contains 3, expected 0 to 2"),
        (TEXT, {}, {"labels": torch.tensor([0.0, 1])}, "labels has type torch.float32"),
        (TEXT, {}, {"labels": torch.arange(3)}, "labels has shape (3,), expected (2,)"),
        (TEXT, {}, {"labels": torch.zeros(2, 2)}, "labels has shape (2, 2), expected (2, 3)"),
        (TEXT, {}, {"labels": ONES[:, :3]}, "labels has shape (2, 3), expected (2, 1)"),
        (TEXT, {"num_labels": 1}, {"labels": torch.zeros(2, 2)}, "labels has shape (2, 2), expected (2, 1)"),
        (TEXT, VALUES, {"labels": torch.zeros(3)}, "labels has shape (3,), expected (2, 3)"),
        (SPAN, {}, {"start_positions": ONES[:, 0]}, "end_positions is missing"),
        (SPAN, {}, {"end_positions": ONES[:, 0]}, "start_positions is missing"),
        (SPAN, {}, {"start_positions": ONES, "end_positions": ONES}, "start_positions has shape (24,), expected (2,)"),
    ],
)
def test_invalid_labels_are_named(model_class, fields, arguments, fragment):
    with pytest.raises(UserError, match=f"^{re.escape(fragment)}"):
        model_class(modes.config(**{"num_labels": 3, **fields}))(ONES, **arguments)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_text_is_classified_by_its_first_token_or_by_the_mean_of_all(pooling):
    model = random_model(LinformerForSequenceClassification, classifier_pooling=pooling)
    ids, mask = torch.randint(31, (2, 8)), torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [1] * 8])
    states = model.linformer(ids, mask).last_hidden_state
    rows = [states[0, 2:6], states[1]]
    pooled = torch.stack([row[0] if pooling == "cls" else row.mean(0) for row in rows])
    torch.testing.assert_close(model(ids, mask).logits, model.classifier(pooled))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("mask", [None, ONES[:, :0]], ids=["no mask", "mask"])
def test_a_text_without_tokens_cannot_be_classified(pooling, mask):
    model = random_model(LinformerForSequenceClassification, classifier_pooling=pooling)
    with refused("has length 0"):
        model(ONES[:, :0], mask)
    assert model(torch.ones(0, 5, dtype=torch.long)).logits.shape == (0, 2)


def test_a_mean_in_half_precision_does_not_overflow():
    states = torch.full((1, 8192, 2), 20.0, dtype=torch.float16)
    mean = mean_of_real_tokens(states, torch.ones(1, 8192, dtype=torch.long))
    assert mean.dtype == torch.float16
    torch.testing.assert_close(mean, states[:, 0])


@pytest.mark.parametrize("model_class", AUTO_CLASSES.values())
def test_outputs_are_tuples_if_the_config_or_the_call_says_so(model_class):
    model = random_model(model_class)
    expected = model(ONES, output_hidden_states=True)
    assert isinstance(model(ONES, return_dict=False), tuple)
    model.config.return_dict = False
    result = model(ONES, output_hidden_states=True)
    assert type(result) is tuple
    torch.testing.assert_close(result, expected.to_tuple())
    assert model(ONES, output_hidden_states=True, return_dict=True).keys() == expected.keys()
