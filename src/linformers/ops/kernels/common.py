"""Helpers of the attention kernels: loading and storing tiles, masks, dropout, the gradients of a tile of keys.

Scores are in base 2, so that softmax can use exp2: `scale` is scaling · log₂ e.
"""

import triton
import triton.language as tl


@triton.jit
def locate_head(pid, heads):
    """The row of the batch, the head in that row, and the index of the head in the whole batch."""
    return (pid // heads).to(tl.int64), pid % heads, pid


@triton.jit
def load_rows(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows `start + rows` of a matrix (n, D), with 0 beyond its end. Offsets within a tile fit into 32 bits."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(start + rows < n)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_window(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr):
    """Like `load_rows`, but `start` may be negative; rows before the matrix are 0."""
    positions = start + rows
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    return tl.load(pointers, mask=((positions >= 0) & (positions < n))[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_rows(base, start, stride_n, n, rows, columns, tile, D: tl.constexpr):
    """Store a tile of rows whose channels are contiguous."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :]
    inside = (start + rows < n)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_scalars(base, head_index, start, n, rows):
    """One float per row of a head, from a tensor (b, h, n)."""
    return tl.load(base + head_index.to(tl.int64) * n + start + rows, mask=start + rows < n, other=0.0)


@triton.jit
def store_scalars(base, head_index, start, n, rows, values):
    tl.store(base + head_index.to(tl.int64) * n + start + rows, values, mask=start + rows < n)


@triton.jit
def slot_bias(MASK, batch, head, stride_b, stride_h, stride_k, slots, k, HAS_MASK: tl.constexpr):
    """The bias that masks projected keys: 0, or -inf for a slot that is masked or beyond k."""
    visible = slots < k
    if HAS_MASK:
        visible = visible & (tl.load(MASK + batch * stride_b + head * stride_h + slots * stride_k, visible, 0) != 0)
    return tl.where(visible, 0.0, float("-inf"))


@triton.jit
def window_bias(queries, positions, length, window):
    """The bias that masks exact keys: -inf if a key is farther than `window` from the query, or is padding.

    `queries` and `positions` are positions in the sequence and broadcast against each other.
    """
    distance = queries - positions
    visible = (distance <= window) & (-distance <= window) & (positions >= 0) & (positions < length)
    return tl.where(visible, 0.0, float("-inf"))


@triton.jit
def query_hash(seed, head_index, rows):
    """32 random bits for each query of each head."""
    bits, _, _, _ = tl.philox(seed, rows.to(tl.uint32), head_index.to(tl.uint32), 0, 0)
    return bits


@triton.jit
def key_hash(seed, keys, stream):
    """32 random bits for each key: stream 1 is for projected keys, 2 for exact keys; 0 is for queries."""
    bits, _, _, _ = tl.philox(seed, keys.to(tl.uint32), 0, stream, 0)
    return bits


@triton.jit
def survives(row_hashes, column_hashes, threshold):
    """Which entries of P̄ survive dropout: those whose 31-bit hash is at least `threshold`.

    One Philox call per entry would cost more than attention itself, so it is called once per row and per column, and
    the finalizer of MurmurHash3 mixes the two.
    """
    x = row_hashes ^ column_hashes
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32) >= threshold


@triton.jit
def query_range(split, splits, n, BLOCK_N: tl.constexpr):
    """The range of queries of one of `splits` programs: whole blocks, divided as evenly as possible."""
    blocks = tl.cdiv(n, BLOCK_N)
    return split * blocks // splits * BLOCK_N, min((split + 1) * blocks // splits * BLOCK_N, n)


@triton.jit
def add_key_gradients(
    queries, out_gradient, lse, delta, query_hashes, keys, values, bias, key_hashes, key_gradient, value_gradient,
    scale, threshold, rescale, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to the gradients of keys and values; also return the gradient of the scores.

    Keys are in the rows, so that P̄ᵀ and its gradient feed the next product without leaving registers.
    """
    scores = tl.dot(keys, queries.T, input_precision=PRECISION) * scale  # (keys, BLOCK_N)
    if HAS_BIAS:
        scores += bias  # broadcast over queries, or one for each entry
    probs = tl.exp2(scores - lse[None, :])
    gradient = tl.dot(values, out_gradient.T, input_precision=PRECISION)  # of P̄
    dropped = probs
    if DROPOUT:
        kept = survives(key_hashes[:, None], query_hashes[None, :], threshold)
        dropped = tl.where(kept, probs * rescale, 0.0)
        gradient = tl.where(kept, gradient * rescale, 0.0)
    value_gradient = tl.dot(dropped.to(values.dtype), out_gradient, value_gradient, input_precision=PRECISION)
    gradient = (probs * (gradient - delta[None, :])).to(keys.dtype)  # of the scores
    key_gradient = tl.dot(gradient, queries, key_gradient, input_precision=PRECISION)
    return key_gradient, value_gradient, gradient
