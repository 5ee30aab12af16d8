"""Long documents: IMDB as bytes at n = 4096, the text task of the Long Range Arena (Tay et al., 2021), at its size."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from linformers import LinformerModel
from linformers.training.recipe import read

from . import experiments
from .experiments import Task, Tuning, Workspace, finetuning
from .jobs import REPEATED, Job, digest
from .sections import main

TITLE = "Long documents: IMDB as bytes, n = 4096"
RECIPE, STEPS, EARLY = "imdb-bytes", 3000, 1000
N, BATCH = 4096, 32
BYTES = 256 + 5  # and the special tokens
PRETRAINED = Tuning(seeds=1, epochs=6, batch_size=BATCH, learning_rate=3e-4)
TINY = Tuning(seeds=1, epochs=1, batch_size=128, learning_rate=1e-3, max_length=64)

TWIN, PURE, LOCAL = "Transformer twin", "Linformer k=256", "Linformer k=128 w=32"
NARROW, GROWING = "Linformer k=128 w=4", "Linformer k=128 w=2-4-8-32"
WINDOW = ("model.projected_length=128", "model.shifted_windows=false")
# The changes to the recipe. The last two are only trained from scratch: a narrow window sees a word of a few bytes
# before anything is learned.
MODELS: dict[str, tuple[str, ...]] = {
    TWIN: ("model.projection=identity",),
    PURE: ("model.projected_length=256",),
    LOCAL: (*WINDOW, "model.local_window=32"),
    NARROW: (*WINDOW, "model.local_window=4"),
    GROWING: (*WINDOW, "model.local_window=[2,4,8,32]"),
}
ALSO_PRETRAINED = (TWIN, PURE, LOCAL)
# The names of `linformers bench`.
TIMED = {TWIN: "Transformer, fused", PURE: PURE, LOCAL: LOCAL}
# Accuracies of Tay et al. (2021), table 1, column Text.
PUBLISHED = {TWIN: 64.27, PURE: 53.94}


class Trial(NamedTuple):
    """A way to train a model from scratch."""

    rate: float = 5e-4
    dropout: float = 0.1
    epochs: int = 12

    @property
    def suffix(self) -> str:
        """Of the run's name: what differs from the common way."""
        return "".join(f"-{name}-{own:g}" for name, own in self._asdict().items() if own != getattr(COMMON, name))

    @property
    def changes(self) -> list[str]:
        return [] if self.dropout == COMMON.dropout else [f"model.hidden_dropout_prob={self.dropout}"]

    @property
    def tuning(self) -> Tuning:
        return Tuning(seeds=1, epochs=self.epochs, batch_size=BATCH, learning_rate=self.rate)


