"""Non-uniform projected lengths, section 4 of the paper: which k each layer or head needs, from the spectra of P."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..benchmark.efficiency import Cell, Contender, make_run, mebibytes, milliseconds
from ..benchmark.measure import best_device, interleaved, peak_memory
from ..benchmark.report import markdown
from ..checks import check_choice, check_size, make_folder
from ..config import SHARINGS, LinformerConfig
from ..errors import UserError
from ..provenance import commit, environment
from . import figure1
from .attentions import load_encoder

# What a k is rounded up to where it is free: a tile of a matrix product.
STEP = 8
PER = ("layer", "head")
# What a recipe must have in common with the model that was looked at; and what it must not say otherwise.
RECIPE_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "sharing",
    "projection",
    "projection_scale",
)

Lengths = list[int] | list[list[int]]


@dataclass(frozen=True)
class Settings:
    """How to choose.

    Attributes:
        spectrum: which model and texts, and how many passages.
        energy: the share of the squared singular values of P to keep; or
        budget: the mean k to spend.
        per: a k for each `"layer"` or `"head"`.
        sharing: of the model that is to be trained.
    """

    spectrum: figure1.Settings
    energy: float | None = None
    budget: int | None = None
    per: str = "layer"
    sharing: str = "headwise"

    def check(self) -> None:
        self.spectrum.check()
        check_choice("per", self.per, PER)
        check_choice("sharing", self.sharing, SHARINGS)
        if (self.energy is None) == (self.budget is None):
            raise UserError(f"energy={self.energy} and budget={self.budget}: give one of them")
        if self.energy is not None and not 0 < self.energy < 1:
            raise UserError(f"energy={self.energy} must be a share: above 0 and below 1")
        if self.budget is not None:
            check_size("budget", self.budget)
            if self.budget >= self.spectrum.length:
                raise UserError(f"budget={self.budget} must be below length={self.spectrum.length}")


def smallest(energy: np.ndarray, share: float) -> np.ndarray:
    """The least k at which a curve (…, n) reaches a share."""
    return (energy < share).sum(-1) + 1


def choose(energy: np.ndarray, share: float, *, per: str, sharing: str) -> Lengths:
    """A k for each layer or head that keeps a share of the energy, (layers, heads, n), on average over passages.

    Heads or layers that share one E take means of its columns, so there each k must divide the largest.
    """
    curves = energy if per == "head" else energy.mean(1, keepdims=True)
    wanted = smallest(curves, share)  # (layers, heads or 1)
    if sharing == "layerwise":
        wanted = to_divisors(wanted, energy.shape[-1])
    elif per == "head" and sharing != "none":
        wanted = np.stack([to_divisors(layer, energy.shape[-1]) for layer in wanted])
    else:
        wanted = np.minimum(-(-wanted // STEP) * STEP, energy.shape[-1])
    return wanted.tolist() if per == "head" else wanted[:, 0].tolist()


def to_divisors(wanted: np.ndarray, n: int) -> np.ndarray:
    """Round up to divisors of the largest, which is a power of two or three times one, so that there are many."""
    sizes = [2**i * odd for i, odd in itertools.product(range(3, 20), (1, 3)) if 2**i * odd < n]
    largest = min(size for size in (*sizes, n) if size >= wanted.max())
    divisors = np.array([i for i in range(1, largest + 1) if largest % i == 0])
    return divisors[np.searchsorted(divisors, wanted)]


def within_budget(energy: np.ndarray, budget: int, *, per: str, sharing: str) -> tuple[Lengths, float]:
    """The choice that keeps the largest share for a mean k of at most `budget`, and that share."""
    shares = 1 - np.geomspace(0.5, 1e-6, 400)
    choices = [(choose(energy, share, per=per, sharing=sharing), float(share)) for share in shares]
    affordable = [(lengths, share) for lengths, share in choices if np.mean(lengths) <= budget]
    if not affordable:
        raise UserError(f"budget={budget} is too small: half of the energy takes a mean k of {np.mean(choices[0][0])}")
    return affordable[-1]


def variants(chosen: Lengths, n: int) -> dict[str, Lengths]:
    """The choice beside others of the same cost: uniform, and the same numbers falling or rising with the layer."""
    uniform = min(n, max(1, round(float(np.mean(chosen)) / STEP)) * STEP)
    found: dict[str, Lengths] = {"uniform": [uniform] * len(chosen), "chosen": chosen}
    if not isinstance(chosen[0], list):
        found |= {"decreasing": sorted(chosen, reverse=True), "increasing": sorted(chosen)}
    return {name: lengths for name, lengths in found.items() if name == "chosen" or lengths != chosen}


def kept(lengths: Lengths, energy: np.ndarray) -> np.ndarray:
    """The share of the energy that projected lengths keep, (layers, heads)."""
    by_head = np.broadcast_to(np.array(lengths).reshape(len(lengths), -1), energy.shape[:2])
    return np.take_along_axis(energy, by_head[:, :, None] - 1, -1)[:, :, 0]


def run(settings: Settings, *, out: Path, command: str, console: Console) -> Lengths:
    """Choose, measure what it costs, and write `choose-k.json`, `choose-k.md` and `config.json` to `out`."""
    settings.check()
    make_folder("out", out)
    where = {"command": command, "commit": commit(), **environment(), "model": settings.spectrum.model}
    model, tokenizer = load_encoder(settings.spectrum.model)
    spectrum = figure1.measured(settings.spectrum, model, tokenizer, out, console)
    how: dict[str, Any] = {"per": settings.per, "sharing": settings.sharing}
    if settings.energy is not None:
        chosen, share = choose(spectrum.energy, settings.energy, **how), settings.energy
    else:
        assert settings.budget is not None
        chosen, share = within_budget(spectrum.energy, settings.budget, **how)
    found = variants(chosen, settings.spectrum.length)
    fields = model_fields(model.config, tokenizer)
    chosen_config = config(fields, chosen, settings)
    refuse_other(out / "config.json", chosen_config)
    with console.status("measuring time and memory"):
        cells = costs(found, {**fields, "sharing": settings.sharing}, settings.spectrum.length)

    table = Table("projected length", "mean k", "energy kept", "by the least head", "ms", "MiB")
    table.title = "What each choice keeps and costs"
    for (name, lengths), cell in zip(found.items(), cells, strict=True):
        by_head = kept(lengths, spectrum.energy)
        shares = (f"{by_head.mean():.4f}", f"{by_head.min():.4f}")
        table.add_row(name, f"{np.mean(lengths):.1f}", *shares, f"{milliseconds(cell):.1f}", f"{mebibytes(cell):,.0f}")
    groups = ", and heads of different k are computed in groups" if settings.per == "head" else ""
    bought = f"A mean k of at most {settings.budget} buys" if settings.budget else "What was asked for is"
    sizes = {**fields, "max_position_embeddings": settings.spectrum.length, "sharing": settings.sharing}
    sizes |= {"projection": "linear", "projection_scale": "null"}
    changes = [f"model.{name}={sizes[name]}" for name in RECIPE_FIELDS]
    train = [
        "linformers",
        "pretrain",
        "RECIPE",
        "data=DATA",
        "out=OUT",
        f"model.projected_length={json.dumps(chosen)}",
        *changes,
    ]
    lines = [
        f"{bought} {share:.4f} of the energy in each {settings.per}: k = {chosen} (sharing {settings.sharing!r}). The "
        "table has what is kept on average, once k is rounded up.",
        verdict(chosen),
        "The energy is what the best matrix of rank k would keep of P; one pair E, F that serves all inputs keeps less "
        "(linformers lowrank).",
        f"Time and memory are of a pass of {cells[0].batch} sequences in inference; equal costs differ by "
        f"noise{groups}.",
        "config.json is a LinformerConfig. A recipe trains such a model with:",
        shlex.join(train),
    ]
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith("linformers "))
    chosen_config.save_pretrained(out)
    record = {**where, "share": share, **how, "choices": found, "costs": [asdict(cell) for cell in cells]}
    (out / "choose-k.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "choose-k.md").write_text(markdown([table], lines, where, "Which k"), encoding="utf-8")
    console.print(f"Written to {out}", markup=False)
    return chosen


def model_fields(theirs: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The sizes of the model that was looked at, for one that is to be trained; its special tokens."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    kinds = ("hidden_act", "layer_norm_eps", "norm_first", "hidden_dropout_prob", "attention_probs_dropout_prob")
    fields = {name: getattr(theirs, name, None) for name in (*sizes, *kinds)}
    fields["pad_token_id"] = tokenizer.pad_token_id
    for name, other in (("bos", "cls"), ("eos", "sep")):  # BERT's names
        own = getattr(tokenizer, f"{name}_token_id")
        fields[f"{name}_token_id"] = getattr(tokenizer, f"{other}_token_id") if own is None else own
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = getattr(theirs, "hidden_dim", 4 * theirs.hidden_size)  # DistilBERT's name
    return {name: value for name, value in fields.items() if value is not None}


def config(fields: dict[str, Any], lengths: Lengths, settings: Settings) -> LinformerConfig:
    return LinformerConfig(
        **fields,
        max_position_embeddings=settings.spectrum.length,
        projected_length=lengths,
        sharing=settings.sharing,
    )


def refuse_other(path: Path, chosen: LinformerConfig) -> None:
    """Refuse to replace a config by one that says something else."""
    if path.exists() and _lines(path.read_text(encoding="utf-8")) != _lines(chosen.to_json_string()):
        raise UserError(f"{path} is of another choice, or of a model; give another --out, or remove it")


def _lines(text: str) -> list[str]:
    """All that a config says, but for the version of transformers that wrote it."""
    return [line for line in text.splitlines() if "transformers_version" not in line]


def costs(found: dict[str, Lengths], fields: dict[str, Any], n: int) -> list[Cell]:
    """Time and memory of a pass of a model of each choice, on this machine, with random weights."""
    device = best_device()
    dtype, tokens = ("bfloat16", 65536) if device == "cuda" else ("float32", 2048)
    batch = max(1, tokens // n)
    ids = torch.randint(5, 100, (batch, n), device=device)
    runs = {}
    # A benchmark has few words, of which none is special.
    sizes = {name: own for name, own in fields.items() if name != "vocab_size" and not name.endswith("_token_id")}
    for name, lengths in found.items():
        contender = Contender(name, None, {**sizes, "projected_length": lengths})
        runs[name] = make_run(contender.build(n, device, dtype), ids, "inference")
        runs[name]()
    seconds = interleaved(runs)
    return [Cell(name, n, None, batch, "inference", seconds[name], peak_memory(runs[name], device)) for name in found]


def verdict(chosen: Sequence[Any]) -> str:
    """The paper's claim that higher layers can do with a smaller k, asked of this choice."""
    means = [float(np.mean(lengths)) for lengths in chosen]
    half = len(means) // 2
    if half == 0 or len(set(means)) == 1:
        return "All layers need the same k."
    lower, upper = np.mean(means[:half]), np.mean(means[-half:])
    word = "less" if upper < lower else "more"
    return f"The upper half of the layers needs {word} k than the lower: {upper:.0f} against {lower:.0f} on average."
