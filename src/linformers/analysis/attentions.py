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

from ..checks import check_no_run, check_size
from ..config import LinformerConfig
from ..errors import UserError
from ..training import sources

# Called with the number of a layer and its P, (b, h, n, n); may return what to put in its place.
Watch = Callable[[int, Tensor], Tensor | None]

USUAL_LENGTH = 512
# Files of which a tokenizer has at least one; without them transformers makes one that knows no words.
TOKENIZER = ("tokenizer*", "vocab*", "merges*", "*.model", "*.bpe*", "special_tokens_map.json")
# A tokenizer of fewer tokens, and of less than a tenth of the model's vocabulary, is not the model's.
FEW_WORDS = 1000
# Passages are gathered up to so many tokens and shuffled; only if all of them are drawn, more are gathered.
POOL = 2**21


def load_encoder(name: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from a folder or a hub name, ready to be watched."""
    config, tokenizer = load_config(name)
    with _told(name):
        model = AutoModel.from_pretrained(name, config=config, attn_implementation="eager", dtype=torch.float32)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer


def load_config(name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The config of a model whose P can be looked at, and its tokenizer, which knows how long the input may be."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():  # no hub name either
        raise UserError(f"model={name!r} is no folder")
    check_no_run("model", Path(name))
    with _told(name):
        config = AutoConfig.from_pretrained(name)
        if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
            what = "an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "a decoder"
            raise UserError(f"model={name!r} is {what}; the analysis is of encoders, whose queries see all keys")
        if isinstance(config, LinformerConfig) and config.projection != "identity":
            raise UserError(
                f"model={name!r} is a Linformer, whose attention is onto projected keys; take an encoder with full "
                "attention, such as RoBERTa or a twin (projection='identity')"
            )
        if Path(name).is_dir() and not any(found for files in TOKENIZER for found in Path(name).glob(files)):
            raise UserError(f"model={name!r} has no tokenizer: save one beside the model")
        tokenizer = AutoTokenizer.from_pretrained(name)
    words, rows = len(tokenizer), getattr(config, "vocab_size", None) or 0
    if words < min(FEW_WORDS, rows / 10):
        raise UserError(
            f"model={name!r} has a tokenizer of {words} tokens for a vocabulary of {rows}; save the one that the model "
            "was trained with beside it"
        )
    tokenizer.model_max_length = longest(config, tokenizer)
    return config, tokenizer


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in a sentence what keeps a model from being loaded."""
    try:
        yield
    except (OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        where = "cannot be loaded" if Path(name).is_dir() else "is no folder, and the hub does not give it"
        raise UserError(f"model={name!r} {where}: {reason}") from None


def longest(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model takes."""
    positions = getattr(config, "max_position_embeddings", None) or 0
    if positions < 1:  # XLNet's is -1
        return tokenizer.model_max_length
    return min(tokenizer.model_max_length, positions - _positions_before(config))


def _positions_before(config: PreTrainedConfig) -> int:
    """How many positions no token has: RoBERTa and its like count from the one behind that of padding."""
    with torch.device("meta"):  # no weights
        modules = dict(AutoModel.from_config(config).named_modules())
    paddings = [getattr(own, "padding_idx", None) for path, own in modules.items() if "position" in path.split(".")[-1]]
    return max((padding + 1 for padding in paddings if padding is not None), default=0)


def usual_length(name: str) -> int:
    """512 tokens, or as many as a model takes."""
    return min(USUAL_LENGTH, load_config(name)[1].model_max_length)


def passages(
    texts: str | Path | Sequence[str | Path],
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
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise UserError(f"length={length} has no room for words beside {special} special tokens; take more")
    if length > tokenizer.model_max_length:
        most, name = tokenizer.model_max_length, tokenizer.name_or_path
        raise UserError(f"length={length} is more than the {most} tokens that {name!r} takes")
    documents = longest_seen = 0

    def cut() -> Iterator[np.ndarray]:
        nonlocal documents, longest_seen
        files = sources.find_files(texts, "text")
        for document in (text for path in files for text in sources.documents(path, text_column)):
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
    if not documents:
        raise UserError("the texts hold no document: the files are empty, or have nothing but blanks")
    if not drawn:
        raise UserError(
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
    window = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None) or ["sliding" if window else "full"]
    if any("sliding" in kind for kind in kinds) and (window is None or window < length - 1):
        raise UserError(
            f"model={name!r} has layers with a sliding window, whose P is a band; the analysis is of full attention, "
            "such as RoBERTa's"
        )
    with torch.no_grad(), watching(look, length):
        model(ids[:1].to(model.device))
    if not shapes:
        raise UserError(
            f"model={name!r} computes no attention of {length} by {length} tokens, so there is nothing to look at; "
            "take an encoder with full attention, such as RoBERTa"
        )
    if causal:
        raise UserError(f"model={name!r} is causal: its queries do not see the keys behind them; take an encoder")
    return len(shapes), shapes[0][1]
