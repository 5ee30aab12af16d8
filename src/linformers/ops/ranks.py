"""Positions as ranks: the position of a token is its rank among the real tokens of its row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ranks(NamedTuple):
    """Which tokens of a batch are real, and how to sort each row by rank with padding last.

    Attributes:
        mask: True for real tokens, (b, n).
        lengths: Number of real tokens in each row, (b,).
        places: The sorted position of each token, (b, n); `None` if the batch is already sorted.
        order: The token at each sorted position, (b, n): the inverse of `places`.
    """

    mask: Tensor
    lengths: Tensor
    places: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor) -> Ranks:
        mask = mask.bool()
        lengths = mask.sum(1)
        # A permutation of each row without a sort: real tokens by rank, then padding.
        places = torch.where(mask, mask.cumsum(1) - 1, lengths[:, None] + (~mask).cumsum(1) - 1)
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(places)
        return cls(mask, lengths, places, torch.zeros_like(places).scatter(1, places, positions))

    def sorted(self) -> Ranks:
        """The ranks of the same batch after `move_to_front`."""
        positions = torch.arange(self.mask.shape[1], device=self.mask.device)
        return Ranks(positions < self.lengths[:, None], self.lengths)


def move_to_front(tokens: Tensor, ranks: Ranks) -> Tensor:
    """Sort each row of `tokens`, (b, n) or (b, n, d), by rank: real tokens first, in their order."""
    return tokens if ranks.order is None else _take(tokens, ranks.order)


def move_back(tokens: Tensor, ranks: Ranks) -> Tensor:
    """Undo `move_to_front`."""
    return tokens if ranks.places is None else _take(tokens, ranks.places)


def zero_padding(tokens: Tensor, ranks: Ranks | None) -> Tensor:
    """Set `tokens` (b, n, d) to 0 at padding: by `where`, not by a product, since 0 · NaN is NaN."""
    return tokens if ranks is None else torch.where(ranks.mask[..., None], tokens, 0)


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    if tokens.dim() == 3:
        index = index[..., None].expand(-1, -1, tokens.shape[-1])
    return tokens.gather(1, index.to(tokens.device))  # which may differ if layers are on several devices
