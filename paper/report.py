"""Command lines and records of the theorems, equation 6 and Figure 1."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from linformers.checks import make_folder
from linformers.errors import UserError
from linformers.provenance import commit, environment
from linformers_cli import run_script


def main(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command of a section: measure, unless `--draw` is given, and draw the figure."""
    section = importlib.import_module(f"paper.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m paper.{name}", description=section.TITLE)
    section.add_options(parser.add_argument)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results")
    parser.add_argument("--draw", action="store_true", help="measure nothing, only draw the figure")

    def command() -> None:
        options = parser.parse_args(arguments)
        options.path = options.results / name / f"{name}.json"
        make_folder("results", options.path.parent)
        if not options.draw:
            (section.measure if hasattr(section, "measure") else section.run)(options, Console())
        record = section.collect(options)
        if not record["runs"]:
            raise UserError(f"{options.path} does not exist or has no records")
        section.draw(record, options.path.parent)

    run_script(command)


def origin() -> dict[str, Any]:
    """Command, commit, hardware and versions of this run."""
    command = ["python", "-m", f"paper.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    return {"command": shlex.join(command), "commit": commit(), **environment()}


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def whole_numbers(name: str, text: str) -> list[int]:
    """The distinct numbers of an argument such as "512,1024"."""
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{name}={text!r} must be positive integers separated by commas, such as 512,1024")
    return numbers


def fractions(name: str, text: str) -> list[float]:
    """The distinct numbers of an argument such as "0.1,0.5"."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{name}={text!r} must be numbers separated by commas, such as 0.1,0.5") from None
