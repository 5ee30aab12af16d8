"""RoBERTa's weights in the Transformer twin give RoBERTa's outputs."""

import pytest
import torch
import transformers
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification, RobertaModel

from linformers import LinformerModel
from linformers.convert import SAME_FIELDS, from_roberta

from . import modes
from .modes import refused


def roberta(model_class, **fields):
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 25, "type_vocab_size": 1}
    model = model_class(RobertaConfig(**{**sizes, **fields})).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("orm.weight" in name), std=0.2)
    return model


def padded_batch():
    ids = torch.randint(3, 31, (4, 20))
    ids[0, :5] = 1
    ids[1, 12:] = 1
    ids[2, 7:11] = 1
    return ids, ids != 1


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields", [{}, {"pad_token_id": 3}, {"type_vocab_size": 2}, {"layer_norm_eps": 1e-12}], ids=str
)
def test_hidden_states(fields, attn_implementation):
    original = roberta(RobertaModel, **fields)
    twin = from_roberta(original, attn_implementation=attn_implementation)
    ids, mask = padded_batch()
    if "pad_token_id" in fields:
        ids = torch.where(mask, ids.clamp(min=4), 3)
    types = torch.randint(2, ids.shape) if fields.get("type_vocab_size") == 2 else None
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": types, "output_hidden_states": True}
    expected, result = original(**inputs).hidden_states, twin(**inputs).hidden_states
    assert len(result) == len(expected) == 4
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-5)
    assert twin.config.max_position_embeddings == 25 - original.config.pad_token_id - 1


HEADS = ["MaskedLM", "TokenClassification", "QuestionAnswering", "SequenceClassification"]


@pytest.mark.parametrize("head", HEADS)
def test_heads(head):
    original = roberta(getattr(transformers, f"RobertaFor{head}"), id2label={0: "a", 1: "b"})
    ids, mask = padded_batch()
    twin = from_roberta(original)
    # RoBERTa classifies texts by their first position, even if it is padding.
    compared = [1, 2, 3] if head == "SequenceClassification" else mask
    for result, expected in zip(twin(ids, mask)[:], original(ids, mask)[:], strict=True):
        torch.testing.assert_close(result[compared], expected[compared], rtol=0, atol=1e-5)
    assert twin.config.id2label == {0: "a", 1: "b"}


def test_linformer_with_the_weights_of_roberta():
    original = roberta(RobertaForMaskedLM)
    model = from_roberta(original, projection="linear", projected_length=23, sharing="layerwise")
    ids = torch.randint(3, 31, (2, 19))
    # With k = n each window is one token, so this Linformer starts as RoBERTa.
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=1e-5)
    assert from_roberta(original, projection="linear", projected_length=5)(ids).logits.shape == (2, 19, 31)
    # A window that sees everything, and no projected keys.
    near = from_roberta(original, projection="none", local_window=23)
    torch.testing.assert_close(near(ids).logits, original(ids).logits, rtol=0, atol=1e-5)


def test_fields_dtype_and_mode_are_those_of_roberta():
    model = from_roberta(roberta(RobertaModel).bfloat16().train())
    assert (model.dtype, model.training) == (torch.bfloat16, True)
    original = roberta(RobertaForSequenceClassification, hidden_dropout_prob=0.3, classifier_dropout=0.2)
    config = from_roberta(original).config
    for field in (*SAME_FIELDS, "num_labels"):
        assert getattr(config, field) == getattr(original.config, field)
    assert from_roberta(original, hidden_dropout_prob=0.0).config.hidden_dropout_prob == 0.0


@pytest.mark.parametrize("length", [10, 40])
def test_another_length(length):
    original = roberta(RobertaModel)
    twin = from_roberta(original, max_position_embeddings=length)
    positions = original.embeddings.position_embeddings.weight[2:]
    ours = twin.embeddings.position_embeddings.weight
    assert ours.shape == (length, 16)
    if length == 10:
        ids = torch.randint(3, 31, (2, 10))
        torch.testing.assert_close(twin(ids).last_hidden_state, original(ids).last_hidden_state, rtol=0, atol=1e-5)
    else:
        assert torch.equal(ours, positions[torch.arange(length) % len(positions)])
    pooled = from_roberta(original, max_position_embeddings=64, projection="mean", projected_length=16)
    assert pooled(torch.randint(3, 31, (2, 60))).last_hidden_state.shape == (2, 60, 16)


def test_another_architecture_is_refused():
    with refused("from_roberta takes one of RobertaModel, "):
        from_roberta(LinformerModel(modes.config()))


@pytest.mark.parametrize(
    ("fields", "changes", "fragment"),
    [
        ({"is_decoder": True}, {}, "the RoBERTa model has is_decoder=True"),
        ({"pad_token_id": None}, {}, "the RoBERTa model has pad_token_id=None"),
        *(({}, {name: 32}, f"{name}=32 is not supported") for name in ("hidden_size", "norm_first", "num_labels")),
        ({}, {"sharing": "none", "projection": "identity"}, "sharing='none' has no effect"),
        ({}, {"projecton": "linear"}, "did you mean 'projection'?"),
        ({}, {"k": 3}, "did you mean 'projected_length'?"),
        ({}, {"nonsense": 3}, "nonsense=3 is not a field of LinformerConfig"),
    ],
)
def test_invalid_changes_are_named(fields, changes, fragment):
    with refused(fragment):
        from_roberta(roberta(RobertaModel, **fields), **changes)
