"""Another n or k for a trained model, and which checkpoints fit a config."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, RobertaConfig

from linformers import LinformerForMaskedLM, LinformerForSequenceClassification, LinformerModel, files
from linformers.projections import ConvProjection, LinearProjection

from . import modes
from .modes import random_model, refused


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_same_length_changes_nothing(mode):
    model = random_model(**mode)
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    model.resize_length(12, model.config.projected_length)
    model.resize_length(12)
    for name, weight in model.named_parameters():
        assert weight is before[name][0]
        assert torch.equal(weight, before[name][1])


ROTARY = [mode for mode in modes.ROTARY if "projected_length" not in mode]
LOCAL = [{"projection": p, "local_window": 2} for p in ("linear", "mean", "max", "conv")]


@pytest.mark.parametrize("lengths", [(6, 2), (24, 8), (30, 10)])
@pytest.mark.parametrize("mode", modes.UNIFORM + modes.GAUSSIAN + modes.SAMPLED + LOCAL + ROTARY, ids=modes.name)
def test_another_length_at_the_same_ratio_keeps_outputs(mode, lengths):
    """The columns that were cut off or added are not live for a short input."""
    model = random_model(**mode).double()
    ids, mask = torch.randint(31, (2, 6)), torch.tensor([[1] * 6, [0, 1, 1, 1, 0, 1]])
    before = model(ids, mask).logits
    model.resize_length(*lengths)
    assert model.config.max_position_embeddings == lengths[0]
    after = model(ids, mask).logits
    if mode.get("projection_init") == "gaussian":  # every token belongs to every slot, and two of four are gone
        assert (before - after)[mask.bool()].abs().max() > 1e-3
    else:
        torch.testing.assert_close(after[mask.bool()], before[mask.bool()], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_longer_model_runs_saves_and_loads(mode, tmp_path):
    model = random_model(**mode)
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
    """A column's sum is its response to a constant sequence, so it is kept; columns that merge are averaged."""
    old, new = LinearProjection(12, 4, scale=0.7), LinearProjection(*lengths, scale=0.3)
    nn.init.normal_(old.delta)
    new.load_resized(old, same_ratio=False)
    sums, new_sums = old(12).sum(0), new(lengths[0]).sum(0)
    torch.testing.assert_close(new_sums.mean(), sums.mean())
    if lengths[1] == 4:
        torch.testing.assert_close(new_sums, sums)
    if lengths[1] == 2:
        torch.testing.assert_close(new_sums, sums.view(2, 2).mean(1))


def test_untrained_windows_stay_windows():
    model = LinformerModel(modes.config())
    model.resize_length(30, 7)
    assert model.projections[0].delta.abs().max() == 0
    torch.testing.assert_close(model.projections[0](30), LinearProjection(30, 7)(30))


def test_doubling_repeats_each_row_at_half_its_size():
    """So an input in which each token is repeated has the same projection as before."""
    old, new = LinearProjection(12, 4), LinearProjection(24, 4)
    nn.init.normal_(old.delta)
    new.load_resized(old, same_ratio=False)
    x = torch.randn(1, 12, 3)
    torch.testing.assert_close(new(24).mT @ x.repeat_interleave(2, 1), old(12).mT @ x, rtol=0, atol=1e-6)


def test_kernels_keep_their_sums_and_gaussian_columns_their_scale():
    old, new = (ConvProjection(n, 4, None, head_dim=5) for n in (12, 20))
    nn.init.normal_(old.kernel)
    new.load_resized(old, same_ratio=False)
    torch.testing.assert_close(new.kernel.sum(0), old.kernel.sum(0))
    old, new = (LinearProjection(512, k, init="gaussian", scale=0.1) for k in (128, 32))
    new.load_resized(old, same_ratio=False)
    assert new(512).std().item() == pytest.approx(512**-0.5, rel=0.05)


def test_positions():
    model = random_model()
    old = model.linformer.embeddings.position_embeddings.weight.clone()
    model.resize_length(23)
    new = model.linformer.embeddings.position_embeddings.weight
    assert torch.equal(new, torch.cat([old, old[:11]]))


