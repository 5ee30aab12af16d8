"""How the kernels of attention are cut into programs, and started."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The letters that name strides in the kernels, by tensor, and its axes.
STRIDES = {"Q": "q_b q_h q_n q_d", "K": "k_b k_h k_n k_d", "V": "v_b v_h v_n v_d", "MASK": "m_b m_h m_k"}
STRIDES |= {"NEAR_K": "nk_b nk_h nk_n nk_d", "NEAR_V": "nv_b nv_h nv_n nv_d", "DOUT": "o_b o_n o_h o_d"}


# What the tiles below were chosen for: A100, H100 and H200 have it. RTX cards, A10, L4 and L40S have 99 KiB.
LARGE_SHARED_MEMORY = 160 * 2**10


class Shapes(NamedTuple):
    """All that a launch depends on, but for what its tensors hold."""

    query: tuple[int, ...]
    keys: int
    strides: tuple[tuple[int, ...] | None, ...]
    dtype: torch.dtype
    device: torch.device
    window: int
    scaling: float
    dropout: float
    exact: bool

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor | None], window: int, scaling: float, dropout: float) -> Shapes:
        query, key = tensors["Q"], tensors["K"]
        assert query is not None
        assert key is not None
        strides = tuple(None if (x := tensors.get(name)) is None else x.stride() for name in STRIDES)
        exact = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        return cls(query.shape, key.shape[2], strides, query.dtype, query.device, window, scaling, dropout, exact)


class Plan:
    """A kernel, all of its arguments but the tensors, and how many programs to start.

    Triton looks what it has compiled up by all arguments, which takes longer than most of these kernels run. So that is
    kept here, for all that can still differ: the types and the alignment of the tensors.
    """

    def __init__(self, name: str, shapes: Shapes) -> None:
        from .kernels import holding, walking

        held = hasattr(holding, name)  # all keys of a head
        self.kernel = getattr(holding if held else walking, name)
        self.name, self.device = name, shapes.device
        (b, h, n, d), k, channels = shapes.query, shapes.keys, padded(shapes.query[-1])
        if shapes.window:
            tile = near_tile(name, shapes.dtype.itemsize)
        else:
            tile_of = forward_tile if name.startswith("forward") else backward_tile
            tile = tile_of(padded(k) if held else None, channels, shapes.dtype.itemsize)
        if shared_memory(shapes.device) < LARGE_SHARED_MEMORY:
            tile = smaller(tile, channels, shapes.dtype.itemsize)
        self.warps = tile.warps

        tiles, self.splits = ceil_div(n, tile.queries), 1
        if held or name == "backward_many_keys":
            self.programs = b * h * ceil_div(k, tile.keys)
            cost = 1 if name.startswith("forward") else 2
            slots = num_processors(shapes.device) * tile.programs
            self.splits = best_splits(tiles, self.programs, slots, cost)
            self.programs *= self.splits
        else:
            self.programs = b * h * (ceil_div(n, tile.near) if name == "backward_near" else tiles)

        arguments: dict[str, Any] = {
            "heads": h,
            "splits": self.splits,
            "n": n,
            "k": k,
            "window": shapes.window,
            "scale": shapes.scaling / math.log(2),
            "scaling": shapes.scaling,
            "threshold": min(round(shapes.dropout * 2**31), 2**31 - 1),
            "rescale": 1 / (1 - shapes.dropout) if shapes.dropout < 1 else 0.0,
            "part": 2 * b * h * k * d,
            "value_part": b * h * k * d,
            "near_part": b * h * n * d,
            "D": d,
            "BLOCK_N": tile.queries,
            "BLOCK_K": tile.keys,
            "BLOCK_W": tile.near,
            "BLOCK_D": channels,
            "HAS_MASK": shapes.strides[list(STRIDES).index("MASK")] is not None,
            "DROPOUT": shapes.dropout > 0,
            "EVEN": d == channels and n % tile.queries == 0,
            "EVEN_K": d == channels and k % tile.keys == 0,
            "PRECISION": "ieee" if shapes.exact else "tf32",
            "STAGES": tile.stages,
        }
        for names, strides in zip(STRIDES.values(), shapes.strides, strict=True):
            letters = names.split()
            arguments |= dict(zip(letters, strides or [0] * len(letters), strict=True))
        self.arguments = [arguments.get(name) for name in self.kernel.arg_names]
        self.tensors = [(i, name) for i, name in enumerate(self.kernel.arg_names) if name not in arguments]
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def run(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Start the programs; of the tensors, the kernel gets those that it takes."""
        arguments, kinds = self.arguments.copy(), []
        for place, name in self.tensors:
            arguments[place] = tensor = tensors[name]
            kinds.append(None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16))
        compiled = self.compiled.get(key := tuple(kinds))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if compiled is None:  # as it stays where kernels are interpreted
                self.compiled[key] = self.kernel[self.programs,](*arguments, num_warps=self.warps)
            else:
                compiled[self.programs, 1, 1](*arguments)


