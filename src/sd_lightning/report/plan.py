"""``plan.html``: the plans of a search as charts and tables; and the part of it that a run's report shows."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.document import card, charts, rows, section, tiles, write_document
from sd_lightning.report.drawing import AREAS, INKS, LINES, bar_height, number, render_svg, stacked, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GB = 1e9
_MOST = 12
"""Plans in a chart."""
_PARTS = {
    "weights": ("weights", "master weights"),
    "gathered weights": ("gathered weights", "blocks in use"),
    "activations": ("activations",),
    "gradients": ("gradients", "float32 gradients"),
    "optimizer states": ("optimizer states",),
    "allowance": ("allowance",),
    "EMA and encoders": ("EMA", "encoders"),
    "buffers": ("buckets", "new buckets", "swap buffers"),
}
"""Part of the memory in the charts, in the order of the colours -> kinds of the planner."""
_ALWAYS = {
    "weights": ("weights", "master weights"),
    "optimizer": ("optimizer states",),
    "EMA": ("EMA",),
    "encoders": ("encoders",),
    "allowance": ("allowance",),
}
"""What stays during a step, in one colour: name -> kinds of the planner."""
_HELD = {
    "": tuple(kind for kinds in _ALWAYS.values() for kind in kinds),
    "gathered weights": ("gathered weights", "blocks in use"),
    "activations: attention": ("activations: attention",),
    "activations: convolution": ("activations: convolution",),
    "activations: matmul": ("activations: matmul",),
    "activations: others": ("activations: others",),
    "gradients": ("gradients", "float32 gradients"),
    "buffers": ("buckets", "new buckets", "swap buffers"),
}
"""The same for the memory of a step, from the bottom up; the first is named by what is there of it."""
_TIMES = {
    "forward": "forward",
    "backward": "backward",
    "encoding": "encoding",
    "waiting": "waiting for communication and copies",
    "update": "the optimizer's step, EMA",
}
_FAMILIES = {"single": 0, "ddp": 0, "gemini": 2, "fsdp": 4, "deepspeed": 6}
"""Beginning of a strategy's name -> index of its colour."""

Data = Mapping[str, Any]
"""What ``plan.json`` holds; ``sd_lightning.apps.plan_record`` makes it."""


def write_plan_page(path: Path, data: Data) -> Path:
    """Write ``plan.html``: one file that opens anywhere, without a network and without JavaScript."""
    body = [f'<p class="lead">{html.escape(data["on"])}</p>', _tiles(data)]
    body += [f'<p class="note">{html.escape(line)}</p>' for line in data["hints"]]
    if data["plans"]:
        body.append(section(f"The fastest plan: {data['plans'][0]['name']}", _fastest(data)))
    body.append(section("Memory, predicted", charts(_memory_card(data), _timeline_card(data))))
    if data["plans"]:
        body.append(section("Time, predicted", charts(_time_card(data), _frontier_card(data))))
    body.append(section("All strategies, predicted", _table(data)))
    if data["gpus"]:
        body.append(section("Other GPUs, predicted", charts(_gpu_card(data)) + _gpu_table(data)))
    body.append(section("Where the numbers are from", _provenance(data)))
    return write_document(path, data["title"], "training plan", "\n".join(body))


def plan_section(data: Data, measured: Mapping[str, Any] | None) -> str:
    """Return the section of a run's report: the plan, its rivals, and what was measured.

    Args:
        data: The run's ``plan.json``.
        measured: The ``plan`` of the run's summary.
    """
    shown = {**data, "plans": data["plans"][:4], "too_large": []}
    told = []
    if measured is not None:
        for label, key, unit in (("memory", "memory_gb", "GB"), ("a step", "step_seconds", "s")):
            real = measured[key]["measured"]
            shown_real = "not measured" if real is None else f"{real:.3g} {unit}"
            told.append((label, f"{measured[key]['predicted']:.3g} {unit}", shown_real))
    table = rows(("", "predicted", "measured"), told) if told else ""
    return section("Plan", table + charts(_memory_card(shown), _time_card(shown)))


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


