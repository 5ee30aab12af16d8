"""`resize_length`: what a trained model keeps when it takes longer or shorter sequences."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from linformers import LinformerForMaskedLM
from linformers.projections import ConvProjection, LinearProjection

from . import modes


def trained(**mode):
    return modes.randomised(LinformerForMaskedLM(modes.config(**mode)))


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_same_length_changes_nothing(mode):
    model = trained(**mode)
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    model.resize_length(12, model.config.projected_length)
    model.resize_length(12)
    for name, weight in model.named_parameters():
        assert weight is before[name][0]
        assert torch.equal(weight, before[name][1])


LOCAL = [{"projection": p, "local_window": 2} for p in ("linear", "mean", "max", "conv")]


@pytest.mark.parametrize("mode", modes.UNIFORM + modes.GAUSSIAN + LOCAL, ids=modes.name)
def test_shorter_at_the_same_ratio_keeps_outputs(mode):
    """Every output that still fits, where the short input has no use for the columns that were cut off."""
    model = trained(**mode).double()
    ids, mask = torch.randint(31, (2, 6)), torch.tensor([[1] * 6, [0, 1, 1, 1, 0, 1]])
    before = model(ids, mask).logits
    model.resize_length(6, 2)
    assert model.config.max_position_embeddings == 6
    after = model(ids, mask).logits
    if mode.get("projection_init") == "gaussian" or mode["projection"] == "dynamic":
        assert (before - after)[mask.bool()].abs().max() > 1e-3  # two of four dense columns are gone
    else:
        torch.testing.assert_close(after[mask.bool()], before[mask.bool()], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_longer_model_runs_saves_and_loads(mode, tmp_path):
    model = trained(**mode)
    model.resize_length(24)
    ids = torch.randint(31, (2, 24))
    result = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.max_position_embeddings == 24
    assert torch.equal(loaded(ids).logits, result)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("lengths", [(24, 4), (24, 8), (17, 4), (9, 4), (6, 4), (12, 2), (12, 5)])
def test_columns_keep_their_sums(lengths):
    """A column's sum is what it makes of a constant sequence, so that is kept; columns that merge are averaged."""
    old, new = LinearProjection(12, 4), LinearProjection(*lengths)
    nn.init.normal_(old.delta)
    new.load_resampled(old)
    sums, new_sums = old(12).sum(0), new(lengths[0]).sum(0)
    torch.testing.assert_close(new_sums.mean(), sums.mean())
    if lengths[1] == 4:
        torch.testing.assert_close(new_sums, sums)
    if lengths[1] == 2:
        torch.testing.assert_close(new_sums, sums.view(2, 2).mean(1))


def test_untrained_windows_stay_windows():
    model = LinformerForMaskedLM(modes.config())
    model.resize_length(30, 7)
    projection = model.linformer.projections[0]
    assert projection.delta.abs().max() == 0
    torch.testing.assert_close(projection(30), LinearProjection(30, 7)(30))


def test_doubling_repeats_each_row_at_half_its_size():
    """So an input in which each token stands twice has the projection it had before."""
    old, new = LinearProjection(12, 4), LinearProjection(24, 4)
    nn.init.normal_(old.delta)
    new.load_resampled(old)
    x = torch.randn(1, 12, 3)
    torch.testing.assert_close(new(24).mT @ x.repeat_interleave(2, 1), old(12).mT @ x, rtol=0, atol=1e-6)


def test_kernels_keep_their_sums():
    old, new = ConvProjection(12, 4, head_dim=5), ConvProjection(20, 4, head_dim=5)
    nn.init.normal_(old.kernel)
    new.load_resampled(old)
    torch.testing.assert_close(new.kernel.sum(0), old.kernel.sum(0))


def test_gaussian_columns_keep_their_scale_when_averaged():
    old, new = LinearProjection(512, 128, "gaussian"), LinearProjection(512, 32, "gaussian")
    new.load_resampled(old)
    assert new(512).std().item() == pytest.approx(512**-0.5, rel=0.05)


def test_positions():
    model = trained()
    old = model.linformer.embeddings.position_embeddings.weight.clone()
    model.resize_length(23)
    new = model.linformer.embeddings.position_embeddings.weight
    torch.testing.assert_close(new[::2], old)  # 23 = 2 · 12 - 1: a new position between each two
    torch.testing.assert_close(new[1::2], (old[1:] + old[:-1]) / 2)


def test_bfloat16_model_stays_bfloat16():
    model = trained().bfloat16()
    model.resize_length(24, 8)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_window_alone():
    model = trained(projection="none", local_window=3, projection_scale=0.5)
    model.resize_length(24)
    assert (model.config.max_position_embeddings, model.config.projection_scale) == (24, 0.5)


def test_frozen_weights_stay_frozen():
    model = trained(sharing="headwise")
    model.linformer.projections[0].requires_grad_(False)
    model.linformer.embeddings.requires_grad_(False)
    model.resize_length(24, 8)
    assert [p.requires_grad for p in model.linformer.projections.parameters()] == [False, True, True, True]
    assert not model.linformer.embeddings.position_embeddings.weight.requires_grad


def test_dynamic_windows_stay_where_they_are_at_the_same_ratio():
    model = LinformerForMaskedLM(modes.config(projection="dynamic", max_position_embeddings=128, projected_length=32))
    before = model.linformer.projections[0].weight.clone()
    model.resize_length(64, 16)
    assert torch.equal(model.linformer.projections[0].weight, before[:, :16])


def test_dynamic_projections_do_not_know_n():
    model, ids, mask = modes.model_and_inputs(projection="dynamic")
    before = model(ids, mask).logits
    model.resize_length(11)  # the positions are cut, S stays as it is
    torch.testing.assert_close(model(ids, mask).logits[mask], before[mask], rtol=0, atol=2e-6)
