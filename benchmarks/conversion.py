"""Starts of a converted encoder, without any training: how much it agrees with the original on passages that fit.

    python -m benchmarks.conversion MODEL --text FILE

E starts as means or as samples of tokens, shifted from layer to layer or not, and projected keys with different biases.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from linformers import convert
from linformers.checks import make_folder
from linformers.pooling import Pooling
from linformers.progress import progress
from linformers.provenance import commit, environment
from linformers.training import adopt
from linformers.training.corpus import open_tokenizer
from linformers.training.data import find_files
from linformers.training.predict import BRANCHES, without_branch
from linformers_cli import run_script

SAMPLE: dict[str, Any] = {"projection_init": "sample", "shifted_windows": True, "initial_far_bias": -1.0}
MEANS: dict[str, Any] = {"projection_init": "window", "shifted_windows": True, "initial_far_bias": None}
# log 16 is the logarithm of the tokens that a projected key stands for, log 4 half of it.
STARTS: dict[str, dict[str, Any]] = {
    "samples, bias -1": SAMPLE,
    "samples, bias -0.5": {**SAMPLE, "initial_far_bias": -0.5},
    "samples, bias -2": {**SAMPLE, "initial_far_bias": -2.0},
    "samples, no bias": {**SAMPLE, "initial_far_bias": None},
    "samples, bias log 4": {**SAMPLE, "initial_far_bias": 1.386},
    "samples, bias -1, unshifted": {**SAMPLE, "shifted_windows": False},
    "means, no bias": MEANS,
    "means, no bias, unshifted": {**MEANS, "shifted_windows": False},
    "means, bias -1": {**MEANS, "initial_far_bias": -1.0},
    "means, bias log 4": {**MEANS, "initial_far_bias": 1.386},
    "means, bias log 16": {**MEANS, "initial_far_bias": 2.773},
    "samples, bias -1, w = 32": {**SAMPLE, "local_window": 32},
    "samples, bias -1, w = 128": {**SAMPLE, "local_window": 128},
    "samples, bias -1, k = 512": {**SAMPLE, "projected_length": 512},
    "samples, bias -1, n = 8192, k = 512": {**SAMPLE, "length": 8192, "projected_length": 512},
}


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an encoder without a head.")],
    text: Annotated[list[Path], typer.Option(exists=True, help="Text to compare on; can be repeated.")],
    passages: Annotated[int, typer.Option(min=2, help="Number of passages.")] = 96,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/conversion"),
) -> None:
    """Compare starts of a converted encoder with the original."""
    make_folder("out", out)
    adopt.PASSAGES, console = passages, Console()
    original, tokenizer = convert.load_original(model), open_tokenizer(model, f"model={model!r}")
    limit = original.config.max_position_embeddings - convert.unused_positions(original.config)
    ids = torch.tensor(adopt.encode_passages(tokenizer, adopt.read(find_files(text)), limit))
    pooling = Pooling.of(adopt.source_folder(model, None))
    rows: dict[str, dict[str, float]] = {}
    with progress(console) as bars:
        task = bars.add_task("passages", total=(1 + len(STARTS) + len(BRANCHES)) * len(ids))

        def vectors(network: Any) -> torch.Tensor:
            found = []
            for batch in ids.split(adopt.BATCH):
                found.append(adopt.answers_of(network, batch, tokenizer, pooling.pool))
                bars.advance(task, len(batch))
            return torch.cat(found)

        expected = vectors(original)
        for name, start in STARTS.items():
            converted = convert.from_pretrained(original, **{"length": 4096, "projected_length": 256, **start})
            rows[name] = adopt.agreement(vectors(converted), expected)
            for branch in BRANCHES if start is SAMPLE else ():
                ablated = without_branch(copy.deepcopy(converted), branch)
                rows[f"{name}, without {branch}"] = adopt.agreement(vectors(ablated), expected)
    table = Table("start", "cosine", "correlation of similarities")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.4f}" for value in values.values()))
    console.print(table)
    record = {"command": shlex.join(["python", "-m", "benchmarks.conversion", *sys.argv[1:]]), "commit": commit()}
    record |= {**environment(), "passages": len(ids), "tokens": limit, "rows": rows}
    (out / "starts.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
