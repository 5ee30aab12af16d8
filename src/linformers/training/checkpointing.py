"""Checkpoints that appear whole or not at all, are checked by hash before use, and hold no pickle."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError

MANIFEST = "manifest.json"
# What a run, or each seed of one, leaves behind.
TRACES = ("model", "checkpoint-*", "seed-*/checkpoint-*", "seed-*/result.json")


def write_whole(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make `folder` with what `fill` writes: a kill at any moment leaves either all of it, under its name, or nothing.

    The files are written beside it, hashed into a manifest and flushed to the disk; one rename puts them in place.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        fill(unfinished)
        files = [path for path in sorted(unfinished.iterdir()) if path.is_file()]
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (*files, unfinished / MANIFEST, unfinished):
            _flush(path)
        for path in files:
            path.chmod(0o644)  # safetensors writes for the owner alone
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if folder.exists():  # one that was found damaged
        _remove(folder)
    unfinished.rename(folder)
    _flush(folder.parent)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, with expected and actual sizes; `None` if every file is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return f"{folder} has no {MANIFEST}"
    except ValueError:
        return f"{folder / MANIFEST} is not JSON"
    try:
        return _difference(folder, manifest)
    except (AttributeError, KeyError, TypeError):
        return f"{folder / MANIFEST} is no list of files"


def _difference(folder: Path, manifest: dict[str, dict[str, Any]]) -> str | None:
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing, expected {expected['bytes']} bytes"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} has {size} bytes, expected {expected['bytes']}"
        if (actual := file_hash(path)) != expected["sha256"]:
            sizes = f"{size} bytes as expected, but its hash is {actual[:12]}…"
            return f"{path} has {sizes}, expected {expected['sha256'][:12]}…"
    return None


def step_of(folder: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = [path for path in run.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of, reverse=True)


def newest_whole(run: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is as it was written; each newer one that is not is reported."""
    for folder in checkpoints(run):
        wrong = damage(folder)
        if wrong is None:
            return folder
        report(f"checkpoint of step {step_of(folder)} is damaged and left out: {wrong}")
    return None


def remove_unfinished(run: Path) -> None:
    """Delete what a kill inside a save left behind."""
    for folder in run.glob(".checkpoint-*.unfinished"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_old(run: Path, keep: int, protected: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints, and the protected one."""
    for folder in checkpoints(run)[keep:]:
        if folder != protected:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves none under its name."""
    doomed = folder.with_name(f".{folder.name}.removed.unfinished")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's tensors by the names of their parameters, and the numbers of its groups.

    Every process of a sharded model must call it, since gathering a tensor takes all of them.
    """
    tensors = {
        f"{name}/{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return tensors, {"groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        optimizer.state[parameters[name]][key] = like(value, parameters[name])
    for group, saved in zip(optimizer.param_groups, numbers["groups"], strict=True):
        group.update(saved)


def whole(tensor: Tensor) -> Tensor:
    """A copy on the CPU of a tensor that may be sharded over processes."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu().clone().contiguous()


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` on the device of a parameter and, where it has its shape, sharded as it is."""
    value = value.to(parameter.device)
    if hasattr(parameter, "device_mesh") and value.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return value


def random_state() -> dict[str, Tensor]:
    """The state of every random generator of this process, as tensors of fixed shapes."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, kind) == (3, "MT19937")
    assert isinstance(keys, np.ndarray)
    state = {
        "python": torch.tensor(numbers),
        "python.gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_random_state(state: dict[str, Tensor]) -> None:
    gauss = state["python.gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy.gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def claim(run: Path, kind: str, what: dict[str, Any]) -> dict[str, Any]:
    """Write down what a folder is used for, unless it holds work already; what it is used for then."""
    path = run / "run.json"
    if any(found for trace in TRACES for found in run.glob(trace)):
        if not path.exists():
            raise UserError(f"out={str(run)!r} holds a model that no run has left there; choose another folder")
        try:
            saved = json.loads(path.read_text())
            own = saved["kind"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: it does not say what this folder was used for") from None
        if own != kind:
            raise UserError(f"out={str(run)!r} holds a run of linformers {own}; choose another folder")
        return saved
    write_text(path, json.dumps({"kind": kind, **what}, indent=1) + "\n")
    return json.loads(path.read_text())


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep a folder from other processes; the lock of one that was killed is gone with it."""
    with (run / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"out={str(run)!r} is in use by another process; wait for it, or choose another") from None
        yield


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    _flush(unfinished)
    unfinished.replace(path)


def model_hash(folder: Path) -> str:
    """What tells a saved model from others, wherever it lies."""
    files = [folder / "config.json", folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
