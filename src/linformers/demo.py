"""`linformers demo`: search Python's documentation, and time the model beside its twin; or pretrain both."""

from __future__ import annotations

import ast
import itertools
import json
import math
import shlex
import shutil
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from . import LinformerConfig, plots
from .benchmark import efficiency, measure
from .checks import make_folder
from .files import write_file
from .progress import steps as progress_of
from .shipped import ENGLISH
from .training.corpus import Corpus
from .training.embed import embed_files
from .training.prepare import prepare
from .training.pretrain import pretrain
from .training.search import search
from .training.trainer import read_metrics

QUERIES = (
    "How do I copy a folder with everything in it?",
    "How can one thread wait until another has finished?",
    "Which characters may the name of a variable contain?",
)
LINFORMER, TWIN = "Linformer", "Transformer twin"


def run(
    out: Path,
    console: Console,
    *,
    model: Path = ENGLISH,
    characters: tuple[int, int] = (2_000, 20_000),  # of a document, at least and at most
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192),  # tokens of the documents to time
) -> None:
    """Embed Python's documentation, search it, and time the model beside its twin with full attention."""
    make_folder("out", out)
    console.print("[bold]1. Embed Python's documentation[/bold]: manual and docstrings of modules")
    documents, vectors = out / "documents.jsonl", out / "vectors.parquet"
    write_file(documents, "".join(json.dumps(row) + "\n" for row in python_documents(*characters)))
    vectors.unlink(missing_ok=True)
    show(console, embed := ["embed", str(documents), "--out", str(vectors)])
    embed_files([documents], vectors, model=model, console=console, command=shlex.join(["linformers", *embed]))

    console.print("\n[bold]2. Search[/bold]: the best document and its best passage")
    for query in QUERIES:
        show(console, ["search", str(vectors), query, "--best", "1"])
        search(vectors, query=query, model=model, best=1, console=console)

    console.print("\n[bold]3. Time[/bold] to read a document, beside the twin with full attention")
    seconds = time_of_reading(LinformerConfig.from_pretrained(model), lengths, console)
    console.print(time_table(seconds))
    (longest, own), (_, twin) = (seconds[name][-1] for name in (LINFORMER, TWIN))
    line = f"{longest:,} tokens take {own:.2f} s; with full attention, {twin:.2f} s, {twin / own:.1f} times as long"
    console.print(line, highlight=False)
    if picture := plots.times(seconds, out / "time.png"):
        console.print(f"The picture is {picture}", markup=False, highlight=False, soft_wrap=True)

    console.print("\nWhat to try next, on your own files:")
    suggest(
        console,
        "linformers embed FOLDER --out vectors.parquet",
        "linformers search vectors.parquet 'what to look for'",
        "linformers finetune reviews.csv --text review --label stars --out runs/reviews",
    )


def python_documents(least: int, most: int) -> Iterator[dict[str, str]]:
    """The documents of every Python installation that have so many characters, each with an id."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = {f"manual: {name}": text for name, text in topics.items()}
    for path in standard_library():
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        texts[f"module: {name}"] = documentation(path)
    return ({"id": id, "text": text} for id, text in texts.items() if least <= len(text) <= most)


def documentation(path: Path) -> str:
    """The docstrings of a module, each below the name of what it describes."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    found = ((getattr(node, "name", path.stem), ast.get_docstring(node)) for node in nodes)
    return "\n\n".join(f"{name}: {text}" for name, text in found if text)


def time_of_reading(own: LinformerConfig, lengths: Sequence[int], console: Console) -> dict[str, list[Any]]:
    """Points (n, seconds) of a model of these sizes and of its twin with full attention; the weights are random."""
    fields = own.to_dict() | {"max_position_embeddings": max(own.max_position_embeddings, *lengths)}
    full = fields | {"projection": "identity", "local_window": 0}
    models = {name: efficiency.build(LinformerConfig(**own)) for name, own in {LINFORMER: fields, TWIN: full}.items()}
    points: dict[str, list[Any]] = {name: [] for name in models}
    with progress_of(console, len(lengths)) as begin:
        for n in lengths:
            begin(f"{n:,} tokens")
            runs = {name: efficiency.random_run(model, n, "inference", False, 1) for name, model in models.items()}
            for warm_up in runs.values():
                warm_up()
            for name, seconds in measure.interleaved(runs).items():
                points[name].append((n, seconds))
    return points


def time_table(seconds: dict[str, list[Any]]) -> Table:
    table = Table("tokens", LINFORMER, TWIN, "twin / Linformer")
    table.caption = "both of the model's sizes, with random weights"
    for (n, own), (_, twin) in zip(seconds[LINFORMER], seconds[TWIN], strict=True):
        table.add_row(f"{n:,}", f"{own:.3f} s", f"{twin:.3f} s", f"{twin / own:.2f}")
    return table


def show(console: Console, arguments: Sequence[str]) -> None:
    """The command that does what follows."""
    line = f"$ {shlex.join(['linformers', *arguments])}"
    console.print(line, style="cyan", markup=False, highlight=False, soft_wrap=True)


