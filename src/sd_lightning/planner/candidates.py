"""The strategies that the planner compares; :func:`sd_lightning.strategies.presets.candidates` lists ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sd_lightning.planner.footprint import Footprint, Workload


class HasFootprint(Protocol):
    """A strategy, as the planner sees it."""

    def footprint(self, workload: Workload) -> Footprint | None: ...


@dataclass(frozen=True)
class Candidate:
    """A strategy with settings."""

    strategy: str
    """Its name on the command line: ``strategy=<name>``; "" if the command line says it already."""
    build: Callable[..., HasFootprint]
    """Settings -> strategy; raises UsageError if a package is missing."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the name's defaults."""
    processes: tuple[int, int | None] = (1, None)
    """Least number of processes with which it divides anything, and the largest."""

    @property
    def options(self) -> tuple[str, ...]:
        """Return the command line that chooses it."""
        settings = (f"strategy.{name}={value}" for name, value in self.settings.items())
        return (*[f"strategy={self.strategy}"] * bool(self.strategy), *settings)

    @property
    def name(self) -> str:
        """Its name and settings in tables: "gemini offload_optim_frac=0.5"."""
        settings = (f"{name}={value}" for name, value in self.settings.items())
        return " ".join([self.strategy or "as given", *settings])

    def suits(self, count: int) -> bool:
        """Return whether it is for this number of processes."""
        least, most = self.processes
        return least <= count and (most is None or count <= most)

    def footprint(self, workload: Workload) -> Footprint | None:
        """Return what it holds; see :meth:`sd_lightning.strategies.EngineStrategy.footprint`."""
        return self.build(**self.settings).footprint(workload)
