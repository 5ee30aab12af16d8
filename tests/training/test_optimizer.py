"""Muon and AdamW as one optimizer: which parameters belong to which, and that each does what torch's does."""

import copy

import pytest
import torch

from linformers import LinformerConfig, LinformerForMaskedLM
from linformers.training import pretrain
from linformers.training.corpus import Corpus
from linformers.training.optimizer import MuonAdamW, parameter_groups

from . import small


def make(seed=0, **config):
    torch.manual_seed(seed)
    return LinformerForMaskedLM(LinformerConfig(vocab_size=50, **{**small.MODEL, **config}))


def names_of(model, groups):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group: {names[parameter] for parameter in parameters} for group, parameters in groups.items()}


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_muon_trains_the_matrices_of_layers_alone(sharing):
    model = make(sharing=sharing)
    found = names_of(model, parameter_groups(model, {"linformer.embeddings.word_embeddings.weight"}))
    ends = ("query", "key", "value", "output", "intermediate")
    assert {name.split(".")[-2] for name in found["matrices"]} == set(ends)
    assert len(found["matrices"]) == 2 * (4 + 2)  # layers, of attention and feed-forward
    assert found["decayed"] == {"linformer.embeddings.word_embeddings.weight"}
    assert {"head.dense.weight", "linformer.layers.0.attention.query.bias"} < found["others"]
    assert any(".delta" in name for name in found["others"])
    assert sum(map(len, found.values())) == len(list(model.parameters()))


def test_each_part_is_torchs_optimizer():
    model = make()
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    adam = {"betas": (0.9, 0.98), "eps": 1e-6}
    decayed = {"head.dense.weight"}
    own = MuonAdamW(parameter_groups(model, decayed), **options, **adam)
    own.load_state_dict(own.state_dict())  # as accelerate does; it replaces groups and state
    groups = parameter_groups(twin, decayed)
    parts = [
        torch.optim.Muon(groups["matrices"], adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(groups["decayed"], fused=True, **options, **adam),
        torch.optim.AdamW(groups["others"], fused=True, **adam, lr=1e-2, weight_decay=0.0),
    ]
    for step in range(3):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            other.grad = parameter.grad.clone()
        for optimizer in (own, *parts):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            optimizer.step()
    start = dict(make().named_parameters())
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        assert not torch.equal(parameter, start[name]), name


def test_rates_of_warmup_stable_decay(corpus, tmp_path):
    recipe = small.recipe(corpus, tmp_path, schedule="wsd", decay_share=0.25, optimizer="muon", steps=12)
    trainer = pretrain.make_trainer(recipe, Corpus.open(corpus), pretrain.training_arguments(recipe))
    trainer.create_optimizer_and_scheduler(12)
    rates = []
    for _ in range(13):
        rates.append({group["lr"] for group in trainer.optimizer.param_groups})
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert all(len(rate) == 1 for rate in rates)  # Muon and AdamW share the schedule
    expected = [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]
    assert [rate / recipe.learning_rate for (rate,) in rates] == pytest.approx(expected)
