"""`linformers embed`: vectors of documents of any length, in the order of the input; a stopped run continues."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console

from .. import LinformerModel, checks
from ..errors import UserError, counted
from ..files import read_json, write_file
from ..pooling import POOLINGS, Pooling
from ..progress import progress, stoppable
from ..provenance import sentence
from ..shipped import ENGLISH
from . import checkpoints
from .batches import Block, Part, TextEncoder, batches_of, default_tokens, inputs_of, upload
from .documents import Document, Documents
from .recipe import COMPILE, PRECISIONS
from .rows import load_tokenizer

FORMAT = 1
INFO = b"linformers"  # the key of the metadata of a Parquet file
WORTH_COMPILING = 2**29  # characters: compiling takes about a minute


@dataclass(frozen=True)
class Settings:
    """How to make vectors."""

    pooling: str | None = None  # "mean" or "cls"; by default, what the folder of the model says, or else the mean
    normalize: bool = True
    prompt: str = "document"  # "document", "query", "none", or the name of a prompt in the folder of the model
    late_chunks: int | None = None  # tokens of a chunk: a vector for each, pooled after the whole document was read
    tokens: int | None = None  # of a batch; by default 2,048 on a CPU and 65,536 on a GPU
    precision: str = "auto"  # "bf16", "float32", or "auto": bf16 if the GPU supports it
    compile: str = "auto"  # "yes", "no", or "auto": on a GPU, if there is enough to read

    def __post_init__(self) -> None:
        if self.pooling is not None:
            checks.check_choice("pooling", self.pooling, POOLINGS)
        for name in ("late_chunks", "tokens"):
            if getattr(self, name) is not None:
                checks.check_size(name, getattr(self, name))
        checks.check_choice("precision", self.precision, PRECISIONS)
        checks.check_choice("compile", self.compile, COMPILE)


class Vectors(NamedTuple):
    """The vectors of a block, (rows, d), and what each row is of: a text or, with late chunks, a part of one."""

    values: np.ndarray
    texts: np.ndarray  # the number of the text within the block
    spans: np.ndarray  # with late chunks, the characters where each begins and ends, (rows, 2)
    tokens: np.ndarray
    parts: np.ndarray  # of the text


class Embedder:
    """A model and its tokenizer, ready to embed."""

    def __init__(self, model: str | Path | None = None, settings: Settings | None = None, *, characters: int = 0):
        self.settings = settings = settings or Settings()
        self.folder = folder = Path(model) if model is not None else ENGLISH
        if not folder.is_dir():
            raise UserError(f"model={str(folder)!r} is not a folder")
        self.tokenizer = tokenizer = load_tokenizer(folder)
        self.said = said = Pooling.of(folder)
        self.mode = settings.pooling or said.mode
        if settings.late_chunks and self.mode != "mean":
            raise UserError(f"late_chunks needs the mean of tokens, but pooling is {self.mode!r}: pass pooling='mean'")
        self.include_prompt, prompt = said.include_prompt, said.prompt(settings.prompt)
        chunked = settings.late_chunks is not None
        self.encoder = TextEncoder(tokenizer, tokenizer.model_max_length, prompt, with_offsets=chunked)
        self.pad_token_id = tokenizer.pad_token_id or 0
        self.batch_tokens = settings.tokens or default_tokens()
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)  # Triton launches kernels on the current one
        bf16 = settings.precision == "bf16" or (
            settings.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()
        )
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.network = checkpoints.load_whole(LinformerModel, folder, dtype=dtype).to(self.device).eval()
        self.dimension: int = self.network.config.hidden_size
        if settings.compile == "yes" or (settings.compile == "auto" and on_gpu and characters >= WORTH_COMPILING):
            from .trainer import compile_model  # imports the Trainer, 60 MB that nothing else here needs

            compile_model(self.network, "yes", any_length=True)

    def describe(self) -> dict[str, Any]:
        """What search needs to know, for the files of vectors."""
        return {
            "model": "bundled" if self.folder == ENGLISH else str(self.folder.resolve()),
            "model_hash": checkpoints.model_hash(self.folder),
            "dimension": self.dimension,
            "pooling": self.mode,
            "normalized": self.settings.normalize,
            "prompt": self.encoder.prompt,
            "late_chunks": self.settings.late_chunks,
            "max_length": self.encoder.max_length,
        }

    def with_settings(self, settings: Settings) -> Embedder:
        """The same model with other settings, which may not change its type or how it is compiled."""
        other = copy(self)
        other.settings, other.mode = settings, settings.pooling or self.mode
        other.encoder = TextEncoder(
            self.tokenizer, self.encoder.max_length, self.said.prompt(settings.prompt), settings.late_chunks is not None
        )
        return other

    def chunks(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The vectors of a text's chunks, and the characters where each begins and ends, (chunks, 2)."""
        (block,) = self.encoder.read([Document("", text)])
        vectors = self.vectors(block)
        return vectors.values, vectors.spans

    def embed(self, texts: Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """The vectors of texts, (texts, d); with late chunks, those of each text, (chunks, d)."""
        documents = [Document(str(number), text) for number, text in enumerate(texts)]
        blocks = [self.vectors(block) for block in self.encoder.read(documents)]
        values = np.concatenate([np.empty((0, self.dimension), np.float32), *(block.values for block in blocks)])
        if self.settings.late_chunks is None:
            return values
        counts = [np.bincount(block.texts) for block in blocks]  # at least one for each text
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]))
        return [values[start:stop] for start, stop in pairwise(ends)]

    @torch.inference_mode()
    def vectors(self, block: Block, report: Any = lambda tokens: None) -> Vectors:
        """The vectors of a block; zeros for an empty text. `report` is called with tokens as they are read."""
        size = self.settings.late_chunks
        lengths = np.array([len(tokens.ids) for tokens in block.tokens])
        chunks = np.maximum(1, -(-lengths // size)) if size else np.ones_like(lengths)
        firsts = np.cumsum(chunks) - chunks  # the first row of each text
        totals = np.zeros((int(chunks.sum()), self.dimension), np.float32)
        weights = np.zeros(len(totals), np.float32)
        sums = []
        for batch in batches_of(block.parts, self.batch_tokens):
            inputs = inputs_of(batch, self.pad_token_id, self.encoder.max_length, self.device)
            hidden = self.network(**inputs).last_hidden_state
            own, rows = self._weights(batch, hidden.shape[1])
            sums.append((batch, own, rows, _weighted_sums(hidden, own, rows)))
            report(sum(len(part.ids) for part in batch))
        for batch, own, rows, found in sums:
            for part, weight, row, values in zip(batch, own, rows, found.cpu().numpy(), strict=True):
                first = firsts[part.text] + (part.own[0] // size if size else 0)
                shares = np.bincount(row, weight, minlength=len(values))
                stop = min(first + len(values), len(totals))
                totals[first:stop] += values[: stop - first]
                weights[first:stop] += shares[: stop - first]
        if np.isnan(totals).any():
            checks.refuse_nan(self.folder)
        totals /= np.maximum(weights, 1)[:, None]
        if self.settings.normalize:
            norms = np.linalg.norm(totals, axis=1, keepdims=True)
            totals /= np.where(norms > 0, norms, 1)
        texts = np.repeat(np.arange(len(lengths)), chunks)
        parts = np.array(block.parts_of_texts())[texts]
        if not size:
            return Vectors(totals, texts, np.zeros((len(texts), 2), np.int64), lengths, parts)
        starts = (np.arange(len(texts)) - firsts[texts]) * size
        stops = np.minimum(starts + size, lengths[texts])
        spans = []
        for text, start, stop in zip(texts, starts, stops, strict=True):
            offsets = block.tokens[text].offsets
            assert offsets is not None
            spans.append((offsets[start, 0], offsets[stop - 1, 1]) if stop > start else (0, 0))
        return Vectors(totals, texts, np.array(spans, np.int64), stops - starts, parts)

    def _weights(self, batch: Sequence[Part], width: int) -> tuple[np.ndarray, np.ndarray]:
        """How much each token counts, (b, n), and in which row of its part's vectors, (b, n)."""
        weights, rows = np.zeros((len(batch), width), np.float32), np.zeros((len(batch), width), np.int64)
        size, special = self.settings.late_chunks, len(self.encoder.before)
        for part, weight, row in zip(batch, weights, rows, strict=True):
            start, stop = (part.head + number - part.first for number in part.own)
            if self.mode == "cls":
                weight[0] = stop - start
            elif size is None:
                tail = len(part.ids) - len(self.encoder.after)
                weight[: part.head if self.include_prompt else special] = 1
                weight[start:stop] = 1
                weight[tail : len(part.ids)] = 1
            else:
                weight[start:stop] = 1
                row[start:stop] = np.arange(*part.own) // size - part.own[0] // size
        return weights, rows


def _weighted_sums(hidden: torch.Tensor, weights: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    """The weighted sums of hidden states (b, n, d) by row, (b, rows, d); a product of matrices, so deterministic."""
    own = upload(torch.from_numpy(weights), hidden.device)[:, None]  # (b, 1, n)
    if (count := int(rows.max()) + 1) > 1:
        places = torch.arange(count, device=hidden.device)[:, None]
        own = own * (upload(torch.from_numpy(rows), hidden.device)[:, None] == places)
    return own @ hidden.float()


def embed(texts: Sequence[str], model: str | Path | None = None, **settings: Any) -> np.ndarray | list[np.ndarray]:
    """The vectors of texts of any length, (texts, d) in float32; a text of more than n tokens is read in parts.

    Args:
        texts: strings; the vector of a blank one is 0.
        model: a folder; by default, the bundled English model.
        **settings: fields of `training.embed.Settings`: `pooling`, `normalize`, `prompt` (`"query"` for queries),
            `late_chunks` (a list with the vectors of each text's chunks), `tokens`, `precision`, `compile`.
    """
    texts = texts if isinstance(texts, str) else list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise UserError("texts must be a list of strings")
    known = list(Settings.__dataclass_fields__)
    for name in settings:
        checks.check_choice("setting", name, known)
    return Embedder(model, Settings(**settings), characters=sum(map(len, texts))).embed(texts)


# Files of vectors.


def embed_files(
    sources: Sequence[str | Path],
    out: Path,
    *,
    model: Path | None = None,
    text: str = "text",
    id: str = "id",
    console: Console,
    command: str,
    **settings: Any,
) -> None:
    """Write the vectors of all documents to a `.npy` file, with ids beside it, or to a Parquet file.

    Each block of documents is saved beside `out` as soon as it is ready, with a hash of its texts, and a run that finds
    it there goes on after it. Under torchrun, the processes take turns at the blocks.
    """
    if out.suffix not in (".npy", ".parquet"):
        raise UserError(f"out={str(out)!r} must be a file that ends in .npy or .parquet")
    checks.check_new_file("out", out)
    documents = Documents(sources, text, id, leave_out=blocks_of(out))
    with processes() as (rank, count):
        embedder = Embedder(model, Settings(**settings), characters=documents.characters())
        embed_documents(embedder, documents, out, console, command, rank, count)


def embed_documents(
    embedder: Embedder,
    documents: Documents,
    out: Path,
    console: Console,
    command: str,
    rank: int = 0,
    processes: int = 1,
) -> None:
    """`embed_files` with a model that is loaded, in one of several `processes`."""
    folder = blocks_of(out)
    if rank == 0:
        checks.make_folder("out", folder)
    with checkpoints.locked(folder) if rank == 0 else nullcontext():
        if rank == 0:
            precision = str(embedder.network.dtype).removeprefix("torch.")
            _claim(folder, {**embedder.describe(), "precision": precision})
        _wait(processes)
        blocks = _write_blocks(embedder, documents, folder, rank, processes, console)
        _wait(processes)
        if rank == 0:
            info = embedder.describe() | _inputs(documents)
            _join(folder, blocks, out, info, documents, console, command)


def blocks_of(out: Path) -> Path:
    """The folder of the blocks of a file of vectors that is not finished."""
    return out.with_name(f"{out.name}.parts")


@contextmanager
def processes() -> Iterator[tuple[int, int]]:
    """The rank of this process and the number of processes that torchrun started."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield rank, count
        return
    from datetime import timedelta

    from torch import distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(days=30))  # which processes of different speed may take
    try:
        yield rank, count
    finally:
        dist.destroy_process_group()


def _wait(processes: int) -> None:
    if processes > 1:
        torch.distributed.barrier()


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse the blocks of a run with other settings."""
    path = folder / "run.json"
    if any(folder.glob("*.parquet")) and path.exists():
        saved = read_json(path)
        for name in settings | saved:
            if settings.get(name) != saved.get(name):
                was = f"{name} was {saved.get(name)!r} and is now {settings.get(name)!r}"
                raise UserError(f"{folder} holds an unfinished run with other settings: {was}; delete it to start anew")
    write_file(path, json.dumps(settings, indent=1) + "\n")


def _inputs(documents: Documents) -> dict[str, Any]:
    sources = [str(source) for source in documents.sources]  # ids have their names
    return {
        "folder": str(Path.cwd()),
        "sources": sources,
        "text_column": documents.text_column,
        "id_column": documents.id_column,
    }


def block_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.parquet"


def hash_of(texts: Sequence[Document]) -> str:
    return blake2b(repr([tuple(text) for text in texts]).encode(errors="replace"), digest_size=16).hexdigest()


def _write_blocks(
    embedder: Embedder, documents: Documents, folder: Path, rank: int, processes: int, console: Console
) -> int:
    """Write the blocks of this process that are missing; returns the number of all blocks."""
    hashes: dict[int, str] = {}

    def wanted(number: int, texts: list[Document]) -> bool:
        if number % processes != rank:
            return False
        hashes[number] = hash_of(texts)
        return _hash_in(block_path(folder, number)) != hashes[number]

    blocks = read = 0
    meter = Meter(documents.characters())
    with (
        stoppable(console, lambda: f"stopped after {counted(read, 'document')}; run the command again to continue"),
        progress(console if rank == 0 else Console(quiet=True)) as bars,
    ):
        task = bars.add_task("", total=meter.total, amount="", detail="")
        for block in embedder.encoder.read(documents, wanted):
            characters, length = sum(len(text.text) for text in block.texts), sum(len(part.ids) for part in block.parts)

            def report(tokens: int, block: Block = block, characters: int = characters, length: int = length) -> None:
                share = tokens / length
                meter.add(share * characters, share * len(block.texts), tokens)
                bars.update(task, **meter.shown())

            if block.tokens:
                vectors = embedder.vectors(block, report)
                _write_block(block_path(folder, block.number), block, vectors, hashes[block.number], embedder.settings)
            else:
                meter.add(characters, len(block.texts))
            blocks, read = block.number + 1, block.start + len(block.texts)
        bars.update(task, completed=meter.total, amount=counted(read, "document"))
    if not read:
        raise UserError(f"{', '.join(map(str, documents.sources))} has no documents")
    return blocks


class Meter:
    """How much was read, how fast; the characters `done`, of about `total`, include those of an earlier run."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.tokens, self.documents = total, 0.0, 0, 0.0
        self.began = time.perf_counter()

    def add(self, characters: float, documents: float, tokens: int = 0) -> None:
        self.done += characters
        self.documents += documents
        self.tokens += tokens

    def shown(self) -> dict[str, Any]:
        """What a bar shows; it ends when all is written."""
        speed = self.tokens / max(1e-9, time.perf_counter() - self.began)
        amount, done = counted(int(self.documents), "document"), min(self.done, 0.99 * self.total)
        return {"completed": done, "amount": amount, "detail": f"{speed:,.0f} tokens a second"}


def _hash_in(path: Path) -> str | None:
    """The hash of the texts of a block, if its file is whole."""
    if not path.exists():
        return None
    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
    except (pyarrow.ArrowException, OSError):
        return None
    return metadata.get(b"texts", b"").decode()


def _write_block(path: Path, block: Block, vectors: Vectors, texts: str, settings: Settings) -> None:
    columns: dict[str, Any] = {"id": [block.texts[text].id for text in vectors.texts]}
    if settings.late_chunks:
        starts = np.flatnonzero(np.diff(vectors.texts, prepend=-1))
        columns["chunk"] = np.arange(len(vectors.texts)) - np.repeat(starts, np.diff(starts, append=len(vectors.texts)))
        columns |= {"start": vectors.spans[:, 0], "end": vectors.spans[:, 1]}
    columns |= {"tokens": vectors.tokens, "parts": vectors.parts}
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(vectors.values.ravel(), vectors.values.shape[1])
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata({"texts": texts}), sink)
    write_file(path, sink.getvalue().to_pybytes())


def values_of(table: pyarrow.Table) -> np.ndarray:
    """The vectors of a table, (rows, d)."""
    column = table.column("vector").combine_chunks()
    width = column.type.list_size
    return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def paths_beside(out: Path) -> tuple[Path, Path]:
    """The ids and the description beside a `.npy` file."""
    return out.with_suffix(".ids.jsonl"), out.with_suffix(".json")


def _join(
    folder: Path, blocks: int, out: Path, info: dict[str, Any], documents: Documents, console: Console, command: str
) -> None:
    """Join the blocks to the output, and say what happened to whom."""
    paths = [block_path(folder, number) for number in range(blocks)]
    counts = {"rows": 0, "documents": 0, "tokens": 0, "in_parts": 0, "empty": 0}
    for path in paths:
        table = pyarrow.parquet.ParquetFile(path).read()
        columns = {name: table.column(name).to_numpy() for name in table.column_names if name not in ("id", "vector")}
        first = columns.get("chunk", np.zeros(len(table), np.int64)) == 0
        counts["rows"] += len(table)
        counts["documents"] += int(first.sum())
        counts["tokens"] += int(columns["tokens"].sum())
        counts["in_parts"] += int((first & (columns["parts"] > 1)).sum())
        counts["empty"] += int((columns["tokens"] == 0).sum())
    notes = documents.notes()
    if counts["in_parts"]:
        long = f"documents longer than n={info['max_length']:,} tokens"
        parts = "read in overlapping parts, whose vectors are merged"
        notes.append(f"{long}, {parts}: {counts['in_parts']:,} of {counts['documents']:,}")
    if counts["empty"]:
        notes.append(f"empty documents, whose vectors are 0: {counts['empty']:,} of {counts['documents']:,}")
    info = {"format": FORMAT, **info, **counts, "notes": notes, "made_with": sentence(command)}
    unfinished = out.with_name(f".{out.name}.unfinished")
    if out.suffix == ".parquet":
        schema = pyarrow.parquet.read_schema(paths[0]).with_metadata({INFO: json.dumps(info)})
        with pyarrow.parquet.ParquetWriter(unfinished, schema) as writer:
            for path in paths:
                writer.write_table(pyarrow.parquet.ParquetFile(path).read().replace_schema_metadata(schema.metadata))
    else:
        ids, description = paths_beside(out)
        shape = (counts["rows"], info["dimension"])
        array, row = np.lib.format.open_memmap(unfinished, "w+", np.float32, shape), 0
        with (lines := ids.with_name(f".{ids.name}.unfinished")).open("w", encoding="utf-8") as file:
            for path in paths:
                table = pyarrow.parquet.ParquetFile(path).read()
                array[row : row + len(table)] = values_of(table)
                row += len(table)
                for entry in table.drop_columns("vector").to_pylist():
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        array.flush()
        lines.replace(ids)
        write_file(description, json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(out)
    for path in (*folder.glob("*.parquet"), folder / "run.json"):
        path.unlink()
    (folder / ".lock").unlink(missing_ok=True)
    folder.rmdir()
    written = counted(counts["rows"], "chunk" if info["late_chunks"] else "vector")
    for note in (f"{written} of {counted(counts['documents'], 'document')} in {out}", *notes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
