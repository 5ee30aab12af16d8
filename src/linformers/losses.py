"""Labels and losses of the heads: a batch whose labels are all ignored has loss 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .checks import check_tensor
from .errors import UserError

IGNORED = -100  # the label of a position that does not count, as everywhere in transformers


def checked_labels(name: str, labels: Tensor, shape: Sequence[int], count: int | None = None) -> Tensor:
    """Labels as int64, once their shape, type and, on the CPU, their range have been checked."""
    check_tensor(name, labels, shape, "ids")
    if count is not None and labels.device.type == "cpu" and not torch.compiler.is_compiling():
        valid = (labels == IGNORED) | ((labels >= 0) & (labels < count))
        if not valid.all():
            raise UserError(f"{name} contains {labels[~valid][0].item()}, expected 0 to {count - 1}, or {IGNORED}")
    return labels.long()


def counted(labels: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a loss, with the number of labels to divide its sum by: the loss is 0 if all labels are ignored."""
    count = kwargs.get("num_items_in_batch")
    count = (labels != IGNORED).sum() if count is None else torch.as_tensor(count)
    return {**kwargs, "num_items_in_batch": count.clamp(min=1)}


def span_loss(
    start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor, **kwargs: Any
) -> Tensor:
    """The mean loss of starts and ends. Positions of n or more are ignored, negative ones count as 0."""
    losses = []
    for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
        n = logits.shape[1]
        positions = positions.to(logits.device).clamp(0, n)
        total = functional.cross_entropy(logits, positions, ignore_index=n, reduction="sum")
        losses.append(total / (positions < n).sum().clamp(min=1))
    return (losses[0] + losses[1]) / 2
