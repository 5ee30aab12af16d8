"""What the two proofs of the paper's appendix do not show, line by line, and what can be shown instead."""

from __future__ import annotations

GAPS = (
    "**Lemma, second inequality.** The right side is written ε‖xy‖. It holds, constant 2 included, as ε‖x‖‖y‖: "
    "2k·xRᵀRy/‖x‖‖y‖ is (1+ρ)χ² − (1−ρ)χ'² with ρ = cos(x, y), and its centred moment generating function is largest "
    "at ρ = 1. It cannot hold as ε|xyᵀ|: for x ⊥ y the right side is 0.",
    '**Theorem 1, the line after "applying the JL Lemma".** ε‖uwᵀ‖ is |uwᵀ| here, the false reading. Steps (a) '
    "and (b), the union bound over the n rows, are sound; the inequality they add up is not. Exactly, for every "
    "P, w and k, E‖PRᵀRw − Pw‖² = (1+κ)‖Pw‖²/k with κ = ‖P‖²_F‖w‖²/‖Pw‖² ≥ 1: an error of ε takes k ≈ (1+κ)/ε², "
    "and κ is about n where the values have no mean that attention keeps, and n exactly for P = I.",
    "**Theorem 1, its statement.** The matrix P̃ is chosen after w, so rank 1 does it without error: P̃ = "
    "(Pw)wᵀ/‖w‖². For all d columns of V at once, P V V⁺ has rank at most d and error 0, and the theorem's own k, "
    "at least 33 log n, is above a head's 64 or 128 channels from n = 128 on. No rank below n serves every w "
    '(take P = I), so "Theorem 1 and Eckart-Young" do not give the SVD an error of ε.',
    '**Theorem 1, rates.** At k = log n, the line before "This concludes the theorem", the bound 2n '
    "e^{−(ε²−ε³)k/4} exceeds 1; at k = 5 log n/(ε²−ε³) it is 2n^(−1/4), which is o(1) but 0.42 at n = 512 and "
    "0.18 at n = 16,384. D_A normalises columns where softmax normalises rows; nothing depends on it.",
    '**Theorem 2, δ.** It is "a small constant" in Section 4, 1/2ⁿ at the start of the proof and Θ(1/n) at step '
    "(b). As δ → 0, exp(δxRᵀ) → (1, …, 1): the output no longer depends on the query. For any δ the mean over R "
    "of e^{−δ}exp(δxRᵀ)Ry is δ e^{−δ+δ²‖x‖²/2k}⟨x, y⟩, which is not ⟨exp(x), y⟩.",
    "**Theorem 2, step (b).** It needs ‖exp(δxRᵀ) − exp(x)Rᵀ‖ = o(‖exp(x)‖). But ‖exp(x)Rᵀ‖ is about ‖exp(x)‖ by "
    "the lemma while ‖exp(δxRᵀ)‖ → √k, so the ratio tends to about 1. The line that is written has exp(δx) in "
    "place of exp(x), which is not what the step needs; it is about √(n+k)/‖exp(x)‖, small only where logits are "
    "large. That exp is Lipschitz says nothing of a projection of exp(x).",
    "**Theorem 2, the norm.** The derivation ends in ε‖exp(x)‖‖y‖, the equation it proves has ε‖exp(x)yᵀ‖ (so has "
    "Section 4). In the weaker norm zeros are often enough, since ‖softmax(w)V‖ is at most ‖softmax(w)‖‖V‖ and "
    "mostly far less, and F = 0 gives zeros. Where they are not enough (values that share a mean, under diffuse "
    "attention), the construction, which is zeros and noise, fails with them.",
    "**Theorem 2, from exp to softmax.** The theorem is about softmax, the proof about exp. Softmax over k slots "
    "divides by about k, so as δ → 0 the output is noise of length ‖V‖_F/k, against a bound of "
    "ε‖softmax(w)‖‖V‖_F, where ‖softmax(w)‖ may be 1/√n: once n > (εk)², as it will be for k = O(log n), the "
    "construction misses even the weak bound.",
    "**Theorem 2, k without n.** Γ = [X, Y][X_s, Y_s]⁻¹ (side by side; as printed the shapes do not fit, and H is "
    "not defined) has rows of norm Θ(d) by assertion only. If the 2d rows s are chosen before R, Γ is not "
    "bounded; if they are chosen after it for the largest volume, |Γ_ij| ≤ 1, but then a union bound over 2d rows "
    "no longer covers them. The sum over s of ‖exp(A_i)‖ is at least, not at most, ‖exp(A_s)‖; the result is in "
    "that norm, not in that of row i; and a factor Θ(d) is left in front of ε, whose removal costs k a factor d², "
    "not d. That rank(A) = d plays no part: exp(A)V has d columns.",
    "**Theorem 2, the minimum.** With each Θ read as 1 the side 9d log d binds only for n > d^(9d/5): beyond "
    "10²⁰⁸ for d = 64, 10⁸⁷ for d = 32. In any use k = 5 log n/ε², which grows with n. The proof's own k is 5 "
    "log(nd)/(ε²−ε³).",
)

HOLDS = (
    "Both inequalities of the lemma, the second as |xRᵀRy − xy| ≤ ε‖x‖‖y‖ with probability at least 1 − "
    "2e^{−(ε²−ε³)k/4}.",
    "Theorem 1 as: all n rows u of P at once meet |uRᵀRw − uw| ≤ ε‖u‖‖w‖ with probability at least 1 − 2n^(−1/4) "
    "at k = 5 log n/(ε²−ε³). Relative to ‖Pw‖ it takes k ≈ (1+κ)/ε², which is little where κ is: for values that "
    "share a mean. Neither saves time: PRᵀ needs P.",
    "The inequality of Theorem 2, by another construction: keep k tokens at random (E and F select their rows), "
    "and each row w meets ‖softmax(wE)FᵀV − softmax(w)V‖ ≤ ε‖softmax(w)‖‖V‖_F but for a probability of "
    "32μ²/(kε²), with μ = √n·max‖v‖/‖V‖_F, whatever n, d and the logits; the proof is in "
    "`linformers.analysis.linear_attention`. It is exact at k = n, and as weak as its norm.",
    "That E and F exist for one given input, to a small error relative to PV itself: see the fits. It is shown by "
    "optimisation, not by the proof, and does not carry over to other inputs.",
)
