"""Kernels that keep a block of queries on chip and loop over the keys, or the other way around.

They take any number of keys, and a local window. They must equal `reference.attend` and `reference.attend_locally`.
"""

import triton
import triton.language as tl

from .common import (
    add_key_gradients,
    key_hash,
    load_rows,
    load_scalars,
    load_window,
    locate_head,
    query_hash,
    query_range,
    slot_bias,
    store_rows,
    store_scalars,
    survives,
    window_bias,
)


@triton.jit
def _online_softmax(
    queries, keys, values, bias, query_hashes, key_hashes, row_max, row_sum, out, scale, threshold,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running row maximum, row sum and output."""
    scores = tl.dot(queries, keys.T, input_precision=PRECISION) * scale  # (BLOCK_N, keys)
    if HAS_BIAS:
        scores += bias  # broadcast over queries, or one for each entry
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(probs, 1)
    if DROPOUT:
        probs = tl.where(survives(query_hashes[:, None], key_hashes[None, :], threshold), probs, 0.0)
    out = tl.dot(probs.to(values.dtype), values, out * correction[:, None], input_precision=PRECISION)
    return new_max, row_sum, out


@triton.jit
def forward_streaming(
    Q, K, V, NEAR_K, NEAR_V, MASK, LENGTHS, SEED, OUT, LSE,
    heads, n, k, window, scale, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k, nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT = P̄ V and the base-2 log-sum-exp for one block of queries, over the projected keys and then the near ones."""
    blocks, pid = tl.cdiv(n, BLOCK_N), tl.program_id(0)
    batch, head, head_index = locate_head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = load_rows(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_hashes = query_hash(seed, head_index, start + rows) if DROPOUT else 0
    row_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_N,), tl.float32)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = load_rows(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = load_rows(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_hashes = key_hash(seed, slot + slots, 1) if DROPOUT else 0
        row_max, row_sum, out = _online_softmax(
            queries, keys, values, bias[None, :], query_hashes, slot_hashes, row_max, row_sum, out, scale, threshold,
            HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    if NEAR_K is not None:
        NEAR_K += batch * nk_b + head * nk_h
        NEAR_V += batch * nv_b + head * nv_h
        length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
        offsets = tl.arange(0, BLOCK_W)
        for position in tl.range(start - window, start + BLOCK_N + window, BLOCK_W, num_stages=STAGES):
            keys = load_window(NEAR_K, position, nk_n, nk_d, n, offsets, columns, D)
            values = load_window(NEAR_V, position, nv_n, nv_d, n, offsets, columns, D)
            bias = window_bias((start + rows)[:, None], (position + offsets)[None, :], length, window)
            near_hashes = key_hash(seed, position + offsets, 2) if DROPOUT else 0
            row_max, row_sum, out = _online_softmax(
                queries, keys, values, bias, query_hashes, near_hashes, row_max, row_sum, out, scale, threshold,
                True, DROPOUT, PRECISION,
            )  # fmt: skip
    all_masked = row_sum == 0.0
    row_sum = tl.where(all_masked, 1.0, row_sum)
    out = out * (rescale / row_sum)[:, None]
    store_rows(OUT + (batch * n * heads + head) * D, start, heads * D, n, rows, columns, out, D)
    lse = tl.where(all_masked, 0.0, row_max) + tl.log2(row_sum)  # if all keys are masked, P̄ is 0 with any finite value
    store_scalars(LSE, head_index, start, n, rows, lse)


@triton.jit
def _add_query_gradient(
    queries, out_gradient, lse, delta, query_hashes, keys, values, bias, key_hashes, query_gradient,
    scale, threshold, rescale, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the gradient of the queries."""
    scores = tl.dot(queries, keys.T, input_precision=PRECISION) * scale  # (BLOCK_N, keys)
    if HAS_BIAS:
        scores += bias  # broadcast over queries, or one for each entry
    probs = tl.exp2(scores - lse[:, None])
    gradient = tl.dot(out_gradient, values.T, input_precision=PRECISION)  # of P̄
    if DROPOUT:
        gradient = tl.where(survives(query_hashes[:, None], key_hashes[None, :], threshold), gradient * rescale, 0.0)
    gradient = (probs * (gradient - delta[:, None])).to(keys.dtype)  # of the scores
    return tl.dot(gradient, keys, query_gradient, input_precision=PRECISION)


@triton.jit
def backward_queries(
    Q, K, V, NEAR_K, NEAR_V, MASK, LENGTHS, SEED, OUT, LSE, DOUT, DQ, DELTA,
    heads, n, k, window, scale, scaling, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k, nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d, o_b, o_h, o_n, o_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries, and DELTA, the sum of OUT · DOUT over the channels of each query."""
    blocks, pid = tl.cdiv(n, BLOCK_N), tl.program_id(0)
    batch, head, head_index = locate_head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = load_rows(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    out_gradient = load_rows(DOUT + batch * o_b + head * o_h, start, o_n, o_d, n, rows, columns, D, EVEN)
    offset = (batch * n * heads + head) * D
    out = load_rows(OUT + offset, start, heads * D, 1, n, rows, columns, D, EVEN)
    delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
    store_scalars(DELTA, head_index, start, n, rows, delta)
    lse = load_scalars(LSE, head_index, start, n, rows)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_hashes = query_hash(seed, head_index, start + rows) if DROPOUT else 0
    query_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = load_rows(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = load_rows(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_hashes = key_hash(seed, slot + slots, 1) if DROPOUT else 0
        query_gradient = _add_query_gradient(
            queries, out_gradient, lse, delta, query_hashes, keys, values, bias[None, :], slot_hashes, query_gradient,
            scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    if NEAR_K is not None:
        NEAR_K += batch * nk_b + head * nk_h
        NEAR_V += batch * nv_b + head * nv_h
        length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
        offsets = tl.arange(0, BLOCK_W)
        for position in tl.range(start - window, start + BLOCK_N + window, BLOCK_W, num_stages=STAGES):
            keys = load_window(NEAR_K, position, nk_n, nk_d, n, offsets, columns, D)
            values = load_window(NEAR_V, position, nv_n, nv_d, n, offsets, columns, D)
            bias = window_bias((start + rows)[:, None], (position + offsets)[None, :], length, window)
            near_hashes = key_hash(seed, position + offsets, 2) if DROPOUT else 0
            query_gradient = _add_query_gradient(
                queries, out_gradient, lse, delta, query_hashes, keys, values, bias, near_hashes, query_gradient,
                scale, threshold, rescale, True, DROPOUT, PRECISION,
            )  # fmt: skip
    store_rows(DQ + offset, start, heads * D, n, rows, columns, query_gradient * scaling, D)


@triton.jit
def backward_near_keys(
    Q, NEAR_K, NEAR_V, LENGTHS, SEED, LSE, DELTA, DOUT, DNEAR,
    heads, n, window, scale, scaling, threshold, rescale, near_value_offset,
    q_b, q_h, q_n, q_d, nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d, o_b, o_h, o_n, o_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of exact keys and values, from the queries around it."""
    blocks, pid = tl.cdiv(n, BLOCK_W), tl.program_id(0)
    batch, head, head_index = locate_head(pid // blocks, heads)
    position = pid % blocks * BLOCK_W
    rows, offsets, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    keys = load_window(NEAR_K + batch * nk_b + head * nk_h, position, nk_n, nk_d, n, offsets, columns, D)
    values = load_window(NEAR_V + batch * nv_b + head * nv_h, position, nv_n, nv_d, n, offsets, columns, D)
    length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
    seed = tl.load(SEED) if DROPOUT else 0
    near_hashes = key_hash(seed, position + offsets, 2) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    for start in tl.range(position - window, position + BLOCK_W + window, BLOCK_N, num_stages=STAGES):
        queries = load_window(Q, start, q_n, q_d, n, rows, columns, D)
        out_gradient = load_window(DOUT, start, o_n, o_d, n, rows, columns, D)
        valid = (start + rows >= 0) & (start + rows < n)
        offset = head_index.to(tl.int64) * n + start + rows
        lse = tl.load(LSE + offset, mask=valid, other=0.0)
        delta = tl.load(DELTA + offset, mask=valid, other=0.0)
        bias = window_bias((start + rows)[None, :], (position + offsets)[:, None], length, window)
        query_hashes = query_hash(seed, head_index, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = add_key_gradients(
            queries, out_gradient, lse, delta, query_hashes, keys, values, bias, near_hashes,
            key_gradient, value_gradient, scale, threshold, rescale, True, DROPOUT, PRECISION,
        )  # fmt: skip
    DNEAR += (batch * n * heads + head) * D
    store_rows(DNEAR, position, heads * D, n, offsets, columns, key_gradient * scaling, D)
    store_rows(DNEAR + near_value_offset, position, heads * D, n, offsets, columns, value_gradient, D)


@triton.jit
def backward_keys(
    Q, K, V, MASK, SEED, LSE, DELTA, DOUT, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, split_stride, value_offset,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of projected keys and values, from a range of queries."""
    blocks, pid = tl.cdiv(k, BLOCK_K), tl.program_id(0)
    split = pid % splits
    slot = pid // splits % blocks * BLOCK_K
    batch, head, head_index = locate_head(pid // splits // blocks, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
    bias = slot_bias(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_hashes = key_hash(seed, slot + slots, 1) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = query_range(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        lse = load_scalars(LSE, head_index, start, n, rows)
        delta = load_scalars(DELTA, head_index, start, n, rows)
        query_hashes = query_hash(seed, head_index, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = add_key_gradients(
            queries, out_gradient, lse, delta, query_hashes, keys, values, bias[:, None], slot_hashes,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    PARTS += split.to(tl.int64) * split_stride + (batch * k * heads + head) * D
    store_rows(PARTS, slot, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS + value_offset, slot, heads * D, k, slots, columns, value_gradient, D)
