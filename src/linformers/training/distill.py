"""Layerwise distillation: a converted encoder learns to compute, on whole documents, the original's hidden states.

The original reads a document in chunks of its own length. For each token of the text, and in each layer, the student's
hidden state is compared with that of the token in its chunk.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from ..checks import check_positive, check_size, make_folder
from ..errors import UserError
from . import checkpoints
from .data import documents
from .rows import EpochOrder, collate
from .trainer import ExactTrainer, common_arguments, compile_model, train

# Held out to measure the error; the others are trained on.
HELD_OUT = 1 / 20
MOST_HELD_OUT = 64


@dataclass(frozen=True)
class Settings:
    """How to distill."""

    steps: int = 500
    batch_size: int = 8  # documents per step
    learning_rate: float = 3e-4  # peak learning rate, with linear decay to 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_size(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)


class DistillationTrainer(ExactTrainer):
    """Trains a student on the hidden states of a teacher, which sees chunks of at most `chunk` tokens.

    Args:
        teacher: the original, which stays as it is.
        chunk: tokens of a chunk, special tokens included.
        before, after: the special tokens of a text.
    """

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, chunk: int, before: int, after: int, **kwargs: Any
    ) -> None:
        super().__init__(student, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.chunk, self.before, self.after = chunk, before, after

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        model.eval()  # no dropout: the teacher has none
        states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        with torch.no_grad():
            expected, places = self.states_of_chunks(ids, mask)
        errors = []
        for own, theirs in zip(states[1:], expected[1:], strict=True):
            found = own.flatten(0, 1)[places].float()
            errors.append((found - theirs).square().mean() / theirs.square().mean())
        loss = torch.stack(errors).mean()
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def states_of_chunks(self, ids: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
        """The teacher's hidden states of each token of the texts (tokens, d), and the places of these tokens in `ids`.

        The special tokens at the ends of chunks have no counterpart, but the first one of a text has.
        """
        size = self.chunk - self.before - self.after
        chunks, places, kept = [], [], []
        for row, length in enumerate(mask.sum(1).tolist()):
            own, offset = ids[row], row * ids.shape[1]
            for start in range(self.before, length - self.after, size):
                stop = min(start + size, length - self.after)
                chunks.append(torch.cat([own[: self.before], own[start:stop], own[length - self.after : length]]))
                # The first token of the text, and the tokens of this chunk.
                first = 0 if start == self.before else self.before
                kept.append(torch.arange(first, self.before + stop - start))
                places.append(offset + torch.arange(start - self.before + first, stop))
        width = max(map(len, chunks))
        batch = ids.new_full((len(chunks), width), self.teacher.config.pad_token_id or 0)
        real = torch.zeros_like(batch)
        for row, (chunk, tokens) in enumerate(zip(chunks, kept, strict=True)):
            batch[row, : len(chunk)], real[row, : len(chunk)] = chunk, 1
            kept[row] = row * width + tokens
        output = self.teacher(batch, attention_mask=real, output_hidden_states=True)
        picked, found = torch.cat(kept).to(ids.device), torch.cat(places).to(ids.device)
        return [states.flatten(0, 1)[picked].float() for states in output.hidden_states], found


def encode_documents(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, before: list[int], after: list[int]
) -> list[dict[str, Any]]:
    """Rows of at most `length` tokens: documents, the longer ones in parts."""
    rows, size = [], length - len(before) - len(after)
    for path in files:
        for text in documents(path):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for start in range(0, len(ids), size):
                row = np.array([*before, *ids[start : start + size], *after], dtype=np.int32)
                rows.append({"input_ids": row, "label": 0})
    if len(rows) < 2:
        raise UserError(f"distill has {len(rows)} documents, but it takes at least 2: to train on and to validate with")
    return rows


def rows_hash(rows: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(b"".join(row["input_ids"].tobytes() for row in rows)).hexdigest()


def distill(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    rows: list[dict[str, Any]],
    run: Path,
    settings: Settings,
    recorded: dict[str, Any],
    console: Console,
    *,
    chunk: int,
    special: tuple[int, int],
) -> int:
    """Distill in the folder `run`, where an interrupted run resumes; returns an exit code, see `trainer.train`."""

    def make_trainer(training: list[dict[str, Any]], batch: int, **common: Any) -> ExactTrainer:
        return DistillationTrainer(
            student,
            teacher,
            chunk,
            *special,
            data_collator=partial(collate, pad_token_id=student.config.pad_token_id or 0, max_length=length),
            train_dataset=EpochOrder(training, settings.seed, settings.steps * batch, batch),
            **common,
        )

    length = student.config.max_position_embeddings
    return run_stage("distillation", make_trainer, student, rows, run, settings, recorded, console)


def run_stage(
    title: str,
    make_trainer: Callable[..., ExactTrainer],
    student: PreTrainedModel,
    rows: list[dict[str, Any]],
    run: Path,
    settings: Any,
    recorded: dict[str, Any],
    console: Console,
    least_held_out: int = 1,
) -> int:
    """Train a student in the folder `run`, where an interrupted run resumes; returns an exit code, see `trainer.train`.

    Args:
        title: of the progress bar.
        make_trainer: makes a trainer of the training rows, the batch size, and further arguments of it.
        student: the model to train.
        rows: documents, some of which are held out.
        run: a folder for checkpoints.
        settings: with `steps`, `batch_size`, `learning_rate` and `seed`.
        recorded: what identifies the run besides its settings.
        console: where progress is shown.
        least_held_out: the fewest rows to hold out.
    """
    make_folder("out", run)
    with checkpoints.locked(run):
        checkpoints.claim(run, "convert", {**recorded, **asdict(settings)})
        set_seed(settings.seed)
        order = np.random.default_rng(settings.seed).permutation(len(rows))
        held_out = max(least_held_out, min(MOST_HELD_OUT, int(len(rows) * HELD_OUT)))
        validation, training = ([rows[i] for i in part] for part in (order[:held_out], order[held_out:]))
        compile_model(student, "auto", any_length=True)
        every, batch = max(1, settings.steps // 5), min(settings.batch_size, len(training))
        arguments = TrainingArguments(
            output_dir=str(run),
            max_steps=settings.steps,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            learning_rate=settings.learning_rate,
            warmup_steps=max(1, settings.steps // 20),
            weight_decay=0.0,
            logging_steps=max(1, settings.steps // 50),
            eval_steps=every,
            save_steps=every,
            save_total_limit=2,
            prediction_loss_only=True,
            seed=settings.seed,
            **common_arguments("auto"),
        )
        trainer = make_trainer(training, batch, eval_dataset=validation, args=arguments)
        tokens = int(np.mean([len(row["input_ids"]) for row in training]) * batch)
        return train(trainer, console, title, score="error", unit="tokens", units_per_step=tokens)


def clean(run: Path) -> None:
    """Delete what a finished run left; its result is elsewhere."""
    shutil.rmtree(run, ignore_errors=True)
