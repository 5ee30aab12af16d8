"""Preparation as a process: what it holds in memory, and what is left when it is killed."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from linformers.training import corpus, prepare, tokenizer
from linformers.training.corpus import Corpus

from .texts import contents, run, text


def start(target, *arguments):
    process = tokenizer._context().Process(target=target, args=arguments)
    process.start()
    return process


class ByteEncoder(tokenizer.Encoder):
    """An encoder as fast as reading, so that memory can be measured on much text in little time."""

    def __call__(self, batch):
        return np.frombuffer("\n".join(batch.texts).encode(), np.uint8).astype(self.dtype)


def megabytes(source, out, taken, leak, answer):
    """The memory that a run takes, in a process of its own."""
    tokenizer.Encoder = ByteEncoder
    if leak:
        batches = prepare._batches
        prepare._batches = lambda documents: iter(list(batches(documents)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run([source], out, tokenizer=taken, shard_tokens=2**22)
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def test_memory_does_not_grow_with_the_corpus(prepared, tmp_path):
    row = json.dumps({"text": text(0, 4000)}) + "\n"
    for name, size in (("small", 10), ("large", 60)):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            for number in range(size * 10**6 // len(row)):
                file.write(row.replace("Document 0", f"Document {number}"))

    def measured(name, leak=False):
        receiver, sender = tokenizer._context().Pipe(duplex=False)
        out = tmp_path / f"{name}-{leak}"
        taken = str(prepared / "tokenizer")
        process = start(megabytes, str(tmp_path / f"{name}.jsonl"), out, taken, leak, sender)
        sender.close()
        result = receiver.recv()
        process.join()
        return result

    small = measured("small")
    assert measured("large") < small + 25
    assert measured("large", leak=True) > small + 40  # the measure sees what is held


def run_slowly(source, out, workers):
    """A run that writes little at a time, so that there are many moments at which it can be killed."""
    batches = prepare._batches

    def slow(documents):
        prepare.BATCH_CHARACTERS = 1000
        for batch in batches(documents):
            yield batch
            time.sleep(0.01)

    prepare._batches = slow
    run([source], out, shard_tokens=1000, workers=workers)


def run_and_die(source, out, number):
    """A run that is killed before its file of that number gets its name."""
    finish, names = corpus._finish, []

    def die(file, path):
        names.append(path)
        if len(names) == number:
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(file, path)

    corpus._finish = die
    run([source], out, shard_tokens=1000)


def check_killed(process, source, out, prepared):
    """What is left is no corpus and has no broken shard; the next run clears it. Returns the names that were left."""
    assert process.exitcode == -signal.SIGKILL
    left = {path.name for path in out.glob("*") if path.is_file()}
    assert corpus.MANIFEST not in left
    for name in left:
        if name.endswith(".bin"):
            assert (out / name).read_bytes() == (prepared / name).read_bytes()
    with pytest.raises(ValueError, match="holds no corpus"):
        Corpus.open(out)
    run([source], out, shard_tokens=1000)
    assert contents(out) == contents(prepared)
    return left


@pytest.mark.parametrize(("shards", "workers"), [(0, 1), (1, 1), (3, 1), (6, 1), (0, 2), (1, 2), (5, 2)])
def test_a_run_killed_at_some_moment_leaves_nothing_that_looks_whole(shards, workers, prepared, source, tmp_path):
    process = start(run_slowly, source, tmp_path / "out", workers)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/*.bin"))) < shards and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.Random(shards).uniform(0, 0.02))
    process.kill()
    process.join()
    left = check_killed(process, source, tmp_path / "out", prepared)
    assert sum(name.endswith(".bin") for name in left) >= shards


def test_a_run_killed_before_a_file_has_its_name(prepared, source, tmp_path):
    shards = len(list(prepared.glob("*.bin")))
    for number in (1, 4, shards, shards + 1):
        out = tmp_path / str(number)
        process = start(run_and_die, source, out, number)
        process.join()
        left = check_killed(process, source, out, prepared)
        assert sum(name.endswith(".bin") for name in left) == number - 1
        assert any(name.endswith(".tmp") for name in left)
    assert "manifest.json.tmp" in left


def test_workers_leave_when_the_main_process_is_killed(source, tmp_path):
    code = f"""
import sys, time
from linformers.training import prepare
batches = prepare._batches
def slow(documents):
    prepare.BATCH_CHARACTERS = 500
    for batch in batches(documents):
        yield batch
        time.sleep(0.2)
prepare._batches = slow
from rich.console import Console
from pathlib import Path
prepare.prepare([{source!r}], Path({str(tmp_path / "out")!r}), vocab_size=300, shard_tokens=100, workers=2,
               validation_share=0.1, console=Console(quiet=True))
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while not list(tmp_path.glob("out/*.bin")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.glob("out/*.bin"))
        assert len(members(process.pid)) >= 4  # itself, two workers, and the server they come from
        process.kill()
        process.wait()
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert members(process.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def members(session):
    """The processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(folder.name))
    return found
