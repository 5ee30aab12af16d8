"""The mathematics, in float64: the layer against its definition, against standard attention, and its gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from linformers import LinformerAttention, LinformerForMaskedLM, LinformerForSequenceClassification, LinformerModel
from linformers.ops.ranks import Ranks, reorder, zero_padding
from linformers.projections import LinearProjection, window_matrix
from linformers.reference import attend

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
    for length in (1, 5, 12):
        mask = torch.rand(3, length) < 0.6
        mask[:, length // 2] = True
        ranks = Ranks.of(mask)
        for encoder_layer, shift, (E, F), padded in zip(
            model.layers,
            model.projections.shifts,
            model.projections(length, None, mask.device),
            model.projections(length, ranks.lengths, mask.device),
            strict=True,
        ):
            attention = encoder_layer.attention
            x = torch.randn(3, length, 16, dtype=torch.double)
            result, _ = attention(x, E, F, attn_implementation=attn_implementation)
            assert_same(result, naive_attention(attention, E, F, x, shift=shift))
            tokens = zero_padding(reorder(x, ranks.order), ranks.sorted_mask)
            result, _ = attention(tokens, *padded, ranks.lengths, attn_implementation=attn_implementation)
            assert_same(reorder(result, ranks.places)[mask], naive_attention(attention, E, F, x, mask, shift)[mask])


def test_definition_notices_a_difference():
    attention = layer()
    x = torch.randn(2, 12, 16, dtype=torch.double)
    expected = naive_attention(attention, *attention.projections(x.shape[1])[0], x)
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
    assert_same(attention(x), naive_attention(attention, *attention.projections(x.shape[1])[0], x))


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_k_equal_to_n_with_identity_matrices_is_softmax_attention(attn_implementation):
    attention = layer(max_length=12, projected_length=12, attn_implementation=attn_implementation)
    for projection in attention.projections:
        nn.init.zeros_(projection.delta)
        assert torch.equal(projection(12), torch.eye(12, dtype=torch.double))
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
    E0 = window_matrix(n, k, n)
    owner = owners(n, k)
    assert set(owner) == set(range(k))
    for r in range(n):
        for j in range(k):
            assert E0[r, j].item() == pytest.approx(1 / owner.count(j) if owner[r] == j else 0)
    assert torch.equal(LinearProjection(n, k)(n), E0)


@pytest.mark.parametrize("sharing", modes.SHARINGS)
@pytest.mark.parametrize(("n", "k"), [(64, 16), (16, 4), (13, 5), (9, 9)])
def test_shifted_windows(sharing, n, k):
    """Windows begin later in later layers, where no token and no slot is lost."""
    config = modes.config(sharing=sharing, max_position_embeddings=n, projected_length=k, num_hidden_layers=4)
    model = LinformerModel(config)
    shifts = [layer.attention.sequence_map.shift for layer in model.layers]
    assert shifts == [0, n // k // 2, n // k // 4, 3 * (n // k) // 4]
    assert shifts == model.projections.shifts
    for shift, (E, _) in zip(shifts, model.projections(n), strict=True):
        windows = E[0] if sharing == "none" else E  # (n, k)
        assert ((windows > 0).sum(1) == 1).all()
        owner = windows.argmax(1).tolist()
        assert owner == [max(r - shift, 0) * k // n for r in range(n)]
        assert set(owner) == set(range(k))
        sums = windows.sum(0)  # of a token each; the first window has those of the shift, too, and the last one less
        sizes = torch.tensor([len([r for r in range(n) if r * k // n == j]) for j in range(k)])
        assert_same(sums * sizes, torch.tensor(owner).bincount(minlength=k).float())
    for projection in model.projections:
        nn.init.normal_(projection.delta)
    for length in (1, n // 2, n):
        for layer, (E, F) in enumerate(model.projections(length)):
            first = {"none": 8 * layer, "headwise": 2 * layer, "key-value": layer, "layerwise": 0}[sharing]
            E, F = (E[0], F[0]) if sharing == "none" else (E, F)
            rows = [max(r - shifts[layer], 0) for r in range(length)]
            assert torch.equal(E, model.projections[first](n)[rows])
            assert torch.equal(E, F) == (sharing in ("key-value", "layerwise"))


def test_no_tokens_at_all():
    model = LinformerModel(modes.config(max_position_embeddings=16))
    assert model(torch.zeros(2, 0, dtype=torch.long)).last_hidden_state.shape == (2, 0, 16)
    attention = LinformerAttention(16, 4, 16, 4, window_shift=2)
    assert attention(torch.randn(2, 3, 16), context=torch.zeros(2, 0, 16)).shape == (2, 3, 16)


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_no_rows_at_all(mode):
    model = LinformerModel(modes.config(**mode))
    ids = torch.zeros(0, 7, dtype=torch.long)
    for mask in (None, torch.ones_like(ids)):
        assert model(ids, mask).last_hidden_state.shape == (0, 7, 16)


@pytest.mark.parametrize("projection", ["linear", "mean", "dynamic", "conv"])
def test_autocast_leaves_float64_alone(projection):
    attention = LinformerAttention(16, 4, 12, 4, projection=projection).double()
    x, mask = torch.randn(2, 12, 16, dtype=torch.float64), torch.ones(2, 12, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        result = attention(x, mask)
    assert torch.equal(result, attention(x, mask))
    assert result.dtype == torch.float64


@pytest.mark.parametrize("mode", modes.UNIFORM + modes.LOCAL, ids=modes.name)
def test_hooks_are_called(mode):
    model, ids, mask = modes.model_and_inputs(**mode)
    layer = model.linformer.layers[0].attention
    called = []
    for name in ("query", "key", "value", "output"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    expected = model(ids, mask).logits
    assert {*called} == ({"query", "key", "value", "output"})
    layer.key.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 1e-3


@pytest.mark.parametrize("mode", modes.ALL, ids=modes.name)
def test_attention_matters_to_models_that_are_compared(mode):
    """More than the errors that half precision is granted, so that a comparison notices wrong attention."""
    model, ids, mask = modes.model_and_inputs(**mode)
    expected = model(ids, mask).logits
    for layer in model.linformer.layers:
        layer.attention.scaling = 0.0
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 0.1
    for layer in model.linformer.layers:
        nn.init.zeros_(layer.attention.output.weight)
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 0.5


@pytest.mark.parametrize("asked", [{}, {"projection_scale": 0.03}, {"shifted_windows": None}])
def test_what_is_settled_stays_settled(asked, tmp_path):
    """A twin's weights with projections that are new: what their defaults become is saved."""
    LinformerModel(modes.config(projection="identity")).save_pretrained(tmp_path / "twin")
    model = LinformerModel.from_pretrained(tmp_path / "twin", projection="linear", **asked)
    assert model.config.shifted_windows
    model.save_pretrained(tmp_path / "linear")
    again = LinformerModel.from_pretrained(tmp_path / "linear")
    assert again.projections.shifts == model.projections.shifts == [0, 1]
    assert again.config.projection_scale == model.config.projection_scale
    ids = torch.randint(31, (2, 12))
    assert torch.equal(model.eval()(ids).last_hidden_state, again(ids).last_hidden_state)


