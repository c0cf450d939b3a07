"""Callback for portable checkpoints: saves at an interval and at the end, restores before the first step."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from sd_lightning._errors import UsageError
from sd_lightning.callbacks import lightning_loops
from sd_lightning.callbacks.checkpoint import pipeline, restore, trainer_state, writer
from sd_lightning.callbacks.checkpoint.best import Best
from sd_lightning.callbacks.checkpoint.optimizer_change import configured_groups
from sd_lightning.callbacks.checkpoint.pipeline import PipelineModule
from sd_lightning.callbacks.guards import REMEDY, BadSteps, ReportsLoss, bad_steps, last_good, stopped_by_signal
from sd_lightning.callbacks.steps import StepCallback, paused
from sd_lightning.data.contract import ComparableData, ResumableData
from sd_lightning.storage import checkpoint, runs, typed_json
from sd_lightning.storage.atomic import check_place
from sd_lightning.storage.runs import RunFolder
from sd_lightning.storage.uploads import RunUploads
from sd_lightning.strategies import training_state

log = logging.getLogger(__name__)


@dataclass
class _Rotation:
    """Checkpoints to keep: the newest, and the last one before non-finite losses.

    The latter is kept until all losses from one checkpoint to the next are finite.
    """

    newest: Path | None = None
    """The checkpoint that was saved last, or restored."""
    due: int | None = None
    """Step of a postponed checkpoint, which is saved after the next finite loss."""
    before: Path | None = None
    """The last checkpoint before non-finite losses, while it is kept."""
    _loss_is_bad: bool = False
    """Whether any loss since the newest checkpoint was not finite."""
    _total_bad: int = 0
    """Number of bad steps of the fit when last told."""

    def after_step(self, bad: BadSteps) -> bool:
        """Record the bad steps so far, and return whether a postponed checkpoint can be saved now."""
        self._loss_is_bad |= bad.total > self._total_bad
        self._total_bad = bad.total
        if self._loss_is_bad and self.before is None:
            self.before = self.newest
        return self.due is not None and not bad.in_a_row

    def put_off(self, step: int) -> None:
        """Postpone the checkpoint of a step whose loss is not finite."""
        self.due, self._loss_is_bad = step, True

    def saved(self, path: Path) -> None:
        """Record a new checkpoint."""
        if not self._loss_is_bad:
            self.before = None
        self.newest, self.due, self._loss_is_bad = path, None, False


class PortableCheckpoint(StepCallback, Checkpoint):
    """Callback for checkpoints of any LightningModule that any strategy and world size can resume.

    A checkpoint holds ``state/`` (float32 weights, optimizer states and average as flat tensors in safetensors) and
    ``trainer.json``. That of a :class:`~sd_lightning.callbacks.checkpoint.pipeline.PipelineModule` also holds
    ``pipeline/`` for diffusers (averaged weights if there is an EMA; frozen parts hard-linked); other modules' frozen
    weights are in no checkpoint. Nothing in it is ever unpickled. It is complete or absent: see
    :mod:`sd_lightning.storage.checkpoint`. The data have to be ``ResumableData``.

    While the loss is not finite no checkpoint is written; one that was due is written after the next finite loss. The
    last checkpoint before such losses is kept until all losses from one checkpoint to the next are finite. Non-finite
    weights or averages end the run.

    Args:
        run_dir: Directory of the run: new, empty, or of an earlier run; checkpoints go to ``<run_dir>/checkpoints``.
        every_n_steps: Optimizer steps between checkpoints; 0 saves only when training ends.
        keep: How many of the newest checkpoints stay on disk.
        monitor: A metric of the validations, such as "val/caption_gap": the checkpoint where it is best is kept, too.
            Every checkpoint has to be validated.
        mode: Whether the least or the greatest is best; None: the least of a loss, the greatest of others.
        resume: Checkpoint directory to resume.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        every_n_steps: int = 500,
        keep: int = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        resume: str | Path | None = None,
    ) -> None:
        if mode not in (None, "min", "max") or (mode is not None and monitor is None):
            raise UsageError(
                f"PortableCheckpoint got mode={mode} and monitor={monitor}; expected min or max, beside a monitor; "
                "write monitor=val/caption_gap, and leave mode out"
            )
        if every_n_steps < 0:
            raise UsageError(
                f"PortableCheckpoint got every_n_steps={every_n_steps}; expected 0 or more, e.g. every_n_steps=500"
            )
        if keep < 1:
            raise UsageError(f"PortableCheckpoint got keep={keep}; expected at least 1, e.g. keep=3")
        check_place(run_dir, key=writer.KEY)
        self.run_dir = Path(run_dir)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume = None if resume is None else Path(resume)
        self.folder = RunFolder(self.run_dir)
        """The run's folder, locked from before the first step until the fit ends."""
        self.uploads: RunUploads | None = None
        """On rank 0 of a run in a bucket: what uploads its folder."""
        self.pretrained_url: str | None = None
        """The pipeline in a bucket from which the run started."""
        self.restored: Path | None = None
        """The checkpoint that the last fit resumed."""
        self._record = trainer_state.RunRecord()
        usual: Literal["min", "max"] = "min" if monitor is not None and "loss" in monitor else "max"
        self.best = None if monitor is None else Best(monitor, mode or usual)
        """The best step by ``monitor``."""
        self._rotation = _Rotation()
        self._saved_callbacks: str | None = None
        self._is_later_fit = False
        self._has_frozen_of: pl.LightningModule | None = None
        """The module whose frozen parts are in the run's folder, if a fit has written them."""

    @property
    def last_saved(self) -> Path | None:
        """The newest checkpoint of the run."""
        return self._rotation.newest

    @property
    def result(self) -> Path | None:
        """The best checkpoint by ``monitor``, else the newest: that of the run's pipeline."""
        return (self.best and self.best.path(self.run_dir)) or self.last_saved

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else asdict(self.best)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.best is not None and self.resume is not None:
            self.best.load(state_dict, self.run_dir, checkpoint.step_of(self.resume))

    @property
    def train_seconds(self) -> float:
        """Seconds that the run spent in ``fit``, earlier sessions included."""
        return self._record.train_seconds

    @property
    def loss(self) -> float | None:
        """Training loss at the step of the newest checkpoint, mean over all ranks."""
        return self._record.loss

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lock the run's folder, and write what is frozen before an engine shards it, or the module casts it."""
        if not isinstance(trainer.strategy.checkpoint_io, restore.CheckpointFolders):
            trainer.strategy.checkpoint_io = restore.CheckpointFolders(
                self.run_dir, partial(self._resume_from, trainer), trainer, trainer.strategy.checkpoint_io
            )
        if stage != "fit":
            return
        datamodule = restore.check_can_resume(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        self.resume = restore.agree_on_checkpoint(trainer, self.resume)
        restore.agree_on_pretrained(self.pretrained_url)
        if not is_overridden("configure_model", pl_module):  # else its networks are built later; `restore` checks them
            self.check_resume(pl_module, datamodule)
        self.restored, self._is_later_fit = None, trainer.global_step > 0
        writer.take_folder(trainer, self.folder)
        if trainer.is_global_zero and isinstance(pl_module, PipelineModule):
            self._record.frozen |= pipeline.fingerprints(pl_module)
            pipeline.write_frozen_weights(self.run_dir, pl_module)
            start = self.resume or trainer.ckpt_path
            is_ours = self._has_frozen_of is pl_module or (self._has_frozen_of is None and self._holds(start))
            goes_on = self._goes_on(start) or not checkpoint.all_checkpoints(self.run_dir)
            if goes_on and not (is_ours and (self.run_dir / "frozen").exists()):
                pipeline.write_frozen_parts(self.run_dir, pl_module)
                self._has_frozen_of = pl_module

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore.check_schedulers(trainer)
        self._record.start_clock()
        self._rotation, self._saved_callbacks = _Rotation(), None
        if trainer.is_global_zero:
            datamodule: object = trainer.datamodule  # type: ignore[attr-defined]
            self._record.data = datamodule.fingerprint() if isinstance(datamodule, ComparableData) else None
        self._record.configured = configured_groups(training_state(trainer).optimizer_groups())
        self.restore(trainer, pl_module)
        typed_json.dumps(trainer_state.callback_states(trainer))  # an unsavable state raises now, not after hours
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._open_run(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:  # ``trainer.ckpt_path`` is known only now
            self._open_run(trainer, pl_module)
        super().on_train_start(trainer, pl_module)  # after the restore, which sets the step
        if self.best is not None:
            self.best.check(trainer, self.every_n_steps)
        if trainer.is_global_zero:
            runs.go_back(self.run_dir, trainer.global_step)  # by now any kind of checkpoint has been restored
            if self.uploads is not None:
                self.uploads.begin()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        lightning_loops.set_logged_step(trainer)

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        step = trainer.global_step
        # Save the last checkpoint before the last pictures are drawn, which is slow.
        at_end = trainer.should_stop or step == trainer.max_steps
        is_due = at_end or (self.every_n_steps > 0 and step % self.every_n_steps == 0)
        reads = is_due or self._rotation.due is not None  # else the losses may be a step behind
        is_owed = self._rotation.after_step(bad_steps(trainer, latest=reads))
        if is_due or is_owed:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        newest, step = self.last_saved, trainer.global_step
        if self.best is not None and not trainer.sanity_checking and newest and checkpoint.step_of(newest) == step:
            self.best.look(trainer, step)
        self._amend(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._amend(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        if self.last_saved is not None and checkpoint.step_of(self.last_saved) == step:
            return
        saved = None if self._rotation.due == step else self.save(trainer, pl_module)
        if saved is None and not stopped_by_signal(trainer):
            bad = max(bad_steps(trainer, latest=True).in_a_row, 1)
            shorter = f", or end before them with trainer.max_steps={step - bad}" if step > bad else ""
            raise UsageError(
                f"training ended at step {step} amid losses that are NaN or infinite ({bad} in a row), which are not "
                f"saved; {last_good(trainer, self.run_dir)}; {REMEDY}{shorter}"
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record.read_clock()
        self.folder.unlock()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.folder.unlock()

    def save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Path | None:
        """Write the checkpoint of the current step; a collective call.

        Returns:
            The checkpoint; None if the loss is not finite on some rank and nothing was saved.

        Raises:
            UsageError: The disk is full on some rank, or weights are not finite; the last good checkpoint remains.
        """
        with paused(trainer, "saving"):
            loss = self.loss
            last_loss = pl_module.last_loss if isinstance(pl_module, ReportsLoss) else None
            if last_loss is not None:  # the mean is finite only if the loss of each rank is
                loss = float(trainer.strategy.reduce(last_loss.clone(), reduce_op="mean"))
            if bad_steps(trainer, latest=True).in_a_row or not math.isfinite(loss or 0.0):
                self._rotation.put_off(trainer.global_step)
                log.warning("step %d: no checkpoint is saved while the loss is not finite", trainer.global_step)
                return None
            self._record.loss = loss
            saved = writer.write_checkpoint(trainer, pl_module, self.run_dir, self._record)
            self._saved_callbacks = typed_json.dumps(trainer_state.callback_states(trainer))
            self._rotation.saved(saved)
            if trainer.is_global_zero:
                busy = None if self.uploads is None else self.uploads.busy
                best = None if self.best is None else self.best.path(self.run_dir)
                checkpoint.prune(self.run_dir, self.keep, trusted=saved, also={self._rotation.before, busy, best})
                log.info("saved %s", saved)
                self._publish(saved)
            return saved

    def _amend(self, trainer: pl.Trainer) -> None:
        """Update the callback states in the newest checkpoint after the validation of its step.

        That validation runs after the save, changes callbacks such as EarlyStopping, and is not repeated on resume.
        """
        newest, saved = self.last_saved, self._saved_callbacks
        if newest is None or saved is None or checkpoint.step_of(newest) != trainer.global_step:
            return
        callbacks = trainer_state.callback_states(trainer)
        text = typed_json.dumps(callbacks)
        if trainer.strategy.reduce_boolean_decision(text != saved, all=False):
            with paused(trainer, "saving"):
                writer.replace_callbacks(trainer, self.run_dir, newest, callbacks)
                self._publish(newest)
            self._saved_callbacks = text

    def _publish(self, saved: Path) -> None:
        if self.uploads is not None:
            self.uploads.publish(saved, self._rotation.before)

    def _open_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if the directory holds another run; then write the files that checkpoints share."""
        writer.refuse_another_run(trainer, self.run_dir, goes_on=self._goes_on(self.restored or trainer.ckpt_path))
        has_frozen = self._has_frozen_of is pl_module or self._holds(self.restored)
        writer.prepare_folder(trainer, pl_module, self.run_dir, keep=self.keep, has_frozen=has_frozen)
        self._has_frozen_of = pl_module

    def _goes_on(self, start: str | Path | None) -> bool:
        """Return whether a fit from a checkpoint continues the folder's run; a Lightning file does not name its run."""
        is_unnamed = start is not None and not checkpoint.is_portable(start)
        return self._is_later_fit or is_unnamed or self._holds(start)

    def _holds(self, start: str | Path | None) -> bool:
        return start is not None and runs.holds(self.run_dir, Path(start))

    def check_resume(self, pl_module: pl.LightningModule, datamodule: ResumableData) -> None:
        """Compare the checkpoint to resume, if any, with the run before it starts.

        Raises:
            UsageError: The checkpoint has another model, batch size, seed or adapters.
        """
        if self.resume is not None:
            saved = trainer_state.read_trainer_state(self.resume)
            restore.check_same_run(saved, pl_module, datamodule.batch_size, self.resume)
            if isinstance(pl_module, PipelineModule):
                pipeline.check_same_frozen(saved, pl_module, self.resume)

    def check_data(self, datamodule: pl.LightningDataModule) -> None:
        """Compare the training set with that of the checkpoint to resume, if any, before the run starts.

        Raises:
            UsageError: The checkpoint is in the middle of an epoch whose samples have changed.
        """
        if self.resume is not None:
            restore.compare_data(datamodule, trainer_state.read_trainer_state(self.resume), self.resume)

    def _resume_from(self, trainer: pl.Trainer, path: Path) -> None:
        """Resume a checkpoint that Lightning was given as ``ckpt_path``."""
        self.resume = path
        if trainer.strategy.restore_checkpoint_after_setup:  # else on_fit_start restores
            self.restore(trainer, trainer.lightning_module)

    def restore(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the checkpoint ``resume``, if given, before the first step; only the first ``fit`` restores it."""
        if self.resume is not None:
            restore.restore(trainer, pl_module, self.resume, self._record)
            self._rotation.newest = self.restored = self.resume
            self.resume = None