def _fastest(data: Data) -> str:
    command = html.escape(data["command"])
    return f'<div class="card"><pre>{command}</pre></div>'


def _memory_card(data: Data) -> str:
    shown = [*data["plans"], *data["too_large"]][:_MOST]
    bars = [_parts(plan) for plan in shown]
    names = [plan["name"] for plan in shown]
    limit = data["memory"] / _GB

    def draw(axes: Axes) -> None:
        stacked(axes, names, bars, list(AREAS.values()))
        axes.axvline(limit, color=INKS["--ink"], linewidth=1.5, linestyle="--")
        axes.set_xlim(0, 1.1 * max(limit, *(sum(bar) for bar in bars)))
        axes.set_xlabel("GB of a GPU's memory, at the peak")

    kinds = [kind for kind, column in zip(_PARTS, zip(*bars)) if any(column)]
    keys = [(ink, kind, "") for ink, kind in zip(AREAS, _PARTS) if kind in kinds]
    left = len(data["plans"]) + len(data["too_large"]) - len(shown)
    note = f"The dashed line is what can be used: {limit:.1f} GB. Bars beyond it do not fit."
    if any(plan["device_peak"] <= data["memory"] for plan in data["too_large"]):
        note += f" Others need more than the {data['host_memory'] / _GB:.0f} GB of host memory per GPU."
    note += f" {left} more strategies are in the table." if left else ""
    svg = render_svg("Memory by strategy", draw, wide=True, height=bar_height(shown))
    return card("Memory by strategy, predicted", note, keys=keys, picture=svg, wide=True)


def _parts(plan: Data) -> list[float]:
    """Return the GB of each part at the peak of the phase with the most memory."""
    phase = max(plan["device_bytes"].values(), key=lambda parts: sum(parts.values()))
    known = {kind for kinds in _PARTS.values() for kind in kinds}
    others = sum(size for kind, size in phase.items() if kind not in known)
    found = [sum(phase.get(kind, 0) for kind in kinds) / _GB for kinds in _PARTS.values()]
    found[-1] += others / _GB
    return found


def _timeline_card(data: Data) -> str:
    timeline = data["timeline"]
    if not timeline:
        return ""
    given, count = timeline["kinds"], len(timeline["is_backward"])
    sums = {
        kind: [sum(given[each][i] for each in kinds if each in given) / _GB for i in range(count)]
        for kind, kinds in _HELD.items()
    }
    inks = {kind: ink for kind, ink in zip(sums, AREAS) if any(sums[kind])}
    layers = {kind: sums[kind] for kind in inks}

    def draw(axes: Axes) -> None:
        axes.stackplot(range(count), *layers.values(), colors=[AREAS[ink] for ink in inks.values()], linewidth=0)
        top = max(map(sum, zip(*layers.values())))
        if True in timeline["is_backward"]:
            turn = timeline["is_backward"].index(True)
            axes.axvline(turn, color=INKS["--rule"], linewidth=1)
            axes.text(turn, 1.1 * top, " backward", va="top", fontsize=8)
        axes.text(0, 1.1 * top, " forward", va="top", fontsize=8)
        axes.set_xlim(0, count - 1)
        axes.set_ylim(0, 1.15 * top)
        axes.set_xticks([])
        axes.set_ylabel("GB")
        axes.set_xlabel("operations of a forward and backward pass, in their order")
        tidy(axes)

    told = timeline["told"]
    always = ", ".join(name for name, kinds in _ALWAYS.items() if any(any(given.get(kind, ())) for kind in kinds))
    keys = [(inks[kind], kind or always, f"{max(curve):.2f}") for kind, curve in layers.items()]
    note = f"Of the fastest plan; the most GB of each kind in the key. {html.escape(told[:1].upper() + told[1:])}."
    svg = render_svg("Memory of a step", draw, wide=True)
    return card("Memory of a step, predicted", note, keys=keys, picture=svg, wide=True)


