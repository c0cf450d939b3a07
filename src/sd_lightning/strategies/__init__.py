"""Lightning strategies; each engine has a file or a folder.

What they have in common is three things: the contract, which is all that others may ask of a strategy (``base.py``);
what strategies ask of a user's module (``networks.py``); and the base classes of engines that hold the weights in parts
during a run (``sharding.py``) and give them back whole afterwards (``restoring.py``, with ``whole_tensors.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from sd_lightning.state.shards import TrainingState
from sd_lightning.strategies.base import EngineStrategy, engine_of

if TYPE_CHECKING:
    from sd_lightning.strategies.auto import AutoStrategy

__all__ = ["AutoStrategy", "EngineStrategy", "engine_of", "single", "training_state"]


def training_state(trainer: pl.Trainer) -> TrainingState:
    """Return the training state of a running trainer; see :meth:`EngineStrategy.training_state`."""
    return engine_of(trainer.strategy).training_state()


def single() -> str:
    """Return the strategy for one process on one device, which Lightning picks from ``accelerator``."""
    return "auto"


def __getattr__(name: str) -> Any:  # loading the planner takes longer than the rest
    if name != "AutoStrategy":
        raise AttributeError(f"module 'sd_lightning.strategies' has no attribute {name!r}")
    from sd_lightning.strategies.auto import AutoStrategy

    return AutoStrategy
