"""Where a number comes from: the command, the commit, the hardware and the versions that stand beside it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str | None:
    """The commit that this code is at, where it is a git checkout; `LINFORMERS_COMMIT` names it for a copy."""
    if named := os.environ.get("LINFORMERS_COMMIT"):
        return named
    # Installed into somebody's project, the code may stand in a repository that does not know it.
    return _git("rev-parse", "HEAD") if _git("ls-files", Path(__file__).name) else None


def _git(*arguments: str) -> str | None:
    """What git says of the folder of this code; `None` where there is no git, or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def sentence(command: str) -> str:
    """All of it in words."""
    where = environment()
    return (
        f"Made by `{command}` at commit {commit() or 'unknown'} on {where['device']}, with Python {where['python']}, "
        f"torch {where['torch']} and transformers {where['transformers']}."
    )
