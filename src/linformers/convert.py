"""Converts encoders of transformers: BERT, RoBERTa, DistilBERT and ELECTRA, with their heads.

With `projection="identity"`, the result computes what the original computes; with `"linear"`, it has the original's
weights, reads longer text, and its cost grows linearly.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from . import modeling
from .checks import check_weights_open, did_you_mean, nearest_name
from .config import ALIASES, NO_CAUSAL, LinformerConfig
from .errors import UserError
from .files import read_json

# Our classes by what follows the name of the architecture in transformers' classes.
CLASSES: dict[str, type[modeling.LinformerPreTrainedModel]] = {
    "Model": modeling.LinformerModel,
    "ForMaskedLM": modeling.LinformerForMaskedLM,
    "ForSequenceClassification": modeling.LinformerForSequenceClassification,
    "ForTokenClassification": modeling.LinformerForTokenClassification,
    "ForQuestionAnswering": modeling.LinformerForQuestionAnswering,
}

Names = tuple[tuple[str, str], ...]

# Parts of parameter names and of ours, replaced in this order.
ENCODER: Names = (
    ("embeddings_project", "embeddings.project"),
    ("embeddings.LayerNorm", "embeddings.norm"),
    ("encoder.layer.", "layers."),
    ("attention.self.", "attention."),
    ("attention.output.dense", "attention.output"),
    ("attention.output.LayerNorm", "attention_norm"),
    ("intermediate.dense", "feed_forward.intermediate"),
    (".output.LayerNorm", ".feed_forward_norm"),
    (".output.dense", ".feed_forward.output"),
    ("qa_outputs", "classifier"),
)
DISTILBERT: Names = (
    ("embeddings.LayerNorm", "embeddings.norm"),
    ("transformer.layer.", "layers."),
    ("attention.q_lin", "attention.query"),
    ("attention.k_lin", "attention.key"),
    ("attention.v_lin", "attention.value"),
    ("attention.out_lin", "attention.output"),
    ("sa_layer_norm", "attention_norm"),
    ("ffn.lin1", "feed_forward.intermediate"),
    ("ffn.lin2", "feed_forward.output"),
    ("output_layer_norm", "feed_forward_norm"),
    ("vocab_transform", "head.dense"),
    ("vocab_layer_norm", "head.norm"),
    ("vocab_projector", "head.decoder"),
    ("qa_outputs", "classifier"),
)
# The same for two layers of a classifier, whose names would otherwise be those of one.
POOLED: Names = (("classifier.", "classifier.output."), ("linformer.pooler.dense", "classifier.dense"))


@dataclass(frozen=True)
class Architecture:
    """How transformers builds and names a kind of encoder.

    Attributes:
        prefix: of the encoder's weights in a model with a head.
        names: parts of parameter names and of ours.
        classifier: the same for sequence classification alone.
        activation: of sequence classification.
        own_activation: whether the head for masked words uses `hidden_act`; ours uses GELU.
        fields: the names of our fields that its config calls otherwise, or their values.
        without: parts of models that a Linformer does not have.
        heads: classes whose head is another or none, by what follows the architecture's name.
    """

    prefix: str
    names: Names
    classifier: Names = ()
    activation: str = "tanh"
    own_activation: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ("pooler.",)
    heads: Mapping[str, str] = field(default_factory=dict)


ROBERTA_HEADS: Names = (
    ("lm_head.layer_norm", "head.norm"),
    ("lm_head.", "head."),
    ("classifier.out_proj", "classifier.output"),
)
ROBERTA = Architecture(
    prefix="roberta",
    names=(*ENCODER, *ROBERTA_HEADS),
    without=("pooler.", "lm_head.bias"),  # a second name of the decoder's bias
)
ARCHITECTURES = {
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "bert": Architecture(
        prefix="bert",
        names=(
            *ENCODER,
            ("cls.predictions.transform.dense", "head.dense"),
            ("cls.predictions.transform.LayerNorm", "head.norm"),
            ("cls.predictions.decoder", "head.decoder"),
        ),
        classifier=POOLED,
        own_activation=True,
        without=("pooler.", "cls.predictions.bias", "cls.seq_relationship"),
        heads={"ForPreTraining": "ForMaskedLM"},
    ),
    "distilbert": Architecture(
        prefix="distilbert",
        names=DISTILBERT,
        classifier=(
            ("pre_classifier.", "classifier.dense."),
            ("classifier.weight", "classifier.output.weight"),
            ("classifier.bias", "classifier.output.bias"),
        ),
        activation="relu",
        own_activation=True,
        fields={
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "classifier_dropout": "seq_classif_dropout",
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-12,
        },
    ),
    "electra": Architecture(
        prefix="electra",
        names=(
            *ENCODER,
            ("generator_predictions.LayerNorm", "head.norm"),
            ("generator_predictions.dense", "head.dense"),
            ("generator_lm_head", "head.decoder"),
            ("classifier.out_proj", "classifier.output"),
        ),
        activation="gelu",
        without=("discriminator_predictions.",),
        heads={"ForPreTraining": "Model"},
    ),
}
# Why others cannot be converted.
OBSTACLES = {
    "mpnet": "its attention has relative position biases",
    "deberta": "its attention has relative positions",
    "deberta-v2": "its attention has relative positions",
    "albert": "its layers share their weights",
    "modernbert": "its layers have gated feed-forward networks and rotary positions in two bases",
    "longformer": "it is long already, with attention of its own",
    "big_bird": "it is long already, with attention of its own",
    "t5": "it is an encoder with a decoder",
    "bart": "it is an encoder with a decoder",
    "linformer": "it is a Linformer already: use linformers resize",
    "gpt2": "it is a decoder, and Linformer has no causal mode",
    "llama": "it is a decoder, and Linformer has no causal mode",
}

DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
SAME_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("type_vocab_size", "initializer_range", "layer_norm_eps", "tie_word_embeddings", *DROPOUT_FIELDS),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type"),
)
PROJECTION_FIELDS = (
    *("projected_length", "sharing", "projection_init", "projection_scale"),
    *("shifted_windows", "local_window", "initial_far_bias"),
)
# Fields that may differ from the original's: they change neither the shape nor the meaning of a weight.
FREE_FIELDS = (
    "projection",
    *PROJECTION_FIELDS,
    *DROPOUT_FIELDS,
    "sparse_prediction",
    "problem_type",
    "attn_implementation",
)

DEFAULT_LENGTH = 4096
# With a window, what agrees best with the original: less weight for the one token in n/k that each projected key is.
FAR_BIAS = -1.0


@torch.no_grad()
def from_pretrained(
    model: str | Path | PreTrainedModel,
    length: int | None = None,
    *,
    projection: str = "linear",
    revision: str | None = None,
    **config: Any,
) -> modeling.LinformerPreTrainedModel:
    """Copy the weights of an encoder with full attention into the Linformer class with the same head.

    With `projection="identity"`, the result is the Transformer twin, which computes what the original computes for
    tokens that are padded on the right. The poolers of base models have no counterpart.

    Args:
        model: a model of transformers, or the folder or hub name of one: BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT or
            ELECTRA.
        length: n of the result; learned positions are repeated, chunk by chunk. `None`: 4096, or the original's with
            `"identity"`.
        projection: as in `LinformerConfig`.
        revision: the branch, tag or commit of a hub name.
        **config: other fields of `LinformerConfig`, such as `projected_length=256` and `local_window=64`, the defaults.
    """
    original = model if isinstance(model, PreTrainedModel) else load_original(str(model), revision)
    name, theirs = type(original).__name__, original.config
    architecture, head = architecture_of(theirs), head_of(original)
    fields = fields_of(theirs, architecture)
    check_changes(fields, theirs, {**config, "projection": projection})
    if head == "ForMaskedLM" and architecture.own_activation and fields["hidden_act"] != "gelu":
        raise UserError(f"{name} has hidden_act={fields['hidden_act']!r} in its head for masked words, ours has GELU")
    twin = load(CLASSES[head](LinformerConfig(**fields)), weights_of(original, architecture, head))
    if length is None:
        length = fields["max_position_embeddings"] if projection == "identity" else DEFAULT_LENGTH
    repeat_positions(twin, length)
    fields |= {"projection": projection, "max_position_embeddings": length}
    if projection != "identity":
        fields |= {"projected_length": None, "local_window": None}  # the defaults for this length
        fields |= {"projection_init": "sample", "initial_far_bias": FAR_BIAS}
    result = load(CLASSES[head](LinformerConfig(**{**fields, **config})), twin.state_dict())
    return result.to(original.device, original.dtype).train(original.training)


def repeat_positions(twin: modeling.LinformerPreTrainedModel, length: int) -> None:
    """Resize a model so that each token of a long text has the position that it would have in its chunk.

    Chunks of the original's length begin and end with a special token, so their text is two tokens shorter.
    """
    n = twin.config.max_position_embeddings
    positions = twin.base_model.embeddings.position_embeddings.weight.clone()
    twin.resize_length(length)
    if length > n > 2:
        rows = 1 + torch.arange(n - 1, length - 1) % (n - 2)
        twin.base_model.embeddings.position_embeddings.weight[n:] = positions[rows]


def load_original(name: str, revision: str | None = None) -> PreTrainedModel:
    """Load a model from a folder or the hub, with the head that it was saved with; nothing in it is executed."""
    options = {"revision": revision or "main"}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
        architecture_of(config)
        classes = getattr(config, "architectures", None) or ["AutoModel"]
        model_class = getattr(transformers, classes[0], None)
        if model_class is None:
            raise UserError(f"model={name!r} is a {classes[0]}, which transformers does not have")
        check_weights_open(Path(name))
        loading: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = model_class.from_pretrained(name, **options, **loading)
    except UserError:
        raise
    except (OSError, ValueError, SafetensorError, RuntimeError, EOFError, UnpicklingError) as error:
        for path in sorted(Path(name).glob("pytorch_model*.bin")):
            load_pickled(path)
        if isinstance(error, OSError) and not Path(name).exists():
            raise UserError(f"model={name!r} is neither a folder nor a name on the hub that can be reached") from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"model={name!r} does not load: {reason}") from None
    for key, theirs, expected in sorted(found["mismatched_keys"]):
        shapes = f"{tuple(theirs)}, expected {tuple(expected)} as in config.json"
        raise UserError(f"model={name!r} has the weight {key} of shape {shapes}")
    if missing := sorted(key for key in found["missing_keys"] if "pooler." not in key):
        raise UserError(f"model={name!r} is incomplete: it has no weight {missing[0]}")
    return model.eval()


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Refuses architectures and variants of them that a Linformer cannot compute."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"a model of type {kind!r} cannot be converted: {OBSTACLES.get(kind, f'use one of {known}')}")
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise UserError(f"the model has {name}=True: {NO_CAUSAL}")
    if (positions := getattr(config, "position_embedding_type", None) or "absolute") != "absolute":
        raise UserError(f"the model has position_embedding_type={positions!r}, but only 'absolute' can be converted")
    if ARCHITECTURES[kind] is ROBERTA and config.pad_token_id is None:
        raise UserError("the model has pad_token_id=None, but its positions are counted from pad_token_id + 1")
    return ARCHITECTURES[kind]


def head_of(model: PreTrainedModel) -> str:
    """Which of `CLASSES` has the head of a model."""
    name = type(model).__name__
    head = re.sub(r"^.*?(?=Model$|For[A-Z])", "", name)
    head = ARCHITECTURES[model.config.model_type].heads.get(head, head)
    if head not in CLASSES:
        raise UserError(f"{name} has a head without a counterpart: load its encoder with AutoModel and convert that")
    return head


def fields_of(config: PreTrainedConfig, architecture: Architecture) -> dict[str, Any]:
    """The fields of the twin of a model."""
    fields = {}
    for name in (*SAME_FIELDS, "embedding_size"):
        theirs = architecture.fields.get(name, name)
        fields[name] = getattr(config, theirs, None) if isinstance(theirs, str) else theirs
    fields |= {"norm_first": False, "position_embedding_type": "absolute", "projection_init": "window"}
    fields |= {"classifier_activation": architecture.activation, "local_window": 0, "projection": "identity"}
    return {**fields, "max_position_embeddings": config.max_position_embeddings - unused_positions(config)}


def check_changes(fields: dict[str, Any], theirs: PreTrainedConfig, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if name in PROJECTION_FIELDS and changes["projection"] == "identity":
            raise UserError(f"{name}={value!r} has no effect on projection='identity'; use 'linear'")
        if name in FREE_FIELDS:
            continue
        if name == "max_position_embeddings":
            raise UserError(f"max_position_embeddings={value!r}: pass it to convert.from_pretrained as length")
        if not hasattr(LinformerConfig, name):
            nearest = ALIASES.get(name) or nearest_name(name, FREE_FIELDS, cutoff=0.8)
            raise UserError(f"{name}={value!r} is not a field of LinformerConfig{did_you_mean(nearest)}")
        own = fields.get(name, getattr(theirs, name, getattr(LinformerConfig, name)))
        if own != value:
            raise UserError(f"{name}={value!r} is not supported: the weights are for {own!r}")


def unused_positions(config: PreTrainedConfig) -> int:
    """RoBERTa counts positions from pad_token_id + 1 and never uses the rows before."""
    return config.pad_token_id + 1 if ARCHITECTURES[config.model_type] is ROBERTA else 0


def weights_of(model: PreTrainedModel, architecture: Architecture, head: str) -> dict[str, Tensor]:
    """The weights of a model under our names."""
    names, without = ((f"{architecture.prefix}.", "linformer."), *architecture.names), architecture.without
    if head == "ForSequenceClassification":
        names += architecture.classifier
        without = without if architecture.classifier is not POOLED else without[1:]
    weights = {}
    for key, weight in model.state_dict().items():
        if any(part in key for part in (*without, "_ids")):
            continue
        if "position_embeddings" in key:
            weight = weight[unused_positions(model.config) :]
        weights[own_name(key, names)] = weight
    if head == "Model":  # also from a model with a head that is left out
        weights = {key.removeprefix("linformer."): weight for key, weight in weights.items()}
    types = f"{'' if head == 'Model' else 'linformer.'}embeddings.token_type_embeddings.weight"
    if types not in weights:  # as in DistilBERT
        weights[types] = torch.zeros(1, weights[types.replace("token_type", "word")].shape[1], dtype=model.dtype)
    return weights


def attention_outputs(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of an original whose outputs are those of its attentions, before the residual, in order."""
    names = ARCHITECTURES[model.config.model_type].names
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [module for name, module in linear if own_name(name, names).endswith(".attention.output")]


