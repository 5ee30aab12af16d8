"""Turn raw text into a corpus: train a tokenizer, encode all documents, write shards of tokens."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ..checks import check_probability, check_share, check_size, check_workers, make_folder
from ..errors import UserError, counted
from ..files import damage, write_file, write_folder
from ..progress import progress
from . import data
from .checkpoints import locked
from .corpus import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    open_tokenizer,
    shard_name,
    tokenizer_hash,
    vocabulary_size,
    write_manifest,
)

# What the models take. BERT's tokenizers would also return token types.
MODEL_INPUTS = ["input_ids", "attention_mask"]
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
SHARD = r"(train|validation)-\d{5,}\.bin"
LONG_WORD = re.compile(r"(?<!\w)\w{1001,}|(?<![^\w\s])[^\w\s]{1001,}")
OUR_FILES = re.compile(rf"{SHARD}|\.({SHARD}|manifest\.json|tokenizer|tokenizer\.removed)\.unfinished")
BATCH_CHARACTERS = 2**18  # whose tokens take hundreds of bytes each until they are numbers
TOKENIZER_CHARACTERS = 2**28  # the most text that a tokenizer is trained on
MAX_UINT16_VOCABULARY = 2**16
MIN_VALIDATION_TOKENS = 10_000  # perplexity on fewer tokens is mostly noise


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    vocab_size: int = 16384,
    tokenizer: str | None = None,
    revision: str | None = None,
    validation: Sequence[str] = (),
    validation_share: float = 0.005,
    text_column: str = "text",
    max_damaged: float = 0.001,
    tokenizer_documents: int = 12_000,
    shard_tokens: int = 2**23,
    workers: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Write the text of `sources` to `out` as tokens, with an end-of-sequence token after each document.

    The options are those of `linformers prepare`; a shard has at most `shard_tokens` tokens. The result does not depend
    on the number of workers.

    Args:
        sources: files, folders, or names of datasets on the hub (`name` or `name:config`; the split `train` is read).
        validation: like `sources`, for the validation set; these files are excluded from `sources`.
        validation_share: without `validation`, the share of documents to hold out, selected by their hash.
        max_damaged: the most lines that are not UTF-8 and rows that are not text, as a share of the documents.
        tokenizer_documents: the number of documents to train the tokenizer on, the same number from each file.
    """
    workers = workers if workers is not None else os.cpu_count() or 1
    sizes = {"tokenizer_documents": tokenizer_documents, "shard_tokens": shard_tokens, "workers": workers}
    for name, size in sizes.items():
        check_size(name, size)
    check_probability("max_damaged", max_damaged)
    if not validation:
        check_share("validation_share", validation_share)
    check_workers(workers)
    share = 0.0 if validation else validation_share
    all_sources = _find_sources(sources, validation, text_column, share, console)
    encoder = None if tokenizer is None else load_tokenizer(tokenizer, revision)

    make_folder("out", out)
    with locked(out), _undone_if_refused(out):
        if (out / MANIFEST).exists():
            raise UserError(f"out={str(out)!r} already holds a corpus; choose another folder or delete it")
        if (out / TOKENIZER).exists() and damage(out / TOKENIZER):
            raise UserError(f"out={str(out)!r} has a folder {TOKENIZER!r} of other origin; choose another folder")
        for path in out.iterdir():
            if OUR_FILES.fullmatch(path.name):  # left by a killed run
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if encoder is None:
            with progress(console) as bars:
                sample = bars.track(_sample(all_sources, tokenizer_documents), description="tokenizer")
                encoder = train_tokenizer(sample, vocab_size)
        with _writing(out):
            write_folder(out / TOKENIZER, encoder.save_pretrained)
        vocabulary, damaged = vocabulary_size(encoder), Damage(console)
        dtype = np.dtype("uint16" if vocabulary <= MAX_UINT16_VOCABULARY else "uint32").newbyteorder("<")
        began = time.perf_counter()
        with progress(console) as bars:
            tracked = bars.track(all_sources, description="files")
            documents = chain.from_iterable(source.documents(damaged) for source in tracked)
            tokens = encode(documents, out / TOKENIZER / "tokenizer.json", encoder.eos_token_id, dtype, workers)
            splits = _write_shards(tokens, out, dtype, shard_tokens)
        damaged.check(max_damaged, sum(split["documents"] for split in splits.values()))
        if empty := [name for name, split in splits.items() if not split["documents"]]:
            cause = f"validation_share={share} leaves none; use --validation FILE" if share else "no source has text"
            if not any(split["documents"] for split in splits.values()):
                cause = "no source has text"
            raise UserError(f"there are no documents for {empty[0]}: {cause}")
        manifest = {
            "format": FORMAT,
            "dtype": dtype.name,
            "vocab_size": vocabulary,
            "tokenizer": tokenizer_hash(out / TOKENIZER),
            "eos_token_id": encoder.eos_token_id,
            "sources": list(sources),
            "validation_sources": list(validation),
            "splits": splits,
        }
        with _writing(out):
            write_manifest(out, manifest)  # last, since it makes the folder a corpus

    for name, split in splits.items():
        found = f"{counted(split['documents'], 'document')}, {counted(split['tokens'], 'token')}"
        console.print(f"{name}: {found}", highlight=False)
    if splits["validation"]["tokens"] < MIN_VALIDATION_TOKENS:
        console.print("The validation set is small: use --validation or a larger --validation-share", style="yellow")
    rate = sum(split["tokens"] for split in splits.values()) / (time.perf_counter() - began)
    summary = f"Written to {out}: a vocabulary of {vocabulary:,} tokens; {rate:,.0f} tokens per second"
    console.print(summary, highlight=False, markup=False)
    return manifest


