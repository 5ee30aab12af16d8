"""Fine-tuning on a task over several seeds (section 5.2): classes, several labels at once, or numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainingArguments, set_seed

from .. import LinformerConfig, LinformerForSequenceClassification, LinformerModel
from ..checks import check_choice, check_model, check_positive, check_size, make_folder
from ..errors import UserError, counted
from ..files import damage, read_json, write_file, write_folder
from ..provenance import sentence
from . import checkpoints, tasks
from .labels import PROBLEMS, SCORES, f1_of, scores_of
from .pretrain import model_card, save_model
from .recipe import COMPILE, PRECISIONS
from .rows import EpochOrder, collate, encode, load_tokenizer, longest_first
from .tasks import TaskData, plus_minus, spread
from .trainer import MODEL, ExactTrainer, common_arguments, compile_model, train

BEST, RESULT = "best", "result.json"  # the folder of a seed's best weights, and its scores in there
MIN_STEPS_TO_COMPILE = 1000  # about what a minute of compiling saves
FEW_STEPS, HIGH_RATE = 100, 1e-3  # below FEW_STEPS, a low learning rate hardly changes a small model
# The default learning rate: what RoBERTa-base takes, and what the bundled model of 256 channels took on 1,500 reviews
# (accuracy 78.2, against 59.4 with RoBERTa's); in between, a power of the number of channels.
RATES = {768: 5e-5, 256: HIGH_RATE}
OUTPUT = "classifier.output"  # the last linear layer
TINY = 1e-30  # the smallest standard deviation of numbers
USE = {  # in the card
    "single": "",
    "multi": "`pipe(text, top_k=None)` gives the score of each label; a text has those with a score above 0.5. ",
    "regression": "The `score` that `pipe(text)` gives is the number. ",
}


@dataclass(frozen=True)
class Settings:
    """How to fine-tune."""

    seeds: int = 3  # number of runs, with seeds 0, 1, …
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float | None = None  # peak, with linear decay to 0; by default, what fits the size of the model
    max_length: int = 0  # tokens of a text to read; 0: as many as the model takes
    precision: str = "auto"  # "bf16", "float32", or "auto": bf16 if the GPU supports it
    compile: str = "auto"  # "yes", "no", or "auto": on a GPU, if all seeds together take 1,000 steps or more

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch_size"):
            check_size(name, getattr(self, name))
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("compile", self.compile, COMPILE)
        if self.max_length:
            check_size("max_length", self.max_length)


def finetune(task: str, out: Path, *, model: Path, console: Console, command: str, **options: Any) -> int:
    """Fine-tune a model on a named task or a labeled table; the options are those of `tasks.load` and `Settings`."""
    names = [f.name for f in dataclasses.fields(Settings)]
    settings = Settings(**{name: options.pop(name) for name in names if name in options})
    return run(tasks.load(task, **options), model, out, settings, console, command)


def run(task: TaskData, model: Path, out: Path, settings: Settings, console: Console, command: str) -> int:
    """Fine-tune with each seed, report on the test set, and save the model that is best on the validation set.

    A finished seed is not repeated, and an interrupted one resumes. Returns an exit code, see `trainer.train`.
    """
    if settings.learning_rate is None:
        check_model("model", model)
        rate = default_rate(LinformerConfig.from_pretrained(model).hidden_size)
        settings = dataclasses.replace(settings, learning_rate=rate)
    runs = FineTuning(task, model, out, settings, console)
    make_folder("out", out)
    with checkpoints.locked(out):
        hashes = {"data": task.hash(), "weights": checkpoints.model_hash(model)}
        recorded = {"task": task.name, "model": str(model), **dataclasses.asdict(settings), "hash": hashes}
        checkpoints.claim(out, "finetune", recorded, free=("seeds", "compile"))
        if (done := len(list(out.glob(f"seed-*/{BEST}")))) > settings.seeds:
            raise UserError(f"out={str(out)!r} holds {counted(done, 'seed')}, more than seeds={settings.seeds}")
        runs.print_sizes()
        for seed in range(settings.seeds):
            folder = out / f"seed-{seed}"
            if (folder / BEST).exists():
                _check_intact(folder / BEST)
            elif code := runs.train(seed, folder):
                return code
            checkpoints.remove_old(folder, keep=0)
        runs.report(hashes["weights"], command)
    return 0


def default_rate(hidden_size: int) -> float:
    """The peak learning rate for a model of so many channels, rounded to two digits."""
    (large, low), (small, high) = RATES.items()
    power = math.log(high / low) / math.log(large / small)
    return float(f"{low * (large / max(small, min(hidden_size, 2 * large))) ** power:.1e}")


@dataclass
class FineTuning:
    """Runs with several seeds; see `run`."""

    task: TaskData
    model: Path
    out: Path
    settings: Settings
    console: Console

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(self.model, self.settings.max_length)
        self.max_length = self.tokenizer.model_max_length
        self.encoder = load_encoder(self.model, self.max_length)
        names = ("train", "validation", "test")
        self.sets = {name: encode(getattr(self.task, name), self.tokenizer, self.max_length) for name in names}
        self.sets |= {name: longest_first(self.sets[name]) for name in names[1:]}
        self.steps_per_epoch = max(1, len(self.task.train) // self.settings.batch_size)
        self.steps = self.settings.epochs * self.steps_per_epoch
        self.problem = PROBLEMS[self.task.problem]
        self.mean, self.scale = 0.0, 1.0
        if self.task.problem == "regression":
            labels = self.task.targets([example.label for example in self.task.train])
            self.mean = float(np.float32(labels.mean()))
            self.scale = 2.0 ** round(math.log2(max(labels.std(), TINY)))

    def targets(self, labels: list[Any]) -> np.ndarray:
        """What the model is trained on; numbers are standardized."""
        targets = self.task.targets(labels)
        if self.task.problem == "regression":
            targets = ((targets - self.mean) / self.scale).astype(np.float32)
        return targets

    def scores(self, logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        if self.task.problem == "regression":
            logits, targets = (self.mean + self.scale * values for values in (logits, targets))
        return scores_of(self.task.problem, logits, targets)

    def print_sizes(self) -> None:
        train, validation, test = (f"{len(rows):,}" for rows in self.sets.values())
        sizes = f"{train} to train on, {validation} to select on, {test} to report on ({self.task.reported_on})"
        self.console.print(f"{self.task.name}, rows: {sizes}", highlight=False)
        self.console.print(self.task.summary(), highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"peak learning rate {self.settings.learning_rate:g}", highlight=False)
        rows = [row for part in self.sets.values() for row in part]
        if cut := sum(row["cut"] for row in rows):
            longer = f"texts longer than {self.max_length:,} tokens, which are cut: {cut:,} of {len(rows):,}"
            remedy = "with a larger --max-length, the model is lengthened and reads more"
            self.console.print(f"{longer}; {remedy}", style="yellow", highlight=False, soft_wrap=True)
        if self.steps < FEW_STEPS:
            assert self.settings.learning_rate is not None
            low = self.settings.learning_rate < HIGH_RATE
            rate = f" For a small model, also use --learning-rate {HIGH_RATE:g}." if low else ""
            few = f"Only {counted(self.steps, 'step')}: use more --epochs or a smaller --batch-size.{rate}"
            self.console.print(few, style="yellow", highlight=False)

    def train(self, seed: int, folder: Path) -> int:
        """Train with one seed; keep its best weights and its scores."""
        folder.mkdir(exist_ok=True)
        settings, rows_per_step, score = self.settings, self.settings.batch_size, self.problem.scores[0]
        set_seed(seed)
        classifier = new_classifier(self.encoder, self.task.label_names, self.task.problem)
        too_short = settings.compile == "auto" and self.steps * settings.seeds < MIN_STEPS_TO_COMPILE
        compile_model(classifier, "no" if too_short else settings.compile, any_length=True)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=self.steps,
            per_device_train_batch_size=rows_per_step,
            per_device_eval_batch_size=2 * rows_per_step,
            learning_rate=settings.learning_rate,
            warmup_steps=int(0.06 * self.steps),
            weight_decay=0.01,
            adam_beta2=0.98,
            adam_epsilon=1e-6,
            logging_steps=max(1, self.steps // 30),
            eval_steps=self.steps_per_epoch,
            save_steps=self.steps_per_epoch,
            save_total_limit=2,
            metric_for_best_model=score,
            greater_is_better=self.problem.higher_is_better,
            seed=seed,
            **common_arguments(settings.precision),
        )
        trainer_class: Any = ExactTrainer
        if self.task.problem == "regression":
            trainer_class = partial(RegressionTrainer, mean=self.mean, scale=self.scale)
        trainer = trainer_class(
            classifier,
            arguments,
            data_collator=partial(
                collate,
                pad_token_id=self.tokenizer.pad_token_id,
                max_length=self.max_length,
                targets=self.targets,
            ),
            train_dataset=EpochOrder(self.sets["train"], seed, self.steps * rows_per_step, rows_per_step),
            eval_dataset=self.sets["validation"],
            compute_metrics=lambda outputs: self.scores(outputs.predictions, outputs.label_ids),
            processing_class=self.tokenizer,
        )
        title = f"{self.task.name}, seed {seed}"
        if code := train(trainer, self.console, title, score=score, unit="rows", units_per_step=rows_per_step):
            return code
        best = trainer.state.best_global_step
        checkpoint = _check_intact(folder / f"checkpoint-{best}")
        trainer._load_from_checkpoint(str(checkpoint))
        scores = trainer.evaluate(self.sets["test"], metric_key_prefix="test")
        result = {"seed": seed, "step": best, f"validation_{score}": trainer.state.best_metric}
        result |= {name: scores[f"test_{name}"] for name in self.problem.scores}

        def fill(unfinished: Path) -> None:
            shutil.copy(checkpoint / MODEL, unfinished / MODEL)
            (unfinished / RESULT).write_text(json.dumps(result, indent=1) + "\n")

        write_folder(folder / BEST, fill)
        return 0

    def report(self, start_hash: str, command: str) -> None:
        """Write mean and deviation over the seeds, and the best model with its card."""
        task, out = self.task, self.out
        seeds = [read_json(out / f"seed-{seed}" / BEST / RESULT) for seed in range(self.settings.seeds)]
        results: dict[str, Any] = {
            "task": task.name,
            "reported_on": task.reported_on,
            "rows": len(task.test),
            "note": task.note,
            "problem": task.problem,
            **{name: spread([result[name] for result in seeds]) for name in self.problem.scores},
            **f1_of(task.problem, task.label_names),
            "seeds": seeds,
            "made_with": sentence(command),
        }
        if not self._is_reported(results):
            self._save_best(seeds, results, start_hash, command)
        is_share = task.problem != "regression"
        for name in self.problem.scores:
            digits, scale, unit = (2, 100, " in %") if is_share else (digits_of(results[name][0]), 1, "")
            each = ", ".join(plus_minus([result[name]], digits, scale) for result in seeds)
            mean = plus_minus(results[name], digits, scale)
            self.console.print(f"{SCORES[name]}{unit}: {mean} (seeds: {each})", highlight=False)
        where = f"on {counted(len(task.test), 'row')} of {task.reported_on}{task.note and f'; {task.note}'}"
        files = f"scores in {out / 'results.json'}, best model in {out / 'model'}"
        self.console.print(where, files, sep="\n", markup=False, highlight=False)

    def _is_reported(self, results: dict[str, Any]) -> bool:
        """Whether the same command reported the same already; its card and config may have been edited since."""
        with contextlib.suppress(UserError):
            same = json.loads(json.dumps(results)) == read_json(self.out / "results.json")
            return same and damage(self.out / "model") is None
        return False

    def _save_best(self, seeds: list[dict[str, Any]], results: dict[str, Any], start_hash: str, command: str) -> None:
        """Write the scores, and the best model with its card."""
        task, out = self.task, self.out
        select = max if self.problem.higher_is_better else min
        best = select(seeds, key=lambda result: result[f"validation_{self.problem.scores[0]}"])
        weights = load_file(out / f"seed-{best['seed']}" / BEST / MODEL)
        scores = []
        for name in self.problem.scores:
            digits = digits_of(results[name][0]) if task.problem == "regression" else 4
            of = f" of {results['f1_of']}" if name == "f1" else ""
            scores.append(f"- {SCORES[name]}{of}: {plus_minus(results[name], digits)}")
        text = f"""\
