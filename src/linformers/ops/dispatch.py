"""Which of Triton and SDPA serves attention onto k projected keys, by device, type and size."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from .attend import MAX_HEAD_DIM, holds_all
from .compiling import is_exporting

# Where kernels run. Tests add "cpu", for Triton's interpreter.
DEVICES = {"cuda"}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_said: set[str] = set()


def use_triton(query: Tensor, key: Tensor, mask: Tensor | None = None, *, local: bool = False) -> bool:
    """Whether to attend by `attend.attend`; what keeps a GPU from it is logged once.

    Kernels that hold all keys of a head are faster than any backend of SDPA, or as fast; those that walk over them are
    slower. That was measured in bfloat16, with heads of 64 channels, for k from 64 to 2048 and n from 512 to 65,536.
    SDPA cannot look at a local window without copies of the keys, so there the kernels always serve.
    """
    if query.device.type not in DEVICES or is_exporting() or not (local or holds_all(key)):
        return False
    obstacle = what_hinders(query, key, mask)
    if obstacle is not None:
        _log(obstacle)
        return False
    return True


def what_hinders(query: Tensor, key: Tensor, mask: Tensor | None = None) -> str | None:
    """Why the kernels cannot serve these tensors at all, if they cannot."""
    if (obstacle := _what_hinders_on(query.device.type, query.device.index)) is not None:
        return obstacle
    if query.dtype not in DTYPES:
        return f"there are kernels for bfloat16, float16 and float32, but not for {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"heads of {query.shape[3]} channels exceed {MAX_HEAD_DIM}"
    if mask is not None and (mask.shape[2] != 1 or mask.dtype != torch.bool):
        return "the mask must be boolean and the same for all queries"
    return None


# Compilers run what is marked as constant as it is, while they compile, and keep the result.
@torch.compiler.assume_constant_result
def _what_hinders_on(device_type: str, index: int | None) -> str | None:
    return _look_at(device_type, index)


@functools.cache
def _look_at(device_type: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cuda" and torch.cuda.get_device_capability(index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


@torch.compiler.assume_constant_result
def _log(obstacle: str) -> None:
    if obstacle in _said:
        return
    _said.add(obstacle)
    logging.getLogger(__name__).warning("attention goes through SDPA instead of Triton: %s", obstacle)
