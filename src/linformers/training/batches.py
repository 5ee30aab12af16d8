"""From texts to batches: tokenized in a thread, long ones in overlapping parts, sorted by length, batched by tokens.

`embed`, `predict` and `evaluate` share this path. What it yields depends on the texts and the settings alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .rows import special_tokens

T = TypeVar("T")
OVERLAP = 8  # neighboring parts of a long text share at least 1/8 of what the model reads
ENCODED_AT_ONCE = 2**19  # characters: a token takes hundreds of bytes until it is a number
CPU_TOKENS, GPU_TOKENS = 2048, 65536  # of a batch
# A block of texts is tokenized, sorted and saved together: seconds of work, whatever the size of a batch.
CPU_BLOCK, GPU_BLOCK = 2**17, 2**24  # characters
TEXTS_PER_BLOCK = 16384
WIDTH = 8  # the width of a batch is a multiple of it


class Text(NamedTuple):
    """A text to read, or a pair of texts."""

    text: str
    pair: str | None = None


class Part(NamedTuple):
    """Tokens that the model reads at once: a text, or one of the overlapping parts of a long one.

    Every token of a text is the own token of one part: the one in which it is farther from the edge.
    """

    text: int  # number within the block
    ids: np.ndarray  # special tokens and prompt, text, special tokens
    head: int  # the number of special tokens and tokens of the prompt before the text
    first: int  # the number of the first token of the text
    own: tuple[int, int]  # the numbers of the own tokens


class Tokens(NamedTuple):
    """The tokens of a text."""

    ids: np.ndarray
    head: np.ndarray  # special tokens and the tokens of the prompt
    tail: np.ndarray
    offsets: np.ndarray | None  # where each token begins and ends in the text, (tokens, 2)
    cut: bool = False  # whether a pair was too long


@dataclass(frozen=True)
class Block:
    """Texts with their tokens and parts."""

    number: int
    start: int  # the number of texts before it
    texts: list[Any]
    tokens: list[Tokens]
    parts: list[Part]

    def parts_of_texts(self) -> list[int]:
        """The number of parts of each text; 0 if it has no tokens."""
        return np.bincount([part.text for part in self.parts], minlength=len(self.texts)).tolist()


class TextEncoder:
    """Tokens and parts of texts. Each call of the tokenizer uses all cores and leaves Python free."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, prompt: str = "", with_offsets: bool = False
    ) -> None:
        backend: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        self.backend, self.max_length, self.prompt, self.with_offsets = backend, max_length, prompt, with_offsets
        self.before, self.after = map(np.array, special_tokens(tokenizer))
        self.prompt_tokens = len(backend.encode(prompt, add_special_tokens=False).ids)
        self.room = max_length - len(self.before) - len(self.after) - self.prompt_tokens
        special = len(self.before) + len(self.after) + self.prompt_tokens
        if self.room < 1:
            raise UserError(f"max_length={max_length} leaves no room for text besides {special} special tokens")

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        """The tokens of each text; none if it is blank."""
        if any(text.pair is not None for text in texts):
            return self._encode_pairs(texts)
        encode = self.backend.encode_batch if self.with_offsets else self.backend.encode_batch_fast
        found, prompt = [], self.prompt_tokens
        for some in _pieces([text.text for text in texts], ENCODED_AT_ONCE):
            blank = [not text.strip() for text in some]
            for is_blank, encoding in zip(
                blank, encode([self.prompt + text for text in some], add_special_tokens=False), strict=True
            ):
                ids = np.array([] if is_blank else encoding.ids, np.int64)
                offsets = np.array(encoding.offsets[prompt:]) - len(self.prompt) if self.with_offsets else None
                head = np.concatenate([self.before, ids[:prompt]])
                found.append(Tokens(ids[prompt:], head, self.after, offsets))
        return found

    def _encode_pairs(self, pairs: Sequence[Text]) -> list[Tokens]:
        """The longer text of a pair is cut first, as in training."""
        backend: Any = Tokenizer.from_str(self.backend.to_str())
        backend.enable_truncation(self.max_length, strategy="longest_first")
        none = np.array([], np.int64)
        return [
            Tokens(np.array(encoding.ids), none, none, None, bool(encoding.overflowing))
            for encoding in backend.encode_batch([(text, pair or "") for text, pair in pairs])
        ]

    def parts(self, number: int, tokens: Tokens) -> Iterator[Part]:
        """What the model reads of a text."""
        room = self.max_length - len(tokens.head) - len(tokens.tail)
        for start, stop, own in spans(len(tokens.ids), room):
            ids = np.concatenate([tokens.head, tokens.ids[start:stop], tokens.tail])
            yield Part(number, ids, len(tokens.head), start, own)

    def block(self, number: int, start: int, texts: list[Any]) -> Block:
        tokens = self.encode([Text(text.text, getattr(text, "pair", None)) for text in texts])
        return Block(number, start, texts, tokens, [p for i, own in enumerate(tokens) for p in self.parts(i, own)])

    def read(self, texts: Iterable[Any], wanted: Callable[[int, list[Any]], bool] = lambda *_: True) -> Iterator[Block]:
        """The blocks of texts, or of rows with a `text`, tokenized in a thread while the model works on earlier ones.

        Blocks that are not `wanted`, by their number and texts, have no tokens.
        """

        def tokenized() -> Iterator[Block]:
            start, characters = 0, GPU_BLOCK if torch.cuda.is_available() else CPU_BLOCK
            for number, some in enumerate(_pieces(texts, characters, TEXTS_PER_BLOCK)):
                yield self.block(number, start, some) if wanted(number, some) else Block(number, start, some, [], [])
                start += len(some)

        return ahead(tokenized())


