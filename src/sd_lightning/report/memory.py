"""Chart of the memory of a traced training step."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning.report.charts import AREAS, card, render_svg, tidy
from sd_lightning.report.document import section
from sd_lightning.storage.untrusted import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMELINE_NAME = "memory_timeline.json"
_LABELS = {
    "optimizer": "optimizer",
    "weights": "weights",
    "gathered": "gathered weights",
    "gradients": "whole gradients",
    "accumulated": "reduced gradients",
    "swapped": "swapped weights",
    "staged": "weights on their way",
    "kept": "kept to be used again",
}
"""Label of each kind of memory, in drawing order from the bottom up."""


def memory_section(path: Path) -> str:
    """Return the report's section on a step's memory; "" if no step was traced.

    Args:
        path: JSON: ``step``, ``rank`` and ``events``, each with ``phase``, ``unit`` and ``bytes`` (tier -> kind ->
            bytes), in the order of execution.
    """
    if not path.exists():
        return ""
    try:
        timeline = read_json(path)
        events = timeline["events"]
        tiers = [t for t in ("fast", "slow", "disk") if any(sum(e["bytes"].get(t, {}).values()) for e in events)]
        figures = "".join(_figure(tier, events) for tier in tiers)
        title = f"Memory of step {timeline['step']} on rank {timeline['rank']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # of another run, or damaged
        problem = html.escape(f"{path.name} cannot be read ({error}); delete it.")
        return section("Memory of a step", f'<p class="absent">{problem}</p>')
    return section(title, f'<div class="charts">{figures}</div>')


def _figure(tier: str, events: Sequence[Mapping[str, Any]]) -> str:
    kinds = [kind for kind in _LABELS if any(event["bytes"].get(tier, {}).get(kind) for event in events)]
    layers = {kind: [event["bytes"].get(tier, {}).get(kind, 0) / 2**20 for event in events] for kind in kinds}
    totals = [sum(column) for column in zip(*layers.values())]
    top = max(range(len(totals)), key=totals.__getitem__)
    keys = [(ink, _LABELS[kind], f"{max(layers[kind]):.3g}") for kind, ink in zip(kinds, AREAS)]
    names = {"fast": "On the device (fast tier)", "slow": "In host memory (slow tier)", "disk": "In files (disk tier)"}
    where = html.escape(f"{events[top]['unit'] or 'the root'}, {events[top]['phase']}")
    note = (
        f"MiB of model state, unit by unit; peaks in the key. Most, {max(totals):.3g} MiB, in {where}. "
        "Activations are not part of it."
    )
    svg = render_svg(f"{names[tier]}, by unit", lambda axes: _draw(axes, events, list(layers.values())), wide=True)
    return card(names[tier], note, keys=keys, picture=svg, wide=True)


def _draw(axes: Axes, events: Sequence[Mapping[str, Any]], layers: Sequence[Sequence[float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    positions = range(len(events))
    axes.stackplot(positions, *layers, colors=list(AREAS.values())[: len(layers)], step="post", linewidth=0)
    top = max(sum(column) for column in zip(*layers))
    axes.set_xlim(0, max(len(events) - 1, 1))
    axes.set_ylim(0, top * 1.12)
    begins = [i for i in positions if i == 0 or events[i]["phase"] != events[i - 1]["phase"]]
    for begin in begins:
        if begin:
            axes.axvline(begin, color="#030303", linewidth=1)
        if events[begin]["phase"] not in ("forward", "backward"):
            continue  # single events at the right edge, where their names would overlap
        axes.text(begin, top * 1.1, f" {events[begin]['phase']}", va="top", fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel("units in the order of execution")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    tidy(axes)
