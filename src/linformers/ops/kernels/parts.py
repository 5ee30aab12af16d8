"""What the kernels of attention have in common: tiles in and out, masks, dropout, the gradients of a tile of keys.

Scores are kept in base 2: `scale` is scaling · log₂ e.
"""

import triton
import triton.language as tl


@triton.jit
def find_head(pid, heads):
    """Row of the batch, head, and their common number."""
    return (pid // heads).to(tl.int64), pid % heads, pid


@triton.jit
def load_rows(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows `start + rows` of a matrix (n, D), 0 where there are none. Offsets within a tile fit into 32 bits."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(start + rows < n)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_near(base, start, stride_n, stride_d, n, rows, columns, D: tl.constexpr):
    """As `load_rows`, where the first rows may lie before the matrix."""
    places = start + rows
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :] * stride_d
    return tl.load(pointers, mask=((places >= 0) & (places < n))[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_rows(base, start, stride_n, n, rows, columns, tile, D: tl.constexpr):
    """Write a tile of rows whose channels are adjacent."""
    pointers = base + tl.cast(start, tl.int64) * stride_n + rows[:, None] * stride_n + columns[None, :]
    inside = (start + rows < n)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(base, number, start, n, rows):
    """A number for each of the rows of one head."""
    return tl.load(base + number.to(tl.int64) * n + start + rows, mask=start + rows < n, other=0.0)


@triton.jit
def store_numbers(base, number, start, n, rows, values):
    tl.store(base + number.to(tl.int64) * n + start + rows, values, mask=start + rows < n)


@triton.jit
def hide_slots(MASK, batch, head, stride_b, stride_h, stride_k, slots, k, HAS_MASK: tl.constexpr):
    """What to add to the scores of each slot: 0, or -inf where it is masked or does not exist."""
    visible = slots < k
    if HAS_MASK:
        visible = visible & (tl.load(MASK + batch * stride_b + head * stride_h + slots * stride_k, visible, 0) != 0)
    return tl.where(visible, 0.0, float("-inf"))


@triton.jit
def hide_far(queries, places, length, window):
    """What to add to the scores of queries and exact keys at these places: -inf where they are more than w apart.

    Both come with an axis for the other; a key that does not exist is hidden from all.
    """
    distance = queries - places
    visible = (distance <= window) & (-distance <= window) & (places >= 0) & (places < length)
    return tl.where(visible, 0.0, float("-inf"))


@triton.jit
def keys_of_queries(seed, number, rows):
    """A random number for each query of each head."""
    key, _, _, _ = tl.philox(seed, rows.to(tl.uint32), number.to(tl.uint32), 0, 0)
    return key


@triton.jit
def keys_of_slots(seed, slots):
    """A random number for each slot, from other counters than those of the queries."""
    key, _, _, _ = tl.philox(seed, slots.to(tl.uint32), 0, 1, 0)
    return key


@triton.jit
def keys_of_places(seed, places):
    """A random number for each exact key."""
    key, _, _, _ = tl.philox(seed, places.to(tl.uint32), 0, 2, 0)
    return key


@triton.jit
def survives(keys, other_keys, threshold):
    """Which entries of P̄ survive dropout: those whose hash of 31 bits reaches `threshold`.

    Philox for each entry would cost more than attention; it is drawn for each row and each column, and the two are
    mixed by the finaliser of MurmurHash3.
    """
    x = keys ^ other_keys
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32) >= threshold


@triton.jit
def share_of(split, splits, n, BLOCK_N: tl.constexpr):
    """The queries of one of `splits` programs: whole blocks, as equal in number as can be."""
    blocks = tl.cdiv(n, BLOCK_N)
    return split * blocks // splits * BLOCK_N, min((split + 1) * blocks // splits * BLOCK_N, n)


@triton.jit
def gradients_of_keys(
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
        kept = survives(slot_keys[:, None], query_keys[None, :], threshold)
        dropped = tl.where(kept, probs * rescale, 0.0)
        gradient = tl.where(kept, gradient * rescale, 0.0)
    value_gradient = tl.dot(dropped.to(values.dtype), out_gradient, value_gradient, input_precision=PRECISION)
    gradient = (probs * (gradient - delta[None, :])).to(keys.dtype)  # of the scores
    key_gradient = tl.dot(gradient, queries, key_gradient, input_precision=PRECISION)
    return key_gradient, value_gradient, gradient
