"""The state of torch's compilers, where it decides what to compute."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether `torch.export` is tracing.

    `torch.compiler.is_exporting` is wrong on torch 2.11: it is also true whenever Dynamo compiles.
    """
    return torch.compiler._is_exporting_flag
