"""What callbacks share: the end of an optimizer step, values read one step late, and pauses of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

C = TypeVar("C", bound=Callback)


def callbacks_of(trainer: Trainer, kind: type[C]) -> list[C]:
    """Return the trainer's callbacks of a class."""
    return [each for each in trainer.callbacks if isinstance(each, kind)]  # type: ignore[attr-defined]


class StepCallback(Callback):
    """Callback with one more hook, :meth:`on_step`."""

    _last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step  # by now a checkpoint has been restored

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last_step:  # else gradients are still being accumulated
            self._last_step = trainer.global_step
            self.on_step(trainer, pl_module, batch)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Handle the end of an optimizer step, whose last batch is given."""


class Lagged:
    """Copies of small tensors to host memory, each read when the next one comes.

    On CUDA a copy runs on the current stream, into pinned memory. When it is read, the device has the next step's work
    queued behind it: the host waits only if it is more than that ahead. Elsewhere the copy is there at once, and is
    read as late, so that runs are the same on every device.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def swap(self, values: Tensor) -> list[float] | None:
        """Begin to copy a vector, and return the one before it; None if there is none."""
        before = self.pop()
        on_cuda = values.device.type == "cuda"
        self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._copy.copy_(values, non_blocking=True)
        if on_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))
        return before

    def pop(self) -> list[float] | None:
        """Return the last vector now, and forget it; None if there is none. The host waits until it is computed."""
        copy, self._copy = self._copy, None
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return None if copy is None else copy.tolist()


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
    listeners = callbacks_of(trainer, PauseListener)
    for listener in listeners:
        listener.on_pause(activity)
    try:
        yield
    finally:
        for listener in listeners:
            listener.on_resume()
