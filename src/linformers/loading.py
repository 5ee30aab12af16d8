"""Checkpoints that a model must not be loaded from: of another length, another architecture, or another meaning."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from .config import LinformerConfig
from .errors import UserError

# Arguments of `from_pretrained` that say where a checkpoint lies.
WHERE_TO_LOAD_FROM = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


# Fields that decide what the weights of a projection stand for.
MEANING_OF_WEIGHTS = ("sharing", "projection_init", "projection_scale", "shifted_windows")


def refuse_other_model(name: str, config: dict[str, Any]) -> None:
    """Refuse the checkpoint of another architecture, of which nothing would fit."""
    kind = config.get("model_type")
    if kind not in (None, LinformerConfig.model_type):
        way_out = "; load it as such, then call linformers.convert.from_roberta" if kind == "roberta" else ""
        raise UserError(f"{name} cannot be loaded from a checkpoint of model type {kind!r}{way_out}")


def asked_config(saved: LinformerConfig, kwargs: dict[str, Any], where: dict[str, Any]) -> LinformerConfig:
    """The config that `from_pretrained(**kwargs)` asks for."""
    asked = kwargs.get("config") or saved
    if not isinstance(asked, LinformerConfig):
        asked = LinformerConfig.from_pretrained(asked, **where)
    ours, everyones = ({f.name for f in dataclasses.fields(kind)} for kind in (LinformerConfig, PreTrainedConfig))
    names = (ours - everyones) & kwargs.keys()
    return LinformerConfig(**{**asked.to_dict(), **{name: kwargs[name] for name in names}})


def refuse_other_projection(saved: LinformerConfig, asked: LinformerConfig) -> None:
    """Refuse a config under which the weights of a checkpoint do not fit, or would mean something else."""
    n, k = asked.max_position_embeddings, asked.projected_length
    if saved.num_attention_heads != asked.num_attention_heads:
        raise UserError(
            f"the checkpoint has num_attention_heads={saved.num_attention_heads}, of which its weights are made; "
            f"num_attention_heads={asked.num_attention_heads} would read them in another way"
        )
    # Layers that only one of them has are left out, or start anew.
    lengths = zip(saved.projected_lengths, asked.projected_lengths, strict=False)
    if saved.max_position_embeddings != n or (
        saved.projection == asked.projection and any(theirs != ours for theirs, ours in lengths)
    ):
        raise UserError(
            f"the checkpoint is for n={saved.max_position_embeddings}, k={saved.projected_length}, but n={n}, k={k} "
            f"was asked for; load it as it is, then call model.resize_length({n}, {k})"
        )
    names = ("norm_first", *MEANING_OF_WEIGHTS) if saved.projection == asked.projection else ("norm_first",)
    for name in names:
        theirs, ours = getattr(saved, name), getattr(asked, name)
        if theirs != ours:
            raise UserError(
                f"the checkpoint was made with {name}={theirs!r}: under {ours!r} its weights mean another; "
                f"ask for {name}={theirs!r}"
            )


def refuse_other_length(model: Any, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Say in one sentence what torch would say in one for each tensor."""
    positions = state_dict.get(f"{prefix}embeddings.position_embeddings.weight")
    max_length = model.config.max_position_embeddings
    if positions is not None and len(positions) != max_length:
        raise UserError(
            f"the checkpoint is for n={len(positions)}, the model for n={max_length}; load it into a model for "
            f"n={len(positions)}, then call model.resize_length({max_length})"
        )
