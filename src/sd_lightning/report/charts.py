"""Line charts as inline SVG whose colours are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sd_lightning.report.metrics import Series, matching, smoothed, wants_log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INKS = {"--ink": "#010101", "--muted": "#020202", "--rule": "#030303"}
LINES = {"--line-1": "#040404", "--line-2": "#050505", "--line-3": "#060606"}
AREAS = {f"--area-{number}": f"#0{number}0{number}0f" for number in range(1, 9)}
# Placeholder colours: matplotlib writes them into the SVG, then _themed replaces them by the CSS variables.


@dataclass(frozen=True)
class Line:
    """One kind of curve in a chart."""

    label: str
    """Legend text; the metric's name is used if several metrics match."""
    patterns: tuple[str, ...]
    """File-name patterns of metric names; the first with any match is used."""
    smoothed: bool = False
    """Draw the raw points faintly under a smoothed curve."""


@dataclass(frozen=True)
class Chart:
    """One chart of the report."""

    title: str
    note: str
    """One sentence on how to read it."""
    lines: tuple[Line, ...]
    number: Callable[[float], str] = "{:.3g}".format
    """Formats a value."""
    percent: bool = False
    """Values are fractions; the axis shows them in per cent."""
    wide: bool = False
    required: bool = True
    """Say so if nothing was logged; other charts are then omitted."""
    from_zero: bool = False
    """The value axis begins at zero, and a line marks it where values are negative."""
    may_be_log: bool = False


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


CHARTS = (
    Chart(
        title="Loss",
        note="Weighted training loss, raw and smoothed, and the loss on held-out data.",
        lines=(
            Line("training, smoothed", ("train/loss", "train/loss_step", "train_loss", "loss"), smoothed=True),
            Line("held out", ("val/loss", "val_loss", "val/loss_*")),
        ),
        wide=True,
        may_be_log=True,
    ),
    Chart(
        title="Caption gap",
        note="Held-out loss with wrong captions minus right captions. Near zero means the prompt is ignored.",
        lines=(Line("gap", ("*caption_gap",)),),
        from_zero=True,
    ),
    Chart(
        title="Prompted accuracy",
        note="Share of generated images that an independent classifier reads as prompted.",
        lines=(Line("accuracy", ("*prompted_accuracy",)),),
        number=_percent,
        percent=True,
        required=False,
        from_zero=True,
    ),
    Chart(
        title="Throughput",
        note="Images per second over all processes, without validation, sampling and saving.",
        lines=(Line("images per second", ("perf/images_per_second", "*images_per_second")),),
        number=_rate,
        from_zero=True,
    ),
    Chart(
        title="Learning rate",
        note="As the schedule set it.",
        lines=(Line("learning rate", ("train/lr", "lr", "lr-*", "*/lr*", "*learning_rate*")),),
        from_zero=True,
    ),
    Chart(
        title="Use of the hardware",
        note="Share of the step spent waiting for data, and model FLOPs utilisation (MFU).",
        lines=(Line("data wait", ("perf/data_wait",)), Line("MFU", ("perf/mfu",))),
        number=_percent,
        percent=True,
        required=False,
        from_zero=True,
    ),
)


def render_charts(metrics: Mapping[str, Series], charts: Sequence[Chart] = CHARTS) -> str:
    """Return the charts as HTML figures, followed by a sentence that names what was not logged.

    Args:
        metrics: Points by metric name. Their steps count from 0, as in Lightning; the charts count from 1, as pictures
            and checkpoints do. A chart whose curves all have a single point is left out.
        charts: What to draw, in this order.
    """
    figures, absent = [], []
    for chart in charts:
        figure = _figure(chart, metrics)
        if figure is not None:
            figures.append(figure)
        elif chart.required:
            absent.append(f"{chart.title.lower()} (<code>{html.escape(chart.lines[0].patterns[0])}</code>)")
    out = f'<div class="charts">{"".join(figures)}</div>' if figures else ""
    return out + (f'<p class="absent">Not logged in this run: {", ".join(absent)}.</p>' if absent else "")


