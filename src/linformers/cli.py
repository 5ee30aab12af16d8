"""The command line: one function for each command, which imports what it needs when it is called."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Linformer: self-attention with linear complexity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Out = Annotated[Path, typer.Option(help="Folder for what the command writes.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"linformers {version('linformers')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Linformer: self-attention with linear complexity."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 450,
    out: Out = Path("runs/demo"),
) -> None:
    """Measure and train a Linformer beside its Transformer twin; two minutes on two cores, no download."""
    from . import demo

    demo.run(steps, out, console)


@app.command()
def bench(
    lengths: Annotated[str, typer.Option(help="Sequence lengths n, separated by commas.")] = "512,1024,2048,4096",
    projected: Annotated[str, typer.Option(help="Projected lengths k, separated by commas.")] = "64,128,256",
    tokens: Annotated[int, typer.Option(help="Tokens in a pass.")] = 8192,
    layers: Annotated[int, typer.Option(help="Layers of each model.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size of each model; heads have 64 channels.")] = 256,
    out: Out = Path("runs/bench"),
) -> None:
    """Time and memory of an inference pass over (n, k), beside the Transformer with fused attention."""
    from .benchmark import report

    report.run(
        _numbers("lengths", lengths),
        _numbers("projected", projected),
        tokens=tokens,
        layers=layers,
        hidden=hidden,
        out=out,
        command=" ".join(["linformers", *sys.argv[1:]]),
        console=console,
    )


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{name}={text!r} must be positive whole numbers separated by commas, such as 512,1024")
    return numbers


def main() -> None:
    """Run the command line; what a user got wrong ends in one sentence."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        sys.exit(2)
