"""Masked-language modelling (Devlin et al., 2019): row g of a training run is a pure function of its seed and g."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UserError
from ..heads import IGNORED
from .corpus import TokenStream

# Rows whose random numbers come from one generator: drawing for many rows at once is several times as fast.
BLOCK = 16


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know of a tokenizer."""

    size: int
    mask: int
    pad: int
    special: tuple[int, ...]

    @property
    def ordinary(self) -> np.ndarray:
        """All tokens that may stand in a text."""
        return np.setdiff1d(np.arange(self.size), self.special)


class MaskedRows(Dataset):
    """Rows of `length` tokens of a corpus with 15% of them to be predicted: 80% masked, 10% replaced, 10% kept.

    An epoch is a random permutation of all rows, cut out of the corpus from a random token on. No state is kept from
    row to row, so a run that is resumed, or spread over more processes, sees the rows that it would have seen.

    Args:
        stream: the tokens of the corpus.
        vocabulary: the special tokens, and those that may replace others.
        rows: how many rows there are.
        length: tokens in a row.
        seed: which run this is.
        mask_share: the share of a row that is to be predicted.
        short_rows: the share of rows that end at a random length, their rest being padding.
        shuffle: whether rows come in random order; otherwise in that of the corpus.
    """

    def __init__(
        self,
        stream: TokenStream,
        vocabulary: Vocabulary,
        *,
        rows: int,
        length: int,
        seed: int,
        mask_share: float = 0.15,
        short_rows: float = 0.0,
        shuffle: bool = True,
    ) -> None:
        self.stream, self.vocabulary = stream, vocabulary
        self.rows, self.length, self.seed = rows, length, seed
        self.mask_share, self.short_rows, self.shuffle = mask_share, short_rows, shuffle
        # Shuffled rows leave room for starting anywhere in the first row.
        self.rows_in_epoch = (len(stream) - (length if shuffle else 0)) // length
        if self.rows_in_epoch < 1:
            needed = 2 * length if shuffle else length
            raise UserError(f"the corpus has {len(stream)} tokens, but rows of {length} need at least {needed}")
        self.ordinary = vocabulary.ordinary
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([number]).items()}

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The batch of these rows; `DataLoader` asks for whole batches where it can."""
        tokens = np.stack([self._tokens(number) for number in numbers])  # (b, n)
        blocks = {block: self._draw(block) for block in {number // BLOCK for number in numbers}}
        draws = [blocks[number // BLOCK] for number in numbers]
        order, fate, words, ends = (
            np.stack([draw[i][number % BLOCK] for draw, number in zip(draws, numbers, strict=True)]) for i in range(4)
        )

        positions = np.arange(self.length)
        real = positions < ends[:, None]
        # Positions by random rank; those that may not be predicted come last.
        eligible = real & ~np.isin(tokens, self.vocabulary.special)
        ranks = np.where(eligible, order, 2.0).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        wanted = np.maximum(1, (self.mask_share * ends).astype(np.int64))
        chosen = eligible & (ranks < wanted[:, None])

        labels = np.where(chosen, tokens, IGNORED)
        inputs = np.where(chosen & (fate < 0.8), self.vocabulary.mask, tokens)
        inputs = np.where(chosen & (fate >= 0.9), self.ordinary[words], inputs)
        inputs = np.where(real, inputs, self.vocabulary.pad)
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.short_rows:
            batch["attention_mask"] = torch.from_numpy(real.astype(np.int64))
        return batch

    def _tokens(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.rows_in_epoch)
        start, order = self._order(epoch)
        return self.stream.read(start + int(order[place]) * self.length, self.length).astype(np.int64)

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Where the first row of an epoch begins, and the order of its rows."""
        if self._epoch is None or self._epoch[0] != epoch:
            if self.shuffle:
                random = self._generator(1, epoch)
                start = int(random.integers(self.length))
                order = random.permutation(self.rows_in_epoch)
            else:
                start, order = 0, np.arange(self.rows_in_epoch)
            self._epoch = (epoch, start, order)
        return self._epoch[1], self._epoch[2]

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The random numbers of a block: of its positions, their fates, the words to replace them, the rows' ends."""
        random, shape = self._generator(2, block), (BLOCK, self.length)
        order = random.random(shape, dtype=np.float32)
        fate = random.random(shape, dtype=np.float32)
        words = random.integers(len(self.ordinary), size=shape, dtype=np.int32)
        is_short = random.random(BLOCK) < self.short_rows
        ends = np.where(is_short, random.integers(1, self.length, size=BLOCK, endpoint=True), self.length)
        return order, fate, words, ends

    def _generator(self, purpose: int, number: int) -> np.random.Generator:
        key = np.array([self.seed, (purpose << 56) | number], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_epoch": None}  # workers draw their own order rather than receive it


def as_it_is(batch: Any) -> Any:
    """The collator of rows that come in batches already."""
    return batch
