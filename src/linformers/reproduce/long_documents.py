"""Long documents: IMDB in bytes at n = 4096, the text task of the Long Range Arena (Tay et al., 2021), at its size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from ..benchmark.efficiency import FUSED
from ..config import LinformerConfig
from ..encoder import LinformerModel
from ..markdown import table
from ..training.checkpointing import write_whole
from ..training.finetune import Settings
from ..training.recipe import read
from ..training.tokenizer import train_tokenizer
from .jobs import REPEATED, Job, digest
from .matrix import (
    Place,
    Task,
    changes_for,
    finetuning,
    flags,
    known_task,
    model_of,
    pretraining,
    to_fill,
    tokens_of,
)

GROUP, RECIPE, STEPS, EARLY = "long", "imdb-bytes", 3000, 1000
N = 4096
BYTES = 256 + 5  # and the special tokens
BATCH = 32
PRETRAINED = Settings(seeds=1, epochs=6, batch_size=BATCH, learning_rate=3e-4)
TINY = Settings(seeds=1, epochs=1, batch_size=128, learning_rate=1e-3, max_length=64)

TWIN, LOCAL, GROWING = "Transformer twin", "Linformer k=128 w=32", "Linformer k=128 w=2-4-8-32"
MODELS: dict[str, dict[str, Any]] = {
    TWIN: {"projection": "identity"},
    "Linformer k=256": {"projected_length": 256},
    LOCAL: {"projected_length": 128, "local_window": 32},
}
# From nothing alone: a word is a few bytes, of which a wide window shows little before anything is learned.
NARROW: dict[str, dict[str, Any]] = {
    "Linformer k=128 w=4": {"projected_length": 128, "local_window": 4},
    GROWING: {"projected_length": 128, "local_window": [2, 4, 8, 32]},
}
# What each is called by `linformers bench`.
TIMED = {TWIN: FUSED} | {name: name for name in MODELS if name.startswith("Linformer")}
SPEED = f"{GROUP}/speed"
# Accuracies of Tay et al. (2021), table 1, column Text.
PUBLISHED = {TWIN: 64.27, "Linformer k=256": 53.94}


class Trial(NamedTuple):
    """A way to train a model from nothing: the common one, unless it says otherwise."""

    rate: float = 5e-4
    dropout: float = 0.1
    epochs: int = 12

    @property
    def ending(self) -> str:
        """How the name of its run ends."""
        return "".join(f"-{field}-{own:g}" for field, own in self._asdict().items() if own != getattr(COMMON, field))

    @property
    def words(self) -> str:
        return f"{self.epochs} epochs at a rate of {self.rate:g} with dropout {self.dropout:g}"

    @property
    def changes(self) -> list[str]:
        """Those to the recipe."""
        return [] if self.dropout == COMMON.dropout else [f"model.hidden_dropout_prob={self.dropout}"]

    @property
    def settings(self) -> Settings:
        return Settings(seeds=1, epochs=self.epochs, batch_size=BATCH, learning_rate=self.rate)


class Outcome(NamedTuple):
    """What came of training a model.

    Attributes:
        accuracy: on the test set, of the weights that did best on the validation set; `None` if it was not tested.
        validation: their accuracy there.
        stopped_after: so many epochs, where something cut it off before its end.
    """

    accuracy: float | None = None
    validation: float | None = None
    stopped_after: int | None = None

    @property
    def complete(self) -> bool:
        return self.accuracy is not None and self.stopped_after is None

    @property
    def words(self) -> str:
        if self.validation is None:
            return "missing"
        tested = "–" if self.accuracy is None else f"{100 * self.accuracy:.1f}"
        cut = f", stopped after {self.stopped_after}" if self.stopped_after else ""
        return f"{tested} ({100 * self.validation:.1f}{cut})"


# From nothing a model takes off or does not, and then soon knows its texts by heart. The validation set chooses.
COMMON = Trial()
TRIALS: dict[str, tuple[Trial, ...]] = dict.fromkeys(
    (*MODELS, *NARROW), (COMMON, Trial(rate=1e-4), Trial(rate=1e-4, dropout=0.3, epochs=24))
)
TRIALS[LOCAL] += (Trial(rate=2e-4), Trial(rate=1e-3))
for narrow in NARROW:
    TRIALS[narrow] += (Trial(dropout=0.3, epochs=24),)
TRIALS[GROWING] += (Trial(rate=1e-4, epochs=24), Trial(rate=2e-4))


def untrained(place: Place) -> dict[str, dict[str, Any]]:
    """The models that are trained from nothing; where everything is tiny, windows are narrow as it is."""
    return MODELS if place.small else MODELS | NARROW


def trials(place: Place, model: str) -> tuple[Trial, ...]:
    return (COMMON,) if place.small else TRIALS[model]


def names(place: Place) -> list[str]:
    """What its runs are called."""
    tuned = [name(model) for model in MODELS for name in (masked_name, pretrained_name)]
    return [SPEED, *(run_name(model, trial) for model in untrained(place) for trial in trials(place, model)), *tuned]


def jobs(place: Place, console: Console) -> list[Job]:
    """Each model on the task, from nothing and from masked bytes of its training texts; and the time of a step."""
    imdb = known_task(place, "imdb")
    texts = sorted(path for path in place.folder("imdb").glob("train*") if path.is_file())
    share = 0.3 if place.small else 0.05
    tokens = tokens_of(place, RECIPE, texts, console, vocab_size=BYTES, validation_share=share)
    found = [speed(place)]
    for name, fields in untrained(place).items():
        changes = [f"steps={STEPS}", *(f"model.{field}={value}" for field, value in fields.items())]
        found += [from_nothing(place, name, imdb, changes, trial) for trial in trials(place, name)]
        if name not in MODELS:
            continue
        masked = masked_name(name).removeprefix(f"{GROUP}/")
        before = pretraining(place, tokens, RECIPE, group=GROUP, name=masked, changes=changes)
        settings = TINY if place.small else PRETRAINED
        after = finetuning(place, pretrained_name(name), model_of(place, before), imdb, settings, before.key, before)
        found += [before, after]
    return found


def from_nothing(place: Place, name: str, imdb: Task, changes: list[str], trial: Trial) -> Job:
    """Training a model that knows nothing, as the arena does."""
    path = place.recipes / f"{RECIPE}.yaml"
    model = read(path, changes_for(place, path, [*changes, *trial.changes])).config(vocab_size=BYTES)
    identity = {field: value for field, value in model.to_diff_dict().items() if field != "transformers_version"}
    start = place.runs / f"{run_name(name)}-start-{digest(identity)}"
    if not start.exists():
        write_whole(start, lambda folder: save_untrained(folder, model))
    return finetuning(place, run_name(name, trial), start, imdb, TINY if place.small else trial.settings, identity)


def speed(place: Place) -> Job:
    """A training step of each model at the batch size of the runs, on documents that fill n."""
    out = place.runs / SPEED
    options: dict[str, Any] = {"lengths": N, "projected": "128,256", "windows": 32}
    options |= {"tokens": BATCH * N, "layers": 4, "hidden": 256}
    if place.small:
        options |= {"lengths": 512, "tokens": 512, "layers": 1, "hidden": 64}
    arguments = ["bench", *flags(options), "--task", "training", "--models", "twin,linformer", "--out", str(out)]
    return Job(
        name=SPEED,
        arguments=[*arguments, *([] if place.small else ["--compile"])],
        out=out,
        decides=options,
        collect=lambda: {"cells": json.loads((out / "efficiency.json").read_text())["lengths"]},
        steps=(1, lambda: int((out / "efficiency.json").exists())),
        alone=True,
    )


def run_name(model: str, trial: Trial = COMMON) -> str:
    """What training a model from nothing is called."""
    return f"{GROUP}/{model.replace(' ', '-').replace('=', '')}{trial.ending}"


def masked_name(model: str) -> str:
    return f"{run_name(model)}-masked-bytes"


def repeated_name(model: str) -> str:
    """What the pretraining is called that was repeated for fine-tuning, as the weights of the first were gone."""
    return f"{masked_name(model)}{REPEATED}"


def pretrained_name(model: str) -> str:
    return f"{run_name(model)}-pretrained"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte: a vocabulary with no room for more."""
    return train_tokenizer([], BYTES)


