"""Use saved models: labels or words for lines of text, perplexity on a corpus, scores on a task."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline

from .. import LinformerConfig, LinformerForMaskedLM, LinformerForSequenceClassification
from ..checks import check_choice, check_model, check_share, check_size
from ..errors import UserError
from . import tasks
from .checkpoints import load_whole
from .corpus import Corpus, tokenizer_hash
from .data import MAX_ROW, open_text
from .rows import IGNORED, Vocabulary, already_batched, collate, encode, load_tokenizer, longest_first

FILL_MASK, CLASSIFY = "fill-mask", "text-classification"
MODELS = {FILL_MASK: LinformerForMaskedLM, CLASSIFY: LinformerForSequenceClassification}
BLANK = "the line is blank"
BRANCHES = ("projected", "window")


def predict(model: Path, file: Path | None, out: TextIO, **options: Any) -> None:
    """Predict each line of a file, or of standard input; the options are those of `predict_lines`."""
    for stream in (sys.stdin, out):  # JSON is UTF-8, whatever the locale says
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    if file is None and sys.stdin is None:
        raise UserError("standard input is closed: name a file")
    with open_text(file) if file else nullcontext(sys.stdin) as opened:
        predict_lines(model, _lines(opened, str(file or "standard input")), out, **options)


def _lines(file: TextIO, name: str) -> Iterator[str]:
    """The lines of a file; a few bytes of a compressed file can be a line of gigabytes."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW), ""), 1):
        if len(line) == MAX_ROW:
            raise UserError(f"{name}, line {number} has {MAX_ROW:,} characters or more")
        yield line


def predict_lines(
    model: Path, lines: Iterable[str], out: TextIO, *, pairs: bool = False, best: int = 5, batch_size: int = 32
) -> None:
    """Write a JSON object for each line: its label and score, or guesses for its `<mask>`.

    With `pairs`, a line has two texts separated by a tab; `best` is the number of guesses. A line that is blank or
    wrong gets an `error`. After all lines, the first error is raised, except for blank lines.
    """
    check_size("best", best)
    check_size("batch_size", batch_size)
    tokenizer = load_tokenizer(model)
    if best > len(tokenizer):
        raise UserError(f"best={best} exceeds the {len(tokenizer)} tokens of the vocabulary")
    purpose = purpose_of(model)
    classifies = purpose == CLASSIFY
    if not classifies and tokenizer.mask_token is None:
        raise UserError(f"model={str(model)!r} fills in masks, and its tokenizer has no mask token")
    if pairs and not classifies:
        raise UserError(f"pairs has no effect on model={str(model)!r}, which fills in masks")
    network, options = load_model(model, purpose), {"truncation": True, "max_length": tokenizer.model_max_length}
    if classifies:
        pipe = pipeline(purpose, model=network, tokenizer=tokenizer, device=network.device, **options)
        answer_all = partial(pipe, batch_size=batch_size)
    else:
        answer_all = partial(_guess, network, tokenizer, best=best, **options)
    wrong: list[str] = []
    numbered = enumerate((line.rstrip("\r\n") for line in lines), 1)
    while batch := list(islice(numbered, batch_size)):
        errors = {number: _error(text, tokenizer, pairs, masked=not classifies) for number, text in batch}
        good = [text for number, text in batch if errors[number] is None]
        inputs = [dict(zip(("text", "text_pair"), text.split("\t"), strict=True)) for text in good] if pairs else good
        answers = iter(answer_all(inputs) if inputs else [])
        for number, text in batch:
            error = errors[number]
            answer: dict[str, Any] = next(answers) if error is None else {"error": error}
            best_answer = answer.get("guesses", [answer])[0]
            if math.isnan(best_answer.get("score", 0)):
                raise UserError(f"model={str(model)!r} computes NaN: its weights are damaged, or its training diverged")
            out.write(json.dumps({"text": text, **answer}, ensure_ascii=False) + "\n")
            if error not in (None, BLANK):
                wrong.append(f"line {number} {error}")
        out.flush()
    if wrong:
        raise UserError(wrong[0] + (f"; {len(wrong) - 1} more with errors" if len(wrong) > 1 else ""))


def _error(text: str, tokenizer: PreTrainedTokenizerBase, pairs: bool, masked: bool) -> str | None:
    """Why a line cannot be predicted."""
    if not text.strip():
        return BLANK
    if pairs and text.count("\t") != 1:
        return f"has {text.count(chr(9))} tabs, expected one between two texts"
    mask, length = tokenizer.mask_token, tokenizer.model_max_length
    if masked and text.count(mask) != 1:
        return f"contains {text.count(mask) or 'no'} {mask}, expected exactly one"
    if masked and tokenizer.mask_token_id not in tokenizer(text, truncation=True, max_length=length)["input_ids"]:
        return f"has its {mask!r} after the first {length} tokens, which are all that the model reads"
    return None


def _guess(
    network: LinformerForMaskedLM, tokenizer: PreTrainedTokenizerBase, texts: list[str], best: int, **options: Any
) -> Iterator[dict[str, Any]]:
    """The best words for the mask of each text. Unlike a pipeline, it computes no logits for the other tokens."""
    inputs = tokenizer(texts, padding=True, return_tensors="pt", **options).to(network.device)
    with torch.inference_mode():
        masked = network.linformer(**inputs).last_hidden_state[inputs["input_ids"] == tokenizer.mask_token_id]
        scores, tokens = network.head(masked).softmax(-1).topk(best)
    for ids, own in zip(tokens.tolist(), scores.tolist(), strict=True):
        words = map(tokenizer.decode, ids)
        # A word without the space before it, unless it is white space.
        guesses = [{"word": word.strip() or word, "score": score} for word, score in zip(words, own, strict=True)]
        yield {"guesses": guesses}


