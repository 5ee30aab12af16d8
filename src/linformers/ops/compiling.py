"""What a compiler is doing with us, as far as that changes what is computed, or how."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether `torch.export` is tracing.

    `torch.compiler.is_exporting` says so too, but is true whenever Dynamo of torch 2.11 compiles.
    """
    return torch.compiler._is_exporting_flag