def test_the_learning_rate_follows_the_length():
    """c stays, and s = c·k/n follows n and k, while E itself keeps its values."""
    for c in (None, 0.5):
        model = random_model(projection_scale=c)
        model.resize_length(24)
        assert model.config.projection_scale == c
        assert model.linformer.projections[0].scale == pytest.approx((c or 1.2) * 4 / 24)


def test_frozen_weights_and_dtypes_stay():
    model = random_model(sharing="headwise").bfloat16()
    model.linformer.projections[0].requires_grad_(False)
    model.linformer.embeddings.requires_grad_(False)
    model.resize_length(24, 8)
    assert [p.requires_grad for p in model.linformer.projections.parameters()] == [False, True, True, True]
    assert not model.linformer.embeddings.position_embeddings.weight.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_invalid_sizes_change_nothing():
    model = LinformerModel(modes.config())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for sizes, fragment in [((3,), "max_length=3 is below k=4"), ((0,), "max_length=0"), ((24, 25), "=25 exceeds")]:
        with refused(fragment):
            model.resize_length(*sizes)
    assert model.config.max_position_embeddings == 12
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


OTHER_VALUES = {"projection_init": "gaussian", "sharing": "key-value", "shifted_windows": True, "norm_first": True}


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"max_position_embeddings": 24}, "the checkpoint is for n=12, k=4, but n=24, k=4 was requested"),
        ({"config": {"max_position_embeddings": 24}}, "the checkpoint is for n=12, k=4, but n=24, k=4 was requested"),
        ({"projected_length": 6}, "the checkpoint is for n=12, k=4, but n=12, k=6 was requested"),
        ({"num_attention_heads": 2}, "the checkpoint has num_attention_heads=4"),
        ({"local_window": 2, "projection_scale": 0.12}, "the checkpoint was trained with projection_scale=1.2"),
        *(({name: value}, f"trained with {name}=") for name, value in OTHER_VALUES.items()),
        ({"projection": "identity", "local_window": 2}, "local_window=2 adds nothing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(fields, fragment, tmp_path):
    LinformerForMaskedLM(modes.config()).save_pretrained(tmp_path)
    if "config" in fields:
        fields = {"config": modes.config(**fields["config"])}
    for model_class in (LinformerForMaskedLM, AutoModel):
        with refused(fragment):
            model_class.from_pretrained(tmp_path, **fields)


def test_checkpoints_of_other_kinds(tmp_path):
    RobertaConfig(vocab_size=31, hidden_size=16, num_attention_heads=4).save_pretrained(tmp_path / "roberta")
    with refused("LinformerModel cannot be loaded from a checkpoint of model type 'roberta'"):
        LinformerModel.from_pretrained(tmp_path / "roberta")
    with pytest.raises(TypeError, match="LinformerModel takes a LinformerConfig, not RobertaConfig"):
        LinformerModel(RobertaConfig())
    with pytest.raises(OSError, match="nowhere"):
        LinformerModel.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
@pytest.mark.parametrize("mode", [{}, {"projected_length": [[4, 2, 4, 1], [2, 2, 2, 2]]}], ids=modes.name)
def test_weights_of_another_length(positions, mode):
    saved, longer = (
        LinformerForMaskedLM(modes.config(max_position_embeddings=n, position_embedding_type=positions, **mode))
        for n in (12, 24)
    )
    with refused("the checkpoint is for n=12, the model for n=24; load it into a model for n=12, then call model.res"):
        longer.load_state_dict(saved.state_dict())
    with refused("the checkpoint is for n=12, the model for n=24"):
        longer.base_model.load_state_dict(saved.base_model.state_dict())


def test_of_weights_in_one_file_and_in_shards_the_newer_ones_are_kept(tmp_path):
    for size in ("20KB", "5GB", "20KB"):  # each leaves the other's files
        model = modes.random_model()
        model.save_pretrained(tmp_path, max_shard_size=size)
        loaded = LinformerForMaskedLM.from_pretrained(tmp_path)
        for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert files.damage(tmp_path) is None
        assert (tmp_path / "model.safetensors").exists() == (size == "5GB")


class Payload:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_folder_is_executed(tmp_path):
    """Neither a pickle, nor code beside the config, nor code on the hub."""
    folder, trace = tmp_path / "model", tmp_path / "trace"
    model = LinformerForMaskedLM(modes.config())
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink()
    fields = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')")
    auto_map = {"AutoConfig": "evil.A", "AutoModel": "evil.B", "AutoModelForMaskedLM": "evil.C"}
    (folder / "config.json").write_text(json.dumps({**fields, "auto_map": auto_map}))
    for auto_class in (AutoModel, AutoModelForMaskedLM, LinformerForMaskedLM):
        auto_class.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**fields, "attn_implementation": "org/name"}))
    for auto_class in (AutoModel, LinformerForMaskedLM):
        with refused("attn_implementation='org/name', which is code on the hub"):
            auto_class.from_pretrained(folder)
        assert auto_class.from_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").unlink()
    torch.save({"a": Payload(trace)}, folder / "pytorch_model.bin")
    for auto_class in (AutoModel, LinformerForMaskedLM):
        with refused(f"{folder} holds no safetensors but pytorch_model.bin"):
            auto_class.from_pretrained(folder)
    assert not trace.exists()


