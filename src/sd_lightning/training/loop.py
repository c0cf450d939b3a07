"""Facts about Lightning's training loop."""

from __future__ import annotations

import lightning.pytorch as pl

from sd_lightning._errors import UsageError


def check_accumulation(trainer: pl.Trainer) -> None:
    """Raise if a callback changed ``accumulate_grad_batches``: the sampler has divided the batches by it."""
    # Any Lightning data module may be there; SDDataModule has a sampler of its own.
    sampler = getattr(trainer.datamodule, "train_sampler", None)  # type: ignore[attr-defined]
    if sampler is not None and sampler.accumulate != trainer.accumulate_grad_batches:
        raise UsageError(
            f"trainer.accumulate_grad_batches became {trainer.accumulate_grad_batches} during the fit, which began "
            f"with {sampler.accumulate}: data.batch_size={sampler.order.batch_size} is the global batch, and the "
            "data are divided for the first; leave GradientAccumulationScheduler out and write "
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}"
        )


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Return whether metrics of this step are read: at the logging interval, or at the end of an epoch or the run.

    A callback that monitors one of them, such as ModelCheckpoint, may read it at any step. Metrics that nobody
    reads are not logged, because logging costs half a millisecond, and with several processes a barrier.
    """
    step, every = trainer.global_step + 1, trainer.log_every_n_steps  # type: ignore[attr-defined]
    if trainer.is_last_batch or step == trainer.max_steps or (every > 0 and step % every == 0):
        return True
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(str(getattr(callback, "monitor", None)).startswith("train/") for callback in callbacks)
