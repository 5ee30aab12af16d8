"""E and F: their initial values, who shares them, and how often they are computed."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from linformers import LinformerAttention, LinformerForMaskedLM, LinformerModel, projections
from linformers.projections import LinearProjection, MeanProjection, window_matrix

from . import modes
from .naive import owners

CPU = torch.device("cpu")


@pytest.mark.parametrize(("n", "k"), [(12, 4), (7, 3), (512, 128), (13, 13), (10, 1), (100, 99)])
def test_windows(n, k):
    """Column j of E₀ averages the rows r with ⌊r·k/n⌋ = j, and E starts there."""
    E0 = window_matrix(n, k, n)
    owner = owners(n, k)
    assert set(owner) == set(range(k))
    for r in range(n):
        for j in range(k):
            assert E0[r, j].item() == pytest.approx(1 / owner.count(j) if owner[r] == j else 0)
    assert torch.equal(LinearProjection(n, k)(n), E0)
    assert torch.equal(LinearProjection(n, k, 3)(n), E0[:, None].expand(n, 3, k))


@pytest.mark.parametrize("sharing", modes.SHARINGS)
@pytest.mark.parametrize(("n", "k"), [(64, 16), (16, 4), (13, 5), (9, 9)])
def test_shifted_windows(sharing, n, k):
    """Windows start later in later layers, without losing a token or a slot."""
    sizes = {"max_position_embeddings": n, "projected_length": k, "num_hidden_layers": 4}
    config = modes.config(sharing=sharing, shifted_windows=True, **sizes)
    model = LinformerModel(config)
    shifts = (0, n // k // 2, n // k // 4, 3 * (n // k) // 4)
    assert model.projections.shifts == config.window_shifts == shifts
    assert all({max(r - shift, 0) * k // n for r in range(n)} == set(range(k)) for shift in shifts)
    for projection in model.projections:
        nn.init.normal_(projection.delta)
    for length in (1, n // 2, n):
        for layer, (E, F) in enumerate(model.projections(length, None, CPU)):
            first = {"none": 2 * layer, "headwise": 2 * layer, "key-value": layer, "layerwise": 0}[sharing]
            rows = [max(r - shifts[layer], 0) for r in range(length)]
            assert torch.equal(E.weights, model.projections[first](n)[rows])
            assert torch.equal(E.weights, F.weights) == (sharing in ("key-value", "layerwise"))


def test_windows_that_are_not_shifted():
    def shifts(**mode):
        return LinformerModel(modes.config(max_position_embeddings=16, **mode)).projections.shifts

    assert shifts(shifted_windows=True) == shifts(local_window=2, shifted_windows=True) == (0, 2)
    assert shifts() == shifts(shifted_windows=True, projection_init="gaussian") == (0, 0)
    assert shifts(shifted_windows=True, projection="mean") == (0, 0)
    # Layers that share E are shifted by less than the shortest of their windows.
    assert shifts(shifted_windows=True, projected_length=[8, 2]) == (0, 1)
    assert shifts(shifted_windows=True, projected_length=[8, 2], sharing="headwise") == (0, 4)


def test_layerwise_sharing_is_one_matrix():
    """As in the paper: one tensor for keys and values of all layers, unless its windows are shifted."""
    for fields in ({}, {"projection_init": "gaussian"}, {"local_window": 2}):
        pairs = LinformerModel(modes.config(num_hidden_layers=3, **fields)).projections(12, None, CPU)
        assert {id(side.weights) for pair in pairs for side in pair} == {id(pairs[0][0].weights)}
    shifted = LinformerModel(modes.config(num_hidden_layers=3, shifted_windows=True)).projections(12, None, CPU)
    assert not torch.equal(shifted[0][0].weights, shifted[1][0].weights)
    assert all(E.weights is F.weights for E, F in shifted)


@pytest.mark.parametrize(
    ("sharing", "lengths", "calls"),
    [("layerwise", 4, 1), ("none", 4, 1), ("headwise", [4, 2], 2), ("none", [[4, 5, 4, 1], [2, 5, 2, 1]], 4)],
    ids=str,
)
def test_the_window_matrix_is_built_once_for_each_k(sharing, lengths, calls, monkeypatch):
    counted = []
    monkeypatch.setattr(projections, "window_matrix", lambda *args: counted.append(args) or window_matrix(*args))
    model = LinformerModel(modes.config(sharing=sharing, projected_length=lengths))
    model(torch.ones(2, 7, dtype=torch.long))
    assert len(counted) == calls
    model.projections(7, None, CPU)
    assert len(counted) == 2 * calls


def test_heads_without_sharing_are_not_stacked_at_each_pass():
    """Each E (n, h, k) is a single parameter, and s · Δ is all that a pass allocates."""
    model = LinformerModel(modes.config(sharing="none", projection_init="gaussian", projection_scale=3.0))
    shapes = [tuple(parameter.shape) for parameter in model.projections.parameters()]
    assert shapes == [(12, 4, 4)] * 4  # E and F of two layers
    allocated = []

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if not function.is_view and result.dim():
                allocated.append(tuple(result.shape))
            return result

    with torch.no_grad(), Allocations():
        pairs = model.projections(12, None, CPU)
    assert allocated == shapes  # s · Δ
    assert [side.weights.shape for pair in pairs for side in pair] == shapes


@pytest.mark.parametrize(("n", "k"), [(512, 128), (4096, 64)])
def test_gaussian_scale(n, k):
    for scale in (1.0, 0.03):
        E = LinearProjection(n, k, init="gaussian", scale=scale)(n)
        assert E.std().item() == pytest.approx(n**-0.5, rel=0.02)
        assert E.mean().item() == pytest.approx(0, abs=5 * n**-0.5 / (n * k) ** 0.5)


def test_learning_rate_of_the_matrix_is_relative():
    """An optimizer step of size r on Δ moves E by s · r."""
    layer = LinformerAttention(16, 2, 512, 128)
    assert [module.scale for module in layer.projections] == pytest.approx([0.03, 0.03])  # E and F
    projection = LinformerModel(modes.config(max_position_embeddings=512, projected_length=64)).projections[0]
    assert projection.scale == pytest.approx(0.15)
    before = projection(512)
    with torch.no_grad():
        projection.delta += 0.5
    torch.testing.assert_close(projection(512) - before, torch.full((512, 64), 0.5 * 0.15))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_long_windows_do_not_overflow(dtype):
    tokens = torch.full((1, 16384, 2), 20.0, dtype=dtype)
    assert torch.equal(MeanProjection(16384).shorten(tokens, 4, None, None), tokens[:, :4])


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
@pytest.mark.parametrize("projection", ["linear", "conv"])
def test_number_of_matrices_in_a_checkpoint(sharing, count, projection, tmp_path):
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 24}
    LinformerForMaskedLM(modes.config(**sizes, sharing=sharing, projection=projection)).save_pretrained(tmp_path)
    weights = {key: own for key, own in load_file(tmp_path / "model.safetensors").items() if "projections." in key}
    one = 12 * 4 if projection == "linear" else 12 // 4 * 2  # (n, k), or a kernel (n/k, d_head)
    assert sum(weight.numel() for weight in weights.values()) == count * one
    assert len(weights) == (24 if sharing == "none" else count)  # the heads of a layer are one tensor


def test_models_and_layers_share_no_storage():
    for mode in modes.UNIFORM:
        models = [LinformerForMaskedLM(modes.config(**mode)) for _ in range(2)]
        addresses = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model in models]
        assert not addresses[0] & addresses[1]
        for model, own in zip(models, addresses, strict=True):
            assert len(own) == len(list(model.parameters()))
            modules = [module for _, module in model.named_modules(remove_duplicate=False)]
            assert len(modules) == len(set(map(id, modules)))
            weights = len(list(model.linformer.projections.parameters()))
            assert (weights > 0) == (mode["projection"] in ("linear", "conv"))
