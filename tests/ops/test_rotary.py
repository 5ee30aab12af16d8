"""The rotation kernel against the same formula in float64."""

import pytest
import torch
from torch import library

from linformers import reference
from linformers.ops import rotary
from linformers.ops.rotary import Rotation

from .common import DEVICE, GPU_MARKS

pytest.importorskip("triton")
pytestmark = GPU_MARKS


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr("linformers.ops.dispatch.DEVICES", {"cpu", "cuda"})


def inputs(n, d=16, b=2, h=3, dtype=torch.float32):
    x = torch.randn(b, n, h, d, device=DEVICE, dtype=torch.float64).to(dtype).transpose(1, 2)
    return x.requires_grad_(), Rotation.of(torch.arange(n, device=DEVICE), d, 10000.0)


def compare(x, turn, tolerance):
    """Output and gradient against torch's own, in float64; the kernel must have run."""
    assert rotary.fits_kernel(x, turn.cos)
    gradient = torch.randn_like(x)
    output = turn(x)
    assert output.dtype == x.dtype
    exact = x.detach().double().requires_grad_()
    expected = Rotation(turn.cos.double(), turn.sin.double())(exact)  # there is no kernel for float64
    results = [output, *torch.autograd.grad(output, x, gradient)]
    exact_results = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
    for result, other in zip(results, exact_results, strict=True):
        torch.testing.assert_close(result.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 31, 32, 70])
@pytest.mark.parametrize("d", [2, 16, 40, 64, 128])
def test_sizes(n, d):
    compare(*inputs(n, d), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype):
    compare(*inputs(70, 64, dtype=dtype), torch.finfo(dtype).eps / 2)


def test_any_strides():
    """Sliced channels and rows, and a broadcast batch."""
    n, d = 40, 16
    whole = torch.randn(1, n, 3, 2 * d, device=DEVICE)
    x = whole[..., ::2].transpose(1, 2).expand(2, 3, n, d).requires_grad_()
    compare(x, Rotation.of(torch.arange(n, device=DEVICE), d, 10000.0), 1e-6)


def test_places_of_each_row():
    """Tokens that are not in order have a table for each row of the batch."""
    x, turn = inputs(40)
    places = torch.stack([torch.randperm(40, device=DEVICE) for _ in x])
    compare(x, turn.at(places), 1e-6)
    one = turn.at(places[:1])  # the same for all rows
    compare(x, one, 1e-6)


def test_equals_the_reference_and_its_inverse():
    x, turn = inputs(40)
    for head in turn(x)[0], turn(x)[1]:
        assert head.shape == (3, 40, 16)
    positions = torch.arange(40, device=DEVICE)
    torch.testing.assert_close(turn(x)[1, 2], reference.rotate(x[1, 2], positions), rtol=0, atol=1e-5)
    torch.testing.assert_close(turn.inverse()(turn(x)), x, rtol=0, atol=1e-5)


def test_heads_that_turn_differently_need_no_kernel():
    x, turn = inputs(40)
    own = Rotation(*(torch.stack([t, 0 * t, t])[None] for t in turn))
    assert not rotary.fits_kernel(x, own.cos)
    torch.testing.assert_close(own(x)[:, 0], turn(x)[:, 0], rtol=0, atol=1e-6)


def test_empty():
    x, turn = inputs(0)
    assert turn(x).shape == (2, 3, 0, 16)


def test_is_a_valid_operator():
    x, turn = inputs(33)
    library.opcheck(rotary._rotate, (x, turn.cos, turn.sin))
