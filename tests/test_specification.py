"""The mathematics, in float64: the layer against its definition, against standard attention, and its gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from linformers import LinformerAttention, LinformerForMaskedLM, LinformerModel
from linformers.ops.ranks import Ranks
from linformers.ops.reference import attend
from linformers.projections import LinearProjection, window_matrix

from . import modes
from .naive import naive_attention, owners


def layer(randomise=True, hidden_size=16, num_heads=4, max_length=12, projected_length=4, **mode):
    attention = LinformerAttention(hidden_size, num_heads, max_length, projected_length, **mode).double()
    if randomise:
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.5)
    return attention


def assert_same(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_equals_its_definition(mode, attn_implementation):
    model = LinformerModel(modes.config(**mode)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    for layer_idx, encoder_layer in enumerate(model.layers):
        attention, projections = encoder_layer.attention, model.projections.of_layer(layer_idx)
        for length in (1, 5, 12):
            x = torch.randn(3, length, 16, dtype=torch.double)
            result, _ = attention(x, projections, attn_implementation=attn_implementation)
            assert_same(result, naive_attention(attention, projections, x))
            mask = torch.rand(3, length) < 0.6
            mask[:, length // 2] = True
            result, _ = attention(x, projections, Ranks.of(mask), attn_implementation=attn_implementation)
            assert_same(result[mask], naive_attention(attention, projections, x, mask)[mask])


def test_definition_notices_a_difference():
    attention = layer()
    x = torch.randn(2, 12, 16, dtype=torch.double)
    expected = naive_attention(attention, attention.projections.of_layer(0), x)
    assert_same(attention(x), expected)
    with torch.no_grad():
        attention.projections[0].delta[3, 2] += 1e-6
    with pytest.raises(AssertionError, match="not close"):
        assert_same(attention(x), expected)


@pytest.mark.parametrize(("n", "k"), [(7, 3), (13, 5), (11, 10), (12, 11), (11, 11), (5, 1), (1, 1), (31, 17)])
@pytest.mark.parametrize("init", ["window", "gaussian"])
def test_prime_and_adjacent_sizes(n, k, init):
    attention = layer(max_length=n, projected_length=k, projection_init=init)
    x = torch.randn(2, n, 16, dtype=torch.double)
    assert_same(attention(x), naive_attention(attention, attention.projections.of_layer(0), x))


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_k_equal_to_n_with_identity_matrices_is_softmax_attention(attn_implementation):
    attention = layer(max_length=12, projected_length=12, attn_implementation=attn_implementation)
    for projection in attention.projections:
        nn.init.zeros_(projection.delta)
        torch.testing.assert_close(projection.weights(12), torch.eye(12, dtype=torch.double), rtol=0, atol=0)
    x = torch.randn(2, 12, 16, dtype=torch.double)
    query, key, value = (
        linear(x).unflatten(-1, (4, 4)).transpose(1, 2) for linear in (attention.query, attention.key, attention.value)
    )
    expected = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    assert_same(attention(x), attention.output(expected))
    twin = layer(projection="identity", attn_implementation=attn_implementation)
    twin.load_state_dict({k: v for k, v in attention.state_dict().items() if "projections" not in k})
    assert_same(twin(x), attention(x))


@pytest.mark.parametrize("init", ["window", "gaussian"])
def test_project_first_equals_project_last(init):
    """Sharing E over the heads projects x before W; the same E for each head alone projects x W."""
    first, last = layer(sharing="headwise", projection_init=init), layer(sharing="none", projection_init=init)
    weights = {k: v for k, v in first.state_dict().items() if "projections" not in k}
    for side in (0, 1):
        for head in range(4):
            weights[f"projections.{4 * side + head}.delta"] = first.projections[side].delta
    last.load_state_dict(weights)
    x = torch.randn(2, 9, 16, dtype=torch.double)
    mask = torch.rand(2, 9) < 0.7
    assert_same(first(x, mask), last(x, mask))


@pytest.mark.parametrize("mode", modes.UNIFORM + modes.GAUSSIAN, ids=modes.name)
def test_gradients(mode):
    attention = layer(hidden_size=4, num_heads=2, max_length=6, projected_length=3, **mode, attn_implementation="eager")
    names, parameters = zip(*attention.named_parameters(), strict=True)
    x = torch.randn(2, 5, 4, dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 1, 0]])

    def outputs(x, *parameters):
        result = torch.func.functional_call(attention, dict(zip(names, parameters, strict=True)), (x, mask))
        return result[mask.bool()]

    assert torch.autograd.gradcheck(outputs, (x, *parameters))


def test_gradcheck_finds_a_wrong_gradient():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            return grad

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(Wrong.apply, torch.randn(3, dtype=torch.double, requires_grad=True))


@pytest.mark.parametrize(("n", "k"), [(12, 4), (7, 3), (512, 128), (13, 13), (10, 1), (100, 99)])
def test_windows(n, k):
    """Column j of E₀ averages the rows r with ⌊r·k/n⌋ = j, and E starts there."""
    E0 = window_matrix(n, k, n, torch.empty(0, dtype=torch.double))
    owner = owners(n, k)
    assert set(owner) == set(range(k))
    for r in range(n):
        for j in range(k):
            assert E0[r, j] == (1 / owner.count(j) if owner[r] == j else 0)
    torch.testing.assert_close(LinearProjection(n, k).double().weights(n), E0, rtol=0, atol=0)


@pytest.mark.parametrize(("n", "k"), [(512, 128), (4096, 64)])
def test_gaussian_scale(n, k):
    E = LinearProjection(n, k, init="gaussian").weights(n)
    assert E.std().item() == pytest.approx(n**-0.5, rel=0.02)
    assert E.mean().item() == pytest.approx(0, abs=5 * n**-0.5 / (n * k) ** 0.5)


def test_learning_rate_of_the_matrix_is_relative():
    """An optimiser step of size r on Δ moves E by s · r."""
    projection = LinearProjection(512, 128)
    assert projection.scale == pytest.approx(0.03)
    before = projection.weights(512)
    with torch.no_grad():
        projection.delta += 0.5
    torch.testing.assert_close(projection.weights(512) - before, torch.full((512, 128), 0.5 * 0.03))


def test_projection_alone_ignores_padding():
    projection = LinearProjection(12, 4)
    nn.init.normal_(projection.delta)
    x = torch.randn(2, 6, 3)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    poisoned = torch.where(mask[..., None].bool(), x, torch.nan)
    result = projection(poisoned, mask)
    torch.testing.assert_close(result[0], projection(x[:1, [1, 2, 4, 5]])[0])
    torch.testing.assert_close(result[1], projection(x)[1])


def test_attention_of_a_row_that_may_see_nothing_is_zero():
    query, key, value = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask[0] = False
    output, probs = attend(query, key, value, mask, scaling=1.0)
    assert output[0].abs().max() == 0
    assert probs[0].abs().max() == 0
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_is_taken_in_float32(dtype):
    """The scores below are exact in `dtype`, but not once they are scaled: rounding them again would show."""
    key = torch.randn(1, 1, 64, 1).mul(30).to(dtype)
    query, value = torch.ones(1, 1, 1, 1, dtype=dtype), torch.ones(1, 1, 64, 1, dtype=dtype)
    _, probs = attend(query, key, value, scaling=0.1337)
    expected = torch.softmax(key.double().flatten() * 0.1337, -1)
    torch.testing.assert_close(probs.double().flatten(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    rounded = torch.softmax((key * 0.1337).double().flatten(), -1)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(rounded, expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
@pytest.mark.parametrize("projection", ["linear", "conv"])
def test_number_of_matrices_in_a_checkpoint(sharing, count, projection, tmp_path):
    from safetensors import safe_open

    config = modes.config(
        num_hidden_layers=12, num_attention_heads=12, hidden_size=24, sharing=sharing, projection=projection
    )
    LinformerForMaskedLM(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as checkpoint:
        matrices = [key for key in checkpoint.keys() if "projections." in key]  # noqa: SIM118
        assert len(matrices) == count
        assert all(checkpoint.get_tensor(key).dim() == 2 for key in matrices)


@pytest.mark.parametrize("projection", ["mean", "max", "identity"])
def test_pools_and_the_twin_have_no_parameters_of_their_own(projection):
    model = LinformerModel(modes.config(projection=projection))
    assert list(model.projections.parameters()) == []


def test_models_and_layers_share_no_storage():
    for mode in modes.UNIFORM:
        models = [LinformerForMaskedLM(modes.config(**mode)) for _ in range(2)]
        addresses = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model in models]
        assert not addresses[0] & addresses[1]
        for model, own in zip(models, addresses, strict=True):
            assert len(own) == len(list(model.parameters()))
            modules = [module for _, module in model.named_modules(remove_duplicate=False)]
            assert len(modules) == len(set(map(id, modules)))
