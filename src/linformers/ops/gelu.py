"""GELU that is limited by memory bandwidth, not by arithmetic."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .compiling import is_exporting

# The odd polynomial g with Φ(x) ≈ 1 / (1 + 2^g(x)), from x¹³ down to x, fitted by weighted least squares.
COEFFICIENTS = (-9.4183462e-10, 1.0314589e-07, -4.2938780e-06, 7.1779071e-05, 6.1993633e-04, -0.10619017, -2.3012099)
LOWEST = -5.5  # the polynomial is valid down to here, where x Φ(x) is -1e-7


def gelu(x: Tensor) -> Tensor:
    r"""$x\,\Phi(x)$; `FastGelu` in compiled bfloat16 code on a GPU, where erf would be the bottleneck."""
    if torch.compiler.is_compiling() and not is_exporting() and x.is_cuda and x.dtype == torch.bfloat16:
        return FastGelu.apply(x)
    return functional.gelu(x)


class FastGelu(torch.autograd.Function):
    r"""$x\,\Phi(x)$ and its derivative $\Phi(x) + x\,\varphi(x)$ in few instructions, for a compiler to fuse.

    The relative error of $\Phi(x)$ is at most 2.5e-4, a tenth of the precision of bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float().clamp(min=LOWEST)
        return (wide * normal_cdf(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float().clamp(min=LOWEST)
        density = torch.exp2(wide * wide * (-0.5 / math.log(2))) * (2 * math.pi) ** -0.5
        return (gradient.float() * (normal_cdf(wide) + wide * density)).to(x.dtype)


def normal_cdf(x: Tensor) -> Tensor:
    r"""$\Phi(x)$ for x of at least `LOWEST`, to a relative error of 2.5e-4."""
    x = x.clamp(max=-LOWEST)
    square = x * x
    g = square * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        g = g * square + coefficient
    root = torch.rsqrt(1 + torch.exp2(g * x))  # its square is the reciprocal, without a division
    return root * root
