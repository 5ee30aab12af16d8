"""Errors: what the user can fix ends in one sentence, and a bug of ours keeps its traceback."""

from __future__ import annotations

import errno


def counted(number: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class UserError(ValueError):
    """Something that the user can fix: a wrong argument, a missing file, a damaged checkpoint.

    The message is one sentence that names the argument, its value and what would be right.
    """


class MissingColumnError(UserError):
    """A table does not have a column that the user named, or the default one."""


def is_out_of_memory(error: Exception) -> bool:
    from torch import OutOfMemoryError

    return isinstance(error, MemoryError | OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: Exception) -> str | None:
    """One sentence about an error that the user can fix, or `None` for a bug of ours."""
    from torch import OutOfMemoryError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, OutOfMemoryError):
        first, second, *_ = [*str(error).splitlines()[0].split(". "), ""]  # the rest is about torch's allocator
        return f"{first}. {second}".rstrip(". ")
    return "there is not enough memory" if is_out_of_memory(error) else None
