"""The tester that transformers' common model tests ask for; it runs from inside their source tree."""

import os
import unittest

from linformers import (
    LinformerConfig,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

PROJECTION = os.environ.get("PROJECTION", "linear")
WINDOW = int(os.environ.get("WINDOW", "0"))


class LinformerModelTester:
    batch_size, seq_length, vocab_size, num_labels = 13, 8, 99, 3
    hidden_size, num_hidden_layers, num_attention_heads, projected_length = 32, 2, 4, 4
    encoder_seq_length = seq_length
    key_length = seq_length if PROJECTION == "identity" else projected_length + (2 * WINDOW + 1 if WINDOW else 0)
    is_training = True

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        return LinformerConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=self.seq_length,
            projected_length=self.projected_length,
            projection=PROJECTION,
            sharing=os.environ.get("SHARING", "layerwise"),
            projection_init=os.environ.get("PROJECTION_INIT", "window"),
            norm_first="NORM_FIRST" in os.environ,
            local_window=WINDOW,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, 2),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs


class LinformerModelTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        LinformerModel,
        LinformerForMaskedLM,
        LinformerForSequenceClassification,
        LinformerForTokenClassification,
        LinformerForQuestionAnswering,
    )
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = LinformerModelTester(self)
        self.config_tester = ConfigTester(self, config_class=LinformerConfig, hidden_size=36)

    def test_config(self):
        self.config_tester.run_common_tests()

    @unittest.skipIf(WINDOW, "with a local window, attentions are cut out of blocks, and no gradient goes through them")
    def test_retain_grad_hidden_states_attentions(self):
        super().test_retain_grad_hidden_states_attentions()
