"""What a run knows of itself, for ``trainer.json``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from sd_lightning.callbacks.checkpoint.position import RunPosition
from sd_lightning.callbacks.checkpoint.scheduler_state import scheduler_state
from sd_lightning.callbacks.checkpoint.trainer_state import FORMAT, trained_parts
from sd_lightning.state.shards import OptimizerGroups
from sd_lightning.strategies import training_state
from sd_lightning.training.module import SDLightningModule


@dataclass
class RunRecord:
    """What neither the trainer nor the module can tell of a run, and every checkpoint of it says."""

    frozen: dict[str, str] = field(default_factory=dict)
    """Digests of weights that are not trained, by network."""
    configured: OptimizerGroups = field(default_factory=list)
    """What the configuration says of optimizer groups."""
    data: dict[str, Any] | None = None
    """Fingerprint of the training set when the fit began, on rank 0."""
    loss: float | None = None
    """Training loss of the step that the newest checkpoint is of, the mean over all processes."""
    train_seconds: float = 0.0
    """Seconds that the run spent in ``fit`` until the clock was last read, earlier sessions included."""
    _clock: float = 0.0

    def start_clock(self) -> None:
        """Begin to count seconds of training."""
        self._clock = time.perf_counter()

    def read_clock(self) -> float:
        """Return the seconds of training until now."""
        now = time.perf_counter()
        self.train_seconds += now - self._clock
        self._clock = now
        return self.train_seconds

    def trainer_state(
        self, trainer: pl.Trainer, module: SDLightningModule, parameters: dict[str, Any], bad_samples: dict[str, str]
    ) -> dict[str, Any]:
        """Return what ``trainer.json`` holds.

        Args:
            trainer: The running trainer.
            module: Its module.
            parameters: What is saved of each parameter, by name.
            bad_samples: Samples that could not be used, and why.
        """
        state = training_state(trainer)
        return {
            "format": FORMAT,
            "position": vars(RunPosition.of(trainer)),
            "data": self.data,
            "bad_samples": bad_samples,
            "train_seconds": self.read_clock(),
            "loss": self.loss,
            "trained_parts": trained_parts(module.lora, module.learned_token),
            "frozen": self.frozen,
            "parameters": parameters,
            "optimizers": state.optimizer_names(),
            "optimizer_groups": state.optimizer_groups(),
            "configured_groups": self.configured,
            "schedulers": [scheduler_state(config.scheduler) for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": callback_states(trainer),
        }


def callback_states(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the states of the trainer's callbacks that have one."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {c.state_key: state for c in callbacks if (state := c.state_dict())}
