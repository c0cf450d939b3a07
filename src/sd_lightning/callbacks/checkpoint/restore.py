"""Restoring of a run from a checkpoint, after checks that the checkpoint fits the run."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint import trainer_state
from sd_lightning.callbacks.checkpoint.scheduler_state import load_scheduler_state
from sd_lightning.callbacks.checkpoint.trainer_state import RunPosition
from sd_lightning.callbacks.ema import ema_of
from sd_lightning.data.contract import ComparableData, CountedData, ResumableData
from sd_lightning.data.fingerprint import Change
from sd_lightning.data.order import check_version
from sd_lightning.state.optimizer_change import keep_states
from sd_lightning.state.ranks import on_rank_zero
from sd_lightning.state.shards import SavedParameter, TrainingState
from sd_lightning.storage import checkpoint
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies import training_state
from sd_lightning.strategies.base import whole_shape
from sd_lightning.training.module import SDLightningModule

log = logging.getLogger(__name__)


def agree_on_checkpoint(trainer: pl.Trainer, resume: Path | None) -> Path | None:
    """Return the checkpoint that rank 0 resumes, and check that every rank sees the same one.

    A collective call. Only rank 0 has hashed all files; the manifests are compared.

    Raises:
        UsageError: Some rank sees another checkpoint at that path.
    """
    path, digest = on_rank_zero(lambda: (resume, resume and checkpoint.manifest_digest(resume)))
    if path is None:
        return None
    is_same = checkpoint.manifest_digest(path) == digest
    if not trainer.strategy.reduce_boolean_decision(is_same, all=True):
        where = f"rank {trainer.global_rank} on {socket.gethostname()}" if not is_same else "another rank"
        raise UsageError(
            f"resume={path}: {where} sees another checkpoint there than rank 0, which has verified its own; put the "
            "run on a file system that all machines share"
        )
    return path


def check_same_run(saved: dict[str, Any], module: SDLightningModule, batch_size: int, path: Path) -> None:
    """Check that a checkpoint fits the run that resumes it.

    Args:
        saved: The checkpoint's ``trainer.json``.
        module: Module of the run.
        batch_size: Global batch size of the run.
        path: The checkpoint.

    Raises:
        UsageError: The checkpoint has another model, batch size, seed or adapters, or an unknown order.
    """
    # The data would not continue where they stopped.
    for name, ours, key in (("data.batch_size", batch_size, "batch_size"), ("seed", module.seed, "seed")):
        theirs = saved["position"][key]
        if ours != theirs:
            raise UsageError(
                f"resume: {name}={ours}, but the checkpoint's run used {name}={theirs}; resume with that value, "
                "or start a new run from its weights with init_from="
            )
    check_version(saved["position"]["order_version"])
    trainer_state.check_same_parts(saved, trainer_state.trained_parts(module.lora, module.learned_token), path)
    shapes = {name: whole_shape(p) for name, p in module.named_parameters() if p.requires_grad}
    trainer_state.check_same_model(saved["parameters"], shapes, path)


def check_datamodule(datamodule: object) -> ResumableData:
    """Return the trainer's datamodule, checked to be :class:`ResumableData`.

    Raises:
        UsageError: It is not.
    """
    if isinstance(datamodule, ResumableData):
        return datamodule
    given = "no datamodule" if datamodule is None else f"a {type(datamodule).__name__} as datamodule"
    raise UsageError(
        f"PortableCheckpoint got {given}; expected an SDDataModule, whose sampler says where a run stands and goes "
        "on from there; give one to trainer.fit, or save with Lightning's ModelCheckpoint"
    )


def compare_data(datamodule: object, saved: dict[str, Any], path: Path) -> Change | None:
    """Return how the training set has changed since a checkpoint; reads files.

    Args:
        datamodule: Datamodule of the run that resumes.
        saved: The checkpoint's ``trainer.json``.
        path: The checkpoint.

    Raises:
        UsageError: The checkpoint is in the middle of an epoch whose samples have changed, or other samples are held
            out.
    """
    if saved.get("data") is None or not isinstance(datamodule, ComparableData):
        return None
    change = datamodule.change_since(saved["data"])
    if change is not None and change.mixes and datamodule.changed != "accept":
        raise UsageError(
            f"resume={path}: other samples are held out than in this checkpoint, so that validation would be on "
            f"samples that the model has seen: {change.description}; bring the data back as they were; start again, "
            "with data.val_data_dir for a validation that stays; or write data.changed=accept"
        )
    position = RunPosition(**saved["position"])
    if change is not None and change.moves and position.steps_in_epoch and datamodule.changed != "accept":
        then = f"a new epoch begins, without the rest of epoch {position.epoch}"
        raise UsageError(
            f"resume={path}: the training set has changed in the middle of epoch {position.epoch}, whose rest it is to "
            f"give: {change.description}; bring it back as it was, or write data.changed=accept: "
            f"{then if change.reorders else 'the epoch goes on with the samples that are there'}"
        )
    return change


def go_on_with_data(trainer: pl.Trainer, saved: dict[str, Any], path: Path) -> RunPosition:
    """Log changes of the training set, restore its bad samples, and return the position at which the run resumes.

    A collective call; rank 0 reads the files.

    Raises:
        UsageError: The samples of the checkpoint's epoch have changed, or too many samples are bad.
    """
    datamodule: object = trainer.datamodule  # type: ignore[attr-defined]

    def look() -> tuple[Change | None, dict[str, str]]:
        change = compare_data(datamodule, saved, path)
        bad = saved.get("bad_samples", {})
        return change, datamodule.bad.still_bad(bad) if isinstance(datamodule, CountedData) else {}

    change, bad = on_rank_zero(look)
    if saved.get("data") is None:
        log.warning("resume=%s: it does not say what data it was trained on; they are taken as they are", path)
    if change is not None:
        log.warning("resume=%s: the training set has changed since: %s", path, change.description)
    if bad and isinstance(datamodule, CountedData):
        datamodule.bad.count(bad)
    position = RunPosition(**saved["position"])
    if change is not None and change.reorders and position.steps_in_epoch:
        return replace(position, epoch=position.epoch + 1, steps_in_epoch=0)  # the order of every epoch has changed
    return position


def restore(trainer: pl.Trainer, module: SDLightningModule, path: Path, record: trainer_state.RunRecord) -> None:
    """Restore a run from a checkpoint before its first step; a collective call.

    Args:
        trainer: The running trainer.
        module: Its module.
        path: The checkpoint.
        record: Holds the configured optimizer groups; gets the checkpoint's training time and loss.

    Raises:
        UsageError: The checkpoint does not fit the run, or has another schedule.
    """
    saved = trainer_state.read_trainer_state(path)
    check_same_run(saved, module, trainer.datamodule.batch_size, path)  # type: ignore[attr-defined]
    position = go_on_with_data(trainer, saved, path)
    state = training_state(trainer)
    told = keep_states(saved, state.optimizer_names(), record.configured)
    if told:
        log.warning("resume=%s: %s", path, told)
    _adopt_settings(saved, record, path)
    _load_state(trainer, state, saved, path)
    _load_schedulers(trainer, saved["schedulers"], path)
    with _loading(trainer.precision_plugin, path):
        trainer.precision_plugin.load_state_dict(saved["precision"])
    _load_callbacks(trainer, saved["callbacks"], path)
    record.train_seconds = saved["train_seconds"]
    record.loss = saved.get("loss")  # checkpoints of an earlier release have none
    restore_position(trainer, position)
    log.info("resumed %s at step %d", path, position.optimizer_steps)


def _adopt_settings(saved: dict[str, Any], record: trainer_state.RunRecord, path: Path) -> None:
    """Replace optimizer settings of the checkpoint with those of this run where they differ."""
    changes = trainer_state.adopt_settings(saved, record.configured)
    if changes and "configured_groups" in saved:
        log.info("resume=%s: settings of this run's optimizer apply from here: %s", path, changes)
    elif changes:
        log.warning(
            "resume=%s: an earlier release saved no optimizer settings, so these of its groups stay as they were "
            "and not as given: %s; start a new run from its weights with init_from= to change them",
            path,
            changes,
        )


def _load_state(trainer: pl.Trainer, state: TrainingState, saved: dict[str, Any], path: Path) -> None:
    """Load weights, optimizer states and the average."""
    shards = state.parameter_shards()
    parameters = {name: SavedParameter(**entry) for name, entry in saved["parameters"].items()}
    with ShardedTensors(path / "state") as store:

        def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
            store.read_into(f"{kind}/{name}", out, begin, end)

        state.load(parameters, saved["optimizer_groups"], read)
        ema = ema_of(trainer)
        if ema is None:
            return
        if all(f"ema/{shard.name}" in store for shard in shards):
            for (name, begin), average in ema.shadow.items():
                read("ema", name, average, begin, begin + average.numel())
        else:
            ema.restart()
            log.warning("%s has no EMA; the average starts at its weights", path)


def _load_schedulers(trainer: pl.Trainer, schedulers: list[dict[str, Any]], path: Path) -> None:
    configs = trainer.lr_scheduler_configs
    if len(configs) != len(schedulers):
        theirs, ours = ([s["type"] for s in schedulers], [type(c.scheduler).__name__ for c in configs])
        raise UsageError(
            f"resume={path}: the checkpoint's run had the lr_scheduler {', '.join(theirs) or 'none'}, this "
            f"run has {', '.join(ours) or 'none'}; resume with the same, or start a new run with init_from="
        )
    for config, scheduler in zip(configs, schedulers):
        with _loading(config.scheduler, path):
            load_scheduler_state(config.scheduler, scheduler)


@contextmanager
def _loading(part: object, path: Path) -> Iterator[None]:
    """Tell which part of a run cannot load its state, which may be of another class, or damaged."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"resume={path}: {type(part).__name__} cannot load its state from trainer.json ({error!r}); resume with "
            "the settings of the checkpoint's run, or start a new run from its weights with init_from="
        ) from error


