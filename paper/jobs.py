"""Runs of `linformers` commands: which are recorded already, and how to run the rest, several at a time."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import Progress

from linformers.errors import UserError
from linformers.progress import progress
from linformers.provenance import commit, environment

# Part of every hash. Increase it when the same recipe would give a different result.
CODE_VERSION = 1
NOTE = "job.json"
# Suffix of the record of a run that was repeated because its model was needed again and had been deleted.
REPEATED = "-repeated"
ORIGIN = ("command", "commit", "device", "python", "torch", "transformers")


@dataclass(frozen=True)
class Job:
    """A `linformers` command that writes to a folder and has to run once.

    Attributes:
        name: `"section/run"`; the section says which `runs.json` holds the record.
        arguments: of the command.
        out: the folder that the command writes to.
        description: everything that determines the result, except the code.
        collect: reads the result from `out` when the command has finished.
        steps: total number of steps, for the progress bar.
        steps_done: number of steps finished so far.
        after: the pretraining job whose model this one needs.
    """

    name: str
    arguments: Sequence[str]
    out: Path
    description: Mapping[str, Any]
    collect: Callable[[], dict[str, Any]]
    steps: int
    steps_done: Callable[[], int]
    after: Job | None = None

    @cached_property
    def key(self) -> str:
        """The hash that identifies the run."""
        return digest({"code": CODE_VERSION, **self.description})

    @property
    def model(self) -> Path:
        """The folder of the model that a training run leaves behind."""
        return self.out / "model"


def digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Command, commit, hardware and versions of a record."""
    return {name: record[name] for name in ORIGIN}


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


@dataclass(frozen=True)
class Records:
    """The records of finished runs: one `runs.json` per section, one line per run.

    Attributes:
        results: the folder with a subfolder for each section.
        data: the folder of raw data; commands in records call it DIR.
    """

    results: Path
    data: Path | None = None

    def section(self, name: str) -> dict[str, Any]:
        """All records of a section, by the run's short name."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.is_file() else {}

    def read(self, name: str) -> dict[str, Any] | None:
        section, _, run = name.partition("/")
        return self.section(section).get(run)

    def find(self, job: Job) -> dict[str, Any] | None:
        """The record of a job, if it was made with the same recipe, data and code version."""
        record = self.read(job.name)
        return record if record is not None and record["key"] == job.key else None

    def results_of(self, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results and origins of those runs that have a record, both by name."""
        found = {name: record for name in names if (record := self.read(name)) is not None}
        return {name: own["result"] for name, own in found.items()}, {name: origin(own) for name, own in found.items()}

    def begin(self, job: Job) -> None:
        """Note in the output folder which job starts there; a resumed job keeps the note of its first start."""
        note = job.out / NOTE
        if job.steps_done() == 0:
            job.out.mkdir(parents=True, exist_ok=True)
            command = " ".join(("linformers", *map(self.public, job.arguments)))
            where = {"key": job.key, "command": command, "commit": commit(), **environment()}
            write_text(note, json.dumps(where, indent=1) + "\n")
        elif not note.exists() or json.loads(note.read_text())["key"] != job.key:
            raise UserError(f"{job.out} holds a run of other code, data or recipe; delete it to run {job.name}")

    def write(self, job: Job) -> None:
        """Add the record of a finished job; a repeated run gets a second record and leaves the first as it is."""
        record = {**json.loads((job.out / NOTE).read_text()), "description": job.description, "result": job.collect()}
        section, _, run = job.name.partition("/")
        path = self._path(section)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(job.out.parent / f"{section}.lock"):
            name = run if self.find(job) is None else f"{run}{REPEATED}"
            write_records(path, {**self.section(section), name: record})

    def public(self, argument: str) -> str:
        """An argument with DIR for the folder of raw data, whose location does not belong in a record."""
        data = str(self.data)
        return f"DIR{argument.removeprefix(data)}" if argument == data or argument.startswith(f"{data}/") else argument

    def _path(self, section: str) -> Path:
        return self.results / section / "runs.json"


