"""The command line of all sections: run what is missing, write the results, and render the page."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from linformers.errors import UserError
from linformers_cli import run_script

from . import jobs
from .experiments import Workspace
from .page import page_path, render

# In the order of the page. A section is a module with TITLE, collect(work) and a template. One that needs training runs
# has names(work) and jobs(work), one that measures something itself measure(work); draw(record, folder) is optional.
SECTIONS = (
    *("overview", "figure1", "theorems", "equation6", "table1", "table3", "figure3", "table2"),
    *("steps", "quality", "recall", "chosen_k", "long", "length"),
)
SCRIPTS = ("figure1", "theorems", "equation6")  # which have options of their own


def main(names: Sequence[str], arguments: Sequence[str] | None = None) -> None:
    """The command of some sections: parse the arguments, run, and exit."""
    options = parser(names).parse_args(arguments)
    run_script(lambda: sys.exit(run(names, workspace(options), Console(), options)))


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


def load(names: Sequence[str]) -> dict[str, ModuleType]:
    return {n: importlib.import_module(f"paper.{n}") for n in names if importlib.util.find_spec(f"paper.{n}")}


def run(names: Sequence[str], work: Workspace, console: Console, options: argparse.Namespace) -> int:
    """Run some sections and render the page of all.

    Returns:
        The exit code: 0, 1 if something is missing, or 128 plus the number of the signal that stopped it.
    """
    if options.at_once < 1:
        raise UserError(f"at_once={options.at_once} must be at least 1")
    if not options.minutes > 0:
        raise UserError(f"minutes={options.minutes} must be positive")
    work.check()
    wanted = {} if options.page else load(names)
    trained = [section for section in wanted.values() if hasattr(section, "jobs")]
    check_only(options.only, [name for section in trained for name in section.names(work)])
    work.make()
    deadline = time.monotonic() + 60 * options.minutes
    code = train(trained, work, console, options, deadline) if trained else 0
    for name, section in wanted.items():
        if code <= 1 and time.monotonic() < deadline:
            code = max(code, measure(name, section, work, console))
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
    sections: Sequence[ModuleType], work: Workspace, console: Console, options: argparse.Namespace, deadline: float
) -> int:
    """Run the jobs of the sections until no new ones appear: some are only known when others are done."""
    known: set[str] = set()
    while True:
        every = [job for section in sections for job in section.jobs(work)]
        new = [job for job in every if job.name not in known and matches(job.name, options.only)]
        if not new:
            return 0
        known |= {job.name for job in new}
        logs, at_once = work.runs / "logs", options.at_once
        if code := jobs.run(new, work.records, logs, console, at_once=at_once, deadline=deadline):
            return code


def measure(name: str, section: ModuleType, work: Workspace, console: Console) -> int:
    """Measure a section and write its json, unless that exists. Returns the exit code."""
    path = work.results / name / f"{name}.json"
    if path.exists() and name != "figure1":  # which resumes by itself
        console.print(f"{path} exists; delete it to measure again", highlight=False, markup=False)
    elif name in SCRIPTS:
        command = [sys.executable, "-m", f"paper.{name}", *arguments_of(name, work), "--results", str(work.results)]
        return int(subprocess.run(command, check=False).returncode != 0)
    elif hasattr(section, "measure") and (record := section.measure(work)) is not None:
        path.parent.mkdir(exist_ok=True)
        jobs.write_text(path, json.dumps(record, indent=1) + "\n")
    return 0


def arguments_of(name: str, work: Workspace) -> list[str]:
    """The arguments of a section that has a command of its own."""
    if name == "theorems":
        return ["--quick"] if work.small else []
    if name == "figure1":
        return ["--data", str(work.folder()), "--runs", str(work.runs), *(["--small"] if work.small else [])]
    local = work.folder("models", "minilm")
    model = str(local) if local.is_dir() else "sentence-transformers/all-MiniLM-L6-v2"
    return [model, "--text", str(work.folder("wikitext103_valtest")), "--passages", "8", "--others", "48"]


def check_only(only: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the runs."""
    for pattern in only:
        if not any(matches(name, [pattern]) for name in names):
            known = f"such as {', '.join(map(short, names[:5]))}" if names else "the section has no runs of its own"
            raise UserError(f"only={pattern!r} matches none of {len(names)} runs; {known}")


def matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(short(name), own) for own in patterns)


def short(name: str) -> str:
    """The name of a run without its section."""
    return name.partition("/")[2]