def own_name(name: str, names: Names) -> str:
    for theirs, own in names:
        name = name.replace(theirs, own)
    return name


def load(model: modeling.LinformerPreTrainedModel, weights: dict[str, Tensor]) -> modeling.LinformerPreTrainedModel:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    lost = unexpected + [key for key in missing if "projections." not in key and "far_bias" not in key]
    assert not lost, f"not converted: {lost}"
    return model


# What fairseq calls them, after `sentence_encoder.` and in the head for masked words.
FAIRSEQ: Names = (
    ("embed_tokens", "embeddings.word_embeddings"),
    ("embed_positions", "embeddings.position_embeddings"),
    ("layernorm_embedding", "embeddings.norm"),
    ("emb_layer_norm", "embeddings.norm"),
    ("self_attn_layer_norm", "attention_norm"),
    ("self_attn.q_proj", "attention.query"),
    ("self_attn.k_proj", "attention.key"),
    ("self_attn.v_proj", "attention.value"),
    ("self_attn.out_proj", "attention.output"),
    ("fc1", "feed_forward.intermediate"),
    ("fc2", "feed_forward.output"),
    ("final_layer_norm", "feed_forward_norm"),
)
FAIRSEQ_HEAD = {
    "dense.weight": "head.dense.weight",
    "dense.bias": "head.dense.bias",
    "layer_norm.weight": "head.norm.weight",
    "layer_norm.bias": "head.norm.bias",
    "weight": "head.decoder.weight",
    "bias": "head.decoder.bias",
}
FAIRSEQ_PADS = 2  # fairseq counts positions from 2, after its padding token 1