def save_untrained(folder: Path, model: LinformerConfig) -> None:
    """Initial weights and the tokenizer of bytes, as `finetune` takes them."""
    torch.manual_seed(0)
    LinformerModel(model).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = model.max_position_embeddings
    tokenizer.save_pretrained(folder)


def collect(place: Place) -> dict[str, Any]:
    """Of each model the accuracies, and the seconds and the memory of a training step; `None` where one is missing."""
    results, runs = place.store.results(names(place))
    cells = {cell["model"]: cell for cell in results.get(SPEED, {}).get("cells", ())}
    rows = {}
    for model in untrained(place):
        timed = TIMED.get(model)
        cell = cells.get(f"{timed}, compiled") or cells.get(timed) or {}
        outcomes = {trial: outcome(results.get(run_name(model, trial))) for trial in trials(place, model)}
        chosen = best(outcomes)
        rows[model] = {
            "trials": [{**trial._asdict(), **own._asdict()} for trial, own in outcomes.items()],
            "accuracy": chosen and outcomes[chosen].accuracy,
            "pretrained": outcome(results.get(pretrained_name(model))).accuracy,
            "perplexity": results.get(masked_name(model), {}).get("perplexity"),
            "masked_bytes": results.get(masked_name(model), {}).get("curve"),
            "repeated": again["result"]["perplexity"] if (again := place.store.read(repeated_name(model))) else None,
            "seconds": cell.get("seconds"),
            "peak_bytes": cell.get("peak_bytes"),
        }
    return {"runs": runs, "rows": rows}


