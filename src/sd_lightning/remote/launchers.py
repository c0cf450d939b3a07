"""The options of ``launcher=``: who starts the processes of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sd_lightning._errors import UsageError


@dataclass(frozen=True)
class Local:
    """The processes of this machine, or those that another launcher has started."""


@dataclass(frozen=True)
class Ray:
    """Workers on a Ray cluster; ``conf/launcher/ray.yaml`` explains the fields.

    Raises:
        UsageError: A value is invalid.
    """

    address: str | None = None
    num_workers: int | Sequence[int] = 1
    cpus_per_worker: float = 1.0
    gpus_per_worker: float | None = None
    labels: Mapping[str, str] | None = None
    max_failures: int = 3
    start_seconds: float = 600

    def __post_init__(self) -> None:
        labels = {name: str(value) for name, value in (self.labels or {}).items()}  # YAML has numbers, and Ray no such
        object.__setattr__(self, "labels", labels or None)
        counts = [self.num_workers] if isinstance(self.num_workers, int) else list(self.num_workers)
        if len(counts) not in (1, 2) or any(n < 1 for n in counts) or counts != sorted(counts):
            raise UsageError(
                f"launcher.num_workers={self.num_workers}: expected a number of at least 1, or [min,max]; write "
                "launcher.num_workers=8"
            )
        for name, least in (("cpus_per_worker", 0), ("gpus_per_worker", 0), ("max_failures", -1), ("start_seconds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"launcher.{name}={value}: expected at least {least}; leave launcher.{name} out")

    @property
    def worker_range(self) -> tuple[int, int]:
        """Smallest and largest number of workers."""
        if isinstance(self.num_workers, int):
            return self.num_workers, self.num_workers
        return self.num_workers[0], self.num_workers[-1]
