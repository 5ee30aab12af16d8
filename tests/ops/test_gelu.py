"""The GELU of compiled code on a GPU against torch's."""

import torch
from torch.nn import functional

from linformers.ops import gelu
from linformers.ops.gelu import FastGelu


def derive(function, x):
    x = x.clone().requires_grad_()
    output = function(x)
    return output.detach().double(), torch.autograd.grad(output.sum(), x)[0].double()


def test_error():
    x = torch.linspace(-12, 12, 100_001)
    (output, slope), (expected, expected_slope) = derive(FastGelu.apply, x), derive(functional.gelu, x.double())
    torch.testing.assert_close(output[x > -5.5], expected[x > -5.5], rtol=2.5e-4, atol=1e-9)
    torch.testing.assert_close(output, expected, rtol=2.5e-4, atol=3e-7)
    torch.testing.assert_close(slope, expected_slope, rtol=2.5e-4, atol=1e-4)


def test_rounding():
    """In bfloat16 the error is torch's rounding error, plus 2.5e-4, which can move a number across a tie."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = x[(x.abs() > 1e-30) & (x.abs() < 5)]
    (output, slope), (expected, expected_slope) = derive(FastGelu.apply, x), derive(functional.gelu, x.double())
    error, torch_error = (output - expected).abs(), (functional.gelu(x).double() - expected).abs()
    assert (error <= torch_error + 5e-4 * expected.abs()).all()
    torch.testing.assert_close(slope, expected_slope, rtol=2**-8, atol=1e-4)


def test_infinities_and_nan():
    x = torch.tensor([float("inf"), float("nan"), -1e30, float("-inf"), 1e30])
    output, slope = derive(FastGelu.apply, x)
    torch.testing.assert_close(output, x.clamp(min=0).double(), rtol=0, atol=2e-7, equal_nan=True)
    assert slope[1].isnan()
    assert (slope[2:4].abs() < 1e-6).all()
    assert slope[4] == 1


def test_cpus_use_torchs(monkeypatch):
    x = torch.randn(100, dtype=torch.bfloat16)
    monkeypatch.setattr(FastGelu, "apply", lambda x: 1 / 0)
    assert torch.equal(gelu.gelu(x), functional.gelu(x))
    assert torch.equal(torch.compile(gelu.gelu, backend="eager")(x), functional.gelu(x))
