"""The choices of the paper as a transformers config: n, k, who shares a projection, and which projection it is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .checks import check_choice, check_positive, check_probability, check_size, is_number, nearest_name
from .errors import UserError

PROJECTIONS = ("linear", "mean", "max", "conv", "dynamic", "identity", "none")
SHARINGS = ("none", "headwise", "key-value", "layerwise")
PROJECTION_INITS = ("window", "gaussian")
POSITION_INITS = ("waves", "sinusoidal", "normal")
POOLINGS = ("cls", "mean")

# Projections whose windows have the fixed size n/k, which must therefore be whole.
WINDOWED = ("mean", "max", "conv")

# Projections whose number of keys is not for `projected_length` to say.
FIXED_LENGTHS = ("identity", "none")

MAX_WINDOW = 512

NO_CAUSAL = (
    "a projected key mixes all positions, so masking the future after E and F would still leak it; "
    "Linformer is an encoder and has no causal mode"
)

# Names close to a field of ours that transformers itself puts into configs.
FOREIGN_NAMES = ("sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id")

# What other Linformers and Transformers call a field of ours.
OTHER_NAMES = {
    "k": "projected_length",
    "dim_k": "projected_length",
    "n": "max_position_embeddings",
    "max_length": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "seq_len": "max_position_embeddings",
    "dim": "hidden_size",
    "d_model": "hidden_size",
    "dim_ff": "intermediate_size",
    "heads": "num_attention_heads",
    "nhead": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "depth": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "dropout": "hidden_dropout_prob",
    "activation": "hidden_act",
    "parameter_sharing": "sharing",
    "share_kv": "sharing",
    "hidden_dim": "hidden_size",
    "max_len": "max_position_embeddings",
    "pre_norm": "norm_first",
    "prenorm": "norm_first",
    "projection_type": "projection",
    "window": "local_window",
    "windows": "local_window",
    "attention_window": "local_window",
    "window_size": "local_window",
    "window_shift": "shifted_windows",
    "shift_windows": "shifted_windows",
    "self_score": "initial_self_score",
}

# Properties that are made of a field.
PLURALS = ("projected_lengths", "local_windows")

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class LinformerConfig(PreTrainedConfig):
    r"""Configuration of a Linformer encoder; fields that RoBERTa has too keep RoBERTa's names.

    Args:
        max_position_embeddings: n, the longest sequence accepted (exactly n: no offset for padding).
        projected_length: k, the number of projected keys and values each query attends to. One number, one per
            layer, or for each layer one per head.
        sharing: which heads and layers share a projection matrix. `"none"`: every head has its own E and F;
            `"headwise"`: one E and one F a layer; `"key-value"`: one E = F a layer; `"layerwise"`: one E for all.
        projection: `"linear"` (learned matrices), `"mean"` or `"max"` pooling, `"conv"` (learned depthwise kernels),
            `"dynamic"` (means whose weights are computed from the tokens, so that nothing learned depends on n),
            `"identity"`: no projection, the standard Transformer with everything else equal, or `"none"`: no projected
            keys at all, only those in the local window.
        local_window: w: each query sees, in the same softmax, the exact keys at most w positions away too. One number,
            or one per layer; 0 is the paper's model.
        projection_init: `"window"` starts E as mean pooling over windows of n/k tokens, `"gaussian"` as $N(0, 1/n)$.
        shifted_windows: whether these windows begin at other tokens in other layers, so that tokens which one layer
            sees as one mean are told apart by another; `False` is the paper's model. `None` becomes `False` where there
            is a local window, which tells neighbours apart, and `True` elsewhere.
        projection_scale: s in $E = E_0 + s \Delta$, the learning rate of E relative to the common one. `None`
            becomes $1.2\,k/n$ with the largest k where all layers share E, and a tenth of that where they do not or
            there is a local window.
        position_init: learned positions start as sines and cosines, whose wavelengths reach 2πn tokens under `"waves"`
            and 20,000π under `"sinusoidal"`, as in Vaswani et al. (2017), or as `"normal"` noise, as RoBERTa's do.
        initial_self_score: queries and keys start alike, at a scale at which a token's score with itself is about this:
            attention starts near its own position instead of everywhere. Among projected keys alone, each the mean of
            n/k tokens, it is $\sqrt{n/k}$ times as much. `None`: they start independently, as RoBERTa's do.
        embedding_dropout: the dropout after the embeddings; `None` means `hidden_dropout_prob`.
        norm_first: LayerNorm before each block and after the last (pre-norm) instead of RoBERTa's post-norm.
        classifier_pooling: what a text's labels are told from: the hidden state of its first real token (`"cls"`),
            or the `"mean"` of those of all real tokens.
        sparse_prediction: in masked-language modelling, compute the vocabulary at labelled positions only.

    Raises:
        ValueError: a field has a value, or two fields a combination, that no Linformer can have.
    """

    model_type = "linformer"
    attribute_map: ClassVar = {"layer_norm_epsilon": "layer_norm_eps"}  # transformers has both names
    base_model_fsdp_plan: ClassVar = {"embeddings": "free_full_weight", "layers.*": "free_full_weight"}

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    embedding_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    norm_first: bool = False
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    classifier_dropout: float | None = None
    classifier_pooling: str = "cls"
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False

    projected_length: int | list[int] | list[list[int]] = 256
    sharing: str = "layerwise"
    projection: str = "linear"
    projection_init: str = "window"
    shifted_windows: bool | None = None
    projection_scale: float | None = None
    local_window: int | list[int] = 0
    position_init: str = "waves"
    initial_self_score: float | None = 6.5

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt(kwargs)
        for name in (*SIZES, "projected_length", "local_window"):
            setattr(self, name, plain(getattr(self, name)))
        super().__post_init__(**kwargs)
        self.check()

    @property
    def projected_lengths(self) -> tuple[tuple[int, ...], ...]:
        """The k of each head of each layer, in whichever form `projected_length` is; n under `identity`."""
        layers, heads, lengths = self.num_hidden_layers, self.num_attention_heads, self.projected_length
        if self.projection in FIXED_LENGTHS:
            lengths = self.max_position_embeddings if self.projection == "identity" else 0
        if isinstance(lengths, int):
            lengths = [lengths] * layers
        return tuple((k,) * heads if isinstance(k, int) else tuple(k) for k in lengths)

    @property
    def local_windows(self) -> tuple[int, ...]:
        """The w of each layer."""
        windows = self.local_window
        return (windows,) * self.num_hidden_layers if isinstance(windows, int) else tuple(windows)

    @property
    def largest_projected_length(self) -> int:
        return max(k for heads in self.projected_lengths for k in heads)

    def shift_of_layer(self, layer: int) -> int:
        """How many tokens later than in the first layer the windows of a layer begin; less than a window."""
        if not self.shifted_windows or self.projection != "linear" or self.projection_init != "window":
            return 0
        sharers = self.projected_lengths if self.sharing == "layerwise" else self.projected_lengths[layer : layer + 1]
        window = self.max_position_embeddings // max(itertools.chain(*sharers))
        return int(spread(layer) * window)

    def possible_length(self, length: int) -> int:
        """The shortest n of at least `length` tokens that goes with the k of this config."""
        unit = math.lcm(*itertools.chain(*self.projected_lengths)) if self.projection in WINDOWED else 1
        return -(-length // unit) * unit

    def check(self) -> None:
        """Raise a `ValueError` that names the first field, or pair of fields, that cannot be; settle what is `None`."""
        self._check_fields()
        if self.projection == "linear":
            # Values, not None, go into config.json: what Δ was learned with must not change with a default.
            if self.projection_scale is None:
                quick = self.sharing == "layerwise" and not any(self.local_windows)
                self.projection_scale = default_scale(
                    self.largest_projected_length, self.max_position_embeddings, quick
                )
            if self.shifted_windows is None:
                self.shifted_windows = self.projection_init == "window" and not any(self.local_windows)

    def _check_fields(self) -> None:
        for name in SIZES:
            check_size(name, getattr(self, name))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            check_probability(name, getattr(self, name))
        for name in ("embedding_dropout", "classifier_dropout"):
            if getattr(self, name) is not None:
                check_probability(name, getattr(self, name))
        for name in ("norm_first", "sparse_prediction", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.shifted_windows, bool | None):
            raise UserError(f"shifted_windows={self.shifted_windows!r} must be True, False or None")
        check_positive("layer_norm_eps", self.layer_norm_eps)
        check_positive("initializer_range", self.initializer_range)
        chunk_size = self.chunk_size_feed_forward
        if not is_number(chunk_size, int) or chunk_size < 0:
            raise UserError(f"chunk_size_feed_forward={chunk_size!r} must be 0, or the tokens in a chunk")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            if token is not None and not (is_number(token, int) and 0 <= token < self.vocab_size):
                raise UserError(f"{name}={token!r} must be None or one of the {self.vocab_size} tokens, from 0 on")
        if self.problem_type is not None:
            check_choice("problem_type", self.problem_type, PROBLEM_TYPES)
        if self.num_labels < 1:
            raise UserError(f"num_labels={self.num_labels} must be a positive integer")
        check_choice("hidden_act", self.hidden_act, ACT2FN)
        for name in ("is_decoder", "is_causal", "add_cross_attention", "is_encoder_decoder"):
            if getattr(self, name, False):
                raise UserError(f"{name}=True is not possible: {NO_CAUSAL}")

        check_choice("projection", self.projection, PROJECTIONS)
        check_choice("sharing", self.sharing, SHARINGS)
        check_choice("projection_init", self.projection_init, PROJECTION_INITS)
        check_choice("position_init", self.position_init, POSITION_INITS)
        check_choice("classifier_pooling", self.classifier_pooling, POOLINGS)
        check_scale(self.projection_scale)
        if isinstance(self.local_window, list) and len(self.local_window) != self.num_hidden_layers:
            raise UserError(
                f"local_window has {len(self.local_window)} entries, one per layer, "
                f"but num_hidden_layers={self.num_hidden_layers}"
            )
        for window in self.local_windows if isinstance(self.local_window, int | list) else [self.local_window]:
            check_window(window, self.projection)
        if self.initial_self_score is not None:
            check_positive("initial_self_score", self.initial_self_score, " or None")
        if self.projection not in FIXED_LENGTHS:
            self._check_projected_length_shape()
            check_projected_lengths(
                self.projected_lengths,
                self.max_position_embeddings,
                projection=self.projection,
                sharing=self.sharing,
                length_name="max_position_embeddings",
            )

    def _check_projected_length_shape(self) -> None:
        if not isinstance(self.projected_length, list):
            check_size("projected_length", self.projected_length)
            return
        if len(self.projected_length) != self.num_hidden_layers:
            raise UserError(
                f"projected_length has {len(self.projected_length)} entries, one per layer, "
                f"but num_hidden_layers={self.num_hidden_layers}"
            )
        for layer, lengths in enumerate(self.projected_length):
            if not isinstance(lengths, list):
                check_size(f"projected_length[{layer}]", lengths)
            elif len(lengths) != self.num_attention_heads:
                raise UserError(
                    f"projected_length[{layer}] has {len(lengths)} entries, one per head, "
                    f"but num_attention_heads={self.num_attention_heads}"
                )
            else:
                for head, length in enumerate(lengths):
                    check_size(f"projected_length[{layer}][{head}]", length)

    def _refuse_misspelt(self, unknown: Iterable[str]) -> None:
        """Refuse an unknown key that looks like a field: transformers keeps unknown keys, which then do nothing."""
        fields = [field.name for field in dataclasses.fields(self)]
        for name in unknown:
            if name in PLURALS:
                raise UserError(f"{name!r} is not a field of LinformerConfig; did you mean {name[:-1]!r}?")
            if hasattr(type(self), name) or name in self.attribute_map or name in FOREIGN_NAMES:
                continue
            if name == "causal":
                raise UserError(f"causal is not possible: {NO_CAUSAL}")
            other = nearest_name(name, OTHER_NAMES, cutoff=0.85)
            meant = OTHER_NAMES[other] if other else nearest_name(name, fields, cutoff=0.8)
            if meant:
                raise UserError(f"{name!r} is not a field of LinformerConfig; did you mean {meant!r}?")


def spread(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, …: the number's binary digits mirrored at the point (van der Corput)."""
    digits = f"{number:b}"[::-1]
    return int(digits, 2) / 2 ** len(digits)


