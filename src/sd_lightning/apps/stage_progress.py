"""Progress of a precompute job: images per second, time left, and the share of each stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sd_lightning.callbacks.progress import clock_time
from sd_lightning.data.store.encoding import STAGES, Encoded, EncodeTask

_EVERY = 5.0
"""Seconds between two lines."""


class StageProgress:
    """Prints a line every few seconds.

    Attributes:
        seconds: Seconds of all workers by stage, so far.
        images: Images encoded so far.
    """

    def __init__(self, total: int) -> None:
        """Start the clock.

        Args:
            total: Samples of the data set.
        """
        self.total = total
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.images = 0
        self._begin = time.monotonic()
        self._shown = self._begin

    def looked_at(self, count: int) -> None:
        """Note that ``count`` samples have been read and hashed."""
        if self._is_due():
            print(f"looking at {count}/{self.total} images | {clock_time(time.monotonic() - self._begin)}", flush=True)

    def watch(self, tasks: Sequence[EncodeTask], results: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the results of some tasks, and print how far they are."""
        num, done, begin = sum(len(task.images) for task in tasks), 0, time.monotonic()
        for each in results:
            yield each
            done += len(each.images) + len(each.bad)
            self.images += len(each.images)
            for stage, value in each.seconds.items():
                self.seconds[stage] += value
            if self._is_due() or done == num:
                elapsed = max(time.monotonic() - begin, 1e-9)
                rate = done / elapsed
                left = clock_time((num - done) / rate) if done else "?"
                print(f"encoded {done}/{num} | {rate:.3g} img/s | left {left} | {shares(self.seconds)}", flush=True)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._shown < _EVERY:
            return False
        self._shown = now
        return True


def shares(seconds: Mapping[str, float]) -> str:
    """Return the share of each stage as text: "read 2% decode 10% encode 86% write 2%"."""
    total = sum(seconds.values()) or 1.0
    return " ".join(f"{stage} {value / total:.0%}" for stage, value in seconds.items())
