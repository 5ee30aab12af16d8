"""Attention with a local window, in blocks and in Triton kernels, against `reference.attend_locally`."""

import pytest
import torch
from torch.nn import functional

from linformers import LinformerAttention, reference
from linformers.ops import attend as kernels
from linformers.ops import local
from linformers.ops.local import attend_locally

from .common import DEVICE, ON_GPU, assert_accuracy, assert_all_close, derive, head_tensors, to_double

in_triton = pytest.mark.gpu if ON_GPU else lambda test: test


def tensors(n, k, *, b=2, h=3, d=8):
    return [torch.randn(b, h, length, d, dtype=torch.float64, requires_grad=True) for length in (n, k, k, n, n)]


def by_sdpa(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=0.25).transpose(1, 2), None


def by_reference(query, key, value, mask):
    result, probs = reference.attend(query, key, value, mask, scaling=0.25)
    return result.transpose(1, 2), probs


def expected_output(*inputs, **options):
    return reference.attend_locally(*inputs, **options, scaling=0.25).transpose(1, 2)


def by_kernels(*inputs, **options):
    return kernels.attend(*inputs, **options, scaling=0.25)


def masks(n, k, device=None):
    """The first row is half padding."""
    lengths = torch.tensor([n // 2, n], device=device)
    slots = torch.tensor([[k // 2], [k]], device=device)
    return {"lengths": lengths, "mask": (torch.arange(k, device=device) < slots)[:, None, None]}


@pytest.mark.parametrize("attend", [by_sdpa, by_reference])
@pytest.mark.parametrize("block", [16, local.SMALLEST_BLOCK])
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("n", "window"), [(1, 1), (5, 2), (16, 3), (33, 16), (50, 17), (40, 100), (150, 70)])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks(n, k, window, attend, masked, block, monkeypatch):
    monkeypatch.setattr(local, "SMALLEST_BLOCK", block)
    inputs, gradient = tensors(n, k), torch.randn(2, n, 3, 8, dtype=torch.float64)
    options = {"window": window, **(masks(n, k) if masked else {})}
    results = derive(lambda *x: attend_locally(attend, *x, **options)[0], inputs, gradient)
    assert_all_close(results, derive(lambda *x: expected_output(*x, **options), inputs, gradient), atol=1e-12)


def test_probabilities():
    n, k, window = 37, 5, 4
    query, key, value, near_key, near_value = tensors(n, k)
    _, probs = attend_locally(by_reference, query, key, value, near_key, near_value, window=window)
    assert probs.shape == (2, 3, n, k + 2 * window + 1)
    positions = torch.arange(n)
    near = (positions[:, None] - positions).abs() <= window
    keys, values = torch.cat([key, near_key], 2), torch.cat([value, near_value], 2)
    _, dense = by_reference(query, keys, values, torch.cat([torch.ones(n, k, dtype=torch.bool), near], -1))
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


def test_a_window_over_everything_is_standard_attention():
    windowed = LinformerAttention(16, 4, 24, 4, projection="none", local_window=24).double()
    full = LinformerAttention(16, 4, 24, 4, projection="identity").double()
    full.load_state_dict(windowed.state_dict())
    x, mask = torch.randn(2, 20, 16, dtype=torch.float64), torch.rand(2, 20) < 0.7
    mask[:, 3] = True
    torch.testing.assert_close(windowed(x, mask)[mask], full(x, mask)[mask], rtol=0, atol=1e-12)


def test_memory_grows_linearly():
    """16 times the length takes at most 20 times the memory."""
    from linformers.benchmark.measure import peak_memory

    layer = LinformerAttention(16, 1, 16384, 16, local_window=16)
    with torch.no_grad():
        peaks = [peak_memory(lambda n=n: layer(torch.randn(1, n, 16)), "cpu") for n in (1024, 16384)]
    assert peaks[1] < 20 * peaks[0]


def kernel_inputs(n, k, **options):
    """Leaves as a layer makes them, and the gradient of the output."""
    inputs = head_tensors(n, k, k, n, n, b=2, **options)
    return inputs, torch.randn_like(inputs[0]).transpose(1, 2)


SIZES = [(1, 1, 1), (2, 0, 5), (63, 17, 2), (127, 128, 32), (129, 96, 64)]
SIZES += [(200, 300, 70), (70, 3, 512)] if ON_GPU else [(100, 140, 70), (70, 3, 100)]
CASES = [(*size, masked) for size in SIZES for masked in (False, True)]


# In the interpreter, the largest sizes take many seconds.
@in_triton
@pytest.mark.parametrize(
    ("n", "k", "window", "masked"), [case for case in CASES if ON_GPU or case[3] or case[0] * sum(case[1:3]) < 2e4]
)
def test_kernels(n, k, window, masked):
    inputs, gradient = kernel_inputs(n, k)
    options = {"window": window, **(masks(n, k, DEVICE) if masked else {})}
    results = derive(lambda *x: by_kernels(*x, **options), inputs, gradient)
    expected = derive(lambda *x: expected_output(*x, **options), to_double(inputs), gradient.double())
    assert_all_close(results, expected, atol=2e-5)


@in_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_in_half_precision(dtype):
    n, k, window = (1025, 128, 32) if ON_GPU else (70, 20, 10)
    inputs, gradient = kernel_inputs(n, k, d=64 if ON_GPU else 16, dtype=dtype)
    options = {"window": window, **masks(n, k, DEVICE)}
    expected = derive(lambda *x: expected_output(*x, **options), to_double(inputs), gradient.double())
    results = derive(lambda *x: by_kernels(*x, **options), inputs, gradient)
    torchs = derive(lambda *x: attend_locally(by_sdpa, *x, **options)[0], inputs, gradient)
    assert_accuracy(results, torchs, expected)


@in_triton
def test_kernels_drop_the_same_entries_in_both_passes():
    """The gradient along a direction equals the finite difference, with dropout."""
    inputs, gradient = kernel_inputs(40, 12)
    directions = [torch.randn_like(x) for x in inputs]
    seed = torch.tensor([7], device=DEVICE)

    def run(*x):
        return kernels._attend(*x, None, None, seed, 6, 0.25, 0.4)[0]

    step = 1e-2
    ahead, behind = (run(*(x + sign * step * d for x, d in zip(inputs, directions, strict=True))) for sign in (1, -1))
    output, *gradients = derive(run, inputs, gradient)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close(slope, ((ahead - behind) * gradient).sum() / (2 * step), rtol=2e-3, atol=1e-2)
    assert (output - by_kernels(*inputs, window=6)).abs().max() > 0.01


@in_triton
def test_kernels_take_any_strides():
    whole = torch.randn(5, 2, 16, 2, 140, device=DEVICE)
    inputs = [x.permute(0, 2, 3, 1)[:, :, ::2].requires_grad_() for x in whole]
    inputs[1:3] = [x[:, :, :9] for x in inputs[1:3]]
    gradient = torch.randn(2, 70, 1, 16, device=DEVICE).expand(2, 70, 2, 16)
    results, expected = (
        derive(lambda *x, f=f: f(*x, window=5), inputs, gradient) for f in (by_kernels, expected_output)
    )
    assert_all_close(results, expected, atol=1e-4)
