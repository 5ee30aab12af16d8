"""The building blocks of all trained sections: folders, corpora, pretraining and fine-tuning jobs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from linformers.errors import UserError
from linformers.training.recipe import FREE, Recipe, read

from .jobs import ORIGIN, Job, Records, origin

# Commands run in the root of the repository, so that recorded ones work anywhere.
RECIPES = Path("recipes")
# The folders of a corpus under --data, and how many of their training files it takes.
CORPORA: dict[str, dict[str, int | None]] = {"wiki": {"wiki": 4}, "wiki-books": {"wiki": None, "books": None}}
SOURCES, SMALL_MARK = "sources.json", ".small"
TASKS = ("sst2", "imdb", "qnli", "qqp")

# Fields of a recipe and of its model that identify a run even where a recipe leaves them at their defaults. Any other
# field identifies it where the recipe sets it, so that a new field does not change the hash of older runs.
RECIPE_FIELDS = (
    *("steps", "batch_size", "learning_rate", "warmup_steps", "schedule", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("weight_decay", "max_grad_norm", "mask_share", "short_rows", "eval_every", "eval_rows", "precision"),
    *("deterministic", "gradient_checkpointing", "seed"),
)
MODEL_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "norm_first", "max_position_embeddings", "local_window", "position_init"),
    *("initial_self_score", "classifier_pooling", "projection"),
)
LINEAR_FIELDS = ("projected_length", "sharing", "projection_init", "projection_scale", "shifted_windows")


@dataclass(frozen=True)
class Workspace:
    """The folders of a reproduction.

    Attributes:
        data: raw data, as described in docs/commands.md.
        runs: training runs; can be deleted when everything is done.
        results: records and figures, which are kept.
        small: whether all models are tiny, as a quick test of the whole path on a CPU.
    """

    data: Path | None = None
    runs: Path = Path("runs/paper")
    results: Path = Path("results")
    small: bool = False

    @property
    def records(self) -> Records:
        return Records(self.results, self.data)

    def folder(self, *names: str) -> Path:
        """A folder or file of the raw data."""
        if self.data is None:
            raise UserError("data is missing: pass the folder of wiki, books and the tasks with --data DIR")
        return self.data.joinpath(*names)

    def read(self, section: str) -> dict[str, Any] | None:
        """The json of a section that is measured in one go, if it exists."""
        path = self.results / section / f"{section}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def check(self) -> None:
        """Refuse folders that cannot be right before anything is written."""
        if self.data is not None and not self.data.is_dir():
            raise UserError(f"data={str(self.data)!r} is not a folder")
        if not RECIPES.is_dir():
            raise UserError(f"{RECIPES} is not a folder; run the command in the root of the repository")
        has_results = self.results.is_dir() and any(self.results.iterdir())
        if has_results and (self.results / SMALL_MARK).exists() != self.small:
            held = "full-size models; leave out --results" if self.small else "tiny models; pass another folder"
            raise UserError(f"results={str(self.results)!r} holds results of {held}")

    def make(self) -> None:
        for folder in (self.results, self.runs):
            folder.mkdir(parents=True, exist_ok=True)
        if self.small:
            (self.results / SMALL_MARK).touch()


def corpus(work: Workspace, name: str) -> Path:
    """The folder of the tokens of Wikipedia, or of Wikipedia and books."""
    training, validation = [], []
    for folder, most in CORPORA[name].items():
        files = sorted(path for path in work.folder(folder).glob("*") if path.is_file())
        parts = [[path for path in files if path.name.startswith(split)] for split in ("train", "validation")]
        if not all(parts):
            raise UserError(f"data={str(work.data)!r} has no folder {folder} with files train-… and validation…")
        training += parts[0][:most]
        validation += parts[1]
    if work.small:  # the validation files are text enough
        options = {"validation-share": 0.3, "vocab-size": 300, "tokenizer-documents": 100}
        return prepare(work, name, validation, options=options)
    return prepare(work, name, training, validation)


def prepare(
    work: Workspace, name: str, files: Sequence[Path], validation: Sequence[Path] = (), options: Mapping[str, Any] = {}
) -> Path:
    """The folder of a corpus, made from files unless it exists; one made from other files is refused."""
    out = work.runs / "corpora" / (f"{name}-small" if work.small else name)
    sources = {f"{path.parent.name}/{path.name}": file_hash(path) for path in (*files, *validation)}
    if (out / "manifest.json").exists():
        if json.loads((out / SOURCES).read_text()) != sources:
            raise UserError(f"{str(out)!r} was made from other files than data={str(work.data)!r}; use another --runs")
        return out
    out.mkdir(parents=True, exist_ok=True)
    (out / SOURCES).write_text(json.dumps(sources, indent=1) + "\n")
    held_out = [part for path in validation for part in ("--validation", str(path))]
    arguments = [*map(str, files), "--out", str(out), *held_out, *flags(options)]
    command("prepare", *arguments)
    return out


def command(*arguments: str) -> None:
    """Run a command of linformers, whose output goes to the terminal."""
    if subprocess.run([sys.executable, "-m", "linformers", *arguments], check=False).returncode:
        raise UserError(f"`linformers {arguments[0]}` failed, as its output above says")


def corpus_hash(folder: Path) -> str:
    """The hash of the hashes of all shards."""
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    hashes = [shard["sha256"] for split in splits.values() for shard in split["shards"]]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def pretraining(
    work: Workspace, tokens: Path, variant: str, name: str, changes: Sequence[str] = (), shrink: bool = True
) -> Job:
    """A run of `linformers pretrain`: a variant of the recipe with changes, on the tokens of a corpus.

    With `--small`, k and w shrink with n, unless `shrink` is false because `changes` set them already.
    """
    out = work.runs / name
    path, own = recipe_of(variant)
    every = [*own, f"data={tokens}", f"out={out}", *changes_for(work, variant, changes, shrink)]
    recipe = read(path, every)
    return Job(
        name=name,
        arguments=["pretrain", str(path), *every],
        out=out,
        description={"recipe": describe(recipe), "corpus": corpus_hash(tokens)},
        collect=lambda: _pretrained(out, recipe),
        steps=recipe.steps,
        steps_done=lambda: max((own["step"] for own in read_metrics(out)), default=0),
    )


def recipe_of(variant: str) -> tuple[Path, list[str]]:
    """A recipe file of that name, or the small recipe with the change that selects a variant."""
    own = RECIPES / f"{variant}.yaml"
    return (own, []) if own.exists() else (RECIPES / "small.yaml", [f"variant={variant}"])


def changes_for(work: Workspace, variant: str, changes: Sequence[str], shrink: bool = True) -> list[str]:
    """The changes to a recipe and, with `--small`, those that make a run take seconds; n, k and w keep their ratios."""
    if not work.small:
        return list(changes)
    path, own = recipe_of(variant)
    model = read(path, [*own, *(changes if shrink else ())]).model
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes["max_position_embeddings"] = model["max_position_embeddings"] // 8
    if shrink:
        sizes |= {name: model.get(name, 0) // 8 for name in ("projected_length", "local_window")}
    tiny = [f"model.{name}={value}" for name, value in sizes.items()]
    tiny += ["steps=8", "batch_size=8", "warmup_steps=2", "eval_every=4", "eval_rows=8", "save_every=4", "log_every=2"]
    return [*changes, *tiny, "workers=0"] if shrink else [*tiny, "workers=0", *changes]


def describe(recipe: Recipe) -> dict[str, Any]:
    """What identifies a pretraining run: the values that its result depends on."""
    defaults = {own.name: own.default for own in dataclasses.fields(recipe)}
    names = [n for n in defaults if n in RECIPE_FIELDS or getattr(recipe, n) != defaults[n]]
    fields = {name: getattr(recipe, name) for name in names if name not in (*FREE, "model")}
    return {**fields, "model": describe_model(recipe)}


def describe_model(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config(vocab_size=1000)
    linear = config.projection == "linear"
    names = dict.fromkeys((*MODEL_FIELDS, *recipe.model, *(LINEAR_FIELDS if linear else ())))
    if not config.is_rotary:  # as in the runs from before there was a choice
        names.pop("position_embedding_type", None)
    if not linear:  # neither the twin nor the window alone has an E
        names = {name: None for name in names if name not in LINEAR_FIELDS}
    found = {name: getattr(config, name) for name in sorted(names)}
    if linear:
        quick = config.sharing == "layerwise" and not any(config.local_windows)
        scale = config.projection_scale
        found["projection_scale"] = float(f"{(1.2 if quick else 0.12) if scale is None else scale:.6g}")
        found["shifted_windows"] = bool(config.shifted_windows) and config.projection_init == "window"
    return found


class Tuning(NamedTuple):
    """How to fine-tune."""

    seeds: int
    epochs: int
    batch_size: int
    learning_rate: float
    max_length: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of `linformers finetune`."""
        return {name.replace("_", "-"): value for name, value in self._asdict().items() if value is not None}


