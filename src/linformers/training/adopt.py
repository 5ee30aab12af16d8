"""`linformers convert`: an encoder with full attention becomes a long, linear one; a report compares the two."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import convert
from ..checks import check_empty_folder, make_folder
from ..errors import UserError, counted
from ..pooling import MODULES, PROMPTS, SETTINGS, Pooling
from ..progress import progress
from .checkpoints import full_tensor
from .contrast import LEARNED, Contrast, train_vectors
from .corpus import open_tokenizer
from .data import documents, find_files
from .distill import Settings, clean, encode_documents, rows_hash
from .distill import distill as run_distillation
from .predict import BRANCHES, CLASSIFY, FILL_MASK, without_branch
from .pretrain import SENTENCES, describe, model_card, save_model
from .rows import special_tokens

# Passages to compare, and the seconds for which a model's speed is measured.
PASSAGES, SECONDS, BATCH = 24, 4.0, 8
MASKED = 0.15  # of the tokens, where words are compared
WITHOUT = {"projected": "without projected keys", "window": "without the local window"}
PURPOSES = {
    "LinformerModel": "feature-extraction",
    "LinformerForMaskedLM": FILL_MASK,
    "LinformerForSequenceClassification": CLASSIFY,
    "LinformerForTokenClassification": "token-classification",
    "LinformerForQuestionAnswering": "question-answering",
}


def adopt(
    model: str,
    out: Path,
    *,
    text: Sequence[Path] = (),
    distill: Sequence[Path] = (),
    contrast: Sequence[Path] = (),
    settings: Settings | None = None,
    contrast_settings: Contrast | None = None,
    revision: str | None = None,
    console: Console,
    command: str,
    **config: Any,
) -> int:
    """Convert a model with its tokenizer and, if it is one of sentence-transformers, its pooling; report on it.

    Training runs in folders beside `out`, where it resumes. Returns an exit code, see `trainer.train`.

    Args:
        model: a folder or a name on the hub.
        out: a new folder.
        text: files to compare the models on; by default, Python's manual.
        distill: files to distill on; by default, the weights stay as they were copied.
        contrast: files to train on contrastively after that; the result gets a folder of its own, `OUT-contrastive`.
        settings: how to distill.
        contrast_settings: how to train contrastively.
        revision: the branch, tag or commit of a hub name.
        console: where the report is printed.
        command: for the card.
        **config: arguments of `convert.from_pretrained`.
    """
    contrastive, run, contrast_run = (
        out.with_name(out.name + end) for end in ("-contrastive", ".distillation", ".contrast")
    )
    # A kill between the two results leaves the second one and the runs, from which both are written again.
    for folder in [out, *([contrastive] if contrast and not contrast_run.exists() else [])]:
        check_empty_folder("out", folder)
    make_folder("out", out.parent)
    if settings is not None and not distill:
        raise UserError("--steps, --batch-size and --learning-rate have no effect without --distill, the text for it")
    if contrast_settings is not None and not contrast:
        raise UserError("--contrast-steps, -batch-size and -learning-rate have no effect without --contrast")
    files, texts, titled = (
        find_files(sources, name) if sources else []
        for name, sources in (("text", text), ("distill", distill), ("contrast", contrast))
    )
    work = Conversion(model, revision, config, files, console)
    if contrast and not type(work.original).__name__.endswith("Model"):
        head = f"the model is a {type(work.original).__name__}: save its encoder with AutoModel and convert that"
        raise UserError(f"contrast trains vectors of texts, but {head}")
    earlier = {}
    if texts:
        earlier["before distillation"] = work.compare(branches=False)["converted"]
        if code := work.distill(texts, run, settings or Settings()):
            return code
    results = [(out, work.compare() | earlier, work.weights())]
    if texts and (sentence := lowered(earlier["before distillation"], results[0][1]["converted"])):
        console.print(sentence, style="yellow", highlight=False, soft_wrap=True)
    if titled:
        earlier["before contrastive training"] = results[0][1]["converted"]
        if code := work.contrast(titled, contrast_run, contrast_settings or Contrast()):
            return code
        results.insert(0, (contrastive, work.compare() | earlier, work.weights()))
    speeds = work.speeds()
    for folder, report, weights in results:  # `out` is last: it marks the command as finished
        work.save(folder, {**report, "tokens_per_second": speeds}, weights, command)
    for finished in ([run] if texts else []) + ([contrast_run] if titled else []):
        clean(finished)
    return 0


class Conversion:
    """A model, what it was converted to, and how to compare, train and save that."""

    def __init__(
        self, model: str, revision: str | None, config: dict[str, Any], files: Sequence[Path], console: Console
    ) -> None:
        self.model, self.revision, self.console = model, revision, console
        self.original = convert.load_original(model, revision)
        self.converted = convert.from_pretrained(self.original, **config)
        self.tokenizer = open_tokenizer(model, f"model={model!r}", revision=revision or "main")
        # What transformers makes of no file at all:
        if len(self.tokenizer.get_vocab()) <= len(self.tokenizer.all_special_tokens):
            raise UserError(f"model={model!r} has no tokenizer files")
        theirs = self.original.config
        self.limit = theirs.max_position_embeddings - convert.unused_positions(theirs)
        self.n = self.tokenizer.model_max_length = self.converted.config.max_position_embeddings
        self.before, self.after = special_tokens(self.tokenizer)
        self.passages = encode_passages(self.tokenizer, read(files), min(self.limit, self.n))
        self.pooling = Pooling.of(source_folder(model, revision))
        self.recorded: dict[str, Any] = {"model": model, "revision": revision, "config": config}

    def compare(self, branches: bool = True) -> dict[str, Any]:
        """How much it agrees with the original; if it has both `branches`, also without each of them."""
        config = self.converted.config
        both = branches and config.projection == "linear" and all(config.local_windows)
        inputs = (self.tokenizer, self.passages, self.pooling.pool, self.console)
        return compare(self.original, self.converted, *inputs, branches=BRANCHES if both else ())

    def distill(self, files: Sequence[Path], run: Path, settings: Settings) -> int:
        rows = encode_documents(files, self.tokenizer, self.n, self.before, self.after)
        self.recorded |= {"rows": len(rows), "hash": rows_hash(rows)}
        sizes: dict[str, Any] = {"chunk": self.limit, "special": (len(self.before), len(self.after))}
        sizes["first_token"] = self.pooling.mode == "cls"
        inputs = (rows, run, settings, self.recorded, self.console)
        return run_distillation(self.converted, self.original, *inputs, **sizes)

    def contrast(self, files: Sequence[Path], run: Path, settings: Contrast) -> int:
        recorded = {"start": self.recorded}
        inputs = (self.pooling, files, run, settings, recorded, self.console)
        return train_vectors(self.converted, self.tokenizer, *inputs, command="convert")

    def weights(self) -> dict[str, Tensor]:
        """Copies of them, which later training does not change."""
        return {name: full_tensor(tensor) for name, tensor in self.converted.state_dict().items()}

    def speeds(self) -> dict[str, int]:
        """Tokens a second of both models, each with inputs of its own length."""
        return {
            f"original, {self.limit} tokens": round(speed(self.original, self.limit)),
            f"converted, {self.n} tokens": round(speed(self.converted, self.n)),
        }

    def save(self, folder: Path, report: dict[str, Any], weights: dict[str, Tensor], command: str) -> None:
        """Print the report, and write the model, its tokenizer, pooling, report and card."""

        def add_pooling(unfinished: Path) -> None:
            (unfinished / "conversion.json").write_text(json.dumps(report, indent=1) + "\n")
            self.pooling.write(unfinished, self.n)

        show(report, self.console)
        purpose = purpose_of(self.converted, self.pooling)
        card = card_of(self.model, self.revision, self.converted, purpose, report, command)
        save_model(folder, self.converted, weights, self.tokenizer, card, add_pooling)
        self.console.print(f"model in {folder}", markup=False, highlight=False)


def read(files: Sequence[Path]) -> Iterator[str]:
    if files:
        for path in files:
            yield from documents(path)
        return
    from pydoc_data.topics import topics  # part of every Python

    yield from topics.values()


def encode_passages(tokenizer: PreTrainedTokenizerBase, texts: Iterator[str], length: int) -> list[list[int]]:
    """The first `PASSAGES` passages of `length` tokens, special ones included, one from each text if possible."""
    before, after = special_tokens(tokenizer)
    found: list[list[int]] = []
    others: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        size = length - len(before) - len(after)
        parts = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        found += parts[:1]
        others += parts[1:]
        if len(found) >= PASSAGES:
            break
    rows = [*found, *others][:PASSAGES]
    if len(rows) < 2:
        raise UserError(f"text has {counted(len(rows), 'passage')} of {length} tokens, but comparing takes at least 2")
    return [[*before, *row, *after] for row in rows]


def source_folder(model: str, revision: str | None) -> Path:
    """The folder of a model, or of what a hub model says about its pooling."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(model, revision=revision, allow_patterns=[MODULES, PROMPTS, SETTINGS, "*_*/config.json"])
    )