def test_windows_that_are_not_shifted():
    def shifts(**mode):
        model = LinformerModel(modes.config(max_position_embeddings=16, **mode))
        return [layer.attention.sequence_map.shift for layer in model.layers]

    assert shifts() == shifts(local_window=2, shifted_windows=True) == [0, 2]
    assert shifts(shifted_windows=False) == shifts(local_window=[0, 2]) == shifts(projection_init="gaussian") == [0, 0]
    # Those of layers that share E are as long as the shortest.
    assert shifts(projected_length=[8, 2]) == [0, 1]
    assert shifts(projected_length=[8, 2], sharing="headwise") == [0, 4]


@pytest.mark.parametrize(("n", "k"), [(512, 128), (4096, 64)])
def test_gaussian_scale(n, k):
    E = LinearProjection(n, k, init="gaussian")(n)
    assert E.std().item() == pytest.approx(n**-0.5, rel=0.02)
    assert E.mean().item() == pytest.approx(0, abs=5 * n**-0.5 / (n * k) ** 0.5)


@pytest.mark.parametrize(
    ("sharing", "window", "scale"),
    [("layerwise", 0, 0.3), ("layerwise", 8, 0.03), ("layerwise", [0, 8], 0.03), ("headwise", 0, 0.03)],
)
def test_default_learning_rate_of_the_matrix(sharing, window, scale):
    config = modes.config(max_position_embeddings=512, projected_length=128, sharing=sharing, local_window=window)
    assert config.projection_scale == pytest.approx(scale)