def _load_callbacks(trainer: pl.Trainer, saved: dict[str, Any], path: Path) -> None:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if callback.state_key in saved:
            with _loading(callback, path):
                callback.load_state_dict(saved[callback.state_key])
    unused = saved.keys() - {callback.state_key for callback in callbacks}
    if unused:
        log.warning("resume=%s: no callback takes the state of %s", path, ", ".join(sorted(unused)))


def restore_position(trainer: pl.Trainer, position: RunPosition) -> None:
    """Set Lightning's loop counters and the sampler, for this run's world size and accumulation."""
    data: ResumableData = trainer.datamodule  # type: ignore[attr-defined]
    data.resume(position.epoch, position.steps_in_epoch)
    batches = position.steps_in_epoch * trainer.accumulate_grad_batches
    total = position.optimizer_steps * trainer.accumulate_grad_batches
    # Lightning counts an epoch as started in its middle, but not at its beginning.
    started = position.epoch + (1 if position.steps_in_epoch else 0)
    loop = trainer.fit_loop
    state = loop.state_dict()
    state["epoch_progress"] = {
        scope: {"ready": started, "started": started, "processed": position.epoch, "completed": position.epoch}
        for scope in ("total", "current")
    }
    state["epoch_loop.batch_progress"] = {
        "total": dict.fromkeys(("ready", "started", "processed", "completed"), total),
        "current": dict.fromkeys(("ready", "started", "processed", "completed"), batches),
        "is_last_batch": False,
    }
    steps = {"total": position.optimizer_steps, "current": position.steps_in_epoch}
    state["epoch_loop.automatic_optimization.optim_progress"] = {
        "optimizer": {
            "step": {scope: {"ready": n, "completed": n} for scope, n in steps.items()},
            "zero_grad": {scope: {"ready": n, "started": n, "completed": n} for scope, n in steps.items()},
        }
    }
    state["epoch_loop.scheduler_progress"] = {scope: {"ready": n, "completed": n} for scope, n in steps.items()}
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": position.optimizer_steps}
    loop.load_state_dict(state)
