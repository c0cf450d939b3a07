"""The result of a search as numbers and strings: what ``plan.json`` holds, and the pages draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_lightning.planner.search import Plan, Plans
from sd_lightning.planner.timeline import Timeline

_POINTS = 400
"""Operations of a step that are kept; of several the one with the most memory."""


def record(found: Plans, *, title: str, settings: str, price: float | None = None) -> dict[str, Any]:
    """Return the plans.

    Args:
        found: The result of a search.
        title: What is trained.
        settings: Where its settings are from.
        price: Dollars per hour and GPU.
    """
    cluster = found.cluster
    return {
        "title": title,
        "on": f"{cluster.count} x {cluster.device.name}",
        "device": cluster.device.name,
        "count": cluster.count,
        "memory": cluster.memory,
        "host_memory": cluster.host,
        "speeds": found.speeds.provenance,
        "settings": settings,
        "price": price,
        "plans": [_plan(each, price) for each in found.best],
        "too_large": [_plan(each, price) for each in found.too_large],
        "not_considered": list(found.skip_reasons),
        "considered": [
            {
                "name": each.candidate.name,
                "micro_batch": each.run.batch_size,
                "gradient_checkpointing": each.recompute,
                "device_peak": each.memory.device,
                "images_per_second": each.images_per_second,
            }
            for each in found.considered
        ],
    }


def timeline_record(found: Timeline) -> dict[str, Any]:
    """Return the memory of a step, thinned out."""
    curves = {
        **{kind: curve for kind, curve in found.held.items() if kind != "allowance"},
        **{f"activations: {kind}": curve for kind, curve in found.activations.items() if curve.any()},
        **{kind: curve for kind, curve in found.held.items() if kind == "allowance"},
    }
    total, count = found.total, len(found.blocks)
    parts = min(_POINTS, count)
    edges = [index * count // parts for index in range(parts + 1)]
    chosen = [low + int(total[low:high].argmax()) for low, high in zip(edges, edges[1:])]
    return {
        "told": found.told(),
        "kinds": {kind: [int(curve[index]) for index in chosen] for kind, curve in curves.items()},
        "is_backward": [bool(found.is_backward[index]) for index in chosen],
        "blocks": [found.blocks[index] for index in chosen],
    }


def _plan(plan: Plan, price: float | None) -> Mapping[str, Any]:
    return {
        "name": plan.candidate.name,
        "options": list(plan.options()),
        "fits": plan.fits,
        "micro_batch": plan.run.batch_size,
        "accumulate": plan.run.accumulate,
        "global_batch": plan.global_batch,
        "gradient_checkpointing": plan.recompute,
        "kept": {name: what.value for name, what in plan.run.kept.items()},
        "device_bytes": {phase.name: dict(phase.parts) for phase in plan.memory.on_device},
        "host_bytes": {phase.name: dict(phase.parts) for phase in plan.memory.on_host},
        "device_peak": plan.memory.device,
        "host_peak": plan.memory.host,
        "seconds": {**vars(plan.time), "step": plan.time.total},
        "images_per_second": plan.images_per_second,
        "dollars_per_million": None if price is None else plan.dollars_per_million(price),
    }
