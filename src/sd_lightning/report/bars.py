"""What pages are made of, beside line charts: bars, tables, tiles and the grid of cards."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sd_lightning.report.charts import tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def stacked(axes: Axes, names: Sequence[str], bars: Sequence[Sequence[float]], colours: Sequence[str]) -> None:
    """Draw a horizontal bar for each name, the first at the top, with its sum at the right edge.

    Args:
        axes: Where to draw; the caller sets the limits and the label of the lower axis.
        names: One for each bar.
        bars: The parts of each bar, from the left.
        colours: One for each part.
    """
    places = range(len(names))
    left = [0.0] * len(names)
    for column, colour in zip(zip(*bars), colours):
        axes.barh(places, column, left=left, color=colour, height=0.62, linewidth=0)
        left = [a + b for a, b in zip(left, column)]
    for place, total in zip(places, left):
        axes.text(1.0, place, number(total), transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", linewidth=0.8)


def bar_height(bars: Sequence[object]) -> float:
    """Return the height of a chart with so many bars, inches."""
    return 0.9 + 0.27 * len(bars)


def number(value: float) -> str:
    """Format a value with three digits, or with all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rows(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML.

    Args:
        head: Titles of the columns, as text.
        lines: Cells of each line, as text.
    """
    cells = "".join(f"<th scope=col>{html.escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="card scroll"><table class="plain"><tr>{cells}</tr>{body}</table></div>'


def charts(*cards: str) -> str:
    """Return cards as a grid, as HTML."""
    return f'<div class="charts">{"".join(cards)}</div>'


def tiles(shown: Sequence[tuple[str, str]]) -> str:
    """Return values with their labels as large tiles, as HTML."""
    each = (
        f'<div class="card tile"><p class="value">{html.escape(value)}</p><p>{html.escape(label)}</p></div>'
        for value, label in shown
    )
    return f'<div class="tiles">{"".join(each)}</div>'
