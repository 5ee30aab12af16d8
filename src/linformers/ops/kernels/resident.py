"""Kernels in which all keys of a head stay on chip while the program loops over a range of queries.

They must equal `reference.attend`. If a whole row of P̄ fits in registers, the backward pass is a single kernel that
recomputes everything. With up to twice as many keys, it processes the keys in two halves, which takes the output and
the log-sum-exp of each row from the forward pass.
"""

import triton
import triton.language as tl

from .common import (
    add_key_gradients,
    key_hash,
    load_rows,
    load_scalars,
    locate_head,
    query_hash,
    query_range,
    slot_bias,
    store_rows,
    store_scalars,
    survives,
)


@triton.jit
def _exp_scores(products, scale, HAS_MASK: tl.constexpr):
    """exp2(score - row maximum), its sum over each row (1 if every key is masked), and the row maximum."""
    row_max = tl.max(products, 1) * scale
    if HAS_MASK:
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    powers = tl.exp2(products * scale - row_max[:, None])
    row_sum = tl.sum(powers, 1)
    if HAS_MASK:
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    return powers, row_sum, row_max


@triton.jit
def forward_resident(
    Q, K, V, MASK, SEED, OUT, LSE,
    heads, splits, n, k, scale, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT = P̄ V for a range of queries of one head and, unless LSE is None, the log-sum-exp of each row."""
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, head_index = locate_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_hashes = key_hash(seed, slots, 1)
    Q += batch * q_b + head * q_h
    OUT += (batch * n * heads + head) * D
    first, last = query_range(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (BLOCK_N, keys)
        if HAS_MASK or not EVEN_K:
            products += bias[None, :]
        probs, row_sum, row_max = _exp_scores(products, scale, HAS_MASK)
        if DROPOUT:
            kept = survives(query_hash(seed, head_index, start + rows)[:, None], slot_hashes[None, :], threshold)
            probs = tl.where(kept, probs, 0.0)
        out = tl.dot(probs.to(values.dtype), values, input_precision=PRECISION) * (rescale / row_sum)[:, None]
        store_rows(OUT, start, heads * D, n, rows, columns, out, D)
        if LSE is not None:
            store_scalars(LSE, head_index, start, n, rows, row_max + tl.log2(row_sum))


@triton.jit
def backward_resident(
    Q, K, V, MASK, SEED, DOUT, DQ, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, split_stride, value_offset,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients from a range of queries of one head; the caller sums those of keys and values over the ranges."""
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, head_index = locate_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_hashes = key_hash(seed, slots, 1)
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = query_range(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (BLOCK_N, keys)
        if HAS_MASK or not EVEN_K:
            products += bias[None, :]
        probs, row_sum, _ = _exp_scores(products, scale, HAS_MASK)
        probs = probs * (1.0 / row_sum)[:, None]
        gradient = tl.dot(out_gradient, values.T, input_precision=PRECISION)  # of P̄, (BLOCK_N, keys)
        dropped = probs
        if DROPOUT:
            kept = survives(query_hash(seed, head_index, start + rows)[:, None], slot_hashes[None, :], threshold)
            dropped = tl.where(kept, probs * rescale, 0.0)
            gradient = tl.where(kept, gradient * rescale, 0.0)
        value_gradient = tl.dot(dropped.to(values.dtype).T, out_gradient, value_gradient, input_precision=PRECISION)
        gradient = (probs * (gradient - tl.sum(probs * gradient, 1)[:, None])).to(keys.dtype)  # of the scores
        key_gradient = tl.dot(gradient.T, queries, key_gradient, input_precision=PRECISION)
        query_gradient = tl.dot(gradient, keys, input_precision=PRECISION) * scaling
        store_rows(DQ, start, heads * D, n, rows, columns, query_gradient, D)
    PARTS += split.to(tl.int64) * split_stride + (batch * k * heads + head) * D
    store_rows(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS + value_offset, 0, heads * D, k, slots, columns, value_gradient, D)


@triton.jit
def backward_resident_halves(
    Q, K, V, MASK, SEED, OUT, LSE, DOUT, DQ, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, split_stride, value_offset,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `backward_resident`, with the keys in two halves."""
    HALF: tl.constexpr = BLOCK_K // 2
    pid = tl.program_id(0)
    split = pid % splits
    batch, head, head_index = locate_head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, HALF), tl.arange(0, BLOCK_D)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    keys = load_rows(K, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    upper_keys = load_rows(K, HALF, k_n, k_d, k, slots, columns, D, EVEN_K)
    upper_values = load_rows(V, HALF, v_n, v_d, k, slots, columns, D, EVEN_K)
    bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    upper_bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, HALF + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_hashes = key_hash(seed, slots, 1) if DROPOUT else 0
    upper_hashes = key_hash(seed, HALF + slots, 1) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    OUT += (batch * n * heads + head) * D
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    upper_key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    upper_value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    first, last = query_range(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        out = load_rows(OUT, start, heads * D, 1, n, rows, columns, D, EVEN)
        lse = load_scalars(LSE, head_index, start, n, rows)
        delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
        query_hashes = query_hash(seed, head_index, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, gradient = add_key_gradients(
            queries, out_gradient, lse, delta, query_hashes, keys, values, bias[:, None], slot_hashes,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, keys, input_precision=PRECISION)
        upper_key_gradient, upper_value_gradient, gradient = add_key_gradients(
            queries, out_gradient, lse, delta, query_hashes, upper_keys, upper_values, upper_bias[:, None],
            upper_hashes, upper_key_gradient, upper_value_gradient, scale, threshold, rescale,
            HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, upper_keys, query_gradient, input_precision=PRECISION)
        store_rows(DQ, start, heads * D, n, rows, columns, query_gradient * scaling, D)
    PARTS += split.to(tl.int64) * split_stride + (batch * k * heads + head) * D
    store_rows(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS, HALF, heads * D, k, slots, columns, upper_key_gradient * scaling, D)
    store_rows(PARTS + value_offset, 0, heads * D, k, slots, columns, value_gradient, D)
    store_rows(PARTS + value_offset, HALF, heads * D, k, slots, columns, upper_value_gradient, D)
