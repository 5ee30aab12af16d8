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

from .checks import fractions, whole_numbers
from .errors import run_cli
from .shipped import ENGLISH

app = typer.Typer(
    help="Linformer: self-attention with linear complexity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[Path, typer.Option(help="Folder of a model, or a checkpoint, that pretrain or finetune wrote.")]
Start = Annotated[
    Path,
    typer.Option(
        help="Folder of a model that pretrain or finetune wrote.", show_default="the English one that comes along"
    ),
]
Data = Annotated[Path | None, typer.Option(help="Folder of the data.")]
Text = Annotated[str, typer.Option(help="The column of a labelled file that holds the text; two with a comma between.")]
Label = Annotated[str, typer.Option(help="The column that holds the label.")]
Encoder = Annotated[str, typer.Argument(help="Folder or hub name of an encoder with full attention.")]
Texts = Annotated[list[str], typer.Option(help="Files or folders of text, jsonl, csv or parquet; may be repeated.")]
Length = Annotated[int | None, typer.Option(help="Tokens of a passage, n; else 512, or what the model takes.")]
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
    from .training import prepare

    _quiet()
    prepare.prepare(
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
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/cpu.yaml.")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changes: steps=100 model.projection=identity …")] = None,
) -> None:
    """Pretrain a model by masked-language modelling; run again, it goes on from its newest checkpoint."""
    from .training import pretrain

    _quiet()
    sys.exit(pretrain.pretrain(recipe, changes or [], console=console, command=_command()))


@app.command()
def finetune(
    task: Annotated[str, typer.Argument(help="sst2, imdb, qnli, qqp, or a labelled csv, jsonl or parquet file.")],
    out: Annotated[Path, typer.Option(help="Folder for results and the best model.")],
    model: Start = ENGLISH,
    data: Data = None,
    test: Annotated[Path | None, typer.Option(help="The file to report on, where TASK is a file.")] = None,
    validation: Annotated[
        Path | None, typer.Option(help="The file to select on; without --test the one to report on.")
    ] = None,
    text: Text = "text",
    label: Label = "label",
    seeds: Annotated[int, typer.Option(help="How many times.")] = 3,
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Rows in an update.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 5e-5,
    max_length: Annotated[int, typer.Option(help="Tokens of a text that are read; 0: all that the model takes.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, bf16 or float32.")] = "auto",
    compiled: Annotated[str, typer.Option("--compile", help="yes, no, or auto: on a GPU, if it pays.")] = "auto",
) -> None:
    """Fine-tune a model on a labelled task and report accuracy and F1 over several seeds."""
    from .training import finetune

    _quiet()
    code = finetune.finetune(
        task,
        out,
        model=model,
        data=data,
        test=test,
        validation=validation,
        text=text,
        label=label,
        seeds=seeds,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_length=max_length,
        precision=precision,
        compile=compiled,
        console=console,
        command=_command(),
    )
    sys.exit(code)


@app.command()
def predict(
    file: Annotated[Path | None, typer.Argument(help="Lines of text; standard input if left out.")] = None,
    model: Start = ENGLISH,
    pairs: Annotated[bool, typer.Option("--pairs", help="Lines hold two texts with a tab between.")] = False,
    best: Annotated[int, typer.Option(help="Guesses for a mask.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Lines at once.")] = 32,
) -> None:
    """Label each line of text, or fill in its <mask>; a JSON object for each."""
    from .training import predict

    _quiet()
    predict.predict(model, file, sys.stdout, pairs=pairs, best=best, batch_size=batch_size)


@app.command()
def evaluate(
    model: Model,
    data: Data = None,
    task: Annotated[str | None, typer.Option(help="A task or a labelled file; without one, perplexity.")] = None,
    text: Text = "text",
    label: Label = "label",
    rows: Annotated[int, typer.Option(help="Rows of the validation set that perplexity is of.")] = 1024,
    mask_share: Annotated[float, typer.Option(help="The share of words masked in them.")] = 0.15,
) -> None:
    """The perplexity of a model on a prepared corpus, or its accuracy and F1 on a task."""
    import json

    from .training import predict

    _quiet()
    progress = Console(stderr=True)
    result = predict.evaluate(
        model, data=data, task=task, text=text, label=label, rows=rows, mask_share=mask_share, console=progress
    )
    console.print_json(json.dumps(result))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 600,
    out: Out = Path("runs/demo"),
) -> None:
    """Measure and pretrain Linformers beside their Transformer twin; three to five minutes on two cores, offline."""
    from . import demo

    _quiet()
    sys.exit(demo.run(steps, out, console))


