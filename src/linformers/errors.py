"""How a command ends: a user's mistake in one sentence, one of ours with its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape


class UserError(ValueError):
    """Something that the user can fix: a wrong argument, a missing file, a damaged checkpoint.

    The message is one sentence that names the argument, its value and what would be right. The command line prints it
    without a traceback; every other exception is a bug of ours and keeps its traceback.
    """


def run_cli(command: Callable[[], object]) -> None:
    """Run a command and exit; what a user got wrong is told in one sentence, with exit code 2."""
    try:
        command()
    except Exception as error:
        if (sentence := _sentence(error)) is None:
            raise
        # One line, as a log keeps it and `reproduce` reads it there; a terminal breaks it by itself.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(sentence)}", highlight=False, soft_wrap=True)
        _leave(2)
    except SystemExit as ended:
        _leave(ended.code)


def _sentence(error: Exception) -> str | None:
    """What is said of an error that a user can do something about; `None` of one that is ours."""
    from concurrent.futures.process import BrokenProcessPool

    from torch import OutOfMemoryError

    if isinstance(error, OutOfMemoryError):
        asked_for = str(error).splitlines()[0].split(". ")[:2]  # behind it, much of how torch manages memory
        reason = ". ".join(asked_for).rstrip(".")
        return f"{reason}. Take fewer rows at once: rows_at_once=… of a recipe, --batch-size or --tokens of a command."
    if isinstance(error, BrokenProcessPool):
        return "a worker process was killed, perhaps for want of memory; take fewer with --workers"
    return str(error) if isinstance(error, ValueError | OSError | ArithmeticError) else None


def _leave(code: int | str | None) -> NoReturn:
    """Exit. A process that torchrun started does so without taking the interpreter down first: threads of the process
    group may still hold tensors, and one that lets go of them in an interpreter that is gone aborts the process.
    """
    if isinstance(code, int) and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
