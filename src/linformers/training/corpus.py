"""A corpus on disk: raw text becomes shards of tokens, which training reads as memory maps."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..checks import check_choice, check_size
from . import sources as files

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
OURS = re.compile(r"(train|validation)-\d{5,}\.bin(\.tmp)?|manifest\.json\.tmp")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")

UINT16_VOCABULARY = 2**16
BATCH_CHARACTERS = 2**20
# A tokenizer's pre-tokens end where white space begins, so a cut there changes no token.
PIECE = re.compile(r"(?s).{1,99999}\S(?=[ \n]|\Z)|.{1,100000}")
# What a tokenizer learns from at most: where documents are long, their number alone bounds nothing.
TOKENIZER_CHARACTERS = 2**28
SMALL = 2**25  # bytes for which starting processes does not pay: the tokenizers library has threads of its own
OPEN_MAPS = 64


class Shard(TypedDict):
    """A file of tokens, little-endian."""

    file: str
    tokens: int
    bytes: int
    sha256: str


class Split(TypedDict):
    """The shards of `train` or `validation`, in order."""

    documents: int
    tokens: int
    shards: list[Shard]


class Manifest(TypedDict):
    """What `manifest.json` holds; without it a folder is no corpus."""

    format: int
    dtype: str
    vocab_size: int
    tokenizer: str
    eos_token_id: int
    sources: list[str]
    splits: dict[str, Split]


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
        raise ValueError(f"validation_share={validation_share} must lie between 0 and 1, or name validation sources")
    held_out = [_Source(name, "validation") for name in _find(validation)]
    training = _without(held_out, [_Source(name, "train") for name in _find(sources)], console)
    if not training:
        raise ValueError(f"sources={list(sources)} leave nothing to train on; name files, folders or hub datasets")
    if (out / MANIFEST).exists():
        raise ValueError(f"out={str(out)!r} already holds a corpus; choose another folder or delete it")
    everything = training + held_out
    # The hub does not say how much will come.
    size = sum(s.size for s in everything) if all(isinstance(s.name, Path) for s in everything) else None
    if workers is None:
        workers = 1 if size is not None and size < SMALL else os.cpu_count() or 1
    share = 0.0 if held_out else validation_share
    taken = None if tokenizer is None else load_tokenizer(tokenizer)

    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():
        if OURS.fullmatch(path.name):
            path.unlink()  # of a run that was killed
    if taken is None:
        with _progress(console, MofNCompleteColumn()) as progress:
            task = progress.add_task("tokenizer", total=tokenizer_documents, rate="documents")
            sample = _sample(training, text_column, share, tokenizer_documents, lambda: progress.advance(task))
            taken = train_tokenizer(sample, vocab_size)
            progress.update(task, total=progress.tasks[task].completed)
    taken.save_pretrained(out / TOKENIZER)
    vocabulary = max(taken.get_vocab().values()) + 1
    dtype = np.dtype("uint16" if vocabulary <= UINT16_VOCABULARY else "uint32").newbyteorder("<")

    began = time.perf_counter()
    with ExitStack() as stack:
        writers = {s: stack.enter_context(ShardWriter(out, s, dtype, shard_tokens)) for s in ("train", "validation")}
        progress = stack.enter_context(_progress(console, DownloadColumn()))
        task = progress.add_task("tokens", total=size, rate="")
        documents = _documents(everything, text_column, share, lambda done: progress.update(task, completed=done))
        setting = (str(out / TOKENIZER / "tokenizer.json"), int(taken.eos_token_id), dtype)
        encoded = stack.enter_context(closing(_encode_all(_batches(documents), setting, workers)))
        for batch, ids in encoded:
            writers[batch.split].write(ids, documents=sum(batch.ends))
            tokens = sum(writer.summary["tokens"] for writer in writers.values())
            rate = tokens / (time.perf_counter() - began)
            progress.update(task, rate=f"{rate:,.0f} tokens a second")
    splits = {name: writer.summary for name, writer in writers.items()}
    _refuse_empty(splits, bool(validation), validation_share)
    manifest: Manifest = {
        "format": FORMAT,
        "dtype": dtype.name,
        "vocab_size": vocabulary,
        "tokenizer": tokenizer_hash(out / TOKENIZER),
        "eos_token_id": int(taken.eos_token_id),
        "sources": list(sources),
        "splits": splits,
    }
    with open(out / f"{MANIFEST}.tmp", "wb") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
        _finish(file, out / MANIFEST)
    for name, split in splits.items():
        counts = f"{split['documents']:,} documents, {split['tokens']:,} tokens, {len(split['shards']):,} shards"
        console.print(f"{name}: {counts}", highlight=False)
    console.print(f"Written to [bold]{out}[/bold] at {rate:,.0f} tokens a second", highlight=False)
    return manifest


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (Sennrich et al., 2016; Radford et al., 2019) with RoBERTa's special tokens."""
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", mask]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        least = len(alphabet) + len(special)
        raise ValueError(f"vocab_size={vocab_size} must be at least {least}: the bytes and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
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
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a folder or the hub, with what masked-language modelling on packed text needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"tokenizer={name!r} cannot be loaded from a folder or the hub: {reason}") from None
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer={name!r} has no tokenizer.json: only tokenizers of the library tokenizers work")
    for kind in ("pad", "eos", "mask"):
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise ValueError(f"tokenizer={name!r} has no {kind} token; it needs pad, eos and mask tokens")
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of the `tokenizer.json` in a folder, less padding and truncation.

    These two are not the tokenizer's own: transformers saves what its last call happened to ask for.
    """
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A folder that `prepare` has written.

    Args:
        folder: where the shards, the tokenizer and the manifest lie.
        manifest: what the manifest says.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Read the manifest of a corpus; each shard must be there and have its size."""
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no corpus: run linformers prepare") from None
        except ValueError as error:
            raise ValueError(f"{folder / MANIFEST} is damaged: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise ValueError(
                f"{folder / MANIFEST} has format {found!r}, expected {FORMAT}: run linformers prepare anew"
            )
        corpus = cls(folder, cast(Manifest, manifest))
        for shard in corpus._shards():
            path = folder / shard["file"]
            if not path.is_file():
                raise ValueError(f"shard {path} is missing, expected {shard['bytes']} bytes")
            if path.stat().st_size != shard["bytes"]:
                raise ValueError(f"shard {path} has {path.stat().st_size} bytes, expected {shard['bytes']}")
        return corpus

    def verify(self) -> None:
        """Read all shards, and refuse any that is not what `prepare` wrote."""
        for shard in self._shards():
            path = self.folder / shard["file"]
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard["sha256"]:
                size = f"{path.stat().st_size} bytes, expected {shard['bytes']}"
                raise ValueError(f"shard {path} has sha256 {found}, expected {shard['sha256']} ({size})")
        found = tokenizer_hash(self.folder / TOKENIZER)
        if found != self.tokenizer_hash:
            raise ValueError(f"{self.folder / TOKENIZER} has the hash {found}, expected {self.tokenizer_hash}")

    def tokens(self, split: str) -> TokenStream:
        """All tokens of `train` or `validation`."""
        check_choice("split", split, self.manifest["splits"])
        shards = self.manifest["splits"][split]["shards"]
        paths = [self.folder / shard["file"] for shard in shards]
        return TokenStream(paths, [shard["tokens"] for shard in shards], self.manifest["dtype"])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self.folder / TOKENIZER)

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.manifest["eos_token_id"]

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest["tokenizer"]

    def _shards(self) -> list[Shard]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]


