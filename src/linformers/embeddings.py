"""Words, positions and token types as vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import LinformerConfig
from .errors import UserError
from .ops.ranks import Ranks, zero_padding


class PositionEmbeddings(nn.Embedding):
    """Learned positions that may start as waves, like those of Vaswani et al. (2017)."""

    def waves(self, longest: float, std: float) -> Tensor:
        """Sines in the even channels, cosines in the odd ones, scaled to a root mean square of `std`, (n, d).

        Args:
            longest: the wavelength, over 2π, to which those of the channels rise from 1.
            std: the scale.
        """
        n, d = self.weight.shape
        channels = torch.arange(d)
        angles = torch.arange(n)[:, None] / longest ** ((channels - channels % 2) / d)
        return torch.where(channels % 2 == 0, angles.sin(), angles.cos()) * (std * math.sqrt(2))

    def resized(self, max_length: int, cut: bool) -> PositionEmbeddings:
        """The first `max_length` positions, or all of them stretched to that number."""
        if cut:
            weight = self.weight[:max_length].clone()
        else:
            channels = self.weight.mT[None].float()  # (1, d, n)
            stretched = functional.interpolate(channels, max_length, mode="linear", align_corners=True)
            weight = stretched[0].mT.to(self.weight.dtype).contiguous()
        return type(self).from_pretrained(weight, freeze=not self.weight.requires_grad)


class LinformerEmbeddings(nn.Module):
    """Words, positions and token types, summed and normalised; a token's position is its rank."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d, padding_idx=config.pad_token_id)
        self.position_embeddings = PositionEmbeddings(config.max_position_embeddings, d)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, d)
        self.norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        own = config.embedding_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if own is None else own)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        ranks: Ranks | None,
    ) -> Tensor:
        words = inputs_embeds if input_ids is None else look_up("input_ids", self.word_embeddings, input_ids)
        assert words is not None  # (b, n, d)
        positions = torch.arange(words.shape[1], device=words.device)
        if ranks is not None and ranks.places is not None:
            positions = ranks.places
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(positions)
        types = look_up("token_type_ids", self.token_type_embeddings, token_type_ids)
        embeddings = words + types + self.position_embeddings(positions)
        # What stands in padding must not reach the norm, and what the norm makes of 0 must not go on.
        embeddings = self.norm(zero_padding(embeddings, ranks))
        return zero_padding(self.dropout(embeddings), ranks)


def look_up(name: str, embedding: nn.Module, numbers: Tensor) -> Tensor:
    """`embedding(numbers)`; a number that it does not have is named, where the device tells of it at all."""
    try:
        return embedding(numbers)
    except IndexError:
        lowest, highest = numbers.min().item(), numbers.max().item()
        raise UserError(
            f"{name} has numbers from {lowest} to {highest}, but there are only {embedding.num_embeddings}, from 0 on"
        ) from None
