"""Drawings in the colours of the page: as inline SVG for light and dark pages and phones, and as PNG."""

from __future__ import annotations

import functools
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.document import card
from sd_lightning.report.metrics import wants_log_axis
from sd_lightning.storage import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INKS = {name: name for name in ("--ink", "--muted", "--rule")}
LINES = {name: name for name in ("--line-1", "--line-2", "--line-3")}
AREAS = {name: name for name in (f"--area-{number}" for number in range(1, 9))}
"""CSS variable -> name of its colour while something is :func:`drawn`."""
_PLACEHOLDERS = {name: f"#{place:02x}{place:02x}0f" for place, name in enumerate((*INKS, *LINES, *AREAS), 1)}
"""Colours that matplotlib writes into an SVG, in which CSS variables replace them."""


@dataclass(frozen=True)
class Panel:
    """A chart: a figure of a page, or a part of a picture."""

    title: str
    """Heading; unique on the page."""
    draw: Callable[[Axes], None]
    """Fills the axes, in the colours of ``AREAS`` and the lines."""
    keys: Sequence[tuple[str, str, str]] = ()
    """CSS variable, label and value of each colour."""
    note: str = ""
    """How to read it."""
    wide: bool = False
    """Whether it spans the page's whole width."""
    height: float | None = None
    """Inches on the page; that of a line chart if not given."""

    def figure(self) -> str:
        """Return the chart as a figure of a page, as HTML."""
        svg = render_svg(self.title, self.draw, wide=self.wide, height=self.height)
        return card(self.title, html.escape(self.note), keys=self.keys, picture=svg, wide=self.wide)


def render_svg(label: str, draw: Callable[[Axes], None], *, wide: bool, height: float | None = None) -> str:
    """Draw a figure for pages of both widths and return it as two SVG elements, of which the page shows one.

    Args:
        label: Description for screen readers, unique on the page.
        draw: Fills the axes, in the colours of ``AREAS`` and the lines; called once for each.
        wide: Whether it spans the page's whole width.
        height: Inches; that of a line chart if not given.
    """
    sizes = {
        "at-wide": (10.4, height or 3.4) if wide else (5.1, height or 2.7),
        "at-narrow": (NARROW, NARROW_BARS * height if height else 2.9),
    }
    elements = []
    for kind, size in sizes.items():
        with drawn(size=size, colours=_PLACEHOLDERS, hashsalt=f"{label}, {kind}") as figure:
            draw(figure.add_subplot())
            stream = io.StringIO()
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        elements.append(_themed(stream.getvalue(), label, kind))
    return "".join(elements)


NARROW = 4.0
"""Width of a drawing for a phone, inches: its text is then as large as the page's notes."""
NARROW_BARS = 1.35
"""How much higher bars are there: names and values stand above them."""


def is_narrow(axes: Axes) -> bool:
    """Return whether a drawing is for a phone."""
    return bool(axes.figure.bbox.width <= NARROW * axes.figure.dpi)


@contextmanager
def drawn(*, size: tuple[float, float], colours: Mapping[str, str], hashsalt: str | None = None) -> Iterator[Figure]:
    """Yield an empty figure in the style of the page.

    Args:
        size: Width and height, inches.
        colours: CSS variable -> colour; meanwhile the variable's name is the colour's in matplotlib.
        hashsalt: What the ids of an SVG depend on.
    """
    import matplotlib
    from matplotlib.colors import get_named_colors_mapping
    from matplotlib.figure import Figure

    named = get_named_colors_mapping()
    for name in _PLACEHOLDERS:
        named[name] = colours[name]
    texts = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    rules = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
        "svg.hashsalt": hashsalt,  # ids are reproducible and differ between the charts of a page
        "font.size": 9,
        **dict.fromkeys(texts, INKS["--muted"]),
        **dict.fromkeys(rules, INKS["--rule"]),
    }
    with matplotlib.rc_context(style):
        yield Figure(figsize=size, layout="constrained")


def _themed(svg: str, label: str, kind: str) -> str:
    """Turn matplotlib's SVG document into an element whose size, font and colours the page sets."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib's style sheet would apply to the whole page.
    svg = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg class="{kind}" role="img" aria-label="{html.escape(label)}"', 1)
    svg = re.sub(r"font: (\S+px) [^;\"]*", r"font-size: \1", svg)
    for variable, colour in _PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


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
    with drawn(size=size, colours=light) as figure, atomic.new_file(path) as unfinished:
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        figure.set_facecolor(light["--card"])
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=light["--ink"])
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(count, columns, place)
            axes.set_facecolor(light["--card"])
            panel.draw(axes)
            _entitle(axes, panel, width)
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

    patches = [Patch(color=ink, label=f"{label} {value}".strip()) for ink, label, value in panel.keys]
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


def scale_curves(
    axes: Axes,
    values: Sequence[float],
    *,
    across: str = "optimizer step",
    may_be_log: bool = False,
    from_zero: bool = False,
    percent: bool = False,
    wide: bool = False,
) -> None:
    """Set the axes of a chart whose curves are drawn.

    Args:
        axes: The chart.
        values: Of all curves.
        across: Label of the lower axis, which counts.
        may_be_log: The value axis is logarithmic where the values span more than a decade.
        from_zero: It begins at zero, and a line marks zero where values are negative.
        percent: Values are fractions; the axis shows them in per cent.
        wide: There is room for more numbers on the lower axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if from_zero and min(values) >= 0:
        axes.set_ylim(bottom=0, top=max(values) * 1.08 or 1)
    elif from_zero:
        axes.axhline(0, color=INKS["--muted"], linewidth=1)
    if may_be_log and wants_log_axis(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        ticks = axes.get_yticks()
        axes.set_yticks(ticks[(ticks >= axes.get_ylim()[0]) & (ticks <= axes.get_ylim()[1])])
        axes.set_yticklabels(tick_labels(axes.get_yticks().tolist(), percent=percent))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if wide and not is_narrow(axes) else 5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(across)
    tidy(axes)


def tick_labels(values: Sequence[float], *, percent: bool = False) -> list[str]:
    """Format the values of an axis alike: the most digits that any needs, and one power of ten if all are small."""
    largest = max(map(abs, values), default=0.0)
    power = math.floor(math.log10(largest)) if 0 < largest < 1e-3 and not percent else 0
    values = [value * (100 if percent else 10.0**-power) for value in values]
    for digits in range(8):
        texts = [f"{value:,.{digits}f}" for value in values]
        errors = (abs(float(text.replace(",", "")) - value) for text, value in zip(texts, values))
        if max(errors, default=0.0) <= 1e-6 * max(map(abs, values), default=0.0):
            break
    unit = " %" if percent else f"e{power}" if power else ""
    return [text + unit if value or percent else text for text, value in zip(texts, values)]


def tidy(axes: Axes) -> None:
    """Keep only horizontal grid lines and the lower axis."""
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(left=False, length=3)
