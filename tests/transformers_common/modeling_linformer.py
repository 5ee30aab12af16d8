"""The Linformer models for transformers' common model tests; runs inside their source tree."""

import unittest
from unittest import mock

from linformers import LinformerConfig
from linformers.auto import AUTO_CLASSES

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

MODES = {
    "Linear": {},
    "Gaussian": {"sharing": "none", "projection_init": "gaussian", "norm_first": True},
    "Max": {"projection": "max"},
    "Convolution": {"projection": "conv", "sharing": "key-value", "norm_first": True},
    "Identity": {"projection": "identity"},
    "Window": {"local_window": 2},
    "Rotary": {"position_embedding_type": "rotary", "projection_init": "sample"},
    "Default": {  # of every field but the sizes
        "position_embedding_type": "rotary",
        "projection_init": "sample",
        "norm_first": True,
        "local_window": 2,
    },
    "FarBias": {"position_embedding_type": "rotary", "local_window": 2, "initial_far_bias": -1.0},
}


class LinformerModelTester:
    batch_size, seq_length, vocab_size, num_labels = 13, 8, 99, 3
    hidden_size, num_hidden_layers, num_attention_heads, projected_length = 32, 2, 4, 4
    encoder_seq_length = seq_length
    is_training = True

    def __init__(self, parent, mode):
        self.parent, self.mode = parent, mode
        near = 2 * mode["local_window"] + 1 if "local_window" in mode else 0
        self.key_length = self.seq_length if mode.get("projection") == "identity" else self.projected_length + near

    def get_config(self):
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "projected_length")
        sizes = {name: getattr(self, name) for name in names}
        sizes |= {"intermediate_size": 37, "max_position_embeddings": self.seq_length, "local_window": 0}
        choices = {"projection_init": "window", "position_embedding_type": "absolute", "norm_first": False}
        return LinformerConfig(**{**sizes, **choices, **self.mode})

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, 2),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs


class CommonTests(ModelTesterMixin):
    mode = None
    all_model_classes = tuple(dict.fromkeys(AUTO_CLASSES.values()))
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = LinformerModelTester(self, self.mode)
        self.config_tester = ConfigTester(self, config_class=LinformerConfig, hidden_size=37)
        if "rope_scaling" in self._testMethodName:
            self.skipTest("it passes inputs longer than n, for which E has no rows")

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_weights_reload_no_missing_tied_weights(self):
        with mock.patch("linformers.modeling.write_manifest"):  # it overwrites a saved file on purpose
            super().test_model_weights_reload_no_missing_tied_weights()

    def test_retain_grad_hidden_states_attentions(self):
        if "local_window" in self.mode:
            self.skipTest("with a local window, attentions are gathered from blocks and receive no gradient")
        super().test_retain_grad_hidden_states_attentions()


for name, mode in MODES.items():
    globals()[f"{name}Test"] = type(f"{name}Test", (CommonTests, unittest.TestCase), {"mode": mode})
