r"""Theorem 2: softmax(w Eᵀ) F V with E = δR and F = e^{−δ}R, compared with softmax(w) V; and whether E and F exist.

As δ → 0 (the proof sets δ = 2⁻ⁿ at its start and Θ(1/n) in step (b)), exp(δ x Rᵀ) tends to k ones, so the output tends
to 1ᵀRV, or 1ᵀRV / k under softmax: noise that does not depend on the query. For any δ the mean over R of
e^{−δ} exp(δ x Rᵀ) R y is δ e^{−δ + δ²‖x‖²/2k} ⟨x, y⟩: linear in the logits x, where ⟨exp(x), y⟩ is required.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linformers.projections import window_matrix

from .equation6 import OWN_RATE, attention_matrix, fit, linear, low_rank, relative_error
from .heads import Head, normals
from .theorem1 import ROWS, record, tail

# An error is divided by the theorem's norm, or by the length of the exact output.
NORMS = ("|s||V|", "|sV|")
FORMS = ("exp", "softmax")
# The errors of random E and F are means over this many draws.
FIT_DRAWS = 10


def stated_k(n: int, d: int, epsilon: float) -> int:
    """min{9 d log d, 5 log n} / ε², with each Θ read as 1; the sides meet at n = d^(9d/5)."""
    return max(1, math.ceil(min(9 * d * math.log(d), 5 * math.log(n)) / epsilon**2))


def proof_k(n: int, d: int, epsilon: float) -> int:
    """5 log(nd) / (ε² − ε³), which the proof uses for its union bound over n rows and d columns."""
    return math.ceil(5 * math.log(n * d) / (epsilon**2 - epsilon**3))


class Construction:
    r"""Draws of softmax(δ x Rᵀ) e^{−δ} RV, and of what the proof compares it with, on a few rows x of A.

    All that is needed of R is R [x, V, exp(x), exp(x/n)] = (RQ) T, with Q T the QR decomposition of these d + 3
    columns. RQ has independent entries from N(0, 1/k), so each of the k rows takes d + 3 random numbers instead of n.
    """

    def __init__(self, head: Head, draws: int, rng: np.random.Generator) -> None:
        self.head, self.draws, self.rng = head, draws, rng
        chosen = torch.from_numpy(rng.integers(head.n, size=min(ROWS, draws)))
        self.x = head.logits(chosen).double()  # (rows, n)
        self.value = head.value.double()
        self.total = self.x.logsumexp(1)  # log Σ exp(x)
        self.probs = self.x.softmax(1)
        self.exact = self.probs @ self.value  # (rows, d)
        weak, strong = self.probs.norm(dim=1) * self.value.norm(), self.exact.norm(dim=1)
        self.scales = {"|s||V|": weak, "|sV|": strong}
        self.row = torch.arange(draws) % len(chosen)  # each draw uses one row, so that draws are independent
        self.factors = []
        for x, probs in zip(self.x, self.probs, strict=True):
            columns = torch.stack([x, probs / probs.norm(), (x / head.n).exp()], 1)
            self.factors.append(torch.linalg.qr(torch.cat([self.value, columns], 1)).R.float())

    @property
    def flatness(self) -> float:
        """μ = √n max‖v‖ / ‖V‖: 1 if all values have the same length."""
        return float(math.sqrt(self.head.n) * self.value.norm(dim=1).max() / self.value.norm())

    def rows(self, k: int) -> Iterator[tuple[int, Tensor]]:
        """The index of a row and R [V, x, …] for its draws of R, (draws, k, d + 3)."""
        for row, factor in enumerate(self.factors):
            count = int((self.row == row).sum())
            yield row, normals(self.rng, count, k, len(factor)) / math.sqrt(k) @ factor

    def outputs(self, k: int, deltas: Sequence[float]) -> dict[tuple[str, float], dict[str, Tensor]]:
        """Errors of each draw, by form and δ, then by norm. The exponential form is divided by Σ exp(x)."""
        d = self.head.d
        found: dict[tuple[str, float], list[Tensor]] = {(form, own): [] for form in FORMS for own in deltas}
        rows = []
        for row, drawn in self.rows(k):
            rows += [row] * len(drawn)
            values, logits = drawn[..., :d].double(), drawn[..., d].double()
            for form, delta in found:
                scaled = delta * logits
                weight = scaled.softmax(-1) if form == "softmax" else (scaled - self.total[row]).exp()
                output = math.exp(-delta) * torch.einsum("bk,bkd->bd", weight, values)
                found[form, delta].append((output - self.exact[row]).norm(dim=1))
        return {key: self.relative(torch.cat(errors), torch.tensor(rows)) for key, errors in found.items()}

    def kept(self, k: int) -> dict[str, Tensor]:
        """Errors of exact attention to k random tokens: E = F selects k rows."""
        errors = []
        for row in self.row.tolist():
            tokens = torch.from_numpy(self.rng.choice(self.head.n, size=k, replace=False))
            output = self.x[row, tokens].softmax(0) @ self.value[tokens]
            errors.append((output - self.exact[row]).norm())
        return self.relative(torch.stack(errors), self.row)

    def relative(self, errors: Tensor, rows: Tensor) -> dict[str, Tensor]:
        return {norm: errors / scale[rows] for norm, scale in self.scales.items()}

    def step_b(self, k: int, delta: float) -> tuple[float, float]:
        r"""The medians of what step (b) calls o(‖exp(x)‖), divided by ‖exp(x)‖.

        First ‖exp(δxRᵀ) − exp(x)Rᵀ‖, which the step needs; then ‖exp(δxRᵀ) − exp(δx)Rᵀ‖ at δ = 1/n, which the proof
        writes.
        """
        needed, written = [], []
        for row, drawn in self.rows(k):
            size = self.total[row] + self.probs[row].norm().log()  # log ‖exp(x)‖
            logits, projected, flat = drawn[..., self.head.d :].double().unbind(-1)
            needed.append(((delta * logits - size).exp() - projected).norm(dim=1))
            written.append(((logits / self.head.n).exp() - flat).norm(dim=1) / size.exp())
        return float(torch.cat(needed).median()), float(torch.cat(written).median())


def theorem_2(
    head: Head, epsilons: Sequence[float], draws: int, rng: np.random.Generator, deltas: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Theorem 2 in both forms, at the stated k with δ = 1/n and at the proof's k with `deltas`, too; k kept tokens."""
    drawn = Construction(head, draws, rng)
    zero = drawn.relative(drawn.exact.norm(dim=1)[drawn.row], drawn.row)
    found = []

    def add(statement: str, epsilon: float, demanded: int, bound: float, errors: Any, delta: float | None) -> None:
        for norm in NORMS:
            own = record(statement, norm, head, epsilon, demanded, bound, errors[norm], zero[norm])
            found.append(own | {"delta": delta})

    for epsilon in epsilons:
        stated, proof = stated_k(head.n, head.d, epsilon), proof_k(head.n, head.d, epsilon)
        for reading, demanded, swept in (("stated", stated, ()), ("proof", proof, deltas)):
            k = min(demanded, head.n)
            for (form, delta), errors in drawn.outputs(k, [1 / head.n, *swept]).items():
                add(f"Theorem 2, {form}, {reading} k", epsilon, demanded, 2 * head.d * tail(epsilon, k), errors, delta)
        k = min(proof, head.n)
        add("k tokens kept", epsilon, proof, 32 * drawn.flatness**2 / (k * epsilon**2), drawn.kept(k), None)
    return found


