"""Attention onto k projected keys as a torch operator with gradients, computed by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from .launch import Shapes, copy_back, plan, upcast_if_interpreted

MAX_HEAD_DIM = 128

# With up to 64 channels, this many keys fit in registers with their gradients and whole rows of P̄; else half as many.
MAX_REGISTER_KEYS = 128


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
    r"""$\bar P\,V$ by Triton kernels; equals `reference.attend`, or `reference.attend_locally` with a local window.

    Args:
        query: (b, h, n, d_head) with d_head up to 128. All tensors may have any strides.
        key, value: projected keys and values, (b, h, k, d_head).
        near_key, near_value: with a local window, the exact keys and values, (b, h, n, d_head).
        window: each query attends to exact keys at most this many positions away.
        mask: true for visible projected keys, (b or 1, h or 1, 1, k). If no key is visible, the output is 0.
        lengths: number of real tokens in each row, (b,). Exact keys from there on are masked.
        scaling: usually $d_{head}^{-1/2}$.
        dropout: dropout probability of the entries of $\bar P$.

    Returns:
        The output of all heads, (b, n, h, d_head), contiguous.
    """
    # On the device, to avoid a synchronization; recomputing a checkpointed layer draws the same seed again.
    seed = torch.randint(2**62, (1,), device=query.device) if dropout > 0 else None
    output, _ = _attend(query, key, value, near_key, near_value, mask, lengths, seed, window, scaling, dropout)
    return output


def fits_in_registers(key: Tensor, near_key: Tensor | None = None) -> bool:
    """Whether whole rows of P̄ fit in registers, so that the backward pass needs nothing from the forward pass."""
    return near_key is None and key.shape[2] <= _max_register_keys(key)


def fits_on_chip(key: Tensor, near_key: Tensor | None = None) -> bool:
    """Whether a program can keep all keys of a head on chip. In half precision, it may process them in two halves."""
    halves = 2 if key.element_size() == 2 else 1
    return near_key is None and key.shape[2] <= halves * _max_register_keys(key)


def _max_register_keys(key: Tensor) -> int:
    return MAX_REGISTER_KEYS if key.shape[3] <= 64 else MAX_REGISTER_KEYS // 2


@library.custom_op("linformers::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, near_key: Tensor | None, near_value: Tensor | None,
    mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, window: int, scaling: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (b, n, h, d_head) and, if the backward pass needs it, the log-sum-exp of each row (b, h, n)."""
    output, lse = _empty_outputs(query, key, near_key)
    if output.numel():
        kernel = "forward_resident" if fits_on_chip(key, near_key) else "forward_streaming"
        out = upcast_if_interpreted(output)
        tensors = _kernel_inputs(query, key, value, near_key, near_value, mask, lengths, seed)
        tensors |= {"OUT": out, "LSE": None if fits_in_registers(key, near_key) else lse}
        plan(kernel, Shapes.of(tensors, window, scaling, dropout)).run(tensors)
        copy_back(out, output)
    return output, lse


@_attend.register_fake
def _(query, key, value, near_key, *others):  # type: ignore[no-untyped-def]
    return _empty_outputs(query, key, near_key)


@library.custom_op("linformers::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, near_key: Tensor | None, near_value: Tensor | None,
    mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, output: Tensor | None, lse: Tensor | None,
    window: int, scaling: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query (b, n, h, d_head), key and value (2, b, k, h, d_head), exact ones (2, b, n, h, d_head)."""
    query_gradient, key_gradients, near_gradients = _empty_gradients(query, key, near_key)
    if not gradient.numel():
        return query_gradient, key_gradients.zero_(), near_gradients
    dq, dnear = upcast_if_interpreted(query_gradient), upcast_if_interpreted(near_gradients)
    tensors = _kernel_inputs(query, key, value, near_key, near_value, mask, lengths, seed)
    tensors |= {"DOUT": upcast_if_interpreted(gradient), "DQ": dq, "DNEAR": dnear}
    if output is None or lse is None:
        kernels = ["backward_resident"]
    else:
        tensors |= {"OUT": upcast_if_interpreted(output.contiguous()), "LSE": lse}
        kernels = ["backward_resident_halves"]
        if not fits_on_chip(key, near_key):
            tensors["DELTA"] = torch.empty_like(lse)
            kernels = ["backward_queries"]
            kernels += ["backward_near_keys"] if near_key is not None else []
            kernels += ["backward_keys"] if key.numel() else []
    shapes = Shapes.of(tensors, window, scaling, dropout)
    plans = [plan(kernel, shapes) for kernel in kernels]

    # Each split of the queries writes its own part of the gradients of keys and values. Summing the parts in a fixed
    # order makes the result deterministic, which atomic additions would not.
    parts = key_gradients
    if plans[-1].splits > 1 or upcast_if_interpreted(key_gradients) is not key_gradients:
        parts = key_gradients.new_empty(plans[-1].splits, *key_gradients.shape, dtype=torch.float32)
    for each in plans:
        each.run({**tensors, "PARTS": parts})
    copy_back(dq, query_gradient)
    copy_back(dnear, near_gradients)
    if parts is not key_gradients:
        key_gradients.copy_(parts.sum(0))
    return query_gradient, key_gradients, near_gradients


@_attend_backward.register_fake
def _(gradient, query, key, value, near_key, *others):  # type: ignore[no-untyped-def]
    return _empty_gradients(query, key, near_key)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scaling, ctx.dropout = inputs
    _, key, _, near_key, *_ = tensors
    ctx.save_for_backward(*tensors, *((None, None) if fits_in_registers(key, near_key) else output))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 11
    dq, dkeys, dnear = _attend_backward(gradient, *ctx.saved_tensors, ctx.window, ctx.scaling, ctx.dropout)
    near = dnear.transpose(2, 3) if ctx.window else (None, None)
    return dq.transpose(1, 2), *dkeys.transpose(2, 3), *near, *(None,) * 6


_attend.register_autograd(_differentiate, setup_context=_save)


def _kernel_inputs(query: Tensor, key: Tensor, *others: Tensor | None) -> dict[str, Tensor | None]:
    """The tensor arguments of `_attend` under their names in the kernels."""
    value, near_key, near_value, mask, lengths, seed = others
    if mask is not None:
        mask = mask.expand(*query.shape[:2], 1, key.shape[2]).view(torch.uint8)[:, :, 0]
    heads = {"Q": query, "K": key, "V": value, "NEAR_K": near_key, "NEAR_V": near_value}
    tensors = {name: None if x is None else upcast_if_interpreted(x) for name, x in heads.items()}
    return {**tensors, "MASK": mask, "LENGTHS": lengths, "SEED": seed}


def _empty_outputs(query: Tensor, key: Tensor, near_key: Tensor | None) -> tuple[Tensor, Tensor]:
    b, h, n, d = query.shape
    rows = (0,) if fits_in_registers(key, near_key) else (b, h, n)
    return query.new_empty(b, n, h, d), query.new_empty(rows, dtype=torch.float32)


def _empty_gradients(query: Tensor, key: Tensor, near_key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    (b, h, n, d), k = query.shape, key.shape[2]
    near = (0,) if near_key is None else (2, b, n, h, d)
    return query.new_empty(b, n, h, d), key.new_empty(2, b, k, h, d), query.new_empty(near)
