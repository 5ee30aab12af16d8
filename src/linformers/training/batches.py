"""Examples as token ids, their order in training, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..checks import check_size, is_number, refuse_length
from ..errors import UserError
from .tasks import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class EncodedExamples(Dataset):
    """Token ids of all rows in one array, without padding; row i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: np.ndarray  # uint32
    offsets: np.ndarray  # int64
    labels: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        ids = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return {"input_ids": ids, "label": int(self.labels[index])}

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def longest_first(self) -> EncodedExamples:
        """The same rows by falling length: batches hardly need padding, and what runs out of memory does so at once."""
        order = np.argsort(-self.lengths, kind="stable")
        tokens = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in order]
        return EncodedExamples(
            np.concatenate(tokens) if tokens else self.tokens,
            np.concatenate([[0], np.cumsum(self.lengths[order])]),
            self.labels[order],
        )


def encode(examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int) -> EncodedExamples:
    """Texts as token ids, at most `max_length` of them; of a pair, the longer text is cut first."""
    check_size("max_length", max_length)
    special = tokenizer.num_special_tokens_to_add(pair=examples.pairs is not None)
    if max_length <= special:
        raise UserError(f"max_length={max_length} leaves no room for text beside {special} special tokens")
    tokens, lengths = [], [0]
    for start in range(0, len(examples), 1000):
        rows = slice(start, start + 1000)
        ids = tokenizer(
            examples.texts[rows],
            None if examples.pairs is None else examples.pairs[rows],
            truncation="longest_first",
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        tokens.append(np.fromiter(chain.from_iterable(ids), dtype=np.uint32))
        lengths += map(len, ids)
    return EncodedExamples(np.concatenate(tokens), np.cumsum(lengths, dtype=np.int64), examples.labels)


def collate(
    rows: Sequence[Mapping[str, Any]], pad_token_id: int, max_length: int, multiple_of: int = 8
) -> dict[str, Tensor]:
    """A batch as wide as its longest row, rounded up to a multiple of `multiple_of` where `max_length` allows it."""
    lengths = [len(row["input_ids"]) for row in rows]
    if max(lengths) > max_length:
        refuse_length("a row", max(lengths), max_length, f"encode it with max_length={max_length}")
    width = min(-(-max(lengths) // multiple_of) * multiple_of, max_length)
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    for row, own in zip(rows, input_ids, strict=True):
        own[: len(row["input_ids"])] = row["input_ids"]
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


class EpochOrder(Dataset):
    """Rows in a new order each epoch; item g is a function of the seed and g alone, so a run resumes at any g.

    The rows of a batch are of similar lengths, so that little of it is padding: each pool of some batches is sorted by
    length, then its batches are put in a random order.

    Args:
        examples: The R rows; items g with the same g // R are an epoch and hold each row once.
        seed: Of the orders.
        total_rows: Rows that are drawn in all.
        batch_size: Rows of a batch, the first of which is row 0.
    """

    largest_pool = 16  # batches; and no more than a quarter of an epoch, so that the same rows seldom meet again

    def __init__(self, examples: EncodedExamples, seed: int, total_rows: int, batch_size: int = 1) -> None:
        check_size("total_rows", total_rows)
        check_size("batch_size", batch_size)
        if not is_number(seed, int) or not 0 <= seed < 2**64:
            raise UserError(f"seed={seed!r} must be an integer, at least 0 and below 2**64")
        if not len(examples):
            raise UserError("examples has no rows to draw from")
        self.examples, self.seed, self.total_rows, self.batch_size = examples, seed, total_rows, batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.total_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.total_rows:
            raise IndexError(f"row {index} of {self.total_rows}")
        epoch, place = divmod(index, len(self.examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self.examples[self._order[place]]

    def _order_of(self, epoch: int) -> np.ndarray:
        generator = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))

        def shuffled(count: int) -> np.ndarray:
            # Raw words stay the same from one version of numpy to the next, unlike what Generator makes of them.
            return np.argsort(generator.random_raw(count), kind="stable")

        rows = len(self.examples)
        order, lengths = shuffled(rows), self.examples.lengths
        first = -epoch * rows % self.batch_size  # before it, the rest of a batch that the epoch before has begun
        batches = max(0, rows - first) // self.batch_size
        pool = max(1, min(self.largest_pool, batches // 4))
        for start in range(0, batches, pool):
            count = min(pool, batches - start)
            places = slice(first + start * self.batch_size, first + (start + count) * self.batch_size)
            by_length = order[places][np.argsort(lengths[order[places]], kind="stable")]
            order[places] = by_length.reshape(count, -1)[shuffled(count)].ravel()
        return order
