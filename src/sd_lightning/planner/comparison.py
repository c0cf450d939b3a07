"""Other GPUs for the same training: the smallest that it fits, what more memory buys, and what images cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sd_lightning.planner.devices import tables
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.search import Cluster, Plan, Plans, Search

_COUNTS = (1, 2, 4, 8)
_LEADERS = 4
"""Strategies of the fastest plans that are compared on other GPUs, beside those that take the least memory."""
_WORTH = 1.01
"""A speed-up that is worth telling."""


def smallest(search: Search) -> Plan | None:
    """Return a plan for one GPU with the least memory that the training fits, with the smallest batch."""
    for device in tables().values():
        found = search.with_changes(search.run, Cluster(device)).smallest_that_fits()
        if found is not None:
            return found
    return None


def speedup_of_memory(search: Search, found: Plans, more: int = int(GB)) -> float | None:
    """Return how much faster the fastest plan would be with more memory per GPU, e.g. 0.05; None below 1 %.

    Args:
        search: The search.
        found: Its result.
        more: Bytes.
    """
    leaders = [plan.candidate for plan in found.best[:_LEADERS]]
    if not leaders:
        return None
    larger = search.within(found.cluster.memory + more, leaders).plans().best
    ratio = _most(larger) / _most(found.best)
    return ratio - 1 if ratio >= _WORTH else None


def _most(plans: Sequence[Plan]) -> float:
    """Return the most images per second; the first plan may be a simpler one, as fast as can be told."""
    return max(plan.images_per_second for plan in plans)


def on_other_gpus(search: Search, found: Plans) -> Iterator[Plan]:
    """Yield the fastest plan on each kind and number of GPUs that the training fits.

    Only the strategies of the fastest plans are tried, and those that take the least memory.
    """
    all_plans = (*found.best, *found.too_large)
    candidates = [plan.candidate for plan in found.best[:_LEADERS]]
    for count in _COUNTS:
        suited = [plan for plan in all_plans if plan.candidate.suits(count)]
        for plan in sorted(suited, key=lambda plan: plan.memory.device)[:2]:
            candidates += [plan.candidate] * (plan.candidate not in candidates)
    for device in tables().values():
        for count in _COUNTS:
            there = search.with_changes(replace(search.run, world_size=count), Cluster(device, count), candidates)
            best = there.plans().best
            if best:
                yield best[0]
