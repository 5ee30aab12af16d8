"""`linformers demo`: Linformers beside a Transformer, first their cost over n, then pretraining on Python's sources."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from . import LinformerForMaskedLM, plots
from .benchmark.efficiency import FUSED, Cell, compare, curves, mebibytes, milliseconds
from .benchmark.measure import best_device, peak_memory
from .checks import make_folder
from .training.corpus import Corpus
from .training.prepare import prepare
from .training.pretrain import pretrain

SIZE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
LENGTHS, TOKENS, PROJECTED, WINDOW = (256, 512, 1024, 2048, 4096), 8192, 128, 8
TRAIN_LENGTH, BATCH, VOCABULARY = 512, 4, 2048
SENTENCE = "They were married and had three <mask>."  # for the bundled English model
# The models that are trained: each is the Linformer with these changes to its recipe.
MODELS = {
    "Transformer": ["model.projection=identity"],
    "Linformer": [],
    "Linformer with a window": [f"model.local_window={WINDOW}"],
}


class Result(NamedTuple):
    """A trained model: its training records, final perplexity, speed, and the memory of a training step."""

    records: list[dict[str, Any]]
    perplexity: float
    tokens_per_second: float
    peak_bytes: int


def run(steps: int, out: Path, console: Console) -> int:
    """Run the demo, without repeating finished runs; return 0, or the exit code of a run that a signal stopped."""
    make_folder("out", out)
    console.print(f"[bold]1. Cost of a pass[/bold] of {TOKENS:,} tokens, as sequences get longer")
    options: dict[str, Any] = {"models": ("unfused", "twin", "linformer"), **SIZE}
    measured = compare(LENGTHS, [PROJECTED], tokens=TOKENS, console=console, **options)
    cells = [cell for own in measured for cell in own]
    console.print(length_table(cells))

    console.print("\n[bold]2. Pretraining on the sources of Python's standard library[/bold]")
    corpus, recipe = out / "corpus", write_recipe(steps, out)
    if not (corpus / "manifest.json").exists():
        files = [str(path) for path in standard_library()]
        prepare(files, corpus, vocab_size=VOCABULARY, validation_share=0.03, console=console)
    results = {}
    for name, changes in MODELS.items():
        folder = out / f"{name.lower().replace(' ', '-')}-{steps}"
        if code := pretrain(recipe, [*changes, f"out={folder}"], console=console, command="linformers demo"):
            return code
        results[name] = read_result(folder)
    baseline = frequency_perplexity(Corpus.open(corpus))
    console.print(training_table(results, baseline))
    if behind := [name for name, result in results.items() if result.perplexity > baseline]:
        console.print(f"{steps} steps are too few for {', '.join(behind)} to learn from context; try more with --steps")

    names = (FUSED, f"Linformer k={PROJECTED}", f"Linformer k={PROJECTED} w={WINDOW}")  # those of the measured models
    points = ([(own["step"], own["loss"]) for own in result.records if "loss" in own] for result in results.values())
    losses = dict(zip(names, points, strict=True))
    axis = f"sequence length n ({TOKENS:,} tokens per pass)"
    plots.efficiency(curves(cells, milliseconds), curves(cells, mebibytes), out / "demo.png", axis, losses)
    console.print(f"\nResults and the figure demo.png are in {out}. What to try next:", highlight=False)
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


def length_table(cells: list[Cell]) -> Table:
    """Time and memory of the three models at each n."""
    table = Table("n", "unfused", "fused", "Linformer", "faster", "smaller")
    table.title = "Transformer, unfused and fused, and Linformer: ms · MiB"
    table.caption = f"k={PROJECTED}; faster than the fused one, smaller than the unfused one"
    for unfused, fused, linformer in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        costs = (f"{milliseconds(c):.0f} · {mebibytes(c):.0f}" for c in (unfused, fused, linformer))
        faster, smaller = milliseconds(fused) / milliseconds(linformer), mebibytes(unfused) / mebibytes(linformer)
        table.add_row(str(fused.n), *costs, f"{faster:.1f}×", f"{smaller:.1f}×")
    return table


def training_table(results: dict[str, Result], baseline: float) -> Table:
    table = Table("", "perplexity", "tokens/s", "memory of a step")
    table.title = f"n={TRAIN_LENGTH}, k={PROJECTED}; the window holds exact keys at most {WINDOW} tokens away"
    for name, (_, perplexity, speed, peak_bytes) in results.items():
        table.add_row(name, f"{perplexity:.1f}", f"{speed:,.0f}", f"{peak_bytes / 2**20:.0f} MiB")
    table.add_row("without context", f"{baseline:.1f}", "", "")
    return table


def write_recipe(steps: int, out: Path) -> Path:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    lengths = {"max_position_embeddings": TRAIN_LENGTH, "projected_length": PROJECTED, "local_window": 0}
    training = {"batch_size": BATCH, "learning_rate": 0.003, "warmup_steps": steps // 10, "workers": 0}
    often = {"eval_every": max(1, steps // 5), "save_every": max(1, steps // 5), "log_every": max(1, steps // 30)}
    recipe = {"data": str(out / "corpus"), "model": {**SIZE, **lengths, "norm_first": True, **dropout}, "steps": steps}
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, **training, **often, "eval_rows": 64, "keep": 1}, sort_keys=False))
    return path


def read_result(run: Path) -> Result:
    """The numbers of a finished run, and the memory that a training step takes."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speed = statistics.median(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    model = LinformerForMaskedLM.from_pretrained(run / "model").to(best_device()).train()
    ids = torch.randint(5, model.config.vocab_size, (BATCH, TRAIN_LENGTH), device=model.device)
    labels = torch.where(torch.rand(ids.shape, device=model.device) < 0.15, ids, -100)
    peak = peak_memory(lambda: model(input_ids=ids, labels=labels).loss.backward(), model.device)
    return Result(records, records[-1]["perplexity"], speed, peak)


def frequency_perplexity(corpus: Corpus) -> float:
    """The perplexity of predicting each validation token from its frequency in the training set alone."""
    streams = (corpus.tokens("train"), corpus.tokens("validation"))
    train, validation = (np.bincount(own.read(0, len(own)), minlength=corpus.vocab_size) for own in streams)
    logs = np.log((train + 1) / (train + 1).sum())
    return math.exp(-(validation * logs).sum() / validation.sum())


def standard_library() -> list[Path]:
    """The Python sources of every Python installation, without tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    files = (path for path in folder.rglob("*.py") if not skipped & set(path.relative_to(folder).parts))
    return sorted(path for path in files if path.stat().st_size)
