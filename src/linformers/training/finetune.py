"""Section 5.2: fine-tuning a pretrained model on a task, over several seeds, without looking at what is reported."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase, TrainingArguments, set_seed

from ..checks import check_choice, check_model, check_positive, check_probability, check_size, make_folder
from ..config import LinformerConfig
from ..encoder import LinformerModel
from ..errors import UserError
from ..heads import LinformerForSequenceClassification
from ..provenance import sentence
from . import card, checkpointing
from .batches import EncodedExamples, EpochOrder, collate, encode
from .compiled import compile_parts
from .metrics import classification_metrics, f1_of, plus_minus, spread, titles
from .monitor import Monitor, read_metrics
from .recipe import COMPILE, PRECISIONS
from .tasks import TaskData
from .tokenizer import INPUTS
from .trainer import MODEL, ExactTrainer, arguments_for_all

# Where a seed that is done keeps its best weights.
BEST = "best"
# So many steps gain about the minute that compiling takes.
WORTH_COMPILING = 1000
# Steps below which the usual rate hardly moves the weights of a small model, and a rate that does.
FEW, HIGH_RATE = 100, 1e-3


@dataclass(frozen=True)
class Settings:
    """How a model is fine-tuned.

    Args:
        seeds: how many times, with seeds 0, 1, …
        epochs: passes over the training set.
        batch_size: rows in an update.
        learning_rate: its peak, from which it falls linearly to 0.
        warmup_share: the share of steps in which the rate rises.
        weight_decay: AdamW's.
        max_length: tokens of a text that are read; 0 means as many as the model takes.
        precision: `"bf16"`, `"float32"`, or `"auto"`: bf16 where the hardware has it.
        compile: `"yes"`, `"no"`, or `"auto"`: on a GPU, where all seeds together take 1,000 steps or more.
    """

    seeds: int = 3
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    warmup_share: float = 0.06
    weight_decay: float = 0.01
    max_length: int = 0
    precision: str = "auto"
    compile: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch_size"):
            check_size(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        check_probability("warmup_share", self.warmup_share)
        check_probability("weight_decay", self.weight_decay)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("compile", self.compile, COMPILE)
        if self.max_length:
            check_size("max_length", self.max_length)

    def steps_per_epoch(self, rows: int) -> int:
        """The updates of a pass over so many rows."""
        return max(1, rows // self.batch_size)


def run(task: TaskData, model: Path, out: Path, settings: Settings, console: Console, command: str) -> int:
    """Fine-tune with each seed, report on the test set, and save the model that did best on the validation set.

    A seed that is finished is not run again, and one that was interrupted goes on from its newest checkpoint.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that stopped it.
    """
    tokenizer = load_tokenizer(model, settings.max_length)
    sets = {
        name: encode(getattr(task, name), tokenizer, tokenizer.model_max_length)
        for name in ("train", "validation", "test")
    }
    sets |= {name: sets[name].longest_first() for name in ("validation", "test")}
    make_folder("out", out)
    with checkpointing.locked(out):
        _claim(task, model, out, settings)
        return _run_seeds(task, model, out, settings, sets, tokenizer, console, command)


def _claim(task: TaskData, model: Path, out: Path, settings: Settings) -> None:
    """Refuse a folder in which something else was begun."""
    what = {"task": task.name, "model": str(model), **dataclasses.asdict(settings)}
    hashes = {"data": task.hash(), "weights": checkpointing.model_hash(model)}
    for name, before in checkpointing.claim(out, "finetune", what | hashes).items():
        if name in hashes and before != hashes[name]:
            raise UserError(f"out={str(out)!r} holds a run with other {name}; choose another folder")
        if name in what and name not in ("seeds", "compile") and before != what[name]:
            raise UserError(f"out={str(out)!r} holds a run with {name}={before!r}, not {what[name]!r}; choose another")
    if (done := len(list(out.glob("seed-*/result.json")))) > settings.seeds:
        raise UserError(f"out={str(out)!r} holds {done} seeds, more than seeds={settings.seeds}; choose another")


def _run_seeds(
    task: TaskData,
    model: Path,
    out: Path,
    settings: Settings,
    sets: dict[str, EncodedExamples],
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    command: str,
) -> int:
    console.print(
        f"{task.name}: {len(task.train):,} rows to train, {len(task.validation):,} to select, "
        f"{len(task.test):,} to report ({task.reported_on})",
        highlight=False,
    )
    if (steps := settings.epochs * settings.steps_per_epoch(len(task.train))) < FEW:
        rate = f", and a small model learns more with --learning-rate {HIGH_RATE:g}"
        console.print(
            f"{steps} steps are few to learn from: there are more with more --epochs or a smaller --batch-size"
            + (rate if settings.learning_rate < HIGH_RATE else ""),
            style="yellow",
            highlight=False,
        )
    for seed in range(settings.seeds):
        folder = out / f"seed-{seed}"
        checkpointing.remove_unfinished(folder)
        if not (folder / "result.json").exists() or not (folder / BEST).exists():
            code = run_seed(seed, task, model, folder, settings, sets, tokenizer, console)
            if code:
                return code
        checkpointing.remove_old(folder, keep=0)  # three times as large as the weights that are left
    _report(task, model, out, settings, tokenizer, console, command)
    return 0


def run_seed(
    seed: int,
    task: TaskData,
    model: Path,
    folder: Path,
    settings: Settings,
    sets: dict[str, EncodedExamples],
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
) -> int:
    """Train with one seed; its best weights stay, its numbers go to `result.json`."""
    folder.mkdir(exist_ok=True)
    steps_per_epoch = settings.steps_per_epoch(len(sets["train"]))
    steps = settings.epochs * steps_per_epoch
    set_seed(seed)
    classifier = load_model(model, task.label_names)
    too_short = settings.compile == "auto" and steps * settings.seeds < WORTH_COMPILING
    compile_parts(classifier, "no" if too_short else settings.compile, any_length=True)
    trainer = ExactTrainer(
        classifier,
        training_arguments(folder, settings, steps, steps_per_epoch, seed),
        data_collator=partial(collate, pad_token_id=tokenizer.pad_token_id, max_length=tokenizer.model_max_length),
        train_dataset=EpochOrder(sets["train"], seed, steps * settings.batch_size, settings.batch_size),
        eval_dataset=sets["validation"],
        compute_metrics=_metrics,
        processing_class=tokenizer,
    )
    title = f"{task.name}, seed {seed}"
    monitor = Monitor(
        trainer, folder, console, title=title, score="accuracy", unit="rows", units_per_step=settings.batch_size
    )
    if code := monitor.train():
        return code
    best = trainer.state.best_global_step
    checkpoint = _whole(folder / f"checkpoint-{best}")
    trainer._load_from_checkpoint(str(checkpoint))
    reported = trainer.evaluate(sets["test"], metric_key_prefix="test")
    result = {
        "seed": seed,
        "step": best,
        "validation_accuracy": trainer.state.best_metric,
        "accuracy": reported["test_accuracy"],
        "f1": reported["test_f1"],
    }
    checkpointing.write_whole(folder / BEST, lambda place: shutil.copy(checkpoint / MODEL, place / MODEL))
    checkpointing.write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
    return 0


def training_arguments(
    folder: Path, settings: Settings, steps: int, steps_per_epoch: int, seed: int
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=2 * settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=int(settings.warmup_share * steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        logging_steps=max(1, steps // 30),
        eval_strategy="steps",
        eval_steps=steps_per_epoch,
        save_strategy="steps",
        save_steps=steps_per_epoch,
        save_total_limit=2,  # of 1, transformers would delete the newest for the best
        metric_for_best_model="accuracy",
        greater_is_better=True,
        seed=seed,
        **arguments_for_all(settings.precision),
    )


def load_model(folder: Path, label_names: list[str]) -> LinformerForSequenceClassification:
    """A classifier with the encoder of a saved model, whatever its head, and a new head."""
    encoder = LinformerModel.from_pretrained(folder)
    encoder.config.id2label = dict(enumerate(label_names))
    encoder.config.label2id = {name: number for number, name in enumerate(label_names)}
    classifier = LinformerForSequenceClassification(encoder.config)
    classifier.linformer.load_state_dict(encoder.state_dict())
    return classifier


def _whole(folder: Path) -> Path:
    """A folder of a seed's weights, once its hashes have been checked."""
    if wrong := checkpointing.damage(folder):
        raise UserError(f"the best weights are damaged: {wrong}; delete {folder.parent} and run the command again")
    return folder


