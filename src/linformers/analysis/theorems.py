r"""The Johnson-Lindenstrauss inequalities and Theorem 1, put to the test: how often R fails, against the bound.

R is k × n with entries from N(0, 1/k). It is never drawn as a whole: its rows are isotropic, so what it does to a few
vectors has a law of its own that takes fewer numbers, and the law is exact, not an approximation.
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
from .qkv import Head, blocks, normals

# Inequalities of the lemma are tried at the k at which they promise to fail no more often than this.
PROMISES = (0.5, 0.1, 0.01)
# In practice, a k will do if no more than this share of draws fails.
TOLERATED = 0.05
# Rows of P that are looked at where all of them would say no more.
ROWS = 8
# Beyond this no k is looked for.
LARGEST = 2**40


@dataclass(frozen=True)
class Record:
    """How often an inequality ‖approximation − exact‖ ≤ ε · (its norm) failed.

    Attributes:
        statement: of the paper.
        norm: what the error is measured in.
        inputs: "random", or the head of a pretrained model.
        n: tokens.
        d: channels of the head.
        epsilon: ε.
        demanded: the k that the statement asks for.
        k: the k that was used: `demanded`, or n where that is less.
        draws: of R.
        failures: draws in which the inequality did not hold.
        bound: the share of failures that the paper allows.
        error: of the approximation, the median over draws.
        zero: error of an output of zeros.
        uniform: error of the mean of the values, whatever the query.
        zero_rate: share of draws in which zeros fail.
        uniform_rate: share of draws in which the mean fails.
        branch: of the minimum in Theorem 2, the side that is smaller.
        delta: δ of Theorem 2.
        smallest: the smallest k at which at most 5% of draws fail, `None` where there is none or none was looked for.
    """

    statement: str
    norm: str
    inputs: str
    n: int
    d: int
    epsilon: float
    demanded: int
    k: int
    draws: int
    failures: int
    bound: float
    error: float
    zero: float
    uniform: float
    zero_rate: float
    uniform_rate: float
    branch: str = ""
    delta: float | None = None
    smallest: int | None = None

    @property
    def rate(self) -> float:
        return self.failures / self.draws

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.failures, self.draws)

    @property
    def contradicted(self) -> bool:
        """Whether the rate is above the bound, beyond what chance explains."""
        return self.interval[0] > self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate, "interval": self.interval, "contradicted": self.contradicted}


def wilson(failures: int, draws: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95% confidence interval of a rate."""
    rate, weight = failures / draws, z * z / draws
    centre = (rate + weight / 2) / (1 + weight)
    half = z * math.sqrt(rate * (1 - rate) / draws + weight / draws / 4) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def record(
    statement: str,
    norm: str,
    head: Head,
    epsilon: float,
    demanded: int,
    k: int,
    bound: float,
    errors: tuple[Tensor, Tensor, Tensor],
    **more: Any,
) -> Record:
    """A record of the errors in each draw: of the approximation, of zeros, of the mean."""
    own, zero, uniform = errors
    # What is no number has failed.
    rates = [float((~(each <= epsilon)).double().mean()) for each in (zero, uniform)]
    return Record(
        statement=statement,
        norm=norm,
        inputs=head.name,
        n=head.n,
        d=head.d,
        epsilon=epsilon,
        demanded=demanded,
        k=k,
        draws=len(own),
        failures=int((~(own <= epsilon)).sum()),
        bound=min(1.0, bound),
        error=float(own.median()),
        zero=float(zero.median()),
        uniform=float(uniform.median()),
        zero_rate=rates[0],
        uniform_rate=rates[1],
        **more,
    )


def check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < 1:
        raise UserError(f"epsilon={epsilon!r} must lie between 0 and 1, where ε² − ε³ is positive")


def tail(epsilon: float, k: int) -> float:
    r"""$e^{-(ε^2-ε^3)k/4}$, by which the lemma bounds each tail."""
    return math.exp(-(epsilon**2 - epsilon**3) * k / 4)


def theorem_1_k(n: int, epsilon: float) -> int:
    """5 log n / (ε² − ε³): with it 2n e^{−(ε²−ε³)k/4}, the union over n rows, is 2 n^(−1/4)."""
    check_epsilon(epsilon)
    return math.ceil(5 * math.log(n) / (epsilon**2 - epsilon**3))


def smallest_k(rate: Callable[[int], float], limit: int = LARGEST) -> int | None:
    """The smallest k, to 2%, at which `rate` is tolerated, if one up to `limit` is; the rate falls as k grows."""
    high = 1
    while rate(high) > TOLERATED:
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) <= TOLERATED else (middle, high)
    return high


def chi_squares(k: int, count: int, rng: np.random.Generator) -> Tensor:
    """χ² with k degrees of freedom over k: the law of ‖Re‖² for a unit vector e."""
    return torch.from_numpy(rng.chisquare(k, count) / k)


