"""Recipes: everything that decides a pretraining run, read from YAML and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..checks import (
    check_choice,
    check_positive,
    check_probability,
    check_size,
    did_you_mean,
    is_number,
    nearest_name,
)
from ..config import LinformerConfig
from ..errors import UserError

PRECISIONS = ("auto", "bf16", "float32")
SCHEDULES = ("linear", "cosine", "constant")
COMPILE = ("auto", "yes", "no")

# Fields that change how a run is carried out, not what it computes: they may differ when it is resumed.
FREE = ("data", "out", "rows_at_once", "log_every", "save_every", "keep", "workers", "compile", "shard")

# Fields of the model that the corpus decides.
FROM_CORPUS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Recipe:
    """A pretraining run.

    Args:
        data: the folder that `linformers prepare` made.
        out: the folder of the run: checkpoints, metrics, and the model at the end.
        model: fields of `LinformerConfig`; the vocabulary is the corpus's.
        start: the folder of a model to train on instead of a new one, with the tokenizer of the corpus. It may differ
            from `model` in its projection: what does not fit starts anew.
        steps: updates of the weights.
        batch_size: rows in an update, over all processes.
        rows_at_once: rows in one pass of one process; gradients of the others are accumulated. 0 means as many as
            the batch has for each process.
        learning_rate: its peak.
        schedule: how the rate falls after `warmup_steps`: `"linear"` or `"cosine"` to 0, or `"constant"`.
        adam_beta1, adam_beta2, adam_epsilon, weight_decay: AdamW's; biases, norms and E do not decay.
        max_grad_norm: gradients are clipped at this norm.
        mask_share: the share of tokens to be predicted.
        short_rows: the share of rows that are cut to a random length, so that short inputs are known afterwards.
        eval_every, eval_rows: steps between validations, and the rows of each.
        save_every, keep: steps between checkpoints, and how many of them are kept.
        log_every: steps between entries of the log.
        precision: `"bf16"`, `"float32"`, or `"auto"`: bf16 where the hardware has it.
        compile: `"yes"`, `"no"`, or `"auto"`: on a GPU.
        deterministic: repeat a run bit for bit on a GPU, too, where atomic additions otherwise change the last bits;
            costs time.
        gradient_checkpointing: recompute activations in the backward pass: less memory, more time.
        shard: spread weights and optimiser over the processes (FSDP) instead of copying them to each (DDP).
        workers: processes that read and mask rows ahead, for each training process.
        seed: of initial weights, rows, masks and dropout.
    """

    data: str
    out: str
    steps: int
    model: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    batch_size: int = 64
    rows_at_once: int = 0
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: str = "linear"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    mask_share: float = 0.15
    short_rows: float = 0.0
    eval_every: int = 500
    eval_rows: int = 1024
    save_every: int = 500
    keep: int = 2
    log_every: int = 50
    precision: str = "auto"
    compile: str = "auto"
    deterministic: bool = False
    gradient_checkpointing: bool = False
    shard: bool = False
    workers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("data", "out"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UserError(f"{name}={getattr(self, name)!r} must be the name of a folder")
        if not isinstance(self.start, str | None) or self.start == "":
            raise UserError(f"start={self.start!r} must be the folder of a model, or null for a new one")
        for name in ("steps", "batch_size", "eval_every", "eval_rows", "save_every", "keep", "log_every"):
            check_size(name, getattr(self, name))
        for name in ("warmup_steps", "workers", "rows_at_once", "seed"):
            value = getattr(self, name)
            if not is_number(value, int) or value < 0:
                raise UserError(f"{name}={value!r} must be 0 or a positive integer")
        for name in ("learning_rate", "adam_epsilon", "max_grad_norm", "mask_share"):
            check_positive(name, getattr(self, name))
        for name in ("adam_beta1", "adam_beta2", "mask_share", "weight_decay", "short_rows"):
            check_probability(name, getattr(self, name))
        for name in ("deterministic", "gradient_checkpointing", "shard"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be true or false")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("compile", self.compile, COMPILE)
        if not isinstance(self.model, Mapping):
            raise UserError(
                f"model={self.model!r} must be fields of LinformerConfig, such as model.projected_length=128"
            )
        fields = [f.name for f in dataclasses.fields(LinformerConfig)]
        for name in self.model:
            if name in FROM_CORPUS:
                raise UserError(f"model.{name} is not for a recipe to choose: the corpus has a vocabulary")
            _check_name(f"model.{name}", [f"model.{own}" for own in fields])
        self.config(vocab_size=50_000)

    def config(self, **vocabulary: Any) -> LinformerConfig:
        """The model's config for a vocabulary."""
        return LinformerConfig(**{"sparse_prediction": True, **self.model, **vocabulary})

    @property
    def max_length(self) -> int:
        """n, the tokens of a row."""
        return self.config(vocab_size=50_000).max_position_embeddings

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def accumulation(self, processes: int) -> int:
        """Passes of each of `processes` processes in an update."""
        at_once = self.rows_per_pass(processes)
        if self.batch_size % (at_once * processes):
            each = (
                f"rows_at_once={at_once} times {processes} processes" if self.rows_at_once else f"{processes} processes"
            )
            raise UserError(f"batch_size={self.batch_size} is not a multiple of {each}")
        return self.batch_size // (at_once * processes)

    def rows_per_pass(self, processes: int) -> int:
        return self.rows_at_once or max(1, self.batch_size // processes)


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `changes` such as `steps=100` or `model.projection=identity`."""
    values = _load(path)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise UserError(f"{change!r} is not of the form key=value, such as steps=100")
        try:
            value = _numbers(yaml.safe_load(text))
        except yaml.YAMLError:
            raise UserError(f"{change!r}: the value is not YAML") from None
        section, _, key = name.partition(".")
        if key:
            _check_name(section, ["model"])
            values["model"] = {**_fields(values), key: value}
        else:
            values[name] = value
    return make(values, str(path))


def make(values: Mapping[str, Any], where: str) -> Recipe:
    names = [f.name for f in dataclasses.fields(Recipe)]
    for name in values:
        _check_name(str(name), names)
    if isinstance(values.get("compile"), bool):  # YAML takes yes and no for truth
        values = {**values, "compile": "yes" if values["compile"] else "no"}
    for f in dataclasses.fields(Recipe):
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values:
            raise UserError(f"{where} has no {f.name!r}; add it, or pass {f.name}=…")
    return Recipe(**values)


def differences(recipe: Recipe, saved: Mapping[str, Any]) -> list[str]:
    """What of a run's saved recipe a new one would change, among fields that change what is computed."""
    new, old = _flat(recipe.to_dict()), _flat(saved)
    return [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r} now"
        for name in dict.fromkeys([*new, *old])
        if name not in FREE and old.get(name) != new.get(name)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The model's fields beside the others."""
    rest = {name: value for name, value in values.items() if name != "model"}
    return {**rest, **{f"model.{name}": value for name, value in values["model"].items()}}


def _load(path: Path, depth: int = 0) -> dict[str, Any]:
    """The values of a file over those of the one that it names as its `base`."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"recipe {str(path)!r} does not exist") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise UserError(f"{path} is not YAML: {error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no recipe: expected keys and values")
    values = _numbers(values)
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str) or depth > 8:
        raise UserError(f"{path} has base={base!r}, expected the name of another recipe")
    if not (path.parent / base).exists():
        raise UserError(f"{path} has base={base!r}, which does not exist beside it")
    inherited = _load(path.parent / base, depth + 1)
    return {**inherited, **values, "model": {**_fields(inherited), **_fields(values)}}


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The model's, of which a recipe need not have any."""
    fields = values.get("model") or {}
    if not isinstance(fields, dict):
        raise UserError(f"model={fields!r} must be fields of LinformerConfig, such as projected_length: 128")
    return fields


def _numbers(value: Any) -> Any:
    """YAML 1.1 takes 1e-3 for text; nobody else does."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) and "e" in value.lower() else value
    return value


def _check_name(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise UserError(f"{name!r} is not a key of a recipe{did_you_mean(nearest_name(name, names))}")