def compare(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Sequence[int]],
    pool: Callable[[Tensor, Tensor | None], Tensor],
    console: Console,
    *,
    branches: Sequence[str],
) -> dict[str, Any]:
    """How alike two models are on the same passages: as converted, and without each of the branches."""
    for network in (original, converted):
        network.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    ids = torch.tensor(passages)
    models: dict[str, Any] = {"converted": lambda: converted}
    for branch in branches:
        models[WITHOUT[branch]] = lambda branch=branch: without_branch(copy.deepcopy(converted), branch)
    with progress(console) as bars:
        task = bars.add_task("comparing", total=(1 + len(models)) * len(ids))

        def outputs(network: PreTrainedModel) -> Tensor:
            found = []
            for batch in ids.split(BATCH):
                found.append(answers_of(network, batch, tokenizer, pool))
                bars.advance(task, len(batch))
            return torch.cat(found)

        expected = outputs(original)
        return {name: agreement(outputs(make()), expected) for name, make in models.items()}


@torch.inference_mode()
def answers_of(
    network: PreTrainedModel,
    ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    pool: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """A vector for each passage or, with a head, the answer at each place where it gives one."""
    generator, mask_token = torch.Generator().manual_seed(0), tokenizer.mask_token_id
    masked = torch.rand(ids.shape, generator=generator) < MASKED
    if "MaskedLM" in type(network).__name__ and mask_token is not None:
        ids = torch.where(masked, mask_token, ids)
    ids = ids.to(network.device)
    output = network(ids, torch.ones_like(ids), return_dict=True)
    if "last_hidden_state" in output:
        return functional.normalize(pool(output.last_hidden_state, None).float(), dim=-1).cpu()
    if "start_logits" in output:
        return torch.stack([output.start_logits.argmax(-1), output.end_logits.argmax(-1)], 1).cpu()
    answers = output.logits.argmax(-1).cpu()
    return answers[masked] if "MaskedLM" in type(network).__name__ else answers


def agreement(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """The share of equal answers; of vectors, the mean cosine and the correlation of the similarities of passages."""
    if not ours.is_floating_point():
        return {"agreement": (ours == theirs).float().mean().item()}
    upper = torch.ones(len(ours), len(ours), dtype=torch.bool).triu(1)
    similarities = torch.stack([(vectors @ vectors.T)[upper] for vectors in (ours, theirs)])
    correlation = torch.corrcoef(similarities)[0, 1].item() if len(ours) > 2 else 1.0
    return {"cosine": (ours * theirs).sum(-1).mean().item(), "correlation of similarities": correlation}


def lowered(before: dict[str, float], after: dict[str, float]) -> str:
    """A warning if distillation lowered the first measure of agreement."""
    name = next(iter(before))
    was, now = (f"{values[name]:.3f}" for values in (before, after))
    if float(now) >= float(was):
        return ""
    remedy = "train for more --steps, on more text, or with a lower --learning-rate"
    return f"Distillation lowered the {name} with the original from {was} to {now}: {remedy}."


@torch.inference_mode()
def speed(network: PreTrainedModel, length: int) -> float:
    """Tokens a second in rows of `length` tokens."""
    ids = torch.full((max(1, 4096 // length), length), 5, device=network.device)
    passes, began = -1, 0.0  # the first pass is not timed
    while passes < 1 or time.perf_counter() - began < SECONDS / 2:
        network(ids, torch.ones_like(ids))
        if network.device.type == "cuda":
            torch.cuda.synchronize()
        passes += 1
        if passes == 0:
            began = time.perf_counter()
    return passes * ids.numel() / (time.perf_counter() - began)


def show(report: dict[str, Any], console: Console) -> None:
    table = Table("", *report["converted"], title="Agreement with the original")
    for name, values in report.items():
        if name != "tokens_per_second":
            table.add_row(name, *(f"{value:.3f}" for value in values.values()))
    console.print(table)
    for name, value in report["tokens_per_second"].items():
        console.print(f"{value:,} tokens a second: {name}", highlight=False)


def purpose_of(network: PreTrainedModel, pooling: Pooling) -> str:
    """What a model is for, as its card says."""
    return PURPOSES[type(network).__name__] if pooling.folder is None else SENTENCES


def card_of(
    model: str, revision: str | None, converted: PreTrainedModel, purpose: str, report: dict[str, Any], command: str
) -> str:
    measures = list(report["converted"])
    models = {row: values for row, values in report.items() if row != "tokens_per_second"}
    rows = [f"| {row} | {' | '.join(f'{value:.3f}' for value in values.values())} |" for row, values in models.items()]
    speeds = "\n".join(f"- {value:,} tokens a second: {kind}" for kind, value in report["tokens_per_second"].items())
    at = f" (revision `{revision}`)" if revision else ""
    weights = "whose weights it has"
    if "before distillation" in report:
        weights = "with whose weights it started, then distilled from it"
    if "before contrastive training" in report:
        weights = weights.replace("whose weights it has", "with whose weights it started")
        weights += f", then {LEARNED}"
    text = f"""\
Converted from `{model}`{at}, {weights}.
Agreement on passages that the original can read:

| | {" | ".join(measures)} |
|---|{"---|" * len(measures)}
{chr(10).join(rows)}

{speeds}
"""
    return model_card(purpose, describe(converted.config), text, command)
