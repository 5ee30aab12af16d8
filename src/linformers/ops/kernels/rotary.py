"""Rotary positions in one kernel, launched by `ops/rotary.py`."""

import triton
import triton.language as tl


@triton.jit
def rotate(
    X, COS, SIN, OUT, heads, n, x_b, x_h, x_n, x_d, table_b,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate a block of tokens in all heads, so that cosines and sines are loaded once. OUT is (b, n, h, 2 HALF)."""
    blocks, pid = tl.cdiv(n, ROWS), tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    rows, channels = pid % blocks * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (rows < n) & (channels < HALF)
    angle = batch * table_b + rows * HALF + channels
    cos, sin = tl.load(COS + angle, mask=inside, other=0.0), tl.load(SIN + angle, mask=inside, other=0.0)
    X += batch * x_b + rows.to(tl.int64) * x_n + channels * x_d
    OUT += (batch * n + rows) * (heads * 2 * HALF) + channels
    for head in range(heads):
        first = tl.load(X + head * x_h, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(X + head * x_h + HALF * x_d, mask=inside, other=0.0).to(tl.float32)
        out = OUT + head * 2 * HALF
        tl.store(out, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
