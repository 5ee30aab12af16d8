"""Random configs: each builds a model that works and is the same after saving, or ends in a sentence with a field."""

import dataclasses
import json
import math
import re
import signal
import tempfile
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.activations import ACT2FN

from linformers import LinformerConfig, config
from linformers.auto import AUTO_CLASSES
from linformers.errors import UserError

MODELS = sorted(set(AUTO_CLASSES.values()), key=lambda model_class: model_class.__name__)
FIELDS = {field.name for field in dataclasses.fields(LinformerConfig)} | {"num_labels", "attn_implementation"}
# Values of wrong types, out of range, or at its ends; none of them is a size that would fill the memory.
ODD = [None, True, False, 0, -1, 1, 2, 3, 1.0, 0.5, 1.5, math.nan, math.inf, -math.inf, 1e300, 1e-300, 1e-45, 1e30]
ODD += [2**40, 2**63, 2**64, -(2**63), 10**400, "", "1", "linear", "cls", "no/such/name", "\n", [], [[]], [None], {}]
ODD += [(4, 4), [4, 4], [[4, 4], [4, 4]], [[[4]]], {"a": 1}, {0: "a", 1: "b"}, b"x", {1, 2}, object, print, 1j]
ODD += [np.int64(4), np.float32(0.1), np.array([4, 4]), np.nan, torch.tensor(4), torch.float16]


def random_fields(random):
    """Fields that mostly make sense; in half of the configs, up to three of them have odd values."""
    layers, heads, n = random.randint(1, 3), random.choice([1, 2, 4]), random.randint(1, 24)
    vocab_size, chosen = random.randint(1, 40), random.choice

    def k():
        return random.randint(1, n)

    def token():
        return chosen([None, 0, random.randrange(vocab_size)])

    by_layer = [chosen([0, k()]) for _ in range(layers)]
    lengths = [None, k(), by_layer, [[k() for _ in range(heads)] for _ in range(layers)]]
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": chosen([4, 8, 16]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": random.randint(1, 30),
        "max_position_embeddings": n,
        "type_vocab_size": random.randint(1, 3),
        "projected_length": chosen([None, k(), n, math.gcd(n, 12), *lengths]),
        "local_window": chosen([None, 0, 0, 1, 3, 30, 512, [random.randint(0, 9) for _ in range(layers)]]),
        "pad_token_id": token(),
        "bos_token_id": token(),
        "eos_token_id": token(),
    }
    others = {
        "sharing": config.SHARINGS,
        "projection": config.PROJECTIONS,
        "projection_init": config.PROJECTION_INITS,
        "position_embedding_type": config.POSITION_TYPES,
        "position_init": config.POSITION_INITS,
        "classifier_pooling": config.POOLINGS,
        "problem_type": (None, *config.PROBLEM_TYPES),
        "hidden_act": ("gelu", *ACT2FN),
        "classifier_activation": ("tanh", "relu", "gelu"),
        "embedding_size": (None, 3, 8),
        "shifted_windows": (False, True),
        "norm_first": (False, True),
        "embedding_norm": (False, True),
        "tie_word_embeddings": (False, True),
        "sparse_prediction": (False, True),
        "projection_scale": (None, 0.12, 1.0, n / 2, *config.RANGES["projection_scale"]),
        "initial_far_bias": (None, 0.0, -5.5, *config.RANGES["initial_far_bias"]),
        "rope_parameters": (None, {}, {"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 2e6}),
        "initial_self_score": (None, 1.0, 6.5, *config.RANGES["initial_self_score"]),
        "initializer_range": (0.02, *config.RANGES["initializer_range"]),
        "layer_norm_eps": (1e-5, *config.RANGES["layer_norm_eps"]),
        "hidden_dropout_prob": (0.0, 0.1, 0.5),
        "attention_probs_dropout_prob": (0.0, 0.1, 0.99),
        "classifier_dropout": (None, 0.5),
        "chunk_size_feed_forward": (0, 1, 5),
        "num_labels": (1, 2, 7),
        "attn_implementation": (None, "sdpa", "eager"),
    }
    for name, values in others.items():
        if random.random() < 0.3:
            fields[name] = chosen(values)
    if random.random() < 0.5:
        fields |= {name: chosen(ODD) for name in random.sample(sorted(FIELDS), random.randint(1, 3))}
    return fields


def labels_of(model, ids):
    """The labels that a model takes; none for the encoder."""
    name, fields = type(model).__name__, model.config
    if name == "LinformerForMaskedLM":
        return {"labels": ids}
    if name == "LinformerForTokenClassification":
        return {"labels": torch.zeros_like(ids)}
    if name == "LinformerForQuestionAnswering":
        return {"start_positions": ids[:, 0] * 0, "end_positions": ids[:, 0] * 0}
    if name == "LinformerModel":
        return {}
    several = fields.problem_type == "regression" and fields.num_labels > 1
    if several or fields.problem_type == "multi_label_classification":
        return {"labels": torch.zeros(len(ids), fields.num_labels)}
    return {"labels": torch.zeros(len(ids), dtype=torch.float if fields.num_labels == 1 else torch.long)}


def outcome(random, folder):
    """`"works"` or `"refused"`; anything else is wrong."""
    model_class, fields = random.choice(MODELS), random_fields(random)
    torch.manual_seed(random.randrange(2**31))
    try:
        model = model_class(LinformerConfig(**fields)).train()
    except UserError as error:
        names_a_field = not FIELDS.isdisjoint(re.findall(r"\w+", str(error)))
        return "refused" if names_a_field and "\n" not in str(error) else f"badly refused: {error}"
    ids = torch.randint(model.config.vocab_size, (2, random.randint(1, model.config.max_position_embeddings)))
    mask = torch.rand(ids.shape) < 0.8
    mask[:, 0] = True
    outputs = model(ids, mask, return_dict=True, **labels_of(model, ids))
    (outputs[0] if "loss" in outputs else outputs[0].square().mean()).backward()
    assert all(tensor.isfinite().all() for tensor in tree_leaves(outputs.to_tuple()))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.eval().save_pretrained(folder)
    loaded = model_class.from_pretrained(folder, attn_implementation=model.config._attn_implementation)  # is not saved
    weights, again = model.state_dict(), loaded.state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    with torch.no_grad():
        own, other = (each(ids, mask, return_dict=True).to_tuple() for each in (model, loaded))
    for tensor, again in zip(tree_leaves(own), tree_leaves(other), strict=True):
        assert torch.equal(tensor, again)
    return "works"


def hangs(number, frame):
    raise AssertionError("it hangs")


def run(seeds):
    """The number of each outcome, and what failed."""
    counts, wrong = Counter(), []
    before = signal.signal(signal.SIGALRM, hangs)
    for seed in seeds:
        signal.alarm(120)
        try:
            with tempfile.TemporaryDirectory() as folder:
                counts[outcome(Random(seed), folder)] += 1
        except Exception as error:
            wrong.append(f"seed {seed}: {random_fields_of(seed)}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return counts, wrong


def random_fields_of(seed):
    random = Random(seed)
    return random.choice(MODELS).__name__, random_fields(random)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_configs(count):
    counts, wrong = run(range(count))
    print(json.dumps(counts))
    assert not wrong, "\n".join(wrong)
    assert counts.keys() == {"works", "refused"}
    assert counts["works"] > 0.2 * count
    assert counts["refused"] > 0.2 * count
