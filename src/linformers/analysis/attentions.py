"""The attention matrices P of an encoder, watched as it computes them, and the passages of text it reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..checks import check_no_run, check_size
from ..errors import UserError
from ..training import data

# Passages are shuffled in pools of this many tokens, so that a few passages need not read all texts.
POOL_TOKENS = 2**21


def load_encoder(name: str, revision: str | None = None) -> tuple[PreTrainedModel, Tokenizer]:
    """Load an encoder and its tokenizer from a folder or the hub, in float32 with eager attention."""
    config, tokenizer = load_config(name, revision)
    options: Any = {"revision": revision or "main", "use_safetensors": True, "trust_remote_code": False}
    with _loading(name, OSError, KeyError):
        model = AutoModel.from_pretrained(
            name, config=config, attn_implementation="eager", dtype=torch.float32, **options
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def load_config(name: str, revision: str | None = None) -> tuple[PreTrainedConfig, Tokenizer]:
    """Load the config and tokenizer of an encoder; `tokenizer.model_max_length` is what the model accepts."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():  # not a hub name either
        raise UserError(f"model={name!r} is not a folder")
    check_no_run("model", Path(name))
    with _loading(name, OSError, KeyError, ValueError):
        options: Any = {"revision": revision or "main", "trust_remote_code": False}
        config, tokenizer = (auto.from_pretrained(name, **options) for auto in (AutoConfig, AutoTokenizer))
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model={name!r} is an encoder-decoder; use an encoder, where every query sees every key")
    # If a folder has no tokenizer, transformers creates one that knows no words.
    words, rows = len(tokenizer), getattr(config, "vocab_size", None) or 0
    if words < min(1000, rows / 10):
        raise UserError(f"model={name!r} has a tokenizer of {words} tokens but a vocabulary of {rows}; save its own")
    tokenizer.model_max_length = _max_length(config, tokenizer)
    return config, tokenizer


@contextmanager
def _loading(name: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        problem = "cannot be loaded" if Path(name).is_dir() else "is not a folder and could not be fetched from the hub"
        raise UserError(f"model={name!r} {problem}: {str(error).splitlines()[0]}") from None


def _max_length(config: PreTrainedConfig, tokenizer: Tokenizer) -> int:
    positions = getattr(config, "max_position_embeddings", None) or 0
    if positions < 1:  # XLNet's is -1
        return tokenizer.model_max_length
    with torch.device("meta"):  # no weights
        modules = dict(AutoModel.from_config(config).named_modules())
    # RoBERTa and similar models use the positions after that of padding.
    embeddings = [module for path, module in modules.items() if "position" in path.split(".")[-1]]
    paddings = [module.padding_idx for module in embeddings if getattr(module, "padding_idx", None) is not None]
    return min(tokenizer.model_max_length, positions - max((int(padding) + 1 for padding in paddings), default=0))


def passages(
    texts: data.Sources, tokenizer: Tokenizer, length: int, count: int, seed: int = 0, text_column: str = "text"
) -> Tensor:
    """Draw up to `count` passages of exactly `length` tokens, special tokens included: (count, n).

    For a given seed, a smaller count gives the first passages of a larger one.
    """
    check_size("length", length)
    check_size("count", count)
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise UserError(f"length={length} leaves no room for text beside {special} special tokens")
    if length > (most := tokenizer.model_max_length):
        raise UserError(f"length={length} exceeds the {most} tokens that {tokenizer.name_or_path!r} accepts")

    def cut() -> Iterator[np.ndarray]:
        options: Any = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
        for path in data.find_files(texts, "text"):
            for document in data.documents(path, text_column):
                encoded = tokenizer(document, **options)["input_ids"]
                yield from (np.array(ids, dtype=np.int32) for ids in encoded if len(ids) == length)

    candidates, drawn, order = cut(), list[np.ndarray](), random.Random(seed)
    while len(drawn) < count and (pool := list(islice(candidates, max(1, POOL_TOKENS // length)))):
        order.shuffle(pool)
        drawn += pool
    if not drawn:
        raise UserError(f"length={length} is too long for these texts: every document is shorter")
    return torch.from_numpy(np.stack(drawn[:count])).long()


class WatchAttention(TorchDispatchMode):
    """A context that calls `watch(layer, P)` as each layer computes its P, (b, h, n, n).

    Eager attention has exactly one softmax of this shape in each layer, so this works for every encoder and keeps no P
    in memory.
    """

    def __init__(self, watch: Callable[[int, Tensor], object], length: int) -> None:
        super().__init__()
        self.watch, self.length, self.layer = watch, length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and result.shape[2:] == (self.length, self.length):
            self.watch(self.layer, result)
            self.layer += 1
        return result


def check_full_attention(model: PreTrainedModel, ids: Tensor, name: str) -> tuple[int, int]:
    """Return the numbers of layers and heads; refuse a model without full attention on passages `ids` (count, n)."""
    length = ids.shape[1]
    window = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None) or ["sliding" if window else "full"]
    if getattr(model.config, "projection", "identity") != "identity":  # at n = k, a Linformer's P would look full
        raise UserError(f"model={name!r} is a Linformer; use an encoder with full attention, such as its twin")
    if any("sliding" in kind for kind in kinds) and (window is None or window < length - 1):
        raise UserError(f"model={name!r} has layers with a sliding window; use an encoder with full attention")
    seen: list[tuple[int, bool]] = []  # the number of heads, and whether no query sees a later key
    watch = WatchAttention(lambda layer, probs: seen.append((probs.shape[1], not probs.triu(1).any())), length)
    with torch.no_grad(), watch:
        model(ids[:1].to(model.device))
    if not seen:
        raise UserError(f"model={name!r} has no full attention matrix; use an encoder such as RoBERTa")
    if any(causal for _, causal in seen):
        raise UserError(f"model={name!r} is causal: its queries see no later keys; use an encoder")
    return len(seen), seen[0][0]
