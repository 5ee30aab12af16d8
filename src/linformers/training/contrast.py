"""`linformers contrast`, which is also a part of `linformers convert`: contrastive training of vectors of documents.

An encoder learns to tell a whole document from others by its title or by a span of it. The loss is InfoNCE (van den
Oord et al., 2018) in both directions; the other documents of a batch are the negatives, except those of the same title.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

from ..checks import check_empty_folder, check_positive, check_range, check_size, make_folder
from ..errors import UserError, counted
from ..pooling import Pooling, write_mean_pooling
from .checkpoints import load_any, model_hash
from .data import find_files, titled_documents
from .distill import clean, rows_hash, run_stage, token_ids
from .pretrain import SENTENCES, describe, model_card, save_model
from .rows import EpochOrder, collate, load_tokenizer, special_tokens
from .trainer import ExactTrainer, read_metrics

SPAN = 40  # tokens of a span
AT_ONCE = 8  # documents whose activations are held in memory
LEAST = 4  # documents: two to train on and two to validate with

LEARNED = f"trained to tell a document from others by its title or {SPAN} tokens of it"
CLASSES = ("LinformerModel", "LinformerForMaskedLM")

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
        check_size("steps", self.steps)
        check_range("batch_size", self.batch_size, 2, math.inf)
        for name in ("learning_rate", "temperature"):
            check_positive(name, getattr(self, name))


@dataclass(eq=False)
class Pairs(Dataset):
    """Documents, each with its title or, with a probability of one half or if it has none, a span of its text.

    Pair g depends on the seed and g alone.
    """

    rows: Any  # `input_ids`, the text alone; `title`; and `label`, the same for documents with the same title
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
        return {"input_ids": document, "query": query, "label": row["label"]}


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
        same_title = inputs["labels"][:, None] == inputs["labels"]
        scores = scores.masked_fill(same_title & (own[:, None] != own), -math.inf)  # no negatives of each other
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

    `special` tokens of each will surround the text. Rows of the same title have the same `label`.
    """
    rows: list[dict[str, Any]] = []
    labels: dict[tuple[int, ...], int] = {}
    size = length - special
    for path in files:
        titles, texts = tee(titled_documents(path))
        names = token_ids(tokenizer, (title or "" for title, _ in titles))
        for name, ids in zip(names, token_ids(tokenizer, (text for _, text in texts)), strict=True):
            for start in range(0, len(ids) - 1, size):  # no part of a single token
                part = np.array(ids[start : start + size], dtype=np.int32)
                label = labels.setdefault(tuple(name), len(rows)) if name else len(rows)
                rows.append({"input_ids": part, "title": name[:size] if name and start == 0 else None, "label": label})
    if len(rows) < LEAST:
        raise UserError(
            f"contrast has {counted(len(rows), 'document')}, but it takes at least {LEAST}: to train and to validate"
        )
    return rows


def train_vectors(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    files: Sequence[Path],
    run: Path,
    settings: Contrast,
    recorded: dict[str, Any],
    console: Console,
    *,
    command: str,
) -> int:
    """Train an encoder in the folder `run`, where an interrupted run resumes; returns an exit code.

    Args:
        student: an encoder without a head.
        tokenizer: of the student.
        pooling: makes vectors of hidden states, and has prompts.
        files: text to train on.
        run: a folder for checkpoints.
        settings: how to train.
        recorded: what identifies the student.
        console: where progress is shown.
        command: `"contrast"` or `"convert"`.
    """
    before, after = special_tokens(tokenizer)
    prefixes = {
        kind: [*before, *tokenizer(pooling.prompt(kind), add_special_tokens=False)["input_ids"]]
        for kind in ("document", "query")
    }
    length = student.config.max_position_embeddings
    rows = encode_titled(files, tokenizer, length, max(map(len, prefixes.values())) + len(after))

    def collate_pairs(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        options = {"pad_token_id": student.config.pad_token_id or 0, "max_length": length}
        queries = collate([{"input_ids": pair["query"], "label": 0} for pair in pairs], **options)
        return collate(pairs, **options) | {f"query_{name}": queries[name] for name in ("input_ids", "attention_mask")}

    def make_trainer(
        training: list[dict[str, Any]], batch: int, eval_dataset: list[dict[str, Any]], **common: Any
    ) -> ExactTrainer:
        order = EpochOrder(training, settings.seed, settings.steps * batch, batch)
        sets = [Pairs(own, settings.seed, prefixes, after) for own in (order, eval_dataset)]
        options = {"data_collator": collate_pairs, "train_dataset": sets[0], "eval_dataset": sets[1]}
        return ContrastiveTrainer(student, pooling.pool, settings.temperature, **options, **common)

    recorded = {**recorded, "rows": len(rows), "hash": rows_hash(rows)}
    inputs = (student, rows, run, settings, recorded, console)
    return run_stage("contrastive training", make_trainer, *inputs, least_held_out=2, command=command)


def contrast(
    model: Path, text: Sequence[Path], out: Path, settings: Contrast, *, console: Console, command: str
) -> int:
    """Train the vectors of a Linformer, with or without a masked-language-modeling head, and write it to a new folder.

    Training runs in a folder beside `out`, where it resumes. Returns an exit code, see `trainer.train`.
    """
    check_empty_folder("out", out)
    network, tokenizer, found = (
        load_any(model, CLASSES, dtype=torch.float32),
        load_tokenizer(model),
        find_files(text, "text"),
    )
    make_folder("out", out.parent)
    pooling, run, config = Pooling.of(model), out.with_name(f"{out.name}.contrast"), network.config
    start = {"model": str(model), "sha256": model_hash(model)}
    inputs = (pooling, found, run, settings, {"start": start}, console)
    if code := train_vectors(network.base_model, tokenizer, *inputs, command="contrast"):
        return code

    def add_pooling(folder: Path) -> None:
        if pooling.folder is None:
            write_mean_pooling(folder, config.max_position_embeddings, config.hidden_size)
        else:
            pooling.write(folder, config.max_position_embeddings)

    scores = {entry["step"]: entry["error"] for entry in read_metrics(run) if "error" in entry}
    masks = "The masked-language-modeling head is as it was; the encoder below it has changed, so it predicts worse.\n"
    lines = f"""\
Started from `{model}` (sha256 `{start["sha256"]}`), then {LEARNED}.

- InfoNCE loss of held-out documents: {", ".join(f"{own:.3f} (step {step:,})" for step, own in scores.items())}
- Settings: {", ".join(f"{key}={value}" for key, value in asdict(settings).items())}

{masks if network is not network.base_model else ""}"""
    card = model_card(SENTENCES, describe(config), lines, command)
    save_model(out, network, network.state_dict(), tokenizer, card, add_pooling)
    clean(run)
    console.print(f"model in {out}", markup=False, highlight=False)
    return 0
