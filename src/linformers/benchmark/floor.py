"""What the hardware allows: no pass can take less than its matrix products and its smallest traffic take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..config import LinformerConfig
from .measure import device_seconds


class Product(NamedTuple):
    """A batch of matrix products, (rows, inner) times (inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns


def floor_seconds(config: LinformerConfig, batch: int, n: int, *, training: bool, device: str, dtype: str) -> float:
    """The least time of a pass: each product as fast as it runs alone, the rest at the speed of memory.

    LayerNorms read two tensors and write one; attention reads queries and writes results once, and takes no less than
    its products would at the best rate of all; activations and dropout cost nothing. Training adds to each product the
    two of its gradients, and to the rest the traffic of theirs.
    """
    forward = list(products(config, batch, n))
    every = [gradient for product in forward for gradient in gradients(product)] if training else []
    total = sum(product_seconds(product, device, dtype) for product in (*forward, *every))
    best_rate = max(p.flops / product_seconds(p, device, dtype) for p in forward)

    tokens, d, width = batch * n, config.hidden_size, getattr(torch, dtype).itemsize
    passes = 3 + (4 if training else 0)  # of a LayerNorm: x, residual, result; their gradients, and x again
    traffic = passes * tokens * d * width * (2 * config.num_hidden_layers + 1)
    seconds = total + traffic / bandwidth(device)
    for lengths, window in zip(config.projected_lengths, config.local_windows, strict=True):
        keys = n if config.projection == "identity" else sum(lengths) / len(lengths)
        near = 2 * window + 1 if window else 0
        flops = 4 * tokens * (keys + near) * d * (3.5 if training else 1)
        moved = (2 * tokens + 2 * batch * keys + (2 * tokens if window else 0)) * d * width * (2.5 if training else 1)
        seconds += max(flops / best_rate, moved / bandwidth(device))
    return seconds


def products(config: LinformerConfig, batch: int, n: int) -> Iterator[Product]:
    """The products of a forward pass, those within attention aside."""
    tokens, d, f = batch * n, config.hidden_size, config.intermediate_size
    shared = config.sharing in ("key-value", "layerwise")
    for lengths, window in zip(config.projected_lengths, config.local_windows, strict=True):
        yield Product(1, tokens, d, d)  # queries
        yield Product(1, tokens, d, d)  # output
        yield Product(1, tokens, d, f)
        yield Product(1, tokens, f, d)
        k = max(lengths)
        matrix = config.projection in ("linear", "dynamic")
        projects_first = config.projection == "mean" or (matrix and config.sharing != "none")
        if projects_first and k:
            yield from [Product(1, batch * k, d, d)] * 2  # projected keys and values
        if window or not projects_first:
            yield from [Product(1, tokens, d, d)] * 2  # exact ones
        if matrix:
            sides = 1 if shared else 2
            yield from [Product(batch, k, n, d)] * sides
            if config.projection == "dynamic":
                yield from [Product(1, tokens, d, k)] * sides


def gradients(product: Product) -> list[Product]:
    """The products that give the gradients of both factors."""
    b, m, k, n = product
    return [Product(b, m, n, k), Product(b, k, m, n)]


@functools.cache
def product_seconds(product: Product, device: str, dtype: str) -> float:
    """How long such a product takes alone."""
    kind, shape = getattr(torch, dtype), product
    left = torch.randn(shape.batch, shape.rows, shape.inner, device=device, dtype=kind)
    right = torch.randn(shape.batch, shape.inner, shape.columns, device=device, dtype=kind)
    if shape.batch == 1:
        left, right = left[0], right[0]
    return device_seconds(lambda: left @ right)


@functools.cache
def bandwidth(device: str) -> float:
    """Bytes read and written in a second by a large copy."""
    source = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))
