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
    def of(cls, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Rotation:
        """Queries and keys at `positions` (..., n), in at least float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
        return cls.by(positions[..., None] * theta**-exponents)

    @classmethod
    def of_values(cls, positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotation:
        """Values at integer `positions` (..., n): channel j turns by j/half of a circle per token."""
        dtype, half = torch.promote_types(dtype, torch.float32), head_dim // 2
        turns = positions[..., None] * torch.arange(half, device=positions.device) % half  # exact at any length
        return cls.by(turns.to(dtype) * (2 * math.pi / half))

    @classmethod
    def by(cls, angles: Tensor) -> Rotation:
        """By `angles` (..., n, d_head / 2)."""
        cos, sin = angles.cos(), angles.sin()
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

    @classmethod
    def of(cls, n: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Rotations:
        """For n tokens in order."""
        positions = torch.arange(n, device=device)
        return cls(Rotation.of(positions, head_dim, theta, dtype), Rotation.of_values(positions, head_dim, dtype))

    def at(self, places: Tensor) -> Rotations:
        """For tokens whose position is in `places` (b, n)."""
        return Rotations(self.keys.at(places), self.values.at(places))
