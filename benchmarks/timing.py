"""Timing that survives a noisy machine: sides take turns in one run, and the figures of a round are compared."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Figure = TypeVar("Figure")


def interleaved(sides: Mapping[str, Callable[[], Figure]], *, rounds: int, warm_up: int = 1) -> dict[str, list[Figure]]:
    """Measure every side once per round, in an order that turns each round, so that slow minutes hit all alike.

    Args:
        sides: name -> function that does the work once and returns what it took (seconds, or other figures).
        rounds: how many figures per side are kept.
        warm_up: rounds before those, whose figures are dropped (byte code, file caches, allocators).

    Returns:
        name -> its `rounds` figures in the order they were taken.
    """
    taken: dict[str, list[Figure]] = {name: [] for name in sides}
    order = list(sides)
    for turn in range(warm_up + rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            figure = sides[name]()
            if turn >= warm_up:
                taken[name].append(figure)
    return taken


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide round by round: what slows a round down slows both of its sides down."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def fastest(taken: Mapping[str, Sequence[float]], names: Iterable[str]) -> str:
    """Return which of some sides has the smallest median."""
    return min(names, key=lambda name: statistics.median(taken[name]))


def spread(figures: Sequence[float]) -> float:
    """Return the interquartile range of the rounds, in their own unit: how far their median can be trusted."""
    first, _, third = statistics.quantiles(figures, n=4)
    return third - first
