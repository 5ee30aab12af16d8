"""The part `classification` of `benchmarks.documents`: fine-tuning, frozen vectors, and TF-IDF."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks import vectors
from benchmarks.bags_of_words import logistic_regression, tf_idf
from benchmarks.vectors import device, embed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import get_linear_schedule_with_warmup, set_seed

from linformers.checks import check_choice
from linformers.files import write_file
from linformers.progress import progress
from linformers.training import tasks
from linformers.training.distill import token_ids
from linformers.training.predict import BRANCHES, without_branch
from linformers.training.rows import EpochOrder

if TYPE_CHECKING:
    from benchmarks.documents import Encoder

EPOCHS = {"papers": 4, "imdb": 2}
RATES = (3e-5, 1e-4, 3e-4)  # peak learning rates; the best one on the validation set is used for all seeds
BATCH = 16  # documents per step
FEW, FEW_PER_STEP = 24, 4  # of each set, and of each step, in a rehearsal
SETS = ("train", "validation", "test")


class Classifier(nn.Module):
    """A linear layer on the mean of the vectors of a document's chunks."""

    def __init__(self, encoder: Any, pool: Any, classes: int) -> None:
        super().__init__()
        self.encoder, self.pool = encoder, pool
        self.output = nn.Linear(encoder.config.hidden_size, classes)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, documents: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        chunks = [torch.tensor(chunk) for own in documents for chunk in own]
        ids = pad_sequence(chunks, batch_first=True, padding_value=self.encoder.config.pad_token_id or 0)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(chunk) for chunk in chunks])[:, None]
        counts = torch.tensor([len(own) for own in documents])
        owners = torch.arange(len(documents)).repeat_interleave(counts).to(device())
        mask = mask.to(device())
        states = self.encoder(ids.to(device()), mask.long()).last_hidden_state
        pooled = self.pool(states.float(), mask)
        means = pooled.new_zeros(len(documents), pooled.shape[1]).index_add(0, owners, pooled)
        return self.output(means / counts.to(device())[:, None])


def load_task(task: str, data: Path, small: bool) -> tasks.TaskData:
    check_choice("task", task, EPOCHS)
    if task == "papers":
        folder = data / "papers"
        files = {split: folder / f"{split}.parquet" for split in SETS}
        loaded = tasks.load(str(files["train"]), test=files["test"], validation=files["validation"])
    else:
        loaded = tasks.load(task, data=data)
    if small:  # of each class, in turn
        for split in SETS:
            own = getattr(loaded, split)
            classes = [[example for example in own if example.label == label] for label in range(3)]
            few = [example for group in zip(*filter(None, classes), strict=False) for example in group][:FEW]
            object.__setattr__(loaded, split, few)
    return loaded


