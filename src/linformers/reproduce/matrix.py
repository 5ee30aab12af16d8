"""The runs behind the paper's figures: pretraining by a recipe, fine-tuning on a task, on corpora made of real text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..errors import UserError
from ..training.checkpointing import file_hash
from ..training.corpus import MANIFEST, Corpus
from ..training.finetune import Settings
from ..training.monitor import read_metrics
from ..training.prepare import prepare
from ..training.recipe import FREE, Recipe, read
from .jobs import ORIGIN, Job, Store

# The folders of a corpus under --data, and how many of its training files are taken.
CORPORA: dict[str, dict[str, int | None]] = {"wiki": {"wiki": 4}, "wiki-books": {"wiki": None, "books": None}}
SOURCES = "sources.json"

TASKS = ("sst2", "imdb", "qnli", "qqp")


@dataclass(frozen=True)
class Place:
    """Where everything is.

    Attributes:
        data: the folder of raw data, as docs/commands.md describes it.
        recipes: the folder of recipes.
        runs: the folder for runs, which may be deleted when all is done.
        results: the folder for results, which is kept.
        small: whether everything is to be tiny, as a test of the whole path on a CPU.
    """

    data: Path | None
    recipes: Path = Path("recipes/small")
    runs: Path = Path("runs/reproduce")
    results: Path = Path("results")
    small: bool = False

    @property
    def store(self) -> Store:
        return Store(self.results / "runs", self.data)

    def record(self, section: str) -> Path:
        """The json of a section."""
        return self.results / section / f"{section}.json"

    def read(self, section: str) -> dict[str, Any] | None:
        """What was written of a section before, if anything."""
        path = self.record(section)
        return json.loads(path.read_text()) if path.is_file() else None

    def folder(self, *names: str) -> Path:
        return self.data_folder().joinpath(*names)

    def data_folder(self) -> Path:
        if self.data is None:
            raise UserError("data is missing: name the folder of wiki, books and the tasks with --data DIR")
        return self.data

    def check(self) -> None:
        if self.data is not None and not self.data.is_dir():
            raise UserError(f"data={str(self.data)!r} is no folder")
        # The default comes with a clone alone, and is looked for where it is needed.
        if self.recipes != Place.recipes and not self.recipes.is_dir():
            raise UserError(f"recipes={str(self.recipes)!r} is no folder; recipes/small of a clone has them")

    def check_recipes(self, name: str = "n512-twin") -> None:
        """See that the recipes are there, by one that is needed, before a corpus is made for them."""
        if not (self.recipes / f"{name}.yaml").is_file():
            raise UserError(
                f"recipes={str(self.recipes)!r} holds no {name}.yaml; "
                "name the folder recipes/small of a clone with --recipes DIR"
            )


def corpus(place: Place, name: str, console: Console) -> Path:
    """A corpus of Wikipedia, or of that and books, as tokens."""
    has_text = place.data is not None and any((place.data / folder).exists() for folder in CORPORA[name])
    if not has_text and (found := corpus_folder(place, name) / MANIFEST).exists():
        if place.data is not None:
            console.print(f"{place.data} has no text for it: the corpus in {found.parent} is used", markup=False)
        return found.parent
    training, validation = [], []
    for folder, most in CORPORA[name].items():
        files = sorted(path for path in place.folder(folder).glob("*") if path.is_file())
        parts = [[path for path in files if path.name.startswith(split)] for split in ("train", "validation")]
        if not all(parts):
            raise UserError(f"data={str(place.data)!r} has no {folder} with files called train-… and validation…")
        training += parts[0][:most]
        validation += parts[1]
    options: dict[str, Any] = {"validation": list(map(str, validation))}
    if place.small:  # what is held out is enough text
        training, validation = validation, []
        options = {"validation_share": 0.3, "vocab_size": 300, "tokenizer_documents": 100}
    return tokens_of(place, name, training, console, also=validation, **options)


def tokens_of(
    place: Place, name: str, files: Sequence[Path], console: Console, *, also: Sequence[Path] = (), **options: Any
) -> Path:
    """A corpus of tokens, made of files unless it is there; one of other files (or others `also` used) is refused."""
    out = corpus_folder(place, name)
    sources = {f"{path.parent.name}/{path.name}": file_hash(path) for path in (*files, *also)}
    if (out / MANIFEST).exists():
        if json.loads((out / SOURCES).read_text()) != sources:
            raise UserError(f"{str(out)!r} was made of other files than data={str(place.data)!r}; choose other runs")
        return out
    out.mkdir(parents=True, exist_ok=True)
    (out / SOURCES).write_text(json.dumps(sources, indent=1) + "\n")
    prepare([str(path) for path in files], out, **options, console=console)
    return out


def corpus_folder(place: Place, name: str) -> Path:
    """Where a corpus is; a tiny one, which may be of the same files, is another."""
    return place.runs / "corpora" / (f"{name}-small" if place.small else name)


def pretraining(
    place: Place,
    tokens: Path,
    recipe_name: str,
    *,
    group: str,
    name: str = "",
    changes: Sequence[str] = (),
    shrink: bool = True,
) -> Job:
    """A run of `linformers pretrain`; its record is `group`/`name`, which is by default the recipe's name.

    Where everything is tiny, k and w shrink as n does, unless `changes` has done that.
    """
    name = f"{group}/{name or recipe_name}"
    out = place.runs / name
    path = place.recipes / f"{recipe_name}.yaml"
    every = [f"data={tokens}", f"out={out}", *changes_for(place, path, changes, shrink)]
    recipe = read(path, every)
    return Job(
        name=name,
        arguments=["pretrain", str(path), *every],
        out=out,
        decides={"recipe": _deciding(recipe), "corpus": Corpus.open(tokens).hash},
        collect=lambda: pretrained(out, recipe),
        steps=(recipe.steps, lambda: _last_step(out)),
    )


def changes_for(place: Place, recipe: Path, changes: Sequence[str], shrink: bool = True) -> list[str]:
    """The changes to a recipe, with those that make everything tiny where that is asked for."""
    if not place.small:
        return list(changes)
    return [*changes, *_tiny(read(recipe, changes), True)] if shrink else [*_tiny(read(recipe), False), *changes]


class Task(NamedTuple):
    """A task to fine-tune on: how `linformers finetune` is told of it, and what tells its data from other data."""

    arguments: list[str]
    data: dict[str, str]


def known_task(place: Place, name: str) -> Task:
    """One of the tasks that have a folder under the data."""
    return Task([name, "--data", str(place.data_folder())], hashes(place.folder(name)))


def finetuning(
    place: Place, name: str, model: Path, task: Task, settings: Settings, identity: Any, after: Job | None = None
) -> Job:
    """A run of `linformers finetune` on a model, which `identity` tells from others and `after` leaves behind."""
    out = place.runs / name
    options = {
        "seeds": settings.seeds,
        "epochs": settings.epochs,
        "batch-size": settings.batch_size,
        "learning-rate": settings.learning_rate,
    }
    if settings.max_length:
        options["max-length"] = settings.max_length
    return Job(
        name=name,
        arguments=["finetune", *task.arguments, "--model", str(model), "--out", str(out), *flags(options)],
        out=out,
        decides={"model": identity, **options, "data": task.data},
        collect=lambda: without_origin(json.loads((out / "results.json").read_text())),
        steps=(settings.seeds * settings.epochs, lambda: _epochs(out)),
        after=None if after is None else (after, model.exists),
    )


def to_fill(section: str, names: Sequence[str]) -> list[str]:
    """What a page says of the runs that it lacks: what runs them."""
    if not names:
        return []
    only = " ".join(f"--only {shlex.quote(name)}" for name in names)
    return [
        f"- What is missing was not run to its end yet; `linformers reproduce {section} --data DIR {only}` fills it."
    ]


def flags(options: Mapping[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def model_of(place: Place, job: Job) -> Path:
    """The model that a pretraining leaves behind."""
    return place.runs / job.name / "model"


def pretrained(out: Path, recipe: Recipe) -> dict[str, Any]:
    """Of a run's metrics, what figures need; not its speed, since other runs may have shared its GPU."""
    records = read_metrics(out)
    curve = [[r["step"], r["perplexity"]] for r in records if "perplexity" in r]
    return {
        "perplexity": curve[-1][1],
        "curve": curve,
        "loss": [[r["step"], r["loss"]] for r in records if "loss" in r],
        "tokens_per_step": recipe.batch_size * recipe.max_length,
        "seed": recipe.seed,
    }


