"""Callbacks that stop a run cleanly on signals and on non-finite losses."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.callbacks import lightning_loops
from sd_lightning.callbacks.steps import Lagged, StepCallback, callbacks_of
from sd_lightning.storage import checkpoint
from sd_lightning.strategies import engine_of

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code of a run that was asked to stop and can be resumed (EX_TEMPFAIL of sysexits.h)."""


class StopOnSignal(StepCallback):
    """Callback that stops after the current optimizer step on SIGTERM or SIGINT; the checkpoint callback then saves.

    So it does when ``asked``, a function that may be set, returns True: for launchers that announce the end otherwise.
    A second SIGINT interrupts at once. All ranks stop at the same step, whichever rank received the signal: with
    several processes one step later, so that none of them waits for its device.
    """

    def __init__(self) -> None:
        self._is_asked = Lagged()
        self.received: signal.Signals | None = None
        self.asked: Callable[[], bool] | None = None
        self.stopped = False
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Replaces the handler that Lightning has installed by now: it broadcasts inside the signal handler.
        self.received, self.stopped, self._is_asked = None, False, Lagged()  # an earlier fit may have been stopped
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        if lightning_loops.take_over_sigterm(trainer):
            self.received = signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            return  # this was the last step: the run is complete
        if self._stops(trainer):
            self.stopped = True
            trainer.should_stop = True

    def _stops(self, trainer: pl.Trainer) -> bool:
        """Return whether this process was asked to stop, or with several, whether any was at the step before."""
        engine = engine_of(trainer.strategy)
        is_asked = self.received is not None or (self.asked is not None and self.asked())
        if not engine.has_peers:
            return is_asked
        own = torch.full((1,), float(is_asked), device=trainer.strategy.root_device)
        return self._is_asked.swap(engine.max_over_ranks(own)) == [1.0]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        lightning_loops.give_back_sigterm(trainer)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def stopped_by_signal(trainer: pl.Trainer) -> bool:
    """Return whether a signal stopped the fit. After other stops, such as EarlyStopping, the run is complete."""
    return any(each.stopped for each in callbacks_of(trainer, StopOnSignal))


@runtime_checkable
class ReportsLoss(Protocol):
    """A module that keeps the loss of its last step."""

    last_loss: Tensor | None
    """This rank's loss of the last training step, detached."""


class NonFiniteLossGuard(Callback):
    """Callback that skips updates with a NaN or infinite loss, and stops the run after several in a row.

    The device decides whether to skip. The host hears of it before the next update, or before a checkpoint or the end
    of the run, so warnings come one step late, and so does the stop, on all ranks alike. Some engines and optimizers
    must be told by the host, which then waits for the loss at every step: DeepSpeed, ColossalAI, chunks and weights in
    host memory, and optimizers that are not fused, unless a gradient scaler skips their steps.

    Args:
        patience: Number of bad steps in a row that stops the run.
        run_dir: Directory of the run, whose last good checkpoint the error message names.
    """

    def __init__(self, patience: int = 10, *, run_dir: str | Path | None = None) -> None:
        if patience < 1:
            raise UsageError(f"NonFiniteLossGuard got patience={patience}; expected at least 1, e.g. patience=10")
        self.patience = patience
        self.run_dir = run_dir
        self._forget()

    def _forget(self) -> None:
        self.bad_steps = 0
        """Latest steps in a row with a bad loss, as far as the host has heard."""
        self.total_bad_steps = 0
        """Steps of this fit with a bad loss, as far as the host has heard."""
        self._loss: Tensor | None = None
        self._latest = Lagged()
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up the losses of the step's batches: the sum is finite only if each of them is."""
        loss = pl_module.last_loss if isinstance(pl_module, ReportsLoss) else None
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.catch_up(trainer)
        loss, self._loss, self._step = self._loss, None, trainer.global_step + 1
        loss = torch.zeros((), device=trainer.strategy.root_device) if loss is None else loss.reshape(())
        engine = engine_of(trainer.strategy)
        is_bad = engine.max_over_ranks((~torch.isfinite(loss)).float())
        self._latest.swap(torch.stack([loss, is_bad.to(loss.dtype)]))
        if engine.skip_update_if(optimizer, is_bad):
            return
        if self._hear():
            engine.skip_update(optimizer)
        self._stop_if_hopeless(trainer)

    def catch_up(self, trainer: pl.Trainer) -> None:
        """Hear of the latest step now; a collective call.

        Raises:
            UsageError: It was the last of too many bad steps in a row.
        """
        self._hear()
        self._stop_if_hopeless(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.catch_up(trainer)

    def _hear(self) -> bool:
        """Read the latest step's loss, if it is not read yet; return whether it is bad on any rank."""
        latest = self._latest.pop()
        if latest is None:
            return False
        loss, is_bad = latest
        if not is_bad:
            self.bad_steps = 0
            return False
        self.bad_steps += 1
        self.total_bad_steps += 1
        value = "not finite on another process" if math.isfinite(loss) else f"{loss}"
        log.warning("step %d: the loss is %s; no update", self._step, value)
        return True

    def _stop_if_hopeless(self, trainer: pl.Trainer) -> None:
        if self.bad_steps >= self.patience:
            raise UsageError(
                f"training stopped at step {self._step}: the loss was NaN or infinite {self.bad_steps} "
                f"steps in a row; {last_good(trainer, self.run_dir)}; {REMEDY}"
            )


REMEDY = "resume with a lower optimizer.lr, a gradient clip (trainer.gradient_clip_val=1) or trainer.precision=32"
"""Remedy for non-finite losses and weights, for error messages."""


class BadSteps(NamedTuple):
    """Steps with a non-finite loss, equal on all ranks."""

    in_a_row: int = 0
    """The latest steps of the fit."""
    total: int = 0


def bad_steps(trainer: pl.Trainer, *, latest: bool) -> BadSteps:
    """Return the number of steps with a non-finite loss; zeros without a guard.

    Args:
        trainer: The running trainer.
        latest: Wait for the loss of the latest step, of which guards hear one step late; a collective call.

    Raises:
        UsageError: A guard stops the run.
    """
    guards = callbacks_of(trainer, NonFiniteLossGuard)
    if latest:
        for guard in guards:
            guard.catch_up(trainer)
    return max((BadSteps(guard.bad_steps, guard.total_bad_steps) for guard in guards), default=BadSteps())


def last_good(trainer: pl.Trainer, run_dir: str | Path | None) -> str:
    """Return a clause that names the newest valid checkpoint of a run; a collective call.

    It is good: ``PortableCheckpoint`` saves nothing while the loss or the weights are not finite.
    """
    good = checkpoint.newest_valid(run_dir) if run_dir is not None and trainer.is_global_zero else None
    good = trainer.strategy.broadcast(good)
    return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
