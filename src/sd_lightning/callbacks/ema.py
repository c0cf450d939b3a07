"""Exponential moving average of the trained weights, on the shards that each rank owns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.state import TrainingState
from sd_lightning.strategies import training_state


class EMA(Callback):
    """Average the weights: ``ema = decay * ema + (1 - decay) * weights`` after an optimizer step, in float32.

    One fused update over all local shards, without communication; the numbers are the same under every strategy.
    Sampling, validation and exported pipelines use the average. When ``fit`` ends the module holds it, and the next
    ``fit`` continues from the trained weights, which checkpoints keep as well.

    Args:
        decay: The limit; the decay of update ``n`` is ``min(decay, (1 + n) / (10 + n))`` as in diffusers'
            ``EMAModel``, so that the average forgets its start.
        update_after_step: Optimizer steps before averaging starts; until then it follows the weights.
        update_every: Optimizer steps between updates.
        offload: Keep the average in host memory.
    """

    def __init__(
        self, decay: float = 0.9999, *, update_after_step: int = 0, update_every: int = 1, offload: bool = False
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"EMA got decay={decay}; expected a number in [0, 1], e.g. decay=0.9999")
        if update_every < 1:
            raise UsageError(f"EMA got update_every={update_every}; expected at least 1")
        if update_after_step < 0:
            raise UsageError(f"EMA got update_after_step={update_after_step}; expected at least 0")
        self.decay = decay
        self.update_after_step = update_after_step
        self.update_every = update_every
        self.offload = offload
        self.num_updates = 0
        self.shadow: dict[tuple[str, int], Tensor] = {}
        self._state: TrainingState | None = None
        self._live: list[Tensor] = []
        self._average: list[Tensor] = []
        self._last_step = 0
        self._holds_average = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._holds_average and self._state is not None:  # a second fit continues from the trained weights
            self._state.swap_out()
            self._holds_average = False
        self._state = training_state(trainer)
        shards = self._state.parameter_shards()
        self._live = [shard.master for shard in shards]
        fresh = {shard.key: self._copy(shard.master) for shard in shards}
        self.shadow = {key: self.shadow.get(key, value) for key, value in fresh.items()}
        self._average = list(self.shadow.values())
        self._last_step = trainer.global_step

    def restart(self) -> None:
        """Let the average begin at the present weights (a checkpoint without an average was loaded)."""
        self.num_updates = 0
        torch._foreach_copy_(self._average, self._live)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_updates = state_dict["num_updates"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step:  # gradients are still being accumulated
            return
        self._last_step = step
        if step <= self.update_after_step:
            torch._foreach_copy_(self._average, self._live)
        elif step % self.update_every == 0:
            self.num_updates += 1
            decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
            torch._foreach_lerp_(self._average, self._masters(), 1.0 - decay)

    def _masters(self) -> list[Tensor]:
        if not self.offload and all(tensor.dtype == torch.float32 for tensor in self._live):
            return self._live
        return [tensor.to(average.device, torch.float32) for tensor, average in zip(self._live, self._average)]

    def _copy(self, master: Tensor) -> Tensor:
        device = torch.device("cpu") if self.offload else master.device
        return torch.empty_like(master, dtype=torch.float32, device=device).copy_(master)

    # ------------------------------------------------------------------ use of the average

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the average inside the block."""
        if self._state is None:
            raise RuntimeError("EMA.averaged() needs a running trainer")
        self._state.swap_in(self.shadow)
        try:
            yield
        finally:
            self._state.swap_out()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._state is not None and not self._holds_average:
            self._state.swap_in(self.shadow)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._state is not None and not self._holds_average:
            self._state.swap_out()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._state is not None and not self._holds_average:
            self._state.swap_in(self.shadow)
            self._holds_average = True


def ema_of(trainer: pl.Trainer) -> EMA | None:
    """Return the trainer's EMA callback, if it has one."""
    return next((c for c in trainer.callbacks if isinstance(c, EMA)), None)  # type: ignore[attr-defined]


def inference_weights(trainer: pl.Trainer) -> contextlib.AbstractContextManager[None]:
    """Compute with the weights that are exported: the average if there is one."""
    ema = ema_of(trainer)
    return ema.averaged() if ema is not None else contextlib.nullcontext()
