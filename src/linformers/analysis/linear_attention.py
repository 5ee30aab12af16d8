r"""Theorem 2, put to the test: softmax(w Eᵀ) F V with E = δR and F = e^{−δ}R against softmax(w) V, over δ, k and n.

Where the construction goes, whatever the proof says of it: as δ → 0 (the proof has δ = 2⁻ⁿ at its start and Θ(1/n) in
step (b)), exp(δ x Rᵀ) tends to k ones, so the output tends to 1ᵀRV, or 1ᵀRV / k under softmax: noise that has not seen
the query. For any δ the mean over R of e^{−δ} exp(δ x Rᵀ) R y is δ e^{−δ + δ²‖x‖²/2k} ⟨x, y⟩: linear in the logits x,
where ⟨exp(x), y⟩ is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .qkv import Head, normals
from .theorems import ROWS, Record, check_epsilon, record, smallest_k, tail

# Entries of what R does to the vectors of a draw that exist at once.
DRAWN = 2**23
# The norms that an error is divided by: the theorem's, and the length of the output itself.
NORMS = ("|s||V|", "|sV|")
FORMS = ("exp", "softmax")
# No k beyond this is tried where the smallest that will do is looked for.
LOOKED = 2048


@dataclass(frozen=True)
class Demand:
    """The k of Theorem 2, and the side of the minimum that it is."""

    k: int
    branch: str


def stated_k(n: int, d: int, epsilon: float) -> Demand:
    """min{9 d log d, 5 log n} / ε², each Θ read as 1. The sides meet at n = d^(9d/5): beyond 10²⁰⁸ for d = 64."""
    check_epsilon(epsilon)
    constant, growing = 9 * d * math.log(d), 5 * math.log(n)
    branch = "9 d log d" if constant < growing else "5 log n"
    return Demand(max(1, math.ceil(min(constant, growing) / epsilon**2)), branch)


def proved_k(n: int, d: int, epsilon: float) -> Demand:
    """5 log(nd) / (ε² − ε³), which the proof sets for its union over n rows and d columns."""
    check_epsilon(epsilon)
    return Demand(math.ceil(5 * math.log(n * d) / (epsilon**2 - epsilon**3)), "5 log(nd)")


class Construction:
    r"""Draws of softmax(δ x Rᵀ) e^{−δ} RV, and of what its proof compares it with, on a few rows x of A.

    All that is needed of R is R [x, V, exp(x), exp(x/n)] = (RQ) T, with Q T the QR decomposition of these d + 3
    columns: RQ has independent entries from N(0, 1/k), so n numbers for each of k rows become d + 3.
    """

    def __init__(self, head: Head, draws: int, rng: np.random.Generator) -> None:
        self.head, self.draws, self.rng = head, draws, rng
        chosen = torch.from_numpy(rng.integers(head.n, size=min(ROWS, draws)))
        self.x = head.logits(chosen).double()  # (rows, n)
        self.value = head.value.double()
        self.total = self.x.logsumexp(1)  # log Σ exp(x)
        self.probs = self.x.softmax(1)
        self.exact = self.probs @ self.value  # (rows, d)
        sizes = self.probs.norm(dim=1) * self.value.norm()
        self.scales = {"|s||V|": sizes, "|sV|": self.exact.norm(dim=1)}
        # Draw j looks at one row, so that draws are independent of each other.
        self.row = torch.arange(draws) % len(chosen)
        self.factors = []
        for x, probs in zip(self.x, self.probs, strict=True):
            columns = torch.stack([x, probs / probs.norm(), (x / head.n).exp()], 1)
            self.factors.append(torch.linalg.qr(torch.cat([self.value, columns], 1)).R.float())

    @property
    def flatness(self) -> float:
        """μ = √n max‖v‖ / ‖V‖: 1 where all values are of one length."""
        return float(math.sqrt(self.head.n) * self.value.norm(dim=1).max() / self.value.norm())

    def batches(self, k: int) -> Iterator[tuple[int, Tensor]]:
        """A row's number and what some draws of R do to its vectors, (b, k, d + 3)."""
        for row, factor in enumerate(self.factors):
            left = int((self.row == row).sum())
            while left:
                count = min(left, max(1, DRAWN // (k * len(factor))))
                left -= count
                yield row, normals(self.rng, count, k, len(factor)) / math.sqrt(k) @ factor

    def outputs(self, k: int, deltas: Sequence[float]) -> dict[tuple[str, float], dict[str, Tensor]]:
        """Errors in each draw, by form and δ, then by norm. The exponential form is divided by Σ exp(x)."""
        d = self.head.d
        found: dict[tuple[str, float], list[Tensor]] = {(form, delta): [] for form in FORMS for delta in deltas}
        rows = []
        for row, drawn in self.batches(k):
            rows += [row] * len(drawn)
            values, logits = drawn[..., :d].double(), drawn[..., d].double()
            for delta in deltas:
                weights = {
                    "exp": (delta * logits - self.total[row]).exp(),
                    "softmax": (delta * logits).softmax(-1),
                }
                for form, weight in weights.items():
                    output = math.exp(-delta) * torch.einsum("bk,bkd->bd", weight, values)
                    found[form, delta].append((output - self.exact[row]).norm(dim=1))
        return {key: self._relative(torch.cat(errors), torch.tensor(rows)) for key, errors in found.items()}

    def kept(self, k: int) -> dict[str, Tensor]:
        r"""Errors in each draw of exact attention to k tokens that are kept at random: E = F selects k rows.

        It holds what Theorem 2 promises: with s = softmax(w) and μ the `flatness` of V,
        Pr(‖output − sV‖ > ε‖s‖‖V‖) ≤ 32μ²/(kε²), whatever n, d and the logits. For if n‖s‖² ≥ 4μ²/ε², every mean of
        values is that near; otherwise write the error as N/D with D = (n/k)Σ s_j and N = (n/k)Σ s_j (v_j − sV) over
        the kept j: E D = 1, Var D ≤ n‖s‖²/k and E‖N‖² ≤ 4μ²‖s‖²‖V‖²/k, and Chebyshev bounds each of D < ½ and
        2‖N‖ > ε‖s‖‖V‖ by 16μ²/(kε²).
        """
        errors = []
        for row in self.row.tolist():
            tokens = torch.from_numpy(self.rng.choice(self.head.n, size=k, replace=False))
            output = self.x[row, tokens].softmax(0) @ self.value[tokens]
            errors.append((output - self.exact[row]).norm())
        return self._relative(torch.stack(errors), self.row)

    def others(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Errors of zeros and of the mean of the values."""
        mean = (self.value.mean(0) - self.exact).norm(dim=1)
        return self._relative(self.exact.norm(dim=1)[self.row], self.row), self._relative(mean[self.row], self.row)

    def _relative(self, errors: Tensor, rows: Tensor) -> dict[str, Tensor]:
        return {norm: errors / scale[rows] for norm, scale in self.scales.items()}

    def smallest(self, epsilon: float, form: str, norm: str) -> int | None:
        """The smallest k, up to n and `LOOKED`, at which E and F with δ = 1/n meet ε in practice."""
        delta = 1 / self.head.n

        def rate(k: int) -> float:
            return float((~(self.outputs(k, [delta])[form, delta][norm] <= epsilon)).double().mean())

        return smallest_k(rate, limit=min(self.head.n, LOOKED))

    def step_b(self, k: int, delta: float) -> tuple[float, float]:
        r"""What step (b) calls o(‖exp(x)‖), over ‖exp(x)‖, in the median.

        First ‖exp(δxRᵀ) − exp(x)Rᵀ‖, which the step needs; then ‖exp(δxRᵀ) − exp(δx)Rᵀ‖ at δ = 1/n, which the proof
        writes. Lipschitz continuity of exp bounds neither: it says nothing of a projection of exp(x).
        """
        d, needed, written = self.head.d, [], []
        for row, drawn in self.batches(k):
            size = self.total[row] + self.probs[row].norm().log()  # log ‖exp(x)‖
            logits, projected, flat = drawn[..., d:].double().unbind(-1)
            needed.append(((delta * logits - size).exp() - projected).norm(dim=1))
            written.append(((logits / self.head.n).exp() - flat).norm(dim=1) / size.exp())
        return float(torch.cat(needed).median()), float(torch.cat(written).median())


def theorem_2(
    head: Head,
    epsilons: Sequence[float],
    draws: int,
    rng: np.random.Generator,
    deltas: Sequence[float] = (),
) -> list[Record]:
    """Theorem 2 in both forms at δ = 1/n, at the stated k and at the proof's, and k kept tokens.

    At the proof's k, the `deltas` are tried as well.
    """
    drawn = Construction(head, draws, rng)
    zero, uniform = drawn.others()
    delta = 1 / head.n
    found = []

    def add(
        statement: str, epsilon: float, demand: Demand, bound: float, errors: dict[str, Tensor], **more: Any
    ) -> None:
        k = min(demand.k, head.n)
        for norm in NORMS:
            triple = (errors[norm], zero[norm], uniform[norm])
            smallest = more.get("smallest") if norm == NORMS[0] else None
            own = {**more, "smallest": smallest, "branch": demand.branch}
            found.append(record(statement, norm, head, epsilon, demand.k, k, bound, triple, **own))

    for epsilon in epsilons:
        stated, proved = stated_k(head.n, head.d, epsilon), proved_k(head.n, head.d, epsilon)
        for reading, demand, swept in (("stated", stated, [delta]), ("proof", proved, [delta, *deltas])):
            k = min(demand.k, head.n)
            bound = 2 * head.d * tail(epsilon, k)
            for (form, own), errors in drawn.outputs(k, swept).items():
                known = drawn.smallest(epsilon, form, NORMS[0]) if (reading, own) == ("proof", delta) else None
                name = f"Theorem 2, {form}, {reading} k"
                add(name, epsilon, demand, bound, errors, delta=own, smallest=known)
        k = min(proved.k, head.n)
        add("k tokens kept", epsilon, proved, 32 * drawn.flatness**2 / (k * epsilon**2), drawn.kept(k))
    return found


def gamma(head: Head, k: int, delta: float, rng: np.random.Generator) -> float:
    r"""The largest ‖Γ_i‖ / d, which step (b) at the end of the proof takes to be bounded.

    Γ = [X, Y] [X_s, Y_s]⁻¹ for X = exp(AEᵀ)FV, Y = exp(A)V and 2d rows s, here chosen before R is drawn, as the union
    bound over those rows alone needs. The matrix that is inverted nears a singular one as X nears Y, and, since X nears
    a matrix of rank one, as δ → 0.
    """
    d = head.d
    logits = head.logits(torch.arange(head.n)).double()
    value = head.value.double()
    rows = torch.from_numpy(rng.choice(head.n, size=2 * d, replace=False))
    drawn = normals(rng, k, head.n).double() / math.sqrt(k)
    scale = logits.amax()
    x = math.exp(-delta) * (delta * logits @ drawn.T).exp() @ (drawn @ value)
    y = (logits - scale).exp() @ value
    both = torch.cat([x / x.norm(), y / y.norm()], 1)  # Γ does not depend on the scale of a column
    return float((both @ torch.linalg.pinv(both[rows], rtol=1e-15)).norm(dim=1).max() / d)