def test_default_learning_rate_of_a_layers_own_matrices():
    layer = LinformerAttention(16, 2, 512, 128)
    assert [module.scale for module in layer.projections] == pytest.approx([0.03, 0.03])  # E and F


def test_learning_rate_of_the_matrix_is_relative():
    """An optimiser step of size r on Δ moves E by s · r."""
    projection = LinformerModel(modes.config(max_position_embeddings=512, projected_length=64)).projections[0]
    assert projection.scale == pytest.approx(0.15)
    before = projection(512)
    with torch.no_grad():
        projection.delta += 0.5
    torch.testing.assert_close(projection(512) - before, torch.full((512, 64), 0.5 * 0.15))


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
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_and_softmax_are_float32(dtype, autocast):
    """Scores of 102,400 before scaling: infinite in float16, and far apart in bfloat16."""
    query = torch.full((1, 1, 1, 64), 40.0, dtype=dtype)
    key = torch.full((1, 1, 2, 64), 40.0, dtype=dtype)
    key[..., 1, 0] = 39.75
    value = torch.tensor([[1.0], [0.0]], dtype=dtype).expand(2, 64)[None, None]
    with torch.autocast("cpu", dtype, enabled=autocast):
        output, probs = attend(query, key, value, scaling=64**-0.5)
    expected = torch.softmax(torch.tensor([0.0, -40 * 0.25 / 8]), -1)
    torch.testing.assert_close(probs.float().flatten(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(output.float().flatten(), expected[0].expand(64), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_long_windows_do_not_overflow(dtype):
    assert torch.equal(
        MeanMap(16384)(torch.full((1, 16384, 2), 20.0, dtype=dtype), 4), torch.full((1, 4, 2), 20.0, dtype=dtype)
    )


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


@pytest.mark.parametrize("projection", modes.PROJECTIONS)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_shapes_without_memory(projection, attn_implementation):
    """On the meta device, where costs are counted."""
    with torch.device("meta"):
        model = LinformerModel(modes.config(projection=projection, attn_implementation=attn_implementation))
        output = model(torch.zeros(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long))
    assert output.last_hidden_state.shape == (2, 9, 16)


def products(function):
    """The multiplications that `function` spends on matrix products."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


def test_cost_is_linear_and_one_matrix_for_all_heads_projects_first():
    n, k, d = 48, 4, 16
    queries_and_output, attention = 2 * n * d * d, 2 * n * k * d
    x = torch.randn(1, n, d, dtype=torch.double)
    sizes = {"max_length": n, "projected_length": k, "attn_implementation": "eager"}
    shared = products(lambda: layer(sharing="key-value", **sizes)(x))
    assert shared == queries_and_output + attention + n * k * d + 2 * k * d * d
    headwise = products(lambda: layer(sharing="headwise", **sizes)(x))
    assert headwise == queries_and_output + attention + 2 * n * k * d + 2 * k * d * d
    unshared = products(lambda: layer(sharing="none", **sizes)(x))
    assert unshared == queries_and_output + attention + 2 * n * k * d + 2 * n * d * d


@pytest.mark.parametrize("projection", ["linear", "mean", "max", "conv"])
def test_smaller_projected_length_of_some_heads_or_layers_costs_less(projection):
    def cost(projected_length):
        model = LinformerModel(
            modes.config(
                projection=projection,
                projected_length=projected_length,
                max_position_embeddings=64,
                sharing="none" if projection == "conv" else "layerwise",
                attn_implementation="eager",
            )
        )
        return products(lambda: model(torch.zeros(1, 64, dtype=torch.long)))

    all_large, some_heads, some_layers, all_small = (cost(k) for k in (32, [[32, 32, 8, 8]] * 2, [32, 8], 8))
    assert all_small < some_layers < all_large
    assert all_small < some_heads < all_large


@pytest.mark.parametrize("position_init", ["waves", "sinusoidal", "normal"])
def test_positions_start_as_waves_or_as_noise(position_init):
    model = LinformerModel(modes.config(position_init=position_init, hidden_size=64, max_position_embeddings=256))
    positions = model.embeddings.position_embeddings.weight.detach()
    assert positions.square().mean().sqrt() == pytest.approx(model.config.initializer_range, rel=0.05)
    # Neighbours are alike as waves, and are not as noise.
    alike = torch.cosine_similarity(positions[1:], positions[:-1]).mean()
    assert (alike > 0.9) == (position_init != "normal")
    # The longest wave turns by 1 over n tokens, or by n/10000.
    if position_init != "normal":
        slowest = torch.atan2(positions[:, -2], positions[:, -1])
        assert slowest[-1] == pytest.approx(255 / (256 if position_init == "waves" else 10000) ** (62 / 64), rel=1e-3)


def self_score(layer):
    """The mean score of random normalised tokens with themselves."""
    query = layer.attention.query.weight
    tokens = torch.nn.functional.layer_norm(torch.randn(100, 256), (256,))
    return ((tokens @ query.T).square().sum(-1) / 4 / math.sqrt(64)).mean().item()


@pytest.mark.parametrize(("fields", "times"), [({}, 2), ({"local_window": 4}, 1), ({"projected_length": 256}, 1)])
def test_blurred_keys_start_with_larger_scores(fields, times):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256, "projected_length": 64}
    model = LinformerModel(modes.config(initial_self_score=3.0, **{**sizes, **fields}))
    assert self_score(model.layers[0]) == pytest.approx(3.0 * times, rel=0.1)


@pytest.mark.parametrize(("score", "times"), [(None, 1), (2.0, 1.4), (6.5, 3.7)])
def test_queries_and_keys_start_alike(score, times):
    fields = {"hidden_size": 256, "num_attention_heads": 4, "norm_first": True, "projection": "identity"}
    model = LinformerModel(modes.config(initial_self_score=score, **fields, max_position_embeddings=256))
    model.set_attn_implementation("eager")
    for layer in model.layers:
        query, key = layer.attention.query.weight, layer.attention.key.weight
        assert torch.equal(query, key) == (score is not None)
        if score is None:
            assert query.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
            continue
        assert self_score(layer) == pytest.approx(score, rel=0.1)
    # So attention starts near its own position.
    probs = model(torch.randint(2, 31, (1, 256)), output_attentions=True).attentions[0][0].mean(0)
    distance = (torch.arange(256)[:, None] - torch.arange(256)).abs()
    near, evenly = ((own * (distance <= 8)).sum(-1).mean().item() for own in (probs, torch.full_like(probs, 1 / 256)))
    assert near / evenly == pytest.approx(times, rel=0.2)


@pytest.mark.parametrize("positions", ["waves", "sinusoidal"])
@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
def test_a_dynamic_projection_starts_as_windows(positions, sharing):
    n, k, d = 256, 32, 256
    sizes = {"hidden_size": d, "num_attention_heads": 4, "max_position_embeddings": n, "projected_length": k}
    model = LinformerModel(modes.config(projection="dynamic", sharing=sharing, position_init=positions, **sizes))
    tokens = model.embeddings(torch.randint(2, 31, (1, n)), None, None, None)
    windows = window_matrix(n, k, n) > 0
    for projection in model.projections:
        E = (tokens @ projection.weight).softmax(1)[0]  # (n, k)
        assert (E * windows).sum(0).mean() > 0.5  # chance is 1/k


def test_what_is_loaded_is_not_started_anew(tmp_path):
    model = LinformerForMaskedLM(modes.config(projection="dynamic"))
    with torch.no_grad():
        model.linformer.layers[0].attention.key.weight.add_(1)
        model.linformer.projections[0].weight.add_(1)
    model.save_pretrained(tmp_path)
    loaded = LinformerForMaskedLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    # A head that is new gets its own first values, and the rest stays.
    classifier = LinformerForSequenceClassification.from_pretrained(tmp_path)
    before, after = (own.linformer.layers[0].attention.key.weight for own in (model, classifier))
    assert torch.equal(before, after)
