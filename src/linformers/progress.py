"""The progress bar of everything that takes long: what is done, how much of it, how fast, and the time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress(console: Console, count: ProgressColumn | None = None, *others: ProgressColumn) -> Progress:
    """Bars with a count of what is done, by default “3/10”, and further columns."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        count or MofNCompleteColumn(),
        *others,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
