"""`LinformerConfig`: which fields are valid, what their defaults become, and the paper's model."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, RobertaConfig

from linformers import LinformerConfig, LinformerForMaskedLM, LinformerModel
from linformers.config import ALIASES

from . import modes
from .modes import refused

WRONG_VALUES = {
    ("vocab_size", "num_labels", "projected_length"): [0, "4", True],
    ("num_hidden_layers", "max_position_embeddings"): [2**63],
    ("local_window",): [-1, 513, 2.0],
    ("hidden_dropout_prob", "attention_probs_dropout_prob"): [1.5, None, True],
    ("layer_norm_eps", "initializer_range"): [-1e-5, None],
    ("projection_scale", "initial_self_score"): [0, -1],
    ("norm_first",): [None, "yes"],
    ("embedding_norm",): [None, 1],
    ("shifted_windows",): ["yes"],
    ("chunk_size_feed_forward",): [-1],
    ("pad_token_id", "eos_token_id"): [31, -5, "<pad>"],
    ("sharing", "projection", "projection_init", "position_init"): ["linaer"],
    ("classifier_pooling", "hidden_act", "problem_type"): ["max"],
    ("id2label", "label2id"): [["bad", "good"]],
    ("id2label",): [{"bad": 0}],
    ("num_labels",): [0, 2.5, 2**63],
    ("is_causal", "is_decoder", "add_cross_attention"): [True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for names, values in WRONG_VALUES.items() for name in names for value in values],
    ids=str,
)
def test_wrong_values_are_named(name, value):
    with refused(f"{name}={value!r} "):
        modes.config(**{name: value})


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"projected_length": 13}, "projected_length=13 exceeds max_position_embeddings=12"),
        ({"projected_length": [4, 2.5]}, "projected_length=2.5 must be"),
        ({"projected_length": [[[4]] * 4] * 2}, "[4] must be"),
        ({"projected_length": [4, 4, 4]}, "projected_length has 3 entries"),
        ({"projected_length": [[4, 4], [4] * 4]}, "projected_length[0] has 2 entries"),
        *(({"projected_length": 5, "projection": own}, "=5 does not divide") for own in ("mean", "max", "conv")),
        ({"projected_length": [4, 3]}, "projected_length=3 does not divide 4"),
        ({"projected_length": [[4, 2, 4, 4]] * 2, "sharing": "headwise", "projection": "conv"}, "=[2, 4] cannot"),
        ({"projected_length": [4, 2], "projection": "conv"}, "projected_length=[2, 4] cannot"),
        ({"local_window": [8, 8, 8]}, "local_window has 3 entries"),
        ({"local_window": [8, -2]}, "local_window=-2 must be"),
        ({"local_window": 8, "projection": "identity"}, "local_window=8 adds nothing"),
        ({"projection": "none", "local_window": [4, 0]}, "local_window must be at least 1"),
        ({"causal": True}, "causal is"),
    ],
)
def test_invalid_combinations_are_named(fields, fragment):
    with refused(fragment):
        modes.config(**fields)


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"sharing": "KEY_VALUE"}, "key-value"),
        ({"projection": "Conv1d"}, "conv"),
        *(({alias: 4}, field) for alias, field in ALIASES.items()),
        ({"projected_lengths": 4}, "projected_length"),
        ({"local_windows": 2}, "local_window"),
        ({"num_hiden_layers": 4}, "num_hidden_layers"),
    ],
)
def test_the_nearest_name_is_suggested(fields, nearest):
    with refused(f"did you mean {nearest!r}?"):
        modes.config(**fields)


def test_a_misspelled_field_in_a_file(tmp_path):
    modes.config().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["projektion"] = fields.pop("projection")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for load in (LinformerConfig.from_pretrained, AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with refused("'projektion' is not a field of LinformerConfig; did you mean 'projection'?"):
            load(tmp_path)


def test_keys_of_transformers_and_numbers_of_numpy_are_accepted():
    config = modes.config(sep_token_id=3, cls_token_id=4, num_labels=5, my_own_note="kept", layer_norm_epsilon=0.5)
    assert (config.sep_token_id, config.num_labels, config.my_own_note) == (3, 5, "kept")
    assert config.layer_norm_eps == 0.5  # transformers uses both names
    config = modes.config(projected_length=np.array([4, 2]), max_position_embeddings=np.int64(12))
    assert (config.projected_length, type(config.max_position_embeddings)) == ([4, 2], int)


def reassigned(config, fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def through_a_dict(config, fields):
    return LinformerConfig(**{**config.to_dict(), **fields})


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"projected_length": 100}, "projected_length=100 exceeds max_position_embeddings=12"),
        ({"num_attention_heads": 5}, "hidden_size=16 is not divisible by num_attention_heads=5"),
        ({"num_labels": 0}, "id2label={} must have"),
    ],
)
def test_assigned_fields_are_checked_when_a_model_is_built(fields, fragment):
    with refused(fragment):
        LinformerModel(reassigned(modes.config(), fields))


@pytest.mark.parametrize(
    ("fields", "k", "w"),
    [
        ({}, 256, 64),
        ({"max_position_embeddings": 512}, 256, 64),
        ({"max_position_embeddings": 64}, 32, 8),
        ({"max_position_embeddings": 1}, 1, 1),
        ({"max_position_embeddings": 300, "projection": "mean"}, 150, 37),
        ({"max_position_embeddings": 514, "projection": "conv"}, 2, 64),
        ({"projection": "identity"}, 4096, 0),
        ({"projection": "identity", "projected_length": 1000}, 4096, 0),
        ({"projection": "none"}, 0, 64),
        ({"projected_length": 7, "local_window": 0}, 7, 0),
        ({"max_position_embeddings": 16, "local_window": 100}, 8, 100),
    ],
    ids=str,
)
@pytest.mark.parametrize("change", [reassigned, through_a_dict])
def test_the_defaults_of_k_and_w_adapt(fields, k, w, change):
    config = change(LinformerConfig(), fields)
    for name in ("projected_length", "local_window"):
        assert getattr(config, name) == fields.get(name)
    assert config.local_windows == (w,) * 12
    assert config.projected_lengths == ((k,) * 12,) * 12
    assert config.largest_projected_length == k


@pytest.mark.parametrize("change", [reassigned, through_a_dict])
def test_derived_values_follow_the_fields(change):
    """s and the shifts of a model are those of the fields at the time when it is built."""
    config = modes.config(max_position_embeddings=512, projected_length=None, shifted_windows=True)
    models = [LinformerModel(config)]
    for fields in ({"max_position_embeddings": 4096}, {"local_window": 32}, {"shifted_windows": False}):
        config = change(config, fields)
        models.append(LinformerModel(config))
    scales = [1.2 * 256 / 512, 1.2 * 256 / 4096, 0.12 * 256 / 4096, 0.12 * 256 / 4096]
    assert [model.projections[0].scale for model in models] == pytest.approx(scales)
    assert [model.projections.shifts for model in models] == [(0, 1), (0, 8), (0, 8), (0, 0)]
    assert config.projection_scale is None


@pytest.mark.parametrize(
    ("fields", "k", "w", "c"),
    [
        ({"projected_length": None}, 6, 0, 1.2),
        ({"projected_length": None, "projection": "mean", "max_position_embeddings": 300}, 150, 0, None),
        ({"local_window": [0, 2]}, 4, [0, 2], 0.12),
        ({"local_window": None}, 4, 1, 0.12),
        ({"sharing": "headwise"}, 4, 0, 0.12),
        ({"projection_scale": 0.3, "projected_length": [4, 2]}, [4, 2], 0, 0.3),
        ({"projection": "identity", "projected_length": None, "local_window": None}, None, 0, None),
    ],
    ids=str,
)
def test_saving_writes_the_values_that_the_weights_were_trained_with(fields, k, w, c, tmp_path):
    model = LinformerForMaskedLM(modes.config(**fields))
    names = ("projected_length", "local_window", "projection_scale")
    before = {name: getattr(model.config, name) for name in names}
    model.save_pretrained(tmp_path)
    assert {name: getattr(model.config, name) for name in before} == before
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[name] for name in names] == [k, w, c]


def test_saving_writes_fields_with_their_default_values(tmp_path):
    """So that a version with other defaults reads the same model."""
    LinformerConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    defaults = {field.name: field.default for field in dataclasses.fields(LinformerConfig)}
    own = defaults.keys() - {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"rope_parameters"}
    assert len(own) > 20
    assert {name: written[name] for name in own} == {name: defaults[name] for name in own}
    assert LinformerConfig.from_pretrained(tmp_path).to_dict() == LinformerConfig().to_dict()


PER_HEAD = [[4, 2, 4, 1], [4, 4, 4, 4]]


def test_the_paper_has_the_sizes_of_roberta_base():
    config, default = LinformerConfig.paper(), LinformerConfig()
    assert (config.max_position_embeddings, config.projected_length, config.sharing) == (512, 128, "layerwise")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        assert getattr(config, name) == getattr(default, name) == getattr(RobertaConfig(), name)
    assert (config.projection, config.projection_init, config.position_init) == ("linear", "gaussian", "normal")
    assert (config.norm_first, config.initial_self_score, config.hidden_act) == (False, None, "gelu")
    assert config.window_shifts == config.local_windows == (0,) * 12
    other = LinformerConfig.paper(1024, 256, "headwise", num_hidden_layers=6, norm_first=True, projection_scale=0.5)
    assert (other.max_position_embeddings, other.projected_length, other.sharing) == (1024, 256, "headwise")
    assert (other.num_hidden_layers, other.norm_first, other.projection_scale) == (6, True, 0.5)
    for name in ("max_position_embeddings", "projected_length"):
        with refused(f"{name}=256: pass it to LinformerConfig.paper as n or k"):
            LinformerConfig.paper(**{name: 256})


@pytest.mark.parametrize(("n", "k", "sharing"), [(700, 90, "headwise"), (13, 7, "layerwise"), (12, PER_HEAD, "none")])
def test_the_papers_e_is_the_parameter(n, k, sharing):
    """s = 1, so that one learning rate serves all weights."""
    config = LinformerConfig.paper(n, k, sharing, num_hidden_layers=2, **modes.SIZES)
    for projection in LinformerModel(config).projections:
        assert projection.scale == pytest.approx(1, rel=1e-15)
        torch.testing.assert_close(projection(n), projection.delta, rtol=1e-15, atol=0)
