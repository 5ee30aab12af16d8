"""Contrastive training: an encoder learns to tell a whole document from others by its title or by a span of it.

The loss is InfoNCE (van den Oord et al., 2018) in both directions; the other documents of a batch are the negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import check_positive, check_size
from ..errors import UserError
from .data import titled_documents
from .distill import run_stage, token_ids
from .rows import EpochOrder, collate
from .trainer import ExactTrainer

SPAN = 40  # tokens of a span
AT_ONCE = 8  # documents whose activations are held in memory
LEAST = 4  # documents: two to train on and two to validate with

Pool = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Contrast:
    """How to train contrastively."""

    steps: int = 250
    batch_size: int = 48  # documents per step
    learning_rate: float = 5e-5  # peak learning rate, with linear decay to 0
    temperature: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_size(name, getattr(self, name))
        for name in ("learning_rate", "temperature"):
            check_positive(name, getattr(self, name))


@dataclass(eq=False)
class Pairs(Dataset):
    """Documents, each with its title or, with a probability of one half or if it has none, a span of its text.

    Pair g depends on the seed and g alone.
    """

    rows: Any  # `input_ids`, the text alone, and `title`
    seed: int
    prefixes: Mapping[str, Sequence[int]]  # what comes before a `document` and before a `query`
    after: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        text, query = row["input_ids"], row["title"]
        # The counter keeps these numbers apart from those of `EpochOrder`.
        key = np.array([self.seed, index], dtype=np.uint64)
        coin, place = map(int, np.random.Philox(key=key, counter=[0, 0, 0, 1]).random_raw(2))
        if query is None or coin % 2:
            size = min(SPAN, len(text) // 2)
            start = place % (len(text) - size + 1)
            query = text[start : start + size]
        document, query = (
            np.array([*self.prefixes[kind], *ids, *self.after]) for kind, ids in (("document", text), ("query", query))
        )
        return {"input_ids": document, "query": query, "label": 0}


class ContrastiveTrainer(ExactTrainer):
    """Trains an encoder on batches of pairs.

    Args:
        pool: makes vectors of hidden states.
        temperature: by which similarities are divided.
    """

    def __init__(self, student: PreTrainedModel, pool: Pool, temperature: float, **kwargs: Any) -> None:
        super().__init__(student, **kwargs)
        self.pool, self.temperature = pool, temperature

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        model.eval()  # no dropout: it would train another function than the one that is used
        parts = zip(inputs["input_ids"].split(AT_ONCE), inputs["attention_mask"].split(AT_ONCE), strict=True)
        documents = torch.cat([checkpoint(self.vectors, model, *part, use_reentrant=False) for part in parts])
        queries = self.vectors(model, inputs["query_input_ids"], inputs["query_attention_mask"])
        scores = queries @ documents.T / self.temperature
        own = torch.arange(len(scores), device=scores.device)
        loss = (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2
        return (loss, {"loss": loss}) if return_outputs else loss

    def vectors(self, model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return functional.normalize(self.pool(states.float(), mask), dim=-1)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None


def encode_titled(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, special: int
) -> list[dict[str, Any]]:
    """Documents of at most `length` tokens, the longer ones in parts; the first part has the title.

    `special` tokens of each will surround the text.
    """
    rows, size = [], length - special
    for path in files:
        titles, texts = tee(titled_documents(path))
        names = token_ids(tokenizer, (title or "" for title, _ in titles))
        for name, ids in zip(names, token_ids(tokenizer, (text for _, text in texts)), strict=True):
            for start in range(0, len(ids) - 1, size):  # no part of a single token
                part = np.array(ids[start : start + size], dtype=np.int32)
                rows.append({"input_ids": part, "title": name[:size] if name and start == 0 else None})
    if len(rows) < LEAST:
        raise UserError(f"contrast has {len(rows)} documents, but it takes at least {LEAST}: to train and to validate")
    return rows


def contrast(
    student: PreTrainedModel,
    rows: list[dict[str, Any]],
    run: Path,
    settings: Contrast,
    recorded: dict[str, Any],
    console: Console,
    *,
    pool: Pool,
    prefixes: Mapping[str, Sequence[int]],
    after: Sequence[int],
) -> int:
    """Train in the folder `run`, where an interrupted run resumes; returns an exit code, see `trainer.train`."""

    def collate_pairs(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        options = {"pad_token_id": student.config.pad_token_id or 0}
        options["max_length"] = student.config.max_position_embeddings
        queries = collate([{"input_ids": pair["query"], "label": 0} for pair in pairs], **options)
        return collate(pairs, **options) | {f"query_{name}": queries[name] for name in ("input_ids", "attention_mask")}

    def make_trainer(
        training: list[dict[str, Any]], batch: int, eval_dataset: list[dict[str, Any]], **common: Any
    ) -> ExactTrainer:
        order = EpochOrder(training, settings.seed, settings.steps * batch, batch)
        sets = [Pairs(own, settings.seed, prefixes, after) for own in (order, eval_dataset)]
        options = {"data_collator": collate_pairs, "train_dataset": sets[0], "eval_dataset": sets[1]}
        return ContrastiveTrainer(student, pool, settings.temperature, **options, **common)

    return run_stage(
        "contrastive training", make_trainer, student, rows, run, settings, recorded, console, least_held_out=2
    )