@app.command()
def bench(
    lengths: Annotated[str, typer.Option(help="Sequence lengths n, separated by commas.")] = "512,1024,2048,4096",
    projected: Annotated[str, typer.Option(help="Projected lengths k, separated by commas.")] = "64,128,256",
    tokens: Annotated[int, typer.Option(help="Tokens in a pass; 0 for one sequence in each.")] = 8192,
    layers: Annotated[int, typer.Option(help="Layers of each model.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size of each model; heads have 64 channels.")] = 256,
    task: Annotated[str, typer.Option(help="inference, training, or both with a comma between.")] = "inference",
    sharing: Annotated[str, typer.Option(help="Of E and F: none, headwise, key-value or layerwise.")] = "layerwise",
    projection: Annotated[str, typer.Option(help="linear, mean, max, conv or dynamic.")] = "linear",
    dropout: Annotated[float, typer.Option(help="Dropout in training.")] = 0.0,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure compiled models, too: takes minutes.")] = False,
    batches: Annotated[bool, typer.Option("--batches", help="Find the largest batch that fits into the GPU.")] = False,
    memory: Annotated[int | None, typer.Option(help="GiB that the largest batch may take; else all.")] = None,
    windows: Annotated[str, typer.Option(help="Local windows w to measure, too, separated by commas.")] = "",
    models: Annotated[
        str, typer.Option(help="Which to measure, separated by commas.")
    ] = "unfused,roberta,twin,linformer",
    out: Out = Path("runs/bench"),
) -> None:
    """Time and memory over (n, k), beside the Transformers that a user would pick instead."""
    from .benchmark import report

    settings = report.Settings(
        lengths=whole_numbers("lengths", lengths),
        projected=whole_numbers("projected", projected),
        tokens=tokens or None,
        layers=layers,
        hidden=hidden,
        tasks=task.split(","),
        models=models.split(","),
        compiled=compiled,
        dropout=dropout,
        sharing=sharing,
        projection=projection,
        batches=batches,
        memory=memory,
        windows=whole_numbers("windows", windows, "16,32") if windows else (),
    )
    report.run(settings, out=out, command=_command(), console=console)


@app.command()
def theorems(
    model: Annotated[Path | None, typer.Option(help="Folder of an encoder whose q, k, v are tested, too.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text that it reads: a file or a folder.")] = None,
    layer: Annotated[int | None, typer.Option(help="Its layer, from 1; by default the one halfway up.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths n, separated by commas.")
    ] = "128,256,512,1024,2048,4096,8192,16384",
    dims: Annotated[str, typer.Option(help="Channels d of random heads, separated by commas.")] = "32,64",
    epsilon: Annotated[str, typer.Option(help="Errors ε, separated by commas.")] = "0.1,0.2,0.5",
    draws: Annotated[int, typer.Option(help="Draws of R in each setting.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few lengths, draws and steps: a look in seconds.")] = False,
    out: Out = Path("runs/theorems"),
) -> None:
    """The paper's lemma and theorems, tested on random inputs and on a pretrained layer; four minutes on two cores."""
    from .analysis import theorem_report

    _quiet()
    settings = theorem_report.Settings(
        lengths=whole_numbers("lengths", lengths),
        dims=whole_numbers("dims", dims),
        epsilons=fractions("epsilon", epsilon),
        draws=draws,
        seed=seed,
        model=model,
        text=text,
        layer=layer,
    )
    if quick:
        settings = theorem_report.quick(settings)
    theorem_report.run(settings, out=out, command=_command(), console=console)


