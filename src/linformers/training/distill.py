"""Layerwise distillation: a converted encoder learns to compute, on whole documents, the original's hidden states.

The original reads a document in chunks of its own length. For each token of the text, and in each layer, the student's
hidden state is compared with that of the token in its chunk.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from .. import convert
from ..checks import check_positive, check_range, check_size, make_folder
from ..errors import UserError, counted
from . import checkpoints
from .data import documents
from .rows import EpochOrder, collate
from .trainer import ExactTrainer, common_arguments, compile_model, train

# Held out to measure the error; the others are trained on.
HELD_OUT = 1 / 20
MOST_HELD_OUT = 64
TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class Settings:
    """How to distill."""

    steps: int = 500
    batch_size: int = 8  # documents per step
    learning_rate: float = 3e-4  # peak learning rate, with linear decay to 0
    mixer_steps: int = 0  # first steps, which match each attention's output, given the original's input
    without_window: float = 0.0  # share of steps without the local window, in which projected keys must do
    short: float = 0.0  # share of steps in which the student reads the chunks, too
    cosine: float = 0.0  # weight of the cosine distance of pooled vectors, beside the error of hidden states
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_size(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        check_range("mixer_steps", self.mixer_steps, 0, self.steps)
        for name in ("without_window", "short"):
            check_range(name, getattr(self, name), 0, 1)
        check_range("cosine", self.cosine, 0, math.inf)


class Batch(NamedTuple):
    """Documents for the student, (b, n), the same in chunks for the teacher, (c, m), and where each token is in both.

    The special tokens at the ends of chunks have no counterpart, except those at the ends of a document.
    """

    ids: Tensor
    mask: Tensor
    chunks: Tensor
    chunk_mask: Tensor
    places: Tensor  # in the flattened ids, (tokens,)
    chunk_places: Tensor  # in the flattened chunks, (tokens,)

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor, chunk: int, before: int, after: int, pad: int) -> Batch:
        """Cut documents into chunks of at most `chunk` tokens, `before` and `after` of which are special."""
        size = chunk - before - after
        chunks, places, kept = [], [], []
        for row, length in enumerate(mask.sum(1).tolist()):
            own, offset = ids[row], row * ids.shape[1]
            for start in range(before, length - after, size):
                stop = min(start + size, length - after)
                chunks.append(torch.cat([own[:before], own[start:stop], own[length - after : length]]))
                first = 0 if start == before else before
                last = before + stop - start + (after if stop == length - after else 0)
                kept.append(torch.arange(first, last))
                places.append(offset + start - before + kept[-1])
        width = max(map(len, chunks))
        batch = ids.new_full((len(chunks), width), pad)
        real = torch.zeros_like(batch)
        for row, tokens in enumerate(chunks):
            batch[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
            kept[row] = row * width + kept[row]
        return cls(ids, mask, batch, real, torch.cat(places).to(ids.device), torch.cat(kept).to(ids.device))

    def in_chunks(self) -> Batch:
        """The student reads what the teacher reads."""
        places = self.chunk_mask.flatten().nonzero()[:, 0]
        return Batch(self.chunks, self.chunk_mask, self.chunks, self.chunk_mask, places, places)


class DistillationTrainer(ExactTrainer):
    """Trains a student on the hidden states of a teacher, which sees chunks of at most `chunk` tokens.

    Args:
        teacher: the original, which stays as it is.
        chunk: tokens of a chunk, special tokens included.
        before, after: the special tokens of a text.
        settings: how to distill.
        first_token: whether a text's vector is the hidden state of its first token, and not the mean.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        chunk: int,
        before: int,
        after: int,
        settings: Settings,
        first_token: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(student, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.sizes = (chunk, before, after, teacher.config.pad_token_id or 0)
        self.settings, self.first_token = settings, first_token

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        step, settings = self.state.global_step, self.settings
        model.eval()  # no dropout: the teacher has none
        batch = Batch.of(inputs["input_ids"], inputs["attention_mask"], *self.sizes)
        # The counter keeps these numbers apart from those of `EpochOrder`.
        random = np.random.Philox(key=np.array([settings.seed, step], dtype=np.uint64), counter=[0, 0, 0, 2])
        without_window, short = random.random_raw(2) / 2**64 < (settings.without_window, settings.short)
        if short:
            batch = batch.in_chunks()
        with no_window(self.model) if without_window else nullcontext():
            if step < settings.mixer_steps:
                loss = self.error_of_mixers(model, batch)
            else:
                loss = self.error(model, batch, settings.cosine)
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self.compute_loss_context_manager():
            inputs = self._prepare_inputs(inputs)
            batch = Batch.of(inputs["input_ids"], inputs["attention_mask"], *self.sizes)
            return self.error(model, batch).detach(), None, None

    def error(self, model: torch.nn.Module, batch: Batch, cosine: float = 0.0) -> Tensor:
        """The mean of the layers' relative errors plus, with this weight, the cosine distance of pooled vectors."""
        states = model(input_ids=batch.ids, attention_mask=batch.mask, output_hidden_states=True).hidden_states
        own, theirs = at(states, batch.places), at(self.states(batch), batch.chunk_places)
        loss = relative_error(own[1:], theirs[1:])
        if cosine:
            rows = batch.places // batch.ids.shape[1]
            vectors = self.pool(own[-1], rows), self.pool(theirs[-1], rows)
            loss = loss + cosine * (1 - functional.cosine_similarity(*vectors).mean())
        return loss

    def pool(self, states: Tensor, rows: Tensor) -> Tensor:
        """Vectors (b, d) of the rows of hidden states (tokens, d), not normalized."""
        if self.first_token:
            return states[rows.diff(prepend=rows.new_full((1,), -1)) != 0]
        return states.new_zeros(int(rows[-1]) + 1, states.shape[1]).index_add(0, rows, states)

    @torch.no_grad()
    def states(self, batch: Batch) -> Sequence[Tensor]:
        return self.teacher(batch.chunks, attention_mask=batch.chunk_mask, output_hidden_states=True).hidden_states

    def error_of_mixers(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """The mean relative error of the layers' attention outputs, each layer given the teacher's input."""
        theirs: list[Tensor] = []
        with ExitStack() as hooks:
            for module in convert.attention_outputs(self.teacher):
                hook = module.register_forward_hook(lambda module, inputs, output: theirs.append(output))
                hooks.callback(hook.remove)
            states = at(self.states(batch), batch.chunk_places)
        own: list[Tensor] = []

        def replace(layer: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0].detach().clone()
            x.flatten(0, 1)[batch.places] = states[layer].to(x.dtype)
            return (x, *inputs[1:])

        # Compiled layers do not see hooks.
        with torch.compiler.set_stance("force_eager"), ExitStack() as hooks:
            for i, layer in enumerate(self.model.base_model.layers):
                hooks.callback(layer.register_forward_pre_hook(partial(replace, i)).remove)
                hook = layer.attention.register_forward_hook(lambda module, inputs, output: own.append(output[0]))
                hooks.callback(hook.remove)
            model(input_ids=batch.ids, attention_mask=batch.mask, output_hidden_states=True)
        return relative_error(at(own, batch.places), at(theirs, batch.chunk_places))


def at(states: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """The hidden states (tokens, d) at places in flattened batches."""
    return [layer.flatten(0, 1)[places].float() for layer in states]


def relative_error(own: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    pairs = zip(own, theirs, strict=True)
    return torch.stack([(found - goal).square().mean() / goal.square().mean() for found, goal in pairs]).mean()


@contextmanager
def no_window(model: PreTrainedModel) -> Iterator[None]:
    """Without the exact keys of local windows."""
    attentions = [layer.attention for layer in model.base_model.layers]
    windows = [attention.local_window for attention in attentions]
    try:
        for attention in attentions:
            attention.local_window = 0
        yield
    finally:
        for attention, window in zip(attentions, windows, strict=True):
            attention.local_window = window


def encode_documents(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, before: list[int], after: list[int]
) -> list[dict[str, Any]]:
    """Rows of at most `length` tokens: documents, the longer ones in parts."""
    rows, size = [], length - len(before) - len(after)
    for path in files:
        for ids in token_ids(tokenizer, documents(path)):
            for start in range(0, len(ids), size):
                row = np.array([*before, *ids[start : start + size], *after], dtype=np.int32)
                rows.append({"input_ids": row, "label": 0})
    if len(rows) < 2:
        raise UserError(
            f"distill has {counted(len(rows), 'document')}, but it takes at least 2: to train and to validate"
        )
    return rows


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    """The tokens of each text, without special ones; several texts at once are encoded in parallel."""
    remaining = iter(texts)
    while batch := list(islice(remaining, TEXTS_AT_ONCE)):
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def rows_hash(rows: Sequence[dict[str, Any]]) -> str:
    """Identifies the tokens of the texts and of their titles, if they have any."""
    parts = ((row["input_ids"], np.array(row.get("title") or [], dtype=np.int32)) for row in rows)
    return hashlib.sha256(b"".join(text.tobytes() + b"/" + title.tobytes() for text, title in parts)).hexdigest()


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
    first_token: bool = False,
) -> int:
    """Distill in the folder `run`, where an interrupted run resumes; returns an exit code, see `trainer.train`."""

    def make_trainer(training: list[dict[str, Any]], batch: int, **common: Any) -> ExactTrainer:
        return DistillationTrainer(
            student,
            teacher,
            chunk,
            *special,
            settings,
            first_token,
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
    command: str = "convert",
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
        command: to which the run belongs.
    """
    make_folder("out", run)
    with checkpoints.locked(run):
        checkpoints.claim(run, command, {**recorded, **asdict(settings)})
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
