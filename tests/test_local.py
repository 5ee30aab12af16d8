"""Attention onto projected keys and the exact keys nearby: blocks against the specification."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from linformers import LinformerAttention
from linformers.ops import reference
from linformers.ops.local import attend_locally


def tensors(n, k, *, b=2, h=3, d=8):
    return [torch.randn(b, h, length, d, dtype=torch.float64, requires_grad=True) for length in (n, k, k, n, n)]


def by_sdpa(query, key, value, mask):
    return scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2), None


def by_reference(query, key, value, mask):
    result, probs = reference.attend(query, key, value, mask, scaling=0.3)
    return result.transpose(1, 2), probs


@pytest.mark.parametrize("attend", [by_sdpa, by_reference])
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("n", "window"), [(1, 1), (5, 2), (16, 3), (33, 16), (50, 17), (40, 100)])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks(n, k, window, attend, masked):
    inputs = tensors(n, k)
    mask = lengths = None
    if masked:
        lengths = torch.tensor([n // 2, n])
        mask = (torch.arange(k) < torch.tensor([[k // 2], [k]]))[:, None, None]
    options = {"window": window, "mask": mask, "lengths": lengths}
    result, _ = attend_locally(attend, *inputs, **options)
    expected = reference.attend_locally(*inputs, **options, scaling=0.3).transpose(1, 2)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    gradient = torch.randn_like(result)
    for own, other in zip(
        torch.autograd.grad(result, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_probabilities():
    n, k, window = 37, 5, 4
    query, key, value, near_key, near_value = tensors(n, k)
    _, probs = attend_locally(by_reference, query, key, value, near_key, near_value, window=window)
    assert probs.shape == (2, 3, n, k + 2 * window + 1)
    scores = torch.cat([query @ key.mT, query @ near_key.mT], -1) * 0.3
    places = torch.arange(n)
    far = (places[:, None] - places).abs() > window
    dense = scores.masked_fill(torch.cat([torch.zeros(n, k, dtype=torch.bool), far], -1), -torch.inf).softmax(-1)
    torch.testing.assert_close(probs[..., :k], dense[..., :k])
    for i in range(n):
        for offset in range(-window, window + 1):
            own = probs[:, :, i, k + window + offset]
            expected = dense[:, :, i, k + i + offset] if 0 <= i + offset < n else torch.zeros_like(own)
            torch.testing.assert_close(own, expected)


def test_a_window_over_everything_is_standard_attention():
    torch.manual_seed(0)
    local = LinformerAttention(16, 4, 24, 4, projection="none", local_window=24).double()
    full = LinformerAttention(16, 4, 24, 4, projection="identity").double()
    full.load_state_dict(local.state_dict())
    x, mask = torch.randn(2, 20, 16, dtype=torch.float64), torch.rand(2, 20) < 0.7
    mask[:, 3] = True
    torch.testing.assert_close(local(x, mask)[mask], full(x, mask)[mask], rtol=0, atol=1e-12)


def test_memory_grows_as_n():
    """No tensor of n by n: 16 times the length takes at most 20 times the memory."""
    from linformers.benchmark.measure import peak_memory

    layer = LinformerAttention(16, 1, 16384, 16, local_window=16)
    with torch.no_grad():
        peaks = [peak_memory(lambda n=n: layer(torch.randn(1, n, 16)), "cpu") for n in (1024, 16384)]
    assert peaks[1] < 20 * peaks[0]
