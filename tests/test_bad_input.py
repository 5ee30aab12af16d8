"""Bad input: one sentence that names the field, its value and what would be right."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, RobertaConfig, RobertaModel

from linformers import (
    LinformerAttention,
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from linformers.convert import from_roberta
from linformers.errors import UserError

from . import modes


def refused(message, error=ValueError):
    return pytest.raises(error, match=f"^{re.escape(message)}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"projected_length": 13}, "projected_length=13 exceeds max_position_embeddings=12; k can be at most n"),
        ({"projected_length": 0}, "projected_length=0 must be a positive integer"),
        ({"projected_length": "4"}, "projected_length='4' must be a positive integer"),
        ({"projected_length": True}, "projected_length=True must be a positive integer"),
        ({"projected_length": 4.0}, "projected_length=4.0 must be a positive integer"),
        ({"projected_length": [4, 2.5]}, "projected_length[1]=2.5 must be a positive integer"),
        ({"projected_length": [[4, 4, 4, None]] * 2}, "projected_length[0][3]=None must be a positive integer"),
        (
            {"projected_length": 5, "projection": "mean"},
            "projected_length=5 does not divide max_position_embeddings=12",
        ),
        ({"projected_length": 5, "projection": "max"}, "projected_length=5 does not divide max_position_embeddings=12"),
        (
            {"projected_length": 5, "projection": "conv"},
            "projected_length=5 does not divide max_position_embeddings=12",
        ),
        ({"projected_length": [4, 4, 4]}, "projected_length has 3 entries, one per layer, but num_hidden_layers=2"),
        (
            {"projected_length": [[4, 4], [4, 4, 4, 4]]},
            "projected_length[0] has 2 entries, one per head, but num_attention_heads=4",
        ),
        ({"projected_length": [4, 3]}, "projected_length=3 does not divide 4, the largest among those that share"),
        (
            {"projected_length": [[4, 3, 4, 4]] * 2, "sharing": "key-value"},
            "projected_length=3 does not divide 4, the largest among those that share",
        ),
        (
            {"projected_length": [[4, 2, 4, 4]] * 2, "sharing": "headwise", "projection": "conv"},
            "projected_length=[2, 4] cannot differ where projection='conv' is shared",
        ),
        (
            {"projected_length": [4, 2], "sharing": "layerwise", "projection": "conv"},
            "projected_length=[2, 4] cannot differ where projection='conv' is shared",
        ),
        (
            {"sharing": "layer-wise"},
            "sharing='layer-wise' is not one of 'none', 'headwise', 'key-value', 'layerwise'; did",
        ),
        ({"projection": "liner"}, "projection='liner' is not one of"),
        ({"projection_init": "gausian"}, "projection_init='gausian' is not one of 'window', 'gaussian'"),
        ({"window": 3}, "'window' is not a field of LinformerConfig; did you mean 'local_window'?"),
        ({"shifted_windows": "yes"}, "shifted_windows='yes' must be True, False or None"),
        ({"window_shift": 1}, "'window_shift' is not a field of LinformerConfig; did you mean 'shifted_windows'?"),
        ({"initial_self_score": -1}, "initial_self_score=-1 must be a positive number or None"),
        ({"local_windows": 2}, "'local_windows' is not a field of LinformerConfig; did you mean 'local_window'?"),
        ({"classifier_pooling": "max"}, "classifier_pooling='max' is not one of 'cls', 'mean'"),
        ({"position_init": "sine"}, "position_init='sine' is not one of 'waves', 'sinusoidal', 'normal'"),
        ({"hidden_act": "gelo"}, "hidden_act='gelo' is not one of"),
        ({"projection_scale": 0}, "projection_scale=0 must be a positive number, or None"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob=1.5 must be a probability"),
        ({"vocab_size": -1}, "vocab_size=-1 must be a positive integer"),
        ({"pad_token_id": 31}, "pad_token_id=31 must be None or one of the 31 tokens, from 0 on"),
        ({"pad_token_id": "<pad>"}, "pad_token_id='<pad>' must be None or one of the 31 tokens"),
        ({"projection_scale": "big"}, "projection_scale='big' must be a positive number"),
        ({"projected_length": [[[4]] * 4] * 2}, "projected_length[0][0]=[4] must be a positive integer"),
        ({"hidden_dropout_prob": None}, "hidden_dropout_prob=None must be a probability"),
        ({"attention_probs_dropout_prob": True}, "attention_probs_dropout_prob=True must be a probability"),
        ({"layer_norm_eps": -1e-5}, "layer_norm_eps=-1e-05 must be a positive number"),
        ({"initializer_range": None}, "initializer_range=None must be a positive number"),
        ({"norm_first": "yes"}, "norm_first='yes' must be True or False"),
        ({"chunk_size_feed_forward": -1}, "chunk_size_feed_forward=-1 must be 0, or the tokens in a chunk"),
        ({"k": 4}, "'k' is not a field of LinformerConfig; did you mean 'projected_length'?"),
        ({"num_heads": 4}, "'num_heads' is not a field of LinformerConfig; did you mean 'num_attention_heads'?"),
        ({"causal": True}, "causal is not possible: a projected key mixes all positions"),
        ({"num_layer": 4}, "'num_layer' is not a field of LinformerConfig; did you mean 'num_hidden_layers'?"),
        ({"projection_type": "mean"}, "'projection_type' is not a field of LinformerConfig; did you mean 'projection'"),
        ({"problem_type": "regresion"}, "problem_type='regresion' is not one of 'regression', 'single_label_class"),
        ({"num_labels": 0}, "num_labels=0 must be a positive integer"),
        ({"eos_token_id": -5}, "eos_token_id=-5 must be None or one of the 31 tokens, from 0 on"),
        ({"is_decoder": True}, "is_decoder=True is not possible: a projected key mixes all positions"),
        ({"is_causal": True}, "is_causal=True is not possible"),
        (
            {"projected_lenght": 4},
            "'projected_lenght' is not a field of LinformerConfig; did you mean 'projected_length'?",
        ),
        (
            {"num_hiden_layers": 4},
            "'num_hiden_layers' is not a field of LinformerConfig; did you mean 'num_hidden_layers'?",
        ),
        (
            {"hidden_dropout": 0.1},
            "'hidden_dropout' is not a field of LinformerConfig; did you mean 'hidden_dropout_prob'?",
        ),
    ],
)
def test_config(fields, message):
    with refused(message):
        modes.config(**fields)


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"sharing": "layer-wise"}, "layerwise"),
        ({"sharing": "KEY_VALUE"}, "key-value"),
        ({"projection": "liner"}, "linear"),
        ({"projection": "Conv1d"}, "conv"),
    ],
)
def test_nearest_mode_is_named(fields, nearest):
    with pytest.raises(ValueError, match=f"did you mean {nearest!r}"):
        modes.config(**fields)


def test_numbers_of_numpy_are_numbers():
    config = modes.config(projected_length=np.array([4, 2]), max_position_embeddings=np.int64(12))
    assert config.projected_length == [4, 2]
    assert type(config.max_position_embeddings) is int
    assert LinformerAttention(16, 4, 12, np.array([4, 2, 4, 1]))(torch.randn(1, 3, 16)).shape == (1, 3, 16)


def test_misspelt_field_in_a_file(tmp_path):
    modes.config().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["projektion"] = fields.pop("projection")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for load in (LinformerConfig.from_pretrained, AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with refused("'projektion' is not a field of LinformerConfig; did you mean 'projection'?"):
            load(tmp_path)


def test_what_transformers_puts_into_a_config_is_kept():
    config = modes.config(sep_token_id=3, cls_token_id=4, num_labels=5, my_own_note="kept", layer_norm_epsilon=0.5)
    assert (config.sep_token_id, config.num_labels, config.my_own_note) == (3, 5, "kept")
    assert config.layer_norm_eps == 0.5  # an alias in transformers, not a typing error


def test_twin_ignores_the_projected_length():
    assert modes.config(projection="identity", projected_length=1000).projected_lengths == ((12,) * 4,) * 2


def test_assigned_fields_are_checked_when_a_model_is_made():
    config = modes.config()
    config.projected_length = 100
    with refused("projected_length=100 exceeds max_position_embeddings=12"):
        LinformerModel(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projected_length": 13}, "projected_length=13 exceeds max_length=12; k can be at most n"),
        ({"num_heads": 3}, "hidden_size=16 is not divisible by num_heads=3"),
        ({"projected_length": [4, 4]}, "projected_length has 2 entries, one per head, but num_heads=4"),
        ({"projected_length": "4"}, "projected_length='4' must be a positive integer"),
        ({"projected_length": [[4] * 4]}, "projected_length has 1 entries, one per head, but num_heads=4"),
        ({"projected_length": [[4]] * 4}, "projected_length=[4] must be a positive integer"),
        ({"sharing": "headwize"}, "sharing='headwize' is not one of"),
        ({"max_length": 0}, "max_length=0 must be a positive integer"),
        ({"dropout": 2}, "dropout=2 must be a probability"),
        ({"attn_implementation": "spda"}, "attn_implementation='spda' is not one of"),
        (
            {"window_shift": 3},
            "window_shift=3 must be an integer from 0 to 2, less than a window: it shifts the windows of n/k",
        ),
        (
            {"window_shift": 1, "projection": "mean"},
            "window_shift=1 must be 0: it shifts the windows of n/k tokens that E starts as",
        ),
        ({"window_shift": 0.5}, "window_shift=0.5 must be an integer from 0 to 2"),
    ],
)
def test_layer(arguments, message):
    with refused(message):
        LinformerAttention(**{"hidden_size": 16, "num_heads": 4, "max_length": 12, "projected_length": 4, **arguments})


def test_inputs_of_the_layer():
    layer, x = LinformerAttention(16, 4, 12, 4), torch.randn(2, 12, 16)
    with refused("hidden_states has 13 tokens, but at most n=12 are possible; shorten the input or make the layer"):
        layer(torch.randn(2, 13, 16))
    with refused("context has 13 tokens, but at most n=12 are possible"):
        layer(x, context=torch.randn(2, 13, 16))
    with refused("hidden_states has shape (2, 12, 15), expected (batch, length, 16)"):
        layer(torch.randn(2, 12, 15))
    with refused("hidden_states has shape (12, 16), expected (batch, length, 16)"):
        layer(x[0])
    with refused("hidden_states is of type ndarray, expected a tensor", TypeError):
        layer(x.numpy())
    with refused("context has shape (3, 5, 16), expected (2, length, 16)"):
        layer(x, context=torch.randn(3, 5, 16))
    with refused("attention_mask has shape (2, 11), expected (2, 12)"):
        layer(x, torch.ones(2, 11, dtype=torch.bool))
    with refused("context_mask has shape (2, 12), expected (2, 5)"):
        layer(x, context=x[:, :5], context_mask=torch.ones(2, 12, dtype=torch.bool))
    with refused("context_mask was given without context"):
        layer(x, context_mask=torch.ones(2, 12, dtype=torch.bool))
    with refused("is_causal=True is not possible"):
        layer(x, is_causal=True)


def test_inputs_of_the_model():
    model, ids = LinformerForMaskedLM(modes.config()), torch.ones(2, 12, dtype=torch.long)
    with refused("input_ids has 13 tokens, but at most n=12 are possible; shorten the input or call"):
        model(torch.ones(2, 13, dtype=torch.long))
    with pytest.raises(ValueError, match=re.escape("model.resize_length(13)")):
        model(torch.ones(2, 13, dtype=torch.long))
    with refused("attention_mask has shape (2, 1, 12), expected (2, 12)"):
        model(ids, torch.ones(2, 1, 12, dtype=torch.long))
    with refused("attention_mask has shape (1, 12), expected (2, 12)"):
        model(ids, torch.ones(1, 12, dtype=torch.long))
    with refused("attention_mask has type torch.float32, expected bool or integers"):
        model(ids, torch.zeros(2, 12))
    with refused("pass exactly one of input_ids and inputs_embeds"):
        model()
    with refused("input_ids has shape (12,), expected (batch, length)"):
        model(ids[0])
    with refused("inputs_embeds has shape (2, 12, 15), expected (batch, length, 16)"):
        model(inputs_embeds=torch.randn(2, 12, 15))
    with refused("is_causal is not possible: a projected key mixes all positions"):
        model(ids, is_causal=True)
    with refused("position_ids is not possible: a token's position is its rank in attention_mask"):
        model(ids, position_ids=ids)
    with refused("encoder_hidden_states is not possible: the model is an encoder; the layer LinformerAttention takes"):
        model(ids, encoder_hidden_states=ids)
    with refused("a Linformer takes no argument 'atention_mask'; did you mean 'attention_mask'?", TypeError):
        model(ids, atention_mask=ids)
    with refused("input_ids is of type list, expected a tensor", TypeError):
        model(ids.tolist())
    with refused("attention_mask is of type list, expected a tensor", TypeError):
        model(ids, ids.tolist())
    with refused("input_ids has type torch.float32, expected torch.int64 or torch.int32"):
        model(ids.float())
    with refused("input_ids has numbers from 1 to 31, but there are only 31, from 0 on"):
        model(ids.index_fill(1, torch.tensor([3]), 31))
    with refused("input_ids has numbers from -1 to 1, but there are only 31, from 0 on"):
        model(ids.index_fill(1, torch.tensor([3]), -1))
    with refused("token_type_ids has numbers from 1 to 2, but there are only 2, from 0 on"):
        model(ids, token_type_ids=ids.index_fill(1, torch.tensor([3]), 2))
    with refused("token_type_ids has shape (12,), expected (2, 12)"):
        model(ids, token_type_ids=ids[0])
    with refused("labels has shape (2, 11), expected (2, 12)"):
        model(ids, labels=ids[:, :11])
    with refused("labels has type torch.float32, expected torch.int64 or torch.int32"):
        model(ids, labels=ids.float())
    with refused("labels has numbers from 1 to 31, but there are only 31, from 0 on, and -100 where nothing"):
        model(ids, labels=ids.index_fill(1, torch.tensor([3]), 31))
    assert torch.equal(model(ids, labels=ids.int()).loss, model(ids, labels=ids).loss)
    with refused("labels has shape (2,), expected (2, 12)"):
        LinformerForTokenClassification(modes.config())(ids, labels=ids[:, 0])


@pytest.mark.parametrize(
    ("fields", "labels", "message"),
    [
        ({"num_labels": 3}, torch.tensor([0, 3]), "labels has numbers from 0 to 3, but there are only 3, from 0 on"),
        ({"num_labels": 3}, torch.tensor([0.0, 1.0]), "labels has type torch.float32, expected torch.int64"),
        ({"num_labels": 3}, torch.tensor([0, 1, 2]), "labels has shape (3,), expected (2,)"),
        ({"num_labels": 3}, torch.zeros(2, 2), "labels has shape (2, 2), expected (2, 3)"),
        ({"num_labels": 3}, torch.zeros(2, 3).long(), "labels has shape (2, 3), expected (2, 1)"),
        ({"num_labels": 1}, torch.zeros(2, 2), "labels has shape (2, 2), expected (2, 1)"),
    ],
    ids=str,
)
def test_labels_of_texts(fields, labels, message):
    with refused(message):
        LinformerForSequenceClassification(modes.config(**fields))(torch.ones(2, 12, dtype=torch.long), labels=labels)


def test_labels_of_answers():
    model, ids = LinformerForQuestionAnswering(modes.config()), torch.ones(2, 12, dtype=torch.long)
    with refused("end_positions is missing: an answer has a start and an end"):
        model(ids, start_positions=ids[:, 0])
    with refused("start_positions has shape (24,), expected (2,)"):
        model(ids, start_positions=ids, end_positions=ids)


def test_arguments_that_ask_for_nothing_are_taken():
    model, ids = LinformerModel(modes.config()), torch.ones(2, 12, dtype=torch.long)
    result = model(ids, use_cache=False, position_ids=None, past_key_values=None, is_causal=False)
    assert torch.equal(result.last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize(("projection", "length"), [("linear", 13), ("mean", 16), ("conv", 16), ("identity", 13)])
def test_advice_on_a_longer_input_can_be_followed(projection, length):
    model, ids = LinformerModel(modes.config(projection=projection)), torch.ones(2, 13, dtype=torch.long)
    with pytest.raises(ValueError, match=re.escape(f"model.resize_length({length})")):
        model(ids)
    model.resize_length(length)
    assert model(ids).last_hidden_state.shape == (2, 13, 16)


def test_model_of_another_config():
    with refused("LinformerModel takes a LinformerConfig, not RobertaConfig; linformers.convert.from_", TypeError):
        LinformerModel(RobertaConfig())


def test_heads_are_checked_when_a_model_is_built():
    config = LinformerConfig(hidden_size=32)  # as transformers' ConfigTester does
    with refused("hidden_size=32 is not divisible by num_attention_heads=12"):
        LinformerModel(config)


def test_unknown_implementation():
    with pytest.raises(UserError, match=r'attn_implementation="tritton"` is not supported.*"triton"'):
        LinformerModel(modes.config(attn_implementation="tritton"))


def test_implementations_that_cannot_mask_slots():
    model = LinformerModel(modes.config(attn_implementation="flex_attention"))
    with refused("attn_implementation='flex_attention' cannot leave out keys"):
        model(torch.ones(1, 12, dtype=torch.long), torch.tensor([[1] * 6 + [0] * 6]))


def test_other_windows_are_asked_for_with_the_projection(tmp_path):
    LinformerModel(modes.config(local_window=2)).save_pretrained(tmp_path)
    twin = LinformerModel.from_pretrained(tmp_path, projection="identity", local_window=0)
    assert (twin.config.projection, twin.config.local_windows) == ("identity", (0, 0))
    alone = LinformerModel.from_pretrained(tmp_path, projection="none", local_window=3)
    assert alone.config.local_windows == (3, 3)
    with refused("local_window=2 adds nothing to projection='identity'"):
        LinformerModel.from_pretrained(tmp_path, projection="identity")


def test_checkpoint_of_other_heads(tmp_path):
    LinformerModel(modes.config()).save_pretrained(tmp_path)
    with refused("the checkpoint has num_attention_heads=4, of which its weights are made; num_attention_heads=2"):
        LinformerModel.from_pretrained(tmp_path, num_attention_heads=2)


def test_checkpoint_of_another_length(tmp_path):
    model = LinformerForMaskedLM(modes.config())
    model.save_pretrained(tmp_path)
    message = "the checkpoint is for n=12, k=4, but n=24, k=4 was asked for; load it as it is, then call"
    with refused(message):
        LinformerForMaskedLM.from_pretrained(tmp_path, max_position_embeddings=24)
    with refused(message):
        LinformerForMaskedLM.from_pretrained(tmp_path, config=modes.config(max_position_embeddings=24))
    with refused("the checkpoint is for n=12, k=4, but n=12, k=6 was asked for"):
        LinformerForMaskedLM.from_pretrained(tmp_path, projected_length=6)
    scale = model.config.projection_scale
    with refused(f"the checkpoint was made with projection_scale={scale}: under 1.0 its weights mean another"):
        LinformerForMaskedLM.from_pretrained(tmp_path, projection_scale=1.0)
    with refused("the checkpoint was made with projection_init='window': under 'gaussian' its weights mean another"):
        AutoModel.from_pretrained(tmp_path, projection_init="gaussian")
    with refused("the checkpoint was made with sharing='layerwise': under 'key-value' its weights mean another"):
        LinformerForMaskedLM.from_pretrained(tmp_path, sharing="key-value")
    with refused("the checkpoint was made with norm_first=False: under True its weights mean another"):
        LinformerForMaskedLM.from_pretrained(tmp_path, norm_first=True)
    assert (
        LinformerModel.from_pretrained(tmp_path, num_hidden_layers=1, projected_length=[4]).config.num_hidden_layers
        == 1
    )
    RobertaConfig(vocab_size=31, hidden_size=16, num_attention_heads=4).save_pretrained(tmp_path / "roberta")
    with refused("LinformerModel cannot be loaded from a checkpoint of model type 'roberta'; load it as such, then"):
        LinformerModel.from_pretrained(tmp_path / "roberta")
    with refused("the checkpoint is for n=12, the model for n=24; load it into a model for n=12, then call"):
        LinformerForMaskedLM(modes.config(max_position_embeddings=24)).load_state_dict(model.state_dict())


def test_what_a_checkpoint_can_be_loaded_with(tmp_path):
    model = LinformerForMaskedLM(modes.config())
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path / "config")
    same = [
        LinformerForMaskedLM.from_pretrained(tmp_path, config=str(tmp_path / "config")),
        LinformerForMaskedLM.from_pretrained(tmp_path, projected_length=[4, 4], hidden_dropout_prob=0.5),
        LinformerForMaskedLM.from_pretrained(None, config=model.config, state_dict=model.state_dict()),
    ]
    for other in same:
        assert torch.equal(other.linformer.projections[0].delta, model.linformer.projections[0].delta)
        assert torch.equal(other.head.dense.weight, model.head.dense.weight)
    assert same[1].config.hidden_dropout_prob == 0.5
    twin = LinformerForMaskedLM.from_pretrained(tmp_path, projection="identity")
    assert torch.equal(twin.head.dense.weight, model.head.dense.weight)
    longer = LinformerForMaskedLM.from_pretrained(tmp_path, max_position_embeddings=24, ignore_mismatched_sizes=True)
    assert longer(torch.ones(1, 24, dtype=torch.long)).logits.shape == (1, 24, 31)
    with pytest.raises(OSError, match="nowhere"):
        LinformerForMaskedLM.from_pretrained(tmp_path / "nowhere")


def test_resizing_to_what_cannot_be():
    model = LinformerModel(modes.config())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with refused("max_length=3 is below k=4: name a new projected_length, too"):
        model.resize_length(3)
    with refused("max_length=0 must be a positive integer"):
        model.resize_length(0)
    assert model.config.max_position_embeddings == 12
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_converting_another_architecture():
    with refused("from_roberta takes one of RobertaModel, "):
        from_roberta(LinformerModel(modes.config()))


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"is_decoder": True}, {}, "the RoBERTa model has is_decoder=True: a projected key mixes"),
        ({"pad_token_id": None}, {}, "the RoBERTa model has pad_token_id=None, after which its positions are counted"),
        ({}, {"hidden_size": 32}, "hidden_size=32 cannot be chosen: RoBERTa's weights are for 16"),
        ({}, {"norm_first": True}, "norm_first=True cannot be chosen: RoBERTa's weights are for False"),
        (
            {},
            {"projected_length": 4},
            "projected_length=4 has no effect on a Transformer; pass projection='linear' too",
        ),
        ({}, {"sharing": "none", "projection": "identity"}, "sharing='none' has no effect on a Transformer"),
        (
            {},
            {"projecton": "linear"},
            "projecton='linear' is not a field of LinformerConfig; did you mean 'projection'?",
        ),
        ({}, {"num_labels": 3}, "num_labels=3 cannot be chosen: RoBERTa's weights are for 2"),
        ({}, {"k": 3}, "k=3 is not a field of LinformerConfig; did you mean 'projected_length'?"),
        ({}, {"nonsense": 3}, "nonsense=3 is not a field of LinformerConfig"),
    ],
)
def test_converting_to_what_cannot_be(fields, changes, message):
    config = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, **fields}
    with refused(message):
        from_roberta(RobertaModel(RobertaConfig(intermediate_size=24, max_position_embeddings=20, **config)), **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_window": -1}, "local_window=-1 must be an integer from 0 to 512"),
        ({"local_window": 513}, "local_window=513 must be"),
        ({"local_window": 2.0}, "local_window=2.0 must be"),
        ({"local_window": "32"}, "local_window='32' must be"),
        ({"local_window": [8, 8, 8]}, "local_window has 3 entries, one per layer, but num_hidden_layers=2"),
        ({"local_window": [8, -2]}, "local_window=-2 must be"),
        ({"local_window": 8, "projection": "identity"}, "local_window=8 adds nothing to projection='identity'"),
        ({"projection": "none"}, "projection='none' leaves no key to attend to; local_window must be at least 1"),
        ({"projection": "none", "local_window": [4, 0]}, "projection='none' leaves no key to attend to"),
    ],
)
def test_local_windows(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        modes.config(**fields)
    window = fields.get("local_window", 0)
    if not isinstance(window, list):
        with pytest.raises(ValueError, match=re.escape(message)):
            LinformerAttention(16, 4, 12, 4, **fields)


def test_local_windows_and_context():
    layer = LinformerAttention(16, 4, 12, 4, local_window=2)
    with pytest.raises(ValueError, match="local_window=2 is for self-attention"):
        layer(torch.randn(1, 5, 16), context=torch.randn(1, 5, 16))


def test_local_windows_need_a_mask():
    model = LinformerModel(modes.config(local_window=2, attn_implementation="flex_attention"))
    with pytest.raises(ValueError, match="cannot leave out keys, and a local window makes that necessary"):
        model(torch.ones(1, 12, dtype=torch.long))
