"""Which of Triton and SDPA serves attention onto k projected keys, by device, type and size."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from .attend import MAX_HEAD_DIM, MAX_KEYS
from .compiling import is_exporting

# Where kernels run. Tests add "cpu", for Triton's interpreter.
DEVICES = {"cuda"}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Up to here the kernels serve, beyond it SDPA, until both have been measured.
FASTER_KEYS = 256


def use_triton(query: Tensor, key: Tensor, mask: Tensor | None = None) -> bool:
    """Whether to attend by `attend.attend`; what keeps a GPU from it is logged once."""
    if query.device.type not in DEVICES or is_exporting():
        return False
    obstacle = what_hinders(query, key, mask)
    if obstacle is not None:
        if not torch.compiler.is_compiling():
            _log(obstacle)
        return False
    return key.shape[2] <= FASTER_KEYS


def what_hinders(query: Tensor, key: Tensor, mask: Tensor | None = None) -> str | None:
    """Why the kernels cannot serve these tensors at all, if they cannot."""
    if not _is_installed():
        return "Triton is not installed"
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if query.dtype not in DTYPES:
        return f"there are kernels for bfloat16, float16 and float32, but not for {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"heads of {query.shape[3]} channels exceed {MAX_HEAD_DIM}"
    if key.shape[2] > MAX_KEYS:
        return f"{key.shape[2]} keys exceed {MAX_KEYS}"
    if mask is not None and (mask.shape[2] != 1 or mask.dtype != torch.bool):
        return "the mask must be boolean and the same for all queries"
    return None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _log(obstacle: str) -> None:
    logging.getLogger(__name__).warning("attention goes through SDPA instead of Triton: %s", obstacle)
