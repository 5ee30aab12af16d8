"""`linformers resize`: a saved model for another input length n."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path

from rich.console import Console

from ..checks import check_empty_folder, check_size, make_folder
from ..pooling import Pooling
from .adopt import PURPOSES, purpose_of
from .checkpoints import load_any, model_hash
from .pretrain import describe, model_card, save_model
from .rows import load_tokenizer


def resize(
    model: Path, out: Path, *, length: int, projected: int | None = None, console: Console, command: str
) -> None:
    """Write a copy of a model, of any head, that reads `length` tokens; see `LinformerModel.resize_length`.

    Args:
        model: its folder.
        out: a new folder.
        length: the new n, rounded up to what the projection can have.
        projected: the new k; by default, the old one.
        console: where the result is named.
        command: for the card.
    """
    check_size("length", length)
    check_empty_folder("out", out)
    network = load_any(model, PURPOSES)
    before = copy.deepcopy(network.config)
    network.resize_length(before.next_valid_length(length), projected)
    config = network.config
    n, k = config.max_position_embeddings, config.largest_projected_length
    old_n, old_k = before.max_position_embeddings, before.largest_projected_length
    tokenizer = load_tokenizer(model)
    tokenizer.model_max_length = n
    text = f"Resized from `{model}` (sha256 `{model_hash(model)}`), which has n = {old_n:,} and k = {old_k:,}."
    make_folder("out", out.parent)
    pooling = Pooling.of(model)
    card = model_card(purpose_of(network, pooling), describe(config), text, command)
    save_model(out, network, network.state_dict(), tokenizer, card, lambda folder: pooling.write(folder, n))
    say = f"model for n={n:,} in {out}"
    if n * old_k == old_n * k:
        say += f"; up to {min(n, old_n):,} tokens, it computes what it computed before"
    else:
        remedy = f"train the result, as with linformers finetune --model {shlex.quote(str(out))}"
        say += f"; E was interpolated to the new size, which costs quality: {remedy}"
    console.print(say, markup=False, highlight=False, soft_wrap=True)
