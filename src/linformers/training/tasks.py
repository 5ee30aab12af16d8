"""Section 5.2's tasks and any labelled table like them: read and split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_choice, check_share
from ..errors import UserError
from . import sources

HELD_OUT = 0.05
_KINDS = f"{', '.join(sources.TABLES)}, plain, .gz or .xz"


@dataclass(frozen=True)
class StandIn:
    """Files that serve where a task's own are missing, and what must then be said beside each number.

    Args:
        suffix: What follows the split in their names; `*` stands for anything.
        note: How they differ from the task's own.
        lower_case: Whether the training texts are lower-cased, so that the reported ones have to be too.
    """

    suffix: str
    note: str
    lower_case: bool = False


@dataclass(frozen=True)
class Task:
    """A classification task: which columns of which files.

    Args:
        name: The task's folder under the data folder.
        text_columns: One column of texts, or two for pairs.
        label_column: The column of labels.
        label_names: The names of labels 0, 1, ...; None takes them from the training set.
        train: A split's name, or a file.
        validation: What models are selected on; None holds 5% of the training set out.
        test: What is reported; None holds another 5% out.
        hub: Name and configuration on the hub.
        stand_in: What serves where the folder has not the task's own files.
        note: What must be said beside each number.
    """

    name: str
    text_columns: tuple[str, ...]
    label_column: str = "label"
    label_names: tuple[str, ...] | None = None
    train: str | Path = "train"
    validation: str | Path | None = None
    test: str | Path | None = "validation"
    hub: tuple[str, str | None] | None = None
    stand_in: StandIn | None = None
    note: str = ""


# GLUE keeps the labels of its test sets to itself, so the paper reports on the validation sets. Models are never
# selected on what is reported: that is done on a part of the training set.
TASKS = {
    task.name: task
    for task in (
        Task("sst2", ("sentence",), label_names=("negative", "positive"), hub=("nyu-mll/glue", "sst2")),
        Task("imdb", ("text",), label_names=("negative", "positive"), test="test", hub=("stanfordnlp/imdb", None)),
        Task(
            "qnli",
            ("question", "sentence"),
            label_names=("entailment", "not_entailment"),
            hub=("nyu-mll/glue", "qnli"),
            stand_in=StandIn(
                "_reconstructed_from_squad*",
                "train is a reconstruction from SQuAD, lower-cased; not GLUE's",
                lower_case=True,
            ),
        ),
        Task(
            "qqp",
            ("question1", "question2"),
            label_names=("not_duplicate", "duplicate"),
            hub=("nyu-mll/glue", "qqp"),
            stand_in=StandIn("_subset", "a subset of Quora's pairs with a split of its own; not GLUE's"),
        ),
    )
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts, or pairs of texts, and their labels (int64)."""

    texts: list[str]
    pairs: list[str] | None
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task's three sets; `reported_on` names the file behind `test`, and `note` belongs beside each number."""

    name: str
    train: Examples
    validation: Examples
    test: Examples
    label_names: list[str]
    reported_on: str
    note: str

    def hash(self) -> str:
        """What tells this data from other data: all texts and labels of all sets."""
        digest = blake2b(repr((self.label_names, self.reported_on)).encode(), digest_size=16)
        for examples in (self.train, self.validation, self.test):
            for text in chain(examples.texts, examples.pairs or ()):
                digest.update(text.encode() + b"\0")
            digest.update(examples.labels.tobytes())
        return digest.hexdigest()


def labelled_file(path: Path, text_columns: Sequence[str], label_column: str, label_names: Sequence[str]) -> TaskData:
    """All rows of a labelled table, for a model that knows the labels already."""
    task = custom_task(path, text_columns=text_columns, label_column=label_column)
    source = _find(task, None, path)
    rows = _examples(task, source, _read(task, source), {name: number for number, name in enumerate(label_names)})
    note = "all rows of the file; of a model that was trained on some of them, this says little"
    return TaskData(task.name, rows, rows, rows, list(label_names), path.name, note)


