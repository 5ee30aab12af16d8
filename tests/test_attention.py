"""The layer, in float64: against its definition and standard attention, its gradients, cost and arguments."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from linformers import LinformerAttention, LinformerModel
from linformers.errors import UserError
from linformers.ops.ranks import Ranks, reorder, zero_padding
from linformers.ops.rotary import Rotation, Rotations

from . import modes
from .modes import refused
from .naive import naive_attention


def layer(hidden_size=16, num_heads=4, max_length=12, projected_length=4, **mode):
    attention = LinformerAttention(hidden_size, num_heads, max_length, projected_length, **mode).double()
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
            model.projections(length, None, mask.device, torch.double),
            model.projections(length, ranks.lengths, mask.device, torch.double),
            strict=True,
        ):
            attention = encoder_layer.attention
            x = torch.randn(3, length, 16, dtype=torch.double)
            rotary = model.config.is_rotary
            turns = (Rotation.of(torch.arange(length), 4, base, torch.double) for base in (1e4, None))
            own = {"rotations": Rotations(*turns) if rotary else None}
            own["attn_implementation"] = attn_implementation
            result, _ = attention(x, E, F, **own)
            assert_same(result, naive_attention(attention, E, F, x, shift=shift, rotary=rotary))
            tokens = zero_padding(reorder(x, ranks.order), ranks.sorted_mask)
            result, _ = attention(tokens, *padded, ranks.lengths, **own)
            result = reorder(result, ranks.places)
            assert_same(result[mask], naive_attention(attention, E, F, x, mask, shift, rotary)[mask])


@pytest.mark.parametrize("projection", ["linear", "mean", "conv"])
def test_rotary_positions_tell_the_order_of_tokens_inside_a_window(projection):
    """Tokens 4 and 5 belong to the same slot, whose average does not change when they trade places."""
    mode = {"projection": projection, "position_embedding_type": "rotary", "num_hidden_layers": 1}
    model = LinformerModel(modes.config(**mode)).double()
    for parameter in model.layers.parameters():  # not of E, which stays an average
        nn.init.normal_(parameter, std=0.5)
    embeds = torch.randn(1, 12, 16, dtype=torch.double)
    order = [0, 1, 2, 3, 5, 4, *range(6, 12)]
    before, after = (model(inputs_embeds=x).last_hidden_state for x in (embeds, embeds[:, order]))
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3


@pytest.mark.parametrize(("n", "k"), [(7, 3), (13, 5), (11, 10), (12, 11), (11, 11), (5, 1), (1, 1), (31, 17)])
@pytest.mark.parametrize("init", ["window", "gaussian"])
def test_prime_and_adjacent_sizes(n, k, init):
    attention = layer(max_length=n, projected_length=k, projection_init=init)
    x = torch.randn(2, n, 16, dtype=torch.double)
    expected = naive_attention(attention, *attention.projections(n, None, x.device)[0], x)
    assert_same(attention(x), expected)
    with torch.no_grad():
        attention.projections[1].delta[n // 2, k // 2] += 1e-6
    with pytest.raises(AssertionError, match="not close"):  # the comparison notices a small difference
        assert_same(attention(x), expected)


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


def test_numbers_of_numpy_and_a_context_without_tokens():
    attention = LinformerAttention(16, np.int64(4), 16, np.array([4, 2, 4, 1]), window_shift=2)
    assert attention(torch.randn(2, 3, 16), context=torch.zeros(2, 0, 16)).shape == (2, 3, 16)


def test_attentions_of_the_layer():
    """P̄ comes from eager attention, whatever the implementation, with rows in the order of the tokens."""
    attention = layer(attn_implementation="sdpa")
    x, mask = torch.randn(2, 9, 16, dtype=torch.double), torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 9])
    result, probs = attention(x, mask, output_attentions=True)
    assert_same(result[mask.bool()], attention(x, mask)[mask.bool()])
    _, alone = attention(x[:1, mask[0].bool()], output_attentions=True)
    assert_same(probs[0, :, mask[0].bool()], alone[0])
    assert_same(probs[1].sum(-1), torch.ones(4, 9, dtype=torch.double))


@pytest.mark.parametrize("projection", ["linear", "mean", "conv"])
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
    attention = model.linformer.layers[0].attention
    called = []
    for name in ("query", "key", "value", "output"):
        getattr(attention, name).register_forward_hook(lambda *_, name=name: called.append(name))
    expected = model(ids, mask).logits
    assert {*called} == {"query", "key", "value", "output"}
    attention.key.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    assert (model(ids, mask).logits - expected)[mask].abs().max() > 1e-3


def products(function):
    """The number of multiplications in matrix products."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(("sharing", "maps", "rows"), [("key-value", 1, 4), ("headwise", 2, 4), ("none", 2, 48)])
