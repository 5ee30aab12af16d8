"""Rotary positions (Su et al., 2021) with transformers' layout: channel j turns with channel j + d/2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """How to rotate queries or keys; must equal `reference.rotate`."""

    cos: Tensor  # (..., n, d_head)
    sin: Tensor  # (..., n, d_head), negative in the first half of the channels

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Rotation:
        """For `positions` of shape (..., n), in at least float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
        angles = positions[..., None] * theta**-exponents  # (..., n, d_head / 2)
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