class TokenStream:
    """The tokens of a split as one array over its shards, mapped into memory where they are read.

    Args:
        paths: the shards, in order.
        sizes: how many tokens each holds.
        dtype: the type of a token, `uint16` or `uint32`.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: str):
        self.paths = list(paths)
        self.starts = [0, *accumulate(sizes)]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a pickled map would carry the whole shard

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens from `start` to `start + count`, as an array of its own."""
        if not 0 <= start <= start + count <= len(self):
            raise ValueError(f"tokens {start} to {start + count} are not all among the {len(self)} of this stream")
        result = np.empty(count, self.dtype)
        done = 0
        while done < count:
            shard = bisect_right(self.starts, start + done) - 1
            offset = start + done - self.starts[shard]
            part = self._map(shard)[offset : offset + count - done]
            result[done : done + len(part)] = part
            done += len(part)
        return result

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            if len(self._maps) == OPEN_MAPS:  # each holds a file descriptor, of which a process has few
                del self._maps[next(iter(self._maps))]
            self._maps[shard] = np.memmap(self.paths[shard], self.dtype, mode="r")
        return self._maps[shard]


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
        for text in found:
            yield text.encode("utf-8", "replace").decode()  # json can spell half a character, which has no UTF-8


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
        raise ValueError(
            f"source {name!r} is no file or folder; as a hub name it needs the package datasets: "
            "pip install 'linformers[hub]'"
        ) from None
    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=split, streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"source {name!r} is no file or folder, and on the hub: {reason}") from None
    for row in rows:
        if text_column not in row:
            columns = ", ".join(map(repr, row))
            raise ValueError(f"dataset {name!r} has no column {text_column!r}; its columns are {columns}")
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


