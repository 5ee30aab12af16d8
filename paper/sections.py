"""The command line of all sections: run what is missing, write the results, and render the page."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from linformers.errors import UserError, run_cli

from . import jobs
from .experiments import Workspace
from .jobs import Job
from .page import page_path, render

# In the order of the page. A section is a module with TITLE and collect(work); one made of training runs has names(work)
# and jobs(work, console), one that is measured in one go has measure(work, console). draw(record, folder) is optional.
SECTIONS = (
    "overview",
    "figure1",
    "theorems",
    "equation6",
    "table1",
    "table3",
    "figure3",
    "table2",
    "steps",
    "quality",
    "recall",
    "chosen_k",
    "long",
)


def main(names: Sequence[str], arguments: Sequence[str] | None = None) -> None:
    """The command of some sections: parse the arguments, run, and exit."""
    options = parser(names).parse_args(arguments)
    run_cli(lambda: _exit(run(names, workspace(options), Console(), options)))


def parser(names: Sequence[str]) -> argparse.ArgumentParser:
    program = "python -m paper" + (f".{names[0]}" if len(names) == 1 else "")
    made = argparse.ArgumentParser(prog=program, description="Reproduce the paper; recorded runs are not repeated.")
    made.add_argument("--data", type=Path, help="folder of texts and tasks, as described in docs/commands.md")
    made.add_argument("--only", action="append", default=[], metavar="PATTERN", help="runs to start, such as 'n512-*'")
    made.add_argument("--at-once", type=int, default=1, metavar="N", help="number of runs at the same time")
    made.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="stop and save after M minutes")
    made.add_argument("--small", action="store_true", help="tiny models: test the whole path on a CPU")
    made.add_argument("--runs", type=Path, help="folder of training runs (default: runs/paper)")
    made.add_argument("--results", type=Path, help="folder of results (default: results)")
    made.add_argument("--page", action="store_true", help="run nothing, only render the page")
    return made


def workspace(options: argparse.Namespace) -> Workspace:
    runs = options.runs or Path("runs/paper-small" if options.small else "runs/paper")
    results = options.results or (runs / "results" if options.small else Path("results"))
    return Workspace(options.data, runs, results, options.small)


def _exit(code: int) -> None:
    raise SystemExit(code)


def load(names: Sequence[str]) -> dict[str, ModuleType]:
    return {n: importlib.import_module(f"paper.{n}") for n in names if importlib.util.find_spec(f"paper.{n}")}


def run(names: Sequence[str], work: Workspace, console: Console, options: argparse.Namespace) -> int:
    """Run some sections and render the page of all.

    Returns:
        The exit code: 0, 1 if something is missing, or 128 plus the number of the signal that stopped it.
    """
    check(options)
    work.check()
    wanted = {} if options.page else load(names)
    trained = {name: own for name, own in wanted.items() if hasattr(own, "jobs")}
    check_only(options.only, [name for own in trained.values() for name in own.names(work)])
    work.make()
    deadline = time.monotonic() + 60 * options.minutes
    code = train(trained, work, console, options.only, options.at_once, deadline)
    for name, section in wanted.items():
        if code <= 1 and hasattr(section, "measure") and time.monotonic() < deadline:
            section.measure(work, console)
        record = section.collect(work)
        if record["runs"] and hasattr(section, "draw"):
            (work.results / name).mkdir(exist_ok=True)
            section.draw(record, work.results / name)
    page = page_path(work)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(work, load(SECTIONS)), encoding="utf-8")
    console.print(f"Written to {work.results} and {page}", markup=False)
    return code


def train(
    sections: dict[str, ModuleType],
    work: Workspace,
    console: Console,
    only: Sequence[str],
    at_once: int,
    deadline: float,
) -> int:
    """Run the jobs of the sections until no new ones appear: some are only known when others are done."""
    known: set[str] = set()
    while sections:
        every = [job for own in sections.values() for job in own.jobs(work, console)]
        new = [job for job in chosen(every, only) if job.name not in known]
        if not new:
            break
        known |= {job.name for job in new}
        code = jobs.run(new, work.records, work.runs / "logs", console, at_once=at_once, deadline=deadline)
        if code:
            return code
    return 0


def check(options: argparse.Namespace) -> None:
    if options.at_once < 1:
        raise UserError(f"at_once={options.at_once} must be at least 1")
    if not options.minutes > 0:
        raise UserError(f"minutes={options.minutes} must be positive")


def check_only(only: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the runs."""
    short = [name.partition("/")[2] for name in names]
    for pattern in only:
        if not fnmatch.filter(short, pattern):
            known = f"such as {', '.join(short[:5])}" if short else "there are none in this section"
            raise UserError(f"only={pattern!r} matches none of the {len(short)} runs; {known}")


def chosen(every: Sequence[Job], only: Sequence[str]) -> list[Job]:
    return [job for job in every if not only or any(fnmatch.fnmatch(job.short_name, own) for own in only)]
