"""What the planning program prints, and the result of a search as numbers and strings: ``plan.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sd_lightning._console import aligned
from sd_lightning.planner.calibration import Calibration
from sd_lightning.planner.devices import table_of
from sd_lightning.planner.encoders import EncodingBill
from sd_lightning.planner.forecast import GB, Timeline
from sd_lightning.planner.roofline import COLLECTIVES, Speeds
from sd_lightning.planner.search import Plans, TrainingPlan
from sd_lightning.report.plan import ENCODING_NOTES, encoding_rows

_POINTS = 400
"""Operations of a step that are kept; of several the one with the most memory."""


def record(
    plans: Plans, *, title: str, settings: str, price: float | None = None, bills: Sequence[EncodingBill] = ()
) -> dict[str, Any]:
    """Return the plans.

    Args:
        plans: The result of a search.
        title: What is trained.
        settings: Where its settings are from.
        price: Dollars per hour and GPU.
        bills: Of ways to encode.
    """
    cluster = plans.cluster
    return {
        "title": title,
        "on": f"{cluster.count} x {cluster.device.name}",
        "device": cluster.device.name,
        "count": cluster.count,
        "memory": cluster.memory,
        "host_memory": cluster.host,
        "speeds": plans.speeds.provenance,
        "settings": settings,
        "price": price,
        "plans": [_plan(each, price) for each in plans.best],
        "too_large": [_plan(each, price) for each in plans.too_large],
        "not_considered": list(plans.skip_reasons),
        "considered": [
            {
                "name": each.candidate.name,
                "micro_batch": each.run.batch_size,
                "gradient_checkpointing": each.recompute,
                "device_peak": each.memory.device,
                "images_per_second": each.images_per_second,
            }
            for each in plans.considered
        ],
        "encoders": _ways(bills),
    }


def _ways(bills: Sequence[EncodingBill]) -> list[dict[str, Any]]:
    return [vars(bill) | {"dollars": bill.dollars} for bill in bills]


def _plan(plan: TrainingPlan, price: float | None) -> Mapping[str, Any]:
    return {
        "name": plan.candidate.name,
        "options": list(plan.options()),
        "fits": plan.fits,
        "micro_batch": plan.run.batch_size,
        "accumulate": plan.run.accumulate,
        "global_batch": plan.global_batch,
        "gradient_checkpointing": plan.recompute,
        "kept": {block: kept.value for block, kept in plan.run.kept.items()},
        "device_bytes": {phase.name: dict(phase.parts) for phase in plan.memory.on_device},
        "host_bytes": {phase.name: dict(phase.parts) for phase in plan.memory.on_host},
        "device_peak": plan.memory.device,
        "host_peak": plan.memory.host,
        "seconds": {**vars(plan.time), "step": plan.time.total},
        "images_per_second": plan.images_per_second,
        "dollars_per_million": None if price is None else plan.dollars_per_million(price),
    }


def timeline_record(timeline: Timeline) -> dict[str, Any]:
    """Return the memory of a step, thinned out."""
    total, count = timeline.total, len(timeline.blocks)
    parts = min(_POINTS, count)
    edges = [index * count // parts for index in range(parts + 1)]
    chosen = [low + int(total[low:high].argmax()) for low, high in zip(edges, edges[1:])]
    return {
        "peak": timeline.description,
        "kinds": {kind: [int(curve[index]) for index in chosen] for kind, curve in timeline.kinds.items()},
        "is_backward": [bool(timeline.is_backward[index]) for index in chosen],
        "blocks": [timeline.blocks[index] for index in chosen],
    }


def gpu_record(plan: TrainingPlan) -> dict[str, Any]:
    """Return the fastest plan on other GPUs."""
    device = plan.cluster.device
    price = device.price_per_hour
    return {
        "gpu": device.name,
        "count": plan.cluster.count,
        "name": plan.candidate.name,
        "options": list(plan.options()),
        "images_per_second": plan.images_per_second,
        "price": price,
        "dollars_per_million": None if price is None else plan.dollars_per_million(price),
    }


def table(
    plans: Plans, command: str | None, images: float | None, price: float | None, bills: Sequence[EncodingBill]
) -> list[str]:
    """Return the plans as lines of text.

    Args:
        plans: The result of a search.
        command: That trains by the fastest, if one fits.
        images: To train on.
        price: Dollars per hour and GPU.
        bills: Of ways to encode.
    """
    columns: dict[str, Callable[[TrainingPlan], str]] = {
        "strategy": lambda plan: plan.candidate.name,
        "micro-batch": _micro_batch,
        "recompute": lambda plan: {False: "no", True: "all", "auto": "some"}[plan.recompute],
        "GPU GB": lambda plan: f"{plan.memory.device / GB:.1f}",
        "host GB": lambda plan: f"{plan.memory.host / GB:.1f}",
        "s/step": lambda plan: f"{plan.time.total:.3g}",
        "img/s": lambda plan: f"{plan.images_per_second:.3g}",
    }
    if price is not None:
        columns["$/million"] = lambda plan: f"{plan.dollars_per_million(price):,.2f}"
    if images is not None:
        columns["days"] = lambda plan: f"{images / plan.images_per_second / 86400:,.1f}"
    if price is not None and images is not None:
        columns["dollars"] = lambda plan: f"{plan.dollars_per_million(price) * images / 1e6:,.0f}"
    lines = ["nothing fits"]
    if plans.best:
        lines = aligned([list(columns), *([cell(plan) for cell in columns.values()] for plan in plans.best)])
        lines += ["", f"fastest: {command}", *(f"  {line}" for line in plans.best[0].memory.lines())]
    if plans.too_large:
        rows = [[f"  {each.candidate.name}", f"needs {each.lacks} more"] for each in plans.too_large]
        lines += ["", "do not fit, with the smallest batch:", *aligned(rows)]
    lines += [f"not considered: {reason}" for reason in plans.skip_reasons]
    if bills:
        head, rows = encoding_rows(_ways(bills))
        lines += ["", *aligned([head, *rows], at_left=(0,)), *ENCODING_NOTES]
    return [*lines, "", f"GB are predicted from shapes; seconds are {plans.speeds.provenance}"]


def _micro_batch(plan: TrainingPlan) -> str:
    devices = f"{plan.cluster.count} x " if plan.cluster.count > 1 else ""
    passes = f" x {plan.run.accumulate}" if plan.run.accumulate > 1 else ""
    return f"{devices}{plan.run.batch_size}{passes}"


def advice(changes: Mapping[str, str]) -> list[str]:
    """Return what makes the run fit as lines of text."""
    if not changes:
        return ["", "no single change makes it fit: try a smaller model, a lower resolution or several changes"]
    rows = [[f"  {option}", strategy] for option, strategy in changes.items()]
    return ["", "it fits with one of these:", *aligned(rows)]


def calibration_table(calibration: Calibration) -> list[str]:
    """Return the figures as lines of text; of a GPU with a table, beside what is assumed from it."""
    measured, table = calibration.speeds, table_of(calibration.device.name)
    both = [measured] if table is None else [measured, Speeds.of(table)]
    rows = [["", "measured", "" if table is None else "data sheet", ""]]

    def add(label: str, unit: str, values: Sequence[float], *, is_measured: bool = True) -> None:
        cells = [f"{value:.3g}" for value in values]
        rows.append([label, cells[0] if is_measured else "not measured", *(cells[1:] or [""]), unit])

    for kind, dtype in measured.flops:
        if dtype == "float32" or measured.flops[kind, dtype] != measured.flops[kind, "float32"]:
            label = f"{kind.replace('_', ', ')}, {dtype}"
            add(label, "TFLOP/s", [speeds.product_rate(kind, dtype).best / 1e12 for speeds in both])
    add("device memory", "GB/s", [speeds.bandwidth.best / 1e9 for speeds in both])
    add("the same in activation functions", "GB/s", [speeds.functions.best / 1e9 for speeds in both])
    add("optimizer's step", "GB/s", [speeds.update_bandwidth / 1e9 for speeds in both])
    add("host to device", "GB/s", [speeds.to_device / 1e9 for speeds in both])
    add("device to host", "GB/s", [speeds.to_host / 1e9 for speeds in both])
    for name in COLLECTIVES:
        label, values = f"{name.replace('_', '-')} between devices", [speeds.link[name] / 1e9 for speeds in both]
        add(label, "GB/s", values, is_measured="link" not in measured.assumed)
    add("AdamW on the host", "10^9 weights/s", [speeds.host_updates / 1e9 for speeds in both])
    add("host's time for an operation", "µs", [1e6 * speeds.launch for speeds in both])
    return [f"{calibration.device.name}: the best that was reached", *aligned(rows, at_left=(0, 3))]
