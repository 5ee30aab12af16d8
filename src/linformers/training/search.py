"""`linformers search`: the documents whose vectors are nearest to a query, each with its best passage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from rich.console import Console

from ..checks import check_size
from ..errors import UserError
from ..files import parse_json, read_json
from ..progress import Bars, progress
from ..shipped import ENGLISH
from . import checkpoints
from .documents import Documents
from .embed import FORMAT, INFO, Embedder, Settings, paths_beside, values_of

ROWS_AT_ONCE = 2**16
PASSAGE = 128  # tokens of a passage of a document that has one vector
KEYS = (
    "format",
    "model",
    "model_hash",
    "dimension",
    "rows",
    "documents",
    "pooling",
    "late_chunks",
    "folder",
    "sources",
    "text_column",
    "id_column",
)


@dataclass(frozen=True)
class Index:
    """A file of vectors as `embed_files` writes it."""

    path: Path
    info: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Index:
        if path.suffix == ".parquet":
            try:
                metadata = pyarrow.parquet.read_schema(path).metadata or {}
            except (pyarrow.ArrowException, OSError) as error:
                raise UserError(f"{path} is damaged or not what its name says: {str(error).splitlines()[0]}") from None
            if INFO not in metadata:
                raise UserError(f"{path} does not say how it was made: it is not a file of linformers embed")
            info = parse_json(metadata[INFO], path)
        else:
            name = path.name.removesuffix(".json").removesuffix(".ids.jsonl") + ".npy"
            if path.suffix in (".json", ".jsonl") and (vectors := path.with_name(name)).exists():
                raise UserError(f"{path} only describes the vectors in {vectors}: search that file")
            ids, description = paths_beside(path)
            for own in (ids, description):
                if path.suffix != ".npy" or not own.exists():
                    raise UserError(f"{path} has no {own.name} beside it: it is not a file of linformers embed")
            info = read_json(description)
        if info.get("format") != FORMAT or any(key not in info for key in KEYS):
            raise UserError(
                f"{path} has a description of format {info.get('format')!r}, expected {FORMAT}: embed again"
            )
        return cls(path, info)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors, some rows at a time."""
        if self.path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=["vector"]):
                    yield values_of(pyarrow.table(batch))
            return
        try:
            vectors = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(f"{self.path} is damaged: {error}") from None
        if vectors.shape != (expected := (self.info["rows"], self.info["dimension"])):
            raise UserError(f"{self.path} has the shape {vectors.shape}, but its description says {expected}")
        for start in range(0, len(vectors), ROWS_AT_ONCE):
            yield vectors[start : start + ROWS_AT_ONCE]

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is known about each row, such as its id."""
        if self.path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(self.path) as file:
                names = [name for name in file.schema_arrow.names if name != "vector"]
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                    yield from batch.to_pylist()
            return
        path = paths_beside(self.path)[0]
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield parse_json(line, f"{path}, line {number}")

    def scores(self, query: np.ndarray) -> np.ndarray:
        """The cosine of each vector with a query of length 1; 0 for a vector of 0."""
        found = []
        for block in self.blocks():
            norms = np.linalg.norm(block, axis=1)
            found.append((block @ query) / np.where(norms > 0, norms, 1))
        return np.concatenate(found)

    def nearest(self, query: np.ndarray, best: int) -> list[dict[str, Any]]:
        """The best documents: the number and the best row of each, with its score."""
        scores = self.scores(query)
        rows = np.arange(len(scores))
        if self.info["late_chunks"]:  # the rows of a document are neighbors
            firsts = np.array([row["chunk"] == 0 for row in self.rows()])
            documents = firsts.cumsum() - 1
            rows = np.lexsort((-scores, documents))[np.flatnonzero(firsts)]  # the best row of each document
        best = min(best, len(rows))
        chosen = np.argpartition(-scores[rows], best - 1)[:best]
        chosen = chosen[np.argsort(-scores[rows][chosen], kind="stable")]
        wanted = {int(rows[document]): rank for rank, document in enumerate(chosen)}
        found: list[dict[str, Any]] = [{} for _ in chosen]
        for number, row in enumerate(self.rows()):
            if number in wanted:
                rank = wanted[number]
                found[rank] = {"document": int(chosen[rank]), "score": float(scores[number]), **row}
        return found


def search(
    vectors: Path,
    *,
    query: str,
    model: Path | None = None,
    best: int = 5,
    passages: bool = True,
    json: bool = False,
    console: Console,
    terminal: Console | None = None,
) -> list[dict[str, Any]]:
    """Print and return the documents nearest to a query, each with its `score`, `id` and best `passage`.

    `terminal`, if it is one, shows the progress of reading documents again for their passages.
    """
    check_size("best", best)
    index = Index.open(vectors)
    if not query.strip():
        raise UserError("query is empty: say in words what to look for")
    embedder = Embedder(_model_of(index, model), _settings(index, prompt="query"))
    found = index.nearest(embedder.embed([query])[0], best)
    if passages:
        hidden = terminal is None or not terminal.is_terminal
        with progress(terminal or console, transient=True, disable=hidden) as bars:
            add_passages(index, embedder, query, found, bars)
    for rank, entry in enumerate(found, 1):
        shown = {name: entry[name] for name in ("id", "score", "passage", "start", "end") if name in entry}
        if json:
            console.print(
                dumps({"rank": rank, **shown}, ensure_ascii=False), markup=False, highlight=False, soft_wrap=True
            )
            continue
        console.print(f"{rank}. {entry['id']}  {entry['score']:.3f}", markup=False, highlight=False, soft_wrap=True)
        if "passage" in entry:
            passage = " ".join(entry["passage"].split())
            console.print(f"   {passage}", markup=False, highlight=False, style="dim")
    return found


def _model_of(index: Index, model: Path | None) -> Path:
    """The folder of the model that made the vectors."""
    said = index.info["model"]
    folder = model or (ENGLISH if said == "bundled" else Path(said))
    if not folder.is_dir():
        raise UserError(f"{index.path} was made with the model {said!r}, which is not there: pass its folder as model")
    if checkpoints.model_hash(folder) != index.info["model_hash"]:
        was = f"made with another model, {said!r} (sha256 {index.info['model_hash'][:12]}…)"
        raise UserError(f"{index.path} was {was}, than model={str(folder)!r}: embed the documents with this one")
    return folder


def _settings(index: Index, **changes: Any) -> Settings:
    return Settings(pooling=index.info["pooling"], **changes)


def add_passages(index: Index, embedder: Embedder, query: str, found: list[dict[str, Any]], bars: Bars) -> None:
    """Add the best passage of each document that can still be read, with the characters where it begins and ends.

    A vector of a chunk names its passage. A document with one vector is read once more, in late chunks.
    """
    texts = _texts(index, {entry["document"]: entry["id"] for entry in found}, bars)
    entries = [entry for entry in found if texts.get(entry["document"], "").strip()]
    if not index.info["late_chunks"] and entries:
        chunked = index.info["pooling"] == "mean"
        reader = embedder.with_settings(Settings(pooling="mean", late_chunks=PASSAGE))
        vector = embedder.embed([query])[0]
        for entry in bars.track(entries, description="finding the best passages"):
            text = texts[entry["document"]]
            values, spans = reader.chunks(text)
            if not chunked:  # the first token of each passage, which is read alone
                values = np.asarray(embedder.embed([text[start:stop] for start, stop in spans]))
            entry["start"], entry["end"] = map(int, spans[int(np.argmax(values @ vector))])
    for entry in entries:
        text = texts[entry["document"]]
        entry["start"], entry["end"] = whole_words(text, entry["start"], entry["end"])
        entry["passage"] = text[entry["start"] : entry["end"]]


def whole_words(text: str, start: int, stop: int, most: int = 30) -> tuple[int, int]:
    """The characters of a passage and of the words that it cuts, of which it adds at most `most` on each side."""
    before, after = text[max(0, start - most) : start], text[stop : stop + most]
    if not text[start : start + 1].isspace():
        start -= len(re.findall(r"\S*$", before)[0])
    if not text[stop - 1 : stop].isspace():
        stop += len(re.findall(r"^\S*", after)[0])
    return start, stop


def _texts(index: Index, wanted: dict[int, str], bars: Bars) -> dict[int, str]:
    """The texts of documents by their numbers, if they can be read and still have the same ids."""
    info = index.info
    try:
        folder = Path(info["folder"])  # where the command ran
        sources = [folder / source for source in info["sources"]]
        documents = Documents(sources, info["text_column"], info["id_column"])
        count = max(wanted, default=-1) + 1
        some = bars.track(islice(enumerate(documents), count), count, description="reading the documents")
        found = {number: own for number, own in some if number in wanted}
        return {n: own.text for n, own in found.items() if own.id in (wanted[n], str(folder / wanted[n]))}
    except UserError:  # the vectors are there, but the documents are gone
        return {}
