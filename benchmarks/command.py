"""What the scripts of this folder share: one sentence where a run cannot go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def one_sentence() -> Iterator[None]:
    """What a user got wrong, or stopped, ends in one sentence; the exit codes are those of `linformers`."""
    console = Console(stderr=True)
    try:
        yield
    except (ValueError, OSError) as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("stopped; what was measured before is written", highlight=False)
        sys.exit(130)
