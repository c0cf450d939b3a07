"""What pages are made of, beside line charts: bars, tables, tiles and the grid of cards."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sd_lightning.report.charts import is_narrow, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def stacked(axes: Axes, names: Sequence[str], bars: Sequence[Sequence[float]], colours: Sequence[str]) -> None:
    """Draw a horizontal bar for each name, the first at the top, with its sum at the right edge; see `label_bars`.

    Args:
        axes: Where to draw; the caller sets the limits and the label of the lower axis.
        names: One for each bar.
        bars: The parts of each bar, from the left.
        colours: One for each part.
    """
    places = range(len(names))
    left = [0.0] * len(names)
    for column, colour in zip(zip(*bars), colours):
        axes.barh(places, column, left=left, color=colour, height=bar_width(axes), linewidth=0)
        left = [a + b for a, b in zip(left, column)]
    label_bars(axes, names, [number(total) for total in left])


def label_bars(axes: Axes, names: Sequence[str], values: Sequence[str]) -> None:
    """Write names at the left of bars and values at the right; in a drawing for a phone, both above each bar.

    Args:
        axes: Has a bar at each whole number.
        names: From the top.
        values: As texts.
    """
    from matplotlib.ticker import MaxNLocator

    narrow = is_narrow(axes)
    for place, (name, value) in enumerate(zip(names, values)):
        style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8.5 if narrow else 8}
        height = place - 0.3 if narrow else place
        axes.text(1.0, height, value, ha="right", va="bottom" if narrow else "center", **style)
        if narrow:
            axes.text(0.0, height, name, ha="left", va="bottom", **style)
    axes.set_yticks([] if narrow else range(len(names)), [] if narrow else names)
    axes.set_ylim(len(names) - 0.6, -0.9 if narrow else -0.6)
    if narrow:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", linewidth=0.8)


def bar_width(axes: Axes) -> float:
    """Return the height of a bar, of the room that it has: less where its name stands above it."""
    return 0.42 if is_narrow(axes) else 0.62


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
    # On a phone each line is a block, and these stand beside its cells.
    titles = "; ".join(f"--h{place}: {_css_text(each)}" for place, each in enumerate(head, 1))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    table = f'<table class="plain" style="{html.escape(titles)}"><tr>{cells}</tr>{body}</table>'
    return f'<div class="card scroll">{table}</div>'


def _css_text(text: str) -> str:
    escaped = text.replace("\\", "\\5c ").replace("'", "\\27 ")
    return f"'{escaped}'"


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
