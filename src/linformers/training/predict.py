"""Use saved models: labels or words for lines of text, perplexity on a corpus, scores on a task."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .. import LinformerConfig, LinformerForMaskedLM, LinformerForSequenceClassification
from ..checks import check_choice, check_model, check_new_file, check_share, check_size, refuse_nan
from ..errors import UserError, counted
from ..progress import progress
from . import tasks
from .batches import Block, TextEncoder, batches_of, default_tokens, inputs_of
from .checkpoints import load_whole
from .corpus import Corpus, tokenizer_hash
from .data import MAX_ROW, TABLES, file_type, open_text, table_rows
from .labels import f1_of, problem_of, scores_of
from .rows import IGNORED, Vocabulary, already_batched, load_tokenizer

FILL_MASK, CLASSIFY = "fill-mask", "text-classification"
MODELS = {FILL_MASK: LinformerForMaskedLM, CLASSIFY: LinformerForSequenceClassification}
BLANK = "the {} is blank"
PREDICTED = "predicted_"  # before the names of answers, if the table has a column of one of them
ANSWERS = {None: ["guesses"], "single": ["label", "score"], "multi": ["labels"], "regression": ["value"]}
BRANCHES = ("projected", "window")


class Row(NamedTuple):
    """A text, or a pair of texts, to predict: a line, or a row of a table."""

    text: str  # empty if there is an error
    pair: str | None
    columns: dict[str, Any]  # of the row
    where: str
    error: str | None


def predict(
    model: Path,
    file: Path | None,
    out: TextIO | Path,
    *,
    text: str = "text",
    pairs: bool = False,
    best: int = 5,
    tokens: int | None = None,
    console: Console,
) -> None:
    """Predict each row of a table, or each line of another file or of standard input.

    Args:
        model: its folder.
        file: a table (jsonl, csv, tsv, parquet), or lines.
        out: a stream, which gets JSON objects, or a new file that ends in .jsonl, .csv or .parquet. The answers are
            columns of the table: `label` and `score`, `labels` with a list of both, `value` for a number, or `guesses`
            for a mask, and `error` for a row that is blank or wrong; `predicted_label` and so on if the table has a
            column of one of these names.
        text: the column of a table that holds the text, or two separated by a comma.
        pairs: whether a line has two texts separated by a tab.
        best: the number of guesses for a mask.
        tokens: of a batch.
        console: where rows are counted, and texts that are longer than the model reads.

    Raises:
        UserError: after all rows, the first error of one that is not blank.
    """
    for stream in (sys.stdin, out):  # JSON is UTF-8, whatever the locale says
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    if file is None and sys.stdin is None:
        raise UserError("standard input is closed: name a file")
    is_table = file is not None and file_type(file) in TABLES
    if not is_table and text != "text":
        raise UserError(f"text={text!r} has no effect on {file or 'standard input'}, which has lines")
    if is_table and pairs:
        raise UserError("pairs has no effect on a table: name two columns of texts, separated by a comma")
    predictor = Predictor(model, best, tokens, pairs or text.count(",") == 1)
    writing = open_output(out, predictor.answers) if isinstance(out, Path) else nullcontext(JsonLines(out))
    with writing as writer, nullcontext(sys.stdin) if file is None or is_table else open_text(file) as opened:
        if is_table:
            assert file is not None
            rows = table_of(file, text)
        else:
            rows = lines_of(_lines(opened, str(file or "standard input")), pairs)
        wrong = predictor.run(rows, writer, console)
    if isinstance(out, Path):
        written = f"{counted(predictor.rows, 'row')} in {out}"
        written += f", {predictor.errors:,} with an error" if predictor.errors else ""
        console.print(written, highlight=False, markup=False, soft_wrap=True)
    refuse_wrong(wrong)


def predict_lines(model: Path, lines: Iterable[str], out: TextIO, *, pairs: bool = False, **options: Any) -> None:
    """Write a JSON object for each line; see `predict`."""
    predictor = Predictor(model, pairs=pairs, **options)
    refuse_wrong(predictor.run(lines_of(lines, pairs), JsonLines(out), Console(quiet=True)))


def refuse_wrong(errors: list[str]) -> None:
    if errors:
        raise UserError(errors[0] + (f"; {len(errors) - 1} more with errors" if len(errors) > 1 else ""))


def _lines(file: TextIO, name: str) -> Iterator[str]:
    """The lines of a file; a few bytes of a compressed file can be a line of gigabytes."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW), ""), 1):
        if len(line) == MAX_ROW:
            raise UserError(f"{name}, line {number} has {MAX_ROW:,} characters or more")
        yield line


