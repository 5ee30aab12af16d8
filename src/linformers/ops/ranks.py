"""Positions as ranks: a token's position is its rank among the real tokens of its row, wherever the padding is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ranks(NamedTuple):
    """How to sort each row of a batch by rank, with the real tokens first and the padding last."""

    mask: Tensor  # true at real tokens, (b, n)
    sorted_mask: Tensor  # the same after sorting, (b, n)
    lengths: Tensor  # the number of real tokens of each row, (b,)
    places: Tensor  # the place of each token in the sorted row, (b, n)
    order: Tensor  # the token at each place of the sorted row, (b, n): the inverse of `places`

    @classmethod
    def of(cls, mask: Tensor) -> Ranks:
        mask = mask.bool()
        lengths = mask.sum(1)
        # A permutation of each row, found without sorting: real tokens by rank, then padding.
        places = torch.where(mask, mask.cumsum(1) - 1, lengths[:, None] + (~mask).cumsum(1) - 1)
        positions = torch.arange(mask.shape[1], device=mask.device)
        order = torch.zeros_like(places).scatter(1, places, positions.expand_as(places))
        return cls(mask, positions < lengths[:, None], lengths, places, order)


def reorder(tokens: Tensor, index: Tensor) -> Tensor:
    """`tokens[i, index[i]]` for each row i of `tokens` (b, n, ...): `order` sorts rows by rank, `places` undoes it."""
    index = index.to(tokens.device)  # they differ where layers are spread over several devices
    index = index.view(*index.shape, *[1] * (tokens.dim() - 2))
    return tokens.gather(1, index.expand(-1, -1, *tokens.shape[2:]))


def zero_padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Set `tokens` (..., n, d) to 0 where `mask` (..., n) is false: with `where`, since 0 · NaN is NaN."""
    return tokens if mask is None else torch.where(mask[..., None], tokens, 0)
