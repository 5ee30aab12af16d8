"""Long documents: IMDB in bytes at n = 4096, the text task of the Long Range Arena (Tay et al., 2021), at its size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from ..config import LinformerConfig
from ..encoder import LinformerModel
from ..markdown import table
from ..training.finetune import Settings
from ..training.tokenizer import train_tokenizer
from .jobs import Job
from .matrix import Place, finetuning, known_task, to_fill

GROUP = "long"
N, TINY_N = 4096, 256
SETTINGS = Settings(seeds=1, epochs=12, batch_size=32, learning_rate=5e-4)
TINY = Settings(seeds=1, epochs=1, batch_size=128, learning_rate=1e-3)

MODELS: dict[str, dict[str, Any]] = {
    "Transformer twin": {"projection": "identity"},
    "Linformer k=256": {"projected_length": 256},
    "Linformer k=128 w=32": {"projected_length": 128, "local_window": 32},
}
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
    """Training each model from nothing."""
    found, imdb = [], known_task(place, "imdb")
    for name, fields in MODELS.items():
        start, own = place.runs / f"{run_name(name)}-start", config(fields, place.small)
        if not (start / "config.json").exists():
            save_untrained(start, own)
        settings = TINY if place.small else SETTINGS
        found.append(finetuning(place, run_name(name), start, imdb, settings, own.to_diff_dict()))
    return found


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
    """Of each model the accuracy, the rows a second in training and the most memory; `None` where it is missing."""
    results, runs = place.store.results(map(run_name, MODELS))
    kept = ("accuracy", "rows_per_second", "peak_bytes")
    rows = {name: results.get(run_name(name)) for name in MODELS}
    return {"runs": runs, "rows": {name: own and {what: own[what] for what in kept} for name, own in rows.items()}}


def page(record: Mapping[str, Any]) -> list[str]:
    """Our accuracies beside the published ones, and what training took."""
    rows = []
    for name, own in record["rows"].items():
        measured = ("missing", "", "")
        if own is not None:
            memory = f"{own['peak_bytes'] / 2**30:.1f}" if own["peak_bytes"] else "–"
            measured = (f"{100 * own['accuracy'][0]:.1f}", f"{own['rows_per_second']:,.0f}", memory)
        rows.append((name, measured[0], str(PUBLISHED.get(name, "–")), *measured[1:]))
    header = ("model", "accuracy", "published", "documents a second in training", "GiB at most")
    missing = [run_name(name).rpartition("/")[2] for name, own in record["rows"].items() if own is None]
    published = "Published: Tay et al. (2021), whose best efficient model has 65.9."
    return [*table(header, rows), published, "", *to_fill("long", missing), ""]
