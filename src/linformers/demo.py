"""A Linformer beside its Transformer twin: cost over growing n, then training on Python's own sources."""

from __future__ import annotations

import math
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from . import plots
from .benchmark.efficiency import Cell, best_device, compare_lengths, curves, mebibytes, milliseconds, peak_memory
from .checks import make_folder
from .config import LinformerConfig
from .heads import LinformerForMaskedLM

# The four special tokens before the bytes, as in RoBERTa's vocabulary, and the mask after them.
FIRST_BYTE, MASK = 4, 4 + 256
SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
LENGTHS, TOKENS, PROJECTED = (256, 512, 1024, 2048, 4096), 8192, 64
TRAIN_LENGTH, TRAIN_PROJECTED, BATCH = 256, 64, 8


@dataclass
class Run:
    """What one model made of the text."""

    losses: list[tuple[float, float]]
    validation: float
    seconds_per_step: float
    peak_bytes: int


def run(steps: int, out: Path, console: Console) -> None:
    """Run the demo and save its figure to `out`."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    make_folder("out", out)
    console.print("[bold]1. A pass over growing sequences[/bold], the number of tokens the same")
    cells = measure_lengths(console)
    console.print(length_table(cells))

    console.print("\n[bold]2. Masked bytes of Python's standard library[/bold], the two differ in `projection` alone")
    text = standard_library()
    results = {name: train(name, text, steps, console) for name in ("Transformer", "Linformer")}
    console.print(training_table(results, text))
    console.print(f"Without any context, from the frequency of each byte alone: {frequency_loss(text):.2f} nats")

    figure = out / "demo.png"
    losses = {name: smooth(result.losses) for name, result in results.items()}
    plots.efficiency(curves(cells, milliseconds), curves(cells, mebibytes), figure, losses)
    console.print(f"\nThe figure: [bold]{figure}[/bold]")
    console.print(f"Next: train longer with [bold]make demo ARGS='--steps {10 * steps}'[/bold], or read the README.")


def measure_lengths(console: Console) -> list[Cell]:
    cells = []
    with progress(console) as bars:
        task = bars.add_task("measuring", total=3 * len(LENGTHS))
        for cell in compare_lengths(LENGTHS, [PROJECTED], tokens=TOKENS, device=best_device(), **SIZE):
            cells.append(cell)
            bars.update(task, advance=1, description=f"{cell.model}, n={cell.n}")
    return cells


def length_table(cells: list[Cell]) -> Table:
    """Time and memory at each n; each model's own measurements follow one another in `cells`."""
    table = Table("n", "unfused", "fused", "Linformer", "faster", "smaller")
    table.title = "Transformer, unfused and fused, and Linformer: ms · MiB"
    table.caption = f"k={PROJECTED}; faster than the fused one, smaller than the unfused"
    for unfused, fused, linformer in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        costs = (f"{milliseconds(c):.0f} · {mebibytes(c):.0f}" for c in (unfused, fused, linformer))
        faster, smaller = fused.seconds / linformer.seconds, unfused.peak_bytes / linformer.peak_bytes
        table.add_row(str(fused.n), *costs, f"{faster:.1f}×", f"{smaller:.1f}×")
    return table


def train(name: str, text: np.ndarray, steps: int, console: Console) -> Run:
    """Train one model with transformers' Trainer."""
    set_seed(0)
    model = LinformerForMaskedLM(
        LinformerConfig(
            vocab_size=MASK + 1,
            max_position_embeddings=TRAIN_LENGTH,
            projected_length=TRAIN_PROJECTED,
            projection="identity" if name == "Transformer" else "linear",
            norm_first=True,
            sparse_prediction=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **SIZE,
        )
    )
    held_out = len(text) // 20
    train_rows, validation_rows = MaskedBytes(text[held_out:], steps * BATCH), MaskedBytes(text[:held_out], 4 * BATCH)
    with tempfile.TemporaryDirectory() as folder, progress(console) as bars:
        shown = ShowProgress(bars, name, steps)
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
                learning_rate=2e-3,
                warmup_steps=steps // 10,
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                prediction_loss_only=True,
            ),
            train_dataset=train_rows,
            eval_dataset=validation_rows,
            callbacks=[shown],
        )
        trainer.pop_callback(_printer())
        began = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - began) / steps
        validation = trainer.evaluate()["eval_loss"]
    return Run(shown.losses, validation, seconds, peak_memory(lambda: one_step(model, train_rows), model.device))