def _figure(chart: Chart, metrics: Mapping[str, Series]) -> str | None:
    """Return a chart as HTML; "" if all curves have a single point, None if nothing was logged."""
    curves: list[tuple[str, Series, bool]] = []
    dropped = 0
    for line in chart.lines:
        names = matching(list(metrics), line.patterns)
        for name in names:
            series = [(step + 1, value) for step, value in metrics[name] if math.isfinite(value)]
            dropped += len(metrics[name]) - len(series)
            if series:
                curves.append((line.label if len(names) == 1 else name, series, line.smoothed))
    if not curves:
        note = f"All {dropped} logged values are NaN or infinite: there is nothing to draw."
        return card(chart.title, note, wide=chart.wide) if dropped else None
    hidden = max(0, len(curves) - len(LINES))
    curves = curves[: len(LINES)]
    notes = [chart.note]
    if dropped:
        notes.append(f"{dropped} NaN or infinite {'value is' if dropped == 1 else 'values are'} not drawn.")
    if hidden:
        notes.append(f"{hidden} more {'curve is' if hidden == 1 else 'curves are'} in the CSV.")
    if not dropped and all(len(series) == 1 for _, series, _ in curves):
        return ""
    keys = [
        (ink, label, chart.number((smoothed(series) if is_smoothed else series)[-1][1]))
        for (label, series, is_smoothed), ink in zip(curves, LINES)
    ]
    svg = render_svg(f"{chart.title} by optimizer step", lambda axes: _draw(axes, chart, curves), wide=chart.wide)
    return card(chart.title, " ".join(notes), keys=keys, picture=svg, wide=chart.wide)


def card(
    title: str, note: str, *, keys: Sequence[tuple[str, str, str]] = (), picture: str = "", wide: bool = False
) -> str:
    """Return a figure of the page: a heading with the key of its colours, a picture, and a note below it.

    Args:
        title: Heading.
        note: The note, as HTML.
        keys: CSS variable, label and value of each colour.
        picture: The picture, as SVG.
        wide: Whether it spans the page's whole width.
    """
    legend = "".join(
        f'<span class="key" style="--key: var({ink})">{html.escape(label)} <b>{html.escape(value)}</b></span>'
        for ink, label, value in keys
    )
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h3>{html.escape(title)}</h3>'
        f'<p class="keys">{legend}</p></figcaption>{picture}<p class="note">{note}</p></figure>'
    )


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
    found = []
    for kind, size in sizes.items():
        with drawn(size=size, inks=INKS, hashsalt=f"{label}, {kind}") as figure:
            draw(figure.add_subplot())
            stream = io.StringIO()
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        found.append(_themed(stream.getvalue(), label, kind))
    return "".join(found)


NARROW = 4.0
"""Width of a drawing for a phone, inches: its text is then as large as the page's notes."""
NARROW_BARS = 1.35
"""How much higher bars are there: names and values stand above them."""


def is_narrow(axes: Axes) -> bool:
    """Return whether a drawing is for a phone."""
    return bool(axes.figure.bbox.width <= NARROW * axes.figure.dpi)


@contextmanager
def drawn(*, size: tuple[float, float], inks: Mapping[str, str], hashsalt: str | None = None) -> Iterator[Figure]:
    """Yield an empty figure in the style of the page.

    Args:
        size: Width and height, inches.
        inks: CSS variable -> colour of texts and rules.
        hashsalt: What the ids of an SVG depend on.
    """
    import matplotlib
    from matplotlib.figure import Figure

    texts = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    rules = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
        "svg.hashsalt": hashsalt,  # ids are reproducible and differ between the charts of a page
        "font.size": 9,
        **dict.fromkeys(texts, inks["--muted"]),
        **dict.fromkeys(rules, inks["--rule"]),
    }
    with matplotlib.rc_context(style):
        yield Figure(figsize=size, layout="constrained")


def _draw(axes: Axes, chart: Chart, curves: Sequence[tuple[str, Series, bool]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for (_, series, is_smoothed), colour in zip(curves, LINES.values()):
        shown = smoothed(series) if is_smoothed else series
        if shown is not series:
            axes.plot(*zip(*series), color=colour, alpha=0.3, linewidth=1)
        # Few points get markers, which show the measured values on the curve.
        axes.plot(*zip(*shown), color=colour, linewidth=2, marker="o" if len(shown) <= 30 else "", markersize=3.5)
    values = [value for _, series, _ in curves for _, value in series]
    if chart.may_be_log and wants_log_axis(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if chart.from_zero:
        if min(values) >= 0:
            axes.set_ylim(bottom=0, top=max(values) * 1.08 or 1)
        else:
            axes.axhline(0, color=INKS["--muted"], linewidth=1)
    if axes.get_yscale() == "linear":  # the limits are final
        ticks = axes.get_yticks()
        axes.set_yticks(ticks[(ticks >= axes.get_ylim()[0]) & (ticks <= axes.get_ylim()[1])])
        axes.set_yticklabels(tick_labels(axes.get_yticks().tolist(), percent=chart.percent))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if chart.wide and not is_narrow(axes) else 5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step")
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
    for variable, colour in {**INKS, **LINES, **AREAS}.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
