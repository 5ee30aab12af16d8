"""`linformers convert`: an encoder with full attention becomes a long, linear one; a report compares the two."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import convert
from ..checks import make_folder
from ..errors import UserError
from ..files import read_json
from ..pooling import first_real_token, mean_of_real_tokens
from ..progress import progress
from .checkpoints import full_tensor
from .contrast import SPAN, Contrast, encode_titled
from .contrast import contrast as run_contrast
from .corpus import open_tokenizer
from .data import documents, find_files
from .distill import Settings, clean, encode_documents, rows_hash
from .distill import distill as run_distillation
from .predict import BRANCHES, CLASSIFY, FILL_MASK, without_branch
from .pretrain import describe, model_card, save_model

# Passages to compare, and the seconds for which a model's speed is measured.
PASSAGES, SECONDS, BATCH = 24, 4.0, 8
MASKED = 0.15  # of the tokens, where words are compared
# The files of a sentence-transformers folder that say how to make a vector of a text.
PROMPTS = "config_sentence_transformers.json"
SENTENCE_FILES = ("modules.json", PROMPTS, "sentence_bert_config.json")
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
    contrastive = out.with_name(f"{out.name}-contrastive")
    runs = {name: out.with_name(f"{out.name}.{name}") for name in ("distillation", "contrast")}
    # A kill between the two results leaves the second one and the runs, from which both are written again.
    for folder in [out, *([contrastive] if contrast and not runs["contrast"].exists() else [])]:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"out={str(folder)!r} is not an empty folder: choose a new one")
    make_folder("out", out.parent)
    if settings is not None and not distill:
        raise UserError("steps, batch_size and learning_rate have no effect without distill, the text to train on")
    files, texts, titled = (
        find_files(sources, name) if sources else []
        for name, sources in (("text", text), ("distill", distill), ("contrast", contrast))
    )
    original = convert.load_original(model, revision)
    if contrast and not type(original).__name__.endswith("Model"):
        head = f"the model is a {type(original).__name__}: save its encoder with AutoModel and convert that"
        raise UserError(f"contrast trains vectors of texts, but {head}")
    converted = convert.from_pretrained(original, **config)
    tokenizer = open_tokenizer(model, f"model={model!r}", revision=revision or "main")
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_tokens):  # what transformers makes of no file at all
        raise UserError(f"model={model!r} has no tokenizer files")
    limit = original.config.max_position_embeddings - convert.unused_positions(original.config)
    n = converted.config.max_position_embeddings
    longest, tokenizer.model_max_length = min(limit, n), n
    before, after = special_tokens(tokenizer)
    passages = encode_passages(tokenizer, read(files), longest)
    pooling = SentencePooling(source_folder(model, revision))
    inputs = (tokenizer, passages, pooling.pool, console)
    both = converted.config.projection == "linear" and all(converted.config.local_windows)
    branches = BRANCHES if both else ()
    recorded: dict[str, Any] = {"model": model, "revision": revision, "config": config}
    earlier = {}
    if texts:
        earlier["before distillation"] = compare(original, converted, *inputs, branches=())["converted"]
        rows = encode_documents(texts, tokenizer, n, before, after)
        recorded |= {"rows": len(rows), "hash": rows_hash(rows)}
        sizes: dict[str, Any] = {
            "chunk": limit,
            "special": (len(before), len(after)),
            "first_token": pooling.first_token,
        }
        run, how = runs["distillation"], settings or Settings()
        if code := run_distillation(converted, original, rows, run, how, recorded, console, **sizes):
            return code
    reports = {out: compare(original, converted, *inputs, branches=branches) | earlier}
    weights = {out: {name: full_tensor(tensor) for name, tensor in converted.state_dict().items()}}
    if titled:
        earlier["before contrastive training"] = reports[out]["converted"]
        prefixes = {kind: [*before, *pooling.prompt(kind, tokenizer)] for kind in ("document", "query")}
        rows = encode_titled(titled, tokenizer, n, max(map(len, prefixes.values())) + len(after))
        recorded = {"start": recorded, "rows": len(rows), "hash": rows_hash(rows)}
        ends: dict[str, Any] = {"pool": pooling.pool, "prefixes": prefixes, "after": after}
        run, contrast_settings = runs["contrast"], contrast_settings or Contrast()
        if code := run_contrast(converted, rows, run, contrast_settings, recorded, console, **ends):
            return code
        reports = {contrastive: compare(original, converted, *inputs, branches=branches) | earlier, **reports}
        weights[contrastive] = converted.state_dict()
    speeds = {
        f"original, {limit} tokens": round(speed(original, limit)),
        f"converted, {n} tokens": round(speed(converted, n)),
    }
    for folder, report in reports.items():  # `out` is last: it marks the command as finished
        report["tokens_per_second"] = speeds
        show(report, console)
        card = card_of(model, revision, converted, report, command)

        def add_pooling(unfinished: Path, report: dict[str, Any] = report) -> None:
            (unfinished / "conversion.json").write_text(json.dumps(report, indent=1) + "\n")
            pooling.write(unfinished, n)

        save_model(folder, converted, weights[folder], tokenizer, card, add_pooling)
        console.print(f"model in {folder}", markup=False, highlight=False)
    for run in runs.values():
        clean(run)
    return 0


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
        raise UserError(f"text has {len(rows)} passages of {length} tokens, but comparing takes at least 2")
    return [[*before, *row, *after] for row in rows]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    letter = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = letter["input_ids"], letter["special_tokens_mask"]
    return ids[: is_special.index(0)], ids[len(ids) - is_special[::-1].index(0) :]


class SentencePooling:
    """How a folder of sentence-transformers makes a vector of a text; the mean of all tokens for other folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder if (folder / "modules.json").exists() else None
        self.first_token, self.prompts = False, {}
        if self.folder and (self.folder / PROMPTS).exists():
            prompts = read_json(self.folder / PROMPTS).get("prompts")
            self.prompts = prompts if isinstance(prompts, dict) else {}
        for path in sorted(folder.glob("*_Pooling/config.json")) if self.folder else []:
            modes = read_json(path)
            used = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
            if "pooling_mode" in modes:  # from sentence-transformers 5.4 on
                used = [f"pooling_mode_{modes['pooling_mode']}"]
            self.first_token = bool(used) and all("cls" in name for name in used)

    def prompt(self, kind: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that come before each text of a kind, `"document"` or `"query"`."""
        prompts = [self.prompts.get(name) for name in ((kind, "passage") if kind == "document" else (kind,))]
        text = next((prompt for prompt in prompts if isinstance(prompt, str)), "")
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def pool(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        return (first_real_token if self.first_token else mean_of_real_tokens)(hidden_states, mask)

    def write(self, folder: Path, length: int) -> None:
        """Copy the description to the folder of a model that reads `length` tokens."""
        if self.folder is None:
            return
        for name in SENTENCE_FILES:
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, folder / name)
        for module in read_modules(self.folder / "modules.json"):
            path = Path(str(module.get("path", "")))
            if path.name and path.name == str(path) and (self.folder / path / "config.json").exists():
                (folder / path).mkdir()
                shutil.copy(self.folder / path / "config.json", folder / path / "config.json")
        if (folder / "sentence_bert_config.json").exists():
            settings = read_json(folder / "sentence_bert_config.json") | {"max_seq_length": length}
            (folder / "sentence_bert_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def read_modules(path: Path) -> list[dict[str, Any]]:
    """The modules of a sentence-transformers folder."""
    modules = None
    with suppress(UserError):
        modules = read_json(path)
    if modules is None or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{path} is damaged: it is not a list of modules of sentence-transformers")
    return modules


def source_folder(model: str, revision: str | None) -> Path:
    """The folder of a model, or of what a hub model says about its pooling."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=[*SENTENCE_FILES, "*_*/config.json"]))


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
        models[f"without {branch}"] = lambda branch=branch: without_branch(copy.deepcopy(converted), branch)
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


def card_of(model: str, revision: str | None, converted: PreTrainedModel, report: dict[str, Any], command: str) -> str:
    name = type(converted).__name__
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
        weights += f", then trained to tell a document from others by its title or {SPAN} tokens of it"
    text = f"""\
Converted from `{model}`{at}, {weights}.
Agreement on passages that the original can read:

| | {" | ".join(measures)} |
|---|{"---|" * len(measures)}
{chr(10).join(rows)}

{speeds}
"""
    return model_card(PURPOSES[name], describe(converted.config), text, command)
