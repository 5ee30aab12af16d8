"""Bad input: one sentence that names the field, its value and what would be right."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModel

from linformers import LinformerAttention, LinformerConfig, LinformerForMaskedLM, LinformerModel
from linformers.convert import from_roberta

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
        ({"num_attention_heads": 5}, "hidden_size=16 is not divisible by num_attention_heads=5"),
        (
            {"sharing": "layer-wise"},
            "sharing='layer-wise' is not one of 'none', 'headwise', 'key-value', 'layerwise'; did",
        ),
        ({"projection": "liner"}, "projection='liner' is not one of"),
        ({"projection_init": "gausian"}, "projection_init='gausian' is not one of 'window', 'gaussian'; did you mean"),
        ({"hidden_act": "gelo"}, "hidden_act='gelo' is not one of"),
        ({"projection_scale": 0}, "projection_scale=0 must be a positive number, or None for 0.12·k/n"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob=1.5 must be a probability"),
        ({"vocab_size": -1}, "vocab_size=-1 must be a positive integer"),
        ({"pad_token_id": 31}, "pad_token_id=31 must be None or one of the 31 tokens, from 0 on"),
        ({"pad_token_id": "<pad>"}, "pad_token_id='<pad>' must be None or one of the 31 tokens"),
        ({"projection_scale": "big"}, "projection_scale='big' must be a positive number"),
        ({"projected_length": [[[4]] * 4] * 2}, "projected_length[0][0]=[4] must be a positive integer"),
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


def test_nearest_mode_is_named():
    with pytest.raises(ValueError, match="did you mean 'layerwise'"):
        modes.config(sharing="layer-wise")
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        modes.config(projection="liner")


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
        ({"sharing": "headwize"}, "sharing='headwize' is not one of"),
        ({"max_length": 0}, "max_length=0 must be a positive integer"),
        ({"dropout": 2}, "dropout=2 must be a probability"),
        ({"attn_implementation": "spda"}, "attn_implementation='spda' is not one of"),
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
    with refused("hidden_states has shape (2, 12, 15), expected (2, length, 16)"):
        layer(torch.randn(2, 12, 15))
    with refused("context has shape (3, 5, 16), expected (2, length, 16)"):
        layer(x, context=torch.randn(3, 5, 16))
    with refused("attention_mask has shape (2, 11), expected (batch, length) = (2, 12)"):
        layer(x, torch.ones(2, 11, dtype=torch.bool))
    with refused("context_mask has shape (2, 12), expected (batch, length) = (2, 5)"):
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
    with refused("attention_mask has shape (2, 1, 12), expected (batch, length) = (2, 12)"):
        model(ids, torch.ones(2, 1, 12, dtype=torch.long))
    with refused("attention_mask has shape (1, 12), expected (batch, length) = (2, 12)"):
        model(ids, torch.ones(1, 12, dtype=torch.long))
    with refused("attention_mask has type torch.float32, expected bool or integers"):
        model(ids, torch.zeros(2, 12))
    with refused("pass exactly one of input_ids and inputs_embeds"):
        model()
    with refused("input_ids has shape (12,), expected (batch, length)"):
        model(ids[0])
    with refused("inputs_embeds has shape (2, 12, 15), expected (batch, length, 16)"):
        model(inputs_embeds=torch.randn(2, 12, 15))
    with refused("is_causal=True is not possible"):
        model(ids, is_causal=True)
    with refused("position_ids cannot be chosen: a token's position is its rank in attention_mask"):
        model(ids, position_ids=ids)
    with refused("a Linformer takes no argument 'atention_mask'; did you mean 'attention_mask'?", TypeError):
        model(ids, atention_mask=ids)


def test_implementations_that_cannot_mask_slots():
    model = LinformerModel(modes.config(attn_implementation="flex_attention"))
    with refused("attn_implementation='flex_attention' cannot leave out projected keys"):
        model(torch.ones(1, 12, dtype=torch.long), torch.tensor([[1] * 6 + [0] * 6]))


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
    with refused("the checkpoint is for n=12, the model for n=24; load it into a model for n=12, then call"):
        LinformerForMaskedLM(modes.config(max_position_embeddings=24)).load_state_dict(model.state_dict())


def test_resizing_to_what_cannot_be():
    model = LinformerModel(modes.config())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with refused("projected_length=4 exceeds max_position_embeddings=3"):
        model.resize_length(3)
    with refused("max_position_embeddings=0 must be a positive integer"):
        model.resize_length(0)
    assert model.config.max_position_embeddings == 12
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_converting_another_architecture():
    with refused("from_roberta takes one of RobertaModel, "):
        from_roberta(LinformerModel(modes.config()))