def spans(count: int, room: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Where parts of at most `room` of `count` tokens start and stop, and which tokens are their own; of one size."""
    overlap = room // OVERLAP
    if not count:
        return
    if count <= room:
        yield 0, count, (0, count)
        return
    parts = math.ceil((count - overlap) / (room - overlap))
    size = math.ceil((count + (parts - 1) * overlap) / parts)
    starts = [part * (count - size) // (parts - 1) for part in range(parts)]
    cuts = [0, *((start + starts[i] + size) // 2 for i, start in enumerate(starts[1:])), count]
    for i, start in enumerate(starts):
        yield start, start + size, (cuts[i], cuts[i + 1])


def batches_of(parts: Sequence[Part], batch_tokens: int) -> Iterator[list[Part]]:
    """Parts sorted by length, the longest first, in batches of at most `batch_tokens` tokens, or of one part."""
    batch: list[Part] = []
    for part in sorted(parts, key=lambda part: -len(part.ids)):  # stable
        if batch and (len(batch) + 1) * width_of(batch) > batch_tokens:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def width_of(batch: Sequence[Part]) -> int:
    """The width of a batch whose first part is the longest."""
    return -(-len(batch[0].ids) // WIDTH) * WIDTH


def inputs_of(batch: Sequence[Part], pad_token_id: int, max_length: int, device: Any) -> dict[str, Tensor]:
    """The arguments of a model; without a mask if no row has padding."""
    lengths = np.array([len(part.ids) for part in batch])
    width = min(width_of(batch), max_length)
    on_gpu = torch.device(device).type == "cuda"
    if not on_gpu and (lengths == lengths[0]).all():
        width = int(lengths[0])
    ids = np.full((len(batch), width), pad_token_id, np.int64)
    for row, part in zip(ids, batch, strict=True):
        row[: len(part.ids)] = part.ids
    inputs = {"input_ids": torch.from_numpy(ids)}
    if (lengths < width).any():
        inputs["attention_mask"] = torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64))
    return {name: upload(tensor, device) for name, tensor in inputs.items()}


def upload(tensor: Tensor, device: Any) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def default_tokens() -> int:
    return GPU_TOKENS if torch.cuda.is_available() else CPU_TOKENS


def ahead(items: Iterator[T], count: int = 2) -> Iterator[T]:
    """The same items, of which a thread prepares the next ones."""
    end: Any = object()
    thread = ThreadPoolExecutor(1)
    try:
        pending: deque[Future[T]] = deque(thread.submit(next, items, end) for _ in range(count))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


def _pieces(texts: Iterable[Any], most: int, texts_at_once: int = 2**30) -> Iterator[list[Any]]:
    """Lists of texts of at least `most` characters, or of `texts_at_once` texts; the last may be shorter."""
    piece, size = [], 0
    for text in texts:
        piece.append(text)
        size += len(text if isinstance(text, str) else text.text)
        if size >= most or len(piece) >= texts_at_once:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
