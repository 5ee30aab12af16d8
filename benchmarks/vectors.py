"""Vectors of rows of tokens, for the other scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

TOKENS = 2**15 if torch.cuda.is_available() else 2**12  # in a batch, padding included


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@torch.inference_mode()
def embed(
    network: Any,
    rows: Sequence[Sequence[int]],
    pool: Callable[[Tensor, Tensor | None], Tensor],
    advance: Callable[[int], object] = lambda count: None,
    *,
    bf16: bool = False,
) -> Tensor:
    """The normalized vectors (rows, d) of rows of token ids of any lengths, on the CPU; `bf16` counts on a GPU only."""
    network.to(device()).eval()
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    found: list[Tensor] = []
    place = 0
    while place < len(order):
        count = max(1, TOKENS // len(rows[order[place]]))
        batch = [torch.tensor(rows[i]) for i in order[place : place + count]]
        ids = pad_sequence(batch, batch_first=True, padding_value=network.config.pad_token_id or 0)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in batch])[:, None]
        on_gpu = device() == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if bf16 and on_gpu else nullcontext():
            states = network(ids.to(device()), mask.long().to(device())).last_hidden_state
        found.append(functional.normalize(pool(states.float(), mask.to(device())), dim=-1).cpu())
        place += count
        advance(len(batch))
    vectors = torch.cat(found)
    return torch.empty_like(vectors).index_copy(0, torch.tensor(order), vectors)
