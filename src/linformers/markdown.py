"""Tables of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, with an empty one behind it."""
    lines = [_row(header), "|" + "---|" * len(header), *map(_row, rows)]
    return [*lines, ""]


def shown_table(shown: Table) -> list[str]:
    """The same of a table that the console shows."""
    columns = [[str(column.header), *map(str, column.cells)] for column in shown.columns]
    header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in zip(*columns, strict=True))
    return table(header, rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
