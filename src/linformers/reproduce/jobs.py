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

from ..progress import progress
from ..provenance import commit, environment
from ..training.checkpointing import write_text

# What a number depends on beside recipe and data. It changes when the same recipe would give another result.
CODE_VERSION = 1


@dataclass(frozen=True)
class Job:
    """A command of `linformers` that leaves something in a folder, to be run once.

    Attributes:
        name: its record's, and what it is called on the screen.
        arguments: of the command.
        decides: everything that the result depends on, but for the code.
        collect: reads the result when the command is done.
        steps: how many there are, and how many are done.
        after: the job without which it cannot start, and whether what that leaves behind is there.
    """

    name: str
    arguments: Sequence[str]
    decides: Mapping[str, Any]
    collect: Callable[[], dict[str, Any]]
    steps: tuple[int, Callable[[], int]]
    after: tuple[Job, Callable[[], bool]] | None = None

    @cached_property
    def key(self) -> str:
        """The hash of all that decides."""
        text = json.dumps({"code": CODE_VERSION, **self.decides}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def command(self) -> list[str]:
        return ["linformers", *self.arguments]


@dataclass(frozen=True)
class Store:
    """The records of jobs that are done: a file for each, with where its numbers come from.

    Attributes:
        folder: where they are.
    """

    folder: Path

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

    def write(self, job: Job) -> None:
        where = {"command": " ".join(job.command), "commit": commit(), **environment()}
        record = {"key": job.key, **where, "decides": job.decides, "result": job.collect()}
        path = self._path(job.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Where the numbers of a record come from."""
    return {name: record[name] for name in ("command", "commit", "device", "python", "torch", "transformers")}


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
    done = len({job.name for job in jobs}) - len({job.name for job in left if job in jobs})
    console.print(f"{done} of {len({job.name for job in jobs})} runs are there already", highlight=False)
    running: list[Process] = []
    failed: list[str] = []
    with progress(console) as bars, _signals() as received:
        tasks = {job.name: bars.add_task(job.name, total=job.steps[0], start=False, visible=False) for job in left}
        while left or running:
            if received or (deadline is not None and time.monotonic() > deadline):
                break
            ready = [job for job in left if _may_start(job, left, running)]
            for job in ready[: max(0, at_once - len(running))]:
                left.remove(job)
                running.append(Process(job, logs / f"{job.name}.log"))
                bars.start_task(tasks[job.name])
                bars.update(tasks[job.name], visible=True)
            if left and not running:  # what they wait for has failed
                failed += [job.name for job in left]
                break
            time.sleep(0.2)
            for process in list(running):
                name = process.job.name
                bars.update(tasks[name], completed=process.job.steps[1]())
                if process.handle.poll() is None:
                    continue
                running.remove(process)
                bars.update(tasks[name], visible=False)
                if process.handle.returncode == 0:
                    store.write(process.job)
                    console.print(f"{name} is done", highlight=False)
                else:
                    failed.append(name)
                    console.print(f"{name} failed: {_last_line(process.log)}", style="red", markup=False)
        _stop(running)
    if received:
        return 128 + received[0]
    for name in failed:
        console.print(f"{name} is missing; its log is {logs / f'{name}.log'}", style="red", markup=False)
    if running:
        console.print("time is up; run the command again to go on", style="yellow")
    return 1 if failed or running or left else 0


def missing(jobs: Sequence[Job], store: Store) -> list[Job]:
    """What has no record, and before it what has one but must be run again for what it left behind."""
    found: dict[str, Job] = {}
    for job in jobs:
        if store.find(job) is not None:
            continue
        if job.after is not None and not job.after[1]():
            found[job.after[0].name] = job.after[0]
        found[job.name] = job
    return list(found.values())


def _may_start(job: Job, left: Sequence[Job], running: Sequence[Process]) -> bool:
    if job.after is None:
        return True
    first, is_there = job.after
    waiting = any(first.name == other.name for other in (*left, *(process.job for process in running)))
    return not waiting and is_there()


def _stop(running: Sequence[Process]) -> None:
    """Ask what runs to save itself and stop."""
    for process in running:
        process.handle.send_signal(signal.SIGTERM)
    for process in running:
        process.handle.wait()


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
