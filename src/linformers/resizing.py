"""Resize a trained model to another n or k, and check that a checkpoint matches a config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from .checks import check_size
from .config import WITHOUT_K, LinformerConfig
from .errors import UserError
from .files import MODEL_FILES, check_files, read_json
from .projections import Projections

# Arguments of `from_pretrained` that locate a checkpoint.
LOCATION = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


@torch.no_grad()
def resize_length(model: Any, max_length: int, projected_length: int | Sequence[Any] | None = None) -> None:
    """Implements `LinformerPreTrainedModel.resize_length`."""
    check_size("max_length", max_length)
    old = model.config
    if projected_length is None and old.projection not in WITHOUT_K:
        projected_length = old.projected_length or old.largest_projected_length
        if max_length < (k := old.largest_projected_length):
            raise UserError(f"max_length={max_length} is below k={k}: pass projected_length={max_length} or less")
    changes = {"max_position_embeddings": max_length, "projected_length": projected_length}
    new = LinformerConfig(**{**old.to_dict(), **changes})
    n, new_n = old.max_position_embeddings, new.max_position_embeddings
    if (n, old.projected_lengths) == (new_n, new.projected_lengths):
        return
    same_ratio = all(
        k * new_n == new_k * n
        for heads, new_heads in zip(old.projected_lengths, new.projected_lengths, strict=True)
        for k, new_k in zip(heads, new_heads, strict=True)
    )

    base = model.base_model
    with torch.device("meta"):
        projections = Projections.from_config(new)
    for projection, source in zip(projections, base.projections, strict=True):
        if (like := next(source.parameters(), None)) is not None:
            projection.to_empty(device=like.device).to(like.dtype).requires_grad_(like.requires_grad)
        projection.load_resized(source, same_ratio)  # type: ignore[operator]
    base.projections = projections
    if (positions := base.embeddings.position_embeddings) is not None:
        # Repeated positions still tell neighbors apart; stretched ones would not.
        weight = positions.weight[torch.arange(new_n, device=positions.weight.device) % n]
        frozen = not positions.weight.requires_grad
        base.embeddings.position_embeddings = type(positions).from_pretrained(weight, freeze=frozen)
    old.max_position_embeddings, old.projected_length = new_n, new.projected_length


def check_weights(name: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a folder that `from_pretrained(name, **kwargs)` cannot trust: damaged, or with weights in pickle alone."""
    folder = Path(name or "", kwargs.get("subfolder") or "")
    if name is None or not folder.is_dir():
        return
    check_files(folder, MODEL_FILES)
    if (folder / "config.json").exists():
        read_json(folder / "config.json")
    for index in folder.glob("*.safetensors.index.json"):
        parts = read_json(index).get("weight_map")
        names = list(parts.values()) if isinstance(parts, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name and (folder / name).is_file() for name in names):
            raise UserError(f"{index} is damaged: its weight_map must name files beside it")
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles and kwargs["use_safetensors"] and not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no safetensors but {pickles[0]}, a pickle, which can run code: convert it")


