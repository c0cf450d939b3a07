"""Portable checkpoints as a callback: save at an interval and at the end, restore before the first step."""

from __future__ import annotations

import logging
import math
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.data import (
    compare_data,
    data_fingerprint,
    gather_bad_samples,
    go_on_with_data,
)
from sd_lightning.callbacks.checkpoint.folders import CheckpointFolders
from sd_lightning.callbacks.checkpoint.frozen_weights import check_same_frozen, fingerprints, write_frozen_weights
from sd_lightning.callbacks.checkpoint.pipeline import write_pipeline
from sd_lightning.callbacks.checkpoint.position import RunPosition, restore_position
from sd_lightning.callbacks.checkpoint.scheduler_state import load_scheduler_state, scheduler_state
from sd_lightning.callbacks.checkpoint.trainer_state import (
    FORMAT,
    adopt_settings,
    check_same_model,
    check_same_parts,
    configured_groups,
    read_trainer_state,
    trained_parts,
)
from sd_lightning.callbacks.ema import EMA, ema_of
from sd_lightning.callbacks.guards import REMEDY, last_good, num_bad_steps, stopped_by_signal
from sd_lightning.callbacks.throughput import paused
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.state.optimizer_change import keep_states
from sd_lightning.state.shards import ParameterShard, SavedParameter
from sd_lightning.storage import checkpoint, run_folder, runs, typed_json
from sd_lightning.storage.tensor_store import Entry, ShardedTensors, merge_index, write_shards
from sd_lightning.strategies import training_state
from sd_lightning.strategies.base import whole_shape

log = logging.getLogger(__name__)

_KEY = "PortableCheckpoint got run_dir"
_NFS_SECONDS = 90.0
"""NFS clients may not see a new directory for a minute."""