plan = functools.lru_cache(4096)(Plan)


class Tile(NamedTuple):
    """What a program computes at once, and how: measured on an H200 in bfloat16, with heads of 64 channels.

    Attributes:
        queries: so many of them.
        keys: and so many of these.
        warps: by so many warps.
        stages: while the next tiles are loaded.
        programs: so many programs share a processor.
        near: and so many exact keys, in a local window.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    near: int = 0


def forward_tile(keys: int | None, channels: int, element_size: int) -> Tile:
    """The tile of the forward pass; `keys` is `None` where a program walks over them."""
    if element_size > 2:  # without tensor cores, unless torch allows tf32
        return Tile(32, keys or 32, 8, 1)
    if keys is None:
        return Tile(128 if channels <= 64 else 64, 128, 8, 2)
    return Tile(64, keys, 4, 3, programs=3 if keys * channels <= 128 * 64 else 2)


def near_tile(name: str, element_size: int) -> Tile:
    """The tile of kernels that look at a local window."""
    if element_size > 2:
        return Tile(32, 32, 8, 1, near=32)
    if name == "backward_many_keys":
        return Tile(64, 128, 8, 2)
    return Tile(64, 64, 4, 2, near=64)


def backward_tile(keys: int | None, channels: int, element_size: int) -> Tile:
    """The tile of the backward pass, which must have room for the gradients of the keys and values in it."""
    if element_size > 2:
        return Tile(32, keys or 32, 8, 1)
    if keys is None:
        return Tile(64 if channels <= 64 else 32, 128, 8, 2)
    if keys * channels > 128 * 64 or keys > 128:
        return Tile(32, keys, 8, 3)
    if keys * channels > 64 * 64:
        return Tile(128 if channels <= 64 else 64, keys, 8, 3)
    return Tile(64, keys, 4, 3, programs=2)


def smaller(tile: Tile, channels: int, element_size: int) -> Tile:
    """A tile for cards whose programs have less memory; that it fits was seen by compiling, it was timed on none."""
    if element_size > 2:
        return tile._replace(queries=16 if channels > 64 else tile.queries)
    return tile._replace(queries=min(tile.queries, 64), stages=min(tile.stages, 2))


@functools.lru_cache(4096)
def best_splits(tiles: int, programs: int, processors: int, cost: int) -> int:
    """Into how many shares to cut the `tiles` of each of `programs`, so that few processors wait for others.

    A share costs its tiles and, for what it loads and stores besides, as much as `cost` tiles.
    """

    def time(splits: int) -> int:
        return ceil_div(programs * splits, processors) * (ceil_div(tiles, splits) + cost)

    return min(range(1, min(tiles, ceil_div(8 * processors, programs)) + 1), key=time)


def computable(tensor: Tensor) -> Tensor:
    """The tensor, or where kernels are interpreted, which goes wrong in bfloat16, a copy in float32."""
    return tensor.float() if tensor.dtype == torch.bfloat16 and is_interpreted() else tensor


def give(computed: Tensor, tensor: Tensor) -> None:
    if computed is not tensor:
        tensor.copy_(computed)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded(size: int) -> int:
    """The next power of two that a matrix product can have."""
    return max(16, 1 << (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes that a program may share between its threads."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LARGE_SHARED_MEMORY)  # AMD's have no such field


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
