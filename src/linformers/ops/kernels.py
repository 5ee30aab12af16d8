"""Attention onto k projected keys in Triton, forward and backward; `attend.py` launches what stands here.

Each program serves one head of one row of the batch. With few keys it holds all of them and walks over its share of the
queries: a whole row of P̄ fits into registers, so that the backward pass is a single one and needs nothing that the
forward pass would have to save. With some more it still holds all of them, but looks at one half after the other; for
that the backward pass needs the result and the log-sum-exp of each row. With many keys, or with exact keys nearby, a
program holds one block of queries and walks over the keys, or the other way round.

Scores are kept in base 2: `scale` is scaling · log₂ e.
"""

import triton
import triton.language as tl


@triton.jit
def _head(pid, heads):
    """Row of the batch, head, and their common number."""
    return (pid // heads).to(tl.int64), pid % heads, pid


@triton.jit
def _load(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows `start + rows` of a matrix (n, D), 0 where there are none. Offsets within a tile fit into 32 bits."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(start + rows < n)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _load_near(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr):
    """As `_load`, where the first rows may lie before the matrix."""
    places = start + rows
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    return tl.load(pointers, mask=((places >= 0) & (places < n))[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _store(base, start, stride_n, n, rows, columns, tile, D: tl.constexpr):
    """Write a tile of rows whose channels are adjacent."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :]
    inside = (start + rows < n)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_row(base, number, start, n, rows):
    """A number for each of the rows of one head."""
    return tl.load(base + number.to(tl.int64) * n + start + rows, mask=start + rows < n, other=0.0)


@triton.jit
def _store_row(base, number, start, n, rows, values):
    tl.store(base + number.to(tl.int64) * n + start + rows, values, mask=start + rows < n)


@triton.jit
def _hidden(MASK, batch, head, stride_b, stride_h, stride_k, slots, k, HAS_MASK: tl.constexpr):
    """What to add to the scores of each slot: 0, or -inf where it is masked or does not exist."""
    visible = slots < k
    if HAS_MASK:
        visible = visible & (tl.load(MASK + batch * stride_b + head * stride_h + slots * stride_k, visible, 0) != 0)
    return tl.where(visible, 0.0, float("-inf"))


@triton.jit
def _hidden_far(queries, places, length, window):
    """What to add to the scores of queries and exact keys at these places: -inf where they are more than w apart.

    Both come with an axis for the other; a key that does not exist is hidden from all.
    """
    distance = queries - places
    visible = (distance <= window) & (-distance <= window) & (places >= 0) & (places < length)
    return tl.where(visible, 0.0, float("-inf"))


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
def _keys_of_queries(seed, number, rows):
    """A random number for each query of each head."""
    key, _, _, _ = tl.philox(seed, rows.to(tl.uint32), number.to(tl.uint32), 0, 0)
    return key


@triton.jit
def _keys_of_slots(seed, slots):
    """A random number for each slot, from other counters than those of the queries."""
    key, _, _, _ = tl.philox(seed, slots.to(tl.uint32), 0, 1, 0)
    return key


@triton.jit
def _keys_of_places(seed, places):
    """A random number for each exact key."""
    key, _, _, _ = tl.philox(seed, places.to(tl.uint32), 0, 2, 0)
    return key


@triton.jit
def _kept(keys, other_keys, threshold):
    """Which entries of P̄ survive dropout: those whose hash of 31 bits reaches `threshold`.

    Philox for each entry would cost more than attention; it is drawn for each row and each column, and the two are
    mixed by the finaliser of MurmurHash3.
    """
    x = keys ^ other_keys
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32) >= threshold


@triton.jit
def _share(split, splits, n, BLOCK_N: tl.constexpr):
    """The queries of one of `splits` programs: whole blocks, as equal in number as can be."""
    blocks = tl.cdiv(n, BLOCK_N)
    return split * blocks // splits * BLOCK_N, min((split + 1) * blocks // splits * BLOCK_N, n)


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
    batch, head, number = _head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = _load(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = _load(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_keys = _keys_of_slots(seed, slots)
    Q += batch * q_b + head * q_h
    OUT += (batch * n * heads + head) * D
    first, last = _share(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = _load(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (n, k)
        if HAS_MASK or not EVEN_K:
            products += hidden[None, :]
        probs, total, top = _exponentials(products, scale, HAS_MASK)
        if DROPOUT:
            kept = _kept(_keys_of_queries(seed, number, start + rows)[:, None], slot_keys[None, :], threshold)
            probs = tl.where(kept, probs, 0.0)
        out = tl.dot(probs.to(values.dtype), values, input_precision=PRECISION) * (rescale / total)[:, None]
        _store(OUT, start, heads * D, n, rows, columns, out, D)
        if LSE is not None:
            _store_row(LSE, number, start, n, rows, top + tl.log2(total))


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
    batch, head, number = _head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = _load(K + batch * k_b + head * k_h, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = _load(V + batch * v_b + head * v_h, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    if DROPOUT:
        seed = tl.load(SEED)
        slot_keys = _keys_of_slots(seed, slots)
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = _share(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = _load(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = _load(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        products = tl.dot(queries, keys.T, input_precision=PRECISION)  # (n, k)
        if HAS_MASK or not EVEN_K:
            products += hidden[None, :]
        probs, total, _ = _exponentials(products, scale, HAS_MASK)
        probs = probs * (1.0 / total)[:, None]
        gradient = tl.dot(out_gradient, values.T, input_precision=PRECISION)  # of P̄, (n, k)
        dropped = probs
        if DROPOUT:
            kept = _kept(_keys_of_queries(seed, number, start + rows)[:, None], slot_keys[None, :], threshold)
            dropped = tl.where(kept, probs * rescale, 0.0)
            gradient = tl.where(kept, gradient * rescale, 0.0)
        value_gradient = tl.dot(dropped.to(values.dtype).T, out_gradient, value_gradient, input_precision=PRECISION)
        gradient = probs * (gradient - tl.sum(probs * gradient, 1)[:, None])  # of the scores
        gradient = gradient.to(keys.dtype)
        key_gradient = tl.dot(gradient.T, queries, key_gradient, input_precision=PRECISION)
        query_gradient = tl.dot(gradient, keys, input_precision=PRECISION) * scaling
        _store(DQ, start, heads * D, n, rows, columns, query_gradient, D)
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    _store(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    _store(PARTS + value_part, 0, heads * D, k, slots, columns, value_gradient, D)


@triton.jit
def _of_keys(
    queries, out_gradient, lse, delta, query_keys, keys, values, hidden, slot_keys, key_gradient, value_gradient,
    scale, threshold, rescale, HIDES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile adds to the gradients of its keys and values; the gradient of its scores, (k, n).

    Keys stand in the rows, so that P̄ᵀ and its gradient go from one product into the next without leaving registers.
    """
    scores = tl.dot(keys, queries.T, input_precision=PRECISION) * scale  # (k, n)
    if HIDES:
        scores += hidden  # (k, n) or (k, 1)
    probs = tl.exp2(scores - lse[None, :])
    gradient = tl.dot(values, out_gradient.T, input_precision=PRECISION)  # of P̄
    dropped = probs
    if DROPOUT:
        kept = _kept(slot_keys[:, None], query_keys[None, :], threshold)
        dropped = tl.where(kept, probs * rescale, 0.0)
        gradient = tl.where(kept, gradient * rescale, 0.0)
    value_gradient = tl.dot(dropped.to(values.dtype), out_gradient, value_gradient, input_precision=PRECISION)
    gradient = (probs * (gradient - delta[None, :])).to(keys.dtype)  # of the scores
    key_gradient = tl.dot(gradient, queries, key_gradient, input_precision=PRECISION)
    return key_gradient, value_gradient, gradient


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
    batch, head, number = _head(pid // splits, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, HALF), tl.arange(0, BLOCK_D)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    keys = _load(K, 0, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = _load(V, 0, v_n, v_d, k, slots, columns, D, EVEN_K)
    more_keys = _load(K, HALF, k_n, k_d, k, slots, columns, D, EVEN_K)
    more_values = _load(V, HALF, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slots, k, HAS_MASK)
    more_hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, HALF + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_keys = _keys_of_slots(seed, slots) if DROPOUT else 0
    more_slot_keys = _keys_of_slots(seed, HALF + slots) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    OUT += (batch * n * heads + head) * D
    DQ += (batch * n * heads + head) * D
    key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    more_key_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    more_value_gradient = tl.zeros((HALF, BLOCK_D), tl.float32)
    first, last = _share(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = _load(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = _load(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        out = _load(OUT, start, heads * D, 1, n, rows, columns, D, EVEN)
        lse = _load_row(LSE, number, start, n, rows)
        delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
        query_keys = _keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, gradient = _of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden[:, None], slot_keys,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, keys, input_precision=PRECISION)
        more_key_gradient, more_value_gradient, gradient = _of_keys(
            queries, out_gradient, lse, delta, query_keys, more_keys, more_values, more_hidden[:, None], more_slot_keys,
            more_key_gradient, more_value_gradient, scale, threshold, rescale,
            HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
        query_gradient = tl.dot(gradient.T, more_keys, query_gradient, input_precision=PRECISION)
        _store(DQ, start, heads * D, n, rows, columns, query_gradient * scaling, D)
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    _store(PARTS, 0, heads * D, k, slots, columns, key_gradient * scaling, D)
    _store(PARTS, HALF, heads * D, k, slots, columns, more_key_gradient * scaling, D)
    _store(PARTS + value_part, 0, heads * D, k, slots, columns, value_gradient, D)
    _store(PARTS + value_part, HALF, heads * D, k, slots, columns, more_value_gradient, D)


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
        probs = tl.where(_kept(query_keys[:, None], slot_keys[None, :], threshold), probs, 0.0)
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
    batch, head, number = _head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = _load(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_keys = _keys_of_queries(seed, number, start + rows) if DROPOUT else 0
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = _load(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = _load(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_keys = _keys_of_slots(seed, slot + slots) if DROPOUT else 0
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
            keys = _load_near(NEAR_K, place, nk_n, nk_d, n, steps, columns, D)
            values = _load_near(NEAR_V, place, nv_n, nv_d, n, steps, columns, D)
            hidden = _hidden_far((start + rows)[:, None], (place + steps)[None, :], length, window)
            place_keys = _keys_of_places(seed, place + steps) if DROPOUT else 0
            top, total, out = _take_in(
                queries, keys, values, hidden, query_keys, place_keys, top, total, out, scale, threshold,
                True, DROPOUT, PRECISION,
            )  # fmt: skip
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    out = out * (rescale / total)[:, None]
    _store(OUT + (batch * n * heads + head) * D, start, heads * D, n, rows, columns, out, D)
    lse = tl.where(nothing, 0.0, top) + tl.log2(total)  # where nothing is seen, all scores are -inf and P̄ is 0
    _store_row(LSE, number, start, n, rows, lse)


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
        gradient = tl.where(_kept(query_keys[:, None], slot_keys[None, :], threshold), gradient * rescale, 0.0)
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
    batch, head, number = _head(pid // blocks, heads)
    start = pid % blocks * BLOCK_N
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    queries = _load(Q + batch * q_b + head * q_h, start, q_n, q_d, n, rows, columns, D, EVEN)
    out_gradient = _load(DOUT + batch * o_b + head * o_h, start, o_n, o_d, n, rows, columns, D, EVEN)
    own = (batch * n * heads + head) * D
    out = _load(OUT + own, start, heads * D, 1, n, rows, columns, D, EVEN)
    delta = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
    _store_row(DELTA, number, start, n, rows, delta)
    lse = _load_row(LSE, number, start, n, rows)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    seed = tl.load(SEED) if DROPOUT else 0
    query_keys = _keys_of_queries(seed, number, start + rows) if DROPOUT else 0
    query_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slot in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        keys = _load(K, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
        values = _load(V, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
        hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
        slot_keys = _keys_of_slots(seed, slot + slots) if DROPOUT else 0
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
            keys = _load_near(NEAR_K, place, nk_n, nk_d, n, steps, columns, D)
            values = _load_near(NEAR_V, place, nv_n, nv_d, n, steps, columns, D)
            hidden = _hidden_far((start + rows)[:, None], (place + steps)[None, :], length, window)
            place_keys = _keys_of_places(seed, place + steps) if DROPOUT else 0
            query_gradient = _of_queries(
                queries, out_gradient, lse, delta, query_keys, keys, values, hidden, place_keys, query_gradient,
                scale, threshold, rescale, True, DROPOUT, PRECISION,
            )  # fmt: skip
    _store(DQ + own, start, heads * D, n, rows, columns, query_gradient * scaling, D)


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
    batch, head, number = _head(pid // blocks, heads)
    place = pid % blocks * BLOCK_W
    rows, steps, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    keys = _load_near(NEAR_K + batch * nk_b + head * nk_h, place, nk_n, nk_d, n, steps, columns, D)
    values = _load_near(NEAR_V + batch * nv_b + head * nv_h, place, nv_n, nv_d, n, steps, columns, D)
    length = n if LENGTHS is None else tl.load(LENGTHS + batch).to(tl.int32)
    seed = tl.load(SEED) if DROPOUT else 0
    place_keys = _keys_of_places(seed, place + steps) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_W, BLOCK_D), tl.float32)
    for start in tl.range(place - window, place + BLOCK_W + window, BLOCK_N, num_stages=STAGES):
        queries = _load_near(Q, start, q_n, q_d, n, rows, columns, D)
        out_gradient = _load_near(DOUT, start, o_n, o_d, n, rows, columns, D)
        there = (start + rows >= 0) & (start + rows < n)
        own = number.to(tl.int64) * n + start + rows
        lse = tl.load(LSE + own, mask=there, other=0.0)
        delta = tl.load(DELTA + own, mask=there, other=0.0)
        hidden = _hidden_far((start + rows)[None, :], (place + steps)[:, None], length, window)
        query_keys = _keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = _of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden, place_keys,
            key_gradient, value_gradient, scale, threshold, rescale, True, DROPOUT, PRECISION,
        )  # fmt: skip
    DNEAR += (batch * n * heads + head) * D
    _store(DNEAR, place, heads * D, n, steps, columns, key_gradient * scaling, D)
    _store(DNEAR + near_part, place, heads * D, n, steps, columns, value_gradient, D)


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
    batch, head, number = _head(pid // splits // blocks, heads)
    rows, slots, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    keys = _load(K + batch * k_b + head * k_h, slot, k_n, k_d, k, slots, columns, D, EVEN_K)
    values = _load(V + batch * v_b + head * v_h, slot, v_n, v_d, k, slots, columns, D, EVEN_K)
    hidden = _hidden(MASK, batch, head, m_b, m_h, m_k, slot + slots, k, HAS_MASK)
    seed = tl.load(SEED) if DROPOUT else 0
    slot_keys = _keys_of_slots(seed, slot + slots) if DROPOUT else 0
    Q += batch * q_b + head * q_h
    DOUT += batch * o_b + head * o_h
    key_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, last = _share(split, splits, n, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        queries = _load(Q, start, q_n, q_d, n, rows, columns, D, EVEN)
        out_gradient = _load(DOUT, start, o_n, o_d, n, rows, columns, D, EVEN)
        lse = _load_row(LSE, number, start, n, rows)
        delta = _load_row(DELTA, number, start, n, rows)
        query_keys = _keys_of_queries(seed, number, start + rows) if DROPOUT else 0
        key_gradient, value_gradient, _ = _of_keys(
            queries, out_gradient, lse, delta, query_keys, keys, values, hidden[:, None], slot_keys,
            key_gradient, value_gradient, scale, threshold, rescale, HAS_MASK or not EVEN_K, DROPOUT, PRECISION,
        )  # fmt: skip
    PARTS += split.to(tl.int64) * part + (batch * k * heads + head) * D
    _store(PARTS, slot, heads * D, k, slots, columns, key_gradient * scaling, D)
    _store(PARTS + value_part, slot, heads * D, k, slots, columns, value_gradient, D)
