import subprocess
import sys
from pathlib import Path

import pytest

from ..forks import Command, Forked


@pytest.fixture
def forked(monkeypatch):
    """Runs of `python -m linformers` start at once."""
    popen = subprocess.Popen

    def start(command, **options):
        if command[:3] != [sys.executable, "-m", "linformers"]:
            return popen(command, **options)
        assert options.keys() == {"stdout", "stderr"}
        return Forked(Command(command[3:]), Path(options["stdout"].name))

    monkeypatch.setattr(subprocess, "Popen", start)
