"""Command lines, records and pages of the theorems, equation 6 and Figure 1."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console

from linformers.checks import make_folder
from linformers.errors import UserError, run_cli
from linformers.provenance import commit, environment

ORIGIN = ("command", "commit", "device", "python", "torch", "transformers")


def origin(module: str) -> dict[str, Any]:
    """Command, commit, hardware and versions of this run."""
    return {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), "commit": commit(), **environment()}


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def parser(name: str, title: str) -> argparse.ArgumentParser:
    """A parser with the options of all sections."""
    made = argparse.ArgumentParser(prog=f"python -m paper.{name}", description=title)
    made.add_argument("--results", type=Path, default=Path("results"), help="folder of results")
    made.add_argument("--page", action="store_true", help="measure nothing, only write the page and the figure")
    return made


def run(name: str, title: str, section: Any, own: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Measure with `section.run`, unless `--page` is given, and write the figure and the page."""

    def command() -> None:
        options = own.parse_args(arguments)
        make_folder("results", options.results / name)
        if not options.page:
            section.run(options, Console())
        record = section.collect(options)
        if not record["runs"]:
            raise UserError(f"results={str(options.results)!r} has no {name}/{name}.json")
        section.draw(record, options.results / name)
        (options.results / name / f"{name}.md").write_text(page(name, title, record), encoding="utf-8")

    run_cli(command)


def page(name: str, title: str, record: Mapping[str, Any]) -> str:
    """The template of a section as a page of its own."""
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    body = made.get_template(f"{name}.md").render(record)
    runs = list(record["runs"].values())
    made_by = f"Made by `{runs[0]['command']}` at commit {str(runs[0]['commit'])[:7]}."
    if len(runs) > 1:
        made_by = f"{len(runs)} runs; `{name}.json` has the command and the commit of each."
    return f"# {title}\n\n{body.strip()}\n\n![{title}]({name}.png)\n\n{made_by}\n"
