"""Text and tables: txt, jsonl, csv, tsv and parquet files, plain, gz or xz; and datasets on the hub."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ..errors import MissingColumnError, UserError
from ..files import parse_json

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".md", ".rst", ".py")
Sources = str | Path | Sequence[str | Path]
COMPRESSIONS = {".gz": gzip.open, ".xz": lzma.open}
FILE_TYPES = f"{', '.join(TEXTS + TABLES)}; plain, .gz or .xz"
# A text of more characters is split into several documents, at a blank line where possible.
MAX_CHARACTERS = 2**20
# A few bytes can expand to gigabytes. Limits: the characters of a row; and, for a column of a parquet row group, the
# larger of MAX_COLUMN bytes and MAX_EXPANSION times its size on disk.
MAX_ROW = 2**24
MAX_COLUMN = 2**24
MAX_EXPANSION = 50
XZ_MEMORY = 2**28  # that the header of an .xz file may ask for; xz -9 asks for 2**26


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
def open_text(path: Path, errors: str = "replace") -> Iterator[TextIO]:
    """Open a file, compressed or not, as UTF-8; `errors` is that of `open`."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    decompress: Any = COMPRESSIONS.get(path.suffix.lower(), nullcontext)
    with raw, decompress(raw) as content:
        try:
            if decompress is lzma.open:
                lzma.LZMADecompressor(memlimit=XZ_MEMORY).decompress(raw.peek(), max_length=1)
            # utf-8-sig drops the byte order mark that some editors write.
            yield io.TextIOWrapper(content, encoding="utf-8-sig", errors=errors, newline="")
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, csv.Error) as error:
            raise UserError(f"{path} is damaged or not what its name says: {error}") from None


def refuse(damage: str) -> NoReturn:
    raise UserError(damage)


def documents(
    source: Path | str, text_column: str = "text", split: str = "train", damaged: Callable[[str], None] = refuse
) -> Iterator[str]:
    """The documents of a file or of a dataset on the hub, see `rows`; a large text is split at blank lines.

    `damaged` is called for each line that is not UTF-8 and each row whose text is not a string. If it returns, each
    wrong byte becomes U+FFFD, and the row is skipped. Rows with a missing or blank text are skipped without a report.
    """
    for _, text in _titled(source, text_column, None, split, damaged):
        yield text


def titled_documents(source: Path, text_column: str = "text") -> Iterator[tuple[str | None, str]]:
    """The documents of a file, each with its title if it is in a table that has a column `title`."""
    return _titled(source, text_column, "title", "train", refuse)


def _titled(
    source: Path | str, text_column: str, title_column: str | None, split: str, damaged: Callable[[str], None]
) -> Iterator[tuple[str | None, str]]:
    """Of a text that is split, the first piece has the title."""
    if isinstance(source, Path) and file_type(source) not in TABLES:
        with open_text(source, "surrogateescape") as file:
            yield from ((None, piece) for piece in _split(_lines(source, file, MAX_CHARACTERS, damaged)))
        return
    optional = [] if title_column is None else [title_column]
    for where, row in _rows(source, [text_column], split, damaged, optional):
        text, title = row[text_column], row.get(title_column or "")
        title = title.strip() or None if isinstance(title, str) else None
        if text is not None and not isinstance(text, str):
            damaged(f"{where}: {text_column!r} is of type {type(text).__name__}, not text")
        elif text and len(text) > MAX_CHARACTERS:
            pieces = _split(io.StringIO(text, newline=""))
            yield from ((None if number else title, piece) for number, piece in enumerate(pieces))
        elif text and text.strip():
            yield title, text


def rows(source: Path | str, columns: Sequence[str], split: str = "train") -> Iterator[dict[str, Any]]:
    """The given columns of each row of a table, or of a dataset on the hub, `"name"` or `"name:config"`."""
    for _, row in _rows(source, columns, split, refuse):
        yield row


def table_rows(path: Path, columns: Sequence[str], damaged: Callable[[str], None] = refuse) -> Iterator[dict[str, Any]]:
    """All columns of each row of a table, which must have the given ones."""
    for _, row in _rows(path, columns, "train", damaged, optional=None):
        yield row


def whole_text(path: Path, damaged: Callable[[str], None] = refuse) -> str:
    """The text of a file, which must have less than `MAX_ROW` characters."""
    with open_text(path, "surrogateescape") as file:
        parts, size = [], 0
        for line in _lines(path, file, MAX_ROW, damaged):
            size += len(line)
            if size >= MAX_ROW:
                raise UserError(f"{path} has {MAX_ROW:,} characters or more: split it")
            parts.append(line)
    return "".join(parts)


