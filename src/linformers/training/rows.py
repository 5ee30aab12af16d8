"""Rows of training data: masked rows of a corpus, and labeled texts. Row g of a run depends on the seed and g alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .. import LinformerConfig
from ..checks import check_model
from ..errors import UserError
from .corpus import TokenStream, open_tokenizer, vocabulary_size
from .prepare import MODEL_INPUTS

IGNORED = -100  # the label of tokens that are not predicted
# Rows that share a random generator: drawing for many rows at once is several times as fast.
BLOCK = 16
MAX_GROUP = 16  # batches of an epoch that are sorted by length together


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know about a tokenizer."""

    size: int
    mask: int
    pad: int
    special: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
        return cls(size, tokenizer.mask_token_id, tokenizer.pad_token_id, tuple(tokenizer.all_special_ids))


@dataclass(eq=False)
class MaskedRows(Dataset):
    """Rows of a corpus with a share of tokens to predict: 80% masked, 10% replaced, 10% kept (Devlin et al., 2019).

    An epoch is a random permutation of all rows, cut from a random offset of the corpus. There is no state, so a
    resumed run, or one with another number of processes, sees the same rows.
    """

    stream: TokenStream
    vocabulary: Vocabulary
    rows: int  # the number of rows
    length: int  # n, the tokens in a row
    seed: int
    mask_share: float = 0.15  # of tokens to predict
    short_rows: float = 0.0  # share of rows that are padded from a random position on
    shuffle: bool = True
    final_mask_share: float | None = None  # of the last row, if the share changes linearly from row to row

    def __post_init__(self) -> None:
        # Shuffled rows start at a random token of the first row.
        self.rows_in_epoch = len(self.stream) // self.length - self.shuffle
        if self.rows_in_epoch < 1:
            split, needed = ("training", 2) if self.shuffle else ("validation", 1)
            needed *= self.length
            raise UserError(f"the {split} set has {len(self.stream)} tokens, but rows of {self.length} need {needed}")
        self.ordinary = np.setdiff1d(np.arange(self.vocabulary.size), self.vocabulary.special)
        self._epoch, self._start, self._order = -1, 0, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """A batch of rows, each of shape (b, n); `DataLoader` calls this for whole batches."""
        tokens = np.stack([self._tokens(number) for number in numbers])  # (b, n)
        blocks = {block: self._draw(block) for block in {number // BLOCK for number in numbers}}
        draws = [blocks[number // BLOCK] for number in numbers]
        order, fate, words, ends = (
            np.stack([draw[i][number % BLOCK] for draw, number in zip(draws, numbers, strict=True)]) for i in range(4)
        )

        real = np.arange(self.length) < ends[:, None]
        # Each position gets a random rank; positions that cannot be predicted come last.
        eligible = real & ~np.isin(tokens, self.vocabulary.special)
        ranks = np.where(eligible, order, 2.0).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        count = np.maximum(1, (self._mask_share(np.array(numbers)) * ends).astype(np.int64))
        chosen = eligible & (ranks < count[:, None])

        labels = np.where(chosen, tokens, IGNORED)
        inputs = np.where(chosen & (fate < 0.8), self.vocabulary.mask, tokens)
        inputs = np.where(chosen & (fate >= 0.9), self.ordinary[words], inputs)
        inputs = np.where(real, inputs, self.vocabulary.pad)
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.short_rows:
            batch["attention_mask"] = torch.from_numpy(real.astype(np.int64))
        return batch

    def _mask_share(self, numbers: np.ndarray) -> np.ndarray:
        final = self.mask_share if self.final_mask_share is None else self.final_mask_share
        return self.mask_share + (final - self.mask_share) * numbers / max(1, self.rows - 1)

    def _tokens(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.rows_in_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.arange(self.rows_in_epoch)
            if self.shuffle:
                random = self._generator(1, epoch)
                self._start, self._order = int(random.integers(self.length)), random.permutation(self.rows_in_epoch)
        return self.stream.read(self._start + int(self._order[place]) * self.length, self.length).astype(np.int64)

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The random numbers of a block: ranks of positions, their fates, replacement tokens, lengths of rows."""
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
        return {**self.__dict__, "_epoch": -1, "_order": None}  # workers recompute the order instead of receiving it


def already_batched(batch: Any) -> Any:
    """The collator of `MaskedRows`, which returns batches."""
    return batch


class Example(NamedTuple):
    """A text, or a pair of texts, and its label."""

    text: str
    pair: str | None
    label: int | float | tuple[int, ...]  # a class, a number, or several classes


def load_tokenizer(folder: Path, max_length: int = 0) -> PreTrainedTokenizerBase:
    """A model's tokenizer; `max_length`, or all that the model takes, becomes its `model_max_length`."""
    check_model("model", folder)
    tokenizer = open_tokenizer(str(folder), f"model={str(folder)!r}", model_input_names=MODEL_INPUTS)
    config = LinformerConfig.from_pretrained(folder)
    if (ids := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UserError(
            f"model={str(folder)!r} has vocab_size={config.vocab_size}, but the ids of its tokenizer reach {ids - 1}"
        )
    tokenizer.model_max_length = max_length or min(config.max_position_embeddings, tokenizer.model_max_length)
    return tokenizer


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    letter = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = letter["input_ids"], letter["special_tokens_mask"]
    return ids[: is_special.index(0)], ids[len(ids) - is_special[::-1].index(0) :]


def encode(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[dict[str, Any]]:
    """Rows with at most `max_length` `input_ids`, `label`, and `cut`: whether the text was longer.

    The longer text of a pair is truncated first.
    """
    rows: list[dict[str, Any]] = []
    for start in range(0, len(examples), 1000):
        texts, pairs, labels = zip(*examples[start : start + 1000], strict=True)
        second = None if pairs[0] is None else list(pairs)
        if max_length <= (special := tokenizer.num_special_tokens_to_add(pair=second is not None)):
            raise UserError(f"max_length={max_length} leaves no room for text besides {special} special tokens")
        encoded = tokenizer(list(texts), second, truncation="longest_first", max_length=max_length)
        for row, own, label in zip(encoded["input_ids"], encoded.encodings, labels, strict=True):
            rows.append({"input_ids": np.array(row), "label": label, "cut": bool(own.overflowing)})
    return rows


def longest_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows sorted by length: batches need little padding, and running out of memory happens at once."""
    return sorted(rows, key=lambda row: -len(row["input_ids"]))


def collate(
    rows: Sequence[Mapping[str, Any]],
    pad_token_id: int,
    max_length: int,
    targets: Callable[[list[Any]], np.ndarray] = np.array,
) -> dict[str, Tensor]:
    """A batch as wide as its longest row, rounded up to a multiple of 8, at most `max_length`.

    `targets` turns labels into what the model takes.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    width = min(-(-max(lengths) // 8) * 8, max_length)
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    for row, padded in zip(rows, input_ids, strict=True):
        padded[: len(row["input_ids"])] = row["input_ids"]
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
        "labels": torch.from_numpy(targets([row["label"] for row in rows])),
    }


@dataclass(eq=False)
class EpochOrder(Dataset):
    """Rows in a new order each epoch; item g depends on the seed and g alone, so that a run can resume at any g.

    The rows of a batch have similar lengths, to save padding: groups of batches are sorted by length, and the batches
    of a group are shuffled. A group has at most a quarter of an epoch, so that the same rows seldom meet again.
    """

    rows: Sequence[dict[str, Any]]  # R rows; an epoch, the items g with the same g // R, contains each row once
    seed: int  # below 2**64
    total_rows: int  # the number of items
    batch_size: int = 1

    def __post_init__(self) -> None:
        self.lengths = np.array([len(row["input_ids"]) for row in self.rows])
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.total_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.total_rows:
            raise IndexError(f"row {index} of {self.total_rows}")
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self.rows[self._order[place]]

    def _order_of(self, epoch: int) -> np.ndarray:
        generator = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))

        def shuffled(count: int) -> np.ndarray:
            # Unlike Generator's methods, raw words do not change between versions of numpy.
            return np.argsort(generator.random_raw(count), kind="stable")

        rows, size = len(self.rows), self.batch_size
        order = shuffled(rows)
        first = -epoch * rows % size  # rows before it complete a batch of the previous epoch
        batches = max(0, rows - first) // size
        group = max(1, min(MAX_GROUP, batches // 4))
        for start in range(0, batches, group):
            count = min(group, batches - start)
            places = slice(first + start * size, first + (start + count) * size)
            by_length = order[places][np.argsort(self.lengths[order[places]], kind="stable")]
            order[places] = by_length.reshape(count, -1)[shuffled(count)].ravel()
        return order