def outcome(result: Mapping[str, Any] | None) -> Outcome:
    """What the record of a run says, if there is one."""
    if result is None:
        return Outcome()
    accuracy = result["accuracy"] and result["accuracy"][0]
    return Outcome(accuracy, result["seeds"][0]["validation_accuracy"], result.get("stopped_after"))


def page(record: Mapping[str, Any]) -> list[str]:
    """Our accuracies beside the published ones, and what training takes."""
    rows, missing = [], []
    for model, own in record["rows"].items():
        lacking = [run_name(model, trial) for trial, found in tried(own).items() if not found.complete]
        lacking += [pretrained_name(model)] if own["pretrained"] is None and model in MODELS else []
        missing += [name.rpartition("/")[2] for name in lacking]
        begun = any(found.validation is not None for found in tried(own).values())
        untested = "cut off" if begun else "missing"
        accuracy = untested if own["accuracy"] is None else f"{100 * own['accuracy']:.1f}"
        if (count := sum(found.accuracy is not None for found in tried(own).values())) > 1:
            accuracy += f" (of {count})"
        none = "missing" if model in MODELS else "–"
        pretrained = none if own["pretrained"] is None else f"{100 * own['pretrained']:.1f}"
        perplexity = none if own["perplexity"] is None else f"{own['perplexity']:.2f}"
        time = none if own["seconds"] is None else f"{1000 * own['seconds']:.1f}"
        memory = f"{own['peak_bytes'] / 2**20:,.0f}" if own["peak_bytes"] else "–"
        rows.append((model, str(PUBLISHED.get(model, "–")), accuracy, perplexity, pretrained, time, memory))
    if any(own["seconds"] is None for model, own in record["rows"].items() if model in MODELS):
        missing.append(SPEED.rpartition("/")[2])
    return [
        *table(
            (
                "model",
                "published",
                "from nothing",
                "perplexity of masked bytes",
                "pretrained",
                "ms of a training step",
                "its MiB",
            ),
            rows,
        ),
        "Accuracy on 25,000 texts in percent, of which chance has 50; one seed, 4 to 5M parameters, and a text is "
        "labelled by the mean of its bytes; several w are those of the four layers. Published: Tay et al. (2021), from "
        "nothing, whose best efficient model has 65.9; their Linformer's k may be another. From nothing: the tested "
        "run that is best on the validation set (5% of the training texts, where two points may be chance), and of how "
        "many. "
        f"Pretrained: after {STEPS:,} steps of masked bytes of the task's own training texts, as Amos et al. (2024) "
        f"advise, and nothing else; then {PRETRAINED.epochs} epochs at a rate of {PRETRAINED.learning_rate:g}. "
        f"A step is forward and backward of {BATCH} documents of {N:,} bytes, compiled, its memory what it takes "
        "beside the weights.",
        "",
        "Every way to train from nothing that was tried: accuracy, and (on the validation set, which chooses; where a "
        "run was cut off, after how many epochs):",
        "",
        *table(("", *record["rows"]), trial_rows(record)),
        *(f"- {line}" for line in claims(record)),
        *to_fill("long", missing),
        "",
    ]


