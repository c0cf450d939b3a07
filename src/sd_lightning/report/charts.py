"""Charts of a run's metrics."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sd_lightning.report.document import card, charts
from sd_lightning.report.drawing import LINES, Panel, number, scale_curves
from sd_lightning.report.metrics import Series, matching, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    percent: bool = False
    """Values are fractions, shown in per cent."""
    wide: bool = False
    required: bool = True
    """Say so if nothing was logged; other charts are then omitted."""
    from_zero: bool = False
    """The value axis begins at zero, and a line marks it where values are negative."""
    may_be_log: bool = False


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
        percent=True,
        required=False,
        from_zero=True,
    ),
    Chart(
        title="Throughput",
        note="Images per second over all processes, without validation, sampling and saving.",
        lines=(Line("images per second", ("perf/images_per_second", "*images_per_second")),),
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
        percent=True,
        required=False,
        from_zero=True,
    ),
)


def render_charts(metrics: Mapping[str, Series], shown: Sequence[Chart] = CHARTS) -> str:
    """Return the charts as HTML figures, followed by a sentence that names what was not logged.

    Args:
        metrics: Points by metric name. Their steps count from 0, as in Lightning; the charts count from 1, as pictures
            and checkpoints do. A chart whose curves all have a single point is left out.
        shown: The charts.
    """
    figures, absent = [], []
    for chart in shown:
        figure = _figure(chart, metrics)
        if figure is not None:
            figures.append(figure)
        elif chart.required:
            absent.append(f"{chart.title.lower()} (<code>{html.escape(chart.lines[0].patterns[0])}</code>)")
    out = charts(*figures) if figures else ""
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
    keys = []
    for (label, points, is_smoothed), ink in zip(curves, LINES):
        last = (smoothed(points) if is_smoothed else points)[-1][1]
        keys.append((ink, label, f"{100 * last:.3g} %" if chart.percent else number(last)))
    draw = partial(_draw, chart=chart, curves=curves)
    return Panel(chart.title, draw, keys, " ".join(notes), wide=chart.wide).figure()


def _draw(axes: Axes, chart: Chart, curves: Sequence[tuple[str, Series, bool]]) -> None:
    for (_, series, is_smoothed), colour in zip(curves, LINES.values()):
        shown = smoothed(series) if is_smoothed else series
        if shown is not series:
            axes.plot(*zip(*series), color=colour, alpha=0.3, linewidth=1)
        # Few points get markers, which show the measured values on the curve.
        axes.plot(*zip(*shown), color=colour, linewidth=2, marker="o" if len(shown) <= 30 else "", markersize=3.5)
    values = [value for _, series, _ in curves for _, value in series]
    scale_curves(
        axes,
        values,
        may_be_log=chart.may_be_log,
        from_zero=chart.from_zero,
        percent=chart.percent,
        wide=chart.wide,
    )
