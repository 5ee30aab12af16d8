"""A projected length k for each layer or head, from the spectra of P (section 4 of the paper)."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .. import LinformerConfig
from ..checks import check_choice, check_share
from ..config import SHARINGS
from ..errors import UserError
from ..provenance import commit, environment
from . import attentions, spectrum

STEP = 8  # k is rounded up to a multiple of this, where it is free
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
Lengths = list[int] | list[list[int]]


def choose(energy: np.ndarray, share: float, *, per: str, sharing: str) -> Lengths:
    """Choose the smallest k per layer or head that keeps a share of the energy, (layers, heads, n), then round up."""
    curves, n = energy if per == "head" else energy.mean(1, keepdims=True), energy.shape[-1]
    lengths = (curves < share).sum(-1) + 1  # (layers, heads or 1)
    # Layers or heads that share one E average its columns, so each k must divide the largest.
    if sharing == "layerwise":
        lengths = round_to_divisors(lengths, n)
    elif per == "head" and sharing != "none":
        lengths = np.stack([round_to_divisors(layer, n) for layer in lengths])
    else:
        lengths = np.minimum(-(-lengths // STEP) * STEP, n)
    return lengths.tolist() if per == "head" else lengths[:, 0].tolist()


def round_to_divisors(lengths: np.ndarray, n: int) -> np.ndarray:
    """Round the largest up to 2^i or 3 · 2^i, which have many divisors, and the others up to divisors of it."""
    sizes = [2**i * odd for i, odd in itertools.product(range(3, 20), (1, 3)) if 2**i * odd < n]
    largest = min(size for size in (*sizes, n) if size >= lengths.max())
    divisors = np.array([i for i in range(1, largest + 1) if largest % i == 0])
    return divisors[np.searchsorted(divisors, lengths)]


def within_budget(energy: np.ndarray, budget: int, *, per: str, sharing: str) -> tuple[Lengths, float]:
    """Choose the lengths that keep the largest share of the energy with a mean k of at most `budget`."""
    shares = 1 - np.geomspace(0.5, 1e-6, 400)
    choices = [(choose(energy, share, per=per, sharing=sharing), float(share)) for share in shares]
    affordable = [(lengths, share) for lengths, share in choices if np.mean(lengths) <= budget]
    if not affordable:
        raise UserError(f"budget={budget} is too small: half of the energy takes a mean k of {np.mean(choices[0][0])}")
    return affordable[-1]


def variants(chosen: Lengths, n: int) -> dict[str, Lengths]:
    """Return the choice beside others of the same cost: uniform, and sorted to decrease or increase with the layer."""
    uniform = min(n, max(1, round(float(np.mean(chosen)) / STEP)) * STEP)
    choices: dict[str, Lengths] = {"uniform": [uniform] * len(chosen), "chosen": chosen}
    if not isinstance(chosen[0], list):
        choices |= {"decreasing": sorted(chosen, reverse=True), "increasing": sorted(chosen)}
    return {name: lengths for name, lengths in choices.items() if name == "chosen" or lengths != chosen}


def kept_energy(lengths: Lengths, energy: np.ndarray) -> np.ndarray:
    """Return the share of the energy that these lengths keep in each head, (layers, heads)."""
    by_head = np.broadcast_to(np.array(lengths).reshape(len(lengths), -1), energy.shape[:2])
    return np.take_along_axis(energy, by_head[:, :, None] - 1, -1)[:, :, 0]


def run(
    model: str,
    text: list[str],
    *,
    energy: float | None,
    budget: int | None,
    per: str,
    sharing: str,
    length: int | None,
    out: Path,
    command: str,
    console: Console,
    revision: str | None = None,
    **sampling: Any,
) -> Lengths:
    """Choose k and write `choose-k.json` and `config.json` to `out`; `sampling` is passed to `spectrum.run`."""
    check_choice("per", per, ("layer", "head"))
    check_choice("sharing", sharing, SHARINGS)
    if (energy is None) == (budget is None):
        raise UserError(f"energy={energy} and budget={budget}: give exactly one of them")
    encoder, tokenizer = attentions.load_config(model, revision)
    length = length or min(512, tokenizer.model_max_length)
    if energy is not None:
        check_share("energy", energy)
    elif not 1 <= (budget or 0) < length:
        raise UserError(f"budget={budget} must be at least 1 and below length={length}")
    sampling |= {"length": length, "at": None, "workers": None, "out": out, "command": command, "revision": revision}
    measured = spectrum.run(model, text, console=console, **sampling).energy
    if energy is not None:
        chosen, share = choose(measured, energy, per=per, sharing=sharing), energy
    else:
        chosen, share = within_budget(measured, budget or 0, per=per, sharing=sharing)
    fields = model_fields(encoder, tokenizer) | {"max_position_embeddings": length, "sharing": sharing}
    config = LinformerConfig(**fields, projected_length=chosen).resolved()
    if (path := out / "config.json").exists():
        version = '"transformers_version".*'
        if re.sub(version, "", path.read_text()) != re.sub(version, "", config.to_json_string()):
            raise UserError(f"{path} is another choice or another model; remove it or use another --out")

    choices = variants(chosen, length)
    table = Table("projected length", "mean k", "energy kept", "least head", title="What each choice keeps")
    for name, lengths in choices.items():
        kept = kept_energy(lengths, measured)
        table.add_row(name, f"{np.mean(lengths):.1f}", f"{kept.mean():.4f}", f"{kept.min():.4f}")
    console.print(table)
    fields |= {"projection": "linear", "projection_scale": "null", "projected_length": json.dumps(chosen)}
    names = ("projected_length", *SIZES, "max_position_embeddings", "sharing", "projection", "projection_scale")
    changes = shlex.join(f"model.{name}={fields[name]}" for name in names)
    summary = f"Each {per} keeps {share:.4f} of its energy or more with k = {chosen}. To train it:"
    training = f"linformers pretrain RECIPE data=DATA out=OUT {changes}"
    console.print(summary, training, sep="\n", highlight=False, markup=False, soft_wrap=True)
    config.save_pretrained(out)
    record = {"command": command, "commit": commit(), **environment(), "model": model, "revision": revision}
    record |= {"share": share, "per": per, "sharing": sharing, "choices": choices}
    (out / "choose-k.json").write_text(json.dumps(record, indent=1) + "\n")
    return chosen


def model_fields(encoder: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the sizes and special tokens of an encoder as fields of a `LinformerConfig`."""
    names = ("vocab_size", "hidden_act", "layer_norm_eps", "norm_first", "hidden_dropout_prob")
    fields = {name: getattr(encoder, name, None) for name in (*SIZES, *names, "attention_probs_dropout_prob")}
    fields["intermediate_size"] = fields["intermediate_size"] or getattr(encoder, "hidden_dim", 4 * encoder.hidden_size)
    fields["pad_token_id"] = tokenizer.pad_token_id
    for name, bert_name in (("bos_token_id", "cls_token_id"), ("eos_token_id", "sep_token_id")):
        fields[name] = getattr(tokenizer, bert_name if getattr(tokenizer, name) is None else name)
    return {name: value for name, value in fields.items() if value is not None}