@app.command()
def spectrum(
    model: Encoder,
    text: Texts,
    length: Length = None,
    sentences: Annotated[int, typer.Option(help="How many passages.")] = 1000,
    at: Annotated[int | None, typer.Option(help="Singular values whose share the heat map shows; else n/4.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of passages.")] = 0,
    text_column: Annotated[str, typer.Option(help="The column of tables that holds the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Threads; by default one for each core.")] = None,
    out: Out = Path("runs/spectrum"),
) -> None:
    """The singular values of P in each layer and head of an encoder, as in the paper's Figure 1."""
    from .analysis import figure1

    _quiet()
    length = _usual_length(model) if length is None else length
    at = max(1, length // 4) if at is None else at
    settings = figure1.Settings(model, text, length, sentences, at, seed, text_column, workers)
    figure1.run(settings, out=out, command=_command(), console=console)


@app.command()
def lowrank(
    model: Encoder,
    text: Texts,
    projected: Annotated[str | None, typer.Option(help="Ranks k, separated by commas; else n/16 to n/2.")] = None,
    length: Length = None,
    passages: Annotated[int, typer.Option(help="Passages that errors are measured on.")] = 4,
    others: Annotated[int, typer.Option(help="Passages that E and F are fitted to beforehand.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps of fitting.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the choice of passages.")] = 0,
    text_column: Annotated[str, typer.Option(help="The column of tables that holds the text.")] = "text",
    out: Out = Path("runs/lowrank"),
) -> None:
    """P replaced by its best rank k in a pretrained encoder (equation 6), beside E and F: error and time."""
    from .analysis import equation6

    _quiet()
    length = _usual_length(model) if length is None else length
    usual = [max(1, length // part) for part in (16, 8, 4, 2)]
    ranks = list(dict.fromkeys(usual)) if projected is None else whole_numbers("projected", projected)
    settings = equation6.Settings(model, text, ranks, length, passages, others, steps, seed, text_column)
    equation6.run(settings, out=out, command=_command(), console=console)


@app.command()
def choose_k(
    model: Encoder,
    text: Texts,
    energy: Annotated[
        float | None, typer.Option(help="The share of P's squared singular values to keep; or give --budget.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="The mean k to spend; or give --energy.")] = None,
    per: Annotated[str, typer.Option(help="A k for each layer or for each head: layer or head.")] = "layer",
    sharing: Annotated[
        str, typer.Option(help="Of E and F in the model to be trained: none, headwise, key-value or layerwise.")
    ] = "headwise",
    length: Length = None,
    sentences: Annotated[int, typer.Option(help="How many passages.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the choice of passages.")] = 0,
    text_column: Annotated[str, typer.Option(help="The column of tables that holds the text.")] = "text",
    out: Out = Path("runs/choose-k"),
) -> None:
    """Choose a projected length for each layer or head from the spectra of an encoder, as a config to train."""
    from .analysis import choose_k, figure1

    _quiet()
    length = _usual_length(model) if length is None else length
    spectrum = figure1.Settings(model, text, length, sentences, 1, seed, text_column)
    settings = choose_k.Settings(spectrum, energy, budget, per, sharing)
    choose_k.run(settings, out=out, command=_command(), console=console)


@app.command()
def reproduce(
    sections: Annotated[
        list[str],
        typer.Argument(
            help="figure1 to figure3, table1 to table3, steps, quality, recall, chosen-k, long; overview, which puts "
            "them together; all; or page, which runs nothing."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Folder of texts and tasks, for everything but table1, table3 and steps.")
    ] = None,
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes, which come with a clone.")] = Path(
        "recipes/small"
    ),
    runs: Annotated[Path, typer.Option(help="Folder for runs; interrupted ones go on from there.")] = Path(
        "runs/reproduce"
    ),
    results: Annotated[Path, typer.Option(help="Folder for results; one of your own has the page, too.")] = Path(
        "results"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Of the runs, those so called; * stands for anything.")] = None,
    at_once: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes; run again to go on.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: a test of the whole path.")] = False,
) -> None:
    """Run the paper's tables and figures again; what is there already is not run twice."""
    from .reproduce import sections as all_sections
    from .reproduce.matrix import Place

    _quiet()
    if small and runs == Path("runs/reproduce"):
        runs = Path("runs/reproduce-small")
    if small and results == Path("results"):  # where nothing tiny belongs
        results = runs / "results"
    place = Place(data, recipes, runs, results, small)
    sys.exit(all_sections.run(sections, place, console, only=only or (), at_once=at_once, minutes=minutes))


def _quiet() -> None:
    """Transformers has progress bars of its own for loading and saving, which say nothing here; the hub's client tells
    of each attempt to reach it, of which we say in a sentence what came.
    """
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a new head for a pretrained encoder is meant
    hub.set_verbosity_error()


def _usual_length(model: str) -> int:
    """The tokens of a passage where nobody says; a hub that is out of reach is tried for half a minute."""
    from .analysis import attentions

    with console.status(f"loading {escape(model)}"):
        return attentions.usual_length(model)


def _command() -> str:
    return shlex.join(["linformers", *sys.argv[1:]])


def main() -> None:
    """Run the command line; what a user got wrong ends in one sentence."""
    run_cli(app)
