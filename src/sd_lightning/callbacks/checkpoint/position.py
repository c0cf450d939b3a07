"""Position of a run, independent of the world size, and the Lightning loop counters derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl

from sd_lightning.data.contract import ResumableData

if TYPE_CHECKING:
    from sd_lightning.training.module import SDLightningModule


@dataclass(frozen=True)
class RunPosition:
    """Position of a run at the end of an optimizer step."""

    optimizer_steps: int
    global_samples: int
    """Samples seen on all ranks together."""
    epoch: int
    steps_in_epoch: int
    """Optimizer steps done in ``epoch``."""
    batch_size: int
    """Global batch size."""
    samples_per_epoch: int
    seed: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> RunPosition:
        """Return the position of a running trainer."""
        data: ResumableData = trainer.datamodule  # type: ignore[attr-defined]
        sampler = data.train_sampler
        assert sampler is not None
        steps = trainer.global_step
        # Not from the total of batches: a fit that ends in the middle of an epoch skips the rest of it.
        epoch, done = sampler.epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done >= min(len(sampler), trainer.num_training_batches):  # trainer.limit_train_batches ends epochs early
            epoch, done = epoch + 1, 0
        return cls(
            optimizer_steps=steps,
            global_samples=steps * data.batch_size,
            epoch=epoch,
            steps_in_epoch=done // trainer.accumulate_grad_batches,
            batch_size=data.batch_size,
            samples_per_epoch=sampler.samples_per_epoch,
            seed=cast("SDLightningModule", trainer.lightning_module).seed,
        )


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
