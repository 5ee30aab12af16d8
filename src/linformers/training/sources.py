"""Text and tables as they lie on disk: plain, gz or xz; txt, jsonl, csv and parquet; single files and folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".md", ".rst", ".py")
PACKERS = {".gz": gzip.open, ".xz": lzma.open}
MOST = 2**20  # characters of a line, or of a document that is cut from a text, or twice as many

OnRead = Callable[[int], None]  # hears how many bytes of a file on disk have been read


def kind(path: Path) -> str:
    """The suffix that says what a file holds, without that of its compression: `.jsonl` for `a.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKERS else path.suffix.lower()


def find_files(sources: str | Path | Sequence[str | Path], name: str = "source") -> list[Path]:
    """The files named, and in folders all files of a known kind, in the order of their names.

    `name` is what an error calls a source.
    """
    files: list[Path] = []
    for source in map(Path, [sources] if isinstance(sources, str | Path) else sources):
        if source.is_dir():
            found = sorted(p for p in source.rglob("*") if p.is_file() and kind(p) in TABLES + TEXTS)
            if not found:
                raise UserError(f"folder {source} has no file of a known kind ({', '.join(TEXTS + TABLES)})")
            files += found
        elif not source.exists():
            raise UserError(f"{name} {str(source)!r} does not exist")
        elif kind(source) not in TABLES + TEXTS:
            raise UserError(f"file {source} is of no known kind ({', '.join(TEXTS + TABLES)}, plain, .gz or .xz)")
        else:
            files.append(source)
    return files


@contextmanager
def open_text(path: Path, on_read: OnRead | None = None) -> Iterator[TextIO]:
    """A file opened for reading as UTF-8, whether it is compressed or not."""
    unpack: Any = PACKERS.get(path.suffix.lower(), io.BufferedReader)
    with io.BufferedReader(_Metered(path, on_read), 2**16) as disk, unpack(disk) as data:
        try:
            # A byte order mark, as some editors write it, is no part of the first word (nor of a column's name).
            yield io.TextIOWrapper(data, encoding="utf-8-sig", errors="replace", newline="")
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, csv.Error) as error:
            raise UserError(f"{path} is damaged or not what its name says: {error}") from None


def rows(path: Path, columns: Sequence[str], on_read: OnRead | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a table, with the columns asked for; a missing column is an error that names those there are."""
    if kind(path) == ".parquet":
        yield from _parquet_rows(path, columns, on_read)
        return
    with open_text(path, on_read) as file:
        lines: Iterator[dict[str, Any]]
        if kind(path) == ".jsonl":
            lines = (_object(path, number, line) for number, line in enumerate(file, 1) if line.strip())
        else:
            csv.field_size_limit(2**31 - 1)
            lines = csv.DictReader(file, delimiter="\t" if kind(path) == ".tsv" else ",")
        for row in lines:
            _check_columns(path, columns, row)
            yield {name: row[name] for name in columns}


def documents(path: Path, text_column: str = "text", on_read: OnRead | None = None) -> Iterator[str]:
    """The texts of a file: a row of a table each, or the whole of a text file, cut at blank lines if it is large."""
    if kind(path) in TABLES:
        for row in rows(path, [text_column], on_read):
            text = row[text_column]
            if text is not None and str(text).strip():
                yield str(text)
        return
    with open_text(path, on_read) as file:
        yield from _paragraphs(_lines(path, file))


def column_names(path: Path) -> list[str]:
    """The columns of a table, from its head."""
    if kind(path) == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    with open_text(path) as file:
        if kind(path) == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    return list(_object(path, number, line))
            return []
        return list(csv.DictReader(file, delimiter="\t" if kind(path) == ".tsv" else ",").fieldnames or [])


class _Metered(io.FileIO):
    """A file on disk that says how much of it has been read."""

    def __init__(self, path: Path, on_read: OnRead | None):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        if self.on_read:
            self.on_read(self.tell())
        return count


def _parquet_rows(path: Path, columns: Sequence[str], on_read: OnRead | None) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        # With a buffer, a column is read as it is needed and not all of a row group at once.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is damaged or not what its name says: {error}") from None
    with file:
        _check_columns(path, columns, file.schema_arrow.names)
        done = 0
        for batch in file.iter_batches(batch_size=16, columns=list(columns)):
            yield from batch.to_pylist()
            done += batch.num_rows
            if on_read:
                on_read(path.stat().st_size * done // file.metadata.num_rows)


def _check_columns(path: Path, columns: Sequence[str], present: Any) -> None:
    for name in columns:
        if name not in present:
            raise UserError(f"{path} has no column {name!r}; its columns are {', '.join(map(repr, present))}")


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}, is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}, is no JSON object")
    return {name: _whole(value) if isinstance(value, str) else value for name, value in row.items()}


def _whole(text: str) -> str:
    """A text that can be written: json can spell half a character, which has no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a text, in parts if they are long; what no text has is an error."""
    for line in iter(lambda: file.readline(MOST), ""):
        if "\0" in line:
            raise UserError(f"{path} is no text in UTF-8: it has NUL bytes")
        yield line


def _paragraphs(lines: Iterator[str], most: int = MOST) -> Iterator[str]:
    """The whole text as one document or, from `most` characters on, pieces that end at a blank line if there is one."""
    piece = io.StringIO()
    for line in lines:
        if piece.tell() >= most and (not line.strip() or piece.tell() >= 2 * most):
            yield piece.getvalue()
            piece = io.StringIO()
        piece.write(line)
    if piece.getvalue().strip():
        yield piece.getvalue()
