"""The heads: their losses written out by hand, and what dropout and norms do where they stand."""

import pytest
import torch
from accelerate.utils import send_to_device
from linformers.heads import mean_of_real_tokens

from linformers import (
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

from . import modes
from .naive import naive_attention


def model_of(model_class, **fields):
    return modes.randomised(model_class(modes.config(**fields)))


def cross_entropy(logits, labels):
    """The mean of -log p over all labels but -100, one after the other."""
    pairs = zip(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).tolist(), strict=True)
    losses = [scores.logsumexp(0) - scores[label] for scores, label in pairs if label != -100]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("model_class", [LinformerForMaskedLM, LinformerForTokenClassification])
def test_loss_of_each_token(model_class):
    model = model_of(model_class, num_labels=5)
    ids = torch.randint(31, (3, 8))
    labels = torch.where(torch.rand(3, 8) < 0.4, ids % 5, -100)
    outputs = model(ids, labels=labels)
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits, labels))


def test_loss_of_a_class():
    model, ids = model_of(LinformerForSequenceClassification, num_labels=4), torch.randint(31, (3, 8))
    outputs = model(ids, labels=torch.tensor([0, 3, 1]))
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits, torch.tensor([0, 3, 1])))
    assert model.config.problem_type == "single_label_classification"


def test_loss_of_a_value():
    model, ids = model_of(LinformerForSequenceClassification, num_labels=1), torch.randint(31, (3, 8))
    values = torch.tensor([0.5, -1.0, 2.0])
    outputs = model(ids, labels=values)
    torch.testing.assert_close(outputs.loss, ((outputs.logits[:, 0] - values) ** 2).mean())


def test_loss_of_several_classes_at_once():
    model, ids = model_of(LinformerForSequenceClassification, num_labels=2), torch.randint(31, (2, 8))
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    outputs = model(ids, labels=labels)
    p = outputs.logits.sigmoid()
    torch.testing.assert_close(outputs.loss, -torch.where(labels == 1, p, 1 - p).log().mean())


def test_loss_of_several_values_at_once():
    fields = {"num_labels": 3, "problem_type": "regression"}
    model, ids = model_of(LinformerForSequenceClassification, **fields), torch.randint(31, (3, 8))
    values = torch.randn(3, 3)
    outputs = model(ids, labels=values)
    torch.testing.assert_close(outputs.loss, ((outputs.logits - values) ** 2).mean())
    with pytest.raises(ValueError, match=r"labels has shape \(3,\), expected \(3, 3\)"):
        model(ids, labels=values[0])
    model(ids, labels=torch.ones(3, 3, dtype=torch.long))


def test_loss_of_one_class_that_may_be():
    fields = {"num_labels": 1, "problem_type": "multi_label_classification"}
    model, ids = model_of(LinformerForSequenceClassification, **fields), torch.randint(31, (2, 8))
    labels = torch.tensor([[1], [0]])
    outputs = model(ids, labels=labels)
    p = outputs.logits.sigmoid()
    torch.testing.assert_close(outputs.loss, -torch.where(labels == 1, p, 1 - p).log().mean())


@pytest.mark.parametrize("model_class", [LinformerModel, LinformerForMaskedLM, LinformerForSequenceClassification])
def test_layers_on_several_devices(model_class):
    """As accelerate spreads them: what a layer is given is moved to it, and nothing is moved back."""
    model = model_class(modes.config(sparse_prediction=False))
    last = model.base_model.layers[-1]
    for part in model.children() if model.base_model is not model else []:
        if part is not model.base_model:
            part.to("meta")
    last.to("meta").register_forward_pre_hook(
        lambda layer, args, kwargs: send_to_device((args, kwargs), "meta"), with_kwargs=True
    )
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    assert model(torch.randint(31, (2, 4)), mask)[0].device.type == "meta"


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_text_is_labelled_by_its_first_token_or_by_the_mean_of_all(pooling):
    model = model_of(LinformerForSequenceClassification, classifier_pooling=pooling)
    ids, mask = torch.randint(31, (2, 8)), torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [1] * 8])
    states = model.linformer(ids, mask).last_hidden_state
    rows = [states[0, 2:6], states[1]]
    pooled = torch.stack([row[0] if pooling == "cls" else row.mean(0) for row in rows])
    torch.testing.assert_close(model(ids, mask).logits, model.classifier(pooled))


def test_a_mean_in_half_precision_does_not_overflow():
    states = torch.full((1, 8192, 2), 20.0, dtype=torch.float16)
    mean = mean_of_real_tokens(states, torch.ones(1, 8192, dtype=torch.long))
    assert mean.dtype == torch.float16
    torch.testing.assert_close(mean, states[:, 0])


def test_loss_of_a_span():
    model, ids = model_of(LinformerForQuestionAnswering), torch.randint(31, (3, 8))
    starts, ends = torch.tensor([0, 4, 8]), torch.tensor([2, 7, 9])  # the third answer is not in the text
    outputs = model(ids, start_positions=starts, end_positions=ends)
    expected = [
        cross_entropy(logits[:2], positions[:2])
        for logits, positions in ((outputs.start_logits, starts), (outputs.end_logits, ends))
    ]
    torch.testing.assert_close(outputs.loss, sum(expected) / 2)


@pytest.mark.parametrize(
    ("model_class", "field"),
    [
        (LinformerModel, "hidden_dropout_prob"),
        (LinformerModel, "attention_probs_dropout_prob"),
        (LinformerModel, "embedding_dropout"),
        (LinformerForSequenceClassification, "classifier_dropout"),
        (LinformerForTokenClassification, "classifier_dropout"),
    ],
)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_each_dropout_acts_in_training_alone(model_class, field, attn_implementation):
    model = model_of(model_class, **{field: 0.5, "attn_implementation": attn_implementation})
    ids = torch.randint(31, (2, 9))
    assert torch.equal(model(ids)[0], model(ids)[0])
    model.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])
    without = model_of(model_class, attn_implementation=attn_implementation).train()
    assert torch.equal(without(ids)[0], without(ids)[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_encoder_equals_its_definition(norm_first, activation):
    """Embeddings, residuals, norms and feed-forward networks written out, around the naive attention."""
    model = model_of(LinformerModel, norm_first=norm_first, hidden_act=activation).double()
    ids, types = torch.randint(31, (2, 7)), torch.randint(2, (2, 7))

    def norm(layer, x):
        centred = x - x.mean(-1, keepdim=True)
        return layer.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + layer.bias

    def act(x):
        return x.clamp(min=0) if activation == "relu" else x * (1 + torch.erf(x / 2**0.5)) / 2

    def feed_forward(layer, x):
        hidden = act(x @ layer.intermediate.weight.T + layer.intermediate.bias)
        return hidden @ layer.output.weight.T + layer.output.bias

    table = model.embeddings
    x = table.word_embeddings.weight[ids] + table.token_type_embeddings.weight[types]
    x = norm(table.norm, x + table.position_embeddings.weight[:7])
    for layer, (E, F) in zip(model.layers, model.projections(7), strict=True):
        if norm_first:
            x = x + naive_attention(layer.attention, E, F, norm(layer.attention_norm, x))
            x = x + feed_forward(layer.feed_forward, norm(layer.feed_forward_norm, x))
        else:
            x = norm(layer.attention_norm, x + naive_attention(layer.attention, E, F, x))
            x = norm(layer.feed_forward_norm, x + feed_forward(layer.feed_forward, x))
    if norm_first:
        x = norm(model.final_norm, x)
    torch.testing.assert_close(model(ids, token_type_ids=types).last_hidden_state, x, rtol=0, atol=1e-12)