def remove_older_weights(folder: Path) -> None:
    """Of weights in one file and weights in shards, keep those that were written last.

    transformers leaves the others, and would load the ones in one file.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() and index.exists():
        min(whole, index, key=lambda path: path.stat().st_mtime_ns).unlink()


def refuse_other_shapes(model_class: Any, folder: Path, config: LinformerConfig | None) -> None:
    """Raise a `UserError` that names the first weight in a folder whose shape is not what the config asks for."""
    with torch.device("meta"):
        expected = model_class(config or LinformerConfig.from_pretrained(folder)).base_model.state_dict()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(key).get_shape())
                wanted = expected.get(key.removeprefix(f"{model_class.base_model_prefix}."))
                if wanted is not None and shape != wanted.shape:
                    raise UserError(f"{path} does not fit its config: {key} is {shape}, expected {tuple(wanted.shape)}")


def check_checkpoint(model_class: str, name: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a checkpoint that `from_pretrained(name, **kwargs)` cannot load, or would interpret differently."""
    # Configs are only compared here; transformers loads the one that counts, with the caller's attn_implementation.
    location = {key: value for key, value in kwargs.items() if key in LOCATION} | {"attn_implementation": "eager"}
    values, _ = LinformerConfig.get_config_dict(name, **location)
    kind = values.get("model_type")
    if kind not in (None, LinformerConfig.model_type):
        remedy = "; linformers.convert.from_pretrained converts BERT, RoBERTa, DistilBERT and ELECTRA"
        raise UserError(f"{model_class} cannot be loaded from a checkpoint of model type {kind!r}{remedy}")
    saved = LinformerConfig.from_pretrained(name, **location)
    asked = kwargs.get("config") or saved
    if not isinstance(asked, LinformerConfig):
        asked = LinformerConfig.from_pretrained(asked, **location)
    ours, everyones = ({f.name for f in dataclasses.fields(kind)} for kind in (LinformerConfig, PreTrainedConfig))
    overrides = {key: value for key, value in kwargs.items() if key in ours - everyones}
    check_compatible(saved, LinformerConfig(**{**asked.to_dict(), **overrides}))


def check_compatible(saved: LinformerConfig, asked: LinformerConfig) -> None:
    """Refuse a config that does not fit the weights of a checkpoint, or would interpret them differently."""
    n, same_projection = asked.max_position_embeddings, saved.projection == asked.projection
    if saved.num_attention_heads != asked.num_attention_heads:
        raise UserError(
            f"the checkpoint has num_attention_heads={saved.num_attention_heads}; its weights cannot be split into "
            f"num_attention_heads={asked.num_attention_heads}"
        )
    # Layers that only one of them has are dropped, or initialized.
    lengths = zip(saved.projected_lengths, asked.projected_lengths, strict=False)
    if saved.max_position_embeddings != n or (same_projection and any(theirs != ours for theirs, ours in lengths)):
        k = asked.projected_length or asked.largest_projected_length
        raise UserError(
            f"the checkpoint is for n={saved.max_position_embeddings}, k={saved.largest_projected_length}, but n={n}, "
            f"k={k} was requested; load it as it is, then call model.resize_length({n}, {k})"
        )
    meaning: dict[str, tuple[Any, Any]] = {"norm_first": (saved.norm_first, asked.norm_first)}
    meaning["position_embedding_type"] = (saved.position_embedding_type, asked.position_embedding_type)
    if saved.is_rotary and asked.is_rotary:
        meaning["rope_theta"] = (saved.rope_theta, asked.rope_theta)
    if same_projection and saved.projection in ("linear", "conv"):
        meaning["sharing"] = (saved.sharing, asked.sharing)
    if same_projection and saved.projection == "linear":
        meaning["projection_init"] = (saved.resolved_projection_init, asked.resolved_projection_init)
        meaning["shifted_windows"] = (saved.resolved_shifted_windows, asked.resolved_shifted_windows)
        meaning["projection_scale"] = (saved.resolved_projection_scale, asked.resolved_projection_scale)
    for name, (theirs, ours) in meaning.items():
        if theirs != ours:
            raise UserError(
                f"the checkpoint was trained with {name}={theirs!r}; {ours!r} would interpret its weights differently: "
                f"use {name}={theirs!r}"
            )


def refuse_other_length(model: Any, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """A hook that replaces torch's list of mismatched shapes with one sentence."""
    max_length = model.config.max_position_embeddings
    row_per_token = re.compile(re.escape(prefix) + r"(embeddings\.position_embeddings\.weight|projections\..*\.delta)")
    lengths = [len(weight) for name, weight in state_dict.items() if row_per_token.fullmatch(name)]
    if lengths and lengths[0] != max_length:
        raise UserError(
            f"the checkpoint is for n={lengths[0]}, the model for n={max_length}; load it into a model for "
            f"n={lengths[0]}, then call model.resize_length({max_length})"
        )
