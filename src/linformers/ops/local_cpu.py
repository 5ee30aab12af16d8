"""Attention onto projected keys plus a sliding window of exact keys on a CPU, without copies of the projected keys.

Queries attend to projected and to exact keys separately; the log-sum-exps of the scores say how much each result
counts. Backward, each kind of keys gets its gradients from the output and the log-sum-exp of both together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional

from . import local


def attend_locally_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_key: Tensor,
    near_value: Tensor,
    *,
    window: int,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    far_bias: Tensor | None = None,
    scaling: float,
) -> Tensor:
    """Equals `reference.attend_locally`, but returns (b, n, h, d_head), contiguous."""
    output, *_ = _attend(query, key, value, near_key, near_value, mask, lengths, far_bias, window, scaling)
    return output


@library.custom_op("linformers::attend_locally_on_cpu", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor, key: Tensor, value: Tensor, near_key: Tensor, near_value: Tensor, mask: Tensor | None,
    lengths: Tensor | None, far_bias: Tensor | None, window: int, scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (b, n, h, d_head) and its log-sum-exp (b, h, n).

    The gradient of `far_bias` needs both for the projected keys alone, too. Without `far_bias`, those are empty.
    """
    far, far_lse, near, near_lse = *_empty_outputs(query), *_empty_outputs(query)
    if key.numel() and query.numel():
        sees_any, scores_mask = _far_masks(query, mask)
        far, far_lse = _flash(query, key, value, mask=scores_mask, scale=scaling)
        far, far_lse = far.transpose(1, 2).contiguous(), far_lse.contiguous()
        if far_bias is not None:
            far_lse += far_bias[:, None]
        far_lse.masked_fill_(~sees_any, -torch.inf)
    else:
        far.zero_()
        far_lse.fill_(-torch.inf)
    rows = _rows(window, lengths, (query, 0), (near_key, window), (near_value, window))
    for row, (blocks, scores_mask) in enumerate(rows):
        result, lse = _flash(*blocks, mask=scores_mask, scale=scaling)
        near[row], near_lse[row] = _join(result, query.shape[2]).transpose(0, 1), _join(lse, query.shape[2])
    near_lse.masked_fill_(_sees_no_near(query, lengths, window), -torch.inf)
    lse = torch.logaddexp(far_lse, near_lse)
    share = _share(far_lse, lse).mT[..., None]  # (b, n, h, 1)
    output = torch.lerp(near.to(lse.dtype), far.to(lse.dtype), share).to(query.dtype)
    if mask is not None or lengths is not None:
        output.masked_fill_((lse == -torch.inf).mT[..., None], 0)
    return output, lse, *((far, far_lse) if far_bias is not None else (query.new_empty(0), lse.new_empty(0)))


@_attend.register_fake
def _(query, key, value, near_key, near_value, mask, lengths, far_bias, *others):  # type: ignore[no-untyped-def]
    output, lse = _empty_outputs(query)
    return output, lse, *(_empty_outputs(query) if far_bias is not None else (query.new_empty(0), lse.new_empty(0)))


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, d = query.shape
    return query.new_empty(b, n, h, d), query.new_empty(b, h, n, dtype=torch.promote_types(query.dtype, torch.float32))


