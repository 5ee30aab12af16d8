"""GELU at the speed of memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .compiling import is_exporting

# An odd polynomial g with Φ(x) = sigmoid(g(x)), from its highest power down: 13, 11, ..., 1.
COEFFICIENTS = (6.5283001e-10, -7.1495279e-08, 2.9762894e-06, -4.9753461e-05, -4.2970712e-04, 0.073605414, 1.5950771)


def gelu(x: Tensor) -> Tensor:
    r"""$x\,\Phi(x)$.

    Compiled for a GPU in bfloat16, where erf would take longer than reading and writing, by `fast_gelu`.
    """
    if torch.compiler.is_compiling() and not is_exporting() and x.is_cuda and x.dtype == torch.bfloat16:
        return fast_gelu(x)
    return functional.gelu(x)


def fast_gelu(x: Tensor) -> Tensor:
    r"""$x\,\Phi(x)$ to a relative error of 2.5e-4, a tenth of what bfloat16 can tell apart; its slope to 1e-4."""
    wide = x.float()
    near = wide.clamp(-5.5, 5.5)
    square = near * near
    g = torch.zeros_like(near)
    for coefficient in COEFFICIENTS:
        g = g * square + coefficient
    return (wide * torch.sigmoid(g * near)).to(x.dtype)