def test_cost_is_linear_and_a_shared_matrix_projects_first(sharing, maps, rows):
    """W_K and W_V are applied to `rows` rows: k if E comes first."""
    n, k, d = 48, 4, 16
    attention = layer(max_length=n, projected_length=k, sharing=sharing, attn_implementation="eager")
    cost = products(lambda: attention(torch.randn(1, n, d, dtype=torch.double)))
    assert cost == 2 * n * d * d + 2 * n * k * d + maps * n * k * d + 2 * rows * d * d


@pytest.mark.parametrize("projection", ["linear", "mean", "max", "conv"])
def test_a_smaller_k_of_some_heads_or_layers_costs_less(projection):
    fields = {"projection": projection, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
    fields["sharing"] = "none" if projection == "conv" else "layerwise"

    def cost(projected_length):
        with torch.device("meta"):  # elsewhere, SDPA is not counted
            model = LinformerModel(modes.config(**fields, projected_length=projected_length))
            return products(lambda: model(torch.zeros(1, 64, dtype=torch.long)))

    all_large, some_heads, some_layers, all_small = (cost(k) for k in (32, [[32, 32, 8, 8]] * 2, [32, 8], 8))
    assert all_small < some_layers < all_large
    assert all_small < some_heads < all_large


WRONG_VALUES = {"max_length": 0, "dropout": 2, "projection_scale": -1, "local_window": 513, "window_shift": 3}
WRONG_VALUES |= {"sharing": "headwize", "attn_implementation": "spda"}


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        *(({name: value}, f"{name}={value!r} ") for name, value in WRONG_VALUES.items()),
        ({"projected_length": 13}, "projected_length=13 exceeds max_length=12"),
        ({"num_heads": 3}, "hidden_size=16 is not divisible by num_heads=3"),
        ({"projected_length": [[4] * 4]}, "projected_length has 1 entries, but there must be 4"),
        ({"projected_length": [[4]] * 4}, "projected_length=[4] must be"),
        ({"window_shift": 0.5}, "window_shift=0.5 must be an integer from 0 to 2"),
        ({"window_shift": 1, "projection": "mean"}, "window_shift=1 must be"),
    ],
)
def test_invalid_arguments_are_named(arguments, fragment):
    with refused(fragment):
        LinformerAttention(**{"hidden_size": 16, "num_heads": 4, "max_length": 12, "projected_length": 4, **arguments})


X, ONES = torch.zeros(2, 12, 16), torch.ones(2, 12, dtype=torch.bool)


@pytest.mark.parametrize(
    ("x", "arguments", "fragment"),
    [
        (torch.zeros(2, 13, 16), {}, "hidden_states has 13 tokens, but at most n=12"),
        (X, {"context": torch.zeros(2, 13, 16)}, "context has 13 tokens, but at most n=12"),
        (torch.zeros(2, 12, 15), {}, "hidden_states has shape (2, 12, 15), expected (batch, length, 16)"),
        (X, {"context": torch.zeros(3, 5, 16)}, "context has shape (3, 5, 16), expected (2, length, 16)"),
        (X, {"attention_mask": ONES[:, :11]}, "attention_mask has shape (2, 11), expected (2, 12)"),
        (X, {"context": X[:, :5], "context_mask": ONES}, "context_mask has shape (2, 12), expected (2, 5)"),
        (X, {"context_mask": ONES}, "context_mask was given without context"),
        (X, {"is_causal": True}, "is_causal=True is"),
    ],
)
def test_invalid_inputs_are_named(x, arguments, fragment):
    with pytest.raises((UserError, TypeError), match=f"^{re.escape(fragment)}"):
        LinformerAttention(16, 4, 12, 4)(x, **arguments)


def test_a_local_window_is_for_self_attention():
    with refused("local_window=2"):
        LinformerAttention(16, 4, 12, 4, local_window=2)(X, context=X)


@pytest.mark.parametrize("fields", [{}, {"local_window": 2}], ids=str)
def test_implementations_that_cannot_mask_are_refused_where_they_must(fields):
    model = LinformerModel(modes.config(**fields, attn_implementation="flex_attention"))
    mask = None if fields else torch.tensor([[1] * 6 + [0] * 6])
    with refused("attn_implementation='flex_attention' cannot mask keys"):
        model(torch.ones(1, 12, dtype=torch.long), mask)