def _time_card(data: Data) -> str:
    shown = data["plans"][:_MOST]
    bars = [[1e3 * plan["seconds"][part] / plan["global_batch"] for part in _TIMES] for plan in shown]

    def draw(axes: Axes) -> None:
        stacked(axes, [plan["name"] for plan in shown], bars, list(AREAS.values()))
        axes.set_xlim(0, 1.1 * max(map(sum, bars)))
        axes.set_xlabel("milliseconds per image, on all GPUs together")

    used = [any(column) for column in zip(*bars)]
    keys = [(ink, label, "") for ink, label, is_used in zip(AREAS, _TIMES.values(), used) if is_used]
    svg = render_svg("Time by strategy", draw, wide=True, height=bar_height(shown))
    note = html.escape(f"Seconds are {data['speeds']}.")
    return card("Time by strategy, predicted", note, keys=keys, picture=svg, wide=True)


def _frontier_card(data: Data) -> str:
    points = data["considered"]
    inks = list(AREAS.items())

    def family(name: str) -> str:
        return next((each for each in _FAMILIES if name.startswith(each)), "gemini")

    def draw(axes: Axes) -> None:
        for name, index in _FAMILIES.items():
            own = [(p["device_peak"] / _GB, p["images_per_second"]) for p in points if family(p["name"]) == name]
            if own:
                across, up = zip(*own)
                axes.scatter(across, up, color=inks[index][1], s=14, linewidths=0)
        best, frontier = 0.0, []
        for point in sorted(points, key=lambda p: (p["device_peak"], -p["images_per_second"])):
            if point["images_per_second"] > best:
                best = point["images_per_second"]
                frontier.append((point["device_peak"] / _GB, best))
        axes.plot(*zip(*frontier), color=INKS["--muted"], linewidth=1, drawstyle="steps-post")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.1 * best)
        axes.set_xlabel("GB of a GPU's memory")
        axes.set_ylabel("images per second")
        tidy(axes)

    present = [name for name in _FAMILIES if any(family(p["name"]) == name for p in points)]
    labels = {index: " and ".join(n for n in present if _FAMILIES[n] == index) for index in _FAMILIES.values()}
    keys = [(inks[index][0], label, "") for index, label in labels.items() if label]
    note = (
        f"Each of the {len(points):,} points is a plan that fits: a strategy, a batch per GPU, and what is recomputed. "
        "The line is the most images per second for so much memory."
    )
    svg = render_svg("Speed against memory", draw, wide=True)
    return card("Speed against memory, predicted", note, keys=keys, picture=svg, wide=True)


def _gpu_card(data: Data) -> str:
    priced = [each for each in data["gpus"] if each["dollars_per_million"] is not None]
    shown, value, unit = (
        (priced, lambda each: each["dollars_per_million"], "dollars for a million images")
        if priced
        else (data["gpus"], lambda each: each["images_per_second"], "images per second")
    )
    ordered = sorted(shown, key=value, reverse=not priced)[:_MOST]

    def draw(axes: Axes) -> None:
        names = [f"{each['count']} x {each['gpu']}" for each in ordered]
        stacked(axes, names, [[value(each)] for each in ordered], [LINES["--line-1"]])
        axes.set_xlim(0, 1.1 * max(map(value, ordered)))
        axes.set_xlabel(unit)

    note = "The fastest plan on each." + (" GPUs without a known price are in the table below." if priced else "")
    svg = render_svg("GPUs", draw, wide=True, height=bar_height(ordered))
    return card(f"{unit.capitalize()}, predicted", note, picture=svg, wide=True)


def _gpu_table(data: Data) -> str:
    lines = [
        (
            f"{each['count']} x {each['gpu']}",
            each["name"],
            number(each["images_per_second"]),
            "—" if each["price"] is None else f"{each['price']:,.2f}",
            "—" if each["dollars_per_million"] is None else f"{each['dollars_per_million']:,.2f}",
        )
        for each in data["gpus"]
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
