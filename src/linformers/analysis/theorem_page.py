"""What the records of the theorems say, in sentences that are counted from them, and all of it as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..markdown import shown_table
from .existence import Fit
from .proof_notes import GAPS, HOLDS
from .theorem_tables import EXP, KEPT, SOFTMAX, counted, is_real, number, percent, pick, tables, within
from .theorems import Record, theorem_1_k


def sentences(records: Sequence[Record], fits: Sequence[Fit], proof: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which statement holds and which fails."""
    return [*_lemma(records), *_theorem_1(records), *_theorem_2(records), *_steps(proof), *_existence(fits)]


def conclusion(records: Sequence[Record], fits: Sequence[Fit]) -> str:
    """What it comes to, before the details: both theorems in the norms that they state, and the fits."""
    first, second = (_broken(own) for own in (pick(records, "Theorem 1", "|Pw|"), _at_limit(records, SOFTMAX)))
    failing = [name for name, (broken, _) in (("Theorem 1", first), ("Theorem 2", second)) if broken]
    lead = (
        "Neither construction was seen to miss what its theorem states",
        f"The construction of {' and '.join(failing)} does not give what the theorem states",
        "Neither construction gives what its theorem states",
    )[len(failing)]
    k = max(fit.k for fit in fits)
    widest = [fit for fit in fits if fit.k == k]
    own, elsewhere = (_range([getattr(fit, name) for fit in widest]) for name in ("fitted", "fitted_elsewhere"))
    return (
        f"{lead}: where the bound on the rate of failure is below 100%, the rate is above it in {first[0]} of "
        f"{first[1]} settings of Theorem 1 (P RᵀR, relative to |Pw|) and in {second[0]} of {second[1]} of Theorem 2 "
        f"(E and F of its proof, relative to |s||V|). E and F that are fitted to one input have an error of {own} |PV| "
        f"at k = {k:,}, and of {elsewhere} on another."
    )


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(number(value) for value in (min(values), max(values))))


def verdict(records: Sequence[Record]) -> str:
    """In how many settings the rate of failure is above the bound."""
    broken, telling = _broken(records)
    if not telling:
        return f"cannot be judged: in all {len(records):,} settings the bound on the rate of failure is 100%"
    word = "fails" if broken else "holds"
    above = f"the rate of failure is above the bound in {broken:,} of the {telling:,} settings"
    return f"{word}: {above} with a bound below 100%"


def _broken(records: Sequence[Record]) -> tuple[int, int]:
    """How many settings contradict their bound, of how many with one below 100%."""
    telling = [each for each in records if each.bound < 1]
    return sum(each.contradicted for each in telling), len(telling)


def _at_limit(records: Sequence[Record], form: str) -> list[Record]:
    """Theorem 2 at δ = 1/n in the norm that it states."""
    return [each for each in pick(records, form, "|s||V|") if each.delta == 1 / each.n]


def _draws(records: Sequence[Record]) -> str:
    """In how many draws an inequality fails, from the least setting to the most."""
    if not records:
        return "no draws, for want of settings"
    failures = sorted(each.failures for each in records)
    counts = dict.fromkeys(f"{count:,}" for count in (failures[0], failures[-1]))
    return f"{' to '.join(counts)} of the {records[0].draws:,} draws of a setting"


def _lemma(records: Sequence[Record]) -> list[str]:
    first, squared = pick(records, "JL 1", "|x|"), pick(records, "JL 1", "|x|, squared")
    product, same, inner = (pick(records, "JL 2", norm) for norm in ("|x||y|", "|x||y|, y = x", "|xy|"))
    return [
        f"JL 1, ‖Rx‖ ≤ (1+ε)‖x‖, {verdict(first)}. It is one-sided, so zeros meet it. With squares on both sides, "
        f"which is more, it {verdict(squared)}.",
        f"JL 2 in terms of |x||y| {verdict([*product, *same])}; y = x, the hardest pair, is among them.",
        f"JL 2 in terms of |xy|, as the proof of Theorem 1 uses it, {verdict(inner)}; it fails in {_draws(inner)}.",
    ]


