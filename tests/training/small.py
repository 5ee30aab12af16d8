"""A corpus of a few kilobytes, and recipes that train on it in a second."""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.numpy import load_file

from linformers.training import pretrain
from linformers.training.prepare import prepare
from linformers.training.recipe import Recipe
from linformers.training.trainer import read_metrics

QUIET = Console(quiet=True)
WORDS = ("the", "a", "quick", "brown", "fox", "dog", "jumps", "over", "lazy", "and", "sleeps", "under", "tree", "of")
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "projected_length": 8,
}


def corpus(folder: Path) -> Path:
    """Sentences of a few words, in which some follow others more often."""
    random = np.random.default_rng(0)
    lines = [" ".join(WORDS[min(int(random.exponential(4)), 13)] for _ in range(40)) for _ in range(200)]
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "{line}."}}\n' for line in lines))
    prepare([str(text)], folder / "corpus", vocab_size=300, validation_share=0.1, workers=1, console=QUIET)
    return folder / "corpus"


def recipe(data: Path, out: Path, **fields) -> Recipe:
    defaults = {
        "steps": 24,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "warmup_steps": 4,
        "log_every": 3,
        "eval_every": 8,
        "eval_rows": 8,
        "save_every": 5,
        "workers": 0,
        "short_rows": 0.2,
        "compile": "no",
        "deterministic": torch.cuda.is_available(),
    }
    model = {**MODEL, **fields.pop("model", {})}
    return Recipe(data=str(data), out=str(out), model=model, **{**defaults, **fields})


def train(recipe: Recipe) -> int:
    return pretrain.run(recipe, QUIET, "test")


def final_state(out: Path, step: int = 24) -> dict[str, np.ndarray]:
    """All weights and all of the optimiser at the end of a run."""
    folder = out / f"checkpoint-{step}"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def assert_same_run(out: Path, other: Path, step: int = 24) -> None:
    """Weights, optimiser and every logged number but times are the same, bit for bit."""
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
