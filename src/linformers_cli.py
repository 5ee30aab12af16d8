"""The command line of linformers: one function per command, whose signature is the command's interface.

This module stays outside the package because importing `linformers` also imports torch and transformers, which takes
seconds. Each command imports what it needs after its arguments are parsed, so `--help` and a typo are answered at once.
It passes its arguments on by name: `options`, a copy of `locals()` made before anything else is assigned.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except KeyboardInterrupt:
    sys.exit(130)

if TYPE_CHECKING:
    from rich.console import Console

# Parameters of commands that name columns of tables, and those that decide how much memory it takes.
COLUMNS = ("text", "label", "text_column")
SIZES = ("length", "lengths", "max_length", "batch_size", "contrast_batch_size", "tokens", "recipe")

needs_models = True  # read by `linformers/__init__.py`

# A missing name with one of these endings is a mistyped file; any other may be a task or a dataset on the hub.
TEXT_FILES = (".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".xz")


def _new_folder(name: object) -> Path:
    if not str(name).strip():  # as a path, it would be the current folder
        raise typer.BadParameter(f"{name!r} must be a folder.")
    return Path(str(name))


FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
FOLDER: dict[str, Any] = {"exists": True, "file_okay": False}
NEW_FOLDER: dict[str, Any] = {"parser": _new_folder, "metavar": "PATH"}

Model = Annotated[Path, typer.Option(**FOLDER, help="Folder of a model or checkpoint from pretrain or finetune.")]
StartModel = Annotated[
    Path | None, typer.Option(**FOLDER, help="Folder of a model.", show_default="the bundled English model")
]
TextColumns = Annotated[str, typer.Option(help="Text column of a labeled file; two columns separated by a comma.")]
LabelColumn = Annotated[str, typer.Option(help="Label column of a labeled file.")]
Encoder = Annotated[str, typer.Argument(help="Folder or hub name of an encoder with full attention.")]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a hub name; only a commit never changes.", show_default="main"),
]
Texts = Annotated[
    list[Path], typer.Option(exists=True, help="File or folder of text, jsonl, csv or parquet; can be repeated.")
]
TextColumn = Annotated[str, typer.Option(help="Column of tables that holds the text.")]
Length = Annotated[
    int | None, typer.Option(help="Tokens per passage, n.", show_default="512, or the model's maximum if smaller")
]
Seed = Annotated[int, typer.Option(help="Random seed for drawing the passages.")]
Sharing = Annotated[
    str, typer.Option(help="How heads and layers share E and F: none, headwise, key-value or layerwise.")
]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a batch.", show_default="2048, or 65536 on a GPU")]
Out = Annotated[Path, typer.Option(**NEW_FOLDER, help="Output folder.")]


class Commands(TyperGroup):
    """Reports what the user can fix in one sentence; a bug of ours keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output, such as head, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest of it goes at exit
            raise typer.Exit(128 + 13) from None  # as if SIGPIPE had ended it
        except Exception as error:
            if getattr(error, "option_name", None) == "--device":
                typer.echo("A GPU is used where there is one; CUDA_VISIBLE_DEVICES= hides it.", err=True)
            errors = sys.modules.get("linformers.errors")  # not loaded: the command line itself was wrong
            sentence = None if errors is None or ctx.params["debug"] else errors.explain(error)
            if sentence is None:
                raise
            parameters = self.commands[ctx.invoked_subcommand].params
            sentence = _as_typed(sentence, parameters) + _remedy(error, parameters)
            typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
            typer.echo(sentence, err=True)
            raise typer.Exit(2) from None


def _as_typed(sentence: str, parameters: list[Any]) -> str:
    """Name options as the user types them: `batch_size=0` becomes `--batch-size 0`."""
    names = {parameter.name: parameter.opts[0] for parameter in parameters if parameter.opts[0].startswith("--")}
    if {"projected", "length"} <= names.keys():  # the names in a config
        names |= {"projected_length": "--projected", "local_window": "--window"}
        names |= {"max_position_embeddings": "--length", "max_length": "--length"}
    for name, option in names.items():
        sentence = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", sentence)
    return sentence


