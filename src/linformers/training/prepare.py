"""Raw text to a corpus: files and datasets of the hub become documents, documents batches, batches tokens on disk."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, TextColumn

from ..checks import check_size, make_folder
from ..errors import UserError
from ..progress import progress
from . import sources as files
from .checkpointing import locked
from .corpus import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardWriter,
    clear_unfinished,
    token_dtype,
    tokenizer_hash,
    write_manifest,
)
from .tokenizer import Batch, encode_all, load_tokenizer, train_tokenizer

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
BATCH_CHARACTERS = 2**20
# A tokenizer's pre-tokens end where white space begins, so a cut there changes no token.
PIECE = re.compile(r"(?s).{1,99999}\S(?=[ \n]|\Z)|.{1,100000}")
# What a tokenizer learns from at most: where documents are long, their number alone bounds nothing.
TOKENIZER_CHARACTERS = 2**28
RATE = TextColumn("{task.fields[rate]}")
SMALL = 2**25  # bytes for which starting processes does not pay: the tokenizers library has threads of its own
# Tokens of the validation set below which a perplexity is mostly chance.
FEW = 10_000


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    vocab_size: int = 16384,
    tokenizer: str | None = None,
    validation: Sequence[str] = (),
    validation_share: float = 0.005,
    text_column: str = "text",
    tokenizer_documents: int = 12_000,
    shard_tokens: int = 2**24,
    workers: int | None = None,
    console: Console,
) -> Manifest:
    """Write the text of `sources` to `out` as tokens, each document followed by the end-of-sequence token.

    The result depends on the text alone, not on the number of workers. The worker processes import the script that
    calls this function, so a script needs Python's `if __name__ == "__main__":`.

    Args:
        sources: files, folders, or names of datasets on the hub (`name` or `name:config`, of which `train` is read).
        out: the folder to write to, in which there is no corpus yet.
        vocab_size: the most tokens that a tokenizer trained on `sources` may have.
        tokenizer: the folder or hub name of a tokenizer to take instead of training one.
        validation: as `sources` (of hub datasets `validation` is read); its files are left out of `sources`.
        validation_share: where `validation` is not given, the share of documents held out, chosen by their hash.
        text_column: the column of a table that holds the text.
        tokenizer_documents: how many documents the tokenizer learns from, the same number from each file.
        shard_tokens: the most tokens in a file.
        workers: processes that encode, by default one for each core; 1, and by default where there is little to encode,
            encodes in this process.
    """
    check_size("tokenizer_documents", tokenizer_documents)
    check_size("shard_tokens", shard_tokens)
    if workers is not None:
        check_size("workers", workers)
    if not validation and not 0 < validation_share < 1:
        raise UserError(
            f"validation_share={validation_share} must lie between 0 and 1; or name files to hold out with --validation"
        )
    held_out = [_Source(name, "validation") for name in _find(validation)]
    training = _without(held_out, [_Source(name, "train") for name in _find(sources)], console)
    if not training:
        raise UserError(f"sources={list(sources)} leave nothing to train on; name files, folders or hub datasets")
    _refuse_corpus(out)
    share = 0.0 if held_out else validation_share
    # All of the training text comes first: nobody should wait for it to hear this.
    if held_out and not any(next(source.texts(text_column), "") for source in held_out):
        raise UserError("the validation sources hold no text")
    if share:
        _refuse_no_validation(training, text_column, share)
    everything = training + held_out
    # The hub does not say how much will come.
    size = sum(s.size for s in everything) if all(isinstance(s.name, Path) for s in everything) else None
    if workers is None:
        workers = 1 if size is not None and size < SMALL else os.cpu_count() or 1
    taken = None if tokenizer is None else load_tokenizer(tokenizer)

    make_folder("out", out)
    with locked(out):
        _refuse_corpus(out)  # one that another process has made meanwhile
        clear_unfinished(out)
        if taken is None:
            with progress(console, None, RATE) as bars:
                task = bars.add_task("tokenizer", total=tokenizer_documents, rate="documents")
                sample = _sample(training, text_column, share, tokenizer_documents, lambda: bars.advance(task))
                taken = train_tokenizer(sample, vocab_size)
                bars.update(task, total=bars.tasks[task].completed)
        taken.save_pretrained(out / TOKENIZER)
        vocabulary = max(taken.get_vocab().values()) + 1
        dtype = token_dtype(vocabulary)

        began = time.perf_counter()
        with ExitStack() as stack:
            writers = {
                s: stack.enter_context(ShardWriter(out, s, dtype, shard_tokens)) for s in ("train", "validation")
            }
            bars = stack.enter_context(progress(console, DownloadColumn(), RATE))
            task = bars.add_task("tokens", total=size, rate="")
            documents = _documents(everything, text_column, share, lambda done: bars.update(task, completed=done))
            setting = (str(out / TOKENIZER / "tokenizer.json"), int(taken.eos_token_id), dtype)
            encoded = stack.enter_context(closing(encode_all(_batches(documents), setting, workers)))
            for batch, ids in encoded:
                writers[batch.split].write(ids, documents=sum(batch.ends))
                tokens = sum(writer.summary["tokens"] for writer in writers.values())
                rate = tokens / (time.perf_counter() - began)
                bars.update(task, rate=f"{rate:,.0f} tokens a second")
        splits = {name: writer.summary for name, writer in writers.items()}
        if splits["train"]["documents"] == 0:
            cause = (
                f"validation_share={share} leaves none; name files to hold out with --validation instead"
                if share
                else "the sources hold none"
            )
            raise UserError(f"there is no text to train on: {cause}")
        manifest: Manifest = {
            "format": FORMAT,
            "dtype": dtype.name,
            "vocab_size": vocabulary,
            "tokenizer": tokenizer_hash(out / TOKENIZER),
            "eos_token_id": int(taken.eos_token_id),
            "sources": list(sources),
            "validation_sources": list(validation),
            "splits": splits,
        }
        write_manifest(out, manifest)
    for name, split in splits.items():
        counts = f"{split['documents']:,} documents, {split['tokens']:,} tokens, {len(split['shards']):,} shards"
        console.print(f"{name}: {counts}", highlight=False)
    if splits["validation"]["tokens"] < FEW:
        console.print(
            f"{splits['validation']['tokens']:,} tokens are too few for a perplexity that means much: name files with "
            "--validation, or a larger --validation-share",
            style="yellow",
            highlight=False,
        )
    console.print(f"The vocabulary has {vocabulary:,} tokens", highlight=False)
    console.print(f"Written to {out} at {rate:,.0f} tokens a second", highlight=False, markup=False)
    return manifest


def _refuse_corpus(out: Path) -> None:
    if (out / MANIFEST).exists():
        raise UserError(f"out={str(out)!r} already holds a corpus; choose another folder or delete it")


@dataclass(frozen=True)
class _Source:
    """A file, or a dataset on the hub, whose documents belong to a split."""

    name: Path | str
    split: str

    @property
    def size(self) -> int:
        return self.name.stat().st_size if isinstance(self.name, Path) else 0

    def texts(self, text_column: str, on_read: files.OnRead | None = None) -> Iterator[str]:
        if isinstance(self.name, Path):
            found = files.documents(self.name, text_column, on_read)
        else:
            found = _hub_documents(self.name, self.split, text_column)
        yield from found


def _find(names: Sequence[str]) -> list[Path | str]:
    """Files, those of folders, and the names of hub datasets."""
    found: list[Path | str] = []
    for name in names:
        known = files.kind(Path(name)) in files.TABLES + files.TEXTS
        if known or Path(name).exists() or not HUB_NAME.fullmatch(name):
            found += files.find_files([name])
        else:
            found.append(name)
    return found


def _without(held_out: list[_Source], training: list[_Source], console: Console) -> list[_Source]:
    """The sources of training that are not those of validation, as where a folder holds both."""
    known = {source.name.resolve() for source in held_out if isinstance(source.name, Path)}
    kept = [source for source in training if isinstance(source.name, str) or source.name.resolve() not in known]
    if len(kept) < len(training):
        console.print(f"{len(training) - len(kept)} of the files are for validation and not trained on")
    return kept


def _hub_documents(name: str, split: str, text_column: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"source {name!r} is no file or folder; as a hub name it needs the package datasets: "
            "pip install 'linformers[hub]'"
        ) from None
    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=split, streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"source {name!r} is no file or folder, and on the hub: {reason}") from None
    for row in rows:
        if text_column not in row:
            columns = ", ".join(map(repr, row))
            raise UserError(f"dataset {name!r} has no column {text_column!r}; its columns are {columns}")
        if row[text_column] is not None and str(row[text_column]).strip():
            yield str(row[text_column])


def _split_of(source: _Source, text: str, share: float) -> str:
    """Where a document belongs: by its hash, so that equal documents go together and none moves when others come."""
    place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    return "validation" if place < share else source.split


def _sample(
    training: list[_Source], text_column: str, share: float, documents: int, on_document: Callable[[], None]
) -> Iterator[str]:
    """What a tokenizer learns from: the first documents of each file, as many from each."""
    for number, source in enumerate(training):
        # Rounded so that the shares of all files add up, also where there are more files than documents.
        most = documents * (number + 1) // len(training) - documents * number // len(training)
        characters = TOKENIZER_CHARACTERS // len(training)
        for text in source.texts(text_column) if most else ():
            if _split_of(source, text, share) == "train":
                yield from (match[0] for match in PIECE.finditer(text[:characters]))
                on_document()
                most -= 1
                characters -= len(text)
            if most == 0 or characters <= 0:
                break


def _documents(
    all_sources: list[_Source], text_column: str, share: float, on_read: files.OnRead
) -> Iterator[tuple[str, str]]:
    """All documents in order, each with the split it belongs to."""
    before = 0

    def report(position: int) -> None:
        on_read(before + position)

    for source in all_sources:
        for text in source.texts(text_column, report):
            yield _split_of(source, text, share), text
        before += source.size


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[Batch]:
    """Documents as work of equal size: long ones in pieces, short ones together, the order of a split kept."""
    waiting: dict[str, Batch] = {}
    for split, text in documents:
        for piece in PIECE.finditer(text):
            batch = waiting.setdefault(split, Batch(split))
            batch.texts.append(piece[0])
            batch.ends.append(piece.end() == len(text))
            batch.characters += len(piece[0])
            if batch.characters >= BATCH_CHARACTERS:
                yield waiting.pop(split)
    yield from waiting.values()


def _refuse_no_validation(training: list[_Source], text_column: str, share: float) -> None:
    """See that a document falls into the validation set; where there are enough of them, one of the first does."""
    documents = 0
    for source in training:
        for text in source.texts(text_column):
            documents += 1
            if _split_of(source, text, share) == "validation":
                return
    if documents == 0:
        raise UserError("there is no text to train on: the sources hold none")
    raise UserError(
        f"validation_share={share} of {documents} documents, chosen by their hash, is none; "
        "name files to hold out with --validation, or choose a larger share"
    )