@torch.no_grad()
def from_fairseq(
    checkpoint: str | Path | Mapping[str, Any], num_attention_heads: int, hidden_act: str = "gelu"
) -> modeling.LinformerForMaskedLM:
    """Load a checkpoint of the authors' code, `examples/linformer` in fairseq (Ott et al., 2019).

    The result computes what the original computes for a text without padding; the original lets padding reach the
    projected keys. Heads for classification are left out.

    Args:
        checkpoint: a `.pt` file, which is read without running any code in it, or the state dict in it.
        num_attention_heads: h, which the weights do not tell.
        hidden_act: the activation of the feed-forward networks.
    """
    state = checkpoint if isinstance(checkpoint, Mapping) else load_pickled(Path(checkpoint))
    state = state.get("model", state)
    encoder, head = (
        {name.partition(part)[2]: value for name, value in state.items() if part in name}
        for part in ("sentence_encoder.", "lm_head.")
    )
    for name in ("embed_tokens.weight", "embed_positions.weight", "layers.0.fc1.weight"):
        if name not in encoder:
            raise UserError(f"the checkpoint is not a Linformer of fairseq: it has no {name}")
    layers = 1 + max(int(name.split(".")[1]) for name in encoder if name.startswith("layers."))
    E, sharing = compressions(encoder, layers, "layers.{}.self_attn", "compress_layer.weight" in encoder)
    if "dense.weight" not in head:
        raise UserError("the checkpoint is not a Linformer of fairseq: it has no lm_head.dense.weight")
    (k, n), (vocab_size, hidden_size) = E[0].shape, encoder["embed_tokens.weight"].shape
    config = LinformerConfig.paper(
        n,
        k,
        sharing,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=num_attention_heads,
        intermediate_size=len(encoder["layers.0.fc1.weight"]),
        hidden_act=hidden_act,
        type_vocab_size=1,
    )
    weights = {"linformer.embeddings.token_type_embeddings.weight": torch.zeros(1, hidden_size)}
    for name, value in encoder.items():
        if "compress" in name or name == "version":
            continue
        name = own_name(name, FAIRSEQ)
        if "position_embeddings" in name:
            value = value[FAIRSEQ_PADS : n + FAIRSEQ_PADS]
        weights[f"linformer.{name}"] = value
    weights |= {FAIRSEQ_HEAD[name]: value for name, value in head.items() if name in FAIRSEQ_HEAD}
    weights |= {f"linformer.projections.{i}.delta": matrix.T for i, matrix in enumerate(E)}  # s = 1, and E starts at 0
    return load(modeling.LinformerForMaskedLM(config), weights).eval()


