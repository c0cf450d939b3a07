"""``compare.html`` and ``compare.png``: runs side by side."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.document import charts, rows, section, tiles, write_document
from sd_lightning.report.drawing import (
    AREAS,
    INKS,
    Panel,
    bar_height,
    number,
    render_panels,
    scale_curves,
    stacked,
    tidy,
)
from sd_lightning.report.metrics import smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INKS = [f"--area-{number}" for number in (1, 3, 5, 8, 2, 4, 7, 6)]
"""Colours of the runs, the most different first."""
_DASHES = ("solid", "dashed", "dotted")
"""Styles of the curves: each for as many runs as there are colours."""
_MOST = len(_INKS) * len(_DASHES)
"""Runs in a chart."""
_MOST_COLUMNS = 6
"""Runs with a column of their own in the table of settings."""
_FEW = 4
"""Runs that can be named one by one, and curves of which each may be wider than the one that is drawn over it."""
_NAME = 24
"""Characters of a run's name in a chart."""

Data = Mapping[str, Any]
"""What ``compare.json`` holds; ``sd_lightning.apps.compare`` makes it."""


def write_compare_page(path: Path, data: Data) -> Path:
    """Write ``compare.html``: one file that opens anywhere, without a network and without JavaScript."""
    body = [_tiles(data), *(f'<p class="note">{html.escape(line)}</p>' for line in data["notes"])]
    sections = {
        "Settings that differ": _settings(data) if data["settings"] else "",
        "Speed": _cards(_rate_chart(data), _rates_chart(data)),
        "Scaling": _cards(_scaling_chart(data)),
        "Memory": _cards(_memory_chart(data)),
        "Cost": _cards(_cost_chart(data)),
        "Loss": _cards(_loss_chart(data), _images_chart(data)),
        "All numbers": _table(data),
        "Where the numbers are from": _provenance(data),
    }
    body += [section(title, content) for title, content in sections.items() if content]
    return write_document(path, data["title"], "comparison of runs", "\n".join(body))


def write_compare_picture(path: Path, data: Data) -> Path:
    """Write ``compare.png``: speed, memory, loss, and scaling, dollars or speed by step."""
    last = _scaling_chart(data) or _cost_chart(data) or _rates_chart(data)
    shown = [each for each in (_rate_chart(data), _memory_chart(data), _loss_chart(data), last) if each is not None]
    height = max(2.7, bar_height(data["runs"][:_MOST]))
    title = "\n".join(textwrap.wrap(data["title"], 110))
    panels = [
        # Values would make long keys too long.
        replace(panel, keys=[(ink, label, "" if len(panel.keys) > _FEW else value) for ink, label, value in panel.keys])
        for panel in shown
    ]
    return render_panels(path, title, panels, columns=min(2, len(shown)), size=(5.6, height))


def columns(runs: Sequence[Data]) -> dict[str, list[str]]:
    """Return the columns of the table: title -> a cell for each run, "-" where nothing is known."""

    def cells(key: str, form: Callable[[Any], str] = str) -> list[str]:
        return ["-" if run[key] is None else form(run[key]) for run in runs]

    metrics = [run["evaluation"].get("metrics", {}) for run in runs]
    evaluated = {name: [_with_interval(each.get(name)) for each in metrics] for name in dict.fromkeys(chain(*metrics))}
    return {
        "run": [str(run["name"]) for run in runs],
        "strategy": cells("strategy"),
        "devices": cells("devices"),
        "precision": cells("precision"),
        "batch": cells("batch_size"),
        "img/s": [_rate(run) for run in runs],
        "per device": cells("images_per_second_and_device", number),
        "speed-up": cells("speedup", "{:.2f} x".format),
        "peak GiB": cells("peak_gib", "{:.2f}".format),
        "memory": cells("memory_ratio", "{:.2f} x".format),
        "loss": cells("final_loss", "{:.4g}".format),
        "at step": cells("last_step", "{:,}".format),
        "$/million": cells("dollars_per_million", "{:,.2f}".format),
        **evaluated,
    }


def _with_interval(estimate: Data | None) -> str:
    if estimate is None:
        return "-"
    half = (estimate["high"] - estimate["low"]) / 2
    return f"{number(estimate['value'])} ± {number(float(f'{half:.2g}'))}"


def _rate(run: Data) -> str:
    rate, quartiles = run["images_per_second"], run["quartiles"]
    if rate is None or quartiles is None:
        return "-" if rate is None else number(rate)
    half = (quartiles[1] - quartiles[0]) / 2
    return f"{number(rate)} ± {number(float(f'{half:.2g}'))}"


def grouped(values: Sequence[str | None], names: Sequence[str]) -> list[str]:
    """Return each different value with the names of its runs, or their number if there are many."""
    groups = {value: [name for name, own in zip(names, values) if own == value] for value in values}

    def named(members: list[str]) -> str:
        return ", ".join(members) if len(members) <= _FEW else f"{len(members)} runs"

    return [f"{'-' if value is None else value} ({named(members)})" for value, members in groups.items()]


