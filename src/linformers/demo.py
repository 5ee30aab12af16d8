"""`linformers demo`: Linformers beside a Transformer, first their cost over n, then pretraining on Python's sources."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from . import plots
from .benchmark.efficiency import compare, curves, tables
from .checks import make_folder
from .training.corpus import Corpus
from .training.prepare import prepare
from .training.pretrain import pretrain
from .training.trainer import read_metrics

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


def run(steps: int, out: Path, console: Console) -> int:
    """Run the demo, without repeating finished runs; return 0, or the exit code of a run that a signal stopped."""
    make_folder("out", out)
    console.print(f"[bold]1. Cost of a pass[/bold] of {TOKENS:,} tokens, as sequences get longer")
    models = ("unfused", "twin", "linformer")
    measured = compare(LENGTHS, [PROJECTED], tokens=TOKENS, console=console, models=models, **SIZE)
    cells = list(itertools.chain.from_iterable(measured))
    for table in tables(cells, "inference"):
        console.print(table)

    console.print("\n[bold]2. Pretraining on the sources of Python's standard library[/bold]")
    corpus, recipe, records = out / "corpus", write_recipe(steps, out), {}
    if not (corpus / "manifest.json").exists():
        files = [str(path) for path in standard_library()]
        prepare(files, corpus, vocab_size=VOCABULARY, validation_share=0.03, console=console)
    for name, changes in MODELS.items():
        folder = out / f"{name.lower().replace(' ', '-')}-{steps}"
        if code := pretrain(recipe, [*changes, f"out={folder}"], console=console, command="linformers demo"):
            return code
        records[name] = read_metrics(folder)
    baseline = frequency_perplexity(Corpus.open(corpus))
    console.print(training_table(records, baseline))
    if behind := [name for name, log in records.items() if log[-1]["perplexity"] > baseline]:
        console.print(f"{steps} steps are too few for {', '.join(behind)} to learn from context; try more with --steps")

    axis = f"sequence length n ({TOKENS:,} tokens per pass)"
    plots.efficiency(curves(cells, "milliseconds"), curves(cells, "mebibytes"), out / "cost.png", axis)
    plots.training(records, out / "training.png")
    console.print(f"\nResults and figures are in {out}. What to try next:", highlight=False)
    # `make demo` runs in a virtual environment that the shell has not activated.
    activate = [] if shutil.which("linformers") else [f". {Path(sys.executable).parent / 'activate'}"]
    for command in (
        *activate,
        f"echo '{SENTENCE}' | linformers predict",
        f"linformers demo --steps {10 * steps} --out {out}",
        "linformers prepare FOLDER_OF_TEXT --out data/mine",
        "linformers pretrain recipes/cpu.yaml data=data/mine",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
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
