"""Figure 1: singular values of P in pretrained encoders, beside what the paper says of RoBERTa's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..analysis import figure1
from ..analysis.spectrum import rank_correlation
from ..markdown import table
from .figure3 import GROUP
from .jobs import origin
from .matrix import Place

# Encoders by the name of their row: a folder under models/ of the data where there is one, otherwise the hub's name.
# What the paper shows is RoBERTa's.
MODELS = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
}
# Our own: what a run of Table 2 leaves behind, before and after it was fine-tuned on IMDB.
BEFORE, AFTER = "twin-pretrained", "twin-finetuned"
OURS = {BEFORE: "n512-twin", AFTER: "n512-twin-imdb"}
TEXTS = {"wikitext": "wikitext103_valtest", "imdb": "imdb/test.parquet"}
SIZES: dict[str, Any] = {"length": 512, "sentences": 1000, "at": 128}
TINY: dict[str, Any] = {"length": 64, "sentences": 4, "at": 16}


def measure(place: Place, console: Console) -> dict[str, Any]:
    """Measure what has no result yet; of an encoder that cannot be had is said why it is left out."""
    unreachable = False
    for row, (model, text) in rows().items():
        out = place.results / "spectrum" / row
        if (out / "spectrum.json").exists():
            continue
        local = place.runs / GROUP / OURS[model] / "model" if model in OURS else place.folder("models", model)
        if not local.is_dir() and (model in OURS or unreachable):  # the hub would be asked many times for each
            reason = "train it first" if model in OURS else "the hub gave nothing before"
            console.print(f"{row} is left out: {reason}; {command(row)}", style="yellow", markup=False)
            continue
        name = str(local) if local.is_dir() else MODELS[model]
        settings = figure1.Settings(name, [str(place.folder(TEXTS[text]))], **TINY if place.small else SIZES)
        made = place.runs / "spectrum" / row
        try:
            figure1.run(settings, out=made, command=command(row), console=console, known_as=place.store.known_as)
        except (ValueError, OSError) as error:
            console.print(f"{row} is left out: {error}", style="yellow", markup=False)
            unreachable = unreachable or not local.is_dir()
            continue
        out.mkdir(parents=True, exist_ok=True)
        for path in made.glob("spectrum.*"):
            shutil.copy(path, out)
    return collect(place)


def rows() -> dict[str, tuple[str, str]]:
    return {f"{model}-{text}": (model, text) for model in (*MODELS, *OURS) for text in TEXTS}


def command(row: str) -> str:
    """What fills a row by hand."""
    model, text = rows()[row]
    if model in OURS:
        return "linformers reproduce table2 figure1 --data DIR --only n512-twin --only n512-twin-imdb"
    return f"linformers spectrum {MODELS[model]} --text DIR/{TEXTS[text]} --out results/spectrum/{row}"


def collect(place: Place) -> dict[str, Any]:
    """Of each spectrum that is there, the shares of its first values; `None` for rows that are missing."""
    known = {row: place.results / "spectrum" / row for row in rows()}
    found = {path.parent.name: path.parent for path in (place.results / "spectrum").glob("*/spectrum.json")}
    runs = {row: origin(json.loads((folder / "spectrum.json").read_text())) for row, folder in found.items()}
    return {"runs": runs, "rows": {row: summary(folder) for row, folder in (known | found).items()}}


def summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "spectrum.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    shares = np.array(record["cumulative_at"])  # (layers, heads)
    return {
        "n": record["n"],
        "at": record["at"],
        "sentences": record["sentences"],
        "mean": float(shares.mean()),
        "least": float(shares.min()),
        "most": float(shares.max()),
        "by_layer": shares.mean(1).tolist(),
        "correlation": rank_correlation(range(len(shares)), shares.mean(1).tolist()),
    }


def page(record: Mapping[str, Any]) -> list[str]:
    """A row for each encoder and text, and the paper's two claims."""
    found = {row: own for row, own in record["rows"].items() if own is not None}
    cells = [
        (
            f"[{row}](../results/spectrum/{row}/spectrum.md)",
            str(own["sentences"]),
            *(f"{own[name]:.3f}" for name in ("mean", "least", "most")),
            f"{own['correlation']:.2f}",
        )
        for row, own in found.items()
    ]
    lines = [
        "The share of the sum of P's singular values that the first 128 of 512 hold (a flat spectrum: 0.25), and the "
        "rank correlation of the layer's number with it. minilm and mpnet are the sentence encoders all-MiniLM-L6-v2 "
        "and all-mpnet-base-v2, twin our Transformer of Table 2 before and after fine-tuning on IMDB.",
        "",
        *table(("encoder and text", "passages", "mean", "least head", "most", "correlation with the layer"), cells),
    ]
    if found:
        least, mean = (min(own[name] for own in found.values()) for name in ("least", "mean"))
        every = "true" if least > 0.5 else "refuted" if mean <= 0.5 else "true on average, not for every head"
        lines.append(
            f"- “A long tail in every layer and head” (more than half in the first 128): {every}; the least mean of a "
            f"row is {mean:.2f}, of a head {least:.2f}."
        )
        rising = [row for row, own in found.items() if own["correlation"] > 0.5]
        lines.append(
            f"- “Higher layers are lower in rank” (a correlation above 0.5): true of {len(rising)} of {len(found)} "
            "rows, though not from each layer to the next."
        )
    for text in TEXTS:
        before, after = (found.get(f"{model}-{text}") for model in (BEFORE, AFTER))
        if before and after:
            shares = f"{before['mean']:.3f} to {after['mean']:.3f}"
            lines.append(f"- Fine-tuning on IMDB changes the mean share of our twin on {text} from {shares}.")
    for row in (row for row, own in record["rows"].items() if own is None):
        reason = "its runs had no time on a GPU yet" if rows()[row][0] in OURS else "the weights were not at hand"
        lines.append(f"- {row} is missing: {reason}; `{command(row)}` fills it.")
    return [*lines, ""]