def _cards(*shown: Panel | None) -> str:
    """Return charts as a grid of cards, "" if there is nothing to draw."""
    panels = [each for each in shown if each is not None]
    alone = sum(not each.wide for each in panels) % 2  # none stands alone in a half of the page
    return charts(*(replace(each, wide=each.wide or bool(alone)).figure() for each in panels)) if panels else ""


def _tiles(data: Data) -> str:
    runs = data["runs"]
    baseline = runs[0]["name"]

    def tile(key: str, label: str, best: str, *, largest: bool) -> list[tuple[str, str]]:
        known = [run for run in runs if run[key] is not None]
        if len(known) < 2:
            return []
        first = (max if largest else min)(known, key=lambda run: run[key])
        against = f"{baseline}, the baseline, {best}" if first is runs[0] else f"{first['name']} against {baseline}"
        return [(f"{first[key]:.2f} x", f"{label}: {against}")]

    shown = tile("speedup", "images per second", "is the fastest", largest=True)
    shown += tile("memory_ratio", "peak memory", "takes the least", largest=False)
    priced = [run for run in runs if run["dollars_per_million"] is not None]
    if priced:
        cheapest = min(priced, key=lambda run: run["dollars_per_million"])
        shown.append((f"$ {cheapest['dollars_per_million']:,.2f}", f"for a million images: {cheapest['name']}"))
    return tiles(shown)


def _settings(data: Data) -> str:
    names = [run["name"] for run in data["runs"]]
    if len(names) > _MOST_COLUMNS:
        lines = [(key, " · ".join(grouped(values, names))) for key, values in data["settings"].items()]
        return rows(("setting", "values and their runs"), lines)
    lines = [(key, *("—" if value is None else value for value in values)) for key, values in data["settings"].items()]
    return rows(("setting", *names), lines)


def _ink(index: int) -> str:
    return _INKS[index % len(_INKS)]


