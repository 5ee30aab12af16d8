"""Tiles fit in shared memory, also on cards that are not at hand: kernels are compiled for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

A100, RTX = 166_912, 101_376  # bytes
KERNELS = [
    ("backward_resident", 64, 128, "bfloat16"),
    ("backward_resident_halves", 64, 256, "bfloat16"),
    ("backward_resident", 128, 64, "bfloat16"),
    ("backward_resident", 128, 64, "float32"),
    ("forward_resident", 128, 128, "bfloat16"),
    ("backward_resident_halves", 128, 128, "bfloat16"),
]


def shared_bytes(capability, memory, kernels):
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.offline", json.dumps((capability, memory, kernels))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(result.stdout)


def test_kernels_fit_in_the_shared_memory_of_large_and_small_cards():
    (found,) = shared_bytes(80, A100, KERNELS[:1])
    assert RTX < found <= A100  # too much for small cards
    assert max(shared_bytes(89, RTX, KERNELS)) <= RTX