def _deciding(recipe: Recipe) -> dict[str, Any]:
    fields = {name: value for name, value in recipe.to_dict().items() if name not in FREE and value is not None}
    # What is `None` by default is known by what becomes of it; records of unshifted windows are older than the field.
    model = {name: value for name, value in recipe.model.items() if name not in ("shifted_windows", "projection_scale")}
    config = recipe.config(vocab_size=1000)
    if config.projection == "linear":
        model["projection_scale"] = config.projection_scale
    if config.shifted_windows:
        model["shifted_windows"] = True
    return {**fields, "model": model}


def _tiny(recipe: Recipe, shrink: bool) -> list[str]:
    """Changes that make a run take seconds on a CPU; n, k and w keep their proportions."""
    n = recipe.model["max_position_embeddings"]
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": n // 8,
    }
    if shrink:
        fields["projected_length"] = recipe.model["projected_length"] // 8
        fields["local_window"] = recipe.model.get("local_window", 0) // 8
    sizes = {"steps": 8, "batch_size": 8, "warmup_steps": 2, "eval_every": 4, "eval_rows": 8, "save_every": 4}
    sizes |= {"log_every": 2, "workers": 0}
    return [*(f"model.{name}={value}" for name, value in fields.items()), *(f"{n}={v}" for n, v in sizes.items())]


def without_origin(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a command wrote, but for where it comes from, which stands in the record of its run."""
    return {name: value for name, value in result.items() if name not in ("made_with", *ORIGIN)}


def _epochs(out: Path) -> int:
    """How many epochs of all seeds are done: each ends with a validation."""
    return sum("accuracy" in record for seed in out.glob("seed-*") for record in read_metrics(seed))


def _last_step(out: Path) -> int:
    records = read_metrics(out)
    return records[-1]["step"] if records else 0


def hashes(folder: Path) -> dict[str, str]:
    """What tells these files from others."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    if not files:
        raise UserError(f"{str(folder)!r} holds no files: expected a task's, as docs/commands.md describes them")
    return {path.name: file_hash(path) for path in files}
