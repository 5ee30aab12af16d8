"""A Linformer beside its Transformer twin, without a download: cost over growing n, then training on Python itself."""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from . import plots, progress
from .benchmark.efficiency import FUSED, Cell, compare, curves, mebibytes, milliseconds
from .benchmark.measure import best_device, peak_memory
from .checks import check_size, make_folder
from .heads import LinformerForMaskedLM
from .training import pretrain
from .training.corpus import Corpus
from .training.prepare import prepare
from .training.recipe import Recipe
from .training.trainer import read_metrics

SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
LENGTHS, TOKENS, PROJECTED = (256, 512, 1024, 2048, 4096), 8192, 128
TRAIN_LENGTH, BATCH, VOCABULARY = 512, 4, 2048
SENTENCE = "They were married and had three <mask>."  # for the English model that comes along
WINDOW = "Linformer with a window"
MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {"projection": "identity"},
    "Linformer": {},
    WINDOW: {"local_window": 8},
}


@dataclass(frozen=True)
class Result:
    """What one model made of the text."""

    records: list[dict[str, Any]]
    perplexity: float
    tokens_per_second: float
    peak_bytes: int


def run(steps: int, out: Path, console: Console) -> int:
    """Run the demo and save its figure to `out`; what was finished before is not done again.

    Returns:
        The exit code: 0, or that of a training that was stopped by a signal.
    """
    check_size("steps", steps)
    make_folder("out", out)
    console.print("[bold]1. A pass over growing sequences[/bold], the number of tokens the same")
    cells = measure_lengths(console)
    console.print(length_table(cells))

    console.print("\n[bold]2. Pretraining on the sources of Python's standard library[/bold]")
    if not (out / "corpus" / "manifest.json").exists():
        files = [str(path) for path in standard_library()]
        prepare(files, out / "corpus", vocab_size=VOCABULARY, validation_share=0.03, console=console)
    corpus, results = Corpus.open(out / "corpus"), {}
    for name in MODELS:
        own = recipe(name, steps, out)
        code = pretrain.run(own, console, "linformers demo")
        if code:
            return code
        results[name] = result_of(own, corpus)
    without_context = frequency_perplexity(corpus)
    console.print(training_table(results, without_context))
    if behind := [name for name, result in results.items() if result.perplexity > without_context]:
        console.print(
            f"{steps} steps are too few for {', '.join(behind)} to learn from context; try more, with --steps"
        )

    figure = out / "demo.png"
    draw(cells, results, figure)
    console.print(f"\nThe figure: [bold]{figure}[/bold]. What to try next:")
    # `make demo` runs in an environment that the shell knows nothing of.
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


def draw(cells: list[Cell], results: dict[str, Result], path: Path) -> None:
    """The figure, in which the models that are trained have the names of those that are measured."""
    linformer = f"Linformer k={PROJECTED}"
    names = {"Transformer": FUSED, "Linformer": linformer}
    names[WINDOW] = f"{linformer}, local window of {MODELS[WINDOW]['local_window']}"
    losses = {names[m]: [(r["step"], r["loss"]) for r in own.records if "loss" in r] for m, own in results.items()}
    layers, channels, heads = (SIZE[size] for size in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    plots.demo(
        curves(cells, milliseconds),
        curves(cells, mebibytes),
        losses,
        path,
        tokens=TOKENS,
        length=TRAIN_LENGTH,
        title=f"All models have {layers} layers of {channels} channels and {heads} heads",
    )


def recipe(name: str, steps: int, out: Path) -> Recipe:
    """Models differ in the projection, and in whether there is a local window, alone."""
    return Recipe(
        data=str(out / "corpus"),
        out=str(out / f"{name.lower().replace(' ', '-')}-{steps}"),
        model={
            **SIZE,
            "max_position_embeddings": TRAIN_LENGTH,
            "projected_length": PROJECTED,
            "norm_first": True,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **MODELS[name],
        },
        steps=steps,
        batch_size=BATCH,
        learning_rate=3e-3,
        warmup_steps=steps // 10,
        eval_every=max(1, steps // 5),
        eval_rows=64,
        save_every=max(1, steps // 5),
        keep=1,
        log_every=max(1, steps // 30),
        workers=0,
    )


def measure_lengths(console: Console) -> list[Cell]:
    with progress.steps(console, 3 * len(LENGTHS)) as begin:
        options: dict[str, Any] = {"tokens": TOKENS, "device": best_device(), "on_model": begin}
        options["models"] = ("unfused", "twin", "linformer")
        return [cell for measured in compare(LENGTHS, [PROJECTED], **options, **SIZE) for cell in measured]


def length_table(cells: list[Cell]) -> Table:
    """Time and memory at each n; each model's own measurements follow one another in `cells`."""
    table = Table("n", "unfused", "fused", "Linformer", "faster", "smaller")
    table.title = "Transformer, unfused and fused, and Linformer: ms · MiB"
    table.caption = f"k={PROJECTED}; faster than the fused one, smaller than the unfused"
    for unfused, fused, linformer in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        costs = (f"{milliseconds(c):.0f} · {mebibytes(c):.0f}" for c in (unfused, fused, linformer))
        faster, smaller = milliseconds(fused) / milliseconds(linformer), mebibytes(unfused) / mebibytes(linformer)
        table.add_row(str(fused.n), *costs, f"{faster:.1f}×", f"{smaller:.1f}×")
    return table


def result_of(recipe: Recipe, corpus: Corpus) -> Result:
    """The numbers of a finished run, and the memory that a step of it takes."""
    out = Path(recipe.out)
    records = read_metrics(out)
    model = LinformerForMaskedLM.from_pretrained(out / "model").to(best_device()).train()
    rows = pretrain.training_rows(recipe, corpus, corpus.tokenizer())
    batch = {name: tensor.to(model.device) for name, tensor in rows.__getitems__(range(BATCH)).items()}
    speed = statistics.median(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    peak = peak_memory(lambda: model(**batch).loss.backward(), model.device)
    return Result(records, records[-1]["perplexity"], speed, peak)


def training_table(results: dict[str, Result], without_context: float) -> Table:
    table = Table("", "perplexity", "tokens/s", "memory of a step")
    w = MODELS[WINDOW]["local_window"]
    table.title = f"n={TRAIN_LENGTH}, k={PROJECTED}; in the window, exact keys at most {w} tokens away"
    for name, result in results.items():
        memory = f"{result.peak_bytes / 2**20:.0f} MiB"
        table.add_row(name, f"{result.perplexity:.1f}", f"{result.tokens_per_second:,.0f}", memory)
    table.add_row("without context", f"{without_context:.1f}", "", "")
    return table


def frequency_perplexity(corpus: Corpus) -> float:
    """The perplexity of guessing each word of the validation set by how often it stands in the training set."""
    train, validation = (
        np.bincount(stream.read(0, len(stream)), minlength=corpus.vocab_size)
        for stream in (corpus.tokens("train"), corpus.tokens("validation"))
    )
    logs = np.log((train + 1) / (train + 1).sum())
    return math.exp(-(validation * logs).sum() / validation.sum())


def standard_library() -> list[Path]:
    """The sources that every Python installation carries, tests aside."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    files = (path for path in folder.rglob("*.py") if not left_out & set(path.relative_to(folder).parts))
    return sorted(path for path in files if path.stat().st_size)
