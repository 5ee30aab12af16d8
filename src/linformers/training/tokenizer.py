"""A tokenizer, trained or taken, and the encoding of much text with it: in many processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import UserError

# What a Linformer is given. BERT's tokenizers would add types of tokens, which these models are not trained with.
INPUTS = ["input_ids", "attention_mask"]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (Sennrich et al., 2016; Radford et al., 2019) with RoBERTa's special tokens."""
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", mask]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        least = len(alphabet) + len(special)
        raise UserError(f"vocab_size={vocab_size} must be at least {least}: the bytes and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    _aside(lambda: bpe.train_from_iterator(texts, trainer))
    bpe.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=mask,
        model_input_names=INPUTS,
    )


def _aside(work: Callable[[], None]) -> None:
    """Do work in a thread: a library that does not look up from it for a minute must not keep Ctrl-C waiting."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a folder or the hub, with what masked-language modelling on packed text needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, model_input_names=INPUTS)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"tokenizer={name!r} cannot be loaded from a folder or the hub: {reason}") from None
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer={name!r} has no tokenizer.json: only tokenizers of the library tokenizers work")
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:  # BERT's name for what ends a text
        tokenizer.eos_token = tokenizer.sep_token
    for kind in ("pad", "eos", "mask"):
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise UserError(f"tokenizer={name!r} has no {kind} token; it needs pad, eos and mask tokens")
    return tokenizer


@dataclass
class Batch:
    """Pieces of documents of one split, and whether a document ends with each."""

    split: str
    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0


class Encoder:
    """Batches of text to arrays of token ids.

    Args:
        tokenizer_file: the path of a `tokenizer.json`.
        eos_token_id: the token that ends each document.
        dtype: the type of a token on disk.
    """

    def __init__(self, tokenizer_file: str, eos_token_id: int, dtype: np.dtype):
        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # `<mask>` in a text is six characters, not the mask
        self.eos_token_id = eos_token_id
        self.dtype = dtype

    def __call__(self, batch: Batch) -> np.ndarray:
        ids: list[int] = []
        encodings = self.tokenizer.encode_batch_fast(batch.texts, add_special_tokens=False)
        for encoding, ends in zip(encodings, batch.ends, strict=True):
            ids += encoding.ids
            if ends:
                ids.append(self.eos_token_id)
        return np.array(ids, self.dtype)


def encode_all(
    batches: Iterable[Batch], setting: tuple[str, int, np.dtype], workers: int
) -> Generator[tuple[Batch, np.ndarray], None, None]:
    """Each batch with its tokens, in order."""
    if workers == 1:
        encode = Encoder(*setting)
        for batch in batches:
            yield batch, encode(batch)
        return
    with ProcessPoolExecutor(workers, _context(), _start_worker, setting) as pool:
        yield from _in_order(lambda batch: pool.submit(_encode_in_worker, batch), batches, 2 * workers)


def _in_order(
    submit: Callable[[Batch], Future[np.ndarray]], batches: Iterable[Batch], window: int
) -> Iterator[tuple[Batch, np.ndarray]]:
    """The results of `submit` in the order of the batches, of which no more than `window` are under way."""
    pending: deque[tuple[Batch, Future[np.ndarray]]] = deque()
    for batch in batches:
        pending.append((batch, submit(batch)))
        if len(pending) == window:
            done, future = pending.popleft()
            yield done, future.result()
    for done, future in pending:
        yield done, future.result()


def _context() -> BaseContext:
    """How worker processes start: from a server that has imported this module once, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


_encoder: Encoder


def _start_worker(*setting: Any) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is one core's worth already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted, and sends the workers home
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _encoder = Encoder(*setting)


def _leave_with_parent() -> None:
    # A main process that is killed sends nobody home: its workers would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: Batch) -> np.ndarray:
    return _encoder(batch)