def _rows(
    source: Path | str,
    columns: Sequence[str],
    split: str,
    damaged: Callable[[str], None],
    optional: Sequence[str] | None = (),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row is, and the given columns of it; those that are optional may be missing. `None`: all others."""
    found: Iterator[tuple[str, dict[str, Any]]]
    if isinstance(source, str):
        found = ((f"{source}, row {number}", row) for number, row in enumerate(_hub_rows(source, split), 1))
    elif file_type(source) == ".parquet":
        table = _parquet_rows(source, columns, optional)
        found = ((f"{source}, row {number}", row) for number, row in enumerate(table, 1))
    else:
        found = _text_rows(source, damaged)
    for where, row in found:
        _check_columns(source, columns, row)
        yield where, row if optional is None else {name: row[name] for name in (*columns, *optional) if name in row}


def _text_rows(path: Path, damaged: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_text(path, "surrogateescape") as file:
        size = number = 0

        def lines() -> Iterator[str]:
            nonlocal size, number
            for number, line in enumerate(_lines(path, file, MAX_ROW, damaged), 1):
                size += len(line)
                if size >= MAX_ROW:
                    raise UserError(f"{path}, line {number}: a row has more than {MAX_ROW:,} characters")
                yield line

        if file_type(path) == ".jsonl":
            found: Iterable[dict[str, Any]] = (_json_row(path, number, line) for line in lines() if line.strip())
        else:
            csv.field_size_limit(MAX_ROW)
            found = csv.DictReader(lines(), delimiter="\t" if file_type(path) == ".tsv" else ",")
        for row in found:
            yield f"{path}, line {number}", row
            size = 0


def _lines(path: Path, file: TextIO, most: int, damaged: Callable[[str], None]) -> Iterator[str]:
    """The lines of a file that is open with `surrogateescape`, cut after `most` characters."""
    for number, line in enumerate(iter(lambda: file.readline(most), ""), 1):
        if "\0" in line:
            raise UserError(f"{path}, line {number} is not UTF-8 text: it has NUL bytes")
        try:
            line.encode()
        except UnicodeEncodeError:
            damaged(f"{path}, line {number} is not UTF-8")
            yield line.encode(errors="surrogateescape").decode(errors="replace")
        else:
            yield line


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


def _parquet_rows(path: Path, columns: Sequence[str], optional: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        # With a buffer, pyarrow reads a column piece by piece instead of a whole row group.
        with pyarrow.parquet.ParquetFile(path, buffer_size=2**20) as file:
            _check_columns(path, columns, file.schema_arrow.names)
            names = file.schema_arrow.names
            columns = names if optional is None else [*columns, *(name for name in optional if name in names)]
            for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
                _check_expansion(path, columns, map(group.column, range(group.num_columns)))
            read, most = 0, max(MAX_COLUMN, MAX_EXPANSION * path.stat().st_size)
            for batch in file.iter_batches(batch_size=16, columns=columns):
                rows = batch.to_pylist()
                read += sum(len(value) for row in rows for value in row.values() if isinstance(value, str))
                if read > most:  # a value in a dictionary takes its space once, however often it occurs
                    raise UserError(f"{path} would expand to more than {most:,} characters: write it again")
                yield from rows
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not what its name says: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _check_expansion(path: Path, names: Sequence[str], columns: Iterable[Any]) -> None:
    for column in columns:
        name, stored, size = column.path_in_schema, column.total_compressed_size, column.total_uncompressed_size
        is_read = f"{name}.".startswith(tuple(f"{own}." for own in names))
        if is_read and size > max(MAX_COLUMN, MAX_EXPANSION * stored):
            raise UserError(f"{path} would expand {stored:,} bytes of column {name!r} to {size:,}: write it again")


def _check_columns(where: object, columns: Sequence[str], present: Iterable[str]) -> None:
    for name in columns:
        if name not in present:
            names = list(map(str, present))
            missing = f"{where} has no column {name!r}; its columns are {', '.join(map(repr, names))}"
            if any(";" in own for own in names):
                raise UserError(f"{missing}; its columns are separated by semicolons, not commas")
            raise MissingColumnError(missing)


def _json_row(path: Path, number: int, line: str) -> dict[str, Any]:
    row = parse_json(line, f"{path}, line {number}")
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}


def _split(lines: Iterable[str]) -> Iterator[str]:
    """A text in pieces of at least `MAX_CHARACTERS`, except the last, that end before a blank line if there is one."""
    piece = io.StringIO()
    for line in lines:
        if piece.tell() >= MAX_CHARACTERS and (not line.strip() or piece.tell() >= 2 * MAX_CHARACTERS):
            yield piece.getvalue()
            piece = io.StringIO()
        piece.write(line)
    if piece.getvalue().strip():
        yield piece.getvalue()
