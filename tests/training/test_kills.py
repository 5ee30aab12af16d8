"""`kill -9` at any moment, inside a save too, loses nothing that was saved (`kills.py` is the harness)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kill(**options):
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.training.kills", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_few_kills():
    counts = kill(kills=6, inside=3)
    assert counts["kills"] >= 6
    assert counts["inside a save"] >= 3


@pytest.mark.long
def test_fifty_kills():
    counts = kill(kills=50, inside=15, seed=1)
    assert counts["kills"] >= 50
    assert counts["inside a save"] >= 15