def write_records(path: Path, records: Mapping[str, Any]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(record)}" for name, record in sorted(records.items()))
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def missing(jobs: Sequence[Job], records: Records) -> list[Job]:
    """The jobs without a record, each after the runs that it needs, unless their models still exist."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        first = job.after
        if first is not None and not (records.find(first) and first.model.exists()):
            add(first)
        found[job.name] = job

    for job in jobs:
        if records.find(job) is None:
            add(job)
    return list(found.values())


def run(
    jobs: Sequence[Job], records: Records, logs: Path, console: Console, *, at_once: int = 1, deadline: float = math.inf
) -> int:
    """Run the jobs that have no record yet, `at_once` of them at a time, in the order given.

    At the `deadline`, a value of the monotonic clock, running jobs are asked to save and stop. An interrupted job
    resumes from its last checkpoint in the next call. The output of the commands goes to `logs`.

    Returns:
        The exit code: 0, 1 if a job failed or time ran out, or 128 plus the number of a signal.
    """
    waiting = missing(jobs, records)
    names = {job.name for job in jobs}
    console.print(f"{len(names - {job.name for job in waiting})} of {len(names)} runs are recorded", highlight=False)
    with progress(console) as bars, _signals() as received:
        runner = Runner(waiting, records, logs, console, bars, at_once)
        try:
            while (runner.waiting or runner.running) and not received and time.monotonic() < deadline:
                runner.start()
                time.sleep(0.2)
                if not received:  # a signal also reaches the running jobs, which is no failure of theirs
                    runner.poll()
        finally:
            runner.stop()
    if runner.running or runner.waiting:
        why = "interrupted" if received else "time is up"
        console.print(f"{why}; repeat the command to resume from the last checkpoints", style="yellow")
    if received:
        return 128 + received[0]
    return 1 if runner.failed or runner.running or runner.waiting else 0


class Runner:
    """Starts jobs and follows them. The arguments are those of `run`, and `bars` shows the progress."""

    def __init__(
        self, waiting: list[Job], records: Records, logs: Path, console: Console, bars: Progress, at_once: int
    ) -> None:
        self.waiting, self.records, self.logs = waiting, records, logs
        self.console, self.bars, self.at_once = console, bars, at_once
        self.running: list[tuple[Job, subprocess.Popen[bytes]]] = []
        self.failed: set[str] = set()
        self.tasks = {job.name: bars.add_task(job.name, total=job.steps, start=False, visible=False) for job in waiting}

    def start(self) -> None:
        """Start the jobs that can start now, and drop those whose pretraining failed."""
        for job in list(self.waiting):
            if job.after is not None and job.after.name in self.failed:
                self.waiting.remove(job)
                self._fail(job, f"{job.after.name} failed")
        unfinished = {job.name for job in (*self.waiting, *(job for job, _ in self.running))}
        for job in [job for job in self.waiting if job.after is None or job.after.name not in unfinished]:
            if len(self.running) >= self.at_once:
                break
            self.waiting.remove(job)
            try:
                self.records.begin(job)
            except UserError as error:
                self._fail(job, str(error))
                continue
            self._log(job).parent.mkdir(parents=True, exist_ok=True)
            with self._log(job).open("wb") as log:
                command = [sys.executable, "-m", "linformers", *job.arguments]
                self.running.append((job, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
            self.bars.start_task(self.tasks[job.name])
            self.bars.update(self.tasks[job.name], visible=True)

    def poll(self) -> None:
        """Update the progress bars and record the jobs that have finished."""
        for job, process in list(self.running):
            self.bars.update(self.tasks[job.name], completed=job.steps_done())
            if process.poll() is None:
                continue
            self.running.remove((job, process))
            self.bars.update(self.tasks[job.name], visible=False)
            if process.returncode == 0:
                self.records.write(job)
                self.console.print(f"{job.name} is done", highlight=False)
            else:
                lines = self._log(job).read_text(errors="replace").split("\n")
                self._fail(job, next((line for line in reversed(lines) if line.strip()), "no output"))

    def stop(self) -> None:
        """Ask the running jobs to save and stop."""
        for _, process in self.running:
            process.terminate()
        for _, process in self.running:
            process.wait()

    def _log(self, job: Job) -> Path:
        return self.logs / f"{job.name}.log"

    def _fail(self, job: Job, why: str) -> None:
        self.failed.add(job.name)
        message = f"{job.name} failed: {why} (log: {self._log(job)})"
        self.console.print(message, style="red", markup=False, soft_wrap=True)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop received so far; while this is active they have no other effect."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
