"""Attention with a local window, in blocks and in Triton kernels, against `reference.attend_locally`."""

import pytest
import torch
from torch.nn import functional

from linformers import LinformerAttention, reference
from linformers.ops import local
from linformers.ops.local import attend_locally

from .common import DEVICE, ON_GPU, assert_accurate, by_kernels, derive, expect, kernel_inputs

in_triton = pytest.mark.gpu if ON_GPU else lambda test: test


def tensors(n, k, *, b=2, h=3, d=8):
    return [torch.randn(b, h, length, d, dtype=torch.float64, requires_grad=True) for length in (n, k, k, n, n)]


def by_sdpa(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2), None


def by_eager(query, key, value, mask):
    result, probs = reference.attend(query, key, value, mask, scaling=query.shape[-1] ** -0.5)
    return result.transpose(1, 2), probs


def in_blocks(*inputs, attend=by_sdpa, **options):
    return attend_locally(attend, *inputs, **options)[0]


def masks(n, k, device=None):
    """The first row is half padding."""
    lengths = torch.tensor([n // 2, n], device=device)
    slots = torch.tensor([[k // 2], [k]], device=device)
    return {"lengths": lengths, "mask": (torch.arange(k, device=device) < slots)[:, None, None]}


@pytest.mark.parametrize("attend", [by_sdpa, by_eager])
@pytest.mark.parametrize("block", [16, local.SMALLEST_BLOCK])
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("n", "window"), [(1, 1), (5, 2), (16, 3), (33, 16), (50, 17), (40, 100), (150, 70)])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks(n, k, window, attend, masked, block, monkeypatch):
    monkeypatch.setattr(local, "SMALLEST_BLOCK", block)
    inputs, gradient = tensors(n, k), torch.randn(2, n, 3, 8, dtype=torch.float64)
    options = {"window": window, **(masks(n, k) if masked else {})}
    results = derive(in_blocks, inputs, gradient, attend=attend, **options)
    torch.testing.assert_close(results, expect(inputs, gradient, **options), rtol=0, atol=1e-12)


def test_probabilities():
    n, k, window = 37, 5, 4
    query, key, value, near_key, near_value = tensors(n, k)
    _, probs = attend_locally(by_eager, query, key, value, near_key, near_value, window=window)
    assert probs.shape == (2, 3, n, k + 2 * window + 1)
    positions = torch.arange(n)
    near = (positions[:, None] - positions).abs() <= window
    keys, values = torch.cat([key, near_key], 2), torch.cat([value, near_value], 2)
    _, dense = by_eager(query, keys, values, torch.cat([torch.ones(n, k, dtype=torch.bool), near], -1))
    padded = functional.pad(dense[..., k:], (window, window))
    windows = torch.stack([padded[:, :, i, i : i + 2 * window + 1] for i in range(n)], 2)
    torch.testing.assert_close(probs, torch.cat([dense[..., :k], windows], -1))


def test_compiling_is_not_mistaken_for_exporting(monkeypatch):
    """Dynamo of torch 2.11 sets `torch.compiler.is_exporting`; spare blocks and indexing are for exports only."""
    blocks = []

    def attend(query, *others):
        blocks.append(len(query))
        return by_sdpa(query, *others)

    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    attend_locally(attend, *tensors(40, 3, b=1), window=2)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    attend_locally(attend, *tensors(40, 3, b=1), window=2)
    assert blocks == [3, 4]


def test_memory_grows_linearly():
    """16 times the length takes at most 20 times the memory."""
    from linformers.benchmark.measure import peak_memory

    layer = LinformerAttention(16, 1, 16384, 16, local_window=16)
    with torch.no_grad():
        peaks = [peak_memory(lambda n=n: layer(torch.randn(1, n, 16)), "cpu") for n in (1024, 16384)]
    assert peaks[1] < 20 * peaks[0]


SIZES = [(1, 1, 1), (2, 0, 5), (63, 17, 2), (127, 128, 32), (129, 96, 64)]
SIZES += [(200, 300, 70), (70, 3, 512)] if ON_GPU else [(100, 140, 70), (70, 3, 100)]
CASES = [(*size, masked) for size in SIZES for masked in (False, True)]


# In the interpreter, the largest sizes take many seconds.
@in_triton
@pytest.mark.parametrize(
    ("n", "k", "window", "masked"), [case for case in CASES if ON_GPU or case[3] or case[0] * sum(case[1:3]) < 2e4]
)
def test_kernels(n, k, window, masked):
    inputs, gradient = kernel_inputs(n, k, window, b=2)
    options = {"window": window, **(masks(n, k, DEVICE) if masked else {})}
    results, expected = derive(by_kernels, inputs, gradient, **options), expect(inputs, gradient, **options)
    torch.testing.assert_close(results, expected, rtol=0, atol=2e-5, check_dtype=False)


@in_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_in_half_precision(dtype):
    n, k, window = (1025, 128, 32) if ON_GPU else (70, 20, 10)
    inputs = kernel_inputs(n, k, window, b=2, d=64 if ON_GPU else 16, dtype=dtype)
    assert_accurate(in_blocks, *inputs, window=window, **masks(n, k, DEVICE))
