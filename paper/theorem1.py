"""The Johnson-Lindenstrauss lemma and Theorem 1: how often R fails, compared with the bound.

R is k × n with entries from N(0, 1/k). It is never drawn as a whole: its rows are isotropic, so its effect on a few
vectors has an exact law that takes fewer random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from .heads import Head, normals

# The inequalities of the lemma are tested at each k that promises at most this failure rate.
PROMISES = (0.5, 0.1, 0.01)
# The number of rows of P to test, if more would show nothing new.
ROWS = 8


def record(
    statement: str, norm: str, head: Head, epsilon: float, demanded: int, bound: float, errors: Tensor, zero: Tensor
) -> dict[str, Any]:
    """How often ‖approximation − exact‖ ≤ ε · norm failed.

    `errors` and `zero` are the errors of the approximation and of an output of zeros in each draw, divided by the norm.
    `demanded` is the k that the statement asks for; where it exceeds n, k = n is used. `bound` is the failure rate that
    the paper allows; it is contradicted if the 95% interval of the rate lies above it.
    """
    failures, draws, bound = int((~(errors <= epsilon)).sum()), len(errors), min(1.0, bound)  # a NaN has failed
    interval = stats.binomtest(failures, draws).proportion_ci(method="wilson")
    medians = {"error": float(errors.median()), "zero": float(zero.median())}
    return {
        **{"statement": statement, "norm": norm, "inputs": head.name, "n": head.n, "d": head.d, "epsilon": epsilon},
        **{"demanded": demanded, "k": min(demanded, head.n), "draws": draws, "failures": failures, "bound": bound},
        **{**medians, "zero_rate": float((zero > epsilon).double().mean()), "delta": None, "rate": failures / draws},
        **{"interval": [interval.low, interval.high], "contradicted": bool(interval.low > bound)},
    }


def tail(epsilon: float, k: int) -> float:
    r"""$e^{-(ε^2-ε^3)k/4}$, the lemma's bound on each tail."""
    return math.exp(-(epsilon**2 - epsilon**3) * k / 4)


def theorem_1_k(n: int, epsilon: float) -> int:
    """5 log n / (ε² − ε³), which makes the union bound over n rows, 2n e^{−(ε²−ε³)k/4}, equal to 2 n^(−1/4)."""
    return math.ceil(5 * math.log(n) / (epsilon**2 - epsilon**3))


def chi_squares(k: int, count: int, rng: np.random.Generator) -> Tensor:
    """χ² with k degrees of freedom over k: the law of ‖Re‖² for a unit vector e."""
    return torch.from_numpy(rng.chisquare(k, count) / k)


def lemma(head: Head, epsilons: Sequence[float], draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    r"""Both inequalities of the lemma, for rows x of P and columns y of V.

    With ρ = cos(x, y), 2k xRᵀRy / ‖x‖‖y‖ is (1+ρ)χ² − (1−ρ)χ'² for independent χ² of k degrees of freedom: n matters
    only through ρ, and the variance is (1+ρ²)/k.
    """
    pair = torch.arange(draws) % ROWS
    rows = torch.from_numpy(rng.integers(head.n, size=ROWS))
    x = head.logits(rows).double().softmax(-1)
    y = head.value.double()[:, torch.from_numpy(rng.integers(head.d, size=ROWS))].T
    sizes = x.norm(dim=1) * y.norm(dim=1)
    cosine = ((x * y).sum(1) / sizes)[pair]
    ones = torch.ones(draws)
    found = []
    for epsilon in epsilons:
        for promise in PROMISES:
            k = math.ceil(4 * math.log(2 / promise) / (epsilon**2 - epsilon**3))
            one, other = chi_squares(k, draws, rng), chi_squares(k, draws, rng)
            missed = ((1 + cosine) * one - (1 - cosine) * other) / 2 - cosine
            bound = tail(epsilon, k)
            for statement, norm, allowed, errors, zero in (
                ("JL 1", "|x|", bound, one.sqrt() - 1, -ones),
                ("JL 1", "|x|, squared", bound, one - 1, -ones),
                ("JL 2", "|x||y|", 2 * bound, missed.abs(), cosine.abs()),
                ("JL 2", "|x||y|, y = x", 2 * bound, (one - 1).abs(), ones),
                ("JL 2", "|xy|", 2 * bound, missed.abs() / cosine.abs(), ones),
            ):
                found.append(record(statement, norm, head, epsilon, k, allowed, errors, zero) | {"k": k})
    return found


class RandomLowRank:
    r"""P̃w = P RᵀR w of Theorem 1 on all n rows of P, for any k, in a given number of draws.

    With e = w/‖w‖ and g = Re, the rest of R is independent of g, so RᵀRw has the law of
    ‖w‖ (χ e + √(χ/k) (z − (e·z) e)) with χ = ‖g‖² and z from N(0, I). One pass of attention over V and all z gives
    everything that any k needs. Draw j uses column j mod d of V as w.
    """

    def __init__(self, head: Head, draws: int, rng: np.random.Generator) -> None:
        self.draws, self.rng = draws, rng
        noise = normals(rng, head.n, draws)
        columns = torch.arange(draws) % head.d
        unit = head.value / head.value.norm(dim=0)
        both = torch.cat([unit, noise], 1)
        parts = [(probs @ both, probs.norm(dim=1)) for probs in head.blocks()]
        output, self.sizes = (torch.cat(own) for own in zip(*parts, strict=True))  # (n, d + draws), ‖u‖ of each row
        self.exact = output[:, : head.d][:, columns]  # (n, draws), Pe
        along = (unit[:, columns] * noise).sum(0)
        self.across = output[:, head.d :] - along * self.exact

    @property
    def condition(self) -> float:
        """κ = ‖P‖²‖w‖² / ‖Pw‖², median over columns: the mean square of ‖P̃w − Pw‖ is (1+κ)/k of ‖Pw‖²."""
        return float((self.sizes.square().sum() / self.exact.square().sum(0)).median())

    def missed(self, k: int) -> Tensor:
        """P̃e − Pe, (n, draws)."""
        size = chi_squares(k, self.draws, self.rng).float()
        return (size - 1) * self.exact + (size / k).sqrt() * self.across

    def error(self, missed: Tensor, norm: str) -> Tensor:
        """The error of all of Pw, or the largest error of a row, in each draw."""
        if norm == "|Pw|":
            return (missed.norm(dim=0) / self.exact.norm(dim=0)).double()
        size = self.exact.abs() if norm == "|uw|" else self.sizes[:, None]
        return (missed.abs() / size).amax(0).double()


def theorem_1(head: Head, epsilons: Sequence[float], draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    r"""Theorem 1 at its own k, in three norms.

    - |Pw|: its statement, ‖P̃w − Pw‖ ≤ ε‖Pw‖.
    - |uw|: |uRᵀRw − uw| ≤ ε|uw| for every row u of P, which step (a) of the proof combines.
    - |u||w|: |uRᵀRw − uw| ≤ ε‖u‖‖w‖ for every row, which is what the lemma gives. This holds.
    """
    drawn = RandomLowRank(head, draws, rng)
    found = []
    for epsilon in epsilons:
        demanded = theorem_1_k(head.n, epsilon)
        k = min(demanded, head.n)
        for norm in ("|Pw|", "|uw|", "|u||w|"):
            errors, zero = (drawn.error(each, norm) for each in (drawn.missed(k), drawn.exact))
            bound = 2 * head.n * tail(epsilon, k)
            found.append(record("Theorem 1", norm, head, epsilon, demanded, bound, errors, zero))
    return found