class PortableCheckpoint(Checkpoint):
    """Write checkpoints that any strategy and world size can resume, and whose ``pipeline/`` diffusers loads.

    A checkpoint holds ``pipeline/`` (averaged weights if there is an EMA; frozen parts hard-linked), ``state/``
    (float32 weights, optimizer states and average as flat tensors in safetensors) and ``trainer.json``. Nothing in it
    is ever unpickled. It is complete or absent: see :mod:`sd_lightning.storage.checkpoint`.

    Every checkpoint is a good one. None is written amid losses that are not finite; the one that was due follows after
    the next finite loss, and the last one from before stays until the run has gone well from one checkpoint to the
    next. Weights, or an average, that are not finite end the run.

    Args:
        run_dir: Directory of the run, new, empty or a run's; checkpoints go to ``<run_dir>/checkpoints``.
        every_n_steps: Optimizer steps between checkpoints; 0 saves only when training ends.
        keep: How many of the newest checkpoints stay on disk.
        resume: Checkpoint directory to continue.
    """

    def __init__(
        self, run_dir: str | Path, *, every_n_steps: int = 500, keep: int = 3, resume: str | Path | None = None
    ) -> None:
        if every_n_steps < 0:
            raise UsageError(
                f"PortableCheckpoint got every_n_steps={every_n_steps}; expected 0 or more, e.g. every_n_steps=500"
            )
        if keep < 1:
            raise UsageError(f"PortableCheckpoint got keep={keep}; expected at least 1, e.g. keep=3")
        run_folder.check_place(run_dir, key=_KEY)
        self.run_dir = Path(run_dir)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume = None if resume is None else Path(resume)
        self.last_saved: Path | None = None
        self.train_seconds = 0.0
        """Seconds that the run spent in ``fit``, earlier sessions included."""
        self.loss: float | None = None
        """Training loss of the step that the newest checkpoint is of, the mean over all processes."""
        self._fingerprints: dict[str, str] = {}
        self._saved_callbacks: str | None = None
        self._configured: list[list[dict[str, Any]]] = []
        self._data: dict[str, Any] | None = None
        """Fingerprint of the training set when the fit began, on rank 0."""
        self._clock = 0.0
        self._last_step = 0
        self._restored: Path | None = None
        """The checkpoint that this fit continues."""
        self._is_later_fit = False
        self._due: int | None = None
        """Step whose checkpoint was not saved because of the loss, and is still owed."""
        self._loss_is_bad = False
        """Whether there was a loss that is not finite since the newest checkpoint."""
        self._before: Path | None = None
        """The last checkpoint from before such losses, for as long as it is kept."""

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Keep the frozen weights of trained networks as they are before an engine shards them or rounds them."""
        if not isinstance(trainer.strategy.checkpoint_io, CheckpointFolders):
            trainer.strategy.checkpoint_io = CheckpointFolders(self, trainer, trainer.strategy.checkpoint_io)
        if stage != "fit":
            return
        _check_data(trainer.datamodule)  # type: ignore[attr-defined]
        self.check_resume(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        self._restored, self._is_later_fit = None, trainer.global_step > 0
        self._lock(trainer)
        if trainer.is_global_zero:
            self._fingerprints |= fingerprints(pl_module)
            write_frozen_weights(self.run_dir, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = time.perf_counter()
        self.last_saved = self._saved_callbacks = self._before = None
        self._due, self._loss_is_bad = None, False
        if trainer.is_global_zero:
            self._data = data_fingerprint(trainer)
        self._configured = configured_groups(training_state(trainer).optimizer_groups())
        self.restore(trainer, pl_module)
        self._refuse_unsavable(trainer)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._open_run(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:  # not before now does Lightning say what ``ckpt_path`` is
            self._open_run(trainer, pl_module)
        if trainer.is_global_zero:
            runs.go_back(self.run_dir, trainer.global_step)  # by now any kind of checkpoint has been restored

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A validation that was due at the checkpoint is left out after it, and Lightning counts a step for loggers.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        self._loss_is_bad |= num_bad_steps(trainer) > 0
        # The last one is saved before the last pictures are drawn, which takes a while.
        at_end = trainer.should_stop or step == trainer.max_steps
        if self._loss_is_bad and self._before is None:
            self._before = self.last_saved
        due = self._due is not None and not num_bad_steps(trainer)
        if at_end or due or (self.every_n_steps and step % self.every_n_steps == 0):
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._amend(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._amend(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        if self.last_saved is not None and checkpoint.step_of(self.last_saved) == step:
            return
        saved = None if self._due == step else self.save(trainer, pl_module)
        if saved is None and not stopped_by_signal(trainer):
            bad = max(num_bad_steps(trainer), 1)
            shorter = f", or end before them with trainer.max_steps={step - bad}" if step > bad else ""
            raise UsageError(
                f"training ended at step {step} amid losses that are NaN or infinite ({bad} in a row), which are not "
                f"saved; {last_good(trainer, self.run_dir)}; {REMEDY}{shorter}"
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds()
        runs.unlock(self.run_dir)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        runs.unlock(self.run_dir)

    # ------------------------------------------------------------------ saving

    def save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Path | None:
        """Write the checkpoint of the present step; a collective call.

        Returns:
            The checkpoint; None if the loss is not finite, on any rank, and nothing was saved.

        Raises:
            UsageError: The disk is full, on any rank, or weights are not finite; the last good checkpoint is left as
                it was.
        """
        with paused(trainer, "saving"):
            loss = self._mean_loss(trainer, pl_module)
            if num_bad_steps(trainer) or not math.isfinite(loss or 0.0):
                self._due, self._loss_is_bad = trainer.global_step, True
                log.warning("step %d: no checkpoint is saved while the loss is not finite", trainer.global_step)
                return None
            self.loss = loss
            return self._save(trainer, pl_module)

    def _mean_loss(self, trainer: pl.Trainer, pl_module: Any) -> float | None:
        """Return the loss of the present step, the mean over all ranks: finite only if each is."""
        if pl_module.last_loss is None:
            return self.loss
        return float(trainer.strategy.reduce(pl_module.last_loss.clone(), reduce_op="mean"))

    def _save(self, trainer: pl.Trainer, pl_module: Any) -> Path:
        strategy = trainer.strategy
        step = trainer.global_step
        shards = training_state(trainer).parameter_shards()
        ema = ema_of(trainer)
        tmp: Path | None = None
        error: Exception | None = None
        try:
            if trainer.is_global_zero:
                tmp = checkpoint.begin(self.run_dir, step)
                (tmp / "state").mkdir()
        except Exception as caught:
            error = caught
        self._agree(trainer, tmp, step, error)
        tmp = strategy.broadcast(tmp)
        assert tmp is not None
        not_finite: list[str] = []
        try:
            entries = _entries(shards, ema, not_finite)
            write_shards(tmp / "state", trainer.global_rank, trainer.world_size, entries)
        except Exception as caught:
            error = caught
        self._agree(trainer, tmp, step, error)
        self._check_finite(trainer, tmp, not_finite)
        parameters = _saved_parameters(shards)
        bad_samples = gather_bad_samples(trainer)
        if trainer.is_global_zero:
            try:
                known = {f"state/{k}": v for k, v in merge_index(tmp / "state", trainer.world_size).items()}
                known |= write_pipeline(self.run_dir, tmp, pl_module, averaged=ema is not None)
                (tmp / "trainer.json").write_text(
                    typed_json.dumps(self._trainer_state(trainer, parameters, bad_samples))
                )
                checkpoint.commit(tmp, known=known)
            except Exception as caught:
                error = caught
        self._agree(trainer, tmp, step, error)
        self.last_saved = checkpoint.checkpoint_path(self.run_dir, step)
        self._saved_callbacks = typed_json.dumps(_callback_states(trainer))
        if not self._loss_is_bad:
            self._before = None
        if trainer.is_global_zero:
            checkpoint.prune(self.run_dir, self.keep, trusted=self.last_saved, also=self._before)
            log.info("saved %s", self.last_saved)
        self._due, self._loss_is_bad = None, False
        return self.last_saved

    def _check_finite(self, trainer: pl.Trainer, tmp: Path, not_finite: list[str]) -> None:
        """End the run if any rank has found weights that are not finite: no later step mends them."""
        if trainer.strategy.reduce_boolean_decision(not not_finite, all=True):
            return
        if trainer.is_global_zero:
            shutil.rmtree(tmp, ignore_errors=True)
        more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
        where = f"{not_finite[0]}{more}" if not_finite else "on another process"
        raise UsageError(
            f"training stopped at step {trainer.global_step}: weights are NaN or infinite ({where}), which are not "
            f"saved; {last_good(trainer, self.run_dir)}; {REMEDY}"
        )

    def _amend(self, trainer: pl.Trainer) -> None:
        """Add to the checkpoint just written what callbacks learn from its step's validation, as EarlyStopping does.

        The validation comes after the save, and a resumed run does not repeat it.
        """
        step = trainer.global_step
        if self.last_saved is None or self._saved_callbacks is None or checkpoint.step_of(self.last_saved) != step:
            return
        callbacks = _callback_states(trainer)
        text = typed_json.dumps(callbacks)
        if trainer.strategy.reduce_boolean_decision(text != self._saved_callbacks, all=False):
            with paused(trainer, "saving"):
                self._replace_callbacks(trainer, callbacks)
            self._saved_callbacks = text

    def _replace_callbacks(self, trainer: pl.Trainer, callbacks: dict[str, Any]) -> None:
        """Write the newest checkpoint again with other states of callbacks; what stays the same is hard-linked."""
        assert self.last_saved is not None
        tmp: Path | None = None
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                tmp = checkpoint.begin(self.run_dir, trainer.global_step)
                checkpoint.hard_link_tree(self.last_saved, tmp)
                for name in ("trainer.json", checkpoint.MANIFEST_NAME):
                    (tmp / name).unlink()  # writing into them would change the checkpoint that is to be replaced
                saved = read_trainer_state(self.last_saved) | {"callbacks": callbacks}
                (tmp / "trainer.json").write_text(typed_json.dumps(saved))
                checkpoint.commit(tmp)
            except Exception as caught:
                error = caught
        self._agree(trainer, tmp, trainer.global_step, error)

    def _agree(self, trainer: pl.Trainer, tmp: Path | None, step: int, error: Exception | None) -> None:
        """Let all ranks fail together: remove what was written and raise if saving failed on any."""
        if trainer.strategy.reduce_boolean_decision(error is None, all=True):
            return
        if trainer.is_global_zero and tmp is not None:
            shutil.rmtree(tmp, ignore_errors=True)
        if error is None:
            raise UsageError(f"Saving the checkpoint of step {step} failed on another process; see its message")
        raise checkpoint.disk_full(error, self.run_dir, step) or error

    def _lock(self, trainer: pl.Trainer) -> None:
        """Refuse a directory that holds anything but a run, or lock and mark it; fail on all ranks together."""
        refused = None
        if trainer.is_global_zero:
            try:
                others = _logged(trainer, self.run_dir)
                run_folder.check_ours(self.run_dir, key=_KEY, others=others)
                runs.prepare(self.run_dir, key=_KEY, others=others)
            except (UsageError, OSError) as error:
                refused = str(error)
        _fail_together(trainer, refused)

    def _open_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a directory that holds another run; then write what checkpoints share."""
        self._refuse_another_run(trainer)
        if trainer.is_global_zero:
            checkpoint.clean(self.run_dir)
            self._write_frozen(pl_module)
            self._announce(trainer)
        trainer.strategy.barrier("checkpoint.open_run")
        self._check_shared(trainer)

    def _refuse_another_run(self, trainer: pl.Trainer) -> None:
        """Fail on all ranks together where the directory holds a run that this fit does not continue."""
        refused = None
        if trainer.is_global_zero:
            newest = None if self._goes_on(trainer) else checkpoint.newest_valid(self.run_dir)
            if newest is not None:
                refused = (
                    f"PortableCheckpoint got run_dir={self.run_dir}, which already holds a run; continue it with "
                    f"resume='{newest}', or give another run_dir"
                )
        _fail_together(trainer, refused)

    def _goes_on(self, trainer: pl.Trainer) -> bool:
        """Whether a fit continues the run in the directory; which run a file of Lightning is of, it does not say."""
        start = self._restored or trainer.ckpt_path
        if self._is_later_fit or start is None:
            return self._is_later_fit
        return runs.holds(self.run_dir, Path(start)) or not checkpoint.is_portable(start)

    def _write_frozen(self, pl_module: Any) -> None:
        """Save once per run what every checkpoint's pipeline shares: all but the trained networks' weights."""
        frozen, tmp = self.run_dir / "frozen", self.run_dir / ".tmp-frozen"
        if frozen.exists() and self._restored is not None and runs.holds(self.run_dir, self._restored):
            return
        for leftover in (frozen, tmp):
            shutil.rmtree(leftover, ignore_errors=True)
        model: LatentDiffusion = pl_module.latent_diffusion
        try:
            model.save_pretrained(tmp, skip=tuple(pl_module.trained_networks()))
        except Exception as error:
            raise checkpoint.disk_full(error, self.run_dir, 0) or error from error
        tmp.rename(frozen)

    def _trainer_state(
        self, trainer: pl.Trainer, parameters: dict[str, Any], bad_samples: dict[str, str]
    ) -> dict[str, Any]:
        state = training_state(trainer)
        return {
            "format": FORMAT,
            "position": vars(RunPosition.of(trainer)),
            "data": self._data,
            "bad_samples": bad_samples,
            "train_seconds": self._seconds(),
            "loss": self.loss,
            "trained_parts": _trained_parts(trainer.lightning_module),
            "frozen": self._fingerprints,
            "parameters": parameters,
            "optimizers": state.optimizer_names(),
            "optimizer_groups": state.optimizer_groups(),
            "configured_groups": self._configured,
            "schedulers": [scheduler_state(config.scheduler) for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": _callback_states(trainer),
        }

    def _seconds(self) -> float:
        now = time.perf_counter()
        self.train_seconds += now - self._clock
        self._clock = now
        return self.train_seconds

    def _refuse_unsavable(self, trainer: pl.Trainer) -> None:
        """Find out before the first step, not after hours, that something cannot be saved."""
        typed_json.dumps(_callback_states(trainer))

    def _check_shared(self, trainer: pl.Trainer) -> None:
        """Find out before the first step that this machine does not see what rank 0 has just written."""
        until = time.monotonic() + _NFS_SECONDS
        while not (self.run_dir / "frozen").is_dir():
            if time.monotonic() > until:
                raise UsageError(
                    f"rank {trainer.global_rank} on {socket.gethostname()} does not see output_dir={self.run_dir}, "
                    "which rank 0 has made; put it on a file system that all machines share"
                )
            time.sleep(0.5)

    def _announce(self, trainer: pl.Trainer) -> None:
        """Print the size of a checkpoint and refuse a disk that cannot hold it."""
        shards = training_state(trainer).parameter_shards()
        trained = sum(shard.end - shard.begin for shard in shards)
        # Weights, two moments, and the average in the state; weights once more in the pipeline; all float32.
        size = 4 * trained * (4 + (ema_of(trainer) is not None))
        shared = sum(f.stat().st_size for f in (self.run_dir / "frozen").rglob("*") if f.is_file())
        log.info(
            "a checkpoint takes up to %.3g GB (+ %.3g GB of frozen parts, once); the newest %d are kept",
            size / 1e9,
            shared / 1e9,
            self.keep,
        )
        checkpoint.check_free_space(self.run_dir, 2 * size, "checkpoints")

    # ------------------------------------------------------------------ restoring

    def check_resume(self, pl_module: Any, datamodule: Any) -> None:
        """Compare the checkpoint to resume, if any, with a run that has not been started yet.

        Raises:
            UsageError: The checkpoint is of another model, or of a run with another batch size, seed or adapters.
        """
        if self.resume is None:
            return
        saved = read_trainer_state(self.resume)
        self._check_trained(saved, pl_module, datamodule)
        check_same_frozen(saved, fingerprints(pl_module), self.resume)

    def _check_trained(self, saved: dict[str, Any], pl_module: Any, datamodule: Any) -> None:
        assert self.resume is not None
        RunPosition(**saved["position"]).check_same_run(batch_size=datamodule.batch_size, seed=pl_module.seed)
        check_same_parts(saved, _trained_parts(pl_module), self.resume)
        shapes = {name: whole_shape(p) for name, p in pl_module.named_parameters() if p.requires_grad}
        check_same_model(saved["parameters"], shapes, self.resume)

    def restore(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Continue from ``resume``, if it is given, before the first step; a second ``fit`` goes on from there."""
        if self.resume is not None:
            self._restore(trainer, pl_module)
            self.resume = None
        self._last_step = trainer.global_step

    def _restore(self, trainer: pl.Trainer, pl_module: Any) -> None:
        assert self.resume is not None
        saved = read_trainer_state(self.resume)
        self._check_trained(saved, pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        position = go_on_with_data(trainer, saved, self.resume)
        state = training_state(trainer)
        told = keep_states(saved, state.optimizer_names(), self._configured)
        if told:
            log.warning("resume=%s: %s", self.resume, told)
        self._adopt_settings(saved)
        shards = state.parameter_shards()
        parameters = {name: SavedParameter(**entry) for name, entry in saved["parameters"].items()}
        with ShardedTensors(self.resume / "state") as store:

            def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
                store.read_into(f"{kind}/{name}", out, begin, end)

            state.load(parameters, saved["optimizer_groups"], read)
            ema = ema_of(trainer)
            if ema is not None:
                if all(f"ema/{shard.name}" in store for shard in shards):
                    for (name, begin), average in ema.shadow.items():
                        read("ema", name, average, begin, begin + average.numel())
                else:
                    ema.restart()
                    log.warning("%s has no EMA; the average starts at its weights", self.resume)
        configs, schedulers = trainer.lr_scheduler_configs, saved["schedulers"]
        if len(configs) != len(schedulers):
            theirs, ours = ([s["type"] for s in schedulers], [type(c.scheduler).__name__ for c in configs])
            raise UsageError(
                f"resume={self.resume}: the checkpoint's run had the lr_scheduler {', '.join(theirs) or 'none'}, this "
                f"run has {', '.join(ours) or 'none'}; resume with the same, or start a new run with init_from="
            )
        for config, scheduler in zip(configs, schedulers):
            load_scheduler_state(config.scheduler, scheduler)
        trainer.precision_plugin.load_state_dict(saved["precision"])
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
        unused = saved["callbacks"].keys() - {callback.state_key for callback in callbacks}
        if unused:
            log.warning("resume=%s: no callback takes the state of %s", self.resume, ", ".join(sorted(unused)))
        self.train_seconds = saved["train_seconds"]
        self.loss = saved.get("loss")  # checkpoints of an earlier release have none
        self.last_saved = self._restored = self.resume
        restore_position(trainer, position)
        log.info("resumed %s at step %d", self.resume, position.optimizer_steps)

    def check_data(self, datamodule: Any) -> None:
        """Compare the training set with that of the checkpoint to resume, if any, before a run is started.

        Raises:
            UsageError: The epoch that the checkpoint is in the middle of holds other samples by now.
        """
        if self.resume is not None:
            compare_data(datamodule, read_trainer_state(self.resume), self.resume)

    def _adopt_settings(self, saved: dict[str, Any]) -> None:
        """Let the optimizer's settings of this run replace those of the checkpoint where they differ."""
        changes = adopt_settings(saved, self._configured)
        if changes and "configured_groups" in saved:
            log.info("resume=%s: settings of this run's optimizer apply from here: %s", self.resume, changes)
        elif changes:
            log.warning(
                "resume=%s: an earlier release saved no optimizer settings, so these of its groups stay as they were "
                "and not as given: %s; start a new run from its weights with init_from= to change them",
                self.resume,
                changes,
            )


def _fail_together(trainer: pl.Trainer, refused: str | None) -> None:
    """Raise on all ranks what rank 0 has found."""
    refused = trainer.strategy.broadcast(refused)
    if refused is not None:
        raise UsageError(refused)


def _check_data(datamodule: Any) -> None:
    if not all(hasattr(datamodule, name) for name in ("train_sampler", "batch_size", "resume")):
        given = "no datamodule" if datamodule is None else f"a {type(datamodule).__name__} as datamodule"
        raise UsageError(
            f"PortableCheckpoint got {given}; expected an SDDataModule, whose sampler says where a run stands and goes "
            "on from there; give one to trainer.fit, or save with Lightning's ModelCheckpoint"
        )


def _logged(trainer: pl.Trainer, run_dir: Path) -> set[str]:
    """Return the names in a directory under which loggers write: Lightning lets them begin before any callback."""
    root, names = run_dir.resolve(), set()
    for logger in trainer.loggers:
        for place in filter(None, (logger.log_dir, logger.save_dir)):
            folder = Path(place).resolve()
            if folder == root:
                names |= {"wandb", "metrics.csv", "hparams.yaml", "events.out.tfevents.*"}
            elif folder.is_relative_to(root):
                names.add(folder.relative_to(root).parts[0])
    return names


def _trained_parts(pl_module: Any) -> dict[str, Any]:
    return trained_parts(getattr(pl_module, "lora", None), getattr(pl_module, "learned_token", None))


def _saved_parameters(shards: list[ParameterShard]) -> dict[str, Any]:
    """Return what the checkpoint says of every parameter that any rank owns a part of; a collective call."""
    mine = {shard.name: vars(shard.saved()) for shard in shards if shard.begin < shard.end}
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {name: entry for part in parts for name, entry in part.items()}


def _entries(shards: list[ParameterShard], ema: EMA | None, not_finite: list[str]) -> list[Entry]:
    """Return what this rank writes; reading it names in ``not_finite`` which weights and averages are not finite."""
    mine = [shard for shard in shards if shard.writes]
    averages = [{} if ema is None else {"ema": ema.shadow[shard.key]} for shard in mine]
    entries = [entry for shard, average in zip(mine, averages) for entry in shard.entries(**average)]
    return [_watched(entry, not_finite) if entry.key.startswith(("master/", "ema/")) else entry for entry in entries]


def _watched(entry: Entry, not_finite: list[str]) -> Entry:
    """Look at values when they are about to be written: they are read, copied and hashed then anyway."""

    def look() -> Tensor:
        values = entry.tensor if isinstance(entry.tensor, Tensor) else entry.tensor()
        # The sum needs no memory, and is finite in nearly all cases; large weights may overflow it.
        if not bool(values.sum(dtype=torch.float32).isfinite() or values.isfinite().all()):
            not_finite.append(entry.key)
        return values

    return replace(entry, tensor=look, dtype=entry.stored_dtype)


def _callback_states(trainer: pl.Trainer) -> dict[str, Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return {c.state_key: state for c in callbacks if (state := c.state_dict())}