def load_tokenizer(folder: Path, max_length: int = 0) -> PreTrainedTokenizerBase:
    """A model's tokenizer, whose `model_max_length` is what the model is to read of a text: by default all it can."""
    check_model("model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=INPUTS)
    n = LinformerConfig.from_pretrained(folder).max_position_embeddings
    if max_length > n:
        raise UserError(
            f"max_length={max_length} exceeds the n={n} of the model; resize it with model.resize_length first"
        )
    tokenizer.model_max_length = max_length or min(n, tokenizer.model_max_length)
    return tokenizer


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    return classification_metrics(prediction.predictions, prediction.label_ids)


def _report(
    task: TaskData,
    model: Path,
    out: Path,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    command: str,
) -> None:
    """Mean and spread over the seeds, and the best model with its card."""
    seeds = [json.loads((out / f"seed-{seed}" / "result.json").read_text()) for seed in range(settings.seeds)]
    records = [record for seed in range(settings.seeds) for record in read_metrics(out / f"seed-{seed}")]
    results: dict[str, Any] = {
        "task": task.name,
        "reported_on": task.reported_on,
        "rows": len(task.test),
        "note": task.note,
        "accuracy": spread([result["accuracy"] for result in seeds]),
        "f1": spread([result["f1"] for result in seeds]),
        "f1_of": f1_of(task.label_names),
        "seeds": seeds,
        "rows_per_second": max(record.get("rows_per_second", 0.0) for record in records),
        "peak_bytes": max(record.get("peak_bytes", 0) for record in records) or None,
        "made_with": sentence(command),
    }
    best = max(seeds, key=lambda result: result["validation_accuracy"])
    weights = load_file(_whole(out / f"seed-{best['seed']}" / BEST) / MODEL)

    def fill(folder: Path) -> None:
        classifier = load_model(model, task.label_names)
        classifier.load_state_dict(weights)
        classifier.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card.finetuned(task.name, str(model), results, command, task.note))

    checkpointing.write_whole(out / "model", fill)
    checkpointing.write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    last = "mean ± deviation" if len(seeds) > 1 else "mean"
    table = Table("", *(f"seed {result['seed']}" for result in seeds), last, title=f"{task.name}, in %")
    for name, title in titles(results).items():
        values = (f"{100 * result[name]:.2f}" for result in seeds)
        table.add_row(escape(title), *values, f"[bold]{plus_minus(results[name], 2, scale=100)}[/bold]")
    table.caption = f"on {task.reported_on}, {len(task.test):,} rows" + (f"; {task.note}" if task.note else "")
    console.print(table)
    console.print(f"numbers in {out / 'results.json'}, the best model in {out / 'model'}", markup=False)
