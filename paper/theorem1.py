"""The Johnson-Lindenstrauss lemma and Theorem 1: how often R fails, compared with the bound.

R is k × n with entries from N(0, 1/k). It is never drawn as a whole: its rows are isotropic, so its effect on a few
vectors has an exact law that takes fewer random numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

RANDOM = "random"
BLOCK = 2**24  # the number of entries of P that exist at once
PROMISES = (0.5, 0.1, 0.01)  # failure rates; the lemma is tested at each k that promises one
ROWS = 8  # the number of rows of P to test, if more would show nothing new


@dataclass(frozen=True)
class Head:
    """One head on one input; `query`, `key` and `value` are (n, d)."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def n(self) -> int:
        return self.value.shape[0]

    @property
    def d(self) -> int:
        return self.value.shape[1]

    def logits(self, rows: Tensor) -> Tensor:
        """Rows of A = Q Kᵀ / √d, (rows, n)."""
        return self.query[rows] @ self.key.T / math.sqrt(self.d)

    def blocks(self) -> Iterator[Tensor]:
        """P, a few rows at a time."""
        for rows in torch.arange(self.n).split(max(1, BLOCK // self.n)):
            yield self.logits(rows).softmax(-1)

    def entropy(self) -> float:
        """Mean entropy of the rows of P in nats: log n if attention is uniform, 0 if it is sharp."""
        return sum(float(torch.special.entr(rows).sum()) for rows in self.blocks()) / self.n


def generator(seed: int, *words: object) -> np.random.Generator:
    """A random stream that depends on these words alone, not on what else is drawn."""
    return np.random.default_rng([seed, zlib.crc32(repr(words).encode())])


def normals(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def random_head(n: int, d: int, rng: np.random.Generator, mean: float = 0.0) -> Head:
    """Normal queries, keys and values of unit variance, so that logits have unit variance, too."""
    query, key, value = (normals(rng, n, d) for _ in range(3))
    return Head(f"{RANDOM}, values of mean {mean:g}" if mean else RANDOM, query, key, value + mean)


def record(
    statement: str, norm: str, head: Head, epsilon: float, demanded: int, bound: float, errors: Tensor, zero: Tensor
) -> dict[str, Any]:
    """How often ‖approximation − exact‖ ≤ ε · norm failed; a bound is contradicted if the 95% interval lies above it.

    `errors` and `zero` are the errors of the approximation and of an output of zeros in each draw, divided by the norm.
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
    x = head.logits(torch.from_numpy(rng.integers(head.n, size=ROWS))).double().softmax(-1)
    y = head.value.double()[:, torch.from_numpy(rng.integers(head.d, size=ROWS))].T
    cosine = ((x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)))[pair]
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
        # κ = ‖P‖²‖w‖² / ‖Pw‖², median over columns: the mean square of ‖P̃w − Pw‖ is (1+κ)/k of ‖Pw‖².
        self.condition = float((self.sizes.square().sum() / self.exact.square().sum(0)).median())

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
    """Theorem 1 at its own k: as stated, ‖P̃w − Pw‖ ≤ ε‖Pw‖; with |uRᵀRw − uw| ≤ ε|uw| for every row u of P, which
    step (a) of the proof combines; and with ε‖u‖‖w‖ for every row, which the lemma gives.
    """
    drawn = RandomLowRank(head, draws, rng)
    found = []
    for epsilon in epsilons:
        demanded = theorem_1_k(head.n, epsilon)
        k = min(demanded, head.n)
        for norm in ("|Pw|", "|uw|", "|u||w|"):
            errors, zero = (drawn.error(each, norm) for each in (drawn.missed(k), drawn.exact))
            found.append(
                record("Theorem 1", norm, head, epsilon, demanded, 2 * head.n * tail(epsilon, k), errors, zero)
            )
    return found
