"""Tables on the console."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], at_left: Collection[int] | None = None) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: Cells; the first row may be a header.
        at_left: Columns of text, which begin at the left; numbers end at the right. By default the first, and those
            with a space or ``=`` in the last row.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if at_left is None:
        at_left = [i for i in range(len(widths)) if i == 0 or " " in rows[-1][i] or "=" in rows[-1][i]]
    lines = (
        "  ".join(cell.ljust(w) if i in at_left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    )
    return [line.rstrip() for line in lines]
