"""Launching the attention kernels: tile sizes, the number of programs, and a cache of compiled kernels."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The names that kernels give to the strides of each tensor.
STRIDES = {"Q": "q_b q_h q_n q_d", "K": "k_b k_h k_n k_d", "V": "v_b v_h v_n v_d", "MASK": "m_b m_h m_k"}
STRIDES |= {"NEAR_K": "nk_b nk_h nk_n nk_d", "NEAR_V": "nv_b nv_h nv_n nv_d", "DOUT": "o_b o_n o_h o_d"}

# Shared memory per block that `choose_tile` assumes: A100, H100 and H200 have it; RTX cards, A10, L4 and L40S do not.
LARGE_SHARED_MEMORY = 160 * 2**10


class Shapes(NamedTuple):
    """Everything that a launch depends on, except for the tensors' contents."""

    query: tuple[int, ...]
    keys: int
    strides: tuple[tuple[int, ...] | None, ...]
    dtype: torch.dtype
    device: torch.device
    window: int
    scaling: float
    dropout: float
    exact: bool  # float32 without tf32

    @classmethod
    def of(cls, tensors: Mapping[str, Any], window: int, scaling: float, dropout: float) -> Shapes:
        query, key = tensors["Q"], tensors["K"]
        strides = tuple(None if (x := tensors.get(name)) is None else x.stride() for name in STRIDES)
        exact = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        return cls(query.shape, key.shape[2], strides, query.dtype, query.device, window, scaling, dropout, exact)