def test_what_a_checkpoint_can_be_loaded_with(tmp_path):
    model, load = LinformerForMaskedLM(modes.config()), LinformerForMaskedLM.from_pretrained
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path / "config")
    changed = load(tmp_path, projected_length=[4, 4], hidden_dropout_prob=0.5)
    assert changed.config.hidden_dropout_prob == 0.5
    same = load(tmp_path, config=str(tmp_path / "config"))
    without_folder = load(None, config=model.config, state_dict=model.state_dict())
    for other in (changed, same, without_folder):
        assert torch.equal(other.linformer.projections[0].delta, model.linformer.projections[0].delta)
    for other in (changed, same, without_folder, load(tmp_path, projection="identity")):
        assert torch.equal(other.head.dense.weight, model.head.dense.weight)
    longer = load(tmp_path, max_position_embeddings=24, ignore_mismatched_sizes=True)
    assert longer(torch.ones(1, 24, dtype=torch.long)).logits.shape == (1, 24, 31)
    assert len(load(tmp_path, num_hidden_layers=1, projected_length=[4]).linformer.layers) == 1
    LinformerForMaskedLM(modes.config(local_window=2)).save_pretrained(tmp_path)
    for projection, window in (("identity", 0), ("none", 3)):
        assert load(tmp_path, projection=projection, local_window=window).config.local_windows == (window, window)


@pytest.mark.parametrize("fields", [{}, {"projection_scale": 0.03}, {"shifted_windows": True}], ids=str)
def test_new_projections_in_an_old_model_are_saved_as_they_are(fields, tmp_path):
    """A twin's weights with new projections, whose defaults are resolved now, give the same output when loaded."""
    LinformerModel(modes.config(projection="identity")).save_pretrained(tmp_path / "twin")
    model = LinformerModel.from_pretrained(tmp_path / "twin", projection="linear", **fields)
    model.save_pretrained(tmp_path / "linear")
    again = LinformerModel.from_pretrained(tmp_path / "linear")
    assert again.projections.shifts == model.projections.shifts == ((0, 1) if "shifted_windows" in fields else (0, 0))
    scales = [own.projections[0].scale for own in (again, model)]
    assert scales == pytest.approx([fields.get("projection_scale", 1.2) * 4 / 12] * 2)
    ids = torch.randint(31, (2, 12))
    torch.testing.assert_close(model.eval()(ids).last_hidden_state, again(ids).last_hidden_state)


def test_a_head_loads_the_encoder_of_another(tmp_path):
    pretrained = random_model()
    pretrained.save_pretrained(tmp_path)
    weights = LinformerForSequenceClassification.from_pretrained(tmp_path).linformer.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in pretrained.linformer.state_dict().items())
