"""A projected length of its own for each layer, section 4: chosen from the twin's spectra, against a uniform one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ..markdown import table
from . import quality
from .figure3 import verdict
from .jobs import Job
from .matrix import Place, corpus, flags, hashes, model_of, pretraining, without_origin

GROUP = "chosen-k"
CHOICE = f"{GROUP}/choice"
RECIPE, TEXTS = "n512-k128-headwise", "wikitext103_valtest"
NAMES = ("uniform", "chosen", "decreasing", "increasing")


def names(place: Place) -> list[str]:
    """What its runs are called, as far as they are known."""
    record = place.store.read(CHOICE)
    choices = () if record is None else record["result"]["choices"]
    return [f"{quality.GROUP}/{quality.run_name(quality.TWIN, 0)}", CHOICE, *(f"{GROUP}/{name}" for name in choices)]


def jobs(place: Place, console: Console) -> list[Job]:
    """The twin, the choice by its spectra and, once that is made, a training run for each way to spend as much."""
    tokens = corpus(place, "wiki", console)
    twin = quality.variant_job(place, tokens, quality.TWIN, 0)
    choice = choosing(place, twin)
    found = [twin, choice]
    if (record := place.store.find(choice)) is not None:
        for name, lengths in record["result"]["choices"].items():
            k = json.dumps(lengths, separators=(",", ":"))
            changes = ["short_rows=0.0", quality.SLOW, f"model.projected_length={k}"]
            found.append(pretraining(place, tokens, RECIPE, group=GROUP, name=name, changes=changes, shrink=False))
    return found


def choosing(place: Place, twin: Job) -> Job:
    """The run of `linformers choose-k` on the twin."""
    model, out = model_of(place, twin), place.runs / CHOICE
    n, budget, sentences = (64, 16, 8) if place.small else (512, 128, 200)
    sizes = {"length": n, "budget": budget, "sentences": sentences, "sharing": "headwise"}
    return Job(
        name=CHOICE,
        arguments=["choose-k", str(model), "--text", str(place.folder(TEXTS)), *flags(sizes), "--out", str(out)],
        out=out,
        decides={"model": twin.key, **sizes, "data": hashes(place.folder(TEXTS))},
        collect=lambda: without_origin(json.loads((out / "choose-k.json").read_text())),
        steps=(1, lambda: int((out / "choose-k.json").exists())),
        after=(twin, model.exists),
        alone=True,
    )


def collect(place: Place) -> dict[str, Any]:
    """The choices, what each costs, and its perplexity; `None` where a run is missing."""
    results, runs = place.store.results([CHOICE, *(f"{GROUP}/{name}" for name in NAMES)])
    choice = results.get(CHOICE)
    if choice is None:
        return {"runs": {}, "rows": []}
    rows = [
        {
            "name": name,
            "lengths": lengths,
            "milliseconds": 1000 * cost["seconds"],
            "perplexity": results.get(f"{GROUP}/{name}", {}).get("perplexity"),
        }
        for (name, lengths), cost in zip(choice["choices"].items(), choice["costs"], strict=True)
    ]
    return {"runs": runs, "rows": rows}


def page(record: Mapping[str, Any]) -> list[str]:
    """What each way to spend the same mean k gives."""
    uniform = next((row["milliseconds"] for row in record["rows"] if row["name"] == "uniform"), None)
    rows = []
    for row in record["rows"]:
        mean = sum(row["lengths"]) / len(row["lengths"])
        perplexity = "missing" if row["perplexity"] is None else f"{row['perplexity']:.1f}"
        time = f"{row['milliseconds'] / uniform:.2f}" if uniform else "–"
        rows.append((row["name"], ", ".join(map(str, row["lengths"])), f"{mean:.0f}", time, perplexity))
    lines = [
        "The twin's spectra choose a k for each of 8 layers, at most 128 on average (headwise sharing, one seed). "
        "Beside it: a uniform k, and the same numbers falling, as the paper recommends, or rising with the layer. E "
        "learns at 0.03 of the common rate in all of them. Differences below 1% are taken for none.",
        "",
        *table(("k", "by layer", "mean", "time in inference, of the uniform's", "perplexity"), rows),
    ]
    found = {row["name"]: row["perplexity"] for row in record["rows"] if row["perplexity"] is not None}
    if found.keys() >= {"chosen", "uniform"}:
        how = "better than" if found["chosen"] < 0.99 * found["uniform"] else "not clearly better than"
        lines.append(f"- The chosen k is {how} a uniform one: {found['chosen']:.1f} against {found['uniform']:.1f}.")
    if found.keys() >= {"decreasing", "increasing"}:
        falls = found["decreasing"] < 0.99 * found["increasing"]
        numbers = f"falling it ends at {found['decreasing']:.1f}, rising at {found['increasing']:.1f}"
        gain = ""
        if falls and "uniform" in found and found["decreasing"] >= 0.99 * found["uniform"]:
            gain = f"; but a k that falls gains nothing over a uniform one ({found['uniform']:.1f})"
        lines.append(f"- “Higher layers need less k”: {verdict(falls)}; {numbers}{gain}.")
    return [*lines, ""]
