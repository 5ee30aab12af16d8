"""One vector for each text, from the hidden states of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def first_real_token(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The hidden state (b, d) of the first real token of each row."""
    if mask is None:
        return hidden_states[:, 0]
    first = mask.bool().int().argmax(1).to(hidden_states.device)  # (b,)
    return hidden_states.gather(1, first[:, None, None].expand(-1, 1, hidden_states.shape[2])).squeeze(1)


def mean_of_real_tokens(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (b, d) of the hidden states of the real tokens of each row; 0 if there are none."""
    if mask is None:
        return hidden_states.mean(1)
    real = mask.bool().to(hidden_states.device)[:, :, None]  # (b, n, 1)
    total = hidden_states.masked_fill(~real, 0).sum(1, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    return (total / real.sum(1).clamp(min=1)).to(hidden_states.dtype)
