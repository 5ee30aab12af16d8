"""What a run tells while it goes on: metrics.jsonl, TensorBoard events, and a live table with its speed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from transformers import TrainerCallback

from ..progress import progress
from . import checkpointing
from .checkpointing import write_text
from .trainer import ExactTrainer

# Dense bf16 matrix products of a card, in FLOP/s, by a part of its name; from the makers' data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "V100": 125e12}


class Monitor(TrainerCallback):
    """Writes down what is logged, and shows it.

    Args:
        trainer: whose waiting time is shown.
        run: the folder of the run.
        console: where to show; nothing is shown by processes but the first.
        title: what is trained.
        score: what validation gives, `"perplexity"` or `"accuracy"`.
        unit: what speed is counted in, `"tokens"` or `"rows"`.
        units_per_step: how many of them a step has.
        flops_per_unit: to tell the speed's share of the hardware's peak.
    """

    def __init__(
        self,
        trainer: ExactTrainer,
        run: Path,
        console: Console,
        *,
        title: str,
        score: str,
        unit: str,
        units_per_step: int,
        flops_per_unit: float | None = None,
    ) -> None:
        self.trainer, self.run, self.console, self.title = trainer, run, console, title
        self.score, self.unit = score, unit
        self.units_per_step, self.flops_per_unit = units_per_step, flops_per_unit
        self.active = trainer.is_world_process_zero()
        self.rows: list[list[str]] = []
        self.bars = progress(console)
        self.live = Live(console=console, get_renderable=self._picture, refresh_per_second=2)
        self.marked = (0, time.perf_counter(), 0.0, 0.0)

    def train(self) -> int:
        """Train under these eyes, from the run's newest whole checkpoint if it has one.

        Returns:
            The exit code: 0, or 128 plus the number of the signal that stopped it after saving.
        """

        def warn(message: str) -> None:
            self.console.print(message, style="yellow", markup=False)

        self.trainer.add_callback(self)
        resume = checkpointing.newest_whole(self.run, warn)
        self.trainer.same_for_all("checkpoints of steps", 0 if resume is None else checkpointing.step_of(resume))
        if resume is not None:
            self._say(f"going on from step {checkpointing.step_of(resume)}")
        if self.active and self.console.is_terminal:
            self.live.start()
        elif self.active:
            self._say(f"{self.trainer.args.max_steps:,} steps")
        try:
            self.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        finally:
            self.live.stop()
        if self.trainer.stopped_by is None:
            return 0
        self._say(f"stopped by a signal; saved at step {self.trainer.state.global_step}")
        return 128 + self.trainer.stopped_by

    def _say(self, message: str) -> None:
        self.console.print(f"{self.title}: {message}", highlight=False, markup=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark(state.global_step)
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.task = self.bars.add_task(self.title, total=state.max_steps, completed=state.global_step)
        write_metrics(self.run, read_metrics(self.run, state.global_step))
        # Events of steps after the checkpoint belong to what was lost.
        self.events = SummaryWriter(str(self.run / "tensorboard"), purge_step=state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        if self.active:
            self.bars.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not self.active or not logs or "train_runtime" in logs:
            return
        record: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            record |= {name: logs[name] for name in ("loss", "grad_norm", "learning_rate")}
            record |= self._speed(state.global_step)
        if "eval_loss" in logs:
            record |= {name: value for name, value in logs.items() if name.startswith("eval_")}
            for name in ("runtime", "samples_per_second", "steps_per_second"):
                record.pop(f"eval_{name}", None)
            record[self.score] = (
                math.exp(min(logs["eval_loss"], 700)) if self.score == "perplexity" else logs[f"eval_{self.score}"]
            )
        if len(record) == 1:  # an evaluation of another set than the validation set, which whoever asked for it reports
            return
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for name, value in record.items():
            if name != "step":
                self.events.add_scalar(name, value, state.global_step)
        self._show(record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.active:
            self.events.close()

    def _speed(self, step: int) -> dict[str, float]:
        """Units a second since the last log, validation and saving aside, and how much of the time went by waiting."""
        before, since, waiting, aside = self.marked
        self._mark(step)
        seconds = self.marked[1] - since - (self.marked[3] - aside)
        per_second = (step - before) * self.units_per_step / seconds
        speed = {f"{self.unit}_per_second": per_second, "waiting_share": (self.marked[2] - waiting) / seconds}
        if self.flops_per_unit and (peak := hardware_peak()):
            speed["peak_share"] = per_second * self.flops_per_unit / (peak * self.trainer.args.world_size)
        if torch.cuda.is_available():
            speed["peak_bytes"] = torch.cuda.max_memory_allocated()
        return speed

    def _mark(self, step: int) -> None:
        self.marked = (step, time.perf_counter(), self.trainer.seconds_waiting, self.trainer.seconds_aside)

    def _show(self, record: dict[str, Any]) -> None:
        def entry(name: str, form: str) -> str:
            return format(record[name], form) if name in record else ""

        row = [
            entry("step", ",d"),
            entry("loss", ".3f"),
            entry(self.score, ".2f" if self.score == "perplexity" else ".4f"),
            entry("learning_rate", ".2e"),
            entry(f"{self.unit}_per_second", ",.0f"),
            entry("peak_share", ".0%"),
            entry("waiting_share", ".1%"),
        ]
        if self.console.is_terminal:
            self.rows = [*self.rows[-9:], row]
        else:
            named = zip(self._columns(), row, strict=True)
            self.console.print("  ".join(f"{name} {value}" for name, value in named if value), highlight=False)

    def _columns(self) -> tuple[str, ...]:
        return ("step", "loss", self.score, "learning rate", f"{self.unit}/s", "of peak", "waiting")

    def _picture(self) -> Group:
        table = Table(*self._columns())
        for row in self.rows:
            table.add_row(*row)
        return Group(table, self.bars)


def read_metrics(run: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """The records of a run up to a step; a line that a kill cut short is left out."""
    records = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if last_step is None or record["step"] <= last_step:
            records.append(record)
    return records


def write_metrics(run: Path, records: list[dict[str, Any]]) -> None:
    write_text(run / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def hardware_peak() -> float | None:
    """FLOP/s that the card could make, if it is a known one."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
