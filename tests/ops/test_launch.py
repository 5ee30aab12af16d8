"""Tiles fit into the memory that programs share, on cards that are not here, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

A100, RTX = 166_912, 101_376  # bytes
KERNELS = [
    ("backward_few", 64, 128, "bfloat16"),
    ("backward_some", 64, 256, "bfloat16"),
    ("backward_few", 128, 64, "bfloat16"),
    ("backward_few", 128, 64, "float32"),
    ("forward_few", 128, 128, "bfloat16"),
    ("backward_some", 128, 128, "bfloat16"),
]


def shared_bytes(capability, memory, kernels):
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "tests.offline", json.dumps((capability, memory, kernels))],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_tiles_fit_into_large_cards():
    (found,) = shared_bytes(80, A100, KERNELS[:1])
    assert RTX < found <= A100  # so that the test below can fail


def test_tiles_fit_into_small_cards():
    assert max(shared_bytes(89, RTX, KERNELS)) <= RTX
