"""What has to be run, what has been, and how the rest is: several at once, each in a process of its own."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..errors import UserError
from ..progress import progress
from ..provenance import commit, environment
from ..training.checkpointing import write_text

# What a number depends on beside recipe and data. It changes when the same recipe would give another result.
CODE_VERSION = 1
NOTE = "job.json"
# How the name of a record ends whose job was done before and repeated, since what it had left behind was gone.
REPEATED = "-repeated"
ORIGIN = ("command", "commit", "device", "python", "torch", "transformers")


@dataclass(frozen=True)
class Job:
    """A command of `linformers` that leaves something in a folder, to be run once.

    Attributes:
        name: its record's, and what it is called on the screen.
        arguments: of the command.
        out: the folder in which it leaves what it makes.
        decides: everything that the result depends on, but for the code.
        collect: reads the result when the command is done.
        steps: how many there are, and how many are done.
        after: the job without which it cannot start, and whether what that leaves behind is there.
        alone: whether nothing may run beside it, since it measures time.
    """

    name: str
    arguments: Sequence[str]
    out: Path
    decides: Mapping[str, Any]
    collect: Callable[[], dict[str, Any]]
    steps: tuple[int, Callable[[], int]]
    after: tuple[Job, Callable[[], bool]] | None = None
    alone: bool = False

    @cached_property
    def key(self) -> str:
        """The hash of all that decides."""
        return digest({"code": CODE_VERSION, **self.decides})


@dataclass(frozen=True)
class Store:
    """The records of jobs that are done: a file for each, with where its numbers come from.

    Attributes:
        folder: where they are.
        data: the folder of raw data, which is DIR in the commands of records.
    """

    folder: Path
    data: Path | None = None

    def find(self, job: Job) -> dict[str, Any] | None:
        """The record of a job, unless it was made by another recipe, from other data or by other code."""
        record = self.read(job.name)
        return record if record is not None and record["key"] == job.key else None

    def read(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        return json.loads(path.read_text()) if path.is_file() else None

    def results(self, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the runs that are there, by name: their results, and where these come from."""
        found = {name: record for name in names if (record := self.read(name)) is not None}
        return {name: record["result"] for name, record in found.items()}, {
            name: origin(record) for name, record in found.items()
        }

    def begin(self, job: Job) -> None:
        """Note in its folder which job begins there, and where; one that goes on keeps the note of its beginning.

        One that measures time does not go on: it measures all of it again.
        """
        path = job.out / NOTE
        if job.alone or job.steps[1]() == 0:
            job.out.mkdir(parents=True, exist_ok=True)
            where = {"command": self.command(job), "commit": commit(), **environment()}
            write_text(path, json.dumps({"key": job.key, **where}, indent=1) + "\n")
        elif not path.exists() or json.loads(path.read_text())["key"] != job.key:
            raise UserError(f"{job.out} holds a run of other code, data or recipe; delete it to run this")

    def write(self, job: Job) -> None:
        """The record of a job that is done: where it began, what decided, and what came of it.

        One that had been done before keeps its first record, and has another of its repetition.
        """
        record = {**json.loads((job.out / NOTE).read_text()), "decides": job.decides, "result": job.collect()}
        path = self._path(job.name if self.find(job) is None else f"{job.name}{REPEATED}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")

    def command(self, job: Job) -> str:
        """What runs a job anywhere."""
        return " ".join(("linformers", *map(self.known_as, job.arguments)))

    def known_as(self, name: str) -> str:
        """An argument, with DIR for the folder of raw data: where that is on this machine is nobody's business."""
        data = str(self.data)
        return f"DIR{name.removeprefix(data)}" if name == data or name.startswith(f"{data}/") else name

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def digest(values: Mapping[str, Any]) -> str:
    """What tells these values from others."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Where the numbers of a record come from."""
    return {name: record[name] for name in ORIGIN}


@dataclass
class Process:
    """A job that is running."""

    job: Job
    log: Path
    handle: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self.handle = subprocess.Popen(
                [sys.executable, "-m", "linformers", *self.job.arguments], stdout=out, stderr=subprocess.STDOUT
            )


