"""Documents to embed or to search: text files, folders of them, and tables with a text and an optional id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from . import data
from .data import COMPRESSIONS, TABLES, TEXTS

COMPRESSION = 3.5  # characters per byte of compressed text, about
NOT_TEXT = "was no text"


class Document(NamedTuple):
    """A text and its id, which a table or the path of a file gives."""

    id: str
    text: str


class Documents:
    """The documents of files and folders, in order.

    Nothing is lost: a row without text is an empty document. What is left out or replaced is counted in `notes`.
    """

    def __init__(
        self,
        sources: Sequence[str | Path],
        text_column: str = "text",
        id_column: str = "id",
        leave_out: Path | None = None,  # a folder
    ) -> None:
        self.sources, self.text_column, self.id_column = [Path(source) for source in sources], text_column, id_column
        found = data.find_files(list(self.sources), "source")
        self.files = [path for path in found if leave_out is None or leave_out.resolve() not in path.resolve().parents]
        self.named = {path for path in self.sources if path.is_file()}
        self.others = [
            path
            for folder in self.sources
            if folder.is_dir()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and data.file_type(path) not in TABLES + TEXTS and not path.name.startswith(".")
        ]
        self.counts: Counter[tuple[str, str]] = Counter()  # by a sentence about one and one about several
        self.firsts: dict[tuple[str, str], str] = {}
        for path in self.named & {*self.files}:
            if data.file_type(path) in TEXTS and _is_binary(path):
                raise UserError(f"{path} is not UTF-8 text: it has NUL bytes")

    def __iter__(self) -> Iterator[Document]:
        """All documents; reading them again counts again."""
        self.counts.clear()
        for path in self.files:
            if data.file_type(path) in TABLES:
                yield from self._rows(path)
            elif path not in self.named and _is_binary(path):
                self._count("file has NUL bytes and was left out", "files have NUL bytes and were left out", str(path))
            else:
                yield Document(str(path), data.whole_text(path, self._damaged))

    def _rows(self, path: Path) -> Iterator[Document]:
        """The documents of a table; without an id, a row has the name of its file and its number."""
        for number, row in enumerate(data.table_rows(path, [self.text_column], self._damaged), 1):
            text, own = row[self.text_column], row.get(self.id_column)
            where = f"{path}:{number}"
            if text is not None and not isinstance(text, str):
                kind = f"whose {self.text_column!r} is not text"
                self._count(f"row {kind} counts as empty", f"rows {kind} count as empty", where)
                text = None
            yield Document(where if own is None else str(own), text or "")

    def _damaged(self, where: str) -> None:
        self._count("line is not UTF-8: its wrong bytes became �", "lines are not UTF-8: wrong bytes became �", where)

    def _count(self, one: str, many: str, where: str) -> None:
        self.counts[one, many] += 1
        self.firsts.setdefault((one, many), where)

    def notes(self) -> list[str]:
        """One sentence for each thing that was left out or replaced, with the first example."""
        found = [f"{count:,} {kind[count > 1]}; the first: {self.firsts[kind]}" for kind, count in self.counts.items()]
        if self.others:
            which = "files of other types were" if len(self.others) > 1 else "file of another type was"
            found.append(f"{len(self.others):,} {which} left out; the first: {self.others[0]}")
        return found

    def characters(self) -> int:
        """About how many characters the documents have."""
        return max(1, round(sum(map(self._characters_of, self.files))))

    def _characters_of(self, path: Path) -> float:
        size = path.stat().st_size
        if path.suffix.lower() in COMPRESSIONS:
            return size * COMPRESSION
        if data.file_type(path) != ".parquet":
            return size
        import pyarrow.parquet

        try:
            groups = pyarrow.parquet.ParquetFile(path).metadata
            columns = (
                groups.row_group(i).column(j) for i in range(groups.num_row_groups) for j in range(groups.num_columns)
            )
            return sum(own.total_uncompressed_size for own in columns if own.path_in_schema == self.text_column)
        except (pyarrow.ArrowException, OSError):
            return size  # reading it will say what is wrong


def _is_binary(path: Path) -> bool:
    if path.suffix.lower() in COMPRESSIONS:
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(8192)