def default_scale(k: int, n: int, quick: bool) -> float:
    """The rate of E, relative to the common one.

    An E that serves all layers, without a local window, may be `quick`: slower still than is best for large batches,
    since small ones need it. Any other is the better for hardly moving.
    """
    return k / n * (1.2 if quick else 0.12)


def check_scale(scale: Any) -> None:
    if scale is not None:
        check_positive("projection_scale", scale, otherwise=", or None")


def check_shift(shift: Any, window: int) -> None:
    if not is_number(shift, int) or not 0 <= shift < window:
        possible = f"an integer from 0 to {window - 1}, less than a window" if window > 1 else "0"
        raise UserError(
            f"window_shift={shift!r} must be {possible}: it shifts the windows of n/k tokens that E starts as"
        )


def check_window(window: Any, projection: str) -> None:
    if not is_number(window, int) or not 0 <= window <= MAX_WINDOW:
        raise UserError(f"local_window={window!r} must be an integer from 0 to {MAX_WINDOW}")
    if window and projection == "identity":
        raise UserError(f"local_window={window} adds nothing to projection='identity', which sees all keys: use 0")
    if not window and projection == "none":
        raise UserError("projection='none' leaves no key to attend to; local_window must be at least 1")


def check_heads(hidden_size: int, num_heads: int, name: str) -> None:
    if hidden_size % num_heads:
        raise UserError(f"hidden_size={hidden_size} is not divisible by {name}={num_heads}")


def check_projected_lengths(
    lengths: Sequence[Sequence[int]], max_length: int, *, projection: str, sharing: str, length_name: str
) -> None:
    """Check k of each layer and head against n and against the k of those that share its projection."""
    for k in itertools.chain.from_iterable(lengths):
        check_size("projected_length", k)
        if k > max_length:
            raise UserError(f"projected_length={k} exceeds {length_name}={max_length}; k can be at most n")
        if projection in WINDOWED and max_length % k:
            raise UserError(
                f"projected_length={k} does not divide {length_name}={max_length}, as the windows of "
                f"projection={projection!r} need; projection='linear' takes any k"
            )
    if sharing == "none" or projection not in ("linear", "conv", "dynamic"):
        return
    sharers = [[k for layer in lengths for k in layer]] if sharing == "layerwise" else lengths
    for group in sharers:
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


def plain(value: Any) -> Any:
    """Lists for tuples and arrays, Python's numbers for numpy's: what JSON knows."""
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value
