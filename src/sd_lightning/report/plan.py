"""``plan.html``: the plans of a search as charts and tables; and the part of it that a run's report shows."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.document import charts, rows, section, tiles, write_document
from sd_lightning.report.drawing import AREAS, INKS, Panel, bar_height, number, stacked, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GB = 1e9
_MOST = 12
"""Plans in a chart."""
_BUFFERS = ("buckets", "new buckets", "swap buffers")
_PARTS = {
    "weights": ("weights", "master weights"),
    "gathered weights": ("gathered weights", "blocks in use"),
    "activations": ("activations",),
    "gradients": ("gradients", "float32 gradients"),
    "optimizer states": ("optimizer states",),
    "allowance": ("allowance",),
    "EMA and encoders": ("EMA", "encoders"),
    "buffers": _BUFFERS,
}
"""Part of the memory in the charts, in the order of the colours -> kinds of the planner."""
_ALWAYS = ("weights", "master weights", "optimizer states", "EMA", "encoders", "allowance")
"""Kinds that stay during a step, in one colour."""
_HELD = {
    "": _ALWAYS,
    "gathered weights": ("gathered weights", "blocks in use"),
    **{name: (name,) for name in (f"activations: {kind}" for kind in ("attention", "convolution", "matmul", "others"))},
    "gradients": ("gradients", "float32 gradients"),
    "buffers": _BUFFERS,
}
"""The same for the memory of a step, from the bottom up; the first is named by what is there of it."""
_TIMES = {
    "forward": "forward",
    "backward": "backward",
    "encoding": "encoding",
    "waiting": "waiting for communication and copies",
    "update": "the optimizer's step, EMA",
}
_FAMILIES = (("single", "ddp"), ("gemini",), ("fsdp",), ("deepspeed", "colossalai"))
"""Beginnings of the names of strategies with one colour."""
_OTHERS = ("others",)
"""Strategies of users' own, in the colour after those of the families."""

ENCODING_NOTES = (
    "dollars: for a million images that pass through training; price= sets the trainers' per GPU and hour, "
    "price_per_hour in a GPU's table the encoders'",
    "a forecast, not measured on a GPU: most published times are met within 35 % (docs/planner.md); a run tells which "
    "side waits",
)
"""Below the table of the ways to encode."""

Data = Mapping[str, Any]
"""What ``plan.json`` holds; ``sd_lightning.apps.plan_output`` makes it."""


def write_plan_page(path: Path, data: Data) -> Path:
    """Write ``plan.html``: one file that opens anywhere, without a network and without JavaScript."""
    plans, gpus = data["plans"], data["gpus"]
    body = [f'<p class="lead">{html.escape(data["on"])}</p>', _tiles(data)]
    body += [f'<p class="note">{html.escape(line)}</p>' for line in data["hints"]]
    if plans:
        command = f'<div class="card"><pre>{html.escape(data["command"])}</pre></div>'
        body.append(section(f"The fastest plan: {plans[0]['name']}", command))
    body.append(section("Memory, predicted", charts(_memory_card(data), _timeline_card(data["timeline"]))))
    if plans:
        body.append(section("Time, predicted", charts(_time_card(data), _frontier_card(data["considered"]))))
    body.append(section("All strategies, predicted", _table(data)))
    if ways := data["encoders"]:
        notes = "".join(f'<p class="note">{line}</p>' for line in ENCODING_NOTES)
        body.append(section("Encoders on other GPUs, predicted", rows(*encoding_rows(ways)) + notes))
    if gpus:
        body.append(section("Other GPUs, predicted", _gpu_table(gpus)))
    body.append(section("Where the numbers are from", _provenance(data)))
    return write_document(path, data["title"], "training plan", "\n".join(body))


def plan_section(data: Data, measured: Mapping[str, Any] | None) -> str:
    """Return the section of a run's report: the plan, its rivals, and what was measured.

    Args:
        data: The run's ``plan.json``.
        measured: The ``plan`` of the run's summary.
    """
    shown = {**data, "plans": data["plans"][:4], "too_large": []}
    lines = []
    for label, key, unit in (("memory", "memory_gb", "GB"), ("a step", "step_seconds", "s")) if measured else ():
        both = (measured[key][side] for side in ("predicted", "measured")) if measured else ()
        lines.append((label, *("not measured" if value is None else f"{value:.3g} {unit}" for value in both)))
    table = rows(("", "predicted", "measured"), lines) if lines else ""
    return section("Plan", table + charts(_memory_card(shown), _time_card(shown)))