def lines_of(lines: Iterable[str], pairs: bool) -> Iterator[Row]:
    for number, line in enumerate((line.rstrip("\r\n") for line in lines), 1):
        text, error = line, None if line.strip() else BLANK.format("line")
        pair = None
        if pairs and error is None:
            if line.count("\t") == 1:
                text, pair = line.split("\t")
            else:
                error = f"has {line.count(chr(9))} tabs, expected one between two texts"
        yield Row("" if error else text, pair, {"text": line}, f"line {number}", error)


def table_of(path: Path, text: str) -> Iterator[Row]:
    columns = text.split(",")
    if len(columns) > 2:
        raise UserError(f"text={text!r} must be one or two columns")
    for number, row in enumerate(table_rows(path, columns), 1):
        own = ["" if row[column] is None else row[column] for column in columns]
        error = None
        if wrong := [value for value in own if not isinstance(value, str)]:
            error = f"has {wrong[0]!r}, which is not text"
        elif not any(value.strip() for value in own):
            error = BLANK.format("row")
        first, second = ("", None) if error else (own[0], own[1] if len(own) > 1 else None)
        kept = {name: value for name, value in row.items() if name is not None}
        yield Row(first, second, kept, f"row {number}", error)


class Predictor:
    """A model that labels texts or fills in their masks, `best` guesses each."""

    def __init__(self, model: Path, best: int = 5, tokens: int | None = None, pairs: bool = False) -> None:
        check_size("best", best)
        if tokens is not None:
            check_size("tokens", tokens)
        self.model, self.best, self.batch_tokens = model, best, tokens or default_tokens()
        self.tokenizer = load_tokenizer(model)
        if best > len(self.tokenizer):
            raise UserError(f"best={best} exceeds the {len(self.tokenizer)} tokens of the vocabulary")
        purpose = purpose_of(model)
        self.classifies = purpose == CLASSIFY
        if not self.classifies and self.tokenizer.mask_token is None:
            raise UserError(f"model={str(model)!r} fills in masks, and its tokenizer has no mask token")
        if pairs and not self.classifies:
            raise UserError(f"pairs has no effect on model={str(model)!r}, which fills in masks")
        self.network = load_model(model, purpose)
        self.problem = problem_of(self.network.config, model) if self.classifies else None
        self.answers = ANSWERS[self.problem]  # the columns
        self.encoder = TextEncoder(self.tokenizer, self.tokenizer.model_max_length)
        self.rows = self.errors = 0  # what `run` has written

    def run(self, rows: Iterable[Row], writer: Any, console: Console) -> list[str]:
        """Write the answer of each row, in order; returns the errors of rows that are not blank."""
        wrong: list[str] = []
        count = LongTexts(self.encoder.max_length)
        checked = rows if self.classifies else map(self._check_mask, rows)
        for block in self.encoder.read(checked):
            count.add(block)
            answers = self._labels(block) if self.classifies else self._guesses(block)
            found = []
            for row, answer in zip(block.texts, answers, strict=True):
                error = row.error or (None if answer else "has no text that the tokenizer knows")
                found.append((row.columns, {"error": error} if error else answer))
                if error and not error.endswith("is blank"):
                    wrong.append(f"{row.where} {error}")
            writer.write(found)
            self.rows += len(found)
            self.errors += sum("error" in answer for _, answer in found)
        if note := str(count):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        return wrong

    def _labels(self, block: Block) -> Iterator[dict[str, Any]]:
        """The answer for each text, as in a pipeline; nothing for a text without tokens.

        It is the best label with its score, all labels with a score above 0.5, or a value.
        """
        config = self.network.config
        logits = logits_of(self.network, block, self.encoder, self.tokenizer.pad_token_id, self.batch_tokens)
        for has_tokens, own in zip(block.parts_of_texts(), torch.from_numpy(logits), strict=True):
            if not has_tokens:
                yield {}
                continue
            if own.isnan().any():
                refuse_nan(self.model)
            if self.problem == "regression":
                yield {"value": float(own)}
                continue
            scores = own.sigmoid() if self.problem == "multi" or len(own) == 1 else own.softmax(-1)
            order = scores.argsort(descending=True, stable=True).tolist()
            best = [i for i in order if scores[i] > 0.5] if self.problem == "multi" else order[:1]
            found = [{"label": config.id2label[i], "score": float(scores[i])} for i in best]
            yield {"labels": found} if self.problem == "multi" else found[0]

    def _check_mask(self, row: Row) -> Row:
        mask = self.tokenizer.mask_token
        if row.error is None and (count := row.text.count(mask)) != 1:
            use = "" if count else "; to label texts, pass --model, a model of linformers finetune"
            return row._replace(text="", error=f"contains {count or 'no'} {mask}, expected exactly one{use}")
        return row

    def _guesses(self, block: Block) -> Iterator[dict[str, Any]]:
        """The best words for the mask of each text, from the part that has it as its own token.

        Unlike a pipeline, this computes no logits for the other tokens.
        """
        mask = self.tokenizer.mask_token_id
        masks = [np.flatnonzero(tokens.ids == mask) for tokens in block.tokens]
        parts = [
            part for part in block.parts if len(own := masks[part.text]) == 1 and part.own[0] <= own[0] < part.own[1]
        ]
        found: dict[int, dict[str, Any]] = {}
        for batch in batches_of(parts, self.batch_tokens):
            inputs = inputs_of(batch, self.tokenizer.pad_token_id, self.encoder.max_length, self.network.device)
            places = [int(masks[part.text][0]) - part.first + part.head for part in batch]
            with torch.inference_mode():
                hidden = self.network.linformer(**inputs).last_hidden_state[range(len(batch)), places]
                scores, tokens = self.network.head(hidden).softmax(-1).topk(self.best)
            if scores.isnan().any():
                refuse_nan(self.model)
            for part, ids, own in zip(batch, tokens.tolist(), scores.tolist(), strict=True):
                words = map(self.tokenizer.decode, ids)
                # A word without the space before it, unless it is white space.
                found[part.text] = {
                    "guesses": [{"word": word.strip() or word, "score": s} for word, s in zip(words, own, strict=True)]
                }
        return (found.get(number, {}) for number in range(len(block.texts)))


