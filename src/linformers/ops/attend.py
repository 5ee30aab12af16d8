"""Attention onto k projected keys as torch operators, computed by Triton kernels, with their gradients."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

MAX_HEAD_DIM, MAX_KEYS = 128, 2048

# The most keys of up to 64 channels of which a program can hold all, with their gradients and whole rows of P̄; with
# more channels it is half as many. Twice as many it can hold in half precision, looking at one half of them at a time.
FEW = 128


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scaling: float, dropout: float = 0.0
) -> Tensor:
    r"""$\bar P\,V$ as in `reference.attend`, computed by Triton kernels.

    Args:
        query: (b, h, n, d_head), in any strides, d_head up to 128.
        key: (b, h, k, d_head), in any strides, k up to 2048.
        value: (b, h, k, d_head), in any strides.
        mask: true where a projected key may be seen, (b or 1, h or 1, 1, k). Who may see none gets zeros.
        scaling: usually $d_{head}^{-1/2}$.
        dropout: the probability with which an entry of $\bar P$ is dropped.

    Returns:
        The heads' outputs side by side, (b, n, h, d_head) and contiguous.
    """
    seed = None
    if dropout > 0:  # drawn on the device, so that nothing waits, and again when a checkpointed layer is replayed
        seed = torch.randint(2**62, (1,), device=query.device)
    output, _ = _attend(query, key, value, mask, seed, scaling, dropout)
    return output


@library.custom_op("linformers::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """The output (b, n, h, d_head) and, unless the keys are few, the log-sum-exp of each row (b, h, n)."""
    output, lse = _empty_outputs(query, key)
    if not output.numel():
        return output, lse
    launch = Launch(query, key, value, mask, seed, scaling, dropout)
    if holds_all(key):
        launch.forward_few(output, lse if lse.numel() else None)
    else:
        launch.forward_many(output, lse)
    return output, lse


@_attend.register_fake
def _(query, key, value, mask, seed, scaling, dropout):  # type: ignore[no-untyped-def]
    return _empty_outputs(query, key)


@library.custom_op("linformers::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    output: Tensor | None,
    lse: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of query, (b, n, h, d_head), and of key and value, (2, b, k, h, d_head), from the output's."""
    of_query, of_keys = _empty_gradients(query, key)
    if not gradient.numel():
        return of_query, of_keys.zero_()
    launch = Launch(query, key, value, mask, seed, scaling, dropout)
    if output is None or lse is None:
        launch.backward_held(gradient, None, None, of_query, of_keys)
    elif holds_all(key):
        launch.backward_held(gradient, output, lse, of_query, of_keys)
    else:
        launch.backward_many(gradient, output, lse, of_query, of_keys)
    return of_query, of_keys


@_attend_backward.register_fake
def _(gradient, query, key, value, mask, seed, output, lse, scaling, dropout):  # type: ignore[no-untyped-def]
    return _empty_gradients(query, key)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, ctx.scaling, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, mask, seed, *((None, None) if are_few(key) else output))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    query, key, value, mask, seed, output, lse = ctx.saved_tensors
    of_query, of_keys = _attend_backward(gradient, query, key, value, mask, seed, output, lse, ctx.scaling, ctx.dropout)
    return of_query.transpose(1, 2), *of_keys.transpose(2, 3), None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def are_few(key: Tensor) -> bool:
    """Whether a program holds all keys of a head at once, so that its backward pass needs nothing from the forward."""
    return key.shape[2] <= few(key)


def holds_all(key: Tensor) -> bool:
    """Whether a program holds all keys of a head, be it in two halves."""
    return key.shape[2] <= (2 * few(key) if key.element_size() == 2 else few(key))


def few(key: Tensor) -> int:
    return FEW if key.shape[3] <= 64 else FEW // 2