def encoding_rows(ways: Sequence[Data]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table of the ways to encode."""
    head = ["encoded by", "GPUs", "img/s each", "img/s trained", "$ trainers", "$ encoders", "$/million"]
    lines = []
    for way in ways:
        each, count = way["encoder_images_per_second"], way["num_encoders"]
        cells = [way["encoders"], str(count or "–"), number(each) if each else "–", number(way["images_per_second"])]
        dollars = (way[key] for key in ("trainer_dollars", "encoder_dollars", "dollars"))
        lines.append([*cells, *("–" if cost is None else f"{cost:,.2f}" for cost in dollars)])
    return head, lines


def _tiles(data: Data) -> str:
    if not data["plans"]:
        return '<p class="warn">Nothing fits. The memory that each strategy lacks is below.</p>'
    best = data["plans"][0]
    shown = [
        (number(best["images_per_second"]), "images per second, predicted"),
        (f"{best['device_peak'] / _GB:.1f} GB", f"predicted, of {data['memory'] / _GB:.1f} GB that can be used"),
        (f"{best['host_peak'] / _GB:.1f} GB", "of host memory per GPU, predicted"),
    ]
    price, images = best["dollars_per_million"], data["images"]
    if price is not None:
        shown.append((f"$ {price:,.2f}", "for a million images, predicted"))
    if images is not None:
        days = f"{images / best['images_per_second'] / 86400:,.1f} days"
        cost = f", $ {price * images / 1e6:,.0f}" if price else ""
        shown.append((days, f"for {images:,.0f} images{cost}, predicted"))
    return tiles(shown)


def _bars(
    title: str,
    note: str,
    names: Sequence[str],
    bars: Sequence[Sequence[float]],
    *,
    parts: Iterable[str],
    unit: str,
    limit: float = 0.0,
) -> str:
    """Return a card with a horizontal bar for each name.

    Args:
        title: Heading.
        note: The note.
        names: One for each bar.
        bars: The parts of each bar.
        parts: Their names, in the order of the colours.
        unit: Of the axis.
        limit: Where a dashed line stands; 0 for none.
    """

    def draw(axes: Axes) -> None:
        stacked(axes, names, bars, list(AREAS.values()))
        if limit:
            axes.axvline(limit, color=INKS["--ink"], linewidth=1.5, linestyle="--")
        axes.set_xlim(0, 1.1 * max(limit, *map(sum, bars)))
        axes.set_xlabel(unit)

    keys = [(ink, part, "") for ink, part, values in zip(AREAS, parts, zip(*bars)) if any(values)]
    return Panel(f"{title}, predicted", draw, keys, note, wide=True, height=bar_height(bars)).figure()


def _memory_card(data: Data) -> str:
    plans = [*data["plans"], *data["too_large"]]
    limit, left = data["memory"] / _GB, len(plans) - _MOST
    note = f"The dashed line is what can be used: {limit:.1f} GB. Bars beyond it do not fit."
    if any(plan["device_peak"] <= data["memory"] for plan in data["too_large"]):
        note += f" Others need more than the {data['host_memory'] / _GB:.0f} GB of host memory per GPU."
    note += f" {left} more strategies are in the table." if left > 0 else ""
    names, bars = [plan["name"] for plan in plans[:_MOST]], list(map(_parts, plans[:_MOST]))
    unit = "GB of a GPU's memory, at the peak"
    return _bars("Memory by strategy", note, names, bars, unit=unit, parts=_PARTS, limit=limit)


def _parts(plan: Data) -> list[float]:
    """Return the GB of each part at the peak of the phase with the most memory; the last has what no part names."""
    phase = max(plan["device_bytes"].values(), key=lambda parts: sum(parts.values()))
    parts = [sum(phase.get(kind, 0) for kind in kinds) / _GB for kinds in _PARTS.values()]
    known = {kind for kinds in _PARTS.values() for kind in kinds}
    parts[-1] += sum(size for kind, size in phase.items() if kind not in known) / _GB
    return parts


def _timeline_card(timeline: Data | None) -> str:
    if timeline is None:
        return ""
    curves, is_backward = timeline["kinds"], timeline["is_backward"]
    count = len(is_backward)
    layers, keys = [], []
    for ink, (name, kinds) in zip(AREAS, _HELD.items()):
        layer = [sum(values) / _GB for values in zip(*(curves[kind] for kind in kinds if kind in curves))]
        if any(layer):
            label = name or ", ".join(kind for kind in _ALWAYS if any(curves.get(kind, ())))
            layers.append(layer)
            keys.append((ink, label, f"{max(layer):.2f}"))

    def draw(axes: Axes) -> None:
        axes.stackplot(range(count), *layers, colors=[AREAS[ink] for ink, _, _ in keys], linewidth=0)
        top = max(map(sum, zip(*layers)))
        turn = is_backward.index(True)
        axes.axvline(turn, color=INKS["--rule"], linewidth=1)
        for name, place in ((" forward", 0), (" backward", turn)):
            axes.text(place, 1.1 * top, name, va="top", fontsize=8)
        axes.set_xlim(0, count - 1)
        axes.set_ylim(0, 1.15 * top)
        axes.set_xticks([])
        axes.set_ylabel("GB")
        axes.set_xlabel("operations of a forward and backward pass, in their order")
        tidy(axes)

    peak = timeline["peak"]
    note = f"Of the fastest plan; the most GB of each kind in the key. {peak[:1].upper() + peak[1:]}."
    return Panel("Memory of a step, predicted", draw, keys, note, wide=True).figure()


def _time_card(data: Data) -> str:
    plans = data["plans"][:_MOST]
    bars = [[1e3 * plan["seconds"][part] / plan["global_batch"] for part in _TIMES] for plan in plans]
    names, note = [plan["name"] for plan in plans], f"Seconds are {data['speeds']}."
    unit = "milliseconds per image, on all GPUs together"
    return _bars("Time by strategy", note, names, bars, unit=unit, parts=_TIMES.values())


def _frontier_card(plans: Sequence[Data]) -> str:
    points: dict[tuple[str, ...], list[tuple[float, float]]] = {names: [] for names in (*_FAMILIES, _OTHERS)}
    for plan in plans:
        family = next((names for names in _FAMILIES if plan["name"].startswith(names)), _OTHERS)
        points[family].append((plan["device_peak"] / _GB, plan["images_per_second"]))
    inks = dict(zip(points, [*list(AREAS)[::2], "--area-8"]))
    frontier: list[tuple[float, float]] = []
    for memory, speed in sorted(itertools.chain(*points.values()), key=lambda point: (point[0], -point[1])):
        if not frontier or speed > frontier[-1][1]:
            frontier.append((memory, speed))

    def draw(axes: Axes) -> None:
        for names, own in points.items():
            memory, speeds = [point[0] for point in own], [point[1] for point in own]
            axes.scatter(memory, speeds, color=AREAS[inks[names]], s=14, linewidths=0)
        axes.plot(*zip(*frontier), color=INKS["--muted"], linewidth=1, drawstyle="steps-post")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.1 * frontier[-1][1])
        axes.set_xlabel("GB of a GPU's memory")
        axes.set_ylabel("images per second")
        tidy(axes)

    keys = [(inks[names], " and ".join(names), "") for names, own in points.items() if own]
    note = (
        f"Each of the {len(plans):,} points is a plan that fits: a strategy, a batch per GPU, and what is recomputed. "
        "The line is the most images per second for so much memory."
    )
    return Panel("Speed against memory, predicted", draw, keys, note, wide=True).figure()


def _gpu_table(gpus: Sequence[Data]) -> str:
    lines = [
        (
            f"{each['count']} x {each['gpu']}",
            each["name"],
            number(each["images_per_second"]),
            *("—" if each[key] is None else f"{each[key]:,.2f}" for key in ("price", "dollars_per_million")),
        )
        for each in sorted(gpus, key=lambda each: (each["dollars_per_million"] or math.inf, -each["images_per_second"]))
    ]
    return rows(("GPUs", "strategy", "images per second", "$ per GPU-hour", "$ per million images"), lines)


def _table(data: Data) -> str:
    recomputed = {False: "nothing", True: "all blocks", "auto": "some blocks"}
    lines = [
        (
            plan["name"],
            f"{plan['micro_batch']} x {plan['accumulate']}",
            recomputed[plan["gradient_checkpointing"]],
            f"{plan['device_peak'] / _GB:.1f}",
            f"{plan['host_peak'] / _GB:.1f}",
            f"{plan['seconds']['step']:.3g}" if plan["fits"] else "does not fit",
            number(plan["images_per_second"]) if plan["fits"] else "—",
        )
        for plan in (*data["plans"], *data["too_large"])
    ]
    head = ("strategy", "batch per GPU x passes", "recomputes", "GPU GB", "host GB", "s/step", "images per second")
    missing = "".join(f'<p class="note">Not considered: {html.escape(text)}</p>' for text in data["not_considered"])
    return rows(head, lines) + missing


def _provenance(data: Data) -> str:
    lines = [
        ("memory", "predicted from shapes: traced operations, and what each strategy declares that it holds"),
        ("0.6 GB per GPU, 2 GB on the host", "assumed: CUDA context, workspaces, NCCL; Python and libraries"),
        ("97 % of a GPU's memory", "assumed to be usable"),
        ("seconds, images per second", data["speeds"]),
        ("price", data["price_source"] or "none is known; price= sets one"),
        ("settings", data["settings"]),
    ]
    return rows(("what", "where it is from"), lines)
