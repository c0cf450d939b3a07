"""Messages about the columns of a table: which there are, and which was meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from sd_lightning._errors import UsageError


def check_column(option: str, column: str, columns: Sequence[str], where: str) -> None:
    """Raise a ``UsageError`` if a table has no such column.

    Args:
        option: The setting that names the column, e.g. ``image_column``.
        column: Its value.
        columns: All columns of the table.
        where: The table, for the message.
    """
    if column not in columns:
        near = next(iter(difflib.get_close_matches(column, columns, n=1)), "<one of them>")
        raise UsageError(
            f"data.{option}={column}: {where} has the columns {', '.join(columns)}; write data.{option}={near}"
        )


def choose(option: str, columns: Sequence[str]) -> str:
    """Return the remedy for a column of the wrong kind, given those of the right one."""
    if not columns:
        return "it has none; choose another dataset"
    return f"write data.{option}={columns[0]}" + (f", or {', '.join(columns[1:])}" if len(columns) > 1 else "")