def _theorem_1(records: Sequence[Record]) -> list[str]:
    stated, rows, product = (pick(records, "Theorem 1", norm) for norm in ("|Pw|", "|uw|", "|u||w|"))
    fits = [each for each in stated if each.demanded <= each.n]
    beyond = sorted({each.n for each in stated if each.demanded > each.n})
    lines = [
        f"Theorem 1 demands a k beyond n in {len(stated) - len(fits)} of {len(stated)} settings (n up to "
        f"{max(beyond, default=0):,}); its smallest, at ε = 2/3, is {theorem_1_k(128, 2 / 3)} at n = 128.",
        f"Theorem 1 relative to |Pw| {verdict(stated)}. Where its k fits below n it fails in "
        f"{_draws(fits)}, and zeros, whose error is 1, are nearer than P RᵀR in the "
        f"median in {sum(each.error > 1 for each in fits)} of {len(fits)} settings.",
        f"Row by row relative to |uw|, which is what step (a) of its proof adds up, it {verdict(rows)}.",
        f"Theorem 1 relative to |u||w| for all rows at once {verdict(product)}. But zeros meet it, too, in every draw "
        f"of {sum(each.zero_rate == 0 for each in product)} of {len(product)} settings, the mean of the values in "
        f"{sum(each.uniform_rate == 0 for each in product)}.",
    ]
    for inputs in dict.fromkeys(each.inputs for each in stated):
        own = [each for each in stated if each.inputs == inputs]
        at = max(own, key=lambda each: (each.n, each.d, each.epsilon))
        (other,) = pick(product, "", n=at.n, d=at.d, epsilon=at.epsilon, inputs=inputs)
        lines.append(
            f"{inputs}, n = {at.n:,}, d = {at.d}, ε = {at.epsilon:g}: at the demanded k = {at.demanded:,} Theorem 1 "
            f"fails in {counted(at)} draws ({within(at)}) against a bound of {percent(at.bound)}, with a median error "
            f"of {number(at.error)} |Pw| (mean of the values: {number(at.uniform)}); ε would take k = "
            f"{_k(at.smallest)}. Relative to |u||w| it takes k = {_k(other.smallest)}."
        )
    return lines


