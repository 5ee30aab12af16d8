"""Rotary positions (Su et al., 2021) with transformers' layout: channel j turns with channel j + d/2."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from . import dispatch
from .compiling import is_exporting
from .launch import ceil_div, copy_back, next_power_of_2, upcast_if_interpreted

ROWS, WARPS = 32, 4  # tokens of a program


class Rotation(NamedTuple):
    """How to rotate tokens; must equal `reference.rotate`."""

    cos: Tensor  # (..., n, d_head / 2), at least float32
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, theta: float | None, dtype: torch.dtype = torch.float32) -> Rotation:
        """Of tokens at `positions` (..., n), in at least float32.

        Args:
            positions: p; integers for values.
            head_dim: d_head.
            theta: for queries and keys, which turn by p θ^(-2j/d_head). `None`: values, by 2π p j / (d_head / 2).
            dtype: of the tokens.
        """
        dtype, half = torch.promote_types(dtype, torch.float32), head_dim // 2
        channels = torch.arange(half, device=positions.device)
        if theta is None:  # whole turns are dropped while the numbers are integers
            angles = (positions[..., None] * channels % half).to(dtype) * (2 * math.pi / half)
        else:
            angles = positions[..., None] * theta ** -(channels.to(dtype) / half)
        return cls(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` (b, h, n, d_head)."""
        if x.device.type in dispatch.DEVICES and fits_kernel(x, self.cos):
            return _rotate(x, self.cos, self.sin).transpose(1, 2)
        first, second = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin)

    def at(self, places: Tensor) -> Rotation:
        """For tokens whose position is in `places` (b, n)."""
        return Rotation(self.cos[places][:, None], self.sin[places][:, None])


class Rotations(NamedTuple):
    """How to rotate the tokens of a model."""

    keys: Rotation  # and queries
    values: Rotation  # in a layer without a window

    def at(self, places: Tensor) -> Rotations:
        """For tokens whose position is in `places` (b, n)."""
        return Rotations(self.keys.at(places), self.values.at(places))


def fits_kernel(x: Tensor, cos: Tensor) -> bool:
    """Whether the kernel can rotate `x` (b, h, n, d_head): all heads must turn alike."""
    turn_alike = cos.dim() == 2 or cos.shape[1] == 1
    return turn_alike and not is_exporting() and dispatch.unsupported_reason(x) is None


@library.custom_op("linformers::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` (b, h, n, d_head) rotated, as (b, n, h, d_head)."""
    from .kernels.rotary import rotate as kernel

    (b, h, n, d), cos, sin = x.shape, cos.contiguous(), sin.contiguous()
    output = x.new_empty(b, n, h, d)
    x, out = upcast_if_interpreted(x), upcast_if_interpreted(output)
    table_stride = n * d // 2 if cos.dim() > 2 and len(cos) > 1 else 0  # of a row of the batch
    sizes = {"HALF": d // 2, "ROWS": ROWS, "COLUMNS": next_power_of_2(d // 2)}
    if x.numel():
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            programs = b * ceil_div(n, ROWS)
            kernel[programs,](x, cos, sin, out, h, n, *x.stride(), table_stride, **sizes, num_warps=WARPS)
    copy_back(out, output)
    return output


@_rotate.register_fake
def _(x, cos, sin):  # type: ignore[no-untyped-def]
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    back = Rotation(*ctx.saved_tensors).inverse()
    return _rotate(gradient.transpose(1, 2), *back).transpose(1, 2), None, None


_rotate.register_autograd(_differentiate, setup_context=_save)
