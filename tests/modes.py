"""The modes in which every property must hold, and small models in each of them."""

import re
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn

import linformers.config
from linformers import LinformerConfig, LinformerForMaskedLM
from linformers.config import SHARINGS
from linformers.errors import UserError
from linformers.projections import LinearProjection

ModelT = TypeVar("ModelT", bound=nn.Module)

PROJECTIONS = [projection for projection in linformers.config.PROJECTIONS if projection != "none"]

SIZES = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}

# Every sharing × projection, Gaussian E, shifted windows, k that differs by head and layer, local windows.
UNIFORM = [{"projection": p, "sharing": s} for p in PROJECTIONS for s in SHARINGS]
GAUSSIAN = [{"projection": "linear", "sharing": s, "projection_init": "gaussian"} for s in SHARINGS]
SHIFTED = [{"projection": "linear", "sharing": s, "shifted_windows": True} for s in SHARINGS]
PER_HEAD = {"projection": "linear", "projected_length": [[4, 2, 4, 1], [2, 2, 2, 2]]}
NON_UNIFORM = [
    {**PER_HEAD, "sharing": "layerwise"},
    {**PER_HEAD, "sharing": "headwise"},
    {**PER_HEAD, "sharing": "key-value", "projection_init": "gaussian"},
    # 4 does not divide 6, so these heads share only the 12 columns of E.
    {"projection": "linear", "sharing": "layerwise", "projected_length": [[4, 6, 6, 4], [12, 12, 12, 12]]},
    {"projection": "linear", "sharing": "none", "projected_length": [[4, 5, 4, 1], [2, 3, 2, 7]]},
    {"projection": "mean", "projected_length": [[4, 3, 4, 1], [6, 6, 6, 6]]},
    {"projection": "max", "projected_length": [4, 3]},
    {"projection": "conv", "sharing": "none", "projected_length": [[4, 3, 4, 1], [6, 6, 6, 6]]},
    {"projection": "conv", "sharing": "key-value", "projected_length": [4, 3]},
]
LOCAL = [
    {"projection": "linear", "local_window": 2},
    {"projection": "linear", "local_window": 2, "shifted_windows": True},
    {"projection": "linear", "sharing": "none", "local_window": [0, 20]},
    {"projection": "max", "local_window": 3},
    {"projection": "conv", "projected_length": [4, 4], "local_window": [1, 0]},
    {"projection": "none", "local_window": 2},
    {**PER_HEAD, "local_window": 1},
    {
        "projection": "linear",
        "sharing": "headwise",
        "projected_length": [4, 0],
        "local_window": 2,
        "shifted_windows": True,
    },
]
SAMPLED = [{"projection": "linear", "projection_init": "sample", "sharing": s} for s in SHARINGS]
ROTARY = [
    {"position_embedding_type": "rotary", "projection": "linear", **mode}
    for mode in (
        *({"projection": p} for p in PROJECTIONS),
        {"shifted_windows": True},
        {"projection_init": "sample", "local_window": 2, "initial_far_bias": -1.5},
        {"projection_init": "sample", "local_window": [3, 0], "sharing": "none"},
        {"projection": "none", "local_window": 2},
        {**PER_HEAD, "projection_init": "sample", "local_window": 1, "initial_far_bias": -1.5},
        {**PER_HEAD, "sharing": "headwise"},
        {"projection": "conv", "projected_length": [4, 3], "sharing": "key-value"},
        {"projection_init": "sample", "projected_length": [0, 4], "local_window": 2},
    )
]
MODEL_ONLY = {"position_embedding_type", "initial_far_bias"}  # fields that the layer alone does not have
ALL = SAMPLED + ROTARY + UNIFORM + GAUSSIAN + SHIFTED + NON_UNIFORM + LOCAL
# One mode of each kind, for tests that take seconds per mode.
KINDS = [{"projection": p, "sharing": "layerwise"} for p in PROJECTIONS]
KINDS += [SAMPLED[0], ROTARY[-5], GAUSSIAN[0], NON_UNIFORM[0], LOCAL[0], {"projection": "none", "local_window": 2}]


def refused(fragment: str) -> pytest.RaisesExc[UserError]:
    """The error of a user whose message contains `fragment`."""
    return pytest.raises(UserError, match=re.escape(fragment))


def name(mode: dict) -> str:
    return "-".join(str(value).replace(" ", "") for value in mode.values())


def config(**mode) -> LinformerConfig:
    """Two layers, four heads, n = 12, k = 4, means, learned positions, no dropout, unless `mode` overrides them."""
    lengths = {"max_position_embeddings": 12, "projected_length": 4, "local_window": 0}
    choices = {"projection_init": "window", "position_embedding_type": "absolute", "norm_first": False}
    return LinformerConfig(
        **{**SIZES, **lengths, **choices, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, **mode}
    )


def light(mode: dict) -> dict:
    """One layer instead of two, to save time, unless layers differ."""
    differ = mode.get("shifted_windows") or any(isinstance(value, list) for value in mode.values())
    return mode if differ else {**mode, "num_hidden_layers": 1}


def randomized(model: ModelT, std: float = 0.3) -> ModelT:
    """Random weights everywhere, including biases, norms and E, large enough that attention matters to the output."""
    for parameter_name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm.weight" in parameter_name), std=std)
    for module in model.modules():
        if isinstance(module, LinearProjection):  # E = E₀ + s Δ
            nn.init.normal_(module.delta, std=std / module.scale)
    return model.eval()


def random_model(model_class: type[ModelT] = LinformerForMaskedLM, **fields) -> ModelT:
    return randomized(model_class(config(**fields)))


def model_and_inputs(**mode) -> tuple[LinformerForMaskedLM, torch.Tensor, torch.Tensor]:
    """A model with random weights, token ids, and a mask with holes and a row that is all padding."""
    model = random_model(**mode)
    ids, mask = torch.randint(31, (4, 11)), torch.rand(4, 11) < 0.7
    mask[:, 5] = True
    mask[3] = False
    return model, ids, mask


def gradients(model: nn.Module, run: Callable | None = None, **inputs) -> list[torch.Tensor]:
    """The gradients of the loss of `model`, or of its compiled version `run`."""
    model.zero_grad()
    (model if run is None else run)(**inputs).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_poison_in_padding_does_not_matter(model: nn.Module, mask: torch.Tensor, poison: float = torch.nan) -> None:
    """What embeddings contain at padding changes no result and reaches no gradient."""
    embeds = torch.randn(*mask.shape, model.config.hidden_size, device=mask.device)
    results = []
    for padding in (0.0, poison):
        model.zero_grad()
        inputs = torch.where(mask[..., None], embeds, padding).requires_grad_()
        result = model(inputs_embeds=inputs, attention_mask=mask)[0]
        # The outputs at padding as well, so that every path of a gradient is taken.
        result.square().sum().backward()
        found = [inputs.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        assert all(gradient.isfinite().all() for gradient in found)
        assert inputs.grad[~mask].abs().sum() == 0
        results.append(result[mask])
    assert torch.equal(*results)
