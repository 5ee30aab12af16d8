"""Fine-tuning on a classification task over several seeds (section 5.2), without selecting on what is reported."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase, TrainingArguments, set_seed

from .. import LinformerConfig, LinformerForSequenceClassification, LinformerModel
from ..checks import check_choice, check_model, check_positive, check_size, make_folder
from ..errors import UserError
from ..provenance import sentence
from . import checkpoints, tasks
from .prepare import MODEL_INPUTS
from .pretrain import model_card
from .recipe import COMPILE, PRECISIONS
from .rows import EpochOrder, collate, encode, longest_first
from .tasks import TaskData, classification_metrics, plus_minus, spread
from .trainer import MODEL, ExactTrainer, common_arguments, compile_model, read_metrics, train

BEST = "best"  # the folder of a seed's best weights
MIN_STEPS_TO_COMPILE = 1000  # about what a minute of compiling saves
FEW_STEPS, HIGH_RATE = 100, 1e-3  # below FEW_STEPS, the default learning rate hardly changes a small model


@dataclass(frozen=True)
class Settings:
    """How to fine-tune."""

    seeds: int = 3  # number of runs, with seeds 0, 1, …
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5  # peak learning rate, with linear decay to 0
    max_length: int = 0  # tokens of a text to read; 0: as many as the model takes
    precision: str = "auto"  # "bf16", "float32", or "auto": bf16 if the GPU supports it
    compile: str = "auto"  # "yes", "no", or "auto": on a GPU, if all seeds together take 1,000 steps or more

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch_size"):
            check_size(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("compile", self.compile, COMPILE)
        if self.max_length:
            check_size("max_length", self.max_length)

    def steps_per_epoch(self, rows: int) -> int:
        return max(1, rows // self.batch_size)


def finetune(
    task: str,
    out: Path,
    *,
    model: Path,
    data: Path | None = None,
    test: Path | None = None,
    validation: Path | None = None,
    text: str = "text",
    label: str = "label",
    console: Console,
    command: str,
    **settings: Any,
) -> int:
    """Fine-tune a model on a named task or a labeled table; see `tasks.load`, `Settings` and `run`."""
    chosen = Settings(**settings)
    loaded = tasks.load(task, data, test=test, validation=validation, text=text, label=label)
    return run(loaded, model, out, chosen, console, command)


def run(task: TaskData, model: Path, out: Path, settings: Settings, console: Console, command: str) -> int:
    """Fine-tune with each seed, report on the test set, and save the model that is best on the validation set.

    A finished seed is not repeated, and an interrupted one continues from its newest checkpoint.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that stopped the run.
    """
    tokenizer = load_tokenizer(model, settings.max_length)
    sets = {
        name: encode(getattr(task, name), tokenizer, tokenizer.model_max_length)
        for name in ("train", "validation", "test")
    }
    sets |= {name: longest_first(sets[name]) for name in ("validation", "test")}
    make_folder("out", out)
    with checkpoints.locked(out):
        _claim(task, model, out, settings)
        console.print(
            f"{task.name}: {len(task.train):,} rows to train on, {len(task.validation):,} to select on, "
            f"{len(task.test):,} to report on ({task.reported_on})",
            highlight=False,
        )
        if (steps := settings.epochs * settings.steps_per_epoch(len(task.train))) < FEW_STEPS:
            low = settings.learning_rate < HIGH_RATE
            rate = f" For a small model, also use --learning-rate {HIGH_RATE:g}." if low else ""
            few = f"Only {steps} steps: use more --epochs or a smaller --batch-size.{rate}"
            console.print(few, style="yellow", highlight=False)
        for seed in range(settings.seeds):
            folder = out / f"seed-{seed}"
            checkpoints.remove_unfinished(folder)
            done = (folder / "result.json").exists() and (folder / BEST).exists()
            if not done and (code := run_seed(seed, task, model, folder, settings, sets, tokenizer, console)):
                return code
            checkpoints.remove_old(folder, keep=0)
        _report(task, model, out, settings, tokenizer, console, command)
    return 0


def _claim(task: TaskData, model: Path, out: Path, settings: Settings) -> None:
    """Record what is fine-tuned in a folder; refuse a folder with another run."""
    own = {"task": task.name, "model": str(model), **dataclasses.asdict(settings)}
    hashes = {"data": task.hash(), "weights": checkpoints.model_hash(model)}
    saved = checkpoints.claim(out, "finetune", own | hashes)
    for name in hashes:
        if saved.get(name) != hashes[name]:
            raise UserError(f"out={str(out)!r} holds a run with other {name}; choose another folder")
    for name, value in own.items():
        if name not in ("seeds", "compile") and saved.get(name) != value:
            raise UserError(f"out={str(out)!r} holds a run with {name}={saved.get(name)!r}, not {value!r}")
    if (done := len(list(out.glob("seed-*/result.json")))) > settings.seeds:
        raise UserError(f"out={str(out)!r} holds {done} seeds, more than seeds={settings.seeds}")


def run_seed(
    seed: int,
    task: TaskData,
    model: Path,
    folder: Path,
    settings: Settings,
    sets: dict[str, list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
) -> int:
    """Train with one seed; keep its best weights, and write its scores to `result.json`."""
    folder.mkdir(exist_ok=True)
    steps_per_epoch = settings.steps_per_epoch(len(sets["train"]))
    steps = settings.epochs * steps_per_epoch
    set_seed(seed)
    classifier = load_model(model, task.label_names)
    too_short = settings.compile == "auto" and steps * settings.seeds < MIN_STEPS_TO_COMPILE
    compile_model(classifier, "no" if too_short else settings.compile, any_length=True)
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
    if code := train(trainer, console, title=title, score="accuracy", unit="rows", units_per_step=settings.batch_size):
        return code
    best = trainer.state.best_global_step
    checkpoint = _intact(folder / f"checkpoint-{best}")
    trainer._load_from_checkpoint(str(checkpoint))
    scores = trainer.evaluate(sets["test"], metric_key_prefix="test")
    result = {"seed": seed, "step": best, "validation_accuracy": trainer.state.best_metric}
    result |= {name: scores[f"test_{name}"] for name in ("accuracy", "f1")}
    checkpoints.write_folder(folder / BEST, lambda place: shutil.copy(checkpoint / MODEL, place / MODEL))
    checkpoints.write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
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
        warmup_steps=int(0.06 * steps),
        weight_decay=0.01,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        logging_steps=max(1, steps // 30),
        eval_strategy="steps",
        eval_steps=steps_per_epoch,
        save_strategy="steps",
        save_steps=steps_per_epoch,
        save_total_limit=2,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        seed=seed,
        **common_arguments(settings.precision),
    )


def load_model(folder: Path, label_names: list[str]) -> LinformerForSequenceClassification:
    """A classifier with the encoder of a saved model and a new head."""
    encoder = LinformerModel.from_pretrained(folder)
    encoder.config.id2label = dict(enumerate(label_names))
    encoder.config.label2id = {name: number for number, name in enumerate(label_names)}
    classifier = LinformerForSequenceClassification(encoder.config)
    classifier.base_model.load_state_dict(encoder.state_dict())
    return classifier


def load_tokenizer(folder: Path, max_length: int = 0) -> PreTrainedTokenizerBase:
    """A model's tokenizer, with `max_length`, or all that the model takes, as its `model_max_length`."""
    check_model("model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=MODEL_INPUTS)
    n = LinformerConfig.from_pretrained(folder).max_position_embeddings
    if max_length > n:
        raise UserError(f"max_length={max_length} exceeds the model's n={n}; resize it with model.resize_length first")
    tokenizer.model_max_length = max_length or min(n, tokenizer.model_max_length)
    return tokenizer


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    return classification_metrics(prediction.predictions, prediction.label_ids)


def _intact(folder: Path) -> Path:
    if wrong := checkpoints.damage(folder):
        raise UserError(f"the best weights are damaged: {wrong}; delete {folder.parent} and run the command again")
    return folder


def _report(
    task: TaskData,
    model: Path,
    out: Path,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    command: str,
) -> None:
    """Write mean and deviation over the seeds, and the best model with its card."""
    seeds = [json.loads((out / f"seed-{seed}" / "result.json").read_text()) for seed in range(settings.seeds)]
    records = [record for seed in range(settings.seeds) for record in read_metrics(out / f"seed-{seed}")]
    results: dict[str, Any] = {
        "task": task.name,
        "reported_on": task.reported_on,
        "rows": len(task.test),
        "note": task.note,
        "accuracy": spread([result["accuracy"] for result in seeds]),
        "f1": spread([result["f1"] for result in seeds]),
        "f1_of": tasks.f1_of(task.label_names),
        "seeds": seeds,
        "rows_per_second": max(record.get("rows_per_second", 0.0) for record in records),
        "peak_bytes": max(record.get("peak_bytes", 0) for record in records) or None,
        "made_with": sentence(command),
    }
    best = max(seeds, key=lambda result: result["validation_accuracy"])
    weights = load_file(_intact(out / f"seed-{best['seed']}" / BEST) / MODEL)

    def fill(folder: Path) -> None:
        classifier = load_model(model, task.label_names)
        classifier.load_state_dict(weights)
        classifier.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        text = f"""\
Fine-tuned from `{model}`; the best of {len(seeds)} seeds on the validation set.
On {len(task.test):,} rows of {task.reported_on}, mean over seeds and standard deviation:

- accuracy: {plus_minus(results["accuracy"], 4)}
- F1 of {results["f1_of"]}: {plus_minus(results["f1"], 4)}

{task.note}
"""
        title = f"A Linformer fine-tuned on {task.name}"
        (folder / "README.md").write_text(model_card("text-classification", title, text, command))

    checkpoints.write_folder(out / "model", fill)
    checkpoints.write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    table = Table("", *(f"seed {result['seed']}" for result in seeds), "mean", title=f"{task.name}, in %")
    for name in ("accuracy", "f1"):
        values = (f"{100 * result[name]:.2f}" for result in seeds)
        table.add_row(name, *values, plus_minus(results[name], 2, scale=100))
    table.caption = f"on {task.reported_on}, {len(task.test):,} rows" + (f"; {task.note}" if task.note else "")
    console.print(table)
    console.print(f"scores in {out / 'results.json'}, best model in {out / 'model'}", markup=False)
