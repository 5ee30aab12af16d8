"""The paper's tables and figures one by one: run what is missing, write the results, and the page that shows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from .. import plots
from ..checks import check_choice, check_size
from ..provenance import commit, environment
from . import figure1, figure3, jobs, long_documents, quality, table1, table2, table3
from .jobs import CODE_VERSION, Job, Store
from .matrix import Place

# Sections that are made of runs, and those that are measured in one go.
TRAINED: dict[str, ModuleType] = {
    "table2": table2,
    "figure3": figure3,
    "quality": quality,
    "long": long_documents,
}
MEASURED: dict[str, ModuleType] = {"figure1": figure1, "table1": table1, "table3": table3}
TITLES = {
    "figure1": "Figure 1: is attention low rank?",
    "table1": "Table 1: how time grows with n",
    "table3": "Table 3 and Figure 2: time and memory",
    "figure3": "Figure 3: perplexity while pretraining",
    "table2": "Table 2: fine-tuning",
    "quality": "A Linformer beside its twin, at equal steps",
    "long": "Long documents: IMDB in bytes, n = 4096",
}
# Figure 2 is drawn from what Table 3 measures.
ALIASES = {"figure2": "table3"}
NAMES = (*TITLES, *ALIASES)

INTRODUCTION = """\
# Results

The paper's tables and figures on real text, with models that one GPU trains in minutes. This page is made by
`linformers reproduce`; what it shows, with commands, commits, hardware and versions, is in [results/](../results).

What differs from the paper everywhere: models of 34M parameters instead of 110M, thousands of updates instead of
250,000, Wikipedia and Project Gutenberg instead of Wikipedia and BookCorpus, and the twin, a Transformer with
everything but the projection equal, in the place of RoBERTa.
"""


def run(
    names: Sequence[str],
    place: Place,
    console: Console,
    command: str,
    *,
    at_once: int = 1,
    minutes: float | None = None,
) -> int:
    """Make sections; what is there already, by the same recipe, data and code, is not run again.

    Returns:
        The exit code: 0, 1 where something is missing, or 128 plus the number of the signal that stopped it.
    """
    for name in names:
        check_choice("section", name, (*NAMES, "all"))
    check_size("at_once", at_once)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes={minutes} must be above 0")
    wanted = list(TITLES) if "all" in names else list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    code = 0
    store = Store(place.results / "runs")
    trained = [name for name in wanted if name in TRAINED]
    if trained:
        every: list[Job] = [job for name in trained for job in TRAINED[name].jobs(place, console)]
        seconds = None if minutes is None else 60 * minutes
        code = jobs.run(every, store, place.runs / "logs", console, at_once=at_once, seconds=seconds)
    for name in wanted:
        if code > 1:
            break
        record = TRAINED[name].collect(store) if name in TRAINED else _measured(name, place, console)
        _write(name, {"command": command, "commit": commit(), **environment(), **record}, place)
    write_page(place)
    console.print(f"Written to {place.results} and {page_path(place)}", markup=False)
    return code


def _measured(name: str, place: Place, console: Console) -> dict[str, Any]:
    """What a section measured before with the same code and sizes, or else measures now."""
    key = hashlib.sha256(repr((name, CODE_VERSION, place.small)).encode()).hexdigest()[:16]
    path = _path(name, place)
    if path.is_file() and (before := json.loads(path.read_text())).get("key") == key:
        console.print(f"{name} is there already; delete {path} to measure it again", highlight=False, markup=False)
        return before
    return {"key": key, **MEASURED[name].measure(place, console)}


def _path(name: str, place: Place) -> Path:
    return place.results / name / f"{name}.json"


def _write(name: str, record: dict[str, Any], place: Place) -> None:
    """The section's json, and its figure where it has one."""
    path = _path(name, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    section = {**TRAINED, **MEASURED}[name]
    for suffix in ("png", "svg"):
        if hasattr(section, "draw"):
            section.draw(record, path.with_suffix(f".{suffix}"))
        if name == "table3":
            plots.architecture(path.with_name(f"architecture.{suffix}"))


def write_page(place: Place) -> None:
    """`docs/results.md`, from the json of all sections that there are."""
    lines = [INTRODUCTION]
    for name, title in TITLES.items():
        path = _path(name, place)
        if not path.is_file():
            lines += [f"## {title}", "", f"Missing; `linformers reproduce {name} --data DIR` fills it.", ""]
            continue
        record = json.loads(path.read_text())
        lines += [f"## {title}", "", *{**TRAINED, **MEASURED}[name].page(record)]
        where = f"../results/{name}"
        if name == "table3":
            lines += [f"![Where E and F stand]({where}/architecture.png)", ""]
        if path.with_suffix(".png").is_file():
            lines += [f"![{title}]({where}/{name}.png)", ""]
        made = f"`{record['command']}` at commit {record['commit']} on {record['device']}, torch {record['torch']}"
        lines += [f"[{name}.json]({where}/{name}.json): {made}.", ""]
    path = page_path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")


def page_path(place: Place) -> Path:
    """The page stands beside the folder of results, in docs/."""
    return place.results.parent / "docs" / "results.md"