class LongTexts:
    """Counts the texts that are longer than the model reads, and says so."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.texts, self.in_parts, self.cut = max_length, 0, 0, 0

    def add(self, block: Block) -> None:
        self.texts += len(block.texts)
        self.in_parts += sum(parts > 1 for parts in block.parts_of_texts())
        self.cut += sum(tokens.cut for tokens in block.tokens)

    def __str__(self) -> str:
        longer = f"longer than n={self.max_length:,} tokens"
        if self.cut:
            return f"pairs {longer}, of which the longer text was cut: {self.cut:,} of {self.texts:,}"
        if self.in_parts:
            parts = "read in overlapping parts, whose answers are merged"
            return f"texts {longer}, {parts}: {self.in_parts:,} of {self.texts:,}"
        return ""


@torch.inference_mode()
def logits_of(
    network: PreTrainedModel, block: Block, encoder: TextEncoder, pad_token_id: int, batch_tokens: int
) -> np.ndarray:
    """The logits of each text of a block, (texts, labels): the mean over its parts, weighted by their own tokens."""
    totals = np.zeros((len(block.texts), network.config.num_labels), np.float32)
    weights = np.zeros((len(block.texts), 1), np.float32)
    for batch in batches_of(block.parts, batch_tokens):
        inputs = inputs_of(batch, pad_token_id, encoder.max_length, network.device)
        texts = [part.text for part in batch]
        own = np.array([[part.own[1] - part.own[0]] for part in batch], np.float32)
        np.add.at(totals, texts, own * network(**inputs).logits.float().cpu().numpy())
        np.add.at(weights, texts, own)
    return totals / np.maximum(weights, 1)


class JsonLines:
    """Answers as JSON objects, one a line."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for row in map(merged, rows):
            self.file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        self.file.flush()


