"""Command lines, records and pages of the theorems, equation 6 and Figure 1."""

from __future__ import annotations

import argparse
import importlib
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


def main(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command of a section: measure, unless `--page` is given, and write the figure and the page."""
    section = importlib.import_module(f"paper.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m paper.{name}", description=section.TITLE)
    section.add_options(parser.add_argument)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results")
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page and the figure")

    def command() -> None:
        options = parser.parse_args(arguments)
        options.path = options.results / name / f"{name}.json"
        make_folder("results", options.path.parent)
        if not options.page:
            (section.measure if hasattr(section, "measure") else section.run)(options, Console())
        record = section.collect(options)
        if not record["runs"]:
            raise UserError(f"{options.path} does not exist or has no records")
        section.draw(record, options.path.parent)
        options.path.with_suffix(".md").write_text(page(name, section.TITLE, record), encoding="utf-8")

    run_cli(command)


def origin() -> dict[str, Any]:
    """Command, commit, hardware and versions of this run."""
    command = ["python", "-m", f"paper.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    return {"command": shlex.join(command), "commit": commit(), **environment()}


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def page(name: str, title: str, record: Mapping[str, Any]) -> str:
    """The template of a section as a page of its own."""
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    body, runs = made.get_template(f"{name}.md").render(record), list(record["runs"].values())
    made_by = f"Made by `{runs[0]['command']}` at commit {str(runs[0]['commit'])[:7]}."
    if len(runs) > 1:
        made_by = f"{len(runs)} runs; `{name}.json` has the command and the commit of each."
    return f"# {title}\n\n{body.strip()}\n\n![{title}]({name}.png)\n\n{made_by}\n"
