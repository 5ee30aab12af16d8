"""The paper's tables and figures one by one: run what is missing, write the results, and the page that shows them."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from .. import plots
from ..checks import check_choice, check_size, make_folder, nearest_name
from ..errors import UserError
from . import chosen_k, figure1, figure3, jobs, long_documents, overview, quality, recall, steps, table1, table2, table3
from .jobs import Job
from .matrix import Place

# Sections that are made of runs, and those that are measured in one go.
TRAINED: dict[str, ModuleType] = {
    "table2": table2,
    "figure3": figure3,
    "quality": quality,
    "recall": recall,
    "chosen-k": chosen_k,
    "long": long_documents,
}
MEASURED: dict[str, ModuleType] = {
    "overview": overview,
    "figure1": figure1,
    "table1": table1,
    "table3": table3,
    "steps": steps,
}
SECTIONS = {**MEASURED, **TRAINED}
TITLES = {
    "overview": "What matters most",
    "figure1": "Figure 1: is attention low rank?",
    "table1": "Table 1: how time grows with n",
    "table3": "Table 3 and Figure 2: time and memory",
    "figure3": "Figure 3: perplexity while pretraining",
    "table2": "Table 2: fine-tuning",
    "steps": "The time of a training step, n = 512",
    "quality": "A Linformer beside its twin, at equal steps",
    "recall": "A task that needs the whole text",
    "chosen-k": "Section 4: a k for each layer",
    "long": "Long documents: IMDB in bytes, n = 4096",
}
# Figure 2 is drawn from what Table 3 measures.
ALIASES = {"figure2": "table3"}
# Everything, or nothing: only the page is made again, of what is there.
ALL, PAGE = "all", "page"
NAMES = (*TITLES, *ALIASES, ALL, PAGE)

# The page of the results that come with a clone.
PROJECT = Path("docs/results.md")
INTRODUCTION = """\
# Results

The paper's tables and figures on real text, with models that one GPU trains in minutes. This page is made by
`linformers reproduce`; what it shows, with commands, commits, hardware and versions, is in [results/](../results). A
command gives its number at the commit beside it: recipes and defaults have changed since some of these runs. What is
missing stands with the command that runs it; unless another reason is given, there was no time on a GPU for it yet.

What differs from the paper in all that is trained here, but for long documents: models of 34M parameters instead of
110M, thousands of updates instead of 250,000 (no curve has converged), Wikipedia and Project Gutenberg (Figure 3 and
Table 2) or Wikipedia alone (equal steps, recall, section 4) instead of Wikipedia and BookCorpus, norms before each part
of a layer instead of behind it, another start of E, positions, queries and keys (docs/models.md), and the twin, a
Transformer with everything but the projection equal, in the place of RoBERTa.
All models have one learning rate, 0.001 in pretraining, which was tuned for none of them; that of E was.

*n* is the length of the input, *k* what E and F shorten it to, *w* the reach of a local window of exact keys; E's
*rate* is its learning rate in multiples of the common one; *from nothing* means without pretraining.
"""
# What other commands wrote, which comes with a clone.
ELSEWHERE = """\
On pages of their own: [both theorems](../results/theorems/theorems.md), tested by numbers (neither construction gives
what its theorem states), and [equation 6](../results/lowrank/lowrank.md), P's best rank k beside E and F.
"""
# In the json of a section whose models are tiny.
SMALL_FLAG = "small"
SMALL = """\
# A test of the whole path

Tiny models, made by `linformers reproduce --small`: sizes and steps are not those that the text names, and the numbers
mean nothing.
"""


def run(
    names: Sequence[str],
    place: Place,
    console: Console,
    *,
    only: Sequence[str] = (),
    at_once: int = 1,
    minutes: float | None = None,
) -> int:
    """Make sections; what is there already, by the same recipe, data and code, is not run again.

    Of their runs, those whose names are like one of `only` are run (`*` stands for anything), or all.

    Returns:
        The exit code: 0, 1 where something is missing, or 128 plus the number of the signal that stopped it.
    """
    for name in names:
        check_choice("section", name, NAMES)
    check_size("at_once", at_once)
    if minutes is not None and not minutes > 0:
        raise UserError(f"minutes={minutes} must be above 0")
    if only and not any(_real_name(name) in TRAINED or name == ALL for name in names):
        raise UserError(f"only={list(only)} has no effect: {', '.join(names)} has no runs of its own")
    place.check()
    wanted = list(TITLES) if ALL in names else [name for name in TITLES if name in map(_real_name, names)]
    trained = [name for name in wanted if name in TRAINED]
    if trained:
        place.check_recipes(long_documents.RECIPE if trained == ["long"] else "n512-twin")
    if not wanted and not has_results(place):
        raise UserError(f"results={str(place.results)!r} holds no results: name a folder that reproduce wrote to")
    check_only(only, [name for section in trained for name in TRAINED[section].names(place)])
    small = is_small(place)
    if wanted and small != place.small:
        held = "of tiny models" if small else "of full size"
        raise UserError(f"results={str(place.results)!r} holds results {held}; choose another folder")
    make_folder("results", place.results)
    if "table3" in wanted and not table3.folders(place):
        table3.settings(place)  # refuses what would otherwise fail after hours
    code = 0
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if trained:
        make_folder("runs", place.runs)
        known: set[str] = set()
        while code == 0:  # what is done may make new jobs known
            every = [job for name in trained for job in TRAINED[name].jobs(place, console)]
            new = [job for job in chosen(every, only) if job.name not in known]
            if not new:
                break
            known |= {job.name for job in new}
            code = jobs.run(new, place.store, place.runs / "logs", console, at_once=at_once, deadline=deadline)
    for name, section in SECTIONS.items():
        to_measure = name in wanted and name in MEASURED and code <= 1 and time.monotonic() < deadline
        record = section.measure(place, console) if to_measure else section.collect(place)
        if record["runs"]:
            _write(name, {**record, SMALL_FLAG: small}, place)
    page = page_path(place)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_text(place), encoding="utf-8")
    if small:
        console.print(Markdown(SMALL))
    for name in wanted:
        if (record := place.read(name)) is not None:
            console.print(Markdown(for_place("\n".join(section_text(name, record)), place, small)))
    console.print(f"Written to {place.results} and {page}", markup=False)
    return code


def _real_name(name: str) -> str:
    return ALIASES.get(name, name)


def check_only(only: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that is like none of the runs so called."""
    plain = list(dict.fromkeys(map(_plain, names)))
    for pattern in only:
        if not fnmatch.filter(plain, pattern):
            nearest = nearest_name(pattern, plain)
            hint = f"did you mean {nearest!r}?" if nearest else f"such as {', '.join(plain[:5])}"
            raise UserError(f"only={pattern!r} is like none of the {len(plain)} runs; {hint}")