def _remedy(error: Exception, parameters: list[Any]) -> str:
    """The options of a command that name another column, or take less memory."""
    from linformers.errors import MissingColumnError, is_out_of_memory

    if isinstance(error, MissingColumnError):
        names = [own for own in parameters if own.name in COLUMNS and isinstance(own.default, str)]
        advice = f"; choose {'one' if len(names) == 1 else 'them'} with"
    elif is_out_of_memory(error):
        names, advice = [own for own in parameters if own.name in SIZES], ": use a smaller"
    else:
        return ""
    options = [own.opts[0] if own.name != "recipe" else "rows_at_once=… in the recipe" for own in names]
    return f"{advice} {', '.join(options)}" if options else ""


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"linformers {version('linformers')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    """Linformer: self-attention with linear complexity."""


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files or folders of text, jsonl, csv or parquet; or datasets on the Hugging Face Hub."),
    ],
    out: Annotated[Path, typer.Option(**NEW_FOLDER, help="Output folder for the tokenizer and the tokens.")],
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of the tokenizer to train.")] = 16384,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name of a tokenizer to use instead of training one.")
    ] = None,
    revision: Revision = None,
    validation: Annotated[list[str] | None, typer.Option(help="File or folder to hold out; can be repeated.")] = None,
    validation_share: Annotated[
        float, typer.Option(help="Share of documents to hold out, if --validation is not given.")
    ] = 0.005,
    text_column: TextColumn = "text",
    max_damaged: Annotated[
        float, typer.Option(help="Share of documents that may be damaged: no UTF-8 or text.")
    ] = 0.001,
    tokenizer_documents: Annotated[int, typer.Option(min=1, help="Documents to train the tokenizer on.")] = 12000,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads.", show_default="one per core")] = None,
) -> None:
    """Turn raw text into a tokenizer and token shards for pretraining."""
    options = {**locals(), "validation": validation or ()}
    _check_files("SOURCES", sources)
    _check_files("--validation", validation or [])
    global needs_models
    needs_models = False
    from linformers.training import prepare

    prepare.prepare(**options, console=_console())


@app.command()
def convert(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of a BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT or ELECTRA.")
    ],
    out: Annotated[Path, typer.Option(**NEW_FOLDER, help="New folder for the converted model.")],
    length: Annotated[int, typer.Option(min=1, help="Longest input of the result, n.")] = 4096,
    projected: Annotated[
        int | None, typer.Option(min=1, help="Projected length k.", show_default="256, or n/2 if n is below 512")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=0, help="Local window w.", show_default="64, or n/8 if n is below 512")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Text to compare them on; can be repeated.", show_default="Python's manual"),
    ] = None,
    distill: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Text to train on, so that the result agrees more; can be repeated."),
    ] = None,
    contrast: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="Text to train vectors on, documents against their titles or spans; the result is in OUT-contrastive.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of --distill.", show_default="500")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Documents in a step of --distill.", show_default="8")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of --distill.", show_default="0.0003")
    ] = None,
    contrast_steps: Annotated[int | None, typer.Option(min=1, help="Steps of --contrast.", show_default="250")] = None,
    contrast_batch_size: Annotated[
        int | None, typer.Option(min=2, help="Documents in a step of --contrast.", show_default="48")
    ] = None,
    contrast_learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of --contrast.", show_default="0.00005")
    ] = None,
    revision: Revision = None,
) -> None:
    """Turn an encoder with full attention into a long, linear one, and report how closely they agree."""
    given = {**locals()}
    from linformers.training import adopt

    def settings_of(prefix: str, kind: Any) -> Any:
        """How to train, or `None` if no option says so."""
        names = ("steps", "batch_size", "learning_rate")
        own = {name: value for name in names if (value := given[prefix + name]) is not None}
        return kind(**own) if own else None

    config: dict[str, Any] = {"length": length, "projected_length": projected, "local_window": window}
    texts: dict[str, Any] = {"text": text or (), "distill": distill or (), "contrast": contrast or ()}
    options = {
        "settings": settings_of("", adopt.Settings),
        "contrast_settings": settings_of("contrast_", adopt.Contrast),
        "revision": revision,
        "console": _console(),
    }
    raise typer.Exit(adopt.adopt(model, out, **texts, **options, **config, command=_command()))


@app.command()
def contrast(
    model: Annotated[Path, typer.Argument(**FOLDER, help="Folder of a pretrained Linformer.")],
    text: Annotated[
        list[Path],
        typer.Argument(exists=True, help="Text to train on, in files or folders; tables may have a column title."),
    ],
    out: Annotated[Path, typer.Option(**NEW_FOLDER, help="New folder for the result.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 250,
    batch_size: Annotated[int, typer.Option(min=2, help="Documents in a step, each a negative of the others.")] = 48,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-5,
) -> None:
    """Train a model for search: match documents to their titles or spans; run it again to continue after a stop."""
    from linformers.training import contrast

    settings = contrast.Contrast(steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    raise typer.Exit(contrast.contrast(model, text, out, settings, console=_console(), command=_command()))


@app.command()
def pretrain(
    recipe: Annotated[Path, typer.Argument(**FILE, help="Recipe file, such as recipes/cpu.yaml.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe: steps=100 model.projection=identity …")
    ] = None,
) -> None:
    """Pretrain a model by masked-language modeling; run it again to continue from the newest checkpoint."""
    from linformers.training import pretrain

    raise typer.Exit(pretrain.pretrain(recipe, changes or [], console=_console(), command=_command()))


@app.command()
def finetune(
    task: Annotated[str, typer.Argument(help="sst2, imdb, qnli, qqp, or a labeled csv, jsonl or parquet file.")],
    out: Annotated[Path, typer.Option(**NEW_FOLDER, help="Output folder for the results and the best model.")],
    model: StartModel = None,
    data: Annotated[
        Path | None,
        typer.Option(**FOLDER, help="Folder that holds a named TASK, such as DATA/sst2.", show_default="the hub"),
    ] = None,
    test: Annotated[Path | None, typer.Option(**FILE, help="Labeled file to report on, if TASK is a file.")] = None,
    validation: Annotated[
        Path | None, typer.Option(**FILE, help="Labeled file to select on, or to report on without --test.")
    ] = None,
    text: TextColumns = "text",
    label: LabelColumn = "label",
    problem: Annotated[
        str | None,
        typer.Option(help="single (one label), multi (a list of labels) or regression.", show_default="what fits"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 32,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", "--lr", help="Peak learning rate.", show_default="what fits the model's size"),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Maximum tokens per text; 0 for the model's maximum.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, bf16 or float32.")] = "auto",
    compile: Annotated[str, typer.Option(help="Compile the model: yes, no or auto (if worthwhile).")] = "auto",
) -> None:
    """Fine-tune a model to predict labels or numbers, and report its scores over several seeds."""
    options = {**locals()}
    _check_files("TASK", [task])
    from linformers import shipped
    from linformers.training import finetune

    options["model"] = model or shipped.ENGLISH
    raise typer.Exit(finetune.finetune(**options, console=_console(), command=_command()))


@app.command()
def embed(
    files: Annotated[
        list[Path], typer.Argument(exists=True, help="Files or folders of text, jsonl, csv or parquet; in this order.")
    ],
    out: Annotated[Path, typer.Option(help="New .npy file (ids and a description appear beside it) or .parquet file.")],
    model: StartModel = None,
    pooling: Annotated[
        str | None, typer.Option(help="mean, or cls for the first token.", show_default="what the model's folder says")
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Give vectors length 1.")] = True,
    prompt: Annotated[
        str, typer.Option(help="Prefix of each text: document, query, none, or a name in the model's folder.")
    ] = "document",
    late_chunks: Annotated[
        int | None,
        typer.Option(min=1, metavar="SIZE", help="A vector for each SIZE tokens, after the whole document was read."),
    ] = None,
    text: Annotated[str, typer.Option(help="Column of tables that holds the text.")] = "text",
    id: Annotated[str, typer.Option(help="Column of tables that holds an id, if there is one.")] = "id",
    tokens: Tokens = None,
    precision: Annotated[str, typer.Option(help="auto, bf16 or float32.")] = "auto",
    compile: Annotated[str, typer.Option(help="Compile the model: yes, no or auto (if worthwhile).")] = "auto",
) -> None:
    """Turn documents of any length into vectors; run it again to continue after a stop."""
    options = {**locals()}
    from linformers.training import embed

    embed.embed_files(options.pop("files"), **options, console=_console(), command=_command())


@app.command()
def search(
    vectors: Annotated[Path, typer.Argument(**FILE, help="Output of linformers embed.")],
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    model: Annotated[
        Path | None, typer.Option(**FOLDER, help="Folder of the model.", show_default="the model of the vectors")
    ] = None,
    best: Annotated[int, typer.Option(min=1, help="Number of documents to show.")] = 5,
    passages: Annotated[bool, typer.Option(help="Show the best passage of each document.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per document.")] = False,
) -> None:
    """Find the documents whose vectors are nearest to a query, each with its best passage."""
    options = {**locals()}
    from linformers.training import search

    search.search(options.pop("vectors"), **options, console=_console(), terminal=_console(stderr=True))


@app.command()
def predict(
    file: Annotated[
        Path | None,
        typer.Argument(**FILE, help="Table, or file with a text in each line.", show_default="standard input"),
    ] = None,
    model: StartModel = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New .jsonl, .csv or .parquet file.", show_default="standard output, as JSON lines"),
    ] = None,
    text: Annotated[str, typer.Option(help="Text column of a table; two columns separated by a comma.")] = "text",
    pairs: Annotated[bool, typer.Option("--pairs", help="Each line holds two texts separated by a tab.")] = False,
    best: Annotated[int, typer.Option(min=1, help="Number of guesses for a mask.")] = 5,
    tokens: Tokens = None,
) -> None:
    """Predict the label, labels or number of each text, or fill in its <mask>."""
    from linformers import shipped
    from linformers.training import predict

    options: dict[str, Any] = {"text": text, "pairs": pairs, "best": best, "tokens": tokens}
    predict.predict(model or shipped.ENGLISH, file, out or sys.stdout, **options, console=_console(stderr=out is None))


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        Path | None,
        typer.Option(**FOLDER, help="Output of prepare; with a named --task, the folder that holds it."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task or labeled file to score instead of perplexity.")] = None,
    text: TextColumns = "text",
    label: LabelColumn = "label",
    rows: Annotated[int, typer.Option(min=1, help="Number of validation rows for the perplexity.")] = 1024,
    mask_share: Annotated[float, typer.Option(help="Share of tokens to mask for the perplexity.")] = 0.15,
    without: Annotated[str | None, typer.Option(help="Keys to leave out: projected or window.")] = None,
) -> None:
    """Measure the perplexity of a model on a prepared corpus, or its scores on a task."""
    options = {**locals()}
    _check_files("--task", [task] if task else [])
    from linformers.training import predict

    _console().print_json(data=predict.evaluate(**options, console=_console(stderr=True)))


@app.command()
def resize(
    model: Annotated[Path, typer.Argument(**FOLDER, help="Folder of a model.")],
    length: Annotated[int, typer.Option(min=1, help="Longest input of the result, n.")],
    out: Annotated[Path, typer.Option(**NEW_FOLDER, help="New folder for the result.")],
    projected: Annotated[int | None, typer.Option(min=1, help="Projected length k.", show_default="as it is")] = None,
) -> None:
    """Change a model's maximum input length."""
    options = {**locals()}
    from linformers.training import resize

    resize.resize(**options, console=_console(), command=_command())


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(**FOLDER, help="Folder of a model or checkpoint.")],
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept the files as they are and rewrite manifest.json.")
    ] = False,
) -> None:
    """Compare the files of a model or checkpoint with the sizes and hashes in its manifest.json."""
    from linformers.training import checkpoints

    checkpoints.verify(folder, accept, _console())