class Plan:
    """A kernel with all arguments but the tensors, and the number of programs to launch.

    Triton looks a compiled kernel up by all of its arguments, which takes longer than most of these kernels run. A plan
    looks it up by what can still differ: the dtypes and the alignment of the tensors.
    """

    def __init__(self, name: str, shapes: Shapes) -> None:
        from .kernels import resident, streaming

        is_resident = hasattr(resident, name)
        self.name, self.device = name, shapes.device
        self.kernel = getattr(resident if is_resident else streaming, name)
        (b, h, n, d), k, channels = shapes.query, shapes.keys, next_power_of_2(shapes.query[-1])
        tile = choose_tile(name, next_power_of_2(k) if is_resident else None, channels, shapes)
        self.warps = tile.warps

        query_tiles, self.splits = ceil_div(n, tile.queries), 1
        if is_resident or name == "backward_keys":
            self.programs = b * h * ceil_div(k, tile.keys)
            cost = 1 if name.startswith("forward") else 2
            concurrent = num_processors(shapes.device) * tile.programs
            self.splits = best_splits(query_tiles, self.programs, concurrent, cost)
            self.programs *= self.splits
        else:
            self.programs = b * h * (ceil_div(n, tile.near) if name == "backward_near_keys" else query_tiles)

        arguments: dict[str, Any] = {"heads": h, "splits": self.splits, "n": n, "k": k, "window": shapes.window}
        arguments |= {"scale": shapes.scaling / math.log(2), "scaling": shapes.scaling}
        arguments |= {"value_offset": b * h * k * d, "split_stride": 2 * b * h * k * d}
        arguments |= {"near_value_offset": b * h * n * d, "DROPOUT": shapes.dropout > 0}
        arguments["threshold"] = min(round(shapes.dropout * 2**31), 2**31 - 1)
        arguments["rescale"] = 1 / (1 - shapes.dropout) if shapes.dropout < 1 else 0.0
        arguments |= {"D": d, "BLOCK_D": channels, "BLOCK_N": tile.queries, "BLOCK_K": tile.keys, "BLOCK_W": tile.near}
        arguments["EVEN"] = d == channels and n % tile.queries == 0
        arguments["EVEN_K"] = d == channels and k % tile.keys == 0
        arguments["HAS_MASK"] = shapes.strides[list(STRIDES).index("MASK")] is not None
        arguments |= {"PRECISION": "ieee" if shapes.exact else "tf32", "STAGES": tile.stages}
        for names, strides in zip(map(str.split, STRIDES.values()), shapes.strides, strict=True):
            arguments |= dict(zip(names, strides or [0] * len(names), strict=True))
        self.arguments = [arguments.get(name) for name in self.kernel.arg_names]
        self.tensors = [(i, name) for i, name in enumerate(self.kernel.arg_names) if name not in arguments]
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def run(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Launch the kernel with those of the tensors that it takes."""
        arguments, kinds = self.arguments.copy(), []
        for place, name in self.tensors:
            arguments[place] = tensor = tensors[name]
            kinds.append(None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16))
        compiled = self.compiled.get(key := tuple(kinds))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if compiled is None:  # always, in Triton's interpreter
                self.compiled[key] = self.kernel[self.programs,](*arguments, num_warps=self.warps)
            else:
                compiled[self.programs, 1, 1](*arguments)


plan = functools.lru_cache(4096)(Plan)


class Tile(NamedTuple):
    """The tile sizes of a program and how it runs; chosen on an H200 in bfloat16 with heads of 64 channels."""

    queries: int
    keys: int
    warps: int
    stages: int  # of the software pipeline that loads the next tiles
    programs: int = 1  # per multiprocessor
    near: int = 0  # exact keys


def choose_tile(name: str, keys: int | None, channels: int, shapes: Shapes) -> Tile:
    """The tile of a kernel that keeps all `keys` on chip, or streams over them (`None`)."""
    tile = _large_tile(name, keys, channels, shapes)
    if shared_memory(shapes.device) >= LARGE_SHARED_MEMORY:
        return tile
    # These fit on smaller cards according to the compiler; they were not timed there.
    if shapes.dtype.itemsize > 2:
        return tile._replace(queries=16 if channels > 64 else tile.queries)
    return tile._replace(queries=min(tile.queries, 64), stages=min(tile.stages, 2))


def _large_tile(name: str, keys: int | None, channels: int, shapes: Shapes) -> Tile:
    if shapes.dtype.itemsize > 2:  # no tensor cores, unless torch allows tf32
        return Tile(32, keys or 32, 8, 1, near=32 if shapes.window else 0)
    if shapes.window:
        return Tile(64, 128, 8, 2) if name == "backward_keys" else Tile(64, 64, 4, 2, near=64)
    if name.startswith("forward"):
        if keys is None:
            return Tile(128 if channels <= 64 else 64, 128, 8, 2)
        return Tile(64, keys, 4, 3, programs=3 if keys * channels <= 128 * 64 else 2)
    # The backward pass needs room for the gradients of keys and values, too.
    if keys is None:
        return Tile(64 if channels <= 64 else 32, 128, 8, 2)
    if keys * channels > 128 * 64 or keys > 128:
        return Tile(32, keys, 8, 3)
    if keys * channels > 64 * 64:
        return Tile(128 if channels <= 64 else 64, keys, 8, 3)
    return Tile(64, keys, 4, 3, programs=2)


@functools.lru_cache(4096)
def best_splits(tiles: int, programs: int, processors: int, cost: int) -> int:
    """How many splits of each program's `tiles` finish first, if a split costs its tiles plus `cost`."""

    def time(splits: int) -> int:
        return ceil_div(programs * splits, processors) * (ceil_div(tiles, splits) + cost)

    return min(range(1, min(tiles, ceil_div(8 * processors, programs)) + 1), key=time)


def upcast_if_interpreted(tensor: Tensor) -> Tensor:
    """A float32 copy of a bfloat16 tensor in Triton's interpreter, which computes wrong results in bfloat16."""
    interpreted = tensor.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    return tensor.float() if interpreted else tensor


def copy_back(computed: Tensor, tensor: Tensor) -> None:
    """Undo `upcast_if_interpreted` for an output."""
    if computed is not tensor:
        tensor.copy_(computed)


def next_power_of_2(size: int) -> int:
    """At least 16, as matrix products in Triton require."""
    return max(16, 1 << (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The shared memory that a block may use, in bytes."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LARGE_SHARED_MEMORY)  # missing on AMD


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
