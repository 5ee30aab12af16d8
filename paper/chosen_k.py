"""Section 4: a projected length for each layer, chosen from the twin's spectra, against a uniform one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import quality
from .experiments import Workspace, corpus, flags, hashes, pretraining, scale, without_origin
from .figure3 import verdict
from .jobs import Job
from .sections import main

TITLE = "Section 4: a k for each layer"
CHOICE = "chosen_k/choice"
TEXTS = "wikitext103_valtest"
NAMES = ("uniform", "chosen", "decreasing", "increasing")
# A relative difference in perplexity below this decides nothing.
NOISE = 0.01


def names(work: Workspace) -> list[str]:
    """The names of the runs, as far as they are known before the choice is made."""
    record = work.records.read(CHOICE)
    choices = () if record is None else record["result"]["choices"]
    return [quality.run_name(quality.TWIN, 0), CHOICE, *(f"chosen_k/{name}" for name in choices)]


def jobs(work: Workspace) -> list[Job]:
    """The twin, the choice by its spectra and, once that is made, a training run for each way to spend the budget."""
    tokens = corpus(work, "wiki")
    twin = quality.variant_job(work, tokens, quality.TWIN, 0)
    choice = choosing(work, twin)
    found = [twin, choice]
    if (record := work.records.find(choice)) is not None:
        for name, lengths in record["result"]["choices"].items():
            k = json.dumps(lengths, separators=(",", ":"))
            slow = scale(0.03, 64 if work.small else 512, max(lengths))
            changes = [quality.FULL, slow, f"model.projected_length={k}"]
            found.append(pretraining(work, tokens, quality.HEADWISE, f"chosen_k/{name}", changes, shrink=False))
    return found


def choosing(work: Workspace, twin: Job) -> Job:
    """The run of `linformers choose-k` on the twin."""
    out = work.runs / CHOICE
    n, budget, sentences = (64, 16, 8) if work.small else (512, 128, 200)
    sizes = {"length": n, "budget": budget, "sentences": sentences, "sharing": "headwise"}
    text = work.folder(TEXTS)
    return Job(
        name=CHOICE,
        arguments=["choose-k", str(twin.model), "--text", str(text), *flags(sizes), "--out", str(out)],
        out=out,
        description={"model": twin.key, **sizes, "data": hashes(text)},
        collect=lambda: without_origin(json.loads((out / "choose-k.json").read_text())),
        steps=1,
        steps_done=lambda: int((out / "choose-k.json").exists()),
        after=twin,
    )


def collect(work: Workspace) -> dict[str, Any]:
    """The choices, their cost, and their perplexity; `None` where a run is missing."""
    results, origins = work.records.results_of([CHOICE, *(f"chosen_k/{name}" for name in NAMES)])
    choice = results.get(CHOICE)
    if choice is None:
        return {"runs": {}}
    rows = {
        name: {
            "lengths": lengths,
            "mean": sum(lengths) / len(lengths),
            "perplexity": results.get(f"chosen_k/{name}", {}).get("perplexity"),
        }
        for name, lengths in choice["choices"].items()
    }
    missing = [name for name, row in rows.items() if row["perplexity"] is None]
    perplexities = {name: row["perplexity"] for name, row in rows.items()}
    return {"runs": origins, "rows": rows, "missing": missing, **claims(perplexities)}


def claims(perplexities: Mapping[str, float | None]) -> dict[str, Any]:
    """Whether the chosen k beats a uniform one, and whether k should fall with the layer."""

    def better(one: str, other: str) -> bool | None:
        own, base = perplexities.get(one), perplexities.get(other)
        return None if own is None or base is None else own < (1 - NOISE) * base

    falls = better("decreasing", "increasing")
    return {
        "gains": better("chosen", "uniform"),
        "falls": None if falls is None else verdict(falls),
        "falling_gains": better("decreasing", "uniform"),
    }


if __name__ == "__main__":
    main(["chosen_k"])
