"""One progress bar over the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from sd_lightning._console import start_bar
from sd_lightning._errors import UsageError
from sd_lightning.callbacks.steps import Lagged, PauseListener, callbacks_of
from sd_lightning.callbacks.throughput import Throughput
from sd_lightning.data.contract import TunableData

if TYPE_CHECKING:
    from rich.progress import Progress

_LONG_DATA_WAIT = 0.1
"""Share of the time spent waiting for data from which it is shown, with its remedy."""
_REDRAW_SECONDS = 0.5
"""Minimum seconds between updates of the bar's text."""


class TrainingProgress(ProgressBar, PauseListener):
    """Progress bar with optimizer steps, loss, images per second, a long wait for data, elapsed time and time left.

    In a terminal it is one bar, which also names the current activity (validating, sampling, saving). In a file, a
    pipe or a notebook it is a plain line every ``refresh_seconds``. Metrics logged with ``prog_bar=True`` are shown.
    The speed comes from the :class:`~sd_lightning.callbacks.throughput.Throughput` callback; without one, steps per
    second are shown. So does the data wait, shown above 10 % with what shortens it, if the data are ``TunableData``.
    Only rank 0 prints.

    Args:
        refresh_seconds: Seconds between two plain lines; 0 prints every step.

    Raises:
        UsageError: ``refresh_seconds`` is negative or not a number.
    """

    def __init__(self, refresh_seconds: float = 10.0) -> None:
        super().__init__()
        if not refresh_seconds >= 0:
            raise UsageError(f"TrainingProgress got refresh_seconds={refresh_seconds}; expected 0 or more seconds.")
        self.refresh_seconds = refresh_seconds
        self._enabled = True
        self._bar: Progress | None = None
        self._activities: list[str] = []
        self._begin = self._refreshed = 0.0
        self._shown_step = 0
        self._warm: tuple[int, float] | None = None
        self._losses = Lagged()
        self._loss: float | None = None
        """Loss of the step before: the last one would make the host wait for the GPU."""

    @override
    def disable(self) -> None:
        self._enabled = False
        self._close()

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.console.print(*args, **kwargs, markup=False, highlight=False)
        elif self._enabled:
            print(*args, **kwargs, flush=True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = self._refreshed = time.monotonic()
        self._shown_step = trainer.global_step
        self._warm, self._loss, self._losses = None, None, Lagged()
        self._activities.clear()
        if self._enabled:
            self._bar = start_bar("training", _total_steps(trainer), trainer.global_step)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        now = time.monotonic()
        if self._warm is None:
            self._warm = (trainer.global_step, now)
        if self._enabled:
            self._note(_loss(outputs))
        if self._enabled and now - self._refreshed >= (self.refresh_seconds if self._bar is None else _REDRAW_SECONDS):
            self._show(trainer, now)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled and (self._bar is not None or self._shown_step != trainer.global_step):
            self._note(None)
            self._show(trainer, time.monotonic())
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_pause(self, activity: str) -> None:
        self._activities.append(activity)
        self._describe()

    @override
    def on_resume(self) -> None:
        self._activities.pop()
        self._describe()

    def _note(self, loss: torch.Tensor | None) -> None:
        """Remember the last loss, or show it from now on if there is no new one."""
        before = self._losses.pop() if loss is None else self._losses.swap(loss.reshape(1))
        if before is not None:
            (self._loss,) = before

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _describe(self) -> None:
        if self._bar is not None:
            activity = self._activities[-1] if self._activities else "training"
            self._bar.update(self._bar.task_ids[0], description=activity)

    def _show(self, trainer: Trainer, now: float) -> None:
        self._refreshed, self._shown_step = now, trainer.global_step
        total = _total_steps(trainer)
        loss, others = self._metrics(trainer)
        seconds = self._seconds_per_step(trainer.global_step, now)
        times = [f"elapsed {clock_time(now - self._begin)}"]
        if total is not None and seconds is not None:
            # Validation, sampling and saving recur, so the estimate includes their time.
            times.insert(0, f"left {clock_time((total - trainer.global_step) * seconds)}")
        # Most important first: a narrow terminal cuts the end.
        measured = next(iter(callbacks_of(trainer, Throughput)), None)
        parts = [*loss, *_speed(measured, seconds), *_long_data_wait(trainer, measured), *times, *others]
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step, text="  ".join(parts))
        else:
            steps = f"step {trainer.global_step}" + ("" if total is None else f"/{total}")
            self.print(" | ".join([steps, *parts]))

    def _metrics(self, trainer: Trainer) -> tuple[list[str], list[str]]:
        """Return the losses and the other metrics of the progress bar as text."""
        shown = {name.rpartition("/")[2]: value for name, value in trainer.progress_bar_metrics.items()}
        if self._loss is not None and not any("loss" in name for name in shown):
            # Lightning divides a batch's loss by their number before callbacks see it.
            parts = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
            shown = {"loss": self._loss * parts, **shown}
        texts = {name: f"{name} {float(value):.4g}" for name, value in shown.items()}
        losses = [text for name, text in texts.items() if "loss" in name]
        return losses, [text for text in texts.values() if text not in losses]

    def _seconds_per_step(self, step: int, now: float) -> float | None:
        """Return the mean over this process's steps after the first, which includes warm-up."""
        if self._warm is None or step <= self._warm[0]:
            return None
        return max(now - self._warm[1], 1e-9) / (step - self._warm[0])


def clock_time(seconds: float) -> str:
    """Format a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _total_steps(trainer: Trainer) -> int | None:
    steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
    return None if math.isinf(steps) else int(steps)


def _loss(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) else None


def _speed(measured: Throughput | None, seconds_per_step: float | None) -> list[str]:
    if measured is not None and measured.images_per_second is not None:
        return [f"{_three_digits(measured.images_per_second)} img/s"]
    return [] if seconds_per_step is None else [f"{_three_digits(1 / seconds_per_step)} steps/s"]


def _long_data_wait(trainer: Trainer, measured: Throughput | None) -> list[str]:
    if measured is None or measured.data_wait is None or measured.data_wait <= _LONG_DATA_WAIT:
        return []
    data = trainer.datamodule  # type: ignore[attr-defined]
    remedy = data.bottleneck_remedy() if isinstance(data, TunableData) else None
    return [f"data wait {measured.data_wait:.0%}" + (f" ({remedy})" if remedy else "")]


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