def run(
    jobs: Sequence[Job], store: Store, logs: Path, console: Console, *, at_once: int = 1, deadline: float | None = None
) -> int:
    """Run what the store has no record of; what is interrupted goes on from where it was in the next run.

    Args:
        jobs: in the order in which they start; one that stands there twice runs once.
        store: where records are looked up and written.
        logs: the folder for what the commands say.
        console: where progress is shown.
        at_once: how many run at a time.
        deadline: when, by the monotonic clock, what is running is stopped, which saves it.

    Returns:
        The exit code: 0, 1 if a job failed or time ran out, or 128 plus the number of a signal.
    """
    left = missing(jobs, store)
    names = {job.name for job in jobs}
    console.print(f"{len(names - {job.name for job in left})} of {len(names)} runs are there already", highlight=False)
    with progress(console) as bars, _signals() as received:
        runner = Runner(left, store, logs, console, bars, at_once)
        try:
            while (runner.left or runner.running) and not received:
                if deadline is not None and time.monotonic() > deadline:
                    break
                if not runner.start():
                    break
                time.sleep(0.2)
                if not received:  # which reaches what runs, too, and is no failure of it
                    runner.look()
        finally:
            runner.stop()
    for name in runner.failed:
        console.print(f"{name} is missing; its log is {logs / f'{name}.log'}", style="red", markup=False)
    if runner.running or (runner.left and not runner.failed):
        why = "interrupted" if received else "time is up"
        console.print(f"{why}; run the command again, it goes on from the last checkpoints", style="yellow")
    if received:
        return 128 + received[0]
    return 1 if runner.failed or runner.running or runner.left else 0


class Runner:
    """Starts jobs and looks after them.

    Args:
        left: what is to be run.
        store: for the records.
        logs: the folder for what the commands say.
        console: for what there is to say.
        bars: for the progress.
        at_once: how many run at a time.
    """

    def __init__(
        self, left: list[Job], store: Store, logs: Path, console: Console, bars: Progress, at_once: int
    ) -> None:
        self.left, self.store, self.logs = left, store, logs
        self.console, self.bars, self.at_once = console, bars, at_once
        self.running: list[Process] = []
        self.failed: list[str] = []
        self.tasks = {job.name: bars.add_task(job.name, total=job.steps[0], start=False, visible=False) for job in left}

    def start(self) -> bool:
        """Start what may start; false if nothing runs and nothing can."""
        for job in [job for job in self.left if job.after is not None and job.after[0].name in self.failed]:
            self.left.remove(job)
            self.failed.append(job.name)
        ready = [job for job in self.left if _may_start(job, self.left, self.running)]
        for job in ready:
            if len(self.running) >= (1 if job.alone else self.at_once) or any(own.job.alone for own in self.running):
                break  # what comes next waits, too: otherwise, a job that wants to be alone might never be
            self.left.remove(job)
            try:
                self.store.begin(job)
            except ValueError as error:
                self._fail(job, str(error))
                continue
            self.running.append(Process(job, self.logs / f"{job.name}.log"))
            self.bars.start_task(self.tasks[job.name])
            self.bars.update(self.tasks[job.name], visible=True)
        if self.left and not self.running:  # what they wait for has failed
            self.failed += [job.name for job in self.left]
            self.left.clear()
        return bool(self.running)

    def look(self) -> None:
        """See how far everything is, and write down what is done."""
        for process in list(self.running):
            job = process.job
            self.bars.update(self.tasks[job.name], completed=job.steps[1]())
            if process.handle.poll() is not None:
                self._end(process)

    def stop(self) -> None:
        """Ask what runs to save itself and stop."""
        for process in self.running:
            process.handle.terminate()
        for process in self.running:
            process.handle.wait()

    def _end(self, process: Process) -> None:
        name = process.job.name
        self.running.remove(process)
        self.bars.update(self.tasks[name], visible=False)
        if process.handle.returncode == 0:
            self.store.write(process.job)
            self.console.print(f"{name} is done", highlight=False)
        else:
            self._fail(process.job, _last_line(process.log))

    def _fail(self, job: Job, why: str) -> None:
        self.failed.append(job.name)
        self.console.print(f"{job.name} failed: {why}", style="red", markup=False)


def missing(jobs: Sequence[Job], store: Store) -> list[Job]:
    """What has no record, and before it what it builds on, unless that is there as it was recorded."""
    found: dict[str, Job] = {}
    for job in jobs:
        if store.find(job) is not None:
            continue
        if job.after is not None and not (store.find(job.after[0]) and job.after[1]()):
            found[job.after[0].name] = job.after[0]
        found[job.name] = job
    return list(found.values())


def _may_start(job: Job, left: Sequence[Job], running: Sequence[Process]) -> bool:
    if job.after is None:
        return True
    first, is_there = job.after
    waiting = any(first.name == other.name for other in (*left, *(process.job for process in running)))
    return not waiting and is_there()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop that arrive, instead of being stopped by them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
