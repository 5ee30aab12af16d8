"""Argument checks: each failure names the argument, its value and what would be right."""

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
from .files import TOKENIZER_FILES, check_files, parse_json, read_bytes

MAX_WORKERS = 256


def is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_size(name: str, value: Any, most: int = 2**63 - 1) -> None:
    if not is_number(value, int) or value < 1:
        raise UserError(f"{name}={value!r} must be a positive integer")
    if value > most:
        raise UserError(f"{name}={value!r} must be at most {most}")


def check_workers(value: Any) -> None:
    """Each is a process or a thread with memory of its own."""
    if not is_number(value, int) or not 0 <= value <= MAX_WORKERS:
        raise UserError(f"workers={value!r} must be an integer from 0 to {MAX_WORKERS}")


def check_positive(name: str, value: Any, otherwise: str = "") -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise UserError(f"{name}={value!r} must be a positive number{otherwise}")


def check_range(name: str, value: Any, least: float, most: float, otherwise: str = "") -> None:
    if not (is_number(value) and least <= value <= most):
        raise UserError(f"{name}={value!r} must be a number from {least:g} to {most:g}{otherwise}")


def check_probability(name: str, value: Any) -> None:
    if not (is_number(value) and 0 <= value < 1):
        raise UserError(f"{name}={value!r} must be a probability: at least 0 and below 1")


def check_share(name: str, value: Any) -> None:
    if not (is_number(value) and 0 < value < 1):
        raise UserError(f"{name}={value!r} must be above 0 and below 1")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r} must be True or False")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return
    nearest = nearest_name(value, choices, cutoff=0.6) if isinstance(value, str) else None
    raise UserError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{did_you_mean(nearest)}")


def nearest_name(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice closest to `name`, ignoring case, hyphens and underscores."""
    normalized = {choice.lower().replace("_", "-"): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower().replace("_", "-"), normalized, n=1, cutoff=cutoff)
    return normalized[matches[0]] if matches else None


def did_you_mean(name: str | None) -> str:
    """The end of a message about an unknown name."""
    return f"; did you mean {name!r}?" if name else ""


def to_builtin(value: Any) -> Any:
    """Convert tuples and arrays to lists, and NumPy numbers to Python's: what JSON can hold."""
    if isinstance(value, list | tuple):
        return [to_builtin(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def check_tensor(name: str, tensor: Any, shape: Sequence[int | str], kind: str = "") -> None:
    """Check the shape of a tensor, where a string stands for any size, and the type of `"ids"` or of a `"mask"`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}, expected a tensor")
    matches = tensor.dim() == len(shape)
    for actual, size in zip(tensor.shape, shape, strict=False):
        matches = matches and (isinstance(size, str) or actual == size)
    if not matches:
        expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise UserError(f"{name} has shape {tuple(tensor.shape)}, expected ({expected})")
    if kind == "ids" and tensor.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} has type {tensor.dtype}, expected torch.int64 or torch.int32")
    if kind == "mask" and (tensor.is_floating_point() or tensor.is_complex()):
        raise UserError(f"{name} has type {tensor.dtype}, expected bool or integers: 1 for a real token, 0 for padding")


def refuse_length(name: str, length: int, max_length: int, remedy: str) -> NoReturn:
    # A separate function: formatting the length inline would cost torch.compile a graph per length.
    raise UserError(
        f"{name} has {length} tokens, but at most n={max_length} are possible; shorten the input or {remedy}"
    )


def make_folder(name: str, folder: Path) -> None:
    """Create a folder and verify that it is writable before hours of work depend on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise UserError(f"{name}={str(folder)!r} is a file, expected a folder") from None
    except OSError as error:
        raise UserError(f"{name}={str(folder)!r} is not a writable folder: {error.strerror}") from None


def check_empty_folder(name: str, folder: Path) -> None:
    """Refuse a folder that has anything in it; it need not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{name}={str(folder)!r} is not an empty folder: choose a new one")


def check_new_file(name: str, path: Path) -> None:
    if path.exists():
        raise UserError(f"{name}={str(path)!r} exists already: delete it or choose another")


def refuse_nan(model: Path) -> NoReturn:
    reason = "its weights are damaged, or its training diverged"
    raise UserError(f"model={str(model)!r} computes NaN: {reason}")


def check_no_run(name: str, folder: Path) -> None:
    """Refuse the folder of a training run where its model is expected."""
    if (folder / "config.json").exists():
        return
    if (folder / "model" / "config.json").exists():
        raise UserError(f"{name}={str(folder)!r} is the folder of a run; its model is {str(folder / 'model')!r}")
    if checkpoints := [*folder.glob("checkpoint-*"), *folder.glob("seed-*/checkpoint-*")]:
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.stat().st_mtime)
        raise UserError(
            f"{name}={str(folder)!r} is the folder of an unfinished run: run its command again, "
            f"or pass its newest checkpoint, {str(newest)!r}"
        )


def check_model(name: str, folder: Path) -> None:
    check_no_run(name, folder)
    if folder.is_dir():
        check_files(folder, ("config.json", *TOKENIZER_FILES))  # `from_pretrained` checks the weights
    if not (folder / "config.json").exists():
        raise UserError(f"{name}={str(folder)!r} contains no model: expected a folder written by pretrain or finetune")
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{name}={str(folder)!r} has no tokenizer: save one beside the model")
    contents = {}
    for path in folder.glob("*.json"):  # transformers reads some of them without bounds
        is_read = any(map(path.match, ("config.json", *TOKENIZER_FILES)))  # others may hold lists
        contents[path.name] = parse_json(read_bytes(path), path, dict if is_read else (dict, list))
    if (kind := contents["config.json"].get("model_type", "linformer")) != "linformer":
        advice = "linformers convert MODEL --out DIR makes one of a BERT, RoBERTa, DistilBERT or ELECTRA"
        raise UserError(f"{name}={str(folder)!r} is of the type {kind!r}, not a Linformer: {advice}")
    check_weights_open(folder)


def check_weights_open(folder: Path) -> None:
    """Refuse a folder with a file of weights that is not safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{path} is damaged or truncated: {error}") from None
