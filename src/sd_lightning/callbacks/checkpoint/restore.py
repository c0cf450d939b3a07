"""Restoring of a run from a checkpoint, after checks that the checkpoint fits the run.

A checkpoint comes from ``PortableCheckpoint(resume=…)``, or as ``ckpt_path`` of ``trainer.fit``, ``validate`` and
``test``, which :class:`CheckpointFolders` loads.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.callbacks import lightning_loops
from sd_lightning.callbacks.checkpoint import trainer_state
from sd_lightning.callbacks.checkpoint.optimizer_change import adopt_settings, keep_states
from sd_lightning.callbacks.checkpoint.pipeline import PipelineModule, check_same_parts
from sd_lightning.callbacks.checkpoint.trainer_state import RunPosition
from sd_lightning.callbacks.ema import ema_of
from sd_lightning.callbacks.steps import callbacks_of
from sd_lightning.data.contract import ComparableData, CountedData, ResumableData
from sd_lightning.data.fingerprint import Change
from sd_lightning.data.order import check_version
from sd_lightning.state.ranks import failing_together, on_rank_zero
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SavedParameter, TrainingState
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies import training_state
from sd_lightning.strategies.base import is_whole, whole_shape

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


def agree_on_pretrained(url: str | None) -> None:
    """Raise on all ranks if they have found other weights to start from than rank 0; a collective call.

    Args:
        url: Where this rank has found them.

    Raises:
        UsageError: Some rank has found others.
    """
    first = on_rank_zero(lambda: url)
    with failing_together():
        if url != first:
            raise UsageError(
                f"model.pretrained={url} on {socket.gethostname()}, and {first} on rank 0: the run of init_from goes "
                f"on; name one of its checkpoints: init_from={str(first).removesuffix('/pipeline')}"
            )


def check_same_run(saved: dict[str, Any], module: pl.LightningModule, batch_size: int, path: Path) -> None:
    """Check that a checkpoint fits the run that resumes it.

    Args:
        saved: The checkpoint's ``trainer.json``.
        module: Module of the run.
        batch_size: Global batch size of the run.
        path: The checkpoint.

    Raises:
        UsageError: The checkpoint has another model, batch size, seed or adapters, or an unknown order.
    """
    seed = module.seed if isinstance(module, PipelineModule) else None
    # The data would not continue where they stopped.
    for name, ours, key in (("data.batch_size", batch_size, "batch_size"), ("seed", seed, "seed")):
        theirs = saved["position"][key]
        if ours != theirs:
            raise UsageError(
                f"resume: {name}={ours}, but the checkpoint's run used {name}={theirs}; resume with that value, "
                "or start a new run from its weights with init_from="
            )
    check_version(saved["position"]["order_version"])
    if isinstance(module, PipelineModule):
        check_same_parts(saved, module, path)
    shapes = {name: whole_shape(p) for name, p in module.named_parameters() if p.requires_grad}
    trainer_state.check_same_model(saved["parameters"], shapes, path)


def check_can_resume(module: pl.LightningModule, datamodule: object) -> ResumableData:
    """Return the trainer's datamodule, after a check that a checkpoint of the run can be resumed exactly.

    Raises:
        UsageError: The datamodule is not :class:`ResumableData`, or the module steps its optimizers itself.
    """
    if not module.automatic_optimization:
        raise UsageError(
            f"PortableCheckpoint got {type(module).__name__} with automatic_optimization=False, whose steps Lightning "
            "does not count as batches; expected automatic optimization; save with Lightning's ModelCheckpoint"
        )
    if isinstance(datamodule, ResumableData):
        return datamodule
    kind = "no datamodule" if datamodule is None else f"a {type(datamodule).__name__} as datamodule"
    raise UsageError(
        f"PortableCheckpoint got {kind}; expected an SDDataModule, or other ResumableData, whose sampler says where a "
        "run stands and goes on from there; give one to trainer.fit, or save with Lightning's ModelCheckpoint"
    )


def check_schedulers(trainer: pl.Trainer) -> None:
    """Raise if a scheduler steps after the checkpoint of its step.

    Raises:
        UsageError: Lightning steps one by a metric, after all callbacks.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            raise UsageError(
                f"PortableCheckpoint got {type(config.scheduler).__name__}, which Lightning steps after checkpoints "
                'are saved; expected "reduce_on_plateau": False beside it in configure_optimizers(), and a module that '
                "passes it the metric in lr_scheduler_step()"
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
    if saved["data"] is None or not isinstance(datamodule, ComparableData):
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
        bad = saved["bad_samples"]
        return change, datamodule.bad.still_bad(bad) if isinstance(datamodule, CountedData) else {}

    change, bad = on_rank_zero(look)
    if saved["data"] is None and isinstance(datamodule, ComparableData):
        log.warning("resume=%s: it does not say what data it was trained on; they are taken as they are", path)
    if change is not None:
        log.warning("resume=%s: the training set has changed since: %s", path, change.description)
    if bad and isinstance(datamodule, CountedData):
        datamodule.bad.count(bad)
    position = RunPosition(**saved["position"])
    if change is not None and change.reorders and position.steps_in_epoch:
        return replace(position, epoch=position.epoch + 1, steps_in_epoch=0)  # the order of every epoch has changed
    return position


def restore(trainer: pl.Trainer, module: pl.LightningModule, path: Path, record: trainer_state.RunRecord) -> None:
    """Restore a run from a checkpoint before its first step; a collective call.

    Args:
        trainer: The running trainer.
        module: Its module.
        path: The checkpoint.
        record: Holds the configured optimizer groups; gets the checkpoint's training time, loss and digests.

    Raises:
        UsageError: The checkpoint does not fit the run, or has another schedule.
    """
    saved = trainer_state.read_trainer_state(path)
    check_same_run(saved, module, trainer.datamodule.batch_size, path)  # type: ignore[attr-defined]
    position = go_on_with_data(trainer, saved, path)
    state = training_state(trainer)
    optimizer_change = keep_states(saved, state.optimizer_names(), record.configured)
    if optimizer_change:
        log.warning("resume=%s: %s", path, optimizer_change)
    new_settings = adopt_settings(saved, record.configured)
    if new_settings:
        log.info("resume=%s: settings of this run's optimizer apply from here: %s", path, new_settings)
    parameters = {name: SavedParameter(**entry) for name, entry in saved["parameters"].items()}
    with ShardedTensors(path / "state") as store:
        store.fetch(_needed(state, store))
        state.load(parameters, saved["optimizer_groups"], partial(_read, store))
        _load_buffers(module, store)
        _load_average(trainer, store, path)
    _load_schedulers(trainer, saved["schedulers"], path)
    with _loading(trainer.precision_plugin, path):
        trainer.precision_plugin.load_state_dict(saved["precision"])
    _load_callbacks(trainer, saved["callbacks"], path)
    record.train_seconds, record.loss = saved["train_seconds"], saved["loss"]
    record.frozen = saved["frozen"] | record.frozen  # also those in another precision, of before an encoder was cast
    data: ResumableData = trainer.datamodule  # type: ignore[attr-defined]
    data.resume(position.epoch, position.steps_in_epoch)
    lightning_loops.set_position(trainer, position.epoch, position.steps_in_epoch, position.optimizer_steps)
    log.info("resumed %s at step %d", path, position.optimizer_steps)


def _needed(state: TrainingState, store: ShardedTensors) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges of a checkpoint's tensors that this rank is about to read, save for few and small ones."""
    kinds = dict.fromkeys(key.partition("/")[0] for key in store.keys())
    for shard in state.parameter_shards():
        for key in (f"{kind}/{shard.name}" for kind in kinds):
            if key in store and store.shape(key) == shard.shape:
                yield key, shard.begin, shard.end


def _read(store: ShardedTensors, kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
    store.read_into(f"{kind}/{name}", out, begin, end)


def _load_buffers(module: pl.LightningModule, store: ShardedTensors) -> None:
    for name, buffer in trainer_state.buffers_of(module).items():
        store.read_into(f"buffer/{name}", buffer)


def _load_average(trainer: pl.Trainer, store: ShardedTensors, path: Path) -> None:
    ema = ema_of(trainer)
    if ema is None:
        return
    if all(f"ema/{name}" in store for name, _ in ema.shadow):
        for (name, begin), average in ema.shadow.items():
            store.read_into(f"ema/{name}", average, begin, begin + average.numel())
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
            trainer_state.load_scheduler_state(config.scheduler, scheduler)


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
    callbacks = callbacks_of(trainer, pl.Callback)
    for callback in callbacks:
        if callback.state_key in saved:
            with _loading(callback, path):
                callback.load_state_dict(saved[callback.state_key])
    unused = saved.keys() - {callback.state_key for callback in callbacks}
    if unused:
        log.warning("resume=%s: no callback takes the state of %s", path, ", ".join(sorted(unused)))


class CheckpointFolders(CheckpointIO):
    """``CheckpointIO`` that loads portable checkpoint folders besides Lightning's own files.

    Lightning expects a dictionary from ``CheckpointIO`` and restores its entries. For a folder this class restores the
    state itself, in the engine's layout, and returns a dictionary that changes nothing.

    Args:
        run_dir: Directory of the run.
        resume: Called with the checkpoint that ``fit`` starts from.
        trainer: The trainer.
        files: Reads and writes Lightning's files.
    """

    def __init__(self, run_dir: Path, resume: Callable[[Path], None], trainer: pl.Trainer, files: CheckpointIO) -> None:
        self._run_dir = run_dir
        self._resume = resume
        self._trainer = trainer
        self._files = files

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore a portable checkpoint folder, or load a Lightning file.

        Raises:
            UsageError: The folder holds no valid checkpoint, or one of another model.
        """
        if not checkpoint.is_portable(path):
            return self._files.load_checkpoint(path, map_location, weights_only)
        trainer = self._trainer
        folder = on_rank_zero(lambda: runs.find_checkpoint(str(path), self._run_dir, who="ckpt_path"))
        assert folder is not None
        if trainer.state.fn == TrainerFn.FITTING:
            self._resume(folder)
        else:
            load_weights(folder, trainer.lightning_module)
        unchanged = trainer.lightning_module.state_dict() if trainer.strategy.lightning_restore_optimizer else {}
        return {
            "pytorch-lightning_version": pl.__version__,
            "state_dict": unchanged,
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self._files.save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self._files.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        self._files.teardown()


def load_weights(path: Path, module: pl.LightningModule) -> None:
    """Load a checkpoint's average, or its weights if it has none, into a module's trained parameters.

    Raises:
        UsageError: The checkpoint is of another model, or the parameters are already sharded.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not all(is_whole(parameter) for parameter in parameters.values()):
        raise UsageError(
            f"ckpt_path={path}: the weights are already sharded; load them before, with LatentDiffusion.from_pretrained"
            f"('{path}/pipeline')"
        )
    saved = trainer_state.read_trainer_state(path)["parameters"]
    trainer_state.check_same_model(saved, {name: tuple(p.shape) for name, p in parameters.items()}, path)
    with ShardedTensors(path / "state") as store:

        def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
            _read(store, "ema" if f"ema/{name}" in store else kind, name, out, begin, end)

        known = {name: SavedParameter(**entry) for name, entry in saved.items()}
        ReplicatedState(parameters, ()).load(known, None, read)
        _load_buffers(module, store)
