"""Where a number comes from: commit, hardware and versions."""

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
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": device, "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


def commit() -> str | None:
    """The commit of this code, if it is a git checkout. `LINFORMERS_COMMIT` names the commit of a copy."""
    if named := os.environ.get("LINFORMERS_COMMIT"):
        return named
    # An installed package can lie inside another project's repository, which does not track it.
    return _git("rev-parse", "HEAD") if _git("ls-files", Path(__file__).name) else None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or this is not a checkout
        return None


def sentence(command: str) -> str:
    """How something was made."""
    where = environment()
    return (
        f"Made by `{command}` at commit {commit() or 'unknown'} on {where['device']}, with Python {where['python']}, "
        f"torch {where['torch']} and transformers {where['transformers']}."
    )
