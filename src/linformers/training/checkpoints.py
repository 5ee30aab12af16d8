"""Checkpoints that appear complete or not at all, are verified by hash, and contain no pickle."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from torch import Tensor, nn

from ..checks import check_model, check_no_run, check_weights_open
from ..errors import UserError
from ..files import (
    MANIFEST,
    MODEL_FILES,
    TOKENIZER_FILES,
    accepting,
    check_files,
    damage,
    file_hash,
    read_json,
    remove_folder,
    states,
    write_file,
    write_manifest,
)
from ..resizing import refuse_other_shapes
from .corpus import Corpus

# What a run, or a seed of one, leaves in its folder.
TRACES = ("model", "checkpoint-*", "seed-*/checkpoint-*", "seed-*/best")


def model_hash(folder: Path) -> str:
    """Identifies the content of a saved model: config, tokenizer and weights, which must be intact."""
    check_files(folder, (*MODEL_FILES, *TOKENIZER_FILES))
    files = [folder / "config.json", folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def load_whole(model_class: Any, folder: Path, new: str | None = None, **options: Any) -> Any:
    """`model_class.from_pretrained(folder)`, but weights that are missing raise a `UserError` instead of starting anew.

    `new` begins the names of those that may be missing, after the prefix of the base model.
    """
    try:
        model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" in str(error):  # transformers only logs which weights it means
            refuse_other_shapes(model_class, folder, options.get("config"))
        raise
    names = sorted(name.removeprefix(f"{model.base_model_prefix}.") for name in report["missing_keys"])
    if missing := [name for name in names if new is None or not name.startswith(new)]:
        raise UserError(
            f"model={str(folder)!r} lacks {len(missing)} of the weights of its config, such as {missing[0]}"
        )
    return model


def load_any(folder: Path, names: Iterable[str], **options: Any) -> Any:
    """The model in a folder, with its head; its class must be one of `names`."""
    from .. import LinformerConfig, modeling  # `linformers prepare` uses this module without the models

    check_model("model", folder)
    name = (LinformerConfig.from_pretrained(folder).architectures or ["LinformerModel"])[0]
    if name not in (names := list(names)):
        raise UserError(f"model={str(folder)!r} is a {name}, but this takes a {' or a '.join(names)}")
    return load_whole(getattr(modeling, name), folder, **options)


def verify(folder: Path, accept: bool, console: Console) -> None:
    """Print which listed files are intact, and raise if one is not; `accept` rewrites the manifest instead.

    Args:
        folder: of a model, a checkpoint, a tokenizer or a corpus; a corpus cannot be accepted.
    """
    check_no_run("folder", folder)
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    found: list[tuple[Path, str | None]] = []
    if any(folder.glob("train-*.bin")):
        if accept:
            raise UserError(
                f"folder={str(folder)!r} is a corpus, which cannot be changed: run linformers prepare again"
            )
        Corpus.open(folder).verify()
        found = [(folder, None)]
    elif not any((folder / name).exists() for name in ("config.json", "tokenizer.json")) and not weights_in(folder):
        raise UserError(f"folder={str(folder)!r} holds no model, checkpoint, tokenizer or corpus")
    elif accept:
        for line in accept_files(folder):
            show(line)
    elif not (folder / MANIFEST).exists():
        raise UserError(f"folder={str(folder)!r} has no {MANIFEST}; to write one, run: {accepting(folder)}")
    else:
        found = list(states(folder))
    for path, wrong in found:
        show(wrong or f"{path} is intact")
    if any(wrong for _, wrong in found):
        raise UserError(
            f"folder={str(folder)!r} is damaged; restore it or, if it was changed on purpose, run: {accepting(folder)}"
        )


def accept_files(folder: Path) -> Iterator[str]:
    """Rewrite the manifest, and say what became of each file that it listed; what no model works without must exist."""
    found = []
    with suppress(UserError):  # a damaged manifest is replaced
        found = list(states(folder)) if (folder / MANIFEST).exists() else []
    for path, _ in found:
        if not path.exists() and any(path.match(pattern) for pattern in MODEL_FILES):
            raise UserError(f"{path} is missing, and the model does not work without it: restore it")
    if (folder / "config.json").exists() and not weights_in(folder):
        raise UserError(f"folder={str(folder)!r} has a config.json but no safetensors: save the model again")
    check_weights_open(folder)
    write_manifest(folder)
    for path, wrong in found:
        yield (
            f"{path} {'was changed: accepted' if wrong else 'is intact'}"
            if path.exists()
            else f"{path} is gone: forgotten"
        )


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    folders = [path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def newest_intact(run: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is intact; newer ones that are damaged are reported."""
    for folder in list_checkpoints(run):
        wrong = damage(folder)
        if wrong is None:
            return folder
        report(f"skipping the damaged checkpoint of step {step_of(folder)}: {wrong}")
    return None


def remove_old(run: Path, keep: int, protected: Path | None = None) -> None:
    """Delete all checkpoints except the newest `keep` and the protected one, and what a kill left behind."""
    for folder in list_checkpoints(run)[keep:]:
        if folder != protected:
            remove_folder(folder)
    remove_unfinished(run)


def remove_unfinished(run: Path) -> None:
    """Delete what a killed process left in the folder of a run."""
    for path in run.glob(".*.unfinished"):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a folder against other processes. The lock of a killed process is released by the system."""
    try:
        lock = FileLock(run / ".lock").acquire(blocking=False)
    except Timeout:
        raise UserError(f"out={str(run)!r} is in use by another process; wait for it or choose another out") from None
    with lock:
        yield


def claim(run: Path, kind: str, settings: dict[str, Any], free: Sequence[str] = ()) -> None:
    """Write the settings of a run to its folder; refuse the folder of a run with other settings, except `free` ones."""
    path, settings = run / "run.json", {"kind": kind, **settings}
    for folder in (run, *run.glob("seed-*")):
        remove_unfinished(folder)
    if not any(match for trace in TRACES for match in run.glob(trace)):
        write_file(path, json.dumps(settings, indent=1) + "\n")
        return
    if not path.exists():
        raise UserError(f"out={str(run)!r} holds a run of unknown origin: run.json is missing; choose another folder")
    try:
        saved = _flat(read_json(path))
        saved_kind = saved["kind"]
    except (UserError, KeyError):
        raise UserError(f"{path} is damaged: it does not describe a run") from None
    if saved_kind != kind:
        raise UserError(f"out={str(run)!r} holds a run of linformers {saved_kind}; choose another folder")
    new = _flat(json.loads(json.dumps(settings)))
    changed = [name for name in new | saved if name not in free and new.get(name) != saved.get(name)]
    if changed:
        changes = (f"{name} was {saved.get(name)!r} and is now {new.get(name)!r}" for name in changed)
        raise UserError(f"out={str(run)!r} holds another run: {'; '.join(changes)}; choose another folder")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full names, such as `recipe.model.hidden_size`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer, named after their parameters; if they are sharded, all processes must call this."""
    return {
        f"{name}/{key}": full_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        optimizer.state[parameters[name]][key] = shard_like(value, parameters[name])


def full_tensor(tensor: Tensor) -> Tensor:
    """A copy of a tensor, sharded or not, on the CPU."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu().clone().contiguous()


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` on the device of a parameter and, if it has the parameter's shape, sharded like it."""
    value = value.to(parameter.device)
    if hasattr(parameter, "device_mesh") and value.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return value


def random_state() -> dict[str, Any]:
    """The states of torch's random number generators, ready for JSON; training uses no others."""
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state().tolist(), "cuda": cuda}


def load_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
