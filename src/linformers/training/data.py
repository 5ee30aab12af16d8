"""Text and tables: txt, jsonl, csv, tsv and parquet files, plain, gz or xz; and datasets on the hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".md", ".rst", ".py")
Sources = str | Path | Sequence[str | Path]
COMPRESSIONS = {".gz": gzip.open, ".xz": lzma.open}
FILE_TYPES = f"{', '.join(TEXTS + TABLES)}; plain, .gz or .xz"
# A text file of more characters is split into several documents, at a blank line where possible.
MAX_CHARACTERS = 2**20


def file_type(path: Path) -> str:
    """The suffix of a file without that of its compression: `.jsonl` for `a.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else path.suffix.lower()


def find_files(sources: Sources, name: str = "source") -> list[Path]:
    """The given files, and all files of a known type in the given folders, sorted; `name` is for error messages."""
    files: list[Path] = []
    for source in map(Path, [sources] if isinstance(sources, str | Path) else sources):
        if not source.exists():
            raise UserError(f"{name} {str(source)!r} does not exist")
        candidates = sorted(source.rglob("*")) if source.is_dir() else [source]
        supported = [path for path in candidates if path.is_file() and file_type(path) in TABLES + TEXTS]
        if not supported:
            raise UserError(f"{name} {str(source)!r} is not a supported file and contains none ({FILE_TYPES})")
        files += supported
    return files


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file, compressed or not, as UTF-8."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    decompress: Any = COMPRESSIONS.get(path.suffix.lower(), nullcontext)
    with raw, decompress(raw) as content:
        try:
            # utf-8-sig drops the byte order mark that some editors write.
            yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace", newline="")
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, csv.Error) as error:
            raise UserError(f"{path} is damaged or not what its name says: {error}") from None


def documents(source: Path | str, text_column: str = "text", split: str = "train") -> Iterator[str]:
    """The documents of a file or of a dataset on the hub, see `rows`; a large text is split at blank lines."""
    if isinstance(source, Path) and file_type(source) not in TABLES:
        with open_text(source) as file:
            yield from _split(source, file)
        return
    for row in rows(source, [text_column], split):
        text = row[text_column]
        if text is not None and str(text).strip():
            yield str(text)


def rows(source: Path | str, columns: Sequence[str], split: str = "train") -> Iterator[dict[str, Any]]:
    """The given columns of each row of a table, or of a dataset on the hub, `"name"` or `"name:config"`."""
    if isinstance(source, Path) and file_type(source) == ".parquet":
        yield from _parquet_rows(source, columns)
        return
    for row in _hub_rows(source, split) if isinstance(source, str) else _text_rows(source):
        _check_columns(source, columns, row)
        yield {name: row[name] for name in columns}


def _text_rows(path: Path) -> Iterator[dict[str, Any]]:
    with open_text(path) as file:
        if file_type(path) == ".jsonl":
            yield from (_json_object(path, number, line) for number, line in enumerate(file, 1) if line.strip())
        else:
            csv.field_size_limit(2**31 - 1)
            yield from csv.DictReader(file, delimiter="\t" if file_type(path) == ".tsv" else ",")


def _hub_rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source!r} is not a file; for hub datasets, pip install 'linformers[hub]'") from None
    path, _, config = source.partition(":")
    try:
        yield from datasets.load_dataset(path, config or None, split=split, streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{source!r} is not a file or folder, nor a dataset of the hub: {reason}") from None


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        # With a buffer, pyarrow reads a column piece by piece instead of a whole row group.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is damaged or not what its name says: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        _check_columns(path, columns, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=16, columns=list(columns)):
            yield from batch.to_pylist()


def _check_columns(where: object, columns: Sequence[str], present: Iterable[str]) -> None:
    for name in columns:
        if name not in present:
            raise UserError(f"{where} has no column {name!r}; its columns are {', '.join(map(repr, present))}")


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} is not a JSON object")
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}


def _split(path: Path, file: TextIO) -> Iterator[str]:
    """A text in pieces of at least `MAX_CHARACTERS`, except the last, that end before a blank line if there is one."""
    piece = io.StringIO()
    for line in iter(lambda: file.readline(MAX_CHARACTERS), ""):
        if "\0" in line:
            raise UserError(f"{path} is not UTF-8 text: it has NUL bytes")
        if piece.tell() >= MAX_CHARACTERS and (not line.strip() or piece.tell() >= 2 * MAX_CHARACTERS):
            yield piece.getvalue()
            piece = io.StringIO()
        piece.write(line)
    if piece.getvalue().strip():
        yield piece.getvalue()