def compressions(weights: Mapping[str, Tensor], layers: int, place: str, shared: bool) -> tuple[list[Tensor], str]:
    """The different E and F (k, n) of all layers, in order, and what kind of sharing they have.

    Args:
        weights: of the encoder.
        layers: their number.
        place: of the attention of a layer, whose number is `{}`.
        shared: whether all layers have the same E, under one of its names.
    """
    names = [f"{place.format(i)}.compress_{kind}.weight" for i in range(layers) for kind in "kv"]
    if shared:
        names = ["compress_layer.weight", *names]
    found = [weights[name] for name in names if name in weights]
    if not found:
        raise UserError(f"the checkpoint is not a Linformer: it has no {names[0]}")
    if shared:
        return found[:1], "layerwise"
    return found, "key-value" if len(found) == layers else "headwise"


# The layers of jargon are those of fairseq, normalized first, in a RoBERTa of transformers.
JARGON: Names = (
    ("encoder.layer_norm", "final_norm"),
    ("encoder.layer.", "layers."),
    ("attn_layer_norm", "attention_norm"),
    ("final_layer_norm", "feed_forward_norm"),
    ("attention.q_proj", "attention.query"),
    ("attention.k_proj", "attention.key"),
    ("attention.v_proj", "attention.value"),
    ("attention.out_proj", "attention.output"),
    ("intermediate.dense", "feed_forward.intermediate"),
    (".output.dense", ".feed_forward.output"),
    *ROBERTA_HEADS,
)
# What its models have and do not use, and a second name of the decoder's bias.
JARGON_WITHOUT = ("compress", "LayerNorm", "sbo_head.", "pooler.", "lm_head.bias", "_ids", "embed_positions")


