"""A linear layer followed by GELU in one kernel, launched by `ops/linear_gelu.py`.

Persistent programs loop over the tiles of the output, grouped by rows so that their inputs stay in the L2 cache. TMA
loads the next tiles while the current ones are multiplied. Each output tile is finished in two halves: the first is
stored while GELU is applied to the second.
"""

import triton
import triton.language as tl

from ..gelu import COEFFICIENTS, LOWEST

C13, C11, C9, C7, C5, C3, C1 = map(tl.constexpr, COEFFICIENTS)
LOW, HIGH = tl.constexpr(LOWEST), tl.constexpr(-LOWEST)


@triton.jit
def _gelu(x):
    """The same arithmetic as `gelu.FastGelu`."""
    x = tl.maximum(x, LOW)
    near = tl.minimum(x, HIGH)
    square = near * near
    g = square * C13 + C11
    g = g * square + C9
    g = g * square + C7
    g = g * square + C5
    g = g * square + C3
    g = g * square + C1
    root = tl.rsqrt(1.0 + tl.exp2(g * near))
    return x * root * root


@triton.jit
def _finish(OUT, BIAS, products, row, column, columns, WIDTH: tl.constexpr):
    """Add the bias, apply GELU, and store."""
    places = column + tl.arange(0, WIDTH)
    products += tl.load(BIAS + places, mask=places < columns, other=0.0).to(tl.float32)[None, :]
    OUT.store([row, column], _gelu(products).to(OUT.dtype))


@triton.jit
def linear_gelu(
    X, WEIGHT, BIAS, OUT, rows, columns, inner, programs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT = GELU(X WEIGHTᵀ + BIAS)."""
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in tl.range(0, tl.cdiv(inner, INNER), num_stages=STAGES):
            x, weight = X.load([row, i * INNER]), WEIGHT.load([column, i * INNER])
            products = tl.dot(x, weight.T, products, input_precision=PRECISION)
        left, right = tl.split(tl.permute(tl.reshape(products, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _finish(OUT, BIAS, left, row, column, columns, COLUMNS // 2)
        _finish(OUT, BIAS, right, row, column + COLUMNS // 2, columns, COLUMNS // 2)
