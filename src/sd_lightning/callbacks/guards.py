"""Callbacks that stop a run cleanly on signals and on non-finite losses."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.steps import StepCallback
from sd_lightning.storage import checkpoint
from sd_lightning.strategies import engine_of

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code of a run that was asked to stop and can be resumed (EX_TEMPFAIL of sysexits.h)."""


class StopOnSignal(StepCallback):
    """Callback that stops after the current optimizer step on SIGTERM or SIGINT; the checkpoint callback then saves.

    A second SIGINT interrupts at once. All ranks stop at the same step, whichever rank received the signal.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.stopped = False
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Replaces the handler that Lightning has installed by now: it broadcasts inside the signal handler.
        self.received, self.stopped = None, False  # an earlier fit may have been stopped
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        connector = trainer._signal_connector
        if connector.received_sigterm:  # during data preparation; Lightning would exit without a checkpoint
            connector.received_sigterm = False
            self.received = signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            return  # this was the last step: the run is complete
        if trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            self.stopped = True
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def stopped_by_signal(trainer: pl.Trainer) -> bool:
    """Return whether a signal stopped the fit. After other stops, such as EarlyStopping, the run is complete."""
    return any(isinstance(c, StopOnSignal) and c.stopped for c in trainer.callbacks)  # type: ignore[attr-defined]


@runtime_checkable
class ReportsLoss(Protocol):
    """A module that keeps the loss of its last step."""

    last_loss: Tensor | None
    """This rank's loss of the last training step, detached."""


class NonFiniteLossGuard(Callback):
    """Callback that skips updates with a NaN or infinite loss, and stops the run after several in a row.

    Args:
        patience: Number of bad steps in a row that stops the run.
        run_dir: Directory of the run, whose last good checkpoint the error message names.
    """

    def __init__(self, patience: int = 10, *, run_dir: str | Path | None = None) -> None:
        if patience < 1:
            raise UsageError(f"NonFiniteLossGuard got patience={patience}; expected at least 1, e.g. patience=10")
        self.patience = patience
        self.run_dir = run_dir
        self.bad_steps = 0
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bad_steps, self._loss = 0, None

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up the losses of the step's batches: the sum is finite only if each of them is."""
        loss = pl_module.last_loss if isinstance(pl_module, ReportsLoss) else None
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        loss, self._loss = self._loss, None
        finite = loss is None or bool(torch.isfinite(loss))
        if trainer.strategy.reduce_boolean_decision(finite, all=True):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        told = "not finite on another process" if finite or loss is None else f"{float(loss)}"
        log.warning("step %d: the loss is %s; no update", trainer.global_step + 1, told)
        engine_of(trainer.strategy).skip_update(optimizer)
        if self.bad_steps >= self.patience:
            raise UsageError(
                f"training stopped at step {trainer.global_step + 1}: the loss was NaN or infinite {self.bad_steps} "
                f"steps in a row; {last_good(trainer, self.run_dir)}; {REMEDY}"
            )


REMEDY = "resume with a lower optimizer.lr, a gradient clip (trainer.gradient_clip_val=1) or trainer.precision=32"
"""Remedy for non-finite losses and weights, for error messages."""


def num_bad_steps(trainer: pl.Trainer) -> int:
    """Return the number of latest steps in a row with a non-finite loss, equal on all ranks; 0 without a guard."""
    guards = [c for c in trainer.callbacks if isinstance(c, NonFiniteLossGuard)]  # type: ignore[attr-defined]
    return max((guard.bad_steps for guard in guards), default=0)


def last_good(trainer: pl.Trainer, run_dir: str | Path | None) -> str:
    """Return a clause that names the newest valid checkpoint of a run; a collective call.

    It is good: ``PortableCheckpoint`` saves nothing while the loss or the weights are not finite.
    """
    good = checkpoint.newest_valid(run_dir) if run_dir is not None and trainer.is_global_zero else None
    good = trainer.strategy.broadcast(good)
    return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