def _short(name: str) -> str:
    """Shorten a name to what fits beside a bar."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[1 - _NAME // 2 :]}"


def _drawn(data: Data, key: str) -> list[tuple[int, Data]]:
    """Return the runs that have a value, with their places."""
    return [(index, run) for index, run in enumerate(data["runs"]) if run[key]][:_MOST]


def _left_out(data: Data, key: str) -> str:
    """Return a sentence on runs that a chart does not show."""
    have = sum(bool(run[key]) for run in data["runs"])
    lacking, more = len(data["runs"]) - have, have - len(_drawn(data, key))
    text = f" {lacking} {'run has' if lacking == 1 else 'runs have'} no such value." if lacking else ""
    return text + (f" {more} more runs are in the table only." if more else "")


def _bars(data: Data, key: str, title: str, unit: str, note: str) -> Panel | None:
    """Return a chart with a bar for each run that has a value."""
    shown = _drawn(data, key)
    if not shown:
        return None
    values = [run[key] for _, run in shown]
    bars = [[value if i == j else 0.0 for j in range(len(values))] for i, value in enumerate(values)]

    def draw(axes: Axes) -> None:
        stacked(axes, [_short(run["name"]) for _, run in shown], bars, [AREAS[_ink(index)] for index, _ in shown])
        ends = list(values)
        for place, (_, run) in enumerate(shown):
            if key == "images_per_second" and run["quartiles"]:
                low, high = run["quartiles"]
                axes.plot([low, high], [place, place], color=INKS["--ink"], linewidth=1.5, solid_capstyle="butt")
                ends.append(high)
        axes.set_xlim(0, 1.14 * max(ends))  # the values stand at the right
        axes.set_xlabel(unit)

    return Panel(title, draw, (), note + _left_out(data, key), wide=True, height=bar_height(shown))


def _rate_chart(data: Data) -> Panel | None:
    note = "On all devices together. The thin line spans the quartiles of the logged values."
    return _bars(data, "images_per_second", "Throughput", "images per second", note)


def _memory_chart(data: Data) -> Panel | None:
    note = "The most that the first rank's GPU held; on a CPU, that of its whole process."
    return _bars(data, "peak_gib", "Peak memory", "GiB", note)


def _cost_chart(data: Data) -> Panel | None:
    note = " ".join(f"$ {price:g} per hour and device: {source}." for price, source in prices(data))
    return _bars(data, "dollars_per_million", "Cost", "dollars for a million images", note)


def prices(data: Data) -> list[tuple[float, str]]:
    """Return the different prices of a device for an hour, with their sources."""
    return sorted({(run["price"], run["price_source"]) for run in data["runs"] if run["price"] is not None})


def _rates_chart(data: Data) -> Panel | None:
    note = "As it was logged; the first value is of a machine that warms up."
    return _curves(data, "rates", "Throughput by step", note, value="images_per_second")


def _loss_chart(data: Data) -> Panel | None:
    note = "Smoothed as in the reports of the runs; the last values are in the key."
    if 1 < sum(bool(run["losses"]) for run in data["runs"]) <= _FEW:
        note += " Where curves coincide, the wider ones lie below."
    return _curves(data, "losses", "Loss by step, smoothed", note, value="final_loss")


def _images_chart(data: Data) -> Panel | None:
    sizes = {run["batch_size"] for run in data["runs"] if run["losses"]}
    if len(sizes) < 2:  # else it is the same picture
        return None
    known = [{**run, "losses": run["losses"] if run["batch_size"] else []} for run in data["runs"]]
    note = "The same by the images that were trained on."
    return _curves(
        {**data, "runs": known}, "losses", "Loss by images seen, smoothed", note, value="final_loss", by_images=True
    )


def _curves(data: Data, key: str, title: str, note: str, *, value: str, by_images: bool = False) -> Panel | None:
    """Return a chart with a curve for each run that has one."""
    shown = _drawn(data, key)
    if not shown:
        return None
    series = [smoothed(run[key]) if key == "losses" else run[key] for _, run in shown]

    def draw(axes: Axes) -> None:
        for place, ((index, run), points) in enumerate(zip(shown, series)):
            below = len(shown) - 1 - place if key == "losses" and len(shown) <= _FEW else 0  # losses often coincide
            scale = run["batch_size"] if by_images else 1
            across, up = zip(*((step * scale, each) for step, each in points))
            style: dict[str, Any] = {"linestyle": _DASHES[index // len(_INKS)], "linewidth": 1.8 + 1.4 * below}
            style |= {"marker": "o" if len(points) == 1 else "", "markersize": 5}
            axes.plot(across, up, color=AREAS[_ink(index)], **style)
        values = [each for points in series for _, each in points]
        counted = "images" if by_images else "optimizer step"
        scale_curves(axes, values, across=counted, may_be_log=key == "losses", from_zero=key == "rates")

    keys = [
        (_ink(index), _short(run["name"]) + _styled(index), "" if run[value] is None else number(run[value]))
        for index, run in shown
    ]
    if shown[-1][0] >= len(_INKS):
        note += f" Colours repeat after {len(_INKS)} runs, with other dashes."
    return Panel(title, draw, keys, note + _left_out(data, key), wide=len(shown) > 4)


def _styled(index: int) -> str:
    style = _DASHES[min(index, _MOST - 1) // len(_INKS)]
    return "" if style == "solid" else f" ({style})"


def _scaling_chart(data: Data) -> Panel | None:
    groups = data["scaling"][: len(_INKS)]
    if not groups:
        return None
    most = max(point["devices"] for group in groups for point in group["points"])

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        least = min(point["devices"] for group in groups for point in group["points"])
        axes.plot([least, most], [1, most / least], color=INKS["--muted"], linewidth=1, linestyle="dashed")
        for index, group in enumerate(groups):
            start = group["points"][0]["devices"] / least  # a group that begins later lies on the line there
            points = [(point["devices"], start * point["speedup"]) for point in group["points"]]
            axes.plot(*zip(*points), color=AREAS[_ink(index)], linewidth=1.8, marker="o", markersize=4)
        axes.set_xlim(0, 1.05 * most)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_xlabel("devices")
        axes.set_ylabel("speed-up")
        tidy(axes)

    keys = []
    for index, group in enumerate(groups):
        last = group["points"][-1]
        reached = f"{last['speedup']:.2f} x on {last['devices']} ({100 * last['efficiency']:.0f} %)"
        keys.append((_ink(index), group["title"], reached))
    note = "The dashed line is linear scaling, of which the key tells the part that was reached."
    return Panel("Scaling", draw, keys, note, wide=True)


def _table(data: Data) -> str:
    cells = columns(data["runs"])
    same = {name: each[0] for name, each in cells.items() if len(set(each)) == 1 and name != "run"}
    shown = {name: each for name, each in cells.items() if name not in same}
    text = ", ".join(f"{name} {value}" for name, value in same.items() if value != "-")
    note = f'<p class="note">The same in all: {html.escape(text)}.</p>' if text else ""
    return rows(list(shown), list(zip(*shown.values()))) + note


def _provenance(data: Data) -> str:
    lines = [(run["name"], _source(run)) for run in data["runs"]]
    lines += [
        ("img/s", "median of the values logged after the first, ± half the range of their quartiles"),
        ("loss", "the end of the smoothed training loss, at the last step that was logged"),
        *(("price", f"$ {price:g} per hour and device: {source}") for price, source in prices(data)),
    ]
    return rows(("what", "where it is from"), lines)


def _source(run: Data) -> str:
    if not run["is_measured"]:
        return "no metrics were logged"
    facts = [
        run["hardware"] or "hardware not recorded",
        run["devices"] and f"{run['devices']} device{'s' * (run['devices'] > 1)}",
        run["date"] or "date not recorded",
        run["torch"] and f"torch {run['torch']}",
        None if run["is_finished"] else "not finished",
    ]
    return f"measured: {', '.join(filter(None, facts))}"