@app.command()
def demo(
    pretrain: Annotated[
        bool, typer.Option("--pretrain", help="Instead, pretrain Linformers and a Transformer: three to five minutes.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --pretrain, training steps of each model.", show_default="600")
    ] = None,
    out: Out = Path("runs/demo"),
) -> None:
    """Embed and search Python's documentation, and time full attention beside it: two minutes on two cores, offline."""
    if steps is not None and not pretrain:
        raise typer.BadParameter(f"{steps} has no effect without --pretrain.", param_hint="--steps")
    from linformers import demo

    if pretrain:
        raise typer.Exit(demo.run_pretraining(steps or 600, out, _console()))
    demo.run(out, _console())


@app.command()
def bench(
    lengths: Annotated[str, typer.Option(help="Sequence lengths n, separated by commas.")] = "512,1024,2048,4096",
    projected: Annotated[str, typer.Option(help="Projected lengths k, separated by commas.")] = "64,128,256",
    tokens: Annotated[int, typer.Option(min=0, help="Tokens per pass; 0 for one sequence per pass.")] = 8192,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size; each head has 64 channels.")] = 256,
    task: Annotated[str, typer.Option(help="inference, training, or both separated by a comma.")] = "inference",
    sharing: Sharing = "layerwise",
    projection: Annotated[str, typer.Option(help="Projection: linear, mean, max or conv.")] = "linear",
    dropout: Annotated[float, typer.Option(help="Dropout during training.")] = 0.0,
    compile: Annotated[bool, typer.Option("--compile", help="Also measure compiled models; takes minutes.")] = False,
    batches: Annotated[bool, typer.Option("--batches", help="Find the largest batch that fits on the GPU.")] = False,
    memory: Annotated[
        int | None, typer.Option(min=1, help="GPU memory in GiB for --batches.", show_default="all")
    ] = None,
    windows: Annotated[str, typer.Option(help="Local windows w to measure too, separated by commas.")] = "",
    rotary: Annotated[bool, typer.Option("--rotary", help="Rotary instead of learned positions.")] = False,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Rows of n/4 to n tokens, padded to n, with an attention mask.")
    ] = False,
    models: Annotated[
        str | None,
        typer.Option(help="Models: linformer, twin, unfused (not with --ragged), roberta.", show_default="all"),
    ] = None,
    out: Out = Path("runs/bench"),
) -> None:
    """Measure time and memory for each n and k, compared with standard Transformers."""
    options = {**locals(), "tokens": tokens or None, "task": task.split(",")}
    options["models"] = (models or ("" if ragged else "unfused,") + "roberta,twin,linformer").split(",")
    options |= {"lengths": whole_numbers("--lengths", lengths), "projected": whole_numbers("--projected", projected)}
    options["windows"] = whole_numbers("--windows", windows) if windows else []
    from linformers.benchmark import efficiency

    efficiency.run(**options, command=_command(), console=_console())