@contextmanager
def _undone_if_refused(out: Path) -> Iterator[None]:
    """Delete what was written for a corpus that turns out to be impossible."""
    before = set(out.iterdir())
    try:
        yield
    except UserError:
        for path in set(out.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


@dataclass(frozen=True)
class Source:
    """A file, or a dataset on the hub, whose documents belong to a split, except for the share that is held out."""

    name: Path | str
    split: str
    text_column: str
    held_out: float

    def documents(self, damaged: Callable[[str], None]) -> Iterator[tuple[str, str]]:
        """The split and the text of each document; `damaged` as in `data.documents`."""
        # Held out by hash: equal documents stay together, and adding others moves none.
        for text in data.documents(self.name, self.text_column, self.split, damaged):
            place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
            yield "validation" if place < self.held_out else self.split, text


@dataclass
class Damage:
    """Counts the lines that are not UTF-8 and the texts that are none, and reports the first."""

    console: Console
    count: int = 0
    first: str = ""

    def __call__(self, damage: str) -> None:
        if not self.count:
            self.first = damage
            self.console.print(damage, style="yellow", highlight=False, markup=False)
        self.count += 1

    def check(self, most: float, documents: int) -> None:
        """Refuse more than a share of `most` of the documents."""
        damaged = "damaged lines or rows" if self.count > 1 else "damaged line or row"
        found = f"{self.count:,} {damaged} in {counted(documents, 'document')}"
        if self.count > most * documents:
            raise UserError(f"{self.first}: found {found}, more than max_damaged={most} allows")
        if self.count:
            self.console.print(
                f"{found}: wrong bytes became U+FFFD, and rows without proper text were left out", style="yellow"
            )


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Explains what the system refuses, such as writing to a full disk."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or "(os error " in str(error):  # a plain exception of tokenizers
            raise UserError(f"out={str(out)!r} cannot be written: {error}") from None
        raise


def _find_sources(
    training: Sequence[str], validation: Sequence[str], text_column: str, held_out: float, console: Console
) -> list[Source]:
    """All sources, first those for validation: what is wrong with them shows early."""

    def find(names: Sequence[str]) -> Iterator[Path | str]:
        for name in names:
            is_file = data.file_type(Path(name)) in data.TABLES + data.TEXTS or Path(name).exists()
            yield from data.find_files([name]) if is_file or not HUB_NAME.fullmatch(name) else [name]

    held, candidates = list(find(validation)), list(find(training))
    excluded = {name.resolve() for name in held if isinstance(name, Path)}
    kept = [name for name in candidates if isinstance(name, str) or name.resolve() not in excluded]
    if len(kept) < len(candidates):
        console.print(f"{len(candidates) - len(kept)} of the files are for validation and not trained on")
    if not kept:
        raise UserError(f"sources={list(training)} leave nothing to train on; name files, folders or hub datasets")
    splits = [*((name, "validation") for name in held), *((name, "train") for name in kept)]
    return [Source(name, split, text_column, held_out) for name, split in splits]


def _sample(sources: list[Source], documents: int) -> Iterator[str]:
    """The text to train a tokenizer on: the first documents of each file, the same number from each.

    Without words of more than 1,000 letters or signs: the time to train grows with the square of their length.
    """
    training = [source for source in sources if source.split == "train"]
    for number, source in enumerate(training):
        # Rounded so that the numbers add up to `documents`.
        count = documents * (number + 1) // len(training) - documents * number // len(training)
        characters = TOKENIZER_CHARACTERS // len(training)
        # Damage is counted later, when all documents are read.
        found = source.documents(damaged=lambda damage: None)
        for text in islice((text for split, text in found if split == "train"), count):
            yield LONG_WORD.sub(" ", text[:characters])
            characters -= len(text)
            if characters <= 0:
                break


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016; Radford et al., 2019) with RoBERTa's special tokens."""
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", mask]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < (least := len(alphabet) + len(special)):
        raise UserError(f"vocab_size={vocab_size} must be at least {least}, for the bytes and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    sizes: Any = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, **sizes))
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": mask}
    tokens = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_input_names=MODEL_INPUTS, **tokens)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder or the hub, and check that it has the special tokens that pretraining needs."""
    options = {"revision": revision or "main", "model_input_names": MODEL_INPUTS}
    tokenizer = open_tokenizer(name, f"tokenizer={name!r}, a folder or a name on the hub", **options)
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer={name!r} has no tokenizer.json: only fast tokenizers work")
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:  # as in BERT
        tokenizer.eos_token = tokenizer.sep_token
    for kind in ("pad", "eos", "mask"):
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise UserError(f"tokenizer={name!r} has no {kind} token; it needs pad, eos and mask tokens")
    return tokenizer


def encode(
    documents: Iterator[tuple[str, str]], tokenizer_file: Path, eos_token_id: int, dtype: np.dtype, workers: int
) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Batches with the split and the tokens of each document, in order; an end-of-sequence token ends a document."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # "<mask>" in a text is six characters, not the mask token

    def encode_batch(batch: list[tuple[str, str]]) -> list[tuple[str, np.ndarray]]:
        splits, texts = zip(*batch, strict=True)
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [(split, np.array([*e.ids, eos_token_id], dtype)) for split, e in zip(splits, encodings, strict=True)]

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads below suffice
    batches = _batches(documents)
    with ThreadPoolExecutor(workers) as pool:
        while group := list(islice(batches, 2 * workers)):  # bounds the memory
            yield from pool.map(encode_batch, group)


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Batches of about `BATCH_CHARACTERS` characters."""
    batch, characters = [], 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_shards(
    batches: Iterable[list[tuple[str, np.ndarray]]], out: Path, dtype: np.dtype, shard_tokens: int
) -> dict[str, Any]:
    """Write documents to shards of at most `shard_tokens` tokens; returns the splits of the manifest."""
    splits: dict[str, Any] = {name: {"documents": 0, "tokens": 0, "shards": []} for name in ("train", "validation")}
    buffers, size = {name: bytearray() for name in splits}, shard_tokens * dtype.itemsize

    def write_shard(split: str) -> None:
        shards = splits[split]["shards"]
        name = shard_name(split, len(shards))
        with memoryview(buffers[split])[:size] as content:
            with _writing(out):
                write_file(out / name, content)
            tokens, sha256 = len(content) // dtype.itemsize, hashlib.sha256(content).hexdigest()
            shards.append({"file": name, "tokens": tokens, "bytes": len(content), "sha256": sha256})
        del buffers[split][:size]

    for split, ids in chain.from_iterable(batches):
        splits[split]["documents"] += 1
        splits[split]["tokens"] += len(ids)
        buffers[split] += ids.tobytes()
        while len(buffers[split]) >= size:
            write_shard(split)
    for split in splits:
        if buffers[split]:
            write_shard(split)
    return splits
