"""Preparation of a run's folder before the first step: lock, checks, and files that checkpoints share."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.ema import ema_of
from sd_lightning.state.ranks import on_rank_zero
from sd_lightning.storage import atomic, checkpoint
from sd_lightning.storage.run_folder import RunFolder
from sd_lightning.strategies import training_state
from sd_lightning.training.module import SDLightningModule

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
    trainer: pl.Trainer, module: SDLightningModule, run_dir: Path, *, keep: int, has_frozen: bool
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
        if not (has_frozen and (run_dir / "frozen").exists()):
            write_frozen(run_dir, module)
        _announce(trainer, run_dir, keep)
    trainer.strategy.barrier("checkpoint.prepare_folder")
    check_shared(trainer, run_dir)


def write_frozen(run_dir: Path, module: SDLightningModule) -> None:
    """Save the pipeline without the trained networks' weights; all checkpoints of the run share it."""
    try:
        with atomic.new_folder(run_dir / "frozen") as tmp:
            module.latent_diffusion.save_pretrained(tmp, skip=tuple(module.trained_networks()))
    except Exception as error:
        raise checkpoint.disk_full(error, run_dir, 0) or error from error


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
    """Check before the first step that this machine sees the files that rank 0 has just written.

    Raises:
        UsageError: It does not.
    """
    until = time.monotonic() + _NFS_SECONDS
    while not (run_dir / "frozen").is_dir():
        if time.monotonic() > until:
            raise UsageError(
                f"rank {trainer.global_rank} on {socket.gethostname()} does not see output_dir={run_dir}, "
                "which rank 0 has made; put it on a file system that all machines share"
            )
        time.sleep(0.5)


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
