"""A model to ship with a package: bfloat16, in files small enough for any repository."""

from __future__ import annotations

from pathlib import Path

import torch

from linformers.checks import check_empty_folder
from linformers.errors import UserError
from linformers.pooling import Pooling
from linformers.training.adopt import PURPOSES
from linformers.training.checkpoints import load_any
from linformers.training.pretrain import save_model
from linformers.training.rows import load_tokenizer

MAX_FILE = 16_000_000  # bytes of a file of weights
HEADER = 100_000  # of which its header may have so many


def bundle(model: Path, out: Path) -> None:
    """Write a copy of a model whose weights are rounded to bfloat16, in files of at most `MAX_FILE` bytes.

    The copy loads in float32: most updates of a fine-tuning are too small for bfloat16.
    """
    check_empty_folder("out", out)
    network = load_any(model, PURPOSES, dtype=torch.float32)
    parameters = dict(network.named_parameters())  # tied ones once
    large = [name for name, own in parameters.items() if 2 * own.numel() > MAX_FILE - HEADER]
    if large:
        raise UserError(f"model={str(model)!r} has {large[0]}, which alone takes more than {MAX_FILE:,} bytes")
    weights = {name: own.detach().to(torch.bfloat16) for name, own in parameters.items()}
    card, pooling = model / "README.md", Pooling.of(model)
    save_model(
        out,
        network,
        weights,
        load_tokenizer(model),
        card.read_text(encoding="utf-8") if card.exists() else "",
        lambda folder: pooling.write(folder, network.config.max_position_embeddings),
        max_file=MAX_FILE - HEADER,
    )
