"""The choice between Triton and SDPA for attention onto k projected keys."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from .attend import MAX_HEAD_DIM, fits_on_chip
from .compiling import is_exporting

DEVICES = {"cuda"}  # tests add "cpu" for Triton's interpreter
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_logged: set[str] = set()


def use_triton(query: Tensor, key: Tensor, mask: Tensor | None = None, *, local: bool = False) -> bool:
    """Whether `attend.attend` should compute attention; on a GPU, logs once why it cannot.

    Kernels that keep all keys of a head on chip are at least as fast as every SDPA backend; those that stream over the
    keys are slower (measured in bfloat16 with 64 channels per head, k from 64 to 2048, n from 512 to 65,536). With a
    local window the kernels are always used, because SDPA needs copies of the keys.
    """
    if query.device.type not in DEVICES or is_exporting() or not (local or fits_on_chip(key)):
        return False
    reason = unsupported_reason(query, mask)
    if reason is not None:
        _log_once(reason)
    return reason is None


def unsupported_reason(query: Tensor, mask: Tensor | None = None) -> str | None:
    """Why the kernels cannot process these tensors; `None` if they can."""
    if (reason := _unsupported_device(query.device.type, query.device.index)) is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"there are kernels for bfloat16, float16 and float32, but not for {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"heads of {query.shape[3]} channels exceed {MAX_HEAD_DIM}"
    if mask is not None and (mask.shape[2] != 1 or mask.dtype != torch.bool):
        return "the mask must be boolean and the same for all queries"
    return None


# Dynamo runs functions that are marked as constant while it compiles, and keeps their results.
@torch.compiler.assume_constant_result
def _unsupported_device(device_type: str, index: int | None) -> str | None:
    return _inspect_device(device_type, index)


@functools.cache
def _inspect_device(device_type: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cuda" and torch.cuda.get_device_capability(index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


@torch.compiler.assume_constant_result
def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        logging.getLogger(__name__).warning("attention uses SDPA instead of Triton: %s", reason)
