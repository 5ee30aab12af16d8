"""Recipes: everything that determines a pretraining run, read from YAML and checked before anything is written."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .. import LinformerConfig, checks
from ..errors import UserError
from ..files import read_bytes

PRECISIONS = ("auto", "bf16", "float32")
COMPILE = ("auto", "yes", "no")
OPTIMIZERS = ("adamw", "muon")
# Linear or cosine decay to 0; no decay; or warmup, stable, decay (Hu et al., 2024): constant, then linear decay to 0.
SCHEDULES = ("linear", "cosine", "constant", "wsd")

# Fields that do not change what a run computes: they may differ when it resumes.
FREE = ("data", "out", "rows_at_once", "log_every", "save_every", "keep", "workers", "compile", "shard")

# A few lines of YAML can expand to gigabytes.
MAX_BYTES = 2**20
MAX_DEPTH = 16
MAX_CHARACTERS = 1000  # of a value
MAX_VARIANTS = 10_000

# Fields of the model that follow from the corpus.
FROM_CORPUS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Recipe:
    """A pretraining run; `read` reads it from a YAML file with these keys."""

    data: str  # folder of the corpus, written by `linformers prepare`
    out: str  # folder of the run: checkpoints, metrics, and the model at the end
    steps: int  # updates of the weights
    model: dict[str, Any] = field(default_factory=dict)  # fields of LinformerConfig, except for the vocabulary
    start: str | None = None  # folder of a pretrained model to start from; its projection may differ from `model`
    batch_size: int = 64  # rows per update, over all processes
    rows_at_once: int = 0  # rows per pass of a process, with gradient accumulation; 0: its share of the batch
    optimizer: str = "adamw"  # or "muon": Muon for the weight matrices of the layers, AdamW for everything else
    learning_rate: float = 1e-3  # peak learning rate
    warmup_steps: int = 0
    schedule: str = "linear"  # of the learning rate after the warmup, one of SCHEDULES
    decay_share: float = 0.2  # share of the steps, the last ones, in which "wsd" lowers the learning rate
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    weight_decay: float = 0.01  # not for biases, norms and E
    max_grad_norm: float = 1.0
    mask_share: float = 0.15  # share of tokens to predict
    final_mask_share: float | None = None  # at the end and in validation, if it changes linearly over the run
    short_rows: float = 0.0  # share of rows cut to a random length, so that the model knows short inputs
    eval_every: int = 500  # steps between validations
    eval_rows: int = 1024  # rows of the validation set to use
    save_every: int = 500  # steps between checkpoints
    keep: int = 2  # number of checkpoints to keep
    log_every: int = 50  # steps between log entries
    precision: str = "auto"  # "bf16", "float32", or "auto": bf16 if the GPU supports it
    compile: str = "auto"  # "yes", "no", or "auto": on a GPU
    deterministic: bool = False  # bit-exact repetition on a GPU as well, at a cost in speed
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    shard: bool = False  # shard weights and optimizer over processes (FSDP) instead of replicating them (DDP)
    workers: int = 2  # data loading processes per training process
    seed: int = 0  # of initial weights, rows, masks and dropout

    def __post_init__(self) -> None:
        for name in ("data", "out") if self.start is None else ("data", "out", "start"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UserError(f"{name}={getattr(self, name)!r} must be a folder")
        out, data = Path(self.out).resolve(), Path(self.data).resolve()
        if out.is_relative_to(data) or data.is_relative_to(out):
            raise UserError(f"out={self.out!r} and data={self.data!r} must not contain each other")
        falls = self.final_mask_share is not None
        fields: dict[Any, tuple[str, ...]] = {
            checks.check_size: ("steps", "batch_size", "eval_every", "eval_rows", "save_every", "keep", "log_every"),
            _check_count: ("warmup_steps", "rows_at_once", "seed"),
            checks.check_positive: ("learning_rate", "adam_epsilon", "max_grad_norm"),
            checks.check_probability: ("adam_beta1", "adam_beta2", "weight_decay", "short_rows"),
            checks.check_share: ("mask_share", "decay_share", *(["final_mask_share"] if falls else [])),
            checks.check_flag: ("deterministic", "gradient_checkpointing", "shard"),
        }
        for check, names in fields.items():
            for name in names:
                check(name, getattr(self, name))
        checks.check_workers(self.workers)
        checks.check_choice("optimizer", self.optimizer, OPTIMIZERS)
        checks.check_choice("schedule", self.schedule, SCHEDULES)
        checks.check_choice("precision", self.precision, PRECISIONS)
        checks.check_choice("compile", self.compile, COMPILE)
        if self.optimizer == "muon" and self.shard:
            raise UserError("optimizer='muon' needs whole matrices: it cannot be combined with shard=True")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            phases = f"warmup_steps={self.warmup_steps} and decay_share={self.decay_share}"
            raise UserError(f"{phases} take more than steps={self.steps}")
        for name in _model_fields(self.to_dict()):
            if name in FROM_CORPUS:
                raise UserError(f"model.{name} cannot be set in a recipe: it follows from the corpus")
            _check_key(f"model.{name}", [f"model.{f.name}" for f in dataclasses.fields(LinformerConfig)])
        self.config(vocab_size=50_000)  # checks the values

    def config(self, **vocabulary: Any) -> LinformerConfig:
        """The configuration of the model for a vocabulary."""
        return LinformerConfig(**{"sparse_prediction": True, **self.model, **vocabulary})

    @property
    def max_length(self) -> int:
        """n, the tokens of a row."""
        return self.config(vocab_size=50_000).max_position_embeddings

    @property
    def decay_steps(self) -> int:
        """Steps in which schedule "wsd" lowers the learning rate."""
        return max(1, round(self.decay_share * self.steps))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rows_per_pass(self, processes: int) -> int:
        return self.rows_at_once or max(1, self.batch_size // processes)

    def accumulation_steps(self, processes: int) -> int:
        """Passes of each process per update."""
        rows = self.rows_per_pass(processes) * processes
        if self.batch_size % rows:
            at_once = f"rows_at_once={self.rows_at_once} times " if self.rows_at_once else ""
            raise UserError(f"batch_size={self.batch_size} is not a multiple of {at_once}{processes} processes")
        return self.batch_size // rows


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, with changes such as `steps=100` or `model.projection=identity`.

    A file may name another recipe as its `base`. A file with a table of `variants` needs the change `variant=NAME`:
    the table's entries override keys of the file, and so do changes. In `out`, `{variant}` stands for the name.
    """
    values, variants = _load(path)
    overrides: dict[str, Any] = functools.reduce(_merge, map(_parse, changes), {})
    if variants:
        variant = overrides.pop("variant", None)
        if variant is None:
            raise UserError(f"{path} has variants: add variant=NAME, one of {', '.join(variants)}")
        checks.check_choice("variant", variant, variants)
        values = _merge(values, variants[variant])
        values["out"] = str(values.get("out")).replace("{variant}", variant)
    values = _merge(values, overrides)
    for name in ("data", "out", "steps"):  # which have no default
        if name not in values:
            raise UserError(f"{path} has no {name!r}; add it, or pass {name}=…")
    for name in values:
        _check_key(str(name), [f.name for f in dataclasses.fields(Recipe)])
    if isinstance(values.get("compile"), bool):  # YAML reads yes and no as booleans
        values["compile"] = "yes" if values["compile"] else "no"
    return Recipe(**values)


