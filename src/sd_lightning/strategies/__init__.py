"""Strategies and the one function through which callbacks reach their training state."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from sd_lightning._errors import UsageError
from sd_lightning.state import ReplicatedState, TrainingState


def training_state(trainer: pl.Trainer) -> TrainingState:
    """Return the training state of a running trainer: the strategy's own view, or the replicated one.

    Raises:
        UsageError: Lightning's strategy of that name has no view of its sharded state.
    """
    strategy = trainer.strategy
    if hasattr(strategy, "training_state"):
        return strategy.training_state()
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise UsageError(
            f"Trainer got strategy={type(strategy).__name__}, whose training state cannot be read; "
            "expected single or ddp (strategy=single, strategy=ddp)"
        )
    parameters = {n: p for n, p in trainer.lightning_module.named_parameters() if p.requires_grad}
    return ReplicatedState(parameters, trainer.optimizers, rank=trainer.global_rank)


def single() -> str:
    """One process on one device: Lightning picks it from ``accelerator``."""
    return "auto"


def ddp(*, static_graph: bool = False, bucket_cap_mb: int = 25, gradient_as_bucket_view: bool = True) -> DDPStrategy:
    """DistributedDataParallel, which takes part in everything that :func:`training_state` serves."""
    if bucket_cap_mb < 1:
        raise UsageError(f"strategy=ddp got bucket_cap_mb={bucket_cap_mb}; expected at least 1, e.g. bucket_cap_mb=25")
    return DDPStrategy(
        static_graph=static_graph, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view
    )
