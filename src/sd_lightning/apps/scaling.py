"""How much faster runs become with more devices, where nothing else differs."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd_lightning.apps.compared_run import Run
from sd_lightning.apps.settings import differences

_SECTIONS = ("model", "data", "module", "speed", "objective", "optimizer", "lora", "strategy")
"""What decides the time of a step, beside the trainer's precision and accumulation."""
_MOST_TOLD = 2
"""Settings that a title names."""


@dataclass(frozen=True)
class Point:
    """One number of devices."""

    devices: int
    runs: tuple[str, ...]
    images_per_second: float
    """The median, if there are several runs."""
    speedup: float
    """Against the fewest devices."""
    efficiency: float
    """Part of linear: 1 where twice the devices are twice as fast."""


@dataclass(frozen=True)
class Scaling:
    """Runs with the same settings on different numbers of devices."""

    strategy: str
    batch: str
    """What stays as it is: "64 in all" or "32 per device"."""
    points: tuple[Point, ...]
    """From the fewest devices."""
    apart: str = ""
    """Settings that tell it from others of the same strategy and batch."""

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.strategy, self.batch, self.apart)))

    def lines(self) -> list[str]:
        """Return it as lines of text."""
        first, *others = self.points
        told = [
            f"{each.devices} devices: {each.speedup:.2f} x, {100 * each.efficiency:.0f} % of linear" for each in others
        ]
        against = f"{first.devices} device{'s' * (first.devices > 1)}"
        apart = f", {self.apart}" if self.apart else ""
        return [f"{self.strategy}, against {against}, batch of {self.batch}{apart}:", *(f"  {line}" for line in told)]


def scalings(runs: Sequence[Run]) -> list[Scaling]:
    """Return all groups of runs that differ in their devices alone.

    A run on one device without a strategy is the beginning of every group: one process has nothing to divide.
    """
    groups: defaultdict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for strategy in dict.fromkeys(run.strategy or "" for run in runs):
        for run in runs:
            if not (run.images_per_second and run.batch_size and run.devices and run.config):
                continue
            if strategy == run.strategy or (run.devices == 1 and run.strategy == "single"):
                groups[strategy, f"{run.batch_size} in all", _same(run)].append(run)
                if run.batch_size % run.devices == 0:
                    groups[strategy, f"{run.batch_size // run.devices} per device", _same(run)].append(run)
    several = {key: members for key, members in groups.items() if len({run.devices for run in members}) > 1}
    return [
        Scaling(key[0], key[1], _points(members), _apart(key, [other for other in several if other[:2] == key[:2]]))
        for key, members in several.items()
    ]


def _apart(key: tuple[str, str, str], alike: Sequence[tuple[str, str, str]]) -> str:
    """Return the first settings in which a group differs from others, as text; "" if there are no others."""
    differing = differences([json.loads(same) for _, _, same in alike]) if len(alike) > 1 else {}
    found = [f"{name}={values[alike.index(key)]}" for name, values in differing.items()]
    more = len(found) - _MOST_TOLD
    return ", ".join(found[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")


def _points(runs: Sequence[Run]) -> tuple[Point, ...]:
    by_count: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_count[run.devices or 0].append(run)
    speed = {n: statistics.median(run.images_per_second or 0 for run in by_count[n]) for n in sorted(by_count)}
    least = min(speed)
    return tuple(
        Point(
            count,
            tuple(run.name for run in by_count[count]),
            rate,
            speedup=rate / speed[least],
            efficiency=rate / speed[least] / (count / least),
        )
        for count, rate in speed.items()
    )


def _same(run: Run) -> str:
    """Return what has to be the same, as text."""
    trainer = run.config.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    kept: dict[str, Any] = {name: run.config.get(name) for name in _SECTIONS if name != "strategy"}
    kept["data"] = {k: v for k, v in (kept["data"] or {}).items() if k not in ("batch_size", "val_batch_size")}
    kept |= {"hardware": run.hardware, "precision": run.precision, "passes": trainer.get("accumulate_grad_batches")}
    return json.dumps(_without_seeds(kept), sort_keys=True, default=str)


def _without_seeds(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _without_seeds(value) for key, value in node.items() if key != "seed"}
    return node
