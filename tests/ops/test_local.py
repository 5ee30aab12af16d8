"""Attention onto projected keys and the exact keys nearby: blocks against the specification."""

import pytest
import torch
from torch import library
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from linformers import LinformerAttention, reference
from linformers.ops import attend as kernels
from linformers.ops import local
from linformers.ops.local import attend_locally

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
in_triton = pytest.mark.gpu if ON_GPU else lambda test: test


def tensors(n, k, *, b=2, h=3, d=8):
    return [torch.randn(b, h, length, d, dtype=torch.float64, requires_grad=True) for length in (n, k, k, n, n)]


def by_sdpa(query, key, value, mask):
    return scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2), None


def by_reference(query, key, value, mask):
    result, probs = reference.attend(query, key, value, mask, scaling=0.3)
    return result.transpose(1, 2), probs


@pytest.mark.parametrize("attend", [by_sdpa, by_reference])
@pytest.mark.parametrize("block", [16, local.SMALLEST_BLOCK])
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("n", "window"), [(1, 1), (5, 2), (16, 3), (33, 16), (50, 17), (40, 100), (150, 70)])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks(n, k, window, attend, masked, block, monkeypatch):
    monkeypatch.setattr(local, "SMALLEST_BLOCK", block)
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


def inputs_of(n, k, *, b=2, h=2, d=16, dtype=torch.float32):
    """As a layer makes them: heads side by side."""

    def of(length):
        return torch.randn(b, length, h, d, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()

    return [of(length) for length in (n, k, k, n, n)]


def masks_of(n, k):
    lengths = torch.tensor([n // 2, n], device=DEVICE)
    return {"lengths": lengths, "mask": (torch.arange(k, device=DEVICE) < lengths[:, None] * k // n)[:, None, None]}


def derive(function, inputs, gradient):
    output = function(*inputs)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


SIZES = [(1, 1, 1), (2, 0, 5), (63, 17, 2), (127, 128, 32), (129, 96, 64)]
SIZES += [(200, 300, 70), (70, 3, 512)] if ON_GPU else [(100, 140, 70), (70, 3, 100)]


@in_triton
@pytest.mark.parametrize(
    ("n", "k", "window", "masked"),
    [
        (n, k, window, masked)
        for n, k, window in SIZES
        for masked in (False, True)
        if ON_GPU or masked or n * (k + window) < 2e4  # interpreted, the largest take many seconds
    ],
)
def test_kernels(n, k, window, masked):
    inputs = inputs_of(n, k)
    options = {"window": window, "scaling": 0.25, **(masks_of(n, k) if masked else {})}
    gradient = torch.randn(2, n, 2, 16, device=DEVICE)
    own = derive(lambda *x: kernels.attend(*x, **options), inputs, gradient)
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = derive(lambda *x: reference.attend_locally(*x, **options).transpose(1, 2), double, gradient.double())
    for result, other in zip(own, expected, strict=True):
        torch.testing.assert_close(result.double(), other, rtol=0, atol=2e-5)


@in_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_in_half_precision(dtype):
    """Errors against float64 are at most twice those of SDPA on the same keys, and three times in the gradients."""
    n, k, window = (1025, 128, 32) if ON_GPU else (70, 20, 10)
    inputs = inputs_of(n, k, d=64 if ON_GPU else 16, dtype=dtype)
    options = {"window": window, **masks_of(n, k)}
    scaling = inputs[0].shape[-1] ** -0.5
    gradient = torch.randn_like(inputs[0]).transpose(1, 2)

    def by_torch(query, key, value, mask):
        return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2), None

    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = derive(
        lambda *x: reference.attend_locally(*x, **options, scaling=scaling).transpose(1, 2), double, gradient.double()
    )
    own = derive(lambda *x: kernels.attend(*x, **options, scaling=scaling), inputs, gradient)
    other = derive(lambda *x: attend_locally(by_torch, *x, **options)[0], inputs, gradient)
    for i, (a, b, e) in enumerate(zip(own, other, expected, strict=True)):
        errors = [(x.double() - e).norm() / e.norm() for x in (a, b)]
        assert errors[0] <= (3 if i else 2) * errors[1] + torch.finfo(torch.float32).eps, i


@in_triton
def test_kernels_drop_the_same_entries_in_both_passes():
    """The gradient along a direction is the change along it, entries dropped and all."""
    inputs = [x.detach() for x in inputs_of(40, 12)]
    directions = [torch.randn_like(x) for x in inputs]
    seed = torch.tensor([7], device=DEVICE)

    def run(*x):
        query, key, value, near_key, near_value = x
        return kernels._attend(query, key, value, near_key, near_value, None, None, seed, 6, 0.25, 0.4)[0]

    step = 1e-2
    ahead, behind = (run(*(x + sign * step * d for x, d in zip(inputs, directions, strict=True))) for sign in (1, -1))
    gradient = torch.randn_like(ahead)
    leaves = [x.clone().requires_grad_() for x in inputs]
    _, *gradients = derive(run, leaves, gradient)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close(slope, ((ahead - behind) * gradient).sum() / (2 * step), rtol=2e-3, atol=1e-2)
    assert (run(*inputs) - kernels.attend(*inputs, window=6, scaling=0.25)).abs().max() > 0.01


@in_triton
def test_kernels_replay_dropout():
    inputs = inputs_of(40, 12)
    gradient = torch.randn(2, 40, 2, 16, device=DEVICE)

    def function(*x):
        return kernels.attend(*x, window=6, scaling=0.25, dropout=0.5)

    torch.manual_seed(0)
    expected = derive(function, inputs, gradient)
    torch.manual_seed(0)
    again = derive(lambda *x: checkpoint(function, *x, use_reentrant=False), inputs, gradient)
    assert all(map(torch.equal, expected, again))


@in_triton
def test_kernels_take_any_strides():
    whole = torch.randn(5, 2, 16, 2, 140, device=DEVICE)
    inputs = [x.permute(0, 2, 3, 1)[:, :, ::2].requires_grad_() for x in whole]
    inputs[1:3] = [x[:, :, :9] for x in inputs[1:3]]
    gradient = torch.randn(2, 70, 1, 16, device=DEVICE).expand(2, 70, 2, 16)
    own = derive(lambda *x: kernels.attend(*x, window=5, scaling=0.25), inputs, gradient)
    other = derive(lambda *x: reference.attend_locally(*x, window=5, scaling=0.25).transpose(1, 2), inputs, gradient)
    for result, expected in zip(own, other, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@in_triton
def test_kernels_as_operators():
    options = masks_of(30, 8)
    arguments = (*inputs_of(30, 8), options["mask"], options["lengths"], None, 4, 0.25, 0.0)
    library.opcheck(kernels._attend, arguments)


@in_triton
def test_kernels_rerun_equally():
    inputs = inputs_of(500 if ON_GPU else 100, 30)
    gradient = torch.randn(2, inputs[0].shape[2], 2, 16, device=DEVICE)
    first = derive(lambda *x: kernels.attend(*x, window=20, scaling=0.25), inputs, gradient)
    for _ in range(50 if ON_GPU else 2):
        again = derive(lambda *x: kernels.attend(*x, window=20, scaling=0.25), inputs, gradient)
        assert all(map(torch.equal, first, again))
