"""Stretches of a run that are not training: who makes them, who is told, and the clock that leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback


class PauseListener:
    """A callback that is told when training stands still for something else."""

    def on_pause(self, activity: str) -> None:
        """Training stops for ``activity``, for example ``"sampling"``."""

    def on_resume(self) -> None:
        """Training goes on."""


@contextmanager
def paused(trainer: Trainer, activity: str) -> Iterator[None]:
    """Mark a stretch of time that is not training, so that it counts neither as speed nor as data wait.

    For callbacks that do something long in a training hook::

        with paused(trainer, "sampling"):
            images = pl_module.sample(prompts)

    Validation and ``trainer.save_checkpoint`` are marked without it. May be nested.

    Args:
        trainer: The trainer whose callbacks listen.
        activity: A present participle, shown by the progress bar.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    listeners = [callback for callback in callbacks if isinstance(callback, PauseListener)]
    for listener in listeners:
        listener.on_pause(activity)
    try:
        yield
    finally:
        for listener in listeners:
            listener.on_resume()


class TrainingClock:
    """Seconds since the start without those between ``pause`` and ``resume``, which nest."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._origin = now()
        self._depth = 0
        self._paused_at = 0.0

    def read(self) -> float:
        return (self._paused_at if self._depth else self._now()) - self._origin

    def pause(self) -> None:
        if self._depth == 0:
            self._paused_at = self._now()
        self._depth += 1

    def resume(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._origin += self._now() - self._paused_at