def tried(row: Mapping[str, Any]) -> dict[Trial, Outcome]:
    """Each way to train a model from nothing, and what came of it."""
    return {
        Trial(*(own[field] for field in Trial._fields)): Outcome(*(own[field] for field in Outcome._fields))
        for own in row["trials"]
    }


def best(outcomes: Mapping[Trial, Outcome]) -> Trial | None:
    """Of the ways to train a model from nothing that were tested, which did best on the validation set."""
    tested = {trial: own.validation or 0 for trial, own in outcomes.items() if own.accuracy is not None}
    return max(tested, key=lambda trial: tested[trial], default=None)


def trial_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each way to train from nothing, and what it gives each model that it is for."""
    by_model = [tried(own) for own in record["rows"].values()]
    every = dict.fromkeys(itertools.chain(*by_model))
    return [(trial.words, *(own[trial].words if trial in own else "–" for own in by_model)) for trial in every]


def claims(record: Mapping[str, Any]) -> list[str]:
    """From nothing, each model beside what was published; and from each start, each Linformer beside its twin."""
    rows, lines = record["rows"], []
    for model, own in rows.items():
        published, whose = PUBLISHED.get(model), "published"
        if published is None:
            published, whose = PUBLISHED[TWIN], "Transformer's published"
        outcomes = tried(own)
        if (trial := best(outcomes)) is not None:
            accuracy, epochs = 100 * own["accuracy"], outcomes[trial].stopped_after
            how = "above" if accuracy > published else "below"
            cut = f" It was cut off after {epochs} of {trial.epochs} epochs." if epochs else ""
            lines.append(f"{model}, from nothing: {accuracy:.1f}, {how} the {whose} {published}.{cut}")
    by_model = {model: tried(own)[COMMON] for model, own in rows.items()}
    common = {model: own.accuracy if own.complete else None for model, own in by_model.items()}
    pretrained = {model: own["pretrained"] for model, own in rows.items()}
    for start, accuracies in ((f"From nothing, by {COMMON.words}", common), ("Pretrained", pretrained)):
        twin = accuracies.pop(TWIN)
        if twin is not None and any(accuracies.values()):
            found = [f"{model} {100 * (own - twin):+.1f}" for model, own in accuracies.items() if own is not None]
            lines.append(f"{start}, in points beside its twin: {', '.join(found)}.")
    lines += [
        f"{model} was pretrained again for fine-tuning, which had lost the weights, and ended at {own['repeated']:.2f}."
        for model, own in rows.items()
        if own["repeated"] is not None
    ]
    early = {
        model: dict(map(tuple, own["masked_bytes"])).get(EARLY) for model, own in rows.items() if own["masked_bytes"]
    }
    if len(early) > 1 and None not in early.values():
        named = ", ".join(f"{model} {own:.1f}" for model, own in early.items())
        lines.append(
            "Masked bytes were learned at one rate, tuned for none of the models, and not all of them began early: "
            f"after {EARLY:,} of {STEPS:,} steps the perplexities are {named}."
        )
    return lines