@torch.no_grad()
def from_jargon(model: str | Path, revision: str | None = None) -> modeling.LinformerPreTrainedModel:
    """Load a French `jargon` encoder (Segonne et al., 2024), a Linformer whose code is on the hub, without that code.

    The result computes what the original computes for a text without padding; the original lets padding reach the
    projected keys.

    Args:
        model: a folder or hub name, such as `"PantagrueLLM/jargon-general-base"`.
        revision: the branch, tag or commit of a hub name.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["config.json", "model.safetensors", "pytorch_model.bin"]
        folder = Path(snapshot_download(str(model), revision=revision, allow_patterns=patterns))
    theirs = read_json(folder / "config.json")
    if theirs.get("model_type") != "jargon":
        raise UserError(f"model={str(model)!r} is of type {theirs.get('model_type')!r}, expected 'jargon'")
    for name, expected in {"encoder_normalize_before": True, "layer_norm_eps": 1e-5}.items():
        if theirs.get(name, expected) != expected:
            raise UserError(f"model={str(model)!r} has {name}={theirs[name]!r}, but only {expected} can be converted")
    head = re.sub(r"^.*?(?=Model$|For[A-Z])", "", (theirs.get("architectures") or ["JargonModel"])[0])
    if head not in CLASSES:
        raise UserError(f"model={str(model)!r} has a head without a counterpart: {theirs['architectures'][0]}")
    check_weights_open(folder)
    path = folder / "model.safetensors"
    state = load_file(path) if path.exists() else load_pickled(folder / "pytorch_model.bin")
    encoder = {name.removeprefix("roberta."): value for name, value in state.items()}
    for kind in ("word", "position", "token_type"):
        if (name := f"embeddings.{kind}_embeddings.weight") not in encoder:
            raise UserError(f"model={str(model)!r} is not a jargon encoder: it has no {name}")
    if head == "ForMaskedLM":  # a file may have each tied weight once
        encoder.setdefault("lm_head.decoder.weight", encoder["embeddings.word_embeddings.weight"])
        encoder.setdefault("lm_head.decoder.bias", encoder.get("lm_head.bias"))
    layers, first = theirs.get("num_layers", 12), theirs.get("pad_token_id", 1) + 1
    shared = theirs.get("shared_layer_kv_compressed", 1) == 1
    E, sharing = compressions(
        {name.removeprefix("encoder."): value for name, value in encoder.items()}, layers, "layer.{}.attention", shared
    )
    positions, words = (encoder[f"embeddings.{name}_embeddings.weight"] for name in ("position", "word"))
    n = min(E[0].shape[1], len(positions) - first)  # fewer tokens use the first rows of E
    same = [name for name in ("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id") if name in theirs]
    config = LinformerConfig.paper(
        n,
        len(E[0]),
        sharing,
        vocab_size=len(words),
        hidden_size=words.shape[1],
        num_hidden_layers=layers,
        num_attention_heads=theirs.get("encoder_attention_heads", 12),
        intermediate_size=len(encoder["encoder.layer.0.intermediate.dense.weight"]),
        hidden_act=theirs.get("hidden_act", "relu"),
        type_vocab_size=len(encoder["embeddings.token_type_embeddings.weight"]),
        tie_word_embeddings=theirs.get("tie_word_embeddings", True),
        norm_first=True,
        embedding_norm=False,
        **{name: theirs[name] for name in same},
    )
    prefix = "" if head == "Model" else "linformer."
    weights = {f"{prefix}projections.{i}.delta": matrix.T[:n] for i, matrix in enumerate(E)}
    for name, value in encoder.items():
        if not any(part in name for part in JARGON_WITHOUT):
            value = value[first : n + first] if "position_embeddings" in name else value
            own = own_name(name, JARGON)
            is_head = own.startswith(("head.", "classifier."))
            weights[own if is_head else prefix + own] = value
    if head == "Model":
        weights = {name: value for name, value in weights.items() if not name.startswith(("head.", "classifier."))}
    return load(CLASSES[head](config), weights).eval()


def load_pickled(path: Path) -> dict[str, Any]:
    """Unpickle tensors, containers and the namespace of arguments that fairseq saves, and nothing else."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Exception:  # of pickle, zip files and torch, whose advice is to execute the file
        raise UserError(f"{path} is damaged, or holds more than weights") from None