def suggest(console: Console, *commands: str) -> None:
    # `make demo` runs in a virtual environment that the shell has not activated.
    activate = [] if shutil.which("linformers") else [f". {Path(sys.executable).parent / 'activate'}"]
    for command in (*activate, *commands):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


# Pretraining, side by side: `linformers demo --pretrain`.

SIZE: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
LENGTHS, TOKENS, PROJECTED, WINDOW = (256, 512, 1024, 2048, 4096), 8192, 128, 8
TRAIN_LENGTH, BATCH, VOCABULARY = 512, 4, 2048
SENTENCE = "They were married and had three <mask>."  # for the bundled English model
# The models that are trained: each is the Linformer with these changes to its recipe.
MODELS = {
    "Transformer": ["model.projection=identity"],
    "Linformer": [],
    "Linformer with a window": [f"model.local_window={WINDOW}"],
}


def run_pretraining(steps: int, out: Path, console: Console) -> int:
    """Pretrain the models, without repeating finished runs; returns 0, or the exit code if a signal stopped one."""
    make_folder("out", out)
    console.print(f"[bold]1. Cost of a pass[/bold] of {TOKENS:,} tokens, as sequences get longer")
    models = ("unfused", "twin", "linformer")
    measured = efficiency.compare(LENGTHS, [PROJECTED], tokens=TOKENS, console=console, models=models, **SIZE)
    cells = list(itertools.chain.from_iterable(measured))
    for table in efficiency.tables(cells, "inference"):
        console.print(table)

    console.print("\n[bold]2. Pretraining on the sources of Python's standard library[/bold]")
    corpus, recipe, records = out / "corpus", write_recipe(steps, out), {}
    if not (corpus / "manifest.json").exists():
        files = [str(path) for path in standard_library()]
        prepare(files, corpus, vocab_size=VOCABULARY, validation_share=0.03, console=console)
    for name, changes in MODELS.items():
        folder = out / f"{name.lower().replace(' ', '-')}-{steps}"
        if code := pretrain(recipe, [*changes, f"out={folder}"], console=console, command="linformers demo --pretrain"):
            return code
        records[name] = read_metrics(folder)
    baseline = frequency_perplexity(Corpus.open(corpus))
    console.print(training_table(records, baseline))
    if behind := [name for name, log in records.items() if log[-1]["perplexity"] > baseline]:
        console.print(f"{steps} steps are too few for {', '.join(behind)} to learn from context; try more with --steps")

    axis = f"sequence length n ({TOKENS:,} tokens per pass)"
    milliseconds, mebibytes = (efficiency.curves(cells, value) for value in ("milliseconds", "mebibytes"))
    plots.efficiency(milliseconds, mebibytes, out / "cost.png", axis)
    plots.training(records, out / "training.png")
    console.print(f"\nResults and figures are in {out}. What to try next:", highlight=False)
    suggest(
        console,
        f"echo '{SENTENCE}' | linformers predict",
        f"linformers demo --pretrain --steps {10 * steps} --out {out}",
        "linformers prepare FOLDER_OF_TEXT --out data/mine",
        "linformers pretrain recipes/cpu.yaml data=data/mine",
    )
    return 0


def training_table(records: dict[str, list[dict[str, Any]]], baseline: float) -> Table:
    table = Table("", "perplexity", "tokens/s")
    table.title = f"n={TRAIN_LENGTH}, k={PROJECTED}; the window holds exact keys at most {WINDOW} tokens away"
    for name, log in records.items():
        speed = statistics.median(record["tokens_per_second"] for record in log if "tokens_per_second" in record)
        table.add_row(name, f"{log[-1]['perplexity']:.1f}", f"{speed:,.0f}")
    table.add_row("without context", f"{baseline:.1f}", "")
    return table


def write_recipe(steps: int, out: Path) -> Path:
    model = {**SIZE, "max_position_embeddings": TRAIN_LENGTH, "projected_length": PROJECTED, "local_window": 0}
    model |= {"norm_first": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    recipe = {"data": str(out / "corpus"), "model": model, "steps": steps, "batch_size": BATCH, "learning_rate": 0.003}
    recipe |= {"warmup_steps": steps // 10, "workers": 0, "eval_every": max(1, steps // 5)}
    recipe |= {"save_every": max(1, steps // 5), "log_every": max(1, steps // 30), "eval_rows": 64, "keep": 1}
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def frequency_perplexity(corpus: Corpus) -> float:
    """The perplexity of predicting each validation token from its frequency in the training set alone."""
    streams = (corpus.tokens("train"), corpus.tokens("validation"))
    train, validation = (np.bincount(tokens.read(0, len(tokens)), minlength=corpus.vocab_size) for tokens in streams)
    logs = np.log((train + 1) / (train + 1).sum())
    return math.exp(-(validation * logs).sum() / validation.sum())


def standard_library() -> list[Path]:
    """The Python sources of every Python installation, without tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    files = (path for path in folder.rglob("*.py") if not skipped & set(path.relative_to(folder).parts))
    return sorted(path for path in files if path.stat().st_size)