def _empty_outputs(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, d = query.shape
    rows = (0,) if are_few(key) else (b, h, n)
    return query.new_empty(b, n, h, d), query.new_empty(rows, dtype=torch.float32)


def _empty_gradients(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    (b, h, n, d), k = query.shape, key.shape[2]
    return query.new_empty(b, n, h, d), key.new_empty(2, b, k, h, d)


class Tile(NamedTuple):
    """What a program computes at once, and how: measured on an H200 in bfloat16, with heads of 64 channels.

    Attributes:
        queries: so many of them.
        keys: and so many of these.
        warps: by so many warps.
        stages: while the next tiles are loaded.
        programs: so many programs share a processor.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    programs: int = 1


def forward_tile(keys: int | None, channels: int, element_size: int) -> Tile:
    """The tile of the forward pass; `keys` is `None` where a program walks over them."""
    if element_size > 2:  # without tensor cores, unless torch allows tf32
        return Tile(32, keys or 32, 8, 1)
    if keys is None:
        return Tile(128 if channels <= 64 else 64, 128, 8, 2)
    return Tile(64, keys, 4, 3, programs=3 if keys * channels <= 128 * 64 else 2)


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


class Launch:
    """The arguments that all kernels take, and for each kernel the rest of them and its grid."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        scaling: float,
        dropout: float,
    ) -> None:
        self.b, self.h, self.n, self.d = query.shape
        self.k, self.scaling, self.element_size = key.shape[2], scaling, query.element_size()
        query, key, value = (computable(x) for x in (query, key, value))
        slots = None if mask is None else mask.expand(self.b, self.h, 1, self.k).view(torch.uint8)[:, :, 0]
        exact = query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        self.arguments: dict[str, Any] = {
            "Q": query,
            "K": key,
            "V": value,
            "MASK": slots,
            "SEED": seed,
            "heads": self.h,
            "n": self.n,
            "k": self.k,
            "scale": scaling / math.log(2),
            "threshold": min(round(dropout * 2**31), 2**31 - 1),
            "rescale": 1 / (1 - dropout) if dropout < 1 else 0.0,
            **strides("q_b q_h q_n q_d", query),
            **strides("k_b k_h k_n k_d", key),
            **strides("v_b v_h v_n v_d", value),
            **strides("m_b m_h m_k", slots),
        }
        self.constants = {
            "D": self.d,
            "BLOCK_D": padded(self.d),
            "HAS_MASK": mask is not None,
            "DROPOUT": dropout > 0,
            "PRECISION": "ieee" if exact else "tf32",
        }

    def forward_few(self, output: Tensor, lse: Tensor | None) -> None:
        from .kernels import forward_few

        tile = forward_tile(padded(self.k), padded(self.d), self.element_size)
        splits = self.splits(tile, self.b * self.h, cost=1)
        out = computable(output)
        self.run(forward_few, self.b * self.h * splits, tile, OUT=out, LSE=lse, splits=splits)
        give(out, output)

    def forward_many(self, output: Tensor, lse: Tensor) -> None:
        from .kernels import forward_many

        tile = forward_tile(None, padded(self.d), self.element_size)
        out = computable(output)
        programs = self.b * self.h * ceil_div(self.n, tile.queries)
        self.run(forward_many, programs, tile, OUT=out, LSE=lse)
        give(out, output)

    def backward_held(
        self, gradient: Tensor, output: Tensor | None, lse: Tensor | None, of_query: Tensor, of_keys: Tensor
    ) -> None:
        from .kernels import backward_few, backward_some

        tile = backward_tile(padded(self.k), padded(self.d), self.element_size)
        heads = self.b * self.h
        splits = self.splits(tile, heads, cost=2)
        parts, out = self.parts(splits, of_keys), computable(of_query)
        own = {**self.of_gradient(gradient), **parts, "DQ": out, "splits": splits, "scaling": self.scaling}
        if output is None:
            self.run(backward_few, heads * splits, tile, **own)
        else:
            self.run(backward_some, heads * splits, tile, **own, OUT=computable(output.contiguous()), LSE=lse)
        give(out, of_query)
        self.add_up(parts, of_keys)

    def backward_many(self, gradient: Tensor, output: Tensor, lse: Tensor, of_query: Tensor, of_keys: Tensor) -> None:
        from .kernels import backward_many_keys, backward_many_queries

        tile = backward_tile(None, padded(self.d), self.element_size)
        delta, out = torch.empty_like(lse), computable(of_query)
        own = {**self.of_gradient(gradient), "LSE": lse, "DELTA": delta, "scaling": self.scaling}
        programs = self.b * self.h * ceil_div(self.n, tile.queries)
        self.run(backward_many_queries, programs, tile, **own, OUT=computable(output.contiguous()), DQ=out)
        give(out, of_query)
        blocks = self.b * self.h * ceil_div(self.k, tile.keys)
        splits = self.splits(tile, blocks, cost=2)
        parts = self.parts(splits, of_keys)
        self.run(backward_many_keys, blocks * splits, tile, **own, **parts, splits=splits)
        self.add_up(parts, of_keys)

    def run(self, kernel: Any, programs: int, tile: Tile, **own: Any) -> None:
        whole = self.d == padded(self.d)
        constants = {
            **self.constants,
            "BLOCK_N": tile.queries,
            "BLOCK_K": tile.keys,
            "EVEN": whole and self.n % tile.queries == 0,
            "EVEN_K": whole and self.k % tile.keys == 0,
            "STAGES": tile.stages,
        }
        launch(kernel, programs, tile.warps, {**self.arguments, **own}, constants)

    def splits(self, tile: Tile, programs: int, cost: int) -> int:
        processors = num_processors(self.arguments["Q"].device)
        return best_splits(ceil_div(self.n, tile.queries), programs, processors * tile.programs, cost)

    def of_gradient(self, gradient: Tensor) -> dict[str, Any]:
        gradient = computable(gradient)
        return {"DOUT": gradient, **strides("o_b o_n o_h o_d", gradient)}

    def parts(self, splits: int, of_keys: Tensor) -> dict[str, Any]:
        """Where each share of the queries writes its part of the gradients of keys and values."""
        if splits == 1 and of_keys.dtype == self.arguments["K"].dtype:
            return {"PARTS": of_keys, "part": 0, "value_part": of_keys.stride(0)}
        parts = of_keys.new_empty(splits, *of_keys.shape, dtype=torch.float32)
        return {"PARTS": parts, "part": parts.stride(0), "value_part": parts.stride(1)}

    def add_up(self, parts: dict[str, Any], of_keys: Tensor) -> None:
        """Add the parts in a fixed order: reruns are equal bit for bit, which atomics would not be."""
        if parts["PARTS"] is not of_keys:
            of_keys.copy_(parts["PARTS"].sum(0))


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, warps: int, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Start `programs` programs of a kernel.

    Triton looks what it has compiled up by all arguments, which takes longer than most of these kernels run. So we keep
    that by what it depends on: all constants, and of the arguments what `kind` tells.
    """
    every = {**arguments, **constants}
    values = [every[name] for name in kernel.arg_names]
    key = (kernel.__name__, arguments["Q"].device, warps, *constants.values(), *map(kind, arguments.values()))
    compiled = _compiled.get(key)
    with torch.cuda.device_of(arguments["Q"]):
        if compiled is None:
            _compiled[key] = kernel[(programs,)](*values, num_warps=warps)  # None where kernels are interpreted
        else:
            compiled[programs, 1, 1](*values)


def kind(value: Any) -> Any:
    """What Triton's code depends on: a tensor's type and alignment; if a number is 1, divisible by 16, or large."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value >= 2**31
    return type(value)


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


def strides(names: str, tensor: Tensor | None) -> dict[str, int]:
    own = names.split()
    return dict(zip(own, [0] * len(own) if tensor is None else tensor.stride(), strict=True))


def padded(size: int) -> int:
    """The next power of two that a matrix product can have."""
    return max(16, 1 << (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
