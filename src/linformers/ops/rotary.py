"""Rotary positions (Su et al., 2021) with transformers' layout: channel j turns with channel j + d/2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """How to rotate tokens; must equal `reference.rotate`."""

    cos: Tensor  # (..., n, d_head)
    sin: Tensor  # (..., n, d_head), negative in the first half of the channels

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
        cos, sin = angles.cos(), angles.sin()  # (..., n, d_head / 2)
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` (b, h, n, d_head)."""
        first, second = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([second, first], -1) * self.sin.to(x.dtype)

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
