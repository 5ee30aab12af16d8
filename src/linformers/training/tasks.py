"""Classification tasks: SST-2, IMDB, QNLI and QQP (section 5.2), and labeled tables. Read, split and scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import check_choice
from ..errors import UserError, counted
from . import data as files
from .rows import Example

HELD_OUT = 0.05
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
MOST_LABELS = 20  # of a table with few rows


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
    label_names: list[str]
    reported_on: str
    note: str

    def hash(self) -> str:
        """Identifies the content: all texts and labels."""
        content = (self.label_names, self.reported_on, self.train, self.validation, self.test)
        return blake2b(repr(content).encode(), digest_size=16).hexdigest()


def load(
    task: str,
    data: Path | None = None,
    *,
    test: Path | None = None,
    validation: Path | None = None,
    text: str = "text",
    label: str = "label",
) -> TaskData:
    """Load a named task, from its folder in `data` or from the hub, or the labeled table `task`.

    `validation` selects the checkpoint, and `test`, or else `validation`, gives the reported score. Sets that are
    missing are held out of the training set, 5% each.
    """
    if task in TASKS or not Path(task).suffix:
        check_choice("task", task, TASKS)
        given = {"test": test, "validation": validation, "text": text != "text", "label": label != "label"}
        for option, value in given.items():
            if value:
                raise UserError(f"{option} has no effect on task={task!r}, whose files and columns are known")
        tables = [_named_table(task, split, data) for split in ("train", TASKS[task].reported)]
        return _split(task, tables[0], None, tables[1], "", list(TASKS[task].label_names))
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
    return _split(path.name.split(".")[0], train, selected, reported, note)


def load_rows(path: Path, text: str, label: str, label_names: Sequence[str]) -> TaskData:
    """All rows of a labeled table, for a model that has been trained on these labels."""
    table = _file_table("task", path, text, label)
    rows = table.examples({name: i for i, name in enumerate(label_names)})
    note = _joined("all rows of the file; it must not be the training file", table.note)
    return TaskData(path.name.split(".")[0], rows, rows, rows, list(label_names), path.name, note)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


class _Table(NamedTuple):
    """Texts with the names of their labels; `where` is the source in messages, `name` in results."""

    where: str
    name: str
    rows: list[tuple[str, str | None, str]]
    blank: list[int]  # the numbers of rows without text, which are left out, as `predict` reports them as errors

    @property
    def note(self) -> str:
        if not self.blank:
            return ""
        numbers = ", ".join(map(str, self.blank[:10])) + (", …" if len(self.blank) > 10 else "")
        return f"left out {counted(len(self.blank), 'blank row')} of {self.name}: {numbers}"

    def examples(self, numbers: Mapping[str, int]) -> list[Example]:
        for _, _, label in self.rows:
            if label not in numbers:
                known = ", ".join(map(repr, list(numbers)[:10])) + (", ..." if len(numbers) > 10 else "")
                raise UserError(f"{self.where} has the label {label!r}, which is not one of {known}")
        return [Example(text, pair, numbers[label]) for text, pair, label in self.rows]


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
    rows: list[tuple[str, str | None, str]] = []
    blank: list[int] = []
    for number, row in enumerate(files.rows(where, [*text_columns, label_column], split), 1):
        texts = ["" if row[column] is None else row[column] for column in text_columns]  # some of Quora's are missing
        for column, text in zip(text_columns, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{where} has {text!r} in row {number}, column {column!r}, which is not text")
        if not any(text.strip() for text in texts):
            blank.append(number)
            continue
        label = row[label_column]
        if isinstance(label, float) and label.is_integer():
            label = int(label)  # pandas writes a column of integers with gaps as floats
        if not isinstance(label, str | int) or not str(label).strip():
            raise UserError(f"{where} has {label!r} in row {number}, column {label_column!r}, which is not a label")
        rows.append((texts[0], texts[1] if len(texts) > 1 else None, str(label).strip()))
    if not any(text.strip() for text, _, _ in rows) or not any(pair is None or pair.strip() for _, pair, _ in rows):
        raise UserError(f"{where} has no text in the columns {', '.join(map(repr, text_columns))}")
    return _Table(str(where), name, rows, blank)


def _split(
    name: str, train: _Table, validation: _Table | None, test: _Table | None, note: str, names: list[str] | None = None
) -> TaskData:
    """Number the labels, and hold out the sets that are not given."""
    numbers = {} if names is None else {str(number): number for number in range(len(names))}
    if names is None:
        names = sorted({label for _, _, label in train.rows})
        if all(re.fullmatch(r"-?\d+", name) for name in names):
            names.sort(key=int)
    numbers |= {label: number for number, label in enumerate(names)}
    examples = train.examples(numbers)
    _refuse_values(train.where, names, len(examples))
    if len({example.label for example in examples}) == 1:
        raise UserError(f"{train.where} has the single label {train.rows[0][-1]!r}; a classifier needs two or more")
    rest, sets = examples, []
    for part, table in enumerate((validation, test)):
        if table is None:
            sets.append([example for example in rest if held_out(example.text, part)])
            rest = [example for example in rest if not held_out(example.text, part)]
        else:
            sets.append(table.examples(numbers))
    if not (rest and all(sets)):
        raise UserError(
            f"{train.where} has {counted(len(examples), 'row')}, too few distinct ones to hold out 5% of them; "
            "add rows, or pass --validation and --test"
        )
    reported_on = f"{train.name}, held out" if test is None else test.name
    note = _joined(note, *(table.note for table in (train, validation, test) if table is not None))
    return TaskData(name, rest, sets[0], sets[1], names, reported_on, note)


def _refuse_values(where: str, names: Sequence[str], rows: int) -> None:
    """Refuse what looks like values, texts or several labels at once: a classifier would learn nothing from them."""
    shown = ", ".join(map(repr, names[:3]))
    if all(NUMBER.fullmatch(name) for name in names) and not all(name.lstrip("+-").isdecimal() for name in names):
        remedy = "finetune classifies: round them, or train LinformerForSequenceClassification with num_labels=1"
        raise UserError(f"{where} has {len(names)} different numbers as labels, such as {shown}; {remedy}")
    if len(names) > max(MOST_LABELS, rows // 2):
        raise UserError(f"{where} has {len(names)} different labels in {rows} rows, such as {shown}: is it the label?")


def held_out(text: str, part: int) -> bool:
    """Whether a text belongs to part 0, 1, … of 5% each, by its hash: equal texts stay together in any order."""
    # Copies of a data set differ in the space at the end of texts.
    digest = blake2b(text.strip().encode(), digest_size=8).digest()
    return part * HELD_OUT <= int.from_bytes(digest, "big") / 2**64 < (part + 1) * HELD_OUT


def classification_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and F1 of logits (rows, classes): F1 of class 1 of two, or the mean over all classes that occur."""
    if broken := int(np.isnan(logits).any(axis=1).sum()):
        raise UserError(f"{broken} of {len(logits)} rows have NaN logits: training diverged; lower the learning rate")
    predictions = logits.argmax(axis=1)
    classes = [1] if logits.shape[1] == 2 else np.union1d(predictions, labels)
    hits = [np.sum((predictions == c) & (labels == c)) for c in classes]
    sizes = [np.sum(predictions == c) + np.sum(labels == c) for c in classes]
    f1 = float(np.mean([2 * hit / max(size, 1) for hit, size in zip(hits, sizes, strict=True)]))
    return {"accuracy": float((predictions == labels).mean()), "f1": f1}


def f1_of(label_names: Sequence[str]) -> str:
    """The class that F1 is of."""
    return repr(label_names[1]) if len(label_names) == 2 else "all labels, their mean"


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; one value has no deviation."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def plus_minus(spread: Sequence[float | None], digits: int, scale: float = 1) -> str:
    """“0.91 ± 0.02” for a mean and its deviation; the mean alone if there is none."""
    return " ± ".join(f"{scale * value:.{digits}f}" for value in spread if value is not None)
