"""Tasks: SST-2, IMDB, QNLI and QQP (section 5.2), and labeled tables. Read and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_choice
from ..errors import UserError, counted
from . import data as files
from .labels import INTEGER, PROBLEMS, hint, how_to_split, problem_that_fits, refuse_values
from .rows import Example

HELD_OUT = 0.05


class Task(NamedTuple):
    """A named task. GLUE has no labels for its test sets, so the paper reports on its validation sets."""

    text_columns: tuple[str, ...]
    label_names: tuple[str, ...]
    hub: str  # the dataset, or dataset:config
    reported: str = "validation"


TASKS = {
    "sst2": Task(("sentence",), ("negative", "positive"), "nyu-mll/glue:sst2"),
    "imdb": Task(("text",), ("negative", "positive"), "stanfordnlp/imdb", reported="test"),
    "qnli": Task(("question", "sentence"), ("entailment", "not_entailment"), "nyu-mll/glue:qnli"),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), "nyu-mll/glue:qqp"),
}


@dataclass(frozen=True, eq=False)
class TaskData:
    """The three sets of a task; `reported_on` names the source of `test`, and `note` belongs next to each result."""

    name: str
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    label_names: list[str]  # for numbers, the name of their column
    reported_on: str
    note: str
    problem: str = "single"
    hint: str = ""  # what else the labels could be

    def hash(self) -> str:
        """Identifies the content: all texts and labels."""
        content = (self.label_names, self.reported_on, self.train, self.validation, self.test)
        return blake2b(repr(content).encode(), digest_size=16).hexdigest()

    def summary(self) -> str:
        """What is to be predicted."""
        labels: list[Any] = [example.label for example in self.train]
        if self.problem == "regression":
            found = f"regression, numbers from {min(labels):g} to {max(labels):g}"
        elif self.problem == "multi":
            mean = sum(map(len, labels)) / len(labels)
            found = f"multi-label classification, {len(self.label_names)} labels, {mean:.1f} a text on average"
        else:
            found = f"single-label classification, {len(self.label_names)} labels"
        return f"{found} ({self.hint})" if self.hint else found

    def targets(self, labels: Sequence[Any]) -> np.ndarray:
        """Labels of examples as a model takes them: class ids or numbers (b,), or 0 and 1 (b, labels)."""
        if self.problem != "multi":
            return np.array(labels)
        targets = np.zeros((len(labels), len(self.label_names)), np.float32)
        for row, own in zip(targets, labels, strict=True):
            row[list(own)] = 1
        return targets


def load(
    task: str,
    data: Path | None = None,
    *,
    test: Path | None = None,
    validation: Path | None = None,
    text: str = "text",
    label: str = "label",
    problem: str | None = None,
) -> TaskData:
    """Load a named task, from its folder in `data` or from the hub, or the labeled table `task`.

    `validation` selects the checkpoint, and `test`, or else `validation`, gives the reported score. Sets that are
    missing are held out of the training set, 5% each. `problem` is one of `PROBLEMS`, or what fits the labels.
    """
    if problem is not None:
        check_choice("problem", problem, PROBLEMS)
    if task in TASKS or not Path(task).suffix:
        check_choice("task", task, TASKS)
        given = {"test": test, "validation": validation, "text": text != "text", "label": label != "label"}
        for option, value in {**given, "problem": problem}.items():
            if value:
                raise UserError(f"{option} has no effect on task={task!r}, whose files and labels are known")
        tables = [_named_table(task, split, data) for split in ("train", TASKS[task].reported)]
        return _split(task, tables[0], None, tables[1], "", "single", list(TASKS[task].label_names))
    if data is not None:
        raise UserError(f"data={str(data)!r} has no effect on task={task!r}, which is a file")
    path = Path(task)
    train = _file_table("task", path, text, label)
    selected = None if validation is None else _file_table("validation", validation, text, label)
    reported = None if test is None else _file_table("test", test, text, label)
    note = ""
    if reported is None and selected is None:
        note = f"no test file: reported on about 5% held out of {path.name}, selected on another 5%"
    elif reported is None and selected is not None:
        note = f"no test file: reported on {selected.name}, selected on about 5% held out of {path.name}"
        selected, reported = None, selected
    return _split(path.name.split(".")[0], train, selected, reported, note, problem)


def load_rows(path: Path, text: str, label: str, label_names: Sequence[str], problem: str) -> TaskData:
    """All rows of a labeled table, for a model that has been trained on these labels."""
    table = _file_table("task", path, text, label)
    rows = table.examples(table.labels(problem), {name: i for i, name in enumerate(label_names)})
    note = _joined("all rows of the file; it must not be the training file", table.note)
    return TaskData(path.name.split(".")[0], rows, rows, rows, list(label_names), path.name, note, problem)


class _Row(NamedTuple):
    number: int
    text: str
    pair: str | None
    label: Any


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


class _Table(NamedTuple):
    """Texts with their labels; `where` is the source in messages, `name` in results."""

    where: str
    name: str
    label: str  # the column
    rows: list[_Row]
    blank: list[int]  # the numbers of rows without text, which are left out, as `predict` reports them as errors

    @property
    def note(self) -> str:
        if not self.blank:
            return ""
        numbers = ", ".join(map(str, self.blank[:10])) + (", …" if len(self.blank) > 10 else "")
        return f"left out {counted(len(self.blank), 'blank row')} of {self.name}: {numbers}"

    def labels(self, problem: str) -> list[Any]:
        """Names, lists of names, or numbers."""
        found = []
        for row in self.rows:
            if (label := PROBLEMS[problem].read(row.label)) is None:
                what = f"which is not {PROBLEMS[problem].what}"
                remedy = how_to_split(other.label for other in self.rows) if problem == "single" else ""
                place = f"row {row.number}, column {self.label!r}"
                raise UserError(f"{self.where} has {row.label!r} in {place}, {what}{remedy}")
            found.append(label)
        return found

    def examples(self, labels: Sequence[Any], ids: Mapping[str, int]) -> list[Example]:
        def id_of(name: str) -> int:
            if name not in ids:
                known = ", ".join(map(repr, list(ids)[:10])) + (", ..." if len(ids) > 10 else "")
                raise UserError(f"{self.where} has the label {name!r}, which is not one of {known}")
            return ids[name]

        found: list[Example] = []
        for row, label in zip(self.rows, labels, strict=True):
            is_list = isinstance(label, list)
            value = label if isinstance(label, float) else tuple(map(id_of, label)) if is_list else id_of(label)
            found.append(Example(row.text, row.pair, value))
        return found


def _named_table(task: str, split: str, data: Path | None) -> _Table:
    if data is None:
        return _table(TASKS[task].hub, f"{TASKS[task].hub}/{split}", TASKS[task].text_columns, "label", split)
    folder = data / task
    if not folder.is_dir():
        raise UserError(f"data={str(data)!r} has no folder {task!r}")
    tables = sorted(path for path in folder.glob(f"{split}.*") if files.file_type(path) in files.TABLES)
    if len(tables) != 1:
        names = ", ".join(path.name for path in tables) or "none"
        raise UserError(f"{folder} must have one table {split!r} ({files.FILE_TYPES}), but has {names}")
    return _table(tables[0], tables[0].name, TASKS[task].text_columns, "label")


def _file_table(argument: str, path: Path, text: str, label: str) -> _Table:
    columns = text.split(",")
    if not path.is_file() or files.file_type(path) not in files.TABLES:
        raise UserError(f"{argument}={str(path)!r} is not a table ({', '.join(files.TABLES)}; plain, .gz or .xz)")
    if len(columns) > 2 or len({*columns, label}) != len(columns) + 1:
        raise UserError(f"text={text!r} and label={label!r} must be one or two columns of text and another of labels")
    return _table(path, path.name, columns, label)


def _table(
    where: Path | str, name: str, text_columns: Sequence[str], label_column: str, split: str = "train"
) -> _Table:
    rows: list[_Row] = []
    blank: list[int] = []
    for number, row in enumerate(files.rows(where, [*text_columns, label_column], split), 1):
        texts = ["" if row[column] is None else row[column] for column in text_columns]  # some of Quora's are missing
        for column, text in zip(text_columns, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{where} has {text!r} in row {number}, column {column!r}, which is not text")
        if not any(text.strip() for text in texts):
            blank.append(number)
            continue
        rows.append(_Row(number, texts[0], texts[1] if len(texts) > 1 else None, row[label_column]))
    if not any(row.text.strip() for row in rows) or not any(row.pair is None or row.pair.strip() for row in rows):
        raise UserError(f"{where} has no text in the columns {', '.join(map(repr, text_columns))}")
    return _Table(str(where), name, label_column, rows, blank)


def _split(
    name: str,
    train: _Table,
    validation: _Table | None,
    test: _Table | None,
    note: str,
    problem: str | None,
    names: list[str] | None = None,
) -> TaskData:
    """Number the labels, and hold out the sets that are not given."""
    given, ids = problem is not None, {} if names is None else {str(number): number for number in range(len(names))}
    problem = problem or problem_that_fits([row.label for row in train.rows])
    labels = train.labels(problem)
    if problem == "regression":
        names = [train.label]
    elif names is None:
        names = _names(train, labels, problem, given)
    ids |= {label: number for number, label in enumerate(names)}
    examples = train.examples(labels, ids)
    rest, sets = examples, []
    for part, table in enumerate((validation, test)):
        if table is None:
            sets.append([example for example in rest if held_out(example.text, part)])
            rest = [example for example in rest if not held_out(example.text, part)]
        else:
            sets.append(table.examples(table.labels(problem), ids))
    if len({example.label for example in rest or examples}) == 1:
        needed = "two or more are needed to learn from"
        raise UserError(f"{train.where} has the single label {train.rows[0].label!r}; {needed}")
    if not (rest and all(sets)):
        raise UserError(
            f"{train.where} has {counted(len(examples), 'row')}, too few distinct ones to hold out 5% of them; "
            "add rows, or pass --validation and --test"
        )
    reported_on = f"{train.name}, held out" if test is None else test.name
    note = _joined(note, *(table.note for table in (train, validation, test) if table is not None))
    other = "" if given else hint(problem, names)
    return TaskData(name, rest, sets[0], sets[1], names, reported_on, note, problem, other)


def _names(train: _Table, labels: list[Any], problem: str, given: bool) -> list[str]:
    """The names of the labels in order; numbers in that of their values."""
    if problem == "multi" and max(map(len, labels)) < 2 and not any(isinstance(row.label, list) for row in train.rows):
        expected = "--problem multi expects lists, or labels separated by semicolons"
        raise UserError(f"{train.where} has no row with several labels: {expected}")
    every = list(chain.from_iterable(labels)) if problem == "multi" else labels
    names = sorted(set(every))
    if all(map(INTEGER.fullmatch, names)):
        names.sort(key=int)
    if not given:
        refuse_values(train.where, names, len(every))
    return names


def held_out(text: str, part: int) -> bool:
    """Whether a text belongs to part 0, 1, … of 5% each, by its hash: equal texts stay together in any order."""
    # Copies of a data set differ in the space at the end of texts.
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return part * HELD_OUT <= int.from_bytes(digest, "big") / 2**64 < (part + 1) * HELD_OUT


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; one value has no deviation."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def plus_minus(spread: Sequence[float | None], digits: int, scale: float = 1) -> str:
    """“0.91 ± 0.02” for a mean and its deviation; the mean alone if there is none."""
    return " ± ".join(f"{scale * value:.{digits}f}" for value in spread if value is not None)