def classification(
    encoders: dict[str, Encoder],
    data: Path,
    task: str,
    length: int,
    seeds: int,
    rates: Sequence[float],
    small: bool,
    path: Path,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Write accuracies on the test set, after each run, to `path`; runs that it has are not repeated."""
    loaded = load_task(task, data, small)
    tokenizer = next(iter(encoders.values())).tokenizer
    labels = [torch.tensor([example.label for example in getattr(loaded, split)]) for split in SETS]
    ids = [[own[: length - 2] for own in token_ids(tokenizer, texts)] for texts in texts_of(loaded)]
    classes = len(loaded.label_names)
    done = json.loads(path.read_text())["runs"] if path.exists() else {}
    epochs, batch = (1, FEW_PER_STEP) if small else (EPOCHS[task], BATCH)
    record = {**record, "task": task, "rows": dict(zip(SETS, map(len, ids), strict=True)), "note": loaded.note}
    record |= {"reported_on": loaded.reported_on, "epochs": epochs, "batch_size": batch, "rates": list(rates)}

    def keep(name: str, run: dict[str, Any]) -> None:
        done[name] = run
        write_file(path, json.dumps({**record, "summary": summary(done), "runs": done}, indent=1) + "\n")

    if "TF-IDF" not in done:
        features = tf_idf([tokenizer.batch_decode(own) for own in ids])
        keep("TF-IDF", regression(features, labels))
    for name, encoder in encoders.items():
        sets = [
            [{"input_ids": own, "chunks": encoder.chunks(own, "document"), "label": int(label)} for own, label in pairs]
            for pairs in (zip(texts, numbers, strict=True) for texts, numbers in zip(ids, labels, strict=True))
        ]
        if f"{name}, frozen" not in done:
            keep(f"{name}, frozen", regression([frozen_features(encoder, rows) for rows in sets], labels))
        tuned = {}
        for rate in rates:
            key = f"{name}, rate {rate:g}, seed 0"
            if key not in done:
                keep(key, finetune(encoder, sets, classes, rate, epochs, batch, 0, key, console))
            tuned[rate] = done[key]["validation"]
        best = max(tuned, key=tuned.__getitem__)
        for seed in range(1, seeds):
            key = f"{name}, rate {best:g}, seed {seed}"
            if key not in done:
                keep(key, finetune(encoder, sets, classes, best, epochs, batch, seed, key, console))
    console.print(table_of(summary(done), task))


def texts_of(loaded: tasks.TaskData) -> Iterator[list[str]]:
    for split in SETS:
        yield [example.text for example in getattr(loaded, split)]


def regression(features: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
    predictions, penalty = logistic_regression(features, labels)
    return {"test": (predictions == labels[2]).float().mean().item(), "penalty": penalty}


def frozen_features(encoder: Encoder, rows: Sequence[dict[str, Any]]) -> Tensor:
    """The means of the vectors of chunks, scaled so that their entries are about 1."""
    found = embed(encoder.load(), [chunk for row in rows for chunk in row["chunks"]], encoder.pooling.pool, bf16=True)
    parts = found.split([len(row["chunks"]) for row in rows])
    return torch.stack([part.mean(0) for part in parts]) * found.shape[1] ** 0.5


def finetune(
    encoder: Encoder,
    sets: Sequence[list[dict[str, Any]]],
    classes: int,
    rate: float,
    epochs: int,
    batch_size: int,
    seed: int,
    title: str,
    console: Console,
) -> dict[str, Any]:
    """Accuracies after fine-tuning, of the epoch that is best on the validation set, also without each branch."""
    set_seed(seed)
    classifier = Classifier(encoder.load(), encoder.pooling.pool, classes).to(device())
    steps = epochs * max(1, len(sets[0]) // batch_size)
    optimizer = torch.optim.AdamW(classifier.parameters(), rate, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, int(0.06 * steps), steps)
    order = EpochOrder(sets[0], seed, steps * batch_size, batch_size)
    best, weights = -1.0, {}
    with progress(console) as bars:
        for step in bars.track(range(steps), description=title):
            classifier.train()
            batch = [order[step * batch_size + i] for i in range(batch_size)]
            goal = torch.tensor([row["label"] for row in batch], device=device())
            with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
                logits = classifier([row["chunks"] for row in batch])
            loss = functional.cross_entropy(logits.float(), goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if (step + 1) % (steps // epochs) == 0 and (found := accuracy(classifier, sets[1])) > best:
                best, weights = found, copy.deepcopy(classifier.state_dict())
    classifier.load_state_dict(weights)
    result = {"validation": best, "test": accuracy(classifier, sets[2])}
    config = classifier.encoder.config
    if config.model_type == "linformer" and all(config.local_windows):
        for branch in BRANCHES:
            ablated = copy.deepcopy(classifier)
            without_branch(ablated.encoder, branch)
            result[f"test without {branch}"] = accuracy(ablated, sets[2])
    return result


@torch.no_grad()
def accuracy(classifier: Classifier, rows: Sequence[dict[str, Any]]) -> float:
    classifier.eval()
    ordered = sorted(rows, key=lambda row: -len(row["input_ids"]))
    right = place = 0
    while place < len(ordered):
        longest = ordered[place]["chunks"]
        batch = ordered[place : place + max(1, vectors.TOKENS // (len(longest) * max(map(len, longest))))]
        with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
            logits = classifier([row["chunks"] for row in batch])
        goal = torch.tensor([row["label"] for row in batch])
        right += int((logits.argmax(1).cpu() == goal).sum())
        place += len(batch)
    return right / len(rows)


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """The accuracies of each row: over the seeds at its best rate, or of a single regression."""
    found: dict[str, Any] = {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, run in runs.items():
        if ", rate " not in key:
            found[key] = {"test": [run["test"]]}
            continue
        name, _, rest = key.partition(", rate ")
        groups.setdefault((name, rest.partition(", seed ")[0]), []).append(run)
    for name in dict.fromkeys(name for name, _ in groups):
        rate = max((own for other, own in groups if other == name), key=lambda own: groups[name, own][0]["validation"])
        same = groups[name, rate]
        found[name] = {key: [run[key] for run in same] for key in same[0] if key.startswith("test")}
        found[name]["rate"] = float(rate)
    return found


def table_of(rows: dict[str, Any], task: str) -> Table:
    columns = ["test", *(f"test without {branch}" for branch in BRANCHES)]
    table = Table("model", *columns, title=f"Accuracy in % on {task}: mean ± standard deviation over seeds")
    for name, row in rows.items():
        cells = (tasks.plus_minus(tasks.spread(row[key]), 2, scale=100) if key in row else "" for key in columns)
        table.add_row(name, *cells)
    return table
