"""Attention onto k projected keys as torch operators, computed by Triton kernels, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from .launch import Shapes, computable, give, plan

MAX_HEAD_DIM, MAX_KEYS = 128, 2048

# The most keys of up to 64 channels of which a program can hold all, with their gradients and whole rows of P̄; with
# more channels it is half as many. Twice as many it can hold in half precision, looking at one half of them at a time.
FEW = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor | None = None,
    near_value: Tensor | None = None,
    *,
    window: int = 0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    r"""$\bar P\,V$ as in `reference.attend` and `reference.attend_locally`, computed by Triton kernels.

    Args:
        query: (b, h, n, d_head), in any strides, d_head up to 128.
        key: (b, h, k, d_head), in any strides, k up to 2048.
        value: (b, h, k, d_head), in any strides.
        near_key: the exact keys, (b, h, n, d_head), in any strides, where there is a local window.
        near_value: the exact values, (b, h, n, d_head), likewise.
        window: how many positions away a query sees exact keys.
        mask: true where a projected key may be seen, (b or 1, h or 1, 1, k). Who may see none gets zeros.
        lengths: the number of real tokens in each row, (b,); exact keys beyond are not seen.
        scaling: usually $d_{head}^{-1/2}$.
        dropout: the probability with which an entry of $\bar P$ is dropped.

    Returns:
        The heads' outputs side by side, (b, n, h, d_head) and contiguous.
    """
    seed = None
    if dropout > 0:  # drawn on the device, so that nothing waits, and again when a checkpointed layer is replayed
        seed = torch.randint(2**62, (1,), device=query.device)
    output, _ = _attend(query, key, value, near_key, near_value, mask, lengths, seed, window, scaling, dropout)
    return output


@library.custom_op("linformers::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor | None,
    near_value: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    window: int,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The output (b, n, h, d_head) and, unless the keys are few, the log-sum-exp of each row (b, h, n)."""
    output, lse = _empty_outputs(query, key, near_key)
    if output.numel():
        kernel = "forward_few" if holds_all(key, near_key) else "forward_many"
        out = computable(output)
        tensors = _inputs(query, key, value, near_key, near_value, mask, lengths, seed)
        tensors |= {"OUT": out, "LSE": None if are_few(key, near_key) else lse}
        plan(kernel, Shapes.of(tensors, window, scaling, dropout)).run(tensors)
        give(out, output)
    return output, lse


@_attend.register_fake
def _(query, key, value, near_key, near_value, mask, lengths, seed, window, scaling, dropout):  # type: ignore[no-untyped-def]
    return _empty_outputs(query, key, near_key)


@library.custom_op("linformers::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor | None,
    near_value: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    output: Tensor | None,
    lse: Tensor | None,
    window: int,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, (b, n, h, d_head), of key and value, (2, b, k, h, d_head), and of the exact ones."""
    of_query, of_keys, of_near = _empty_gradients(query, key, near_key)
    if not gradient.numel():
        return of_query, of_keys.zero_(), of_near
    dq, dnear = computable(of_query), computable(of_near)
    tensors = _inputs(query, key, value, near_key, near_value, mask, lengths, seed)
    tensors |= {"DOUT": computable(gradient), "DQ": dq, "DNEAR": dnear}
    if output is None or lse is None:
        kernels = ["backward_few"]
    else:
        tensors |= {"OUT": computable(output.contiguous()), "LSE": lse}
        kernels = ["backward_some"]
        if not holds_all(key, near_key):
            tensors["DELTA"] = torch.empty_like(lse)
            kernels = ["backward_many_queries"]
            kernels += ["backward_near"] if near_key is not None else []
            kernels += ["backward_many_keys"] if key.numel() else []
    shapes = Shapes.of(tensors, window, scaling, dropout)
    plans = [plan(kernel, shapes) for kernel in kernels]

    # Each share of the queries writes its part of the gradients of keys and values. The parts are added in a fixed
    # order, so that reruns are equal bit for bit, which atomics would not be.
    parts = of_keys
    if plans[-1].splits > 1 or computable(of_keys) is not of_keys:
        parts = of_keys.new_empty(plans[-1].splits, *of_keys.shape, dtype=torch.float32)
    for each in plans:
        each.run({**tensors, "PARTS": parts})
    give(dq, of_query)
    give(dnear, of_near)
    if parts is not of_keys:
        of_keys.copy_(parts.sum(0))
    return of_query, of_keys, of_near


@_attend_backward.register_fake
def _(gradient, query, key, value, near_key, *others):  # type: ignore[no-untyped-def]
    return _empty_gradients(query, key, near_key)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor | None,
    near_value: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
) -> dict[str, Tensor | None]:
    """The tensors that kernels take."""
    slots = None if mask is None else mask.expand(*query.shape[:2], 1, key.shape[2]).view(torch.uint8)[:, :, 0]
    heads = {"Q": query, "K": key, "V": value, "NEAR_K": near_key, "NEAR_V": near_value}
    tensors = {name: None if x is None else computable(x) for name, x in heads.items()}
    return {**tensors, "MASK": slots, "LENGTHS": lengths, "SEED": seed}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scaling, ctx.dropout = inputs
    _, key, _, near_key, *_ = tensors
    ctx.save_for_backward(*tensors, *((None, None) if are_few(key, near_key) else output))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 11
    of_query, of_keys, of_near = _attend_backward(gradient, *ctx.saved_tensors, ctx.window, ctx.scaling, ctx.dropout)
    near = of_near.transpose(2, 3) if ctx.window else (None, None)
    return of_query.transpose(1, 2), *of_keys.transpose(2, 3), *near, *(None,) * 6


_attend.register_autograd(_differentiate, setup_context=_save)


def are_few(key: Tensor, near_key: Tensor | None = None) -> bool:
    """Whether a program holds all keys of a head at once, so that its backward pass needs nothing from the forward."""
    return near_key is None and key.shape[2] <= few(key)


def holds_all(key: Tensor, near_key: Tensor | None = None) -> bool:
    """Whether a program holds all keys of a head, be it in two halves."""
    return near_key is None and key.shape[2] <= (2 * few(key) if key.element_size() == 2 else few(key))


def few(key: Tensor) -> int:
    return FEW if key.shape[3] <= 64 else FEW // 2


def _empty_outputs(query: Tensor, key: Tensor, near_key: Tensor | None) -> tuple[Tensor, Tensor]:
    b, h, n, d = query.shape
    rows = (0,) if are_few(key, near_key) else (b, h, n)
    return query.new_empty(b, n, h, d), query.new_empty(rows, dtype=torch.float32)


def _empty_gradients(query: Tensor, key: Tensor, near_key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    (b, h, n, d), k = query.shape, key.shape[2]
    near = (0,) if near_key is None else (2, b, n, h, d)
    return query.new_empty(b, n, h, d), key.new_empty(2, b, k, h, d), query.new_empty(near)
