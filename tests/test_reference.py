"""The specification itself: against softmax attention, against itself, and at the edges of number types."""

import pytest
import torch
from torch.nn import functional

from linformers import reference


def projected(n=11, d=6, k=4, heads=None):
    """x, the weights and biases of query, key and value, and E and F."""
    shapes = [(n, d), *[(d, d), (d,)] * 3, *[(n, k) if heads is None else (heads, n, k)] * 2]
    x, *weights, E, F = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return x, tuple(zip(weights[::2], weights[1::2], strict=True)), E, F


def softmax_attention(x, weights, num_heads, mask):
    query, key, value = ((x @ W + b).unflatten(-1, (num_heads, -1)).transpose(0, 1) for W, b in weights)
    return functional.scaled_dot_product_attention(query, key, value, mask).transpose(0, 1).flatten(1)


def assert_same(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_identity_matrices_or_a_window_alone_are_softmax_attention(window):
    """Without a window among all tokens, and with a window alone within a band."""
    x, weights, _, _ = projected()
    E = torch.eye(11, dtype=torch.float64)[:, : 0 if window else 11]
    positions = torch.arange(11)
    band = (positions[:, None] - positions).abs() <= (window or 11)
    result = reference.linformer_attention(x, *weights, E, E, num_heads=3, window=window)
    assert_same(result, softmax_attention(x, weights, 3, band))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("heads", [None, 3])
def test_attention_of_a_batch_is_that_of_each_sequence(heads, window):
    """`attend` and `attend_locally`, which kernels are tested against, are equation 7 without the projections."""
    x, weights, E, F = projected(heads=heads)
    expected = reference.linformer_attention(x, *weights, E, F, num_heads=3, window=window)
    tokens = [(x @ W).unflatten(-1, (3, 2)).transpose(0, 1) for W, _ in weights]
    query, near_key, near_value = ((own + b.view(3, 1, 2))[None] for own, (_, b) in zip(tokens, weights, strict=True))
    key, value = (
        (matrix.mT @ own + b.view(3, 1, 2))[None]
        for matrix, own, (_, b) in zip((E, F), tokens[1:], weights[1:], strict=True)
    )
    if window:
        near = {"window": window, "lengths": torch.tensor([11])}
        result = reference.attend_locally(query, key, value, near_key, near_value, scaling=2**-0.5, **near)
    else:
        result, probs = reference.attend(query, key, value, scaling=2**-0.5)
        assert_same(probs.sum(-1), torch.ones(1, 3, 11, dtype=torch.float64))
    assert_same(result[0].transpose(0, 1).flatten(1), expected)


def test_a_row_that_sees_nothing_is_zero():
    query, key, value = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask[0] = False
    output, probs = reference.attend(query, key, value, mask, scaling=1.0)
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
        output, probs = reference.attend(query, key, value, scaling=64**-0.5)
    expected = torch.softmax(torch.tensor([0.0, -40 * 0.25 / 8]), -1)
    torch.testing.assert_close(probs.float().flatten(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(output.float().flatten(), expected[0].expand(64), rtol=torch.finfo(dtype).eps, atol=0)