Fine-tuned from `{self.model}` (sha256 `{start_hash}`); the best of {len(seeds)} seeds on the validation set.
On {counted(len(task.test), "row")} of {task.reported_on}; mean over seeds and standard deviation:

{chr(10).join(scores)}

{USE[task.problem]}{task.note}
"""
        classifier = new_classifier(self.encoder, task.label_names, task.problem)
        card = model_card("text-classification", f"A Linformer fine-tuned on {task.name}", text, command)
        save_model(out / "model", classifier, weights, self.tokenizer, card)
        write_file(out / "results.json", json.dumps(results, indent=1) + "\n")


def load_encoder(folder: Path, max_length: int) -> LinformerModel:
    """The encoder of a saved model, lengthened if texts are longer than its n."""
    encoder = checkpoints.load_whole(LinformerModel, folder)
    if max_length > encoder.config.max_position_embeddings:
        encoder.resize_length(encoder.config.next_valid_length(max_length))
    return encoder


def new_classifier(
    encoder: LinformerModel, label_names: list[str], problem: str = "single"
) -> LinformerForSequenceClassification:
    """A classifier, or a regression, with a copy of an encoder and a new head."""
    config = copy.deepcopy(encoder.config)
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: number for number, name in enumerate(label_names)}
    config.problem_type = PROBLEMS[problem].problem_type
    classifier = LinformerForSequenceClassification(config)
    classifier.base_model.load_state_dict(encoder.state_dict())
    return classifier


class RegressionTrainer(ExactTrainer):
    """Trains on standardized numbers, and saves models that give numbers in the units of the labels.

    Training reaches numbers of any size at the same learning rate. Saving and loading are exact, since `scale` is a
    power of two, and the bias of the output, which becomes the mean, stays 0 in training.
    """

    def __init__(self, model: LinformerForSequenceClassification, *args: Any, mean: float, scale: float, **kwargs: Any):
        self.mean, self.scale, self.output = mean, scale, model.classifier.output
        nn.init.zeros_(self.output.bias).requires_grad_(False)
        super().__init__(model, *args, **kwargs)

    def full_weights(self) -> dict[str, Tensor]:
        weights = super().full_weights()
        weights[f"{OUTPUT}.weight"] *= self.scale
        weights[f"{OUTPUT}.bias"] += self.mean
        return weights

    @torch.no_grad()
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.output.weight.div_(self.scale)
        self.output.bias.sub_(self.mean)


def digits_of(value: float) -> int:
    """The decimals that show four digits of a number."""
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 4


def _check_intact(folder: Path) -> Path:
    if wrong := damage(folder):
        raise UserError(f"the best weights are damaged: {wrong}; delete {folder.parent} and run the command again")
    return folder