@library.custom_op("linformers::attend_locally_on_cpu_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, near_key: Tensor, near_value: Tensor,
    mask: Tensor | None, lengths: Tensor | None, far_bias: Tensor | None, output: Tensor, lse: Tensor, far: Tensor,
    far_lse: Tensor, window: int, scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, near_key, near_value and far_bias. The last one is empty without `far_bias`."""
    gradients = _empty_gradients(query, key, near_key, far_bias)
    dquery, dkey, dvalue, dnear_key, dnear_value, dbias = gradients
    gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
    # P̄ is exp(score - lse): 0 for a query that sees no keys.
    lse_or_inf = lse.masked_fill(lse == -torch.inf, torch.inf)
    if key.numel() and query.numel():
        sees_any, scores_mask = _far_masks(query, mask)
        own_lse = lse_or_inf if far_bias is None else lse_or_inf - far_bias[:, None]
        own_lse = own_lse.masked_fill(~sees_any, torch.inf)
        results = _flash_backward(gradient, query, key, value, output, own_lse, mask=scores_mask, scale=scaling)
        for own, result in zip((dquery, dkey, dvalue), results, strict=True):
            own.copy_(result)
    else:
        for own in (dquery, dkey, dvalue):
            own.zero_()
    if far_bias is not None:
        products = (gradient * (far.transpose(1, 2) - output)).sum(-1, dtype=lse.dtype)
        dbias.copy_((products * _share(far_lse, lse)).sum((0, 2)))
    near_lse = lse_or_inf.masked_fill(_sees_no_near(query, lengths, window), torch.inf)[..., None]
    tensors = (gradient, 0), (query, 0), (near_key, window), (near_value, window), (output, 0), (near_lse, 0)
    for row, ((*blocks, lse_blocks), scores_mask) in enumerate(_rows(window, lengths, *tensors)):
        results = _flash_backward(*blocks, lse_blocks[..., 0], mask=scores_mask, scale=scaling)
        dquery[row] += _join(results[0], query.shape[2])
        dnear_key[row], dnear_value[row] = (_add_up(result, query.shape[2], window) for result in results[1:])
    return gradients


@_attend_backward.register_fake
def _(gradient, query, key, value, near_key, near_value, mask, lengths, far_bias, *others):  # type: ignore[no-untyped-def]
    return _empty_gradients(query, key, near_key, far_bias)


def _empty_gradients(
    query: Tensor, key: Tensor, near_key: Tensor, far_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dquery, dkey, dvalue, dnear_key, dnear_value = (
        query.new_empty(x.shape) for x in (query, key, key, near_key, near_key)
    )
    dbias = query.new_empty(0) if far_bias is None else far_bias.new_empty(far_bias.shape)
    return dquery, dkey, dvalue, dnear_key, dnear_value, dbias


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.window, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, dbias = _attend_backward(gradient, *ctx.saved_tensors, ctx.window, ctx.scaling)
    return (*gradients, None, None, dbias if dbias.numel() else None, None, None)


_attend.register_autograd(_backward, setup_context=_save)


# What SDPA runs on a CPU. Unlike SDPA, these two also return and take the log-sum-exp of each row of scores, and expect
# contiguous channels without checking.


def _flash(*tensors: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(*map(_with_contiguous_channels, tensors), attn_mask=mask, scale=scale)


def _flash_backward(*tensors: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    *others, lse = tensors
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return run(*map(_with_contiguous_channels, others), lse, 0.0, False, attn_mask=mask, scale=scale)


def _with_contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _share(own: Tensor, lse: Tensor) -> Tensor:
    """How much the result of one kind of keys counts, (b, h, n); 0 for a query that sees no keys at all."""
    return torch.exp(own - lse.masked_fill(lse == -torch.inf, 0))


def _sees_no_near(query: Tensor, lengths: Tensor | None, window: int) -> Tensor:
    """Which queries have no exact key in their window, (b or 1, 1, n)."""
    positions = torch.arange(query.shape[2])
    if lengths is None:
        return (positions < 0)[None, None]
    lengths = lengths[:, None, None]
    return (positions - window >= lengths) | (lengths == 0)


def _far_masks(query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Which rows see projected keys, (b or 1, h or 1, 1), and what to add to their scores, if anything."""
    if mask is None:
        return torch.ones(1, 1, 1, dtype=torch.bool), None
    return mask.any(-1), _to_scores(mask, query.dtype)


def _to_scores(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores. A query without visible keys attends to all: its result could be NaN otherwise."""
    visible = visible | ~visible.any(-1, keepdim=True)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _rows(window: int, lengths: Tensor | None, *tensors: tuple[Tensor, int]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """For each row of a batch, blocks of each tensor with its margin, and what to add to the scores of exact keys."""
    (b, _, n), dtype, size = tensors[0][0].shape[:3], tensors[0][0].dtype, max(window, local.SMALLEST_BLOCK)
    starts, columns = size * torch.arange(math.ceil(n / size))[:, None], torch.arange(-window, size + window)
    offsets = columns - torch.arange(size)[:, None]
    scores_mask = None
    for row in range(b if n else 0):
        if scores_mask is None or lengths is not None:
            end = n if lengths is None else int(lengths[row])
            exists = (starts + columns >= 0) & (starts + columns < end)  # (count, size + 2w)
            scores_mask = _to_scores(((offsets.abs() <= window) & exists[:, None])[:, None], dtype)
        yield [_blocks(x[row], size, margin) for x, margin in tensors], scores_mask


def _blocks(x: Tensor, size: int, margin: int) -> Tensor:
    """(h, n, d) to blocks with a margin on each side (count, h, size + 2 · margin, d), a view of one padded copy."""
    missing = -x.shape[1] % size
    padded = x.transpose(0, 1)
    if margin or missing:
        padded = functional.pad(padded, (0, 0, 0, 0, margin, missing + margin))
    return padded.unfold(0, size + 2 * margin, size).transpose(2, 3)


def _join(blocks: Tensor, n: int) -> Tensor:
    """(count, h, size, ...) to (h, n, ...)."""
    return blocks.transpose(0, 1).flatten(1, 2)[:, :n]


def _add_up(blocks: Tensor, n: int, margin: int) -> Tensor:
    """The sum of blocks that overlap by their margins, (count, h, size + 2 · margin, d) to (h, n, d)."""
    count, h, length, d = blocks.shape
    size, blocks = length - 2 * margin, blocks.transpose(0, 1)
    total = blocks.new_zeros(h, count + 2, size, d)
    total[:, :-2, size - margin :] += blocks[:, :, :margin]
    total[:, 1:-1] += blocks[:, :, margin : margin + size]
    total[:, 2:, :margin] += blocks[:, :, margin + size :]
    return total.flatten(1, 2)[:, size : size + n]
