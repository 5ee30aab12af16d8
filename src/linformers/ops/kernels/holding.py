"""Attention in programs that hold all keys of one head, and walk over their share of its queries.

With few keys a whole row of P̄ fits into registers, so that the backward pass is a single one and needs nothing that the
forward pass would have to save. With some more, a program looks at one half of them after the other; for that the
backward pass needs the result and the log-sum-exp of each row.
"""

import triton
import triton.language as tl

from .parts import (
    find_head,
    gradients_of_keys,
    hide_slots,
    keys_of_queries,
    keys_of_slots,
    load_numbers,
    load_rows,
    share_of,
    store_numbers,
    store_rows,
    survives,
)


@triton.jit
def _exponentials(products, scale, HAS_MASK: tl.constexpr):
    """2 to the power of each row's scores less the highest; their sum, 1 where nothing is seen; the highest score."""
    top = tl.max(products, 1) * scale
    if HAS_MASK:
        top = tl.where(top == float("-inf"), 0.0, top)
    powers = tl.exp2(products * scale - top[:, None])
    total = tl.sum(powers, 1)
    if HAS_MASK:
        total = tl.where(total == 0.0, 1.0, total)
    return powers, total, top


@triton.jit
def forward_few(
    Q, K, V, MASK, SEED, OUT, LSE,
    heads, splits, n, k, scale, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT = P̄ V for a share of the queries of one head, all of its keys held; where asked for, the log-sum-exp too."""
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, number = find_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_keys = keys_of_slots(seed, slots)
    Q += batch * q_b + head * q_h
    OUT += (batch * n * heads + head) * D
    first, last = share_of(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (n, k)
        if HAS_MASK or not EVEN_K:
            products += hidden[None, :]
        probs, total, top = _exponentials(products, scale, HAS_MASK)
        if DROPOUT:
            kept = survives(keys_of_queries(seed, number, start + rows)[:, None], slot_keys[None, :], threshold)
            probs = tl.where(kept, probs, 0.0)
        out = tl.dot(probs.to(values.dtype), values, input_precision=PRECISION) * (rescale / total)[:, None]
        store_rows(OUT, start, heads * D, n, rows, columns, out, D)
        if LSE is not None:
            store_numbers(LSE, number, start, n, rows, top + tl.log2(total))


@triton.jit
def backward_few(
    Q, K, V, MASK, SEED, DOUT, DQ, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, part, value_part,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients from a share of the queries of one head; those of keys and values are sums over the shares."""
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, number = find_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_keys = keys_of_slots(seed, slots)
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = share_of(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (n, k)
        if HAS_MASK or not EVEN_K:
            products += hidden[None, :]
        probs, total, _ = _exponentials(products, scale, HAS_MASK)
        probs = probs * (1.0 / total)[:, None]
        gradient = tl.dot(out_gradient, values.T, input_precision=PRECISION)  # of P̄, (n, k)
        dropped = probs
        if DROPOUT:
            kept = survives(keys_of_queries(seed, number, start + rows)[:, None], slot_keys[None, :], threshold)
            dropped = tl.where(kept, probs * rescale, 0.0)
            gradient = tl.where(kept, gradient * rescale, 0.0)
        value_gradient = tl.dot(dropped.to(values.dtype).T, out_gradient, value_gradient, input_precision=PRECISION)
        gradient = probs * (gradient - tl.sum(probs * gradient, 1)[:, None])  # of the scores
        gradient = gradient.to(keys.dtype)
        key_gradient = tl.dot(gradient.T, queries, key_gradient, input_precision=PRECISION)
        query_gradient = tl.dot(gradient, keys, input_precision=PRECISION) * scaling
        store_rows(DQ, start, heads * D, n, rows, columns, query_gradient, D)
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    store_rows(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS + value_part, 0, heads * D, k, slots, columns, value_gradient, D)


@triton.jit
def backward_some(
    Q, K, V, MASK, SEED, OUT, LSE, DOUT, DQ, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, part, value_part,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `backward_few`, one half of the keys after the other."""
    HALF: tl.constexpr = BLOCK_K // 2
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, number = find_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, HALF), tl.arange(0, BLOCK_D)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    keys = load_rows(K, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    more_keys = load_rows(K, HALF, k_n, k_d, k, slots, columns, D, EVEN_K)
    more_values = load_rows(V, HALF, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    more_hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, HALF + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_keys = keys_of_slots(seed, slots) if DROPOUT else 0
    more_slot_keys = keys_of_slots(seed, HALF + slots) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    OUT += (batch * n * heads + head) * D
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    more_key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    more_value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    first, last = share_of(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        out = load_rows(OUT, start, heads * D, 1, n, rows, columns, D, EVEN)
        lse = load_numbers(LSE, number, start, n, rows)
        delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
        query_keys = keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, gradient = gradients_of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden[:, None], slot_keys,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, keys, input_precision=PRECISION)
        more_key_gradient, more_value_gradient, gradient = gradients_of_keys(
            queries, out_gradient, lse, delta, query_keys, more_keys, more_values, more_hidden[:, None], more_slot_keys,
            more_key_gradient, more_value_gradient, scale, threshold, rescale,
            HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, more_keys, query_gradient, input_precision=PRECISION)
        store_rows(DQ, start, heads * D, n, rows, columns, query_gradient * scaling, D)
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    store_rows(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS, HALF, heads * D, k, slots, columns, more_key_gradient * scaling, D)
    store_rows(PARTS + value_part, 0, heads * D, k, slots, columns, value_gradient, D)
    store_rows(PARTS + value_part, HALF, heads * D, k, slots, columns, more_value_gradient, D)