class Task(NamedTuple):
    """A task to fine-tune on: its arguments of `linformers finetune`, and the hashes of its files."""

    arguments: list[str]
    data: dict[str, str]


def known_task(work: Workspace, name: str) -> Task:
    """A task with a folder under the raw data."""
    return Task([name, "--data", str(work.folder())], hashes(work.folder(name)))


def finetuning(work: Workspace, name: str, task: Task, tuning: Tuning, start: Job | tuple[Path, Any]) -> Job:
    """A run of `linformers finetune` that starts from the model of a job, or from a folder with its description."""
    out = work.runs / name
    model, identity = (start.model, start.key) if isinstance(start, Job) else start
    return Job(
        name=name,
        arguments=["finetune", *task.arguments, "--model", str(model), "--out", str(out), *flags(tuning.options)],
        out=out,
        description={"model": identity, **tuning.options, "data": task.data},
        collect=lambda: without_origin(json.loads((out / "results.json").read_text())),
        steps=tuning.seeds * tuning.epochs,
        steps_done=lambda: _epochs(out),
        after=start if isinstance(start, Job) else None,
    )


def flags(options: Mapping[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def without_origin(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a command wrote, except for its origin, which is in the record already."""
    return {name: value for name, value in result.items() if name not in ("made_with", *ORIGIN)}


def _pretrained(out: Path, recipe: Recipe) -> dict[str, Any]:
    """The metrics that figures need; not the speed, because other runs may share the GPU."""
    metrics = read_metrics(out)
    curve = [[own["step"], own["perplexity"]] for own in metrics if "perplexity" in own]
    return {
        "perplexity": curve[-1][1],
        "curve": curve,
        "loss": [[own["step"], own["loss"]] for own in metrics if "loss" in own],
        "tokens_per_step": recipe.batch_size * recipe.max_length,
        "seed": recipe.seed,
    }


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run; a last line that is still being written is left out."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def _epochs(out: Path) -> int:
    """The number of finished epochs over all seeds: each ends with a validation."""
    return sum("accuracy" in own for seed in out.glob("seed-*") for own in read_metrics(seed))


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(folder: Path) -> dict[str, str]:
    """The hashes of all files in a folder, by name."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    if not files:
        raise UserError(f"{str(folder)!r} holds no files; docs/commands.md describes what belongs there")
    return {path.name: file_hash(path) for path in files}


def bench(work: Workspace, name: str, options: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `linformers bench`; returns the origin of the numbers, and the measured cells."""
    out = work.runs / name
    command("bench", *options, "--out", str(out))
    found = json.loads((out / "efficiency.json").read_text())
    return origin(found), found["cells"]


def scale(s: float, n: int, k: int) -> str:
    """The change to a recipe that lets E learn at s times the common rate: c of s = c·k/n."""
    return f"model.projection_scale={s * n / k:g}"
