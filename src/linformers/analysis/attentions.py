"""The attention matrices P of any encoder, watched while it computes, and the passages of text that it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checks import check_size
from ..config import LinformerConfig
from ..training import sources

# Called with the number of a layer and its P, (b, h, n, n); may return what to put in its place.
Watch = Callable[[int, Tensor], Tensor | None]

USUAL_LENGTH = 512
# Passages are gathered up to so many tokens and shuffled; only if all of them are drawn, more are gathered.
POOL = 2**22


def load_encoder(name: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from a folder or a hub name, ready to be watched."""
    config, tokenizer = load_config(name)
    with _told(name):
        model = AutoModel.from_pretrained(name, config=config, attn_implementation="eager", dtype=torch.float32)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer


def load_config(name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The config and the tokenizer of a model whose P can be looked at."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():  # no hub name either
        raise ValueError(f"model={name!r} is no folder")
    with _told(name):
        config = AutoConfig.from_pretrained(name)
        if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"model={name!r} is a decoder; the analysis is of encoders, whose queries see all keys")
        if isinstance(config, LinformerConfig) and config.projection != "identity":
            raise ValueError(
                f"model={name!r} is a Linformer, whose attention is onto projected keys; take an encoder with full "
                "attention, such as RoBERTa or a twin (projection='identity')"
            )
        return config, AutoTokenizer.from_pretrained(name)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in a sentence what keeps a model from being loaded."""
    try:
        yield
    except (OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        where = "cannot be loaded" if Path(name).is_dir() else "is no folder, and the hub does not give it"
        raise ValueError(f"model={name!r} {where}: {reason}") from None


def longest(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model takes."""
    positions = getattr(config, "max_position_embeddings", None)
    return min(tokenizer.model_max_length, positions or tokenizer.model_max_length)


def usual_length(name: str) -> int:
    """512 tokens, or as many as a model takes."""
    return min(USUAL_LENGTH, longest(*load_config(name)))


def passages(
    texts: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    *,
    seed: int = 0,
    text_column: str = "text",
) -> Tensor:
    """Up to `count` passages of exactly `length` tokens, special ones included, drawn from documents: (count, n).

    Fewer passages are the first of more; no more of the texts is read than they need.
    """
    check_size("length", length)
    check_size("count", count)
    documents = longest_seen = 0
    special = tokenizer.num_special_tokens_to_add()

    def cut() -> Iterator[np.ndarray]:
        nonlocal documents, longest_seen
        for document in (text for path in sources.find_files(texts) for text in sources.documents(path, text_column)):
            encoded = tokenizer(
                document, truncation=True, max_length=length, return_overflowing_tokens=True, verbose=False
            )["input_ids"]
            documents += 1
            longest_seen = max(longest_seen, special + sum(len(ids) - special for ids in encoded))
            yield from (np.array(ids, dtype=np.int32) for ids in encoded if len(ids) == length)

    found, drawn, order = cut(), list[np.ndarray](), random.Random(seed)
    while len(drawn) < count and (pool := list(islice(found, max(1, POOL // length)))):
        order.shuffle(pool)
        drawn += pool
    if not drawn:
        raise ValueError(
            f"length={length} is too long for these texts: the longest of {documents} documents has {longest_seen} "
            "tokens"
        )
    return torch.from_numpy(np.stack(drawn[:count])).long()


@contextmanager
def watching(watch: Watch, length: int) -> Iterator[None]:
    """Call `watch` with the P of each layer as soon as it is computed, so that none has to be kept."""
    with _Watcher(watch, length):
        yield


class _Watcher(TorchDispatchMode):
    """Looks out for softmaxes of the shape of P: eager attention has exactly one of them in each layer."""

    def __init__(self, watch: Watch, length: int) -> None:
        super().__init__()
        self.watch, self.length, self.layer = watch, length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and result.shape[2:] == (self.length, self.length):
            replaced = self.watch(self.layer, result)
            self.layer += 1
            return result if replaced is None else replaced
        return result


def check_watchable(model: PreTrainedModel, ids: Tensor, name: str) -> tuple[int, int]:
    """The numbers of layers and heads of a model whose P can be watched; a sentence about one whose P cannot."""
    shapes: list[torch.Size] = []
    causal = False

    def look(layer: int, probs: Tensor) -> None:
        nonlocal causal
        shapes.append(probs.shape)
        causal = causal or not probs.triu(1).any()

    length = ids.shape[1]
    with torch.no_grad(), watching(look, length):
        model(ids[:1].to(model.device))
    if not shapes:
        raise ValueError(
            f"model={name!r} computes no attention of {length} by {length} tokens, so there is nothing to look at; "
            "take an encoder with full attention, such as RoBERTa"
        )
    if causal:
        raise ValueError(f"model={name!r} is causal: its queries do not see the keys behind them; take an encoder")
    return len(shapes), shapes[0][1]
