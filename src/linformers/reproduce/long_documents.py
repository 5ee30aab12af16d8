"""Long documents: IMDB in bytes at n = 4096, the text task of the Long Range Arena (Tay et al., 2021), at its size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from ..benchmark.efficiency import FUSED
from ..config import LinformerConfig
from ..encoder import LinformerModel
from ..markdown import table
from ..training.finetune import Settings
from ..training.tokenizer import train_tokenizer
from .jobs import Job
from .matrix import Place, finetuning, flags, known_task, to_fill

GROUP = "long"
N, TINY_N = 4096, 256
SETTINGS = Settings(seeds=1, epochs=12, batch_size=32, learning_rate=5e-4)
TINY = Settings(seeds=1, epochs=1, batch_size=128, learning_rate=1e-3)

MODELS: dict[str, dict[str, Any]] = {
    "Transformer twin": {"projection": "identity"},
    "Linformer k=256": {"projected_length": 256},
    "Linformer k=128 w=32": {"projected_length": 128, "local_window": 32},
}
# What each is called by `linformers bench`.
TIMED = {"Transformer twin": FUSED} | {name: name for name in MODELS if name.startswith("Linformer")}
SPEED = f"{GROUP}/speed"
# Accuracies of Tay et al. (2021), table 1, column Text.
PUBLISHED = {"Transformer twin": 64.27, "Linformer k=256": 53.94}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte: a vocabulary with no room for more."""
    return train_tokenizer([], 256 + 5)


def config(fields: Mapping[str, Any], small: bool) -> LinformerConfig:
    """Four layers of 256 channels with 4 heads and a feed-forward of 1,024, as in the arena."""
    scale = N // TINY_N if small else 1
    sizes = {name: fields[name] // scale for name in ("projected_length", "local_window") if name in fields}
    return LinformerConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=32 if small else 256,
        num_hidden_layers=2 if small else 4,
        num_attention_heads=2 if small else 4,
        intermediate_size=64 if small else 1024,
        max_position_embeddings=TINY_N if small else N,
        norm_first=True,
        **{**fields, **sizes},
    )


def jobs(place: Place, console: Console) -> list[Job]:
    """Training each model from nothing, and the time and memory of a training step, which wants the GPU for itself."""
    found, imdb = [speed(place)], known_task(place, "imdb")
    for name, fields in MODELS.items():
        start, own = place.runs / f"{run_name(name)}-start", config(fields, place.small)
        if not (start / "config.json").exists():
            save_untrained(start, own)
        settings = TINY if place.small else SETTINGS
        identity = {field: value for field, value in own.to_diff_dict().items() if field != "transformers_version"}
        found.append(finetuning(place, run_name(name), start, imdb, settings, identity))
    return found


def speed(place: Place) -> Job:
    """A training step of each model at the batch size of the runs, on documents that fill n."""
    out = place.runs / SPEED
    options: dict[str, Any] = {"lengths": N, "projected": "128,256", "windows": 32, "tokens": SETTINGS.batch_size * N}
    options |= {"layers": 4, "hidden": 256}
    if place.small:
        options |= {"lengths": 512, "tokens": 512, "layers": 1, "hidden": 64}
    arguments = ["bench", *flags(options), "--task", "training", "--models", "twin,linformer", "--out", str(out)]
    return Job(
        name=SPEED,
        arguments=[*arguments, *([] if place.small else ["--compile"])],
        out=out,
        decides=options,
        collect=lambda: {"cells": json.loads((out / "efficiency.json").read_text())["lengths"]},
        steps=(1, lambda: int((out / "efficiency.json").exists())),
        alone=True,
    )


def run_name(model: str) -> str:
    return f"{GROUP}/{model.replace(' ', '-').replace('=', '')}"


def save_untrained(folder: Path, model: LinformerConfig) -> None:
    """Initial weights and the tokenizer of bytes, as `finetune` takes them."""
    torch.manual_seed(0)
    LinformerModel(model).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = model.max_position_embeddings
    tokenizer.save_pretrained(folder)


def collect(place: Place) -> dict[str, Any]:
    """Of each model the accuracy, and the seconds and the memory of a training step; `None` where it is missing."""
    results, runs = place.store.results([SPEED, *map(run_name, MODELS)])
    cells = {cell["model"]: cell for cell in results.get(SPEED, {}).get("cells", ())}
    rows = {}
    for name in MODELS:
        cell = cells.get(f"{TIMED[name]}, compiled") or cells.get(TIMED[name]) or {}
        accuracy = results.get(run_name(name), {}).get("accuracy")
        rows[name] = {"accuracy": accuracy, "seconds": cell.get("seconds"), "peak_bytes": cell.get("peak_bytes")}
    return {"runs": runs, "rows": rows}


def page(record: Mapping[str, Any]) -> list[str]:
    """Our accuracies beside the published ones, and what training takes."""
    rows, missing = [], []
    for name, own in record["rows"].items():
        if own["accuracy"] is None:
            missing.append(run_name(name).rpartition("/")[2])
        accuracy = "missing" if own["accuracy"] is None else f"{100 * own['accuracy'][0]:.1f}"
        seconds, memory = own["seconds"], own["peak_bytes"]
        time = "missing" if seconds is None else f"{1000 * seconds:.1f}"
        rows.append((name, accuracy, str(PUBLISHED.get(name, "–")), time, f"{memory / 2**20:,.0f}" if memory else "–"))
    if any(own["seconds"] is None for own in record["rows"].values()):
        missing.append(SPEED.rpartition("/")[2])
    return [
        *table(("model", "accuracy", "published", "ms of a training step", "its MiB"), rows),
        f"Published: Tay et al. (2021), whose best efficient model has 65.9. A step is forward and backward of "
        f"{SETTINGS.batch_size} documents of {N:,} bytes, compiled, its memory what it takes beside the weights.",
        "",
        *to_fill("long", missing),
        "",
    ]
