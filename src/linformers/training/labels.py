"""What a label is: one class of several, any number of labels at once, or a number. Told apart, read and scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError

SEPARATOR = ";"  # of several labels in one string
LARGEST = 1e38  # that float32 can hold
MOST_LABELS = 20  # of a table with few rows
ROWS_PER_LABEL = 5  # on average, if there are more labels
INTEGER = re.compile(r"[-+]?\d+")


def class_name(value: Any) -> str | None:
    """A label's name, or None if the value is no label; 2.0 is 2, since pandas writes integers with gaps as floats."""
    if not isinstance(value, str | int | float) or value != value:
        return None
    return re.sub(r"^([-+]?\d+)\.0*$", r"\1", str(value).strip()) or None


def class_names(value: Any) -> list[str] | None:
    """The names in a list or in a string with semicolons, which may be empty."""
    if isinstance(value, str):
        value = [part for part in value.split(SEPARATOR) if part.strip()]
    names = [class_name(part) for part in value] if isinstance(value, list) else [None]
    return None if None in names else sorted({*map(str, names)})


def number(value: Any) -> float | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < LARGEST else None  # not NaN


class Problem(NamedTuple):
    """What to predict, which decides how labels are read and scored."""

    problem_type: str  # of transformers
    what: str  # a label is
    read: Callable[[Any], Any]  # returns None for what is no label
    metrics: Callable[[np.ndarray, np.ndarray], dict[str, float]]  # of logits (rows, labels) and labels
    scores: tuple[str, str]  # the names of the metrics; the first one selects the model
    higher_is_better: bool = True


def classification_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and F1 of labels (rows,): F1 of class 1 of two, or the mean over all classes that occur."""
    predictions = logits.argmax(axis=1)
    classes = [1] if logits.shape[1] == 2 else np.union1d(predictions, labels)
    hits = [np.sum((predictions == c) & (labels == c)) for c in classes]
    sizes = [np.sum(predictions == c) + np.sum(labels == c) for c in classes]
    f1 = float(np.mean([2 * hit / max(size, 1) for hit, size in zip(hits, sizes, strict=True)]))
    return {"accuracy": float((predictions == labels).mean()), "f1": f1}


def multi_label_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """F1 over all labels (rows, labels) of all rows together, and the share of rows without any wrong label."""
    predictions, labels = logits > 0, labels > 0  # a probability above 0.5
    size = predictions.sum() + labels.sum()
    f1 = 2 * np.sum(predictions & labels) / size if size else 1.0
    return {"micro_f1": float(f1), "exact_match": float((predictions == labels).all(axis=1).mean())}


def regression_metrics(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Mean absolute error and R² of values (rows, 1); if the labels (rows,) are all equal, R² is 1 or 0."""
    labels = labels.astype(np.float64)
    errors, spread = values[:, 0] - labels, labels - labels.mean()
    r2 = 1 - np.sum(errors**2) / np.sum(spread**2) if spread.any() else float(not errors.any())
    return {"mae": float(np.abs(errors).mean()), "r2": float(r2)}


PROBLEMS = {
    "single": Problem("single_label_classification", "a label", class_name, classification_metrics, ("accuracy", "f1")),
    "multi": Problem(
        "multi_label_classification", "a list of labels", class_names, multi_label_metrics, ("micro_f1", "exact_match")
    ),
    "regression": Problem("regression", "a number", number, regression_metrics, ("mae", "r2"), higher_is_better=False),
}
SCORES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "micro_f1": "micro F1",
    "exact_match": "exact match",
    "mae": "mean absolute error",
    "r2": "R²",
}


def problem_of(config: Any, model: object) -> str:
    """The problem that a model was trained for."""
    if config.problem_type == "regression" and config.num_labels != 1:
        raise UserError(f"model={str(model)!r} gives {config.num_labels} numbers for each text, expected one")
    types = {problem.problem_type: name for name, problem in PROBLEMS.items()}
    return types.get(config.problem_type, "single")


def scores_of(problem: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of a problem."""
    if broken := int(np.isnan(logits).any(axis=1).sum()):
        raise UserError(f"{broken} of {len(logits)} rows have NaN logits: training diverged; lower the learning rate")
    return PROBLEMS[problem].metrics(logits, labels)


def f1_of(problem: str, names: Sequence[str]) -> dict[str, str]:
    """The class that F1 is of, where it is that of a class."""
    if problem != "single":
        return {}
    return {"f1_of": repr(names[1]) if len(names) == 2 else "all labels, their mean"}


def problem_that_fits(values: Sequence[Any]) -> str:
    """Lists are several labels at once, and numbers of which some have decimals are values."""
    if any(isinstance(value, list) for value in values):
        return "multi"
    numbers = [number(value) for value in values if value is not None and value != ""]
    has_decimals = None not in numbers and any(not value.is_integer() for value in numbers if value is not None)
    return "regression" if has_decimals else "single"


def refuse_values(where: str, names: Sequence[str], count: int) -> None:
    """Refuse classes that look like numbers, texts or several labels at once: nothing would be learned from them."""
    shown = ", ".join(map(repr, names[:3]))
    if len(names) > MOST_LABELS and all(map(INTEGER.fullmatch, names)):
        remedy = "pass --problem regression to predict numbers, or --problem single if they are classes"
        raise UserError(f"{where} has {len(names)} different integers as labels, such as {shown}: {remedy}")
    if len(names) > max(MOST_LABELS, count // ROWS_PER_LABEL):
        found = f"{len(names)} different labels in {count} rows, such as {shown}: is it the label?"
        raise UserError(f"{where} has {found}{how_to_split(names)}")


def how_to_split(values: Iterable[Any]) -> str:
    """The end of a message about labels, if some may be several labels."""
    several = any(isinstance(value, str) and SEPARATOR in value for value in values)
    return f"; to split labels at {SEPARATOR!r}, pass --problem multi" if several else ""


def hint(problem: str, names: Sequence[str]) -> str:
    """What else the labels could be, if nobody said."""
    if problem == "regression":
        return "some have decimals; for classes, pass --problem single"
    if problem == "single" and len(names) > 2 and all(map(INTEGER.fullmatch, names)):
        return "for numbers, pass --problem regression"
    if problem == "single" and (several := [name for name in names if SEPARATOR in name]):
        return f"to split {several[0]!r} and others at {SEPARATOR!r}, pass --problem multi"
    return ""
