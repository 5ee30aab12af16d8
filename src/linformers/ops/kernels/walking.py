"""Attention in programs that hold a block of queries of one head and walk over its keys, or the other way round.

These serve any number of keys, and a local window: the exact keys around a query, in one softmax with the projected
ones.
"""

import triton
import triton.language as tl

from .parts import (
    find_head,
    gradients_of_keys,
    hide_far,
    hide_slots,
    keys_of_places,
    keys_of_queries,
    keys_of_slots,
    load_near,
    load_numbers,
    load_rows,
    share_of,
    store_numbers,
    store_rows,
    survives,
)


@triton.jit
def _take_in(
    queries, keys, values, hidden, query_keys, slot_keys, top, total, out, scale, threshold,
    HIDES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let queries look at one more tile of keys: their highest score, the sum of their exponentials, their result."""
    scores = tl.dot(queries, keys.T, input_precision=PRECISION) * scale  # (n, k)
    if HIDES:
        scores += hidden  # (n, k) or (1, k)
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    probs = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(probs, 1)
    if DROPOUT:
        probs = tl.where(survives(query_keys[:, None], slot_keys[None, :], threshold), probs, 0.0)
    out = tl.dot(probs.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return higher, total, out


@triton.jit
def forward_many(
    Q, K, V, NEAR_K, NEAR_V, MASK, LENGTHS, SEED, OUT, LSE,
    heads, n, k, window, scale, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k,
    nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT = P̄ V and the log-sum-exp (in base 2) for one block of queries of one head, in a walk over its keys.

    With a local window, the walk goes on over the exact keys around the block.
    """
    blocks = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    batch, head, number = find_head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = load_rows(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_keys = keys_of_queries(seed, number, start + rows) if DROPOUT else 0
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = load_rows(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = load_rows(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_keys = keys_of_slots(seed, slot + slots) if DROPOUT else 0
        top, total, out = _take_in(
            queries, keys, values, hidden[None, :], query_keys, slot_keys, top, total, out, scale, threshold,
            HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    if NEAR_K is not None:
        NEAR_K += batch * nk_b + head * nk_h
        NEAR_V += batch * nv_b + head * nv_h
        length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
        steps = tl.arange(0, BLOCK_W)
        for place in tl.range(start - window, start + BLOCK_N + window, BLOCK_W, num_stages=STAGES):
            keys = load_near(NEAR_K, place, nk_n, nk_d, n, steps, columns, D)
            values = load_near(NEAR_V, place, nv_n, nv_d, n, steps, columns, D)
            hidden = hide_far((start + rows)[:, None], (place + steps)[None, :], length, window)
            place_keys = keys_of_places(seed, place + steps) if DROPOUT else 0
            top, total, out = _take_in(
                queries, keys, values, hidden, query_keys, place_keys, top, total, out, scale, threshold,
                True, DROPOUT, PRECISION,
            )  # fmt: skip
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    out = out * (rescale / total)[:, None]
    store_rows(OUT + (batch * n * heads + head) * D, start, heads * D, n, rows, columns, out, D)
    lse = tl.where(nothing, 0.0, top) + tl.log2(total)  # where nothing is seen, all scores are -inf and P̄ is 0
    store_numbers(LSE, number, start, n, rows, lse)


@triton.jit
def _of_queries(
    queries, out_gradient, lse, delta, query_keys, keys, values, hidden, slot_keys, query_gradient,
    scale, threshold, rescale, HIDES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds to the gradient of queries."""
    scores = tl.dot(queries, keys.T, input_precision=PRECISION) * scale  # (n, k)
    if HIDES:
        scores += hidden  # (n, k) or (1, k)
    probs = tl.exp2(scores - lse[:, None])
    gradient = tl.dot(out_gradient, values.T, input_precision=PRECISION)  # of P̄
    if DROPOUT:
        gradient = tl.where(survives(query_keys[:, None], slot_keys[None, :], threshold), gradient * rescale, 0.0)
    gradient = (probs * (gradient - delta[:, None])).to(keys.dtype)  # of the scores
    return tl.dot(gradient, keys, query_gradient, input_precision=PRECISION)


@triton.jit
def backward_many_queries(
    Q, K, V, NEAR_K, NEAR_V, MASK, LENGTHS, SEED, OUT, LSE, DOUT, DQ, DELTA,
    heads, n, k, window, scale, scaling, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k,
    nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d, o_b, o_h, o_n, o_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries, and DELTA, the sum of OUT · DOUT over the channels of each of them."""
    blocks = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    batch, head, number = find_head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = load_rows(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    out_gradient = load_rows(DOUT + batch * o_b + head * o_h, start, o_n, o_d, n, rows, columns, D, EVEN)
    own = (batch * n * heads + head) * D
    out = load_rows(OUT + own, start, heads * D, 1, n, rows, columns, D, EVEN)
    delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
    store_numbers(DELTA, number, start, n, rows, delta)
    lse = load_numbers(LSE, number, start, n, rows)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_keys = keys_of_queries(seed, number, start + rows) if DROPOUT else 0
    query_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = load_rows(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = load_rows(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_keys = keys_of_slots(seed, slot + slots) if DROPOUT else 0
        query_gradient = _of_queries(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden[None, :], slot_keys, query_gradient,
            scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    if NEAR_K is not None:
        NEAR_K += batch * nk_b + head * nk_h
        NEAR_V += batch * nv_b + head * nv_h
        length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
        steps = tl.arange(0, BLOCK_W)
        for place in tl.range(start - window, start + BLOCK_N + window, BLOCK_W, num_stages=STAGES):
            keys = load_near(NEAR_K, place, nk_n, nk_d, n, steps, columns, D)
            values = load_near(NEAR_V, place, nv_n, nv_d, n, steps, columns, D)
            hidden = hide_far((start + rows)[:, None], (place + steps)[None, :], length, window)
            place_keys = keys_of_places(seed, place + steps) if DROPOUT else 0
            query_gradient = _of_queries(
                queries, out_gradient, lse, delta, query_keys, keys, values, hidden, place_keys, query_gradient,
                scale, threshold, rescale, True, DROPOUT, PRECISION,
            )  # fmt: skip
    store_rows(DQ + own, start, heads * D, n, rows, columns, query_gradient * scaling, D)


@triton.jit
def backward_near(
    Q, NEAR_K, NEAR_V, LENGTHS, SEED, LSE, DELTA, DOUT, DNEAR,
    heads, n, window, scale, scaling, threshold, rescale, near_part,
    q_b, q_h, q_n, q_d, nk_b, nk_h, nk_n, nk_d, nv_b, nv_h, nv_n, nv_d, o_b, o_h, o_n, o_d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of exact keys and values from the queries around it."""
    blocks = tl.cdiv(n, BLOCK_W)
    pid = tl.program_id(0)
    batch, head, number = find_head(pid // blocks, heads)
    place = pid % blocks * BLOCK_W
    rows, steps, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    keys = load_near(NEAR_K + batch * nk_b + head * nk_h, place, nk_n, nk_d, n, steps, columns, D)
    values = load_near(NEAR_V + batch * nv_b + head * nv_h, place, nv_n, nv_d, n, steps, columns, D)
    length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
    seed = tl.load(SEED) if DROPOUT else 0
    place_keys = keys_of_places(seed, place + steps) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    for start in tl.range(place - window, place + BLOCK_W + window, BLOCK_N, num_stages=STAGES):
        queries = load_near(Q, start, q_n, q_d, n, rows, columns, D)
        out_gradient = load_near(DOUT, start, o_n, o_d, n, rows, columns, D)
        there = (start + rows >= 0) & (start + rows < n)
        own = number.to(tl.int64) * n + start + rows
        lse = tl.load(LSE + own, mask=there, other=0.0)
        delta = tl.load(DELTA + own, mask=there, other=0.0)
        hidden = hide_far((start + rows)[None, :], (place + steps)[:, None], length, window)
        query_keys = keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = gradients_of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden, place_keys,
            key_gradient, value_gradient, scale, threshold, rescale, True, DROPOUT, PRECISION,
        )  # fmt: skip
    DNEAR += (batch * n * heads + head) * D
    store_rows(DNEAR, place, heads * D, n, steps, columns, key_gradient * scaling, D)
    store_rows(DNEAR + near_part, place, heads * D, n, steps, columns, value_gradient, D)


@triton.jit
def backward_many_keys(
    Q, K, V, MASK, SEED, LSE, DELTA, DOUT, PARTS,
    heads, splits, n, k, scale, scaling, threshold, rescale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_k, o_b, o_h, o_n, o_d, part, value_part,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values from a share of the queries."""
    blocks = tl.cdiv(k, BLOCK_K)
    pid = tl.program_id(0)
    split = pid % splits
    slot = pid // splits % blocks * BLOCK_K
    batch, head, number = find_head(pid // splits // blocks, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = load_rows(K + batch * k_b + head * k_h, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = load_rows(V + batch * v_b + head * v_h, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = hide_slots(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_keys = keys_of_slots(seed, slot + slots) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = share_of(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = load_rows(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = load_rows(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        lse = load_numbers(LSE, number, start, n, rows)
        delta = load_numbers(DELTA, number, start, n, rows)
        query_keys = keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = gradients_of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden[:, None], slot_keys,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    store_rows(PARTS, slot, heads * D, k, slots, columns, key_gradient * scaling, D)
    store_rows(PARTS + value_part, slot, heads * D, k, slots, columns, value_gradient, D)