@dataclass
class Batch:
    """Pieces of documents of one split, and whether a document ends with each."""

    split: str
    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0


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


def _encode_all(
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


class ShardWriter:
    """A split on its way to disk; a shard bears its name only once it is whole.

    Args:
        out: the folder.
        split: the split, with which the names begin.
        dtype: the type of a token on disk.
        shard_tokens: the most tokens in a shard.
    """

    def __init__(self, out: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.out = out
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.summary: Split = {"documents": 0, "tokens": 0, "shards": []}
        self.file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is not None:
            if kind is None:
                self._end()
            else:
                self.file.close()

    def write(self, ids: np.ndarray, documents: int) -> None:
        """Append tokens, with which so many documents end."""
        self.summary["documents"] += documents
        self.summary["tokens"] += len(ids)
        while len(ids):
            if self.file is None:
                name = f"{self.split}-{len(self.summary['shards']):05d}.bin"
                self.shard: Shard = {"file": name, "tokens": 0, "bytes": 0, "sha256": ""}
                self.hash = hashlib.sha256()
                self.file = (self.out / f"{name}.tmp").open("wb")
            part, ids = np.split(ids, [self.shard_tokens - self.shard["tokens"]])
            data = part.astype(self.dtype, copy=False).tobytes()
            self.file.write(data)
            self.hash.update(data)
            self.shard["tokens"] += len(part)
            self.shard["bytes"] += len(data)
            if self.shard["tokens"] == self.shard_tokens:
                self._end()

    def _end(self) -> None:
        assert self.file is not None
        _finish(self.file, self.out / self.shard["file"])
        self.summary["shards"].append(self.shard | {"sha256": self.hash.hexdigest()})
        self.file = None


def _finish(file: BinaryIO, path: Path) -> None:
    """Give a file its name once all of it is on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)


def _refuse_empty(splits: dict[str, Split], given: bool, share: float) -> None:
    if splits["train"]["documents"] == 0:
        raise ValueError("the sources hold no text to train on")
    if splits["validation"]["documents"] == 0:
        if given:
            raise ValueError("the validation sources hold no text")
        raise ValueError(
            f"validation_share={share} of {splits['train']['documents']} documents is none; "
            "choose a larger share or name validation sources"
        )


def _progress(console: Console, count: Any) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), count, TextColumn("{task.fields[rate]}")]
    return Progress(*columns, TimeRemainingColumn(), console=console)