def _parse(change: str) -> dict[str, Any]:
    """The keys and values that a change such as `steps=100` sets."""
    name, equals, text = change.partition("=")
    if equals and not text.strip():
        raise UserError(f"{change!r} has no value; for none, write {name}=null")
    if not equals:
        raise UserError(f"{change!r} is not of the form key=value, such as steps=100")
    try:
        value = yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError):
        raise UserError(f"{change!r}: the value is not YAML of a recipe") from None
    section, _, key = name.partition(".")
    if not key:
        return {name: value}
    _check_key(section, ["model"])
    return {"model": {key: value}}


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are decimal, such as 1e-3, 017 or 1_000; without aliases or repeated keys, of bounded size."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a recipe cannot have aliases such as *name")
        if self.depth == MAX_DEPTH:
            raise yaml.YAMLError(f"its lists and tables are nested more than {MAX_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.MappingNode):
            keys = Counter(str(key.value) for key, _ in node.value)
            if twice := [key for key, count in keys.items() if count > 1]:
                raise yaml.YAMLError(f"the key {twice[0]!r} occurs twice")
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"a value has more than {MAX_CHARACTERS:,} characters")
        return node


def _number(kind: Callable[[str], float]) -> Callable[[_Loader, Any], float]:
    return lambda loader, node: kind(node.value.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_FLOAT = r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _kind, _pattern in (int, r"[-+]?\d[\d_]*"), (float, _FLOAT):
    _tag = f"tag:yaml.org,2002:{_kind.__name__}"
    _Loader.add_implicit_resolver(_tag, re.compile(f"({_pattern})$"), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _number(_kind))


def _load(path: Path, depth: int = 0) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of a file over those of its `base`, and its variants."""
    content = read_bytes(path, MAX_BYTES)
    try:
        values = yaml.load(content.decode(), _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a recipe: expected keys and values")
    variants = _expand(path, values.pop("variants", None) or {})
    base = values.pop("base", None)
    if base is None:
        return values, variants
    in_folder = isinstance(base, str) and Path(base).name == base
    if not in_folder or depth > 8 or not (path.parent / base).is_file():
        raise UserError(f"{path} has base={base!r}, expected the name of another recipe in the same folder")
    return _merge(_load(path.parent / base, depth + 1)[0], values), variants


def _expand(path: Path, variants: Any) -> dict[str, dict[str, Any]]:
    """Variants by name. A list of tables is a grid: one entry of each, with names joined by hyphens."""
    grid = variants if isinstance(variants, list) else [variants]
    if not all(isinstance(axis, dict) and all(isinstance(changes, dict) for changes in axis.values()) for axis in grid):
        raise UserError(f"{path} has variants={variants!r}, expected a table of names and changed keys")
    if math.prod(len(axis) for axis in grid if axis) > MAX_VARIANTS:
        raise UserError(f"{path} has more than {MAX_VARIANTS:,} variants")
    cells = [list(zip(*cell, strict=True)) for cell in itertools.product(*(axis.items() for axis in grid)) if cell]
    return {"-".join(names): functools.reduce(_merge, changes) for names, changes in cells}


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `values`; the model's fields are merged one by one."""
    return {**values, **changes, "model": {**_model_fields(values), **_model_fields(changes)}}


def _model_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = values.get("model") or {}
    if not isinstance(fields, dict):
        raise UserError(f"model={fields!r} must be fields of LinformerConfig, such as projected_length: 128")
    return fields


def _check_count(name: str, value: Any) -> None:
    if not checks.is_number(value, int) or value < 0:
        raise UserError(f"{name}={value!r} must be 0 or a positive integer")
    if value >= 2**32:  # a seed of NumPy's
        raise UserError(f"{name}={value!r} must be below 2^32")


def _check_key(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise UserError(f"{name!r} is not a key of a recipe{checks.did_you_mean(checks.nearest_name(name, names))}")