def evaluate(
    model: Path,
    *,
    data: Path | None = None,
    task: str | None = None,
    text: str = "text",
    label: str = "label",
    rows: int = 1024,
    mask_share: float = 0.15,
    without: str | None = None,
    console: Console,
) -> dict[str, Any]:
    """Compute perplexity on the corpus `data`, or scores on a task or labeled table; refuse options without effect.

    `without` removes the keys of one branch of attention, `"projected"` or `"window"`, to tell what it contributes.
    """
    unused: dict[str, tuple[object, object]] = {"text": (text, "text"), "label": (label, "label")}
    if task is not None:
        unused = {"rows": (rows, 1024), "mask_share": (mask_share, 0.15)}
    for option, (value, default) in unused.items():
        if value != default:
            use = "perplexity" if task is None else f"task={task!r}"
            raise UserError(f"{option}={value!r} has no effect on {use}")
    if task is None:
        if data is None:
            raise UserError("--data is missing: give a folder written by linformers prepare, or a --task")
        return perplexity(model, data, console, rows, mask_share, without)
    network = without_branch(load_model(model, CLASSIFY), without)
    if not Path(task).suffix:
        return _score(network, model, tasks.load(task, data, text=text, label=label), console)
    if data is not None:
        raise UserError(f"data={str(data)!r} has no effect on task={task!r}, which is a file")
    names = list(network.config.id2label.values())
    return _score(network, model, tasks.load_rows(Path(task), text, label, names), console)


def perplexity(
    model: Path, data: Path, console: Console, rows: int, mask_share: float, without: str | None = None
) -> dict[str, Any]:
    """Perplexity of masked tokens of a corpus's validation set, with the masks of pretraining."""
    from .pretrain import validation_rows  # imports the Trainer, 60 MB that no prediction needs

    check_size("rows", rows)
    check_share("mask_share", mask_share)
    network = without_branch(load_model(model, FILL_MASK), without)
    tokenizer, corpus = load_tokenizer(model), Corpus.open(data)
    if corpus.tokenizer_hash != tokenizer_hash(model):
        raise UserError(f"data={str(data)!r} and model={str(model)!r} have different tokenizers")
    corpus.verify()
    vocabulary = Vocabulary.of(tokenizer, corpus.vocab_size)
    dataset = validation_rows(corpus, vocabulary, tokenizer.model_max_length, rows, mask_share)
    total, count = 0.0, 0
    for batch in track(DataLoader(dataset, 16, collate_fn=already_batched), "rows", console=console):
        with torch.no_grad():
            loss = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}).loss
        masked = int((batch["labels"] != IGNORED).sum())
        total, count = total + loss.item() * masked, count + masked
    sizes = {"rows": len(dataset), "masked_tokens": count, "mask_share": mask_share}
    return {"perplexity": math.exp(total / count), **sizes}


def _score(network: PreTrainedModel, model: Path, task: tasks.TaskData, console: Console) -> dict[str, Any]:
    """Accuracy and F1 of a classifier on the test set of a task."""
    names = list(network.config.id2label.values())
    if names != task.label_names:
        raise UserError(f"model={str(model)!r} has the labels {names}, task {task.name!r} has {task.label_names}")
    tokenizer = load_tokenizer(model)
    max_length, logits, labels = tokenizer.model_max_length, [], []
    rows: Any = longest_first(encode(task.test, tokenizer, max_length))
    loader = DataLoader(rows, 64, collate_fn=lambda batch: collate(batch, tokenizer.pad_token_id, max_length))
    for batch in track(loader, task.name, console=console):
        labels.append(batch.pop("labels"))
        with torch.no_grad():
            inputs = {name: tensor.to(network.device) for name, tensor in batch.items()}
            logits.append(network(**inputs).logits.float().cpu())
    metrics = tasks.classification_metrics(torch.cat(logits).numpy(), torch.cat(labels).numpy())
    result = {**metrics, "f1_of": tasks.f1_of(names), "rows": len(task.test)}
    return {**result, "reported_on": task.reported_on, "note": task.note}


def load_model(folder: Path, purpose: str) -> PreTrainedModel:
    """A saved model for a task of transformers' pipelines, in float32 on the GPU if there is one."""
    if (actual := purpose_of(folder)) != purpose:
        raise UserError(f"model={str(folder)!r} is for {actual}, not for {purpose}")
    model = load_whole(MODELS[purpose], folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def without_branch(model: PreTrainedModel, branch: str | None) -> PreTrainedModel:
    """A model in whose layers the keys of one branch are gone: the `"projected"` ones, or those of the `"window"`."""
    if branch is None:
        return model
    check_choice("without", branch, BRANCHES)
    config = model.config
    for layer, lengths, window in zip(
        model.base_model.layers, config.projected_lengths, config.local_windows, strict=True
    ):
        if not any(lengths) or not window:
            raise UserError(f"without={branch!r} needs a model whose layers all have projected keys and a local window")
        if branch == "window":
            layer.attention.local_window = 0
        else:
            bias = torch.full((config.num_attention_heads,), -math.inf, device=model.device)
            layer.attention.scaled_far_bias = torch.nn.Parameter(bias)
    return model


def purpose_of(model: Path) -> str:
    """The task of transformers' pipelines that a saved model is for."""
    check_model("model", model)
    architectures = LinformerConfig.from_pretrained(model).architectures
    for purpose, model_class in MODELS.items():
        if architectures == [model_class.__name__]:
            return purpose
    raise UserError(f"model={str(model)!r} is for neither {' nor '.join(MODELS)}, but {architectures}")