@app.command()
def spectrum(
    model: Encoder,
    text: Texts,
    revision: Revision = None,
    length: Length = None,
    sentences: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 1000,
    at: Annotated[
        int | None, typer.Option(help="Number of singular values whose share the heat map shows.", show_default="n/4")
    ] = None,
    seed: Seed = 0,
    text_column: TextColumn = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads.", show_default="one per core")] = None,
    out: Out = Path("runs/spectrum"),
) -> None:
    """Measure the singular values of P in each layer and head of an encoder, as in the paper's Figure 1."""
    options = {**locals(), "text": list(map(str, text))}
    from linformers.analysis import spectrum

    spectrum.run(**options, command=_command(), console=_console())


@app.command()
def choose_k(
    model: Encoder,
    text: Texts,
    revision: Revision = None,
    energy: Annotated[float | None, typer.Option(help="Share of P's squared singular values to keep.")] = None,
    budget: Annotated[int | None, typer.Option(help="Mean k to choose, instead of --energy.")] = None,
    per: Annotated[str, typer.Option(help="Choose one k per layer or per head.")] = "layer",
    sharing: Sharing = "headwise",
    length: Length = None,
    sentences: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 200,
    seed: Seed = 0,
    text_column: TextColumn = "text",
    out: Out = Path("runs/choose-k"),
) -> None:
    """Choose a projected length k per layer or head from an encoder's spectra, and write a config to train."""
    options = {**locals(), "text": list(map(str, text))}
    from linformers.analysis import choose_k

    choose_k.run(**options, command=_command(), console=_console())


