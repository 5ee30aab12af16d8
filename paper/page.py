"""The page of results, rendered from the templates and the json under results/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from .experiments import Workspace

PROJECT_PAGE = Path("docs/results.md")


def environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"num": num, "plus_minus": plus_minus}
    return made


def num(value: float | None, digits: int = 1, otherwise: str = "missing") -> str:
    return otherwise if value is None else f"{value:,.{digits}f}"


def plus_minus(spread: Sequence[float | None] | None, digits: int = 1, scale: float = 1) -> str:
    """“0.91 ± 0.02” for a mean and a standard deviation; the mean alone if there is no deviation."""
    if spread is None:
        return "missing"
    return " ± ".join(f"{scale * value:.{digits}f}" for value in spread if value is not None)


def page_path(work: Workspace) -> Path:
    """docs/results.md for the results of the repository; other results have their page in their own folder."""
    own = work.results.resolve() == Workspace.results.resolve()
    return PROJECT_PAGE if own else work.results / "results.md"


def render(work: Workspace, sections: Mapping[str, Any]) -> str:
    """The page. `sections` are modules by name, in order."""
    templates = environment()
    found = [
        {"name": name, "title": module.TITLE, "text": section_text(templates, name, module.collect(work), work)}
        for name, module in sections.items()
    ]
    text = templates.get_template("results.md").render(sections=found, small=work.small)
    return text if page_path(work) == PROJECT_PAGE else text.replace("](../results/", "](")


def section_text(templates: jinja2.Environment, name: str, record: Mapping[str, Any], work: Workspace) -> str:
    """A section, or how to run it if there is nothing to show yet."""
    if not record["runs"]:
        return templates.get_template("missing.md").render(name=name, small=work.small).strip()
    png = sorted(path.name for path in (work.results / name).glob("*.png"))
    common = {"small": work.small, "name": name, "origins": origins(record["runs"]), "png": png}
    body = templates.get_template(f"{name}.md").render(**{**record, **common})
    footer = templates.get_template("footer.md").render(**{"missing": [], **record, **common})
    return f"{body.strip()}\n\n{footer.strip()}"


def origins(runs: Mapping[str, Any]) -> dict[str, Any]:
    """The number of runs, and where and at which commits they ran."""
    machines = {f"{run['device']} (torch {run['torch']}, transformers {run['transformers']})" for run in runs.values()}
    commits = {str(run["commit"])[:7] for run in runs.values()}
    return {"count": len(runs), "machines": sorted(machines), "commits": sorted(commits)}