# From scratch, a model soon memorizes its texts. The validation set chooses among the trials.
COMMON = Trial()
TRIALS: dict[str, tuple[Trial, ...]] = dict.fromkeys(
    MODELS, (COMMON, Trial(rate=1e-4), Trial(rate=1e-4, dropout=0.3, epochs=24))
)
TRIALS[LOCAL] += (Trial(rate=2e-4), Trial(rate=1e-3))
TRIALS[NARROW] += (Trial(dropout=0.3, epochs=24),)
TRIALS[GROWING] += (Trial(dropout=0.3, epochs=24), Trial(rate=1e-4, epochs=24), Trial(rate=2e-4))


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        accuracy: on the test set, of the weights that did best on the validation set; `None` if not tested.
        validation: their accuracy on the validation set; `None` if the run is missing.
        stopped_after: the number of epochs, if the run was cut off.
    """

    accuracy: float | None = None
    validation: float | None = None
    stopped_after: int | None = None


def models(work: Workspace) -> tuple[str, ...]:
    """The models to train from scratch; tiny ones have narrow windows anyway."""
    return ALSO_PRETRAINED if work.small else tuple(MODELS)


def trials(work: Workspace, model: str) -> tuple[Trial, ...]:
    return (COMMON,) if work.small else TRIALS[model]


def run_name(model: str, trial: Trial = COMMON, suffix: str = "") -> str:
    return f"long/{model.replace(' ', '-').replace('=', '')}{trial.suffix}{suffix}"


def masked_name(model: str) -> str:
    """Pretraining on masked bytes."""
    return run_name(model, suffix="-masked-bytes")


def pretrained_name(model: str) -> str:
    """Fine-tuning of the pretrained model."""
    return run_name(model, suffix="-pretrained")


def names(work: Workspace) -> list[str]:
    tuned = [name(model) for model in ALSO_PRETRAINED for name in (masked_name, pretrained_name)]
    return [*(run_name(model, trial) for model in models(work) for trial in trials(work, model)), *tuned]


def jobs(work: Workspace) -> list[Job]:
    """Each model from scratch, and from masked bytes of the training texts."""
    imdb = experiments.known_task(work, "imdb")
    texts = sorted(path for path in work.folder("imdb").glob("train*") if path.is_file())
    options = {"vocab-size": BYTES, "validation-share": 0.3 if work.small else 0.05}
    tokens = experiments.prepare(work, RECIPE, texts, options=options)
    found = []
    for model in models(work):
        changes = [f"steps={STEPS}", *MODELS[model]]
        found += [from_scratch(work, model, imdb, tokens, changes, trial) for trial in trials(work, model)]
        if model in ALSO_PRETRAINED:
            before = experiments.pretraining(work, tokens, RECIPE, masked_name(model), changes)
            tuning = TINY if work.small else PRETRAINED
            found += [before, finetuning(work, pretrained_name(model), imdb, tuning, before)]
    return found


def from_scratch(work: Workspace, model: str, imdb: Task, tokens: Path, changes: Sequence[str], trial: Trial) -> Job:
    """Fine-tuning of a model with initial weights, as in the arena."""
    path, own = experiments.recipe_of(RECIPE)
    recipe = read(path, [*own, *experiments.changes_for(work, RECIPE, [*changes, *trial.changes])])
    identity = experiments.describe_model(recipe)
    start = work.runs / run_name(model, suffix=f"-start-{digest(identity)}")
    if not start.exists():
        unfinished = start.with_name(f"{start.name}.unfinished")
        torch.manual_seed(0)
        LinformerModel(recipe.config(vocab_size=BYTES)).save_pretrained(unfinished)
        tokenizer = AutoTokenizer.from_pretrained(tokens / "tokenizer", model_max_length=recipe.max_length)
        tokenizer.save_pretrained(unfinished)
        shutil.move(unfinished, start)
    tuning = TINY if work.small else trial.tuning
    return finetuning(work, run_name(model, trial), imdb, tuning, (start, identity))


def measure(work: Workspace) -> dict[str, Any]:
    """Time and memory of a training step of each model at the batch size of the runs, on documents of n bytes."""
    sizes: dict[str, Any] = {"lengths": N, "projected": "128,256", "windows": 32, "tokens": BATCH * N}
    sizes |= {"layers": 4, "hidden": 256}
    if work.small:
        sizes |= {"lengths": 512, "tokens": 512, "layers": 1, "hidden": 64}
    compiled = [] if work.small else ["--compile"]
    options = [*experiments.flags(sizes), "--task", "training", "--models", "twin,linformer", *compiled]
    where, cells = experiments.bench(work, "long/speed", options)
    return {"runs": {"long/speed": where}, "cells": cells}


def collect(work: Workspace) -> dict[str, Any]:
    """Accuracies of each model, and seconds and memory of a training step; `None` where a run is missing."""
    results, origins = work.records.results_of([*names(work), *(f"{masked_name(own)}{REPEATED}" for own in MODELS)])
    timed = work.read("long") or {"runs": {}, "cells": ()}
    cells = {cell["model"]: cell for cell in timed["cells"]}
    outcomes = {
        model: {trial: outcome(results.get(run_name(model, trial))) for trial in trials(work, model)}
        for model in models(work)
    }
    rows = {}
    for model, own in outcomes.items():
        masked, bench_name = results.get(masked_name(model), {}), TIMED.get(model)
        rows[model] = {
            "trial": (chosen := best(own)),
            "outcome": own[chosen] if chosen else Outcome(),
            "tested": sum(found.accuracy is not None for found in own.values()),
            "begun": any(found.validation is not None for found in own.values()),
            "pretrained": outcome(results.get(pretrained_name(model))).accuracy,
            "perplexity": masked.get("perplexity"),
            "early": dict(map(tuple, masked.get("curve", ()))).get(EARLY),
            "repeated": results.get(f"{masked_name(model)}{REPEATED}", {}).get("perplexity"),
            "cell": cells.get(f"{bench_name}, compiled") or cells.get(bench_name),
            "published": PUBLISHED.get(model),
        }
    every = dict.fromkeys(trial for own in outcomes.values() for trial in own)
    incomplete = [name for name in names(work) if name not in results or results[name].get("stopped_after")]
    return {
        "runs": {**timed["runs"], **origins},
        "rows": rows,
        "trials": {trial: [own.get(trial) for own in outcomes.values()] for trial in every},
        "also_pretrained": ALSO_PRETRAINED,
        "published_twin": PUBLISHED[TWIN],
        "steps": STEPS,
        "early": EARLY,
        "tuning": PRETRAINED,
        "missing": [name.partition("/")[2] for name in incomplete],
    }


def outcome(result: Mapping[str, Any] | None) -> Outcome:
    if result is None:
        return Outcome()
    accuracy = result["accuracy"] and result["accuracy"][0]
    return Outcome(accuracy, result["seeds"][0]["validation_accuracy"], result.get("stopped_after"))


def best(outcomes: Mapping[Trial, Outcome]) -> Trial | None:
    """Of the trials that were tested, the best one on the validation set."""
    tested = {trial: own.validation or 0 for trial, own in outcomes.items() if own.accuracy is not None}
    return max(tested, key=lambda trial: tested[trial], default=None)


if __name__ == "__main__":
    main(["long"])