class Csv:
    """Answers as columns of a table; lists as JSON."""

    def __init__(self, file: TextIO, answers: list[str]) -> None:
        self.file, self.answers = file, answers
        self.writer: Any = None

    def write(self, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, names_of(rows, self.answers))
            self.writer.writeheader()
        for row in map(merged, rows):
            as_json = {name: json.dumps(v, ensure_ascii=False) for name, v in row.items() if isinstance(v, list | dict)}
            self.writer.writerow({**dict.fromkeys(self.writer.fieldnames), **row, **as_json})


class Parquet:
    """Answers as columns of a table; the first block of rows decides the types of the others."""

    def __init__(self, path: Path, answers: list[str]) -> None:
        self.path, self.answers = path, answers
        self.writer: Any = None

    def write(self, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            if self.writer is None:
                text, real = pyarrow.string(), pyarrow.float64()
                types = {"error": text, "label": text, "score": real, "value": real}
                types["guesses"] = pyarrow.list_(pyarrow.struct({"word": text, "score": real}))
                types["labels"] = pyarrow.list_(pyarrow.struct({"label": text, "score": real}))
                columns = [row for row, _ in rows]
                found = pyarrow.Table.from_pylist(columns).schema
                for name in names_of(rows, self.answers)[len(found) :]:
                    found = found.append(pyarrow.field(name, types[name.removeprefix(PREDICTED)]))
                self.writer = pyarrow.parquet.ParquetWriter(self.path, found)
            table = pyarrow.Table.from_pylist(list(map(merged, rows)), self.writer.schema)
        except (pyarrow.ArrowException, TypeError) as error:
            raise UserError(f"the columns have no common type for Parquet ({error}): write .jsonl") from None
        self.writer.write_table(table)


def names_of(rows: list[tuple[dict[str, Any], dict[str, Any]]], answers: list[str]) -> list[str]:
    """The columns of a table with answers."""
    own = list(dict.fromkeys(name for row, _ in rows for name in row))
    return own + [prefix_of(own) + name for name in (*answers, "error")]


def merged(row: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    columns, answer = row
    return {**columns, **{prefix_of(columns) + name: value for name, value in answer.items()}}


def prefix_of(columns: Iterable[str]) -> str:
    """What precedes the names of the answers."""
    return PREDICTED if {"error"}.union(*ANSWERS.values()) & {*columns} else ""


@contextmanager
def open_output(path: Path, answers: list[str]) -> Iterator[Any]:
    """A new file that appears when it is complete, also if some rows were wrong."""
    kinds: dict[str, Any] = {
        ".jsonl": JsonLines,
        ".csv": partial(Csv, answers=answers),
        ".parquet": partial(Parquet, answers=answers),
    }
    check_choice("the ending of out", path.suffix, kinds)
    check_new_file("out", path)
    unfinished, complete = path.with_name(f".{path.name}.unfinished"), False
    file = None if path.suffix == ".parquet" else unfinished.open("w", encoding="utf-8", newline="")
    writer = kinds[path.suffix](file or unfinished)
    try:
        yield writer
        complete = True
    finally:
        (writer.writer.close() if writer.writer else None) if file is None else file.close()
        if complete and unfinished.exists():
            unfinished.replace(path)
        else:
            unfinished.unlink(missing_ok=True)


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
    names, problem = list(network.config.id2label.values()), problem_of(network.config, model)
    return _score(network, model, tasks.load_rows(Path(task), text, label, names, problem), console)


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
    """The metrics of a model on the test set of a task."""
    names = list(network.config.id2label.values())
    if names != task.label_names:
        raise UserError(f"model={str(model)!r} has the labels {names}, task {task.name!r} has {task.label_names}")
    tokenizer, tokens, logits = load_tokenizer(model), default_tokens(), []
    encoder = TextEncoder(tokenizer, tokenizer.model_max_length)
    count = LongTexts(encoder.max_length)
    with progress(console) as bars:
        bar = bars.add_task(task.name, total=len(task.test))
        for block in encoder.read(task.test):
            count.add(block)
            logits.append(logits_of(network, block, encoder, tokenizer.pad_token_id, tokens))
            bars.advance(bar, len(block.texts))
    if note := str(count):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    targets = task.targets([own.label for own in task.test])
    metrics = {**scores_of(task.problem, np.concatenate(logits), targets), **f1_of(task.problem, names)}
    return {**metrics, "rows": len(task.test), "reported_on": task.reported_on, "note": task.note}


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
