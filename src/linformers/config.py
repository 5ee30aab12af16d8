"""LinformerConfig: the choices of the paper (n, k, which projection, who shares it) as a transformers config."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from . import checks
from .errors import UserError

# Where transformers and sentence-transformers find the classes of a saved model with `trust_remote_code=True`.
CLASSES = "linformer_classes"  # a file beside the config that imports them
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
AUTO_MAP = {"AutoConfig": f"{CLASSES}.LinformerConfig", "AutoModel": f"{CLASSES}.LinformerModel"}
AUTO_MAP |= {f"AutoModel{head}": f"{CLASSES}.Linformer{head}" for head in HEADS}
IMPORTS = f'''"""Where trust_remote_code=True finds Linformers; if this fails, pip install linformers."""

from linformers import LinformerConfig, LinformerModel, {", ".join(f"Linformer{head}" for head in HEADS)}
'''

PROJECTIONS = ("linear", "mean", "max", "conv", "identity", "none")
SHARINGS = ("none", "headwise", "key-value", "layerwise")
PROJECTION_INITS = ("window", "sample", "gaussian")
POSITION_TYPES = ("absolute", "rotary")
POSITION_INITS = ("waves", "sinusoidal", "normal")
POOLINGS = ("cls", "mean")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# Projections over windows of exactly n/k tokens, so k must divide n.
WINDOWED = ("mean", "max", "conv")
# Projections that do not use `projected_length`: n keys, and none.
WITHOUT_K = ("identity", "none")

DEFAULT_PROJECTED_LENGTH = 256
DEFAULT_LOCAL_WINDOW = 64
MAX_LOCAL_WINDOW = 512
MAX_LABELS = 2**20  # each has a name

NO_CAUSAL = (
    "each projected key mixes all positions, so a causal mask cannot hide future tokens; "
    "Linformer is an encoder and has no causal mode"
)

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
FLAGS = ("norm_first", "embedding_norm", "sparse_prediction", "tie_word_embeddings")
OPTIONAL_FLAGS = ("shifted_windows", "return_dict", "output_hidden_states")
# Beyond these, numbers overflow or vanish in float32.
RANGES = {
    "layer_norm_eps": (1e-12, 1.0),
    "initializer_range": (1e-12, 1.0),
    "projection_scale": (1e-9, 1e9),
    "initial_self_score": (1e-9, 1e6),
    "initial_far_bias": (-100.0, 100.0),
}
PROBABILITIES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")

# Names that other Linformer packages use for our fields.
ALIASES = {
    "k": "projected_length",
    "n": "max_position_embeddings",
    "window": "local_window",
    "seq_len": "max_position_embeddings",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
}
# Keys that transformers adds to configs and that resemble a field of ours.
FOREIGN_KEYS = ("sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id")


class LinformerConfig(PreTrainedConfig):
    r"""Configuration of a Linformer encoder. Fields that RoBERTa has keep RoBERTa's names.

    Args:
        max_position_embeddings: n, the longest input (exactly n; RoBERTa's value includes an offset of 2).
        projected_length: k, the number of projected keys and values. One number, one per layer, or one per layer and
            head; 0 leaves a layer its local window alone. `None` means 256, or n/2 if n is below 512; for mean, max
            and conv, the largest divisor of n up to that.
        sharing: which heads and layers share a projection matrix. `"none"`: every head has its own E and F;
            `"headwise"`: one E and one F per layer; `"key-value"`: one E = F per layer; `"layerwise"`: one E for the
            whole model.
        projection: `"linear"` (learned matrices), `"mean"` or `"max"` pooling, `"conv"` (learned depthwise kernels),
            `"identity"` (no projection: a standard Transformer with everything else equal), or `"none"` (no projected
            keys, only the local window).
        local_window: w. In the same softmax, each query also attends to the exact keys at most w positions away. One
            number, or one per layer; 0 is the paper's model. `None` means 64, or n/8 if n is below 512; 0 for identity.
        projection_init: `"window"` starts E as mean pooling over windows of n/k tokens, `"sample"` as the selection of
            one token from each window (always token 0 from the first), `"gaussian"` as $N(0, 1/n)$. `None` means
            `"sample"` with a local window and `"window"` without.
        shifted_windows: whether E starts with other windows, or other tokens from them, in each layer. `None` means
            `True` with `projection_init="sample"` and `False` otherwise, as in the paper's model.
        projection_scale: c, which sets how fast E learns: $E = E_0 + s \Delta$ with $s = c\,k/n$. Under an optimizer
            like Adam, E changes s times as fast as the other weights. `None` means 1.2 if all layers share E and
            there is no local window, and 0.12 otherwise; it is resolved when a model is built.
        initial_far_bias: with a local window, each head of each layer adds a learned bias to the scores of its
            projected keys; this is its initial value; -log k starts near the token itself. `None`: no bias.
        position_embedding_type: `"absolute"` positions are learned and added to the embeddings; `"rotary"` positions
            (Su et al., 2021) rotate queries and keys. A projected key has the position of its window or sample; a layer
            without a local window rotates keys and values before it projects them.
        rope_parameters: the parameters of rotary positions, as in transformers; `rope_theta` is 10,000 by default.
        position_init: position embeddings are learned and start as sines and cosines with wavelengths up to 2πn tokens
            (`"waves"`) or 20,000π tokens (`"sinusoidal"`, Vaswani et al., 2017), or as noise (`"normal"`, RoBERTa).
        initial_self_score: if set, the key weights start as a copy of the query weights, scaled so that a token's
            attention score with itself is about this value (without a local window, $\sqrt{n/k}$ times this value).
            `None`: they start independently, as in RoBERTa.
        norm_first: LayerNorm before each block and after the last one (pre-norm) instead of RoBERTa's post-norm.
        embedding_norm: whether embeddings pass a LayerNorm, as in RoBERTa.
        embedding_size: the channels of the embeddings, which a linear layer maps to `hidden_size` as in ELECTRA; `None`
            means `hidden_size`.
        classifier_activation: of sequence classification, between its two linear layers.
        classifier_pooling: sequence classification uses the first real token (`"cls"`) or the `"mean"` of all of them.
        sparse_prediction: masked-language modeling computes logits at labeled positions only.
        chunk_size_feed_forward: tokens of a batch per chunk of the feed-forward network, without gradients; 0: 16,384.
    """

    model_type = "linformer"
    attribute_map: ClassVar = {"layer_norm_epsilon": "layer_norm_eps"}  # transformers uses both names
    base_model_fsdp_plan: ClassVar = {"embeddings": "free_full_weight", "layers.*": "free_full_weight"}

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 4096
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    norm_first: bool = True
    embedding_norm: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    classifier_dropout: float | None = None
    classifier_pooling: str = "cls"
    classifier_activation: str = "tanh"
    embedding_size: int | None = None
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False

    projected_length: int | list[int] | list[list[int]] | None = None
    sharing: str = "layerwise"
    projection: str = "linear"
    projection_init: str | None = None
    shifted_windows: bool | None = None
    projection_scale: float | None = None
    local_window: int | list[int] | None = None
    initial_far_bias: float | None = None
    position_embedding_type: str = "rotary"
    rope_parameters: dict | None = None
    position_init: str = "waves"
    initial_self_score: float | None = 6.5

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # of a file: our classes are here
        self._refuse_misspelled(kwargs)
        self._check_early(kwargs)
        for name in (*SIZES, "projected_length", "local_window"):
            setattr(self, name, checks.to_builtin(getattr(self, name)))
        self._check_rope_parameters()  # which transformers completes
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def paper(cls, n: int = 512, k: int = 128, sharing: str = "layerwise", **overrides: Any) -> Self:
        """The model of the paper, with RoBERTa-base's sizes unless overridden.

        Post-norm, learned absolute positions from N(0, 0.02²), no local window, independent queries and keys, and one
        learning rate: E itself is the parameter and starts as N(0, 1/n). The paper does not say how E is initialized
        for training.

        Args:
            n: the longest input.
            k: the projected length.
            sharing: `"none"`, `"headwise"`, `"key-value"` or `"layerwise"`.
            **overrides: any other field of the config, for example `num_hidden_layers=6`.
        """
        for name in ("max_position_embeddings", "projected_length"):
            if name in overrides:
                raise UserError(f"{name}={overrides[name]!r}: pass it to LinformerConfig.paper as n or k")
        fields = {
            "max_position_embeddings": n,
            "projected_length": k,
            "sharing": sharing,
            "projection": "linear",
            "projection_init": "gaussian",
            "shifted_windows": False,
            "local_window": 0,
            "attention_probs_dropout_prob": 0.1,
            "position_embedding_type": "absolute",
            "position_init": "normal",
            "initial_self_score": None,
            "norm_first": False,
        }
        config = cls(**{**fields, **overrides})
        if "projection_scale" not in overrides and config.projection == "linear":
            config.projection_scale = n / config.largest_projected_length  # s = 1
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but a file cannot name code on the hub: only the caller can, in `attn_implementation`."""
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        kernel = config._attn_implementation
        if "attn_implementation" not in kwargs and kernel is not None and "/" in kernel:
            raise UserError(
                f"the config has attn_implementation={kernel!r}, which is code on the hub: remove it, or pass "
                "attn_implementation to from_pretrained"
            )
        return loaded

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: also own fields with default values, so that other defaults change nothing."""
        own = {field.name for field in dataclasses.fields(self)} - {
            field.name for field in dataclasses.fields(PreTrainedConfig)
        }
        values = {name: value for name, value in self.to_dict().items() if name in own}
        return {**values, **super().to_diff_dict(), "auto_map": AUTO_MAP}

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write the config, and the file that finds our classes where nobody has imported them."""
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / f"{CLASSES}.py").write_text(IMPORTS)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy our source into every folder that it saves."""

    @property
    def projected_lengths(self) -> tuple[tuple[int, ...], ...]:
        """The k of each head of each layer; n under `"identity"` and 0 under `"none"`."""
        n, lengths = self.max_position_embeddings, self.projected_length
        if self.projection in WITHOUT_K:
            lengths = n if self.projection == "identity" else 0
        elif lengths is None:
            lengths = max(1, min(DEFAULT_PROJECTED_LENGTH, n // 2))
            if self.projection in WINDOWED:
                lengths = next(k for k in range(lengths, 0, -1) if n % k == 0)
        if not isinstance(lengths, list | tuple):
            lengths = [lengths] * self.num_hidden_layers
        return tuple(tuple(k) if isinstance(k, list | tuple) else (k,) * self.num_attention_heads for k in lengths)

    @property
    def largest_projected_length(self) -> int:
        return max(itertools.chain.from_iterable(self.projected_lengths))

    @property
    def local_windows(self) -> tuple[int, ...]:
        """The w of each layer."""
        windows = self.local_window
        if windows is None:
            windows = max(1, min(DEFAULT_LOCAL_WINDOW, self.max_position_embeddings // 8))
            windows = 0 if self.projection == "identity" else windows
        return (windows,) * self.num_hidden_layers if isinstance(windows, int) else tuple(windows)

    @property
    def rope_theta(self) -> float:
        """The base of the frequencies of rotary positions."""
        return {"rope_theta": self.default_theta, **(self.rope_parameters or {})}["rope_theta"]

    @property
    def far_biases(self) -> tuple[float | None, ...]:
        """The initial bias of the scores of projected keys in each layer; `None` if there is none."""
        lengths = map(max, self.projected_lengths)
        return tuple(
            self.initial_far_bias if k and w else None for k, w in zip(lengths, self.local_windows, strict=True)
        )

    @property
    def resolved_projection_scale(self) -> float:
        """c: `projection_scale`, or its default for the current sharing and windows."""
        if self.projection_scale is not None:
            return self.projection_scale
        return default_scale(self.sharing, any(self.local_windows))

    @property
    def resolved_projection_init(self) -> str:
        return self.projection_init or ("sample" if any(self.local_windows) else "window")

    @property
    def resolved_shifted_windows(self) -> bool:
        return self.resolved_projection_init == "sample" if self.shifted_windows is None else self.shifted_windows

    @property
    def window_shifts(self) -> tuple[int, ...]:
        """By how many tokens the initial windows or samples of E are shifted in each layer; less than a window."""
        has_windows = self.projection == "linear" and self.resolved_projection_init != "gaussian"
        if not has_windows or not self.resolved_shifted_windows:
            return (0,) * self.num_hidden_layers
        largest = [max(heads) for heads in self.projected_lengths]
        if self.sharing == "layerwise":
            largest = [max(largest)] * len(largest)
        n = self.max_position_embeddings
        return tuple(int(van_der_corput(i) * (n // k)) if k else 0 for i, k in enumerate(largest))

    def next_valid_length(self, length: int) -> int:
        """The shortest n of at least `length` tokens that is valid with this config's k."""
        unit = math.lcm(*filter(None, itertools.chain(*self.projected_lengths))) if self.projection in WINDOWED else 1
        return math.ceil(length / unit) * unit

    def resolved(self) -> Self:
        """A copy with explicit values instead of `None` wherever a default depends on other fields."""
        copied = copy.deepcopy(self)
        if self.local_window is None:
            copied.local_window = self.local_windows[0]
        if self.projection not in WITHOUT_K:
            copied.projected_length = self.projected_length or self.largest_projected_length
        if self.projection == "linear":
            copied.projection_init = self.resolved_projection_init
            copied.projection_scale = self.resolved_projection_scale
            copied.shifted_windows = self.resolved_shifted_windows
        return copied

    def check(self) -> None:
        """Raise a `UserError` that names the first invalid field or combination of fields."""
        self._check_early({})
        for name in SIZES:
            checks.check_size(name, getattr(self, name), most=4096 if name.startswith("num_") else 2**31)
        for name in FLAGS:
            checks.check_flag(name, getattr(self, name))
        for name in PROBABILITIES:
            if name != "classifier_dropout" or self.classifier_dropout is not None:
                checks.check_probability(name, getattr(self, name))
        for name in OPTIONAL_FLAGS:
            if getattr(self, name) is not None:
                checks.check_flag(name, getattr(self, name))
        for name, (least, most) in RANGES.items():
            optional = name in ("projection_scale", "initial_self_score", "initial_far_bias")
            if not optional or getattr(self, name) is not None:
                checks.check_range(name, getattr(self, name), least, most, " or None" if optional else "")
        chunk_size = self.chunk_size_feed_forward
        if not checks.is_number(chunk_size, int) or chunk_size < 0:
            raise UserError(f"chunk_size_feed_forward={chunk_size!r} must be 0 or the number of tokens in a chunk")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            if token is not None and not (checks.is_number(token, int) and 0 <= token < self.vocab_size):
                raise UserError(f"{name}={token!r} must be None or an integer from 0 to {self.vocab_size - 1}")
        for name in ("is_decoder", "is_causal", "add_cross_attention", "is_encoder_decoder"):
            if (value := getattr(self, name, None)) is not None and value is not False:
                raise UserError(f"{name}={value!r} is not supported: {NO_CAUSAL}")
        checks.check_choice("hidden_act", self.hidden_act, ACT2FN)
        checks.check_choice("classifier_activation", self.classifier_activation, ACT2FN)
        if self.embedding_size is not None:
            checks.check_size("embedding_size", self.embedding_size, most=2**31)
        checks.check_choice("projection", self.projection, PROJECTIONS)
        checks.check_choice("sharing", self.sharing, SHARINGS)
        if self.projection_init is not None:
            checks.check_choice("projection_init", self.projection_init, PROJECTION_INITS)
        checks.check_choice("position_embedding_type", self.position_embedding_type, POSITION_TYPES)
        self._check_rope_parameters()
        checks.check_range("rope_theta", self.rope_theta, 1.0, 1e12)
        if self.is_rotary and self.projection == "linear" and self.projection_init == "gaussian":
            raise UserError(
                "position_embedding_type='rotary' needs projected keys with positions, which those of "
                "projection_init='gaussian' do not have; use 'sample' or 'window'"
            )
        checks.check_choice("position_init", self.position_init, POSITION_INITS)
        checks.check_choice("classifier_pooling", self.classifier_pooling, POOLINGS)

        if self.local_window is not None:
            check_one_per("local_window", self.local_window, "layer", self.num_hidden_layers)
            for window in self.local_window if isinstance(self.local_window, list) else [self.local_window]:
                check_local_window(window, self.projection)
        if self.projected_length is not None and self.projection not in WITHOUT_K:
            check_one_per("projected_length", self.projected_length, "layer", self.num_hidden_layers)
            for i, heads in enumerate(self.projected_length if isinstance(self.projected_length, list) else ()):
                check_one_per(f"projected_length[{i}]", heads, "head", self.num_attention_heads)
            without = [not any(heads) for heads in self.projected_lengths]
            for i, (empty, window) in enumerate(zip(without, self.local_windows, strict=True)):
                if empty and not window:
                    raise UserError(f"projected_length=0 in layer {i} leaves it no keys, since it has no local window")
            if all(without):
                raise UserError("projected_length=0 in all layers; use projection='none'")
            check_projected_lengths(
                [heads for heads, empty in zip(self.projected_lengths, without, strict=True) if not empty],
                self.max_position_embeddings,
                projection=self.projection,
                sharing=self.sharing,
                length_name="max_position_embeddings",
            )

    def _check_rope_parameters(self) -> None:
        parameters = self.rope_parameters
        if parameters is None:
            return
        if not isinstance(parameters, dict) or not parameters.keys() <= {"rope_type", "rope_theta"}:
            raise UserError(f"rope_parameters={parameters!r} must be a dict such as {{'rope_theta': 10000.0}}")
        if parameters.get("rope_type", "default") != "default":
            raise UserError(
                f"rope_parameters has rope_type={parameters['rope_type']!r}, but only 'default' is supported"
            )

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type == "rotary"

    def check_buildable(self) -> None:
        """Also check what applies only when a model is built, since fields may be assigned one at a time before."""
        self.check()
        check_heads(self.hidden_size, self.num_attention_heads, "num_attention_heads")
        if self.is_rotary and (size := self.hidden_size // self.num_attention_heads) % 2:
            raise UserError(
                f"position_embedding_type='rotary' turns pairs of channels, but hidden_size={self.hidden_size} with "
                f"num_attention_heads={self.num_attention_heads} gives heads of {size}"
            )

    def _refuse_misspelled(self, unknown: Iterable[str]) -> None:
        """Refuse an unknown key that resembles a field: transformers would silently store it."""
        fields = [field.name for field in dataclasses.fields(self)]
        for name in unknown:
            if name == "causal":
                raise UserError(f"causal is not supported: {NO_CAUSAL}")
            if name in ("projected_lengths", "local_windows"):
                meant: str | None = name[:-1]
            elif hasattr(type(self), name) or name in self.attribute_map or name in FOREIGN_KEYS:
                continue
            else:
                meant = ALIASES.get(name) or checks.nearest_name(name, fields, cutoff=0.8)
            if meant:
                raise UserError(f"{name!r} is not a field of LinformerConfig{checks.did_you_mean(meant)}")

    def _check_early(self, kwargs: dict[str, Any]) -> None:
        """Check what transformers would fail on with an error of its own."""
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise UserError(f"dtype={self.dtype!r} must be the name of a type of torch, such as 'float32'")
        if self.problem_type is not None:
            checks.check_choice("problem_type", self.problem_type, PROBLEM_TYPES)
        if "num_labels" in kwargs:
            checks.check_size("num_labels", kwargs["num_labels"], MAX_LABELS)
        if kwargs.get("num_labels") == 1 and self.problem_type == "single_label_classification":
            raise UserError("num_labels=1 must be at least 2 with problem_type='single_label_classification'")
        for name in ("id2label", "label2id"):
            labels = getattr(self, name)
            if labels is not None and not isinstance(labels, dict):
                raise UserError(f"{name}={labels!r} must be a dict, such as {{0: 'negative', 1: 'positive'}}")
        if self.id2label is not None and not (self.id2label and all(str(key).isdigit() for key in self.id2label)):
            raise UserError(f"id2label={self.id2label!r} must have the numbers of the labels as keys, from 0")


def van_der_corput(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, …: the binary digits of `number`, reversed after the binary point."""
    digits = f"{number:b}"[::-1]
    return int(digits, 2) / 2 ** len(digits)


def default_scale(sharing: str, has_local_window: bool) -> float:
    """The c of a config that leaves it open: an E that serves all layers alone may learn ten times as fast."""
    return 1.2 if sharing == "layerwise" and not has_local_window else 0.12


def check_local_window(window: Any, projection: str) -> None:
    if not checks.is_number(window, int) or not 0 <= window <= MAX_LOCAL_WINDOW:
        raise UserError(f"local_window={window!r} must be an integer from 0 to {MAX_LOCAL_WINDOW}")
    if window and projection == "identity":
        raise UserError(
            f"local_window={window} adds nothing to projection='identity', which attends to all keys: use 0"
        )
    if not window and projection == "none":
        raise UserError("projection='none' leaves no key to attend to; local_window must be at least 1")


def check_heads(hidden_size: int, num_heads: int, name: str) -> None:
    if hidden_size % num_heads:
        raise UserError(f"hidden_size={hidden_size} is not divisible by {name}={num_heads}")


def check_one_per(name: str, values: Any, what: str, count: int) -> None:
    if isinstance(values, list) and len(values) != count:
        raise UserError(f"{name} has {len(values)} entries, but there must be {count}, one per {what}")


def check_projected_lengths(
    lengths: Sequence[Sequence[int]], max_length: int, *, projection: str, sharing: str, length_name: str
) -> None:
    """Check k of each layer and head against n and against the k of those that share its projection."""
    for k in itertools.chain.from_iterable(lengths):
        checks.check_size("projected_length", k)
        if k > max_length:
            raise UserError(f"projected_length={k} exceeds {length_name}={max_length}; k can be at most n")
        if projection in WINDOWED and max_length % k:
            raise UserError(
                f"projected_length={k} does not divide {length_name}={max_length}, as the windows of "
                f"projection={projection!r} require; projection='linear' takes any k"
            )
    if sharing == "none" or projection not in ("linear", "conv"):
        return
    for group in [list(itertools.chain(*lengths))] if sharing == "layerwise" else lengths:
        if projection == "conv" and len(set(group)) > 1:
            raise UserError(
                f"projected_length={sorted(set(group))} cannot differ where projection='conv' is shared "
                f"(sharing={sharing!r}): one kernel has one size n/k"
            )
        for k in group:
            if max(group) % k:
                raise UserError(
                    f"projected_length={k} does not divide {max(group)}, the largest among those that share a "
                    f"projection under sharing={sharing!r}"
                )
