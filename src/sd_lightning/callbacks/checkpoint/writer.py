"""Writing into a run's folder: its preparation before the first step, and checkpoints from the state of all ranks.

Functions with a ``trainer`` are collective calls.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.pipeline import PipelineModule, write_frozen_parts, write_pipeline
from sd_lightning.callbacks.checkpoint.trainer_state import RunRecord, buffers_of, read_trainer_state
from sd_lightning.callbacks.ema import EMA, ema_of
from sd_lightning.callbacks.guards import REMEDY, last_good
from sd_lightning.data.contract import CountedData
from sd_lightning.state.ranks import failing_together, of_all_ranks, on_rank_zero
from sd_lightning.state.shards import ParameterShard, TensorRange, tensor_of
from sd_lightning.storage import atomic, checkpoint, far_runs, typed_json
from sd_lightning.storage.atomic import TEMPORARY
from sd_lightning.storage.runs import RunFolder
from sd_lightning.storage.tensor_store import merge_index, write_shards
from sd_lightning.strategies import training_state

log = logging.getLogger(__name__)


KEY = "PortableCheckpoint got run_dir"
_NFS_SECONDS = 90.0
"""Time to wait for a new directory: NFS clients may not see it for a minute."""


def take_folder(trainer: pl.Trainer, folder: RunFolder) -> None:
    """Lock and mark the run's directory; raise on all ranks if it holds anything but a run."""
    on_rank_zero(lambda: folder.open(key=KEY, others=_logged(trainer, folder.path)))


def refuse_another_run(trainer: pl.Trainer, run_dir: Path, *, goes_on: bool) -> None:
    """Raise on all ranks if the directory holds a run that this fit does not continue."""

    def check() -> None:
        newest = None if goes_on else checkpoint.newest_valid(run_dir)
        if newest is not None:
            raise UsageError(
                f"PortableCheckpoint got run_dir={run_dir}, which already holds a run; continue it with "
                f"resume='{newest}', or give another run_dir"
            )

    on_rank_zero(check)


def prepare_folder(
    trainer: pl.Trainer, module: pl.LightningModule, run_dir: Path, *, keep: int, has_frozen: bool
) -> None:
    """Remove leftovers of killed runs, and write the files that all checkpoints share; a collective call.

    Args:
        trainer: The running trainer.
        module: Its module.
        run_dir: Directory of the run.
        keep: How many checkpoints stay on disk, for the log.
        has_frozen: Whether frozen parts in the directory belong to this run.

    Raises:
        UsageError: The disk cannot hold two checkpoints, or this machine does not see the directory.
    """
    if trainer.is_global_zero:
        checkpoint.clean(run_dir)
        atomic.clean(run_dir, "frozen|pipeline")
        if isinstance(module, PipelineModule) and not (has_frozen and (run_dir / "frozen").exists()):
            write_frozen_parts(run_dir, module)
        _announce(trainer, run_dir, keep)
    trainer.strategy.barrier("checkpoint.prepare_folder")
    check_shared(trainer, run_dir)


def _announce(trainer: pl.Trainer, run_dir: Path, keep: int) -> None:
    """Log the size of a checkpoint, and raise if the disk cannot hold two."""
    trained = sum(shard.end - shard.begin for shard in training_state(trainer).parameter_shards())
    # Weights, two moments, and the average in the state; weights once more in the pipeline; all float32.
    size = 4 * trained * (4 + (ema_of(trainer) is not None))
    shared = sum(f.stat().st_size for f in (run_dir / "frozen").rglob("*") if f.is_file())
    log.info(
        "a checkpoint takes up to %.3g GB (+ %.3g GB of frozen parts, once); the newest %d are kept",
        size / 1e9,
        shared / 1e9,
        keep,
    )
    atomic.check_free_space(run_dir, 2 * size, "checkpoints")


def check_shared(trainer: pl.Trainer, run_dir: Path) -> None:
    """Check before the first step that this machine sees the folder of rank 0; a collective call.

    Raises:
        UsageError: It does not.
    """
    # A new file: the folder of an earlier start may be there on a disk of this machine's own.
    probe = run_dir / f"{TEMPORARY}{on_rank_zero(lambda: secrets.token_hex(8))}"
    try:
        on_rank_zero(probe.touch)  # before the others look: NFS clients remember what was not there
        until = time.monotonic() + _NFS_SECONDS
        with failing_together():
            while not probe.exists():
                if time.monotonic() > until:
                    place = "it" if far_runs.url_of(run_dir) is None else f"the folder {far_runs.CACHE}"
                    raise UsageError(
                        f"rank {trainer.global_rank} on {socket.gethostname()} does not see output_dir={run_dir}, "
                        f"which rank 0 has made; put {place} on a file system that all machines share"
                    )
                time.sleep(0.5)
    finally:
        if trainer.is_global_zero:
            probe.unlink(missing_ok=True)


def _logged(trainer: pl.Trainer, run_dir: Path) -> set[str]:
    """Return the names that loggers write in a directory: Lightning starts loggers before any callback."""
    root, names = run_dir.resolve(), set()
    for logger in trainer.loggers:
        for place in filter(None, (logger.log_dir, logger.save_dir)):
            folder = Path(place).resolve()
            if folder == root:
                names |= {"wandb", "metrics.csv", "hparams.yaml", "events.out.tfevents.*"}
            elif folder.is_relative_to(root):
                names.add(folder.relative_to(root).parts[0])
    return names


