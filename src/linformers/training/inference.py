"""Saved models at work: labels or words for lines of text, and a model's perplexity or its score on a task."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline

from ..checks import check_model, check_share, check_size
from ..config import LinformerConfig
from ..errors import UserError
from ..heads import LinformerForMaskedLM, LinformerForSequenceClassification
from .batches import collate, encode
from .corpus import Corpus, tokenizer_hash
from .finetune import load_tokenizer
from .metrics import classification_metrics, f1_of
from .pretrain import validation_rows
from .rows import IGNORED, as_it_is
from .tasks import TaskData

# What is said of a line with nothing in it, which is no mistake.
BLANK = "the line is blank"


def predict(
    model: Path, lines: Iterable[str], out: TextIO, *, pairs: bool = False, best: int = 5, batch_size: int = 32
) -> int:
    """Write a JSON object for each line of text: its label and score, or guesses for its `<mask>`.

    One that is blank or wrong has its `error` there instead; when all others are answered, the first that is wrong is
    raised as a `ValueError`.

    Args:
        model: the folder of a model.
        lines: texts; under `pairs` two of them, with a tab between.
        out: where to write.
        pairs: whether lines hold pairs.
        best: how many guesses for a mask.
        batch_size: lines at once.

    Returns:
        The number of lines.
    """
    check_size("best", best)
    check_size("batch_size", batch_size)
    tokenizer = load_tokenizer(model)
    if best > len(tokenizer):
        raise UserError(f"best={best} exceeds the {len(tokenizer)} words of the vocabulary")
    use = purpose(model)
    classifies = use == "text-classification"
    if pairs and not classifies:
        raise UserError(f"pairs has no effect on model={str(model)!r}, which fills in masks")
    options: dict[str, Any] = {"truncation": True, "max_length": tokenizer.model_max_length}
    worker = pipeline(
        use,
        model=str(model),
        tokenizer=tokenizer,
        dtype=torch.float32,
        device=0 if torch.cuda.is_available() else -1,
        **(options if classifies else {"top_k": best, "tokenizer_kwargs": options}),
    )
    count, wrong = 0, list[str]()
    texts = (line.rstrip("\r\n") for line in lines)
    while batch := list(islice(texts, batch_size)):
        reasons = [_reason(text, tokenizer, pairs, masked=not classifies) for text in batch]
        good = [text for text, reason in zip(batch, reasons, strict=True) if reason is None]
        inputs = [{"text": a, "text_pair": b} for a, b in (text.split("\t") for text in good)] if pairs else good
        results = worker(inputs, batch_size=batch_size) if inputs else []
        if not classifies and len(inputs) == 1:  # this pipeline unpacks a list of one
            results = [results]
        answers = iter(results if classifies else map(_guesses, results))
        for text, reason in zip(batch, reasons, strict=True):
            count += 1
            answer = next(answers) if reason is None else {"error": reason}
            out.write(json.dumps({"text": text, **answer}, ensure_ascii=False) + "\n")
            if reason not in (None, BLANK):
                wrong.append(f"line {count} {reason}")
        out.flush()
    if wrong:
        more = f"; {len(wrong) - 1} more of {count} lines have an error, too" if len(wrong) > 1 else ""
        raise UserError(wrong[0] + more)
    return count


def perplexity(
    model: Path, data: Path, console: Console, rows: int = 1024, batch_size: int = 16, mask_share: float = 0.15
) -> dict[str, Any]:
    """The perplexity of masked words of a corpus's validation set, with the mask that pretraining uses."""
    check_size("rows", rows)
    check_share("mask_share", mask_share)
    if purpose(model) != "fill-mask":
        raise UserError(f"model={str(model)!r} predicts no words: perplexity needs a masked-language model")
    corpus, tokenizer = Corpus.open(data), load_tokenizer(model)
    if corpus.tokenizer_hash != tokenizer_hash(model):
        raise UserError(f"data={str(data)!r} was made with another tokenizer than model={str(model)!r}")
    corpus.verify()
    network = _loaded(LinformerForMaskedLM, model)
    dataset = validation_rows(corpus, tokenizer, tokenizer.model_max_length, rows, mask_share)
    total, count = 0.0, 0
    loader: DataLoader[Any] = DataLoader(dataset, batch_size, collate_fn=as_it_is)
    for batch in track(loader, "rows", console=console):
        with torch.no_grad():
            loss = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}).loss
        labelled = int((batch["labels"] != IGNORED).sum())
        total, count = total + loss.item() * labelled, count + labelled
    result = {"perplexity": math.exp(total / count), "rows": len(dataset), "masked_tokens": count}
    return {**result, "mask_share": mask_share}


def score(model: Path, task: TaskData, console: Console, batch_size: int = 64) -> dict[str, Any]:
    """Accuracy and F1 of a classifier on the set of a task that is reported."""
    check_classifier(model)
    tokenizer = load_tokenizer(model)
    max_length = tokenizer.model_max_length
    names = list(LinformerConfig.from_pretrained(model).id2label.values())
    if names != task.label_names:
        raise UserError(f"model={str(model)!r} has the labels {names}, task {task.name!r} has {task.label_names}")
    network = _loaded(LinformerForSequenceClassification, model)
    logits = []
    examples = encode(task.test, tokenizer, max_length).longest_first()
    loader = DataLoader(
        examples,
        batch_size,
        collate_fn=lambda rows: collate(rows, tokenizer.pad_token_id, max_length),
    )
    for batch in track(loader, task.name, console=console):
        inputs = {name: batch[name].to(network.device) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            logits.append(network(**inputs).logits.float().cpu())
    metrics = classification_metrics(torch.cat(logits).numpy(), examples.labels)
    named = {**metrics, "f1_of": f1_of(names)}
    return {**named, "rows": len(task.test), "reported_on": task.reported_on, "note": task.note}


def check_classifier(model: Path) -> None:
    if purpose(model) != "text-classification":
        raise UserError(f"model={str(model)!r} is no classifier: fine-tune it first")


def purpose(model: Path) -> str:
    """What a saved model is for, by its architecture."""
    check_model("model", model)
    (architecture,) = LinformerConfig.from_pretrained(model).architectures or ["none"]
    purposes = {"LinformerForMaskedLM": "fill-mask", "LinformerForSequenceClassification": "text-classification"}
    if architecture not in purposes:
        raise UserError(f"model={str(model)!r} is a {architecture}, not one of {', '.join(purposes)}")
    return purposes[architecture]


def _guesses(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"guesses": [{"word": _word(guess["token_str"]), "score": guess["score"]} for guess in found]}


def _word(token: str) -> str:
    """A token without the space before it; of one that is nothing but white space, all of it."""
    return token.strip() or token


def _loaded(model_class: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """A model to compute with in 32 bits, however it was saved."""
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _reason(text: str, tokenizer: PreTrainedTokenizerBase, pairs: bool, masked: bool) -> str | None:
    """Why a line has no answer; `None` if it has one."""
    if not text.strip():
        return BLANK
    if pairs and text.count("\t") != 1:
        return f"has {text.count(chr(9))} tabs, expected one between two texts"
    mask, length = tokenizer.mask_token, tokenizer.model_max_length
    if masked and text.count(mask) != 1:
        return f"has {text.count(mask)} times {mask!r}, expected once"
    if masked and tokenizer.mask_token_id not in tokenizer(text, truncation=True, max_length=length)["input_ids"]:
        return f"has its {mask!r} beyond the {length} tokens that are read; shorten it"
    return None
