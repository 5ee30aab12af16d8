"""Checks of arguments: what is wrong is named with its value, and with what would be right."""

from __future__ import annotations

import difflib
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError


def is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_size(name: str, value: Any) -> None:
    if not is_number(value, int) or value < 1:
        raise UserError(f"{name}={value!r} must be a positive integer")


def check_positive(name: str, value: Any, otherwise: str = "") -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise UserError(f"{name}={value!r} must be a positive number{otherwise}")


def check_probability(name: str, value: Any) -> None:
    if not (is_number(value) and 0 <= value < 1):
        raise UserError(f"{name}={value!r} must be a probability: at least 0 and below 1")


def check_share(name: str, value: Any) -> None:
    if not (is_number(value) and 0 < value < 1):
        raise UserError(f"{name}={value!r} must be above 0 and below 1")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value in choices:
        return
    nearest = nearest_name(value, choices, cutoff=0.5) if isinstance(value, str) else None
    raise UserError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{did_you_mean(nearest)}")


def nearest_name(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that `name` was probably meant to be, whatever its case, hyphens and underscores."""
    plain = {choice.lower().replace("_", "-"): choice for choice in choices}
    found = difflib.get_close_matches(name.lower().replace("_", "-"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def did_you_mean(name: str | None) -> str:
    """What is added to a sentence about a name that nobody knows."""
    return f"; did you mean {name!r}?" if name else ""


def whole_numbers(name: str, text: str, example: str = "512,1024") -> list[int]:
    """The numbers of an argument such as “512,1024”, each once."""
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{name}={text!r} must be positive whole numbers separated by commas, such as {example}")
    return numbers


def fractions(name: str, text: str) -> list[float]:
    """The numbers of an argument such as “0.1,0.5”, each once."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{name}={text!r} must be numbers separated by commas, such as 0.1,0.5") from None


def check_shape(name: str, tensor: Any, expected: Sequence[int | str]) -> None:
    """Refuse what is no tensor, or not of the shape `expected`, in which a word stands for any number."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}, expected a tensor")
    sizes = zip(tensor.shape, expected, strict=False)
    if tensor.dim() != len(expected) or any(not isinstance(size, str) and size != own for own, size in sizes):
        shape = ", ".join(map(str, expected)) + ("," if len(expected) == 1 else "")
        raise UserError(f"{name} has shape {tuple(tensor.shape)}, expected ({shape})")


def check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} has type {tensor.dtype}, expected torch.int64 or torch.int32")


def make_folder(name: str, folder: Path) -> None:
    """Make a folder and see that it can be written to, before hours of work find out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{name}={str(folder)!r} is no folder that can be written to: {error.strerror}") from None


def check_no_run(name: str, folder: Path) -> None:
    """Refuse the folder of a run where its model is wanted."""
    if (folder / "config.json").exists():
        return
    if (folder / "model" / "config.json").exists():
        raise UserError(f"{name}={str(folder)!r} is the folder of a run; its model is {str(folder / 'model')!r}")
    if checkpoints := [*folder.glob("checkpoint-*"), *folder.glob("seed-*/checkpoint-*")]:
        newest = max(checkpoints, key=lambda own: own.stat().st_mtime)
        raise UserError(
            f"{name}={str(folder)!r} is the folder of a run that is not finished: run its command again, "
            f"or name its checkpoint {str(newest)!r}"
        )


def check_model(name: str, folder: Path) -> None:
    check_no_run(name, folder)
    if not (folder / "config.json").exists():
        raise UserError(f"{name}={str(folder)!r} holds no model: expected a folder that pretrain or finetune wrote")
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{name}={str(folder)!r} has no tokenizer: save one beside the model")
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{path} is damaged or cut short: {error}") from None


def refuse_length(name: str, length: int, max_length: int, way_out: str) -> NoReturn:
    # Called once a check has failed: a number that goes into text before costs a compiled graph for each length.
    raise UserError(
        f"{name} has {length} tokens, but at most n={max_length} are possible; shorten the input or {way_out}"
    )
