"""Progress of long work: bars in a terminal, and a line now and then in a file."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID, TextColumn
from rich.text import Text

# Outside a terminal, seconds between two lines about the same task.
SILENCE = 30.0
# The last seconds, whose speed says how much time is left; a step of training can take minutes.
SPEED_PERIOD = 3600.0


class Bars(rich_progress.Progress):
    """Bars in a terminal; elsewhere a plain line when a task begins and every `SILENCE` seconds."""

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._show_line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._show_line(task_id)

    def _show_line(self, task_id: TaskID) -> None:
        if self.console.is_terminal or not self.live.is_started:
            return
        task, now = next(task for task in self.tasks if task.id == task_id), self.get_time()
        description, when = task.fields.get("shown", (None, now))  # in the last line about this task
        if task.finished or not task.visible or (task.description == description and now - when < SILENCE):
            return
        task.fields["shown"] = task.description, now
        parts = [f"{Amount().render(task)} {task.description}".strip(), task.fields.get("detail")]
        if parts[1]:
            parts.append(str(Time().render(task)))
        self.console.print(", ".join(filter(None, parts)), highlight=False, markup=False, soft_wrap=True)


class Amount(rich_progress.ProgressColumn):
    """How much of a task is done: its field `amount` or, without one, the steps as m/n."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text(task.fields["amount"]) if "amount" in task.fields else MofNCompleteColumn().render(task)


class Detail(rich_progress.ProgressColumn):
    """What a task says about itself in its field `detail`."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text(task.fields.get("detail", ""))


class Time(rich_progress.ProgressColumn):
    """The time left or, of a finished task, the time that it took."""

    def render(self, task: rich_progress.Task) -> Text:
        if task.finished_time is not None:
            return Text(str(timedelta(seconds=round(task.finished_time))))
        left = task.time_remaining
        return Text("" if left is None else f"{timedelta(seconds=round(left))} left")


def progress(console: Console, **options: Any) -> Bars:
    what = (TextColumn("{task.description}"), rich_progress.BarColumn(), Amount(), Detail(), Time())
    return Bars(*what, console=console, speed_estimate_period=SPEED_PERIOD, **options)


@contextmanager
def stoppable(console: Console, sentence: Callable[[], str]) -> Iterator[None]:
    """Turn SIGTERM into `SystemExit(143)`, and print `sentence()` when SIGTERM or Ctrl-C stops the work."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # Python allows handlers only there
    if in_main_thread:
        before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print(sentence(), highlight=False, markup=False)
        raise
    finally:
        if in_main_thread:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar over `total` steps; call the result with the name of each step as it begins."""
    with progress(console) as bars:
        task, done = bars.add_task("", total=total), itertools.count()
        yield lambda name: bars.update(task, completed=next(done), description=name)
        bars.update(task, completed=total, description="done")
