"""The command line: one function for each command, which imports what it needs when it is called."""

from __future__ import annotations

import shlex
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
def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files or folders of text, jsonl, csv, parquet; or a hub name.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokens.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary that is trained.")] = 16384,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name of one to take instead.")] = None,
    validation: Annotated[list[str] | None, typer.Option(help="Files or folders held out for validation.")] = None,
    validation_share: Annotated[float, typer.Option(help="Or the share of documents held out.")] = 0.005,
    text_column: Annotated[str, typer.Option(help="The column of tables that holds the text.")] = "text",
    tokenizer_documents: Annotated[int, typer.Option(help="Documents that the vocabulary is trained on.")] = 12000,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each core.")] = None,
) -> None:
    """Turn raw text into a vocabulary and shards of tokens, for pretraining."""
    from .training import corpus

    corpus.prepare(
        sources,
        out,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        validation=validation or (),
        validation_share=validation_share,
        text_column=text_column,
        tokenizer_documents=tokenizer_documents,
        workers=workers,
        console=console,
    )


@app.command()
def pretrain(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/small/n512-k128-layerwise.yaml.")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changes: steps=100 model.projection=identity …")] = None,
) -> None:
    """Pretrain a model by masked-language modelling; run again, it goes on from its newest checkpoint."""
    from .training import pretrain
    from .training.recipe import read

    sys.exit(pretrain.run(read(recipe, changes or []), console, _command()))


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
        command=_command(),
        console=console,
    )


def _command() -> str:
    return shlex.join(["linformers", *sys.argv[1:]])


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
    except (ValueError, OSError, ArithmeticError) as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        sys.exit(2)