def write_checkpoint(trainer: pl.Trainer, module: pl.LightningModule, run_dir: Path, record: RunRecord) -> Path:
    """Write the checkpoint of the current step, and return its path.

    Raises:
        UsageError: The disk is full on some rank, or weights are not finite; the last good checkpoint remains.
    """
    shards = training_state(trainer).parameter_shards()
    ema = ema_of(trainer)
    known: dict[str, str] = {}
    with _saving_together(trainer, run_dir, known) as tmp:
        not_finite: list[str] = []
        with _saving_step(trainer, run_dir):
            (tmp / "state").mkdir(exist_ok=True)
            ranges = _ranges(shards, ema, not_finite)
            if trainer.is_global_zero:
                buffers = buffers_of(module).items()
                ranges += [TensorRange(f"buffer/{n}", tuple(b.shape), 0, b.numel(), b.detach()) for n, b in buffers]
            write_shards(tmp / "state", trainer.global_rank, trainer.world_size, ranges)
        check_finite(trainer, run_dir, not_finite)
        parameters = of_all_ranks({shard.name: vars(shard.saved()) for shard in shards if shard.begin < shard.end})
        datamodule: object = trainer.datamodule  # type: ignore[attr-defined]
        bad_samples = datamodule.bad.gather() if isinstance(datamodule, CountedData) else {}
        with _saving_step(trainer, run_dir):
            if trainer.is_global_zero:
                known |= {f"state/{k}": v for k, v in merge_index(tmp / "state", trainer.world_size).items()}
                if isinstance(module, PipelineModule):
                    known |= write_pipeline(run_dir, tmp, module, averaged=ema is not None)
                state = record.trainer_state(trainer, module, parameters, bad_samples)
                (tmp / "trainer.json").write_text(typed_json.dumps(state))
    return checkpoint.checkpoint_path(run_dir, trainer.global_step)


@contextmanager
def _saving_together(trainer: pl.Trainer, run_dir: Path, known: dict[str, str]) -> Iterator[Path]:
    """Yield the current step's checkpoint directory on all ranks; rank 0 completes it, or removes it on failure.

    Args:
        trainer: The running trainer.
        run_dir: Directory of the run.
        known: As for :func:`checkpoint.saving`.
    """
    with ExitStack() as stack:
        tmp: Path | None = None
        with _saving_step(trainer, run_dir):
            if trainer.is_global_zero:
                tmp = stack.enter_context(checkpoint.saving(run_dir, trainer.global_step, known=known))
        tmp = trainer.strategy.broadcast(tmp)
        assert tmp is not None
        yield tmp
        with _saving_step(trainer, run_dir):
            stack.close()


@contextmanager
def _saving_step(trainer: pl.Trainer, run_dir: Path) -> Iterator[None]:
    """Raise on all ranks if the block, a part of saving, fails on any, and name a full disk; a collective call."""
    with failing_together(), checkpoint.naming_full_disk(run_dir, trainer.global_step):
        yield


def replace_callbacks(trainer: pl.Trainer, run_dir: Path, newest: Path, callbacks: dict[str, Any]) -> None:
    """Replace the newest checkpoint by one with new callback states; unchanged files are hard-linked."""
    with _saving_step(trainer, run_dir):
        if trainer.is_global_zero:
            with checkpoint.saving(run_dir, trainer.global_step) as tmp:
                atomic.hard_link_tree(newest, tmp)
                for name in ("trainer.json", checkpoint.MANIFEST_NAME):
                    (tmp / name).unlink()  # hard links: writing would change the old checkpoint
                saved = read_trainer_state(newest) | {"callbacks": callbacks}
                (tmp / "trainer.json").write_text(typed_json.dumps(saved))


def check_finite(trainer: pl.Trainer, run_dir: Path, not_finite: list[str]) -> None:
    """Raise on all ranks if any found non-finite weights: no later step repairs them.

    Raises:
        UsageError: Some rank found non-finite weights.
    """
    if trainer.strategy.reduce_boolean_decision(not not_finite, all=True):
        return
    more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
    where = f"{not_finite[0]}{more}" if not_finite else "on another process"
    raise UsageError(
        f"training stopped at step {trainer.global_step}: weights are NaN or infinite ({where}), which are not "
        f"saved; {last_good(trainer, run_dir)}; {REMEDY}"
    )


def _ranges(shards: list[ParameterShard], ema: EMA | None, not_finite: list[str]) -> list[TensorRange]:
    """Return the ranges that this rank writes; reading adds names of non-finite ones to ``not_finite``."""
    ranges = []
    for shard in shards:
        if shard.writes:
            averages = {} if ema is None else {"ema": ema.shadow[shard.key]}
            ranges += [
                watched(each, not_finite) if each.name.startswith(("master/", "ema/")) else each
                for each in shard.ranges(**averages)
            ]
    return ranges


def watched(each: TensorRange, not_finite: list[str]) -> TensorRange:
    """Return a range that checks its values when they are written: they are read, copied and hashed then anyway."""

    def look() -> Tensor:
        values = tensor_of(each.values)
        # The sum needs no memory and is nearly always finite; only large weights may overflow it.
        if not bool(values.sum(dtype=torch.float32).isfinite() or values.isfinite().all()):
            not_finite.append(each.name)
        return values

    return replace(each, values=look, dtype=each.stored_dtype)
