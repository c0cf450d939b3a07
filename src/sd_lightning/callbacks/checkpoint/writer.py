"""Writer of checkpoints from the training state of all ranks; functions with a ``trainer`` are collective calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.pipeline import write_pipeline
from sd_lightning.callbacks.checkpoint.trainer_state import RunRecord, read_trainer_state
from sd_lightning.callbacks.ema import EMA, ema_of
from sd_lightning.callbacks.guards import REMEDY, last_good
from sd_lightning.data.contract import CountedData
from sd_lightning.state.ranks import failing_together, of_all_ranks
from sd_lightning.state.shards import ParameterShard, TensorRange, tensor_of
from sd_lightning.storage import atomic, checkpoint, typed_json
from sd_lightning.storage.tensor_store import merge_index, write_shards
from sd_lightning.strategies import training_state
from sd_lightning.training.module import SDLightningModule


def write_checkpoint(trainer: pl.Trainer, module: SDLightningModule, run_dir: Path, record: RunRecord) -> Path:
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
            write_shards(tmp / "state", trainer.global_rank, trainer.world_size, _ranges(shards, ema, not_finite))
        check_finite(trainer, run_dir, not_finite)
        parameters = of_all_ranks({shard.name: vars(shard.saved()) for shard in shards if shard.begin < shard.end})
        datamodule: object = trainer.datamodule  # type: ignore[attr-defined]
        bad_samples = datamodule.bad.gather() if isinstance(datamodule, CountedData) else {}
        with _saving_step(trainer, run_dir):
            if trainer.is_global_zero:
                known |= {f"state/{k}": v for k, v in merge_index(tmp / "state", trainer.world_size).items()}
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
    with failing_together():
        try:
            yield
        except Exception as error:
            raise checkpoint.disk_full(error, run_dir, trainer.global_step) or error from error


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
    found = []
    for shard in shards:
        if shard.writes:
            averages = {} if ema is None else {"ema": ema.shadow[shard.key]}
            found += [
                watched(each, not_finite) if each.name.startswith(("master/", "ema/")) else each
                for each in shard.ranges(**averages)
            ]
    return found


def watched(each: TensorRange, not_finite: list[str]) -> TensorRange:
    """Return a range that checks its values when they are written: they are read, copied and hashed then anyway."""

    def look() -> Tensor:
        values = tensor_of(each.values)
        # The sum needs no memory and is nearly always finite; only large weights may overflow it.
        if not bool(values.sum(dtype=torch.float32).isfinite() or values.isfinite().all()):
            not_finite.append(each.name)
        return values

    return replace(each, values=look, dtype=each.stored_dtype)
