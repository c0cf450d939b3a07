"""Pauses of training, such as validation: marking them, listening to them, and a clock without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class PauseListener(Callback):
    """Callback that is notified when training pauses and resumes, for validation too."""

    def on_pause(self, activity: str) -> None:
        """Handle a pause of training for ``activity``, e.g. ``"sampling"``."""

    def on_resume(self) -> None:
        """Handle the end of a pause."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_pause("validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_resume()


@contextmanager
def paused(trainer: Trainer, activity: str) -> Iterator[None]:
    """Mark the block as a pause, so that it counts neither as training time nor as data wait.

    For callbacks that do slow work in a training hook::

        with paused(trainer, "sampling"):
            images = pl_module.sample(prompts)

    Validation and ``trainer.save_checkpoint`` are pauses without it. May be nested.

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
    """Clock of the seconds since its start, without those between ``pause`` and ``resume``, which nest."""

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
