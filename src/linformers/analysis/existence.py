"""Whether E and F exist for one input: fitted by optimisation, beside those of the theorems and what is simpler.

An E and F that are fitted to one input are free in k d keys and k d values, for n d numbers of output; they say what
Theorem 2 claims ("for any Q, K, V there exist E, F"), not what a Linformer needs, which is one E for all inputs. So
each fit is tried on another input, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import check_size
from ..errors import UserError
from ..projections import window_matrix
from .qkv import Head, normals

STEPS = 500
# Of Adam, times 1/n: a step moves EᵀK by the sum of n entries.
LEARNING_RATE = 0.3
# The errors of random maps are means over so many draws.
DRAWS = 10


@dataclass(frozen=True)
class Fit:
    """Relative errors ‖output − PV‖ / ‖PV‖ of outputs that see k tokens or have rank k; zeros have the error 1.

    Attributes:
        inputs: "random", or the head of a pretrained model.
        n: tokens.
        d: channels of the head.
        k: columns of E and F.
        fitted: softmax(Q (EᵀK)ᵀ/√d) FᵀV with E and F fitted to this input.
        fitted_elsewhere: the same E and F on another input of this head.
        constructed: E = δR, F = e^{−δ}R of Theorem 2, δ = 1/n.
        constructed_best: the same with the best of several δ.
        low_rank: P RᵀR V of Theorem 1.
        windows: E and F average n/k neighbours.
        kept: attention to k tokens kept at random.
        best_rank: the best approximation of P of rank k, from its singular values, times V.
        uniform: the mean of the values for every query.
    """

    inputs: str
    n: int
    d: int
    k: int
    fitted: float
    fitted_elsewhere: float
    constructed: float
    constructed_best: float
    low_rank: float
    windows: float
    kept: float
    best_rank: float
    uniform: float
    zero: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def linear_attention(head: Head, E: Tensor, F: Tensor) -> Tensor:
    """softmax(Q (EᵀK)ᵀ/√d) FᵀV for E and F of (n, k)."""
    return (head.query @ (E.T @ head.key).T / math.sqrt(head.d)).softmax(-1) @ (F.T @ head.value)


def fit(head: Head, target: Tensor, k: int, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """E and F that minimise ‖linear attention − PV‖, by Adam from mean pooling; the best that was met."""
    check_size("steps", steps)
    E = window_matrix(head.n, k, head.n).requires_grad_()
    F = E.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([E, F], lr=LEARNING_RATE / head.n)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, found = math.inf, (E.detach().clone(), F.detach().clone())
    for _ in range(steps):
        error = (linear_attention(head, E, F) - target).norm() / target.norm()
        if error.item() < best:
            best, found = error.item(), (E.detach().clone(), F.detach().clone())
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    return found


def existence(
    head: Head,
    other: Head,
    projected: Sequence[int],
    deltas: Sequence[float],
    rng: np.random.Generator,
    *,
    steps: int = STEPS,
) -> list[Fit]:
    """A fit for each k, with all that it stands beside; `other` is another input of the same head."""
    n = head.n
    probs = head.logits(torch.arange(n)).softmax(-1)
    exact = probs @ head.value
    elsewhere = other.logits(torch.arange(n)).softmax(-1) @ other.value
    left, values, right = torch.linalg.svd(probs.double())

    def miss(output: Tensor, target: Tensor = exact) -> float:
        return float((output - target).norm() / target.norm())

    def mean(output: Callable[..., Tensor], *arguments: float) -> float:
        return sum(miss(output(*arguments)) for _ in range(DRAWS)) / DRAWS

    found = []
    for k in projected:
        if not 1 <= k <= n:
            raise UserError(f"projected={k} must lie between 1 and n={n}")

        def constructed(delta: float, k: int = k) -> Tensor:
            R = normals(rng, n, k) / math.sqrt(k)
            return linear_attention(head, delta * R, math.exp(-delta) * R)

        def low_rank(k: int = k) -> Tensor:
            R = normals(rng, n, k) / math.sqrt(k)
            return probs @ R @ (R.T @ head.value)

        def kept(k: int = k) -> Tensor:
            E = torch.eye(n)[:, torch.from_numpy(rng.choice(n, size=k, replace=False))]
            return linear_attention(head, E, E)

        E, F = fit(head, exact, k, steps)
        pooled = window_matrix(n, k, n)
        truncated = (left[:, :k] * values[:k]) @ (right[:k] @ head.value.double())
        found.append(
            Fit(
                inputs=head.name,
                n=n,
                d=head.d,
                k=k,
                fitted=miss(linear_attention(head, E, F)),
                fitted_elsewhere=miss(linear_attention(other, E, F), elsewhere),
                constructed=mean(constructed, 1 / n),
                constructed_best=min(mean(constructed, delta) for delta in deltas),
                low_rank=mean(low_rank),
                windows=miss(linear_attention(head, pooled, pooled)),
                kept=mean(kept),
                best_rank=miss(truncated.float()),
                uniform=miss(head.value.mean(0).expand_as(exact)),
            )
        )
    return found
