"""Charts of pages as PNG, in the colours of the light page."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.charts import AREAS, INKS, LINES, drawn
from sd_lightning.storage import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One of the charts of a picture."""

    title: str
    draw: Callable[[Axes], None]
    """Fills the axes, in the colours of ``AREAS`` and the lines."""
    keys: Sequence[tuple[str, str, str]] = ()
    """CSS variable, label and value of each colour."""


def render_panels(path: Path, title: str, panels: Sequence[Panel], *, columns: int, size: tuple[float, float]) -> Path:
    """Draw several charts as one PNG of 160 dpi, in the colours of the light page.

    Args:
        path: The file; an earlier one is replaced atomically.
        title: Text at the top left.
        panels: The charts, row by row.
        columns: Charts in a row.
        size: Width and height of each chart, inches, without the key of its colours.
    """
    light = light_colours()
    count = math.ceil(len(panels) / columns)
    keys = max(math.ceil(len(panel.keys) / _key_columns(panel, size[0])) if panel.keys else 0 for panel in panels)
    text = _KEY_HEIGHT * keys * count + 0.3 * (1 + title.count("\n"))
    size, width = (size[0] * columns, size[1] * count + text), size[0]
    with drawn(size=size, inks=light) as figure, atomic.new_file(path) as unfinished:
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        figure.set_facecolor(light["--card"])
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=light["--ink"])
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(count, columns, place)
            axes.set_facecolor(light["--card"])
            panel.draw(axes)
            _entitle(axes, panel, width)
        _recolour(figure, light)
        figure.savefig(unfinished, format="png", dpi=160)
    return path


_KEY_HEIGHT = 0.2
"""Of a line in a key, inches."""


def _key_columns(panel: Panel, width: float) -> int:
    """Return how many columns of a panel's key fit into so many inches, at most 4."""
    longest = max(len(f"{label} {value}") for _, label, value in panel.keys)
    return max(1, min(4, len(panel.keys), int((width - 0.8) / (0.4 + 0.072 * longest))))


def _entitle(axes: Axes, panel: Panel, width: float) -> None:
    """Write a panel's title and the key of its colours above it, at the left."""
    from matplotlib.patches import Patch

    colours = {**INKS, **LINES, **AREAS}
    patches = [Patch(color=colours[ink], label=f"{label} {value}".strip()) for ink, label, value in panel.keys]
    if patches:
        title = panel.title or None
        style: dict[str, Any] = {"alignment": "left", "frameon": False, "borderaxespad": 0.2, "columnspacing": 1.2}
        style |= {"handlelength": 1, "handleheight": 0.4, "ncols": _key_columns(panel, width)}
        legend = axes.legend(handles=patches, title=title, loc="lower left", bbox_to_anchor=(0, 1), **style)
        legend.get_title().set(fontweight="bold", color=INKS["--ink"], fontsize=10)
    elif panel.title:
        axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=INKS["--ink"])


@functools.cache
def light_colours() -> dict[str, str]:
    """Return the CSS variables of the light page with their colours, from ``page.html``."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", page[: page.index("prefers-color-scheme")]))


def _recolour(figure: Figure, colours: Mapping[str, str]) -> None:
    """Replace the placeholders by colours, in all that was drawn with them."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    known = {placeholder: colours[name] for name, placeholder in {**INKS, **LINES, **AREAS}.items()}

    def new(colour: Any) -> tuple[float, float, float, float]:
        rgba = to_rgba(colour)
        return to_rgba(known.get(to_hex(rgba), rgba[:3]), rgba[3])

    for artist in figure.findobj():
        if isinstance(artist, Line2D):
            markers = new(artist.get_markerfacecolor()), new(artist.get_markeredgecolor())
            artist.set_color(new(artist.get_color()))
            artist.set(markerfacecolor=markers[0], markeredgecolor=markers[1])
        elif isinstance(artist, Patch):
            artist.set(facecolor=new(artist.get_facecolor()), edgecolor=new(artist.get_edgecolor()))
        elif isinstance(artist, Collection):
            faces, edges = ([new(each) for each in of] for of in (artist.get_facecolor(), artist.get_edgecolor()))
            artist.set(facecolor=faces, edgecolor=edges)
        elif isinstance(artist, Text):
            artist.set_color(new(artist.get_color()))
