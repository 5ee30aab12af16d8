"""A corpus of a few kilobytes, recipes that train on it in a second, and helpers for tables and damage."""

import csv
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console
from safetensors.numpy import load_file

from linformers.training import pretrain
from linformers.training.prepare import prepare
from linformers.training.recipe import Recipe
from linformers.training.trainer import read_metrics

QUIET = Console(quiet=True)
WORDS = ("the", "a", "quick", "brown", "fox", "dog", "jumps", "over", "lazy", "and", "sleeps", "under", "tree", "of")
MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODEL |= {"max_position_embeddings": 32, "projected_length": 8}
RECIPE = {"steps": 24, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 4, "short_rows": 0.2, "workers": 0}
RECIPE |= {"log_every": 3, "eval_every": 8, "eval_rows": 8, "save_every": 5, "compile": "no"}


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_table(path: Path, rows: list[dict]) -> Path:
    """Rows as a table of the type that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if ".jsonl" in path.suffixes:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ".tsv" in path.suffixes else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def corpus(folder: Path) -> Path:
    """Sentences of a few words, some more frequent than others."""
    random = np.random.default_rng(0)
    lines = [" ".join(WORDS[min(int(random.exponential(4)), 13)] for _ in range(40)) for _ in range(200)]
    text = write_table(folder / "text.jsonl", [{"text": f"{line}."} for line in lines])
    prepare([str(text)], folder / "corpus", vocab_size=300, validation_share=0.1, workers=1, console=QUIET)
    return folder / "corpus"


def labeled(folder: Path) -> Path:
    """Labeled tables; each kind of sentence has its own words."""
    random = np.random.default_rng(0)
    for name, count in (("train", 160), ("test", 40)):
        texts = [" ".join(random.choice(WORDS[6 * (i % 2) :][:6], size=12)) for i in range(count)]
        rows = [{"sentence": text, "kind": ("dogs", "trees")[i % 2]} for i, text in enumerate(texts)]
        write_table(folder / f"{name}.csv", rows)
    return folder


def recipe(data: Path, out: Path, **fields) -> Recipe:
    fields = {**RECIPE, "deterministic": torch.cuda.is_available(), **fields}
    return Recipe(data=str(data), out=str(out), **fields | {"model": {**MODEL, **fields.get("model", {})}})


def train(recipe: Recipe) -> int:
    return pretrain.run(recipe, QUIET, "test")


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out) if "loss" in record]


def final_state(out: Path, step: int = 24) -> dict[str, np.ndarray]:
    """The weights and the optimizer at the end of a run."""
    folder = out / f"checkpoint-{step}"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def assert_same_run(out: Path, other: Path, step: int = 24) -> None:
    """Weights, optimizer and all logged numbers except times are the same, bit for bit."""
    own, expected = final_state(out, step), final_state(other, step)
    assert own.keys() == expected.keys()
    for name, value in own.items():
        assert value.tobytes() == expected[name].tobytes(), name
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [[{name: r[name] for name in kept if name in r} for r in read_metrics(run)] for run in (out, other)]
    assert logs[0] == logs[1]
    assert sum("loss" in record for record in logs[0]) == step // 3
    for name in ("config.json", "model.safetensors"):
        assert (out / "model" / name).read_bytes() == (other / "model" / name).read_bytes()