def one_step(model: LinformerForMaskedLM, rows: MaskedBytes) -> None:
    batch = [rows[number] for number in range(BATCH)]
    inputs = {name: torch.stack([row[name] for row in batch]).to(model.device) for name in batch[0]}
    model(**inputs).loss.backward()
    model.zero_grad()


def training_table(results: dict[str, Run], text: np.ndarray) -> Table:
    table = Table("", "first loss", "last", "held out", "perplexity", "a step", "memory")
    for name, result in results.items():
        last = [loss for _, loss in result.losses[-10:]]
        table.add_row(
            name,
            f"{result.losses[0][1]:.2f}",
            f"{sum(last) / len(last):.2f}",
            f"{result.validation:.2f}",
            f"{math.exp(result.validation):.2f}",
            f"{1000 * result.seconds_per_step:.0f} ms",
            f"{result.peak_bytes / 2**20:.0f} MiB",
        )
    table.caption = f"{len(text) / 1e6:.1f} MB of text, n={TRAIN_LENGTH}, k={TRAIN_PROJECTED}, {BATCH} rows a step"
    return table


def frequency_loss(text: np.ndarray) -> float:
    """The loss of guessing each byte by how frequent it is."""
    frequencies = np.bincount(text) / len(text)
    frequencies = frequencies[frequencies > 0]
    return float(-(frequencies * np.log(frequencies)).sum())


def smooth(losses: list[tuple[float, float]], window: int = 20) -> list[tuple[float, float]]:
    """Each loss as the mean of those up to it, at most `window` of them."""
    means = [statistics.fmean(loss for _, loss in losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]
    return [(step, mean) for (step, _), mean in zip(losses, means, strict=True)]


def standard_library(most: int = 8_000_000) -> np.ndarray:
    """The sources of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:most]
    return np.frombuffer(text, dtype=np.uint8)


class MaskedBytes(Dataset):
    """Rows of text for masked-language modelling: row g is a pure function of g.

    15% of the bytes are to be predicted; of these 80% are masked, 10% replaced and 10% left as they are.
    """

    def __init__(self, text: np.ndarray, rows: int) -> None:
        self.text, self.rows = text, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        random = np.random.Generator(np.random.Philox(key=number))
        start = random.integers(len(self.text) - TRAIN_LENGTH)
        words = self.text[start : start + TRAIN_LENGTH].astype(np.int64) + FIRST_BYTE
        chosen, fate = random.random(TRAIN_LENGTH) < 0.15, random.random(TRAIN_LENGTH)
        inputs = np.where(chosen & (fate < 0.8), MASK, words)
        others = random.integers(FIRST_BYTE, MASK, TRAIN_LENGTH)
        inputs = np.where(chosen & (fate >= 0.9), others, inputs)
        labels = np.where(chosen, words, -100)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


class ShowProgress(TrainerCallback):
    """A bar with the loss, and the losses for the figure."""

    def __init__(self, bars: Progress, name: str, steps: int) -> None:
        self.bars, self.name = bars, name
        self.task = bars.add_task(name, total=steps)
        self.losses: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append((state.global_step, logs["loss"]))
            description = f"{self.name}, loss {logs['loss']:.2f}"
            self.bars.update(self.task, completed=state.global_step, description=description)


def _printer() -> type[TrainerCallback]:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield bars
