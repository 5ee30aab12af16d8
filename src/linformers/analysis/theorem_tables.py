"""The records of the theorems as tables and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from .existence import Fit
from .qkv import RANDOM
from .theorems import PROMISES, Record

Curves = dict[str, list[tuple[float, float]]]
SOFTMAX, EXP = "Theorem 2, softmax", "Theorem 2, exp"
KEPT = "k tokens kept"


def pick(records: Iterable[Record], statement: str, norm: str = "", **fields: Any) -> list[Record]:
    """The records of a statement (or of all that begin so), a norm, and other fields."""
    return [
        each
        for each in records
        if each.statement.startswith(statement)
        and norm in ("", each.norm)
        and all(getattr(each, name) == value for name, value in fields.items())
    ]


def number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "–"
    if abs(value) < 1e-9:  # what is left of rounding
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits}g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.1e}"


def percent(value: float) -> str:
    """A share; what is above 0 or below 1 does not look like it."""
    if 0 < value < 0.0005:
        return f"{100 * value:.1g}%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    return f"{100 * value:.{0 if value in (0, 1) else 1}f}%"


def counted(record: Record) -> str:
    """How many draws miss ε."""
    return f"{record.failures:,} of {record.draws:,}"


def within(record: Record) -> str:
    """What the true rate may be: none of a few draws is not 0%, nor all of them 100%."""
    low, high = map(percent, record.interval)
    if record.failures == 0:
        return f"at most {high}"
    return f"at least {low}" if record.failures == record.draws else f"{low} to {high}"


def rate(record: Record) -> str:
    some = 0 < record.failures < record.draws
    return f"{percent(record.rate) if some else counted(record)} ({within(record)})"


def demanded(record: Record) -> str:
    return f"{record.demanded:,}" + (" > n" if record.demanded > record.n else "")


def shown(records: Sequence[Record]) -> list[Record]:
    """Random inputs of the widest heads, and all real ones: the rest is in the json."""
    widest = max((each.d for each in records if each.inputs == RANDOM), default=0)
    names = list(dict.fromkeys(each.inputs for each in records))
    chosen = (each for each in records if is_real(each) or each.d == widest)
    return sorted(chosen, key=lambda each: names.index(each.inputs))


def is_real(record: Record) -> bool:
    return not record.inputs.startswith(RANDOM)


def tables(records: Sequence[Record], fits: Sequence[Fit], proof: Sequence[Mapping[str, Any]]) -> list[Table]:
    epsilons = list(dict.fromkeys(each.epsilon for each in records))
    found = [_demands(records), _lemma(records)]
    found += [_theorem_1(records, epsilon) for epsilon in epsilons]
    found += [_theorem_2(records, epsilon) for epsilon in epsilons]
    found += [_theorem_2_relative(records, max(epsilons)), _sweep(records, max(epsilons))]
    found += [_fits([fit for fit in fits if fit.inputs == name]) for name in dict.fromkeys(f.inputs for f in fits)]
    return [*found, _proof(proof)]


def _demands(records: Sequence[Record]) -> Table:
    own = [each for each in shown(records) if each.inputs == RANDOM]
    lengths = list(dict.fromkeys(each.n for each in own))
    table = Table("statement", "ε", *(f"n={n:,}" for n in lengths), title="The k that is demanded (random, widest d)")
    names = {
        "Theorem 1": "Theorem 1",
        f"{SOFTMAX}, stated k": "Theorem 2",
        f"{SOFTMAX}, proof k": "Theorem 2, its proof",
    }
    for epsilon in dict.fromkeys(each.epsilon for each in own):
        for statement, name in names.items():
            by_length = {each.n: each for each in pick(own, statement, epsilon=epsilon)}
            cells = (f"{demanded(by_length[n])}" if n in by_length else "–" for n in lengths)
            table.add_row(name, f"{epsilon:g}", *cells)
    return table


def _lemma(records: Sequence[Record]) -> Table:
    columns = (
        "inequality",
        "in terms of",
        "ε",
        "k",
        "bound",
        "highest rate of failure",
        "on",
        "zeros fail",
        "mean fails",
    )
    table = Table(*columns, title=f"The lemma, at the k that promises {percent(PROMISES[1])}")
    lemma = pick(records, "JL")
    for statement, norm, epsilon in dict.fromkeys((each.statement, each.norm, each.epsilon) for each in lemma):
        own = pick(lemma, statement, norm, epsilon=epsilon)
        k = sorted({each.k for each in own})[1]
        own = [each for each in own if each.k == k]
        worst = max(own, key=lambda each: each.rate)
        spans = (span(getattr(each, name) for each in own) for name in ("zero_rate", "uniform_rate"))
        on = f"{worst.inputs}, n={worst.n:,}"
        table.add_row(statement, norm, f"{epsilon:g}", f"{k:,}", percent(worst.bound), rate(worst), on, *spans)
    return table


def span(values: Iterable[float]) -> str:
    found = [percent(value) for value in sorted(values)]
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def _theorem_1(records: Sequence[Record], epsilon: float) -> Table:
    columns = ("input", "n", "k", "bound", "|Pw|: fails", "error", "mean", "smallest k", "|u||w|: fails", "error")
    title = f"Theorem 1 at its own k, ε = {epsilon:g} (in |Pw|, zeros have error 1)"
    table = Table(*columns, "zeros", "mean", "smallest k", title=title)
    for one in pick(shown(records), "Theorem 1", "|Pw|", epsilon=epsilon):
        (other,) = pick(records, "Theorem 1", "|u||w|", epsilon=epsilon, inputs=one.inputs, n=one.n, d=one.d)
        cells = [one.inputs, f"{one.n:,}", demanded(one), percent(one.bound), rate(one), number(one.error)]
        cells += [number(one.uniform), _smallest(one), rate(other), number(other.error), number(other.zero)]
        table.add_row(*cells, number(other.uniform), _smallest(other))
    return table


def _smallest(record: Record) -> str:
    if record.smallest is None:
        return "none"
    return f"{record.smallest:,}" + (" > n" if record.smallest > record.n else "")


def _theorem_2(records: Sequence[Record], epsilon: float) -> Table:
    columns = ("input", "n", "k", "side", "softmax fails", "error", "smallest k", "exp fails", "error", "smallest k")
    title = f"Theorem 2 as stated, δ = 1/n, ε = {epsilon:g}: in terms of |s||V|"
    table = Table(*columns, "k tokens kept", "zeros", "mean", title=title)
    for one in pick(shown(records), f"{SOFTMAX}, stated", "|s||V|", epsilon=epsilon):
        same = pick(records, "", "|s||V|", epsilon=epsilon, inputs=one.inputs, n=one.n, d=one.d)
        (exp,) = pick(same, f"{EXP}, stated")
        proof, proof_exp = (pick(same, f"{form}, proof", delta=1 / one.n)[0] for form in (SOFTMAX, EXP))
        (kept,) = pick(same, KEPT)
        cells = [one.inputs, f"{one.n:,}", demanded(one), one.branch, rate(one), number(one.error), _smallest(proof)]
        cells += [rate(exp), number(exp.error), _smallest(proof_exp), number(kept.error), number(one.zero)]
        table.add_row(*cells, number(one.uniform))
    return table


def _theorem_2_relative(records: Sequence[Record], epsilon: float) -> Table:
    title = f"Theorem 2, δ = 1/n, ε = {epsilon:g}: error in terms of |sV| (zeros have error 1)"
    columns = ("input", "n", "stated k", "softmax", "exp", "the proof's k", "softmax", "exp", "k tokens kept", "mean")
    table = Table(*columns, title=title)
    for one in pick(shown(records), f"{SOFTMAX}, stated", "|sV|", epsilon=epsilon):
        same = pick(records, "", "|sV|", epsilon=epsilon, inputs=one.inputs, n=one.n, d=one.d)
        (exp,) = pick(same, f"{EXP}, stated")
        proof, proof_exp = (pick(same, f"{form}, proof", delta=1 / one.n)[0] for form in (SOFTMAX, EXP))
        (kept,) = pick(same, KEPT)
        errors = (number(each.error) for each in (proof, proof_exp, kept))
        cells = [one.inputs, f"{one.n:,}", demanded(one), number(one.error), number(exp.error), demanded(proof)]
        table.add_row(*cells, *errors, number(one.uniform))
    return table


def _swept(records: Sequence[Record], epsilon: float) -> list[Record]:
    return [each for each in pick(records, SOFTMAX, "|sV|", epsilon=epsilon) if _is_swept(each)]


def _is_swept(record: Record) -> bool:
    return record.delta is not None and "proof" in record.statement and record.delta != 1 / record.n


def _is_drawn(record: Record) -> bool:
    """Whether a record belongs into a curve against n: n kept tokens are exact, and have no place on a log axis."""
    return not _is_swept(record) and (record.statement != KEPT or record.k < record.n)


def _sweep(records: Sequence[Record], epsilon: float) -> Table:
    swept = _swept(shown(records), epsilon)
    deltas = list(dict.fromkeys(each.delta for each in swept))
    title = f"Theorem 2 over δ at the proof's k, ε = {epsilon:g}: error in |sV|, softmax / exp (zeros have error 1)"
    table = Table("input", "n", "k", *(f"δ={delta:g}" for delta in deltas), title=title)
    for inputs, n, d in dict.fromkeys((each.inputs, each.n, each.d) for each in swept):
        cells = []
        for delta in deltas:
            same = pick(records, "Theorem 2", "|sV|", epsilon=epsilon, inputs=inputs, n=n, d=d, delta=delta)
            cells.append(" / ".join(number(pick(same, f"{form}, proof")[0].error) for form in (SOFTMAX, EXP)))
        table.add_row(inputs, f"{n:,}", f"{same[0].k:,}", *cells)
    return table


FIT_NAMES = {
    "fitted": "E, F fitted",
    "fitted_elsewhere": "the same on another input",
    "constructed": "Theorem 2, δ = 1/n",
    "constructed_best": "Theorem 2, best δ",
    "low_rank": "Theorem 1, P RᵀR",
    "windows": "mean pooling",
    "kept": "k tokens kept",
    "best_rank": "best rank k of P (SVD)",
    "uniform": "mean of the values",
    "zero": "zeros",
}


def _fits(fits: Sequence[Fit]) -> Table:
    title = f"Error against k, relative to |PV|: {fits[0].inputs}, n = {fits[0].n:,}, d = {fits[0].d}"
    table = Table("output", *(f"k={fit.k:,}" for fit in fits), title=title)
    for name, label in FIT_NAMES.items():
        table.add_row(label, *(number(getattr(fit, name)) for fit in fits))
    return table


def _proof(proof: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        "input",
        "n",
        "d",
        "k",
        "step (b), needed",
        "step (b), written",
        "max |Γ|/d at δ = 1/n",
        "at δ = 1",
        "κ",
        "μ",
    )
    table = Table(*columns, title="What the proofs take to be small or bounded")
    for each in proof:
        gammas = each["gamma"] or {}
        values = [each["needed"], each["written"], *(gammas.get(str(delta)) for delta in (1 / each["n"], 1.0))]
        cells = (number(value) for value in (*values, each["condition"], each["flatness"]))
        table.add_row(each["inputs"], f"{each['n']:,}", str(each["d"]), f"{each['k']:,}", *cells)
    return table


def panels(records: Sequence[Record], fits: Sequence[Fit]) -> list[tuple[Curves, dict[str, str]]]:
    """Curves and labels of the figure."""
    epsilon = max(each.epsilon for each in records)
    widest = shown(records)
    first: Curves = {}
    for each in pick(widest, "Theorem 1", "|Pw|", epsilon=epsilon):
        first.setdefault(each.inputs, []).append((each.n, each.error))
    lengths = sorted({n for points in first.values() for n, _ in points})
    first["zeros"] = [(n, 1.0) for n in lengths]
    first[f"ε = {epsilon:g}"] = [(n, epsilon) for n in lengths]
    own = [each for each in widest if each.inputs == RANDOM and each.epsilon == epsilon]
    second: Curves = {
        name: [(each.n, value(each)) for each in pick(own, statement, "|s||V|") if _is_drawn(each)]
        for name, statement, value in (
            ("softmax, stated k", f"{SOFTMAX}, stated", lambda each: each.error),
            ("softmax, the proof's k", f"{SOFTMAX}, proof", lambda each: each.error),
            ("exp, stated k", f"{EXP}, stated", lambda each: each.error),
            ("k tokens kept", KEPT, lambda each: each.error),
            ("zeros", f"{SOFTMAX}, stated", lambda each: each.zero),
        )
    }
    second[f"ε = {epsilon:g}"] = [(n, epsilon) for n, _ in second["zeros"]]
    third: Curves = {}
    for each in _swept(widest, epsilon):
        if each.delta and (each.inputs == RANDOM or is_real(each)):
            third.setdefault(f"{each.inputs}, n={each.n:,}", []).append((each.delta, each.error))
    third["zeros"] = [(delta, 1.0) for delta in sorted({d for points in third.values() for d, _ in points})]
    median = next((fit.inputs for fit in fits if "median" in fit.inputs), fits[0].inputs)
    names = [name for name in FIT_NAMES if name not in ("constructed", "kept")]
    fourth: Curves = {
        FIT_NAMES[name]: [(fit.k, getattr(fit, name)) for fit in fits if fit.inputs == median] for name in names
    }
    return [
        (first, {"title": f"Theorem 1 at its k, ε = {epsilon:g}", "xlabel": "n", "ylabel": "error / |Pw|"}),
        (second, {"title": "Theorem 2 at its k, random input", "xlabel": "n", "ylabel": "error / |s||V|"}),
        (third, {"title": "Theorem 2 over δ, softmax", "xlabel": "δ", "ylabel": "error / |sV|"}),
        (fourth, {"title": f"Existence: {median}", "xlabel": "k", "ylabel": "error / |PV|"}),
    ]
