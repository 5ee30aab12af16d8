"""Recipes of distillation: how much a converted encoder agrees with the original on held-out texts that fit.

    python -m benchmarks.distillation MODEL --text FILE --held-out FILE --steps 500

A recipe is one of `RECIPES` or its fields, as in `--recipe short=0.5,cosine=1`. Recipes that are in the result already
are not repeated, and an interrupted one resumes.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from benchmarks.vectors import embed
from rich.console import Console
from rich.table import Table

from linformers import convert
from linformers.checks import make_folder
from linformers.errors import UserError
from linformers.pooling import Pooling
from linformers.provenance import commit, environment
from linformers.training import adopt, distill
from linformers.training.corpus import open_tokenizer
from linformers.training.data import find_files
from linformers.training.predict import BRANCHES, without_branch
from linformers.training.rows import special_tokens
from linformers_cli import run_script

# Fields of `distill.Settings`, where `mixers` is a share of the steps, and of `convert.from_pretrained`.
RECIPES: dict[str, dict[str, Any]] = {
    "hidden states": {},
    "mixers first": {"mixers": 0.3},
    "window dropped": {"without_window": 0.2},
    "short": {"short": 0.5},
    "cosine": {"cosine": 1.0},
    "rate 1e-4": {"learning_rate": 1e-4},
    "rate 1e-3": {"learning_rate": 1e-3},
    "E 1/3": {"projection_scale": 1 / 3},  # relative to the default
    "E 3": {"projection_scale": 3.0},
    "short, cosine": {"short": 0.5, "cosine": 1.0},
    "all": {"mixers": 0.3, "without_window": 0.2, "short": 0.5, "cosine": 1.0},
}
FIELDS = ("mixers", "without_window", "short", "cosine", "learning_rate", "batch_size", "projection_scale")
SHORTEST = 16


def recipe_of(text: str) -> dict[str, Any]:
    """A named recipe, or one that is written out."""
    if text in RECIPES:
        return RECIPES[text]
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    for name, value in fields.items():
        if name not in FIELDS or not value:
            raise UserError(f"recipe={text!r} is not one of {', '.join(RECIPES)}, nor made of {', '.join(FIELDS)}")
    return {name: int(value) if name == "batch_size" else float(value) for name, value in fields.items()}


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of an encoder without a head.")],
    text: Annotated[list[Path], typer.Option(exists=True, help="Text to train on; can be repeated.")],
    held_out: Annotated[list[Path], typer.Option(exists=True, help="Text to compare on; can be repeated.")],
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe; can be repeated.", show_default="all")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each recipe.")] = 500,
    length: Annotated[int, typer.Option(min=1, help="n of the result.")] = 4096,
    projected: Annotated[int, typer.Option(min=1, help="Projected length k.")] = 256,
    window: Annotated[int, typer.Option(min=1, help="Local window w.")] = 64,
    passages: Annotated[int, typer.Option(min=3, help="Number of passages to compare on.")] = 256,
    documents: Annotated[int, typer.Option(min=2, help="Most rows to train on.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/distillation"),
) -> None:
    """Compare recipes of distillation."""
    make_folder("out", out)
    recipes, console = {name: recipe_of(name) for name in recipe or RECIPES}, Console()
    original, tokenizer = convert.load_original(model), open_tokenizer(model, f"model={model!r}")
    limit = original.config.max_position_embeddings - convert.unused_positions(original.config)
    before, after = special_tokens(tokenizer)
    adopt.PASSAGES = passages
    full = adopt.encode_passages(tokenizer, adopt.read(find_files(held_out)), limit)
    # The same passages, cut to random lengths.
    ends = np.random.default_rng(0).integers(min(SHORTEST, limit // 2), limit + 1, size=len(full))
    cut = [[*row[: end - len(after)], *after] for row, end in zip(full, ends, strict=True)]
    sets = {f"{limit} tokens": full, f"up to {limit} tokens": cut}
    rows = distill.encode_documents(find_files(text), tokenizer, length, before, after)
    if len(rows) > documents:
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:documents]]
    pooling = Pooling.of(adopt.source_folder(model, None))
    expected = {name: embed(original, own, pooling.pool) for name, own in sets.items()}

    def agreement(network: Any) -> dict[str, dict[str, float]]:
        return {name: adopt.agreement(embed(network, own, pooling.pool), expected[name]) for name, own in sets.items()}

    path = out / "recipes.json"
    record = {"command": shlex.join(["python", "-m", "benchmarks.distillation", *sys.argv[1:]]), "commit": commit()}
    record |= {**environment(), "model": model, "steps": steps, "seed": seed, "documents": len(rows)}
    record |= {"n": length, "k": projected, "w": window, "passages": len(full)}
    done = json.loads(path.read_text())["rows"] if path.exists() else {}
    shape = {"length": length, "projected_length": projected, "local_window": window}
    default = convert.from_pretrained(original, **shape).config.resolved().projection_scale
    for name, fields in {"copied": None, **recipes}.items():
        if name in done and done[name]["recipe"] == fields and done[name]["steps"] == (steps if fields else 0):
            continue
        fields = {} if fields is None else {"steps": steps, "seed": seed, **fields}
        config = {"projection_scale": default * fields.pop("projection_scale", 1.0), **shape}
        student, began = convert.from_pretrained(original, **config), time.perf_counter()
        if fields:
            settings = distill.Settings(mixer_steps=int(fields.pop("mixers", 0) * steps), **fields)
            recorded = {"model": model, "config": config, "hash": distill.rows_hash(rows)}
            run = out / f"run-{name.replace('/', '_')}"
            sizes = {"chunk": limit, "special": (len(before), len(after)), "first_token": pooling.mode == "cls"}
            if code := distill.distill(student, original, rows, run, settings, recorded, console, **sizes):
                raise typer.Exit(code)
            distill.clean(run)
        row: dict[str, Any] = {"recipe": recipes.get(name), "steps": steps if fields else 0}
        row |= {
            "seconds": time.perf_counter() - began,
            **agreement(copy.deepcopy(student)),
        }  # the student itself may be compiled
        for branch in BRANCHES:
            row[f"without {branch}"] = agreement(without_branch(copy.deepcopy(student), branch))
        done[name] = row
        path.write_text(json.dumps({**record, "rows": done}, indent=1) + "\n")
        del student
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    console.print(table_of(done, list(sets)))


def table_of(rows: dict[str, Any], sets: list[str]) -> Table:
    """Cosine and correlation; the ablations on passages of any length."""
    parts = [f"without {branch}" for branch in BRANCHES]
    table = Table("recipe", "seconds", *sets, *parts, title="Cosine with the original / correlation of similarities")
    for recipe, row in rows.items():
        cells = [*(row[name] for name in sets), *(row[part][sets[-1]] for part in parts)]
        texts = [" / ".join(f"{value:.3f}" for value in cell.values()) for cell in cells]
        table.add_row(recipe, f"{row['seconds']:.0f}", *texts)
    return table


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