def chosen(every: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """The jobs whose names are like one of `only`."""
    check_only(only, [job.name for job in every])
    return [job for job in every if not only or any(fnmatch.fnmatch(_plain(job.name), own) for own in only)]


def _plain(name: str) -> str:
    """The name of a run without its group."""
    return name.rpartition("/")[2]


def _write(name: str, record: dict[str, Any], place: Place) -> None:
    """The section's json, and its figure where it has one."""
    path = place.record(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    section = SECTIONS[name]
    for suffix in ("png", "svg"):
        if hasattr(section, "draw"):
            section.draw(record, path.with_suffix(f".{suffix}"))
        if name == "table3":
            plots.architecture(path.with_name(f"architecture.{suffix}"))


def has_results(place: Place) -> bool:
    """Whether any section has something to show."""
    return any(place.record(name).is_file() or own.collect(place)["runs"] for name, own in SECTIONS.items())


def is_small(place: Place) -> bool:
    """Whether the results there are those of tiny models; where there are none yet, whether they are to be."""
    flags = [record.get(SMALL_FLAG, False) for name in SECTIONS if (record := place.read(name)) is not None]
    return any(flags) if flags else place.small


def for_place(text: str, place: Place, small: bool) -> str:
    """Commands that fill what is missing, with the options without which they would fill other results."""
    options = " --small" if small else ""
    if page_path(place) != PROJECT:
        options += f" --results {shlex.quote(str(place.results))}"
    return re.sub(r"(?<=`)linformers reproduce [^`]*(?=` fills)", lambda command: command[0] + options, text)


def page_text(place: Place) -> str:
    """What the page holds, from the json of all sections that there are."""
    small = is_small(place)
    lines = [SMALL if small else INTRODUCTION]  # whose links are those of docs/results.md
    if page_path(place) == PROJECT:
        lines.append(ELSEWHERE)
    for name, title in TITLES.items():
        path = place.record(name)
        if not path.is_file():
            data = " --data DIR" if name in TRAINED or name == "figure1" else ""
            lines += [f"## {title}", "", f"Missing; `linformers reproduce {name}{data}` fills it.", ""]
            continue
        record = json.loads(path.read_text())
        lines += section_text(name, record)
        where = f"../results/{name}"
        if name == "table3":
            lines += [f"![Where E and F stand]({where}/architecture.png)", ""]
        if path.with_suffix(".png").is_file():
            lines += [f"![{title}]({where}/{name}.png)", ""]
        lines += [f"From [{name}.json]({where}/{name}.json): {origins(record['runs'])}.", ""]
    text = for_place("\n".join(lines), place, small)
    return text if page_path(place) == PROJECT else text.replace("](../results", "](.")


def section_text(name: str, record: Mapping[str, Any]) -> list[str]:
    """What the page says of a section that is there; of tiny models, nothing about the paper's claims."""
    lines = SECTIONS[name].page(record)
    if record.get(SMALL_FLAG):
        lines = [line for line in lines if not line.startswith("- “")]
    return [f"## {TITLES[name]}", "", *lines]


def origins(runs: Mapping[str, Any]) -> str:
    """How many runs there are, where they ran, and at which commits; their commands stand in the json."""
    machines = {f"{run['device']} (torch {run['torch']}, transformers {run['transformers']})" for run in runs.values()}
    commits = {str(run["commit"])[:7] for run in runs.values()}
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    return f"{count} on {' and '.join(sorted(machines))} at {', '.join(sorted(commits))}" if runs else "no run yet"


def page_path(place: Place) -> Path:
    """The page of the project stands in docs/, that of any other results among them."""
    own = place.results.resolve() == Place.results.resolve()
    return PROJECT if own else place.results / "results.md"
