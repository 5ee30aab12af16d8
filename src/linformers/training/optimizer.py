"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Muon (Jordan et al., 2024) and fused AdamW for the groups of `parameter_groups`.

    Updates of Muon have the size of AdamW's (Liu et al., 2025), so that all share one learning rate. As in a fused
    optimizer, an attribute `found_inf` of 1 skips an update without waiting for the device.
    """

    def __init__(self, groups: Mapping[str, Sequence[Tensor]], lr: float, weight_decay: float, **adamw: Any) -> None:
        rest: list[dict[str, Any]] = [
            {"params": list(groups["decayed"])},
            {"params": list(groups["others"]), "weight_decay": 0.0},
        ]
        self.parts: tuple[Optimizer, ...] = (
            Muon(groups["matrices"], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(rest, lr=lr, weight_decay=weight_decay, **{**adamw, "fused": True}),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        skip: Tensor | None = getattr(self, "found_inf", None)
        matrices = self.param_groups[0]["params"]
        before = [] if skip is None else [matrix.clone() for matrix in matrices]
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            part.state, part.param_groups = self.state, groups  # loading a state replaces both
            part.found_inf = skip  # type: ignore[attr-defined]
            part.step()
        if skip is not None:
            for matrix, old in zip(matrices, before, strict=True):
                matrix.copy_(torch.where(skip.bool(), old, matrix))
        return loss


def parameter_groups(model: nn.Module, decayed: Container[str]) -> dict[str, list[Tensor]]:
    """The `matrices` of attention and feed-forward networks, and of the other parameters those that are `decayed`."""
    groups: dict[str, list[Tensor]] = {"matrices": [], "decayed": [], "others": []}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and ".layers." in f".{name}"
        groups["matrices" if is_matrix else "decayed" if name in decayed else "others"].append(parameter)
    return groups