def custom_task(
    train: Path,
    *,
    test: Path | None = None,
    validation: Path | None = None,
    text_columns: Sequence[str] = ("text",),
    label_column: str = "label",
) -> Task:
    """The task that tables of one's own make; without `test`, `validation` or a part of `train` is reported."""
    for argument, path in (("train", train), ("validation", validation), ("test", test)):
        if path is not None and not path.is_file():
            raise UserError(f"{argument}={str(path)!r} is no file")
        if path is not None and sources.kind(path) not in sources.TABLES:
            raise UserError(f"{argument}={str(path)!r} is no table ({_KINDS})")
    if isinstance(text_columns, str) or len(text_columns) not in (1, 2):
        raise UserError(f"text_columns={text_columns!r} must be one column, such as ['text'], or two for pairs")
    if len({*text_columns, label_column}) != len(text_columns) + 1:
        raise UserError(f"text_columns={list(text_columns)!r} and label_column={label_column!r} must all differ")
    note = ""
    if test is None and validation is None:
        note = f"no test file: reported on 5% held out of {train.name}, selected on another 5%"
    elif test is None and validation is not None:
        note = f"no test file: reported on {validation.name}, selected on 5% held out of {train.name}"
        test, validation = validation, None
    name = train.name.split(".")[0]
    return Task(name, tuple(text_columns), label_column, None, train, validation, test, note=note)


def load(task: Task | str, data: Path | None = None) -> TaskData:
    """The sets of a task: from `data/<task>/`, from the hub where there is no `data`, or from the task's own files."""
    if isinstance(task, str):
        check_choice("task", task, TASKS)
        task = TASKS[task]
    source = _find(task, data, task.train)
    table = _read(task, source)
    names = list(task.label_names or _classes(table.labels))
    numbers = {name: number for number, name in enumerate(names)}
    if task.label_names:
        numbers |= {str(number): number for number in range(len(names))}
    whole = _examples(task, source, table, numbers)
    if len(np.unique(whole.labels)) == 1:
        raise UserError(
            f"{source.where} has the single label {table.labels[0]!r} in column {task.label_column!r}; "
            "a classifier needs two or more"
        )

    kept = np.ones(len(whole), dtype=bool)
    others = []
    for part, split in enumerate((task.validation, task.test)):
        if split is None:
            chosen = held_out(whole.texts, HELD_OUT, part)
            kept &= ~chosen
            others.append((source._replace(name=f"5% of {source.name}"), _take(whole, chosen)))
        else:
            other = _find(task, data, split)
            others.append((other, _examples(task, other, _read(task, other), numbers)))
    train, ((_, validation), (reported, test)) = _take(whole, kept), others
    if not (len(train) and len(validation) and len(test)):
        raise UserError(
            f"{source.where} has {len(whole)} rows, too few different ones to hold out 5% of them; "
            "give more, or a validation and a test file"
        )

    note = task.note
    if task.stand_in and (source.stands_in or reported.stands_in):
        note = task.stand_in.note
    if task.stand_in and task.stand_in.lower_case and source.stands_in:
        test = Examples([t.lower() for t in test.texts], test.pairs and [t.lower() for t in test.pairs], test.labels)
    return TaskData(task.name, train, validation, test, names, reported.name, note)


def held_out(texts: Sequence[str], share: float = HELD_OUT, part: int = 0) -> np.ndarray:
    """Which texts are held out: a share of them that depends on the texts alone; parts of one share are disjoint.

    Equal texts are on the same side, whatever the order, the seed and the machine.
    """
    check_share("share", share)
    # Copies of one data set differ in the space at the end of a text.
    digests = (blake2b(text.strip().encode(), digest_size=8).digest() for text in texts)
    places = np.array([int.from_bytes(digest, "big") / 2**64 for digest in digests])
    return (part * share <= places) & (places < (part + 1) * share)


class _Source(NamedTuple):
    """The rows of a split: what errors and what results call them, and how to get the columns asked for."""

    where: str
    name: str
    rows: Callable[[Sequence[str]], Iterable[Mapping[str, Any]]]
    stands_in: bool = False


class _Table(NamedTuple):
    texts: list[str]
    pairs: list[str] | None
    labels: list[str]


