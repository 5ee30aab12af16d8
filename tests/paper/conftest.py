import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paper import experiments, jobs

from ..analysis.conftest import folder, text  # noqa: F401
from ..forks import Command, Forked

WORDS = ["the", "a", "film", "was", "good", "bad", "long", "short", "and", "of", "in", "it", "is", "not", "very"]


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Commands `python -m linformers` start at once."""

    def start(command, stdout=None, **options):
        assert command[:3] == [sys.executable, "-m", "linformers"]
        return Forked(Command(command[3:]), Path(stdout.name if stdout else tmp_path / "command.log"))

    def wait(command, check):
        return SimpleNamespace(returncode=start(command).wait())

    for module in (jobs, experiments):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=start, run=wait, STDOUT=subprocess.STDOUT))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Wiki, books and the four tasks, a few kilobytes of each."""
    root, draw = tmp_path_factory.mktemp("data"), random.Random(0)

    def write(name, count, words, *texts, label=()):
        rows = ({own: " ".join(draw.choices(WORDS, k=words)) for own in texts} for _ in range(count))
        path = root / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(json.dumps({**row, **dict.fromkeys(label, i % 2)}) for i, row in enumerate(rows)))

    for name, count in (("train-00", 60), ("validation", 10)):
        write(f"wiki/{name}", count, 200, "text")
        write(f"books/{name}", count, 200, "text")
    write("wikitext103_valtest/test", 20, 200, "text")
    columns = {"sst2": ["sentence"], "imdb": ["text"], "qnli": ["question", "sentence"]}
    for name, texts in (columns | {"qqp": ["question1", "question2"]}).items():
        for split in ("train", "test" if name == "imdb" else "validation"):
            write(f"{name}/{split}", 120, 12, *texts, label=["label"])
    return root
