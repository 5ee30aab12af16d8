"""The progress of everything that takes long: what is done, how much of it, how fast, and the time left."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds after which a line says how far something is, where there are no bars.
SILENCE = 30.0


class Bars(Progress):
    """Bars in a terminal; elsewhere lines, as something begins and while it goes on.

    Args:
        console: where they are shown.
        count: the column that counts what is done.
        others: further columns.
    """

    def __init__(self, console: Console, count: ProgressColumn, *others: ProgressColumn) -> None:
        self.count = count
        self.told: dict[TaskID, tuple[str, float]] = {}  # what the last line said of a task, and when
        time = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), BarColumn(), count, *others, *time, console=console)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if self.console.is_terminal or not self.live.is_started:
            return
        task, now = next(task for task in self.tasks if task.id == task_id), self.get_time()
        what, when = self.told.get(task_id, ("", now))
        if task.finished or not task.visible or (task.description == what and now - when < SILENCE):
            return
        self.told[task_id] = task.description, now
        line = f"{self.count(task)} {task.description}".strip()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(console: Console, count: ProgressColumn | None = None, *others: ProgressColumn) -> Bars:
    """Bars with a count of what is done, by default “3/10”, and further columns."""
    return Bars(console, count or MofNCompleteColumn(), *others)


@contextmanager
def stoppable(console: Console, sentence: Callable[[], str]) -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, by an exception, with 143 as its exit code; of both, `sentence` tells
    what there is already.
    """
    catches = threading.current_thread() is threading.main_thread()  # Python lets no other thread do so
    if catches:
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print(sentence(), highlight=False, markup=False)
        raise
    finally:
        if catches:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar over so many steps, and what to call with the name of each as it begins: the one before is done then."""
    with progress(console) as bars:
        task, done = bars.add_task("", total=total), itertools.count()
        yield lambda name: bars.update(task, completed=next(done), description=name)
        bars.update(task, completed=total, description="done")
