"""Strategies and the one function through which callbacks reach their training state."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from sd_lightning._errors import UsageError
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import TrainingState


def training_state(trainer: pl.Trainer) -> TrainingState:
    """Return the training state of a running trainer: the strategy's own view, or the replicated one.

    Raises:
        UsageError: Lightning's strategy of that name has no view of its sharded state.
    """
    strategy = trainer.strategy
    if hasattr(strategy, "training_state"):
        return strategy.training_state()
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise UsageError(
            f"Trainer got strategy={type(strategy).__name__}, whose training state cannot be read; "
            "expected single or ddp (strategy=single, strategy=ddp)"
        )
    parameters = {n: p for n, p in trainer.lightning_module.named_parameters() if p.requires_grad}
    return ReplicatedState(parameters, trainer.optimizers, rank=trainer.global_rank)


def single() -> str:
    """One process on one device: Lightning picks it from ``accelerator``."""
    return "auto"