def existence(
    head: Head, other: Head, projected: Sequence[int], deltas: Sequence[float], rng: np.random.Generator, steps: int
) -> list[dict[str, Any]]:
    """Relative errors ‖output − PV‖ / ‖PV‖ of E and F fitted to one input, and of alternatives, for each k.

    Fitted E and F show what Theorem 2 claims (for any Q, K, V there are E, F), not what a Linformer needs, which is one
    E for all inputs. So each fit is also applied to `other`, another input of the same head.
    """
    inputs, others = ([own[None, None] for own in (each.query, each.key, each.value)] for each in (head, other))
    probs, exact = attention_matrix(*inputs[:2]), scaled_dot_product_attention(*inputs)

    def error(E: Tensor, F: Tensor, at: Sequence[Tensor] = inputs) -> float:
        return float(relative_error(linear(*at, E, F), scaled_dot_product_attention(*at)))

    def constructed(delta: float, k: int) -> float:
        drawn = [normals(rng, head.n, k) / math.sqrt(k) for _ in range(FIT_DRAWS)]
        return sum(error(delta * R, math.exp(-delta) * R) for R in drawn) / FIT_DRAWS

    found = []
    for k in projected:
        E, F = fit(*inputs, k, steps=steps, rate=OWN_RATE)
        pooled = window_matrix(head.n, k, head.n)
        errors = {
            "fitted": error(E, F),
            "fitted_elsewhere": error(E, F, others),
            "constructed_best": min(constructed(delta, k) for delta in deltas),
            "windows": error(pooled, pooled),
            "best_rank": float(relative_error(low_rank(probs, k) @ inputs[2], exact)),
        }
        found.append({"inputs": head.name, "n": head.n, "d": head.d, "k": k, **errors})
    return found
