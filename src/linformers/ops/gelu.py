"""GELU at the speed of memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .compiling import is_exporting

# Of an odd polynomial g with Φ(x) = 1 / (1 + 2^g(x)): from x¹³ down to x. Found by weighted least squares.
COEFFICIENTS = (-9.4183462e-10, 1.0314589e-07, -4.2938780e-06, 7.1779071e-05, 6.1993633e-04, -0.10619017, -2.3012099)
LOWEST = -5.5  # so far the polynomial reaches, and so far down x Φ(x) matters: here it is -1e-7


def gelu(x: Tensor) -> Tensor:
    r"""$x\,\Phi(x)$, by `FastGelu` where erf would take longer than reading and writing."""
    if torch.compiler.is_compiling() and not is_exporting() and x.is_cuda and x.dtype == torch.bfloat16:
        return FastGelu.apply(x)
    return functional.gelu(x)


class FastGelu(torch.autograd.Function):
    r"""$x\,\Phi(x)$ and its slope $\Phi(x) + x\,\varphi(x)$ in few instructions, for a compiler to fuse.

    Both are right to 2.5e-4 of $\Phi(x)$, a tenth of what bfloat16 can tell apart.
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
    r"""$\Phi(x)$ to a relative error of 2.5e-4, for no x below `LOWEST`."""
    x = x.clamp(max=-LOWEST)
    square = x * x
    g = square * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        g = g * square + coefficient
    root = torch.rsqrt(1 + torch.exp2(g * x))  # squared it is the reciprocal, which would take a division
    return root * root
