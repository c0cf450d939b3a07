"""Progress of a precompute job: images per second, time left, and the share of each stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from sd_lightning._console import start_bar
from sd_lightning.callbacks.progress import clock_time
from sd_lightning.data.store.encoding import STAGES, Encoded, EncodeTask
from sd_lightning.data.store.texts import EmbeddedTexts

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 5.0
"""Seconds between two lines."""


class StageProgress:
    """In a terminal a bar; in a file or a pipe a line every few seconds.

    Use it as a context manager.

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
        self._begin = self._shown = time.monotonic()
        self._bar: Progress | None = None
        self._is_encoding = False

    def __enter__(self) -> StageProgress:
        self._bar = start_bar("reading", self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def looked_at(self, count: int) -> None:
        """Note that ``count`` samples have been read and hashed; shown unless images are encoded meanwhile."""
        if not self._is_encoding:
            self._show("reading", count, self.total, [clock_time(time.monotonic() - self._begin)])

    def watch(self, tasks: Sequence[EncodeTask], results: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the results of some tasks, and show how far they are."""
        num, done, begin = sum(len(task.images) for task in tasks), 0, time.monotonic()
        self._is_encoding = True
        try:
            for each in results:
                yield each
                done += len(each.images) + len(each.bad)
                self.images += len(each.images)
                for stage, value in each.seconds.items():
                    self.seconds[stage] += value
                rate = done / max(time.monotonic() - begin, 1e-9)
                left = clock_time((num - done) / rate) if done else "?"
                self._show("encoding", done, num, [f"{rate:.3g} img/s", f"left {left}", shares(self.seconds)])
        finally:
            self._is_encoding = False

    def watch_texts(self, num: int, results: Iterable[EmbeddedTexts]) -> Iterator[EmbeddedTexts]:
        """Yield the results of ``num`` text files, and show how far they are."""
        captions, begin = 0, time.monotonic()
        for done, each in enumerate(results, 1):
            yield each
            captions += each.captions
            seconds = max(time.monotonic() - begin, 1e-9)
            left = clock_time((num - done) * seconds / done)
            self._show("encoding captions, file", done, num, [f"{captions / seconds:.3g} captions/s", f"left {left}"])

    def _show(self, activity: str, count: int, total: int, texts: Sequence[str]) -> None:
        now = time.monotonic()
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=activity, completed=count, total=total, text="  ".join(texts))
        elif now - self._shown >= _EVERY:
            self._shown = now
            print(" | ".join([f"{activity} {count}/{total}", *texts]), flush=True)


def shares(seconds: Mapping[str, float]) -> str:
    """Return the share of each stage as text: "read 2% decode 10% encode 86% write 2%"."""
    total = sum(seconds.values()) or 1.0
    return " ".join(f"{stage} {value / total:.0%}" for stage, value in seconds.items())