def johnson_lindenstrauss(head: Head, epsilons: Sequence[float], draws: int, rng: np.random.Generator) -> list[Record]:
    r"""Both inequalities of the lemma for rows x of P and columns y of V.

    1. ‖Rx‖ ≤ (1+ε)‖x‖ holds, and so does the stronger ‖Rx‖² ≤ (1+ε)‖x‖². It bounds one side only: R = 0
       meets it.
    2. |xRᵀRy − xy| ≤ ε‖xy‖ holds where ‖xy‖ is read as ‖x‖‖y‖, constant 2 included, and for no k where it is read as
       |xy|, as the proof of Theorem 1 does: for x ⊥ y the right side is 0 and the left almost surely is not.

    With ρ = cos(x, y), 2k xRᵀRy / ‖x‖‖y‖ is (1+ρ)χ² − (1−ρ)χ'² for independent χ² of k degrees of freedom: nothing
    depends on n but through ρ, and the variance is (1+ρ²)/k.
    """
    check_size("draws", draws)
    pair = torch.arange(draws) % ROWS
    rows = torch.from_numpy(rng.integers(head.n, size=ROWS))
    x = head.logits(rows).double().softmax(-1)
    y = head.value.double()[:, torch.from_numpy(rng.integers(head.d, size=ROWS))].T
    sizes = x.norm(dim=1) * y.norm(dim=1)
    cosine = ((x * y).sum(1) / sizes)[pair]
    mean = (x.sum(1) * y.sum(1) / head.n / sizes)[pair] - cosine
    flat = (math.sqrt(head.n) * x.mean(1) / x.norm(dim=1))[pair] - 1
    ones = torch.ones(draws)
    found = []
    for epsilon in epsilons:
        check_epsilon(epsilon)
        for promise in PROMISES:
            k = math.ceil(4 * math.log(2 / promise) / (epsilon**2 - epsilon**3))
            one, other = chi_squares(k, draws, rng), chi_squares(k, draws, rng)
            missed = ((1 + cosine) * one - (1 - cosine) * other) / 2 - cosine
            inner = (missed.abs(), cosine.abs(), mean.abs())
            relative = tuple(each / cosine.abs() for each in inner)
            bound = tail(epsilon, k)
            for statement, norm, allowed, errors in (
                ("JL 1", "|x|", bound, (one.sqrt() - 1, -ones, flat)),
                ("JL 1", "|x|, squared", bound, (one - 1, -ones, (flat + 1).square() - 1)),
                ("JL 2", "|x||y|", 2 * bound, inner),
                ("JL 2", "|x||y|, y = x", 2 * bound, ((one - 1).abs(), ones, 1 - (flat + 1).square())),
                ("JL 2", "|xy|", 2 * bound, relative),
            ):
                found.append(record(statement, norm, head, epsilon, k, k, allowed, errors))
    return found


class RandomLowRank:
    r"""P̃w = P RᵀR w of Theorem 1, for every k at once, on all n rows of P, in as many draws as are asked for.

    With e = w/‖w‖ and g = Re, the rest of R is independent of g, so that RᵀRw is ‖w‖ (χ e + √(χ/k) (z − (e·z) e)) in
    law, for χ = ‖g‖² and z from N(0, I). One pass of attention over V and all z gives what any k needs. Draw j takes
    column j mod d of V for w.
    """

    def __init__(self, head: Head, draws: int, rng: np.random.Generator) -> None:
        check_size("draws", draws)
        self.draws, self.rng = draws, rng
        noise = normals(rng, head.n, draws)
        columns = torch.arange(draws) % head.d
        unit = head.value / head.value.norm(dim=0)
        both = torch.cat([unit, noise], 1)
        parts, sizes = [], []
        for probs in blocks(head):
            parts.append(probs @ both)
            sizes.append(probs.norm(dim=1))
        output, self.sizes = torch.cat(parts), torch.cat(sizes)  # (n, d + draws), ‖u‖ of each row
        self.exact = output[:, : head.d][:, columns]  # (n, draws), Pe
        along = (unit[:, columns] * noise).sum(0)
        self.across = output[:, head.d :] - along * self.exact
        self.mean = unit.mean(0)[columns].expand_as(self.exact)

    @property
    def condition(self) -> float:
        """κ = ‖P‖²‖w‖² / ‖Pw‖², the median over columns: the mean square of ‖P̃w − Pw‖ is (1+κ)/k of ‖Pw‖²."""
        return float((self.sizes.square().sum() / self.exact.square().sum(0)).median())

    def missed(self, k: int) -> Tensor:
        """P̃e − Pe at a k, (n, draws)."""
        size = chi_squares(k, self.draws, self.rng).float()
        return (size - 1) * self.exact + (size / k).sqrt() * self.across

    def measure(self, missed: Tensor, norm: str) -> Tensor:
        """The error in each draw: of all of Pw, or the largest of a row."""
        if norm == "|Pw|":
            return (missed.norm(dim=0) / self.exact.norm(dim=0)).double()
        size = self.exact.abs() if norm == "|uw|" else self.sizes[:, None]
        return (missed.abs() / size).amax(0).double()

    def errors(self, k: int, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        others = (self.measure(each, norm) for each in (self.exact, self.mean - self.exact))
        return (self.measure(self.missed(k), norm), *others)  # type: ignore[return-value]

    def smallest(self, epsilon: float, norm: str) -> int | None:
        return smallest_k(lambda k: float((~(self.measure(self.missed(k), norm) <= epsilon)).double().mean()))


def theorem_1(head: Head, epsilons: Sequence[float], draws: int, rng: np.random.Generator) -> list[Record]:
    r"""Theorem 1 at its own k, in the norm of its statement and in those that its proof passes through.

    - |Pw|: the statement, ‖P̃w − Pw‖ ≤ ε‖Pw‖.
    - |uw|: every row u of P meets |uRᵀRw − uw| ≤ ε|uw|, which step (a) of the proof adds up.
    - |u||w|: every row meets |uRᵀRw − uw| ≤ ε‖u‖‖w‖, which is what the lemma gives. This holds.
    """
    drawn = RandomLowRank(head, draws, rng)
    found = []
    for epsilon in epsilons:
        demanded = theorem_1_k(head.n, epsilon)
        k = min(demanded, head.n)
        bound = 2 * head.n * tail(epsilon, k)
        for norm in ("|Pw|", "|uw|", "|u||w|"):
            smallest = None if norm == "|uw|" else drawn.smallest(epsilon, norm)
            errors = drawn.errors(k, norm)
            found.append(record("Theorem 1", norm, head, epsilon, demanded, k, bound, errors, smallest=smallest))
    return found