def run_script(script: Callable[[], object]) -> None:
    """Run a script of `paper/` or `benchmarks/`; an error that the user can fix ends it with one sentence."""
    from linformers.errors import explain

    try:
        script()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if (sentence := explain(error)) is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as `512,1024`, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} must be positive integers separated by commas.", param_hint=option)
    return list(dict.fromkeys(map(int, parts)))


def _check_files(option: str, names: list[str]) -> None:
    """Refuse a missing file before the slow imports; a name without an ending may be a task or a dataset."""
    for name in names:
        if Path(name).suffix in TEXT_FILES and not Path(name).exists():
            raise typer.BadParameter(f"File {name!r} does not exist.", param_hint=option)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    _quiet()
    file: Any = _Output(sys.stderr if stderr else sys.stdout)
    # A file gets no control characters, whatever FORCE_COLOR says.
    return Console(file=file, force_terminal=file.isatty())


class _Output:
    """Standard output or error; once its reader or terminal is gone, a command goes on, and what it prints is lost."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, text: str) -> int:
        try:
            self.file.write(text)
            self.file.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        return len(text)

    def flush(self) -> None:
        self.write("")


def _quiet() -> None:
    """Silence transformers' progress bars and the hub client's retries: our own messages say what matters."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity_error()


def _command() -> str:
    return shlex.join(["linformers", *sys.argv[1:]])


def answer_interrupts() -> None:
    """From now on, Ctrl-C ends the process at once and without a traceback; files are written atomically.

    An exception might arise inside an import or a destructor, which print, replace or lose it. A signal that is ignored
    from the start, as in the background of a script, stays ignored.
    """

    def stop(number: int, frame: Any, os: Any = os) -> None:  # `os` is bound until the interpreter ends
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # bars hide the cursor
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:  # the next file that is opened would take its place
        print("error: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
        sys.exit(2)
    answer_interrupts()
    for argument in sys.argv[1:]:
        if not argument.isprintable() and any("\udc80" <= letter <= "\udcff" for letter in argument):
            print(f"error: {argument!a} is not text in the encoding of your locale; set PYTHONUTF8=1", file=sys.stderr)
            sys.exit(2)
    try:
        app(prog_name="linformers")
    except SystemExit as ended:
        # Under torchrun, threads of the process group may still hold tensors while Python shuts down, which aborts.
        if isinstance(ended.code, int) and "TORCHELASTIC_RUN_ID" in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)
        raise
