"""Errors: what the user can fix ends in one sentence, and a bug of ours keeps its traceback."""

from __future__ import annotations

import errno

SMALLER = "Use a smaller batch: rows_at_once=… in a recipe, --batch-size or --tokens of a command."


def counted(number: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class UserError(ValueError):
    """Something that the user can fix: a wrong argument, a missing file, a damaged checkpoint.

    The message is one sentence that names the argument, its value and what would be right.
    """


def explain(error: Exception) -> str | None:
    """One sentence about an error that the user can fix, or `None` for a bug of ours."""
    from torch import OutOfMemoryError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"there is not enough memory. {SMALLER}"
    if isinstance(error, OutOfMemoryError):
        first, second, *_ = [*str(error).splitlines()[0].split(". "), ""]  # the rest is about torch's allocator
        reason = f"{first}. {second}".rstrip(". ")
        return f"{reason}. {SMALLER}"
    return None
