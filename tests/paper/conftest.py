import json
import random
import subprocess
import sys

import pytest

from ..forks import Command, Forked

WORDS = ["the", "a", "film", "was", "good", "bad", "long", "short", "and", "of", "in", "it", "is", "not", "very"]


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Commands `python -m linformers` start at once."""
    popen, run = subprocess.Popen, subprocess.run

    def start(command, **options):
        if command[:3] != [sys.executable, "-m", "linformers"]:
            return popen(command, **options)
        assert options.keys() == {"stdout", "stderr"}
        return Forked(Command(command[3:]), options["stdout"].name)

    def wait(command, **options):
        if command[:3] != [sys.executable, "-m", "linformers"]:
            return run(command, **options)
        log = tmp_path / "command.log"
        assert Forked(Command(command[3:]), log).wait() == 0, log.read_text()
        return None

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(subprocess, "run", wait)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Wiki, books and the four tasks, a few kilobytes of each."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)

    def sentence(words):
        return " ".join(draw.choice(WORDS) for _ in range(words))

    def write(path, rows):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name in ("wiki", "books"):
        for split, count in (("train-00", 60), ("validation", 10)):
            write(folder / name / f"{split}.jsonl", [{"text": sentence(200)} for _ in range(count)])
    write(folder / "wikitext103_valtest" / "test.jsonl", [{"text": sentence(200)} for _ in range(20)])
    columns = {"sst2": ("sentence",), "imdb": ("text",), "qnli": ("question", "sentence")}
    columns |= {"qqp": ("question1", "question2")}
    for name, texts in columns.items():
        for split in ("train", "test" if name == "imdb" else "validation"):
            rows = [{**{text: sentence(12) for text in texts}, "label": i % 2} for i in range(120)]
            write(folder / name / f"{split}.jsonl", rows)
    return folder
