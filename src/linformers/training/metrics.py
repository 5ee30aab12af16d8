"""What classifiers are compared by: accuracy, F1, and the spread of a number over several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError


def accuracy(predictions: Any, labels: Any) -> float:
    """The share of rows that are right."""
    predictions, labels = _rows(predictions, labels)
    return float((predictions == labels).mean())


def f1(predictions: Any, labels: Any, num_labels: int) -> float:
    """F1 of class 1 where there are two classes, otherwise the mean over those that are predicted or true anywhere.

    A class without a hit counts as 0, as scikit-learn has it with `zero_division=0`.
    """
    predictions, labels = _rows(predictions, labels)
    classes = np.array([1]) if num_labels == 2 else np.union1d(predictions, labels)
    hits = [np.sum((predictions == c) & (labels == c)) for c in classes]
    named = [np.sum(predictions == c) + np.sum(labels == c) for c in classes]
    return float(np.mean([2 * hit / max(size, 1) for hit, size in zip(hits, named, strict=True)]))


def f1_of(label_names: Sequence[str]) -> str:
    """Which class F1 is that of."""
    return repr(label_names[1]) if len(label_names) == 2 else "all labels, their mean"


def titles(results: Mapping[str, Any]) -> dict[str, str]:
    """What accuracy and F1 are called beside their numbers."""
    return {"accuracy": "accuracy", "f1": f"F1 of {results['f1_of']}"}


def classification_metrics(logits: Any, labels: Any) -> dict[str, float]:
    """Accuracy and F1 of the classes with the largest logit; `logits` has a row for each label."""
    logits = np.asarray(logits)
    if logits.ndim != 2:
        raise UserError(f"logits has shape {logits.shape}, expected (rows, classes)")
    broken = int(np.isnan(logits).any(axis=1).sum())
    if broken:
        # The largest of numbers that are none would be class 0: a diverged model would look like a poor one.
        raise UserError(f"logits has NaN in {broken} of {len(logits)} rows: training has diverged; lower its rate")
    predictions = logits.argmax(axis=1)
    return {"accuracy": accuracy(predictions, labels), "f1": f1(predictions, labels, logits.shape[1])}


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (of a sample: n − 1) over runs; one run has no deviation."""
    if len(values) == 0:
        raise UserError("values=[] must hold one number or more")
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def plus_minus(spread: Sequence[float | None], digits: int, scale: float = 1) -> str:
    """“0.91 ± 0.02” of a mean and its deviation; the mean alone where there is none."""
    return " ± ".join(f"{scale * value:.{digits}f}" for value in spread if value is not None)


def _rows(predictions: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape or labels.ndim != 1 or not len(labels):
        raise UserError(
            f"predictions of shape {predictions.shape} and labels of shape {labels.shape} "
            "must be one number each for the same rows, one row or more"
        )
    return predictions, labels