def _k(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _theorem_2(records: Sequence[Record]) -> list[str]:
    lines = []
    sides = dict.fromkeys(each.branch for each in pick(records, f"{SOFTMAX}, stated"))
    meet = ", ".join(
        f"10^{9 * d / 5 * math.log10(d):.0f} for d = {d}"
        for d in sorted({each.d for each in pick(records, f"{SOFTMAX}, stated")})
    )
    lines.append(
        f"The side of Theorem 2's minimum that binds is {' or '.join(sides)} in all settings; the sides meet at n = "
        f"d^(9d/5), {meet}."
    )
    for form, name in ((SOFTMAX, "Theorem 2, the softmax form,"), (EXP, "Its exponential form")):
        limit = _at_limit(records, form)
        relative = pick(records, form, "|sV|")
        settings = {(each.inputs, each.n, each.d, each.epsilon): each for each in limit}.values()
        zeros = [each for each in settings if each.zero_rate == 0]
        worse = [each for each in relative if each.error > 1]
        lines.append(
            f"{name} at δ = 1/n, relative to |s||V|, {verdict(limit)}. Zeros meet it in every draw of {len(zeros)} of "
            f"{len(settings)} settings. Relative to |sV|, over all δ, it {verdict(relative)}; zeros are nearer in the "
            f"median in {len(worse)} of {len(relative)}."
        )
    limit = [each for each in _at_limit(records, "Theorem 2") if each.bound < 1]
    if hard := [each for each in limit if each.zero_rate > 0.5]:
        lines.append(
            f"In the {len(hard)} settings of both forms in which zeros miss ε|s||V| in most draws and the bound is "
            f"below 100%, Theorem 2's E and F miss it in {_draws(hard)}."
        )
    broken = [each for each in pick(limit, SOFTMAX) if each.contradicted and each.zero_rate == 0]
    if broken:
        at = max(broken, key=lambda each: (each.rate, each.n))
        lines.append(
            f"Where zeros never miss ε|s||V|, the softmax form misses it from n = {min(each.n for each in broken):,} "
            "on: its noise is |V|/k, the bound is ε|s||V|, and |s| shrinks as 1/√n. At "
            f"n = {at.n:,}, ε = {at.epsilon:g}, k = {at.k:,} it fails in {counted(at)} draws ({within(at)}), with a "
            f"median error of {number(at.error)}, where zeros have {number(at.zero)}."
        )
    searched = _at_limit(records, f"{EXP}, proof")
    single, never = (sum(each.smallest == k for each in searched) for k in (1, None))
    lines.append(
        f"In practice the exponential form meets ε|s||V| with k = 1 in {single} of {len(searched)} settings, and with "
        f"no k that was tried in {never}."
    )
    kept = pick(records, KEPT, "|s||V|")
    lines.append(
        f"Attention to k tokens kept at random, for which the bound 32μ²/(kε²) is proved here, {verdict(kept)}; it "
        f"misses ε|s||V| in {_draws(kept)}."
    )
    real = [each for each in pick(records, KEPT, "|sV|") if is_real(each) and each.k < each.n]
    if real:
        errors = [each.error for each in real]
        theirs = min(each.error for each in pick(records, SOFTMAX, "|sV|") if is_real(each))
        lines.append(
            f"On real inputs k kept tokens (the proof's k, below n) have a median error of {number(min(errors))} to "
            f"{number(max(errors))} |sV|; Theorem 2's E and F have {number(theirs)} at best, over all δ."
        )
    return lines


def _steps(proof: Sequence[Mapping[str, Any]]) -> list[str]:
    needed = [each["needed"] for each in proof]
    written = [each["written"] for each in proof]
    gammas = [value for each in proof if each["gamma"] for value in each["gamma"].values()]
    lines = [
        f"Step (b) of Theorem 2 needs ‖exp(δxRᵀ) − exp(x)Rᵀ‖ = o(‖exp(x)‖); it is {number(min(needed))} to "
        f"{number(max(needed))} of ‖exp(x)‖ at δ = 1/n. The line that is written there is {number(min(written))} to "
        f"{number(max(written))} of it."
    ]
    if gammas:
        lines.append(
            f"The rows of Γ, Θ(d) in the proof, reach {number(min(gammas))} d to {number(max(gammas))} d, with the 2d "
            "rows chosen before R."
        )
    return lines


def _existence(fits: Sequence[Fit]) -> list[str]:
    lines = []
    for inputs in dict.fromkeys(fit.inputs for fit in fits):
        own = [fit for fit in fits if fit.inputs == inputs]
        half = next((fit for fit in own if fit.fitted <= 0.5), None)
        tenth = next((fit for fit in own if fit.fitted <= 0.1), None)
        last = own[-1]
        reach = [f"{size:g} |PV| at k = {fit.k:,}" for size, fit in ((0.5, half), (0.1, tenth)) if fit]
        lines.append(
            f"Existence, {inputs}, n = {last.n:,}: fitted E and F come within {' and '.join(reach) or 'no 0.5 |PV|'}; "
            f"at k = {last.k:,} the error is {number(last.fitted)}, on another input {number(last.fitted_elsewhere)}, "
            f"of Theorem 2's E and F {number(min(last.constructed, last.constructed_best))}, of mean pooling "
            f"{number(last.windows)}, of the best rank k {number(last.best_rank)}."
        )
    return lines


def page(
    records: Sequence[Record],
    fits: Sequence[Fit],
    proof: Sequence[Mapping[str, Any]],
    limits: Sequence[str],
    where: Mapping[str, Any],
) -> str:
    """All of it as markdown, with where the numbers come from."""
    lines = ["# The theorems, tested", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    lines += ["## What was found", "", conclusion(records, fits), ""]
    lines += [*(f"- {line}" for line in [*sentences(records, fits, proof), *limits]), ""]
    lines += ["![errors against n, δ and k](theorems.png)", ""]
    lines += ["## Where the proofs break", "", *(f"{i}. {gap}" for i, gap in enumerate(GAPS, 1)), ""]
    lines += ["## What holds", "", *(f"{i}. {each}" for i, each in enumerate(HOLDS, 1)), ""]
    lines += [
        "## Tables",
        "",
        "Errors are medians over draws of ‖approximation − exact‖ over the norm that is named; s is a row softmax(w) "
        "of P, u any row of P, w a column of V, |V| the Frobenius norm. Rates are shares of draws that miss ε (counts, "
        "where none or all of them do), with Wilson's 95% interval. Where the k demanded is beyond n (> n), n was "
        "used. The smallest k is the first at which at most 5% of draws miss ε; for Theorem 2 it is looked for up to n "
        "and 2,048, with δ = 1/n. The k of kept tokens is the proof's. Real inputs: heads of a pretrained layer on "
        "running text. All records, with every d and k, are in `theorems.json`.",
        "",
    ]
    for shown in tables(records, fits, proof):
        lines += [f"### {shown.title}", "", *shown_table(shown)]
    return "\n".join(lines)