def _find(task: Task, data: Path | None, split: str | Path) -> _Source:
    if isinstance(split, Path):
        if data is not None:
            raise UserError(f"data={str(data)!r} has no effect on task {task.name!r}, which names its own files")
        return _Source(str(split), split.name, partial(sources.rows, split))
    if data is None:
        return _from_hub(task, split)
    folder = Path(data) / task.name
    if not folder.is_dir():
        raise UserError(f"data={str(data)!r} has no folder {task.name!r}")
    names = [split] + ([split + task.stand_in.suffix] if task.stand_in else [])
    tables = sorted(path for path in folder.iterdir() if sources.kind(path) in sources.TABLES)
    for name in names:
        found = [path for path in tables if fnmatchcase(path.name.split(".")[0], name)]
        if len(found) > 1:
            raise UserError(f"{folder} has several files for {name!r}: {', '.join(p.name for p in found)}; keep one")
        if found:
            return _Source(str(found[0]), found[0].name, partial(sources.rows, found[0]), stands_in=name != split)
    raise UserError(f"{folder} has no table {' or '.join(map(repr, names))} ({_KINDS})")


def _from_hub(task: Task, split: str) -> _Source:
    if task.hub is None:
        raise UserError(f"task {task.name!r} is not on the hub: pass the folder of its files as data")
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"task {task.name!r} comes from the hub, which takes the package datasets: "
            "pip install 'linformers[hub]', or pass --data DIR"
        ) from None
    path, config = task.hub
    name = "/".join(filter(None, (path, config, split)))
    rows = datasets.load_dataset(path, config, split=split)
    return _Source(name, name, lambda columns: rows.select_columns(list(columns)))


def _read(task: Task, source: _Source) -> _Table:
    columns: list[list[str]] = [[] for _ in task.text_columns]
    labels = []
    for number, row in enumerate(source.rows([*task.text_columns, task.label_column]), 1):
        for name, column in zip(task.text_columns, columns, strict=True):
            text = "" if row[name] is None else row[name]
            if not isinstance(text, str):
                raise UserError(f"{source.where} has {text!r} in row {number}, column {name!r}, which is no text")
            column.append(text)
        label = row[task.label_column]
        if isinstance(label, float) and label.is_integer():
            label = int(label)  # pandas writes a column of integers with gaps as floats
        if not isinstance(label, str | int) or not str(label).strip():
            raise UserError(
                f"{source.where} has {label!r} in row {number}, column {task.label_column!r}; "
                "a label is text or a whole number"
            )
        labels.append(str(label).strip())
    if not labels:
        raise UserError(f"{source.where} has no rows")
    for name, column in zip(task.text_columns, columns, strict=True):
        # Single rows may lack a text, as some of Quora's pairs do.
        if not any(map(str.strip, column)):
            raise UserError(f"{source.where} has no text in column {name!r}: each of its {len(column)} rows is empty")
    return _Table(columns[0], columns[1] if len(columns) > 1 else None, labels)


def _classes(labels: Iterable[str]) -> list[str]:
    """The labels there are, sorted; as numbers if all of them are, so that 10 follows 9."""
    classes = sorted(set(labels))
    return sorted(classes, key=int) if all(re.fullmatch(r"-?\d+", name) for name in classes) else classes


def _examples(task: Task, source: _Source, table: _Table, numbers: Mapping[str, int]) -> Examples:
    for label in table.labels:
        if label not in numbers:
            known = ", ".join(map(repr, list(numbers)[:10])) + (", ..." if len(numbers) > 10 else "")
            raise UserError(
                f"{source.where} has the label {label!r} in column {task.label_column!r}, which is not one of {known}"
            )
    return Examples(table.texts, table.pairs, np.array([numbers[label] for label in table.labels], dtype=np.int64))


def _take(examples: Examples, chosen: np.ndarray) -> Examples:
    texts = list(compress(examples.texts, chosen))
    pairs = None if examples.pairs is None else list(compress(examples.pairs, chosen))
    return Examples(texts, pairs, examples.labels[chosen])
