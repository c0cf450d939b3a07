"""Exponential moving average of the trained weights, on the shards that each rank owns."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.callbacks.steps import StepCallback, callbacks_of
from sd_lightning.planner.run import TakesMemory, TrainingRun
from sd_lightning.state.averaging import Averaging
from sd_lightning.state.host import host_memory
from sd_lightning.state.shards import ParameterShard, SwappableWeights, TrainingState, tensor_of
from sd_lightning.strategies import engine_of, training_state
from sd_lightning.strategies.base import whole_shape
from sd_lightning.strategies.whole_tensors import whole

log = logging.getLogger(__name__)

_holding_average: weakref.WeakKeyDictionary[pl.LightningModule, EMA] = weakref.WeakKeyDictionary()
"""Module that holds its average since its last ``fit`` -> the callback that keeps its trained weights."""


class EMA(StepCallback, TakesMemory):
    """Exponential moving average of the weights: ``ema = decay * ema + (1 - decay) * weights``, in float32.

    One fused update after an optimizer step covers all local shards, without communication. The numbers are the same
    under every strategy. On CUDA the update overlaps the next forward and backward pass on streams of its own.
    Sampling, validation and exported pipelines use the average. After ``fit`` the module holds the average; the next
    ``fit`` continues from the trained weights, which checkpoints store too. If other weights are loaded in between,
    the next ``fit`` trains those and starts the average from them.

    Args:
        decay: Upper limit. After ``n`` updates the next decay is ``min(decay, (1 + n) / (10 + n))``, the first is 0,
            as in diffusers' ``EMAModel``: the average forgets the initial weights.
        update_after_step: Optimizer steps before averaging starts; until then the average is a copy of the weights.
        update_every: Optimizer steps between updates.
        offload: Keep the average in host memory. For weights on CUDA it is pinned, and passes through the device in
            groups at each update.
    """

    def __init__(
        self, decay: float = 0.9999, *, update_after_step: int = 0, update_every: int = 1, offload: bool = False
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"EMA got decay={decay}; expected a number in [0, 1], e.g. decay=0.9999")
        check_at_least("EMA", 1, update_every=update_every)
        check_at_least("EMA", 0, update_after_step=update_after_step)
        self.decay = decay
        self.update_after_step = update_after_step
        self.update_every = update_every
        self.offload = offload
        self.num_updates = 0
        self._shadow: dict[tuple[str, int], Tensor] = {}
        self._state: TrainingState | None = None
        """During a fit."""
        self._weights: SwappableWeights | None = None
        """During a fit and after it."""
        self._module: pl.LightningModule | None = None
        self._averaging = Averaging()
        self._owned: set[tuple[str, int]] = set()
        """Keys of the shards that only this rank contributes when the average is gathered."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._moves = False
        self._swapped = False
        self._restored: EMA | None = None
        """The callback that has restored the trained weights for the fit that begins."""
        self._updates_before: int | None = None

    def add_memory(self, run: TrainingRun) -> TrainingRun:
        return replace(run, averages=True, offload_averages=self.offload)

    @property
    def shadow(self) -> dict[tuple[str, int], Tensor]:
        """The average of every local shard, by ``ParameterShard.key``: flat, in float32."""
        self._averaging.settle()
        return self._shadow

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the trained weights before Lightning loads a checkpoint; keep weights loaded since the last fit."""
        if stage != "fit":
            return
        is_other = self._module is not None and self._module is not pl_module
        self._updates_before, self._restored = self.num_updates, None
        if is_other or trainer.ckpt_path is not None:
            self.num_updates = 0
        holder = _holding_average.pop(pl_module, None)
        self._restored = holder if holder is not None and holder._restore(pl_module) else None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._updates_before = self._restored = None
        if (self._module is not None and self._module is not pl_module) or trainer.ckpt_path is not None:
            self._shadow, self._swapped = {}, False  # belongs to another module or to replaced weights
        state = training_state(trainer)
        self._module, self._state, self._weights = pl_module, state, state
        shards = state.parameter_shards()
        self._divide_anew(trainer, shards)
        engine = engine_of(trainer.strategy)
        self._moves, engine.swaps_averages = engine.moves_weights, True
        self._shadow = self._averages_of(shards, trainer.strategy.root_device)
        if not self._moves:
            self._averaging.follow([*self._shadow.values()], [shard.master for shard in shards])
        self._owned = {shard.key for shard in shards if shard.writes}

    def restart(self) -> None:
        """Restart the average from the current weights, after a checkpoint without an average was loaded."""
        self.num_updates = 0
        self._follow(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_updates = state_dict["num_updates"]

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        engine_of(trainer.strategy).write_back()
        step = trainer.global_step
        if step <= self.update_after_step:
            self._follow(1.0)
        elif step % self.update_every == 0:
            n = self.num_updates
            decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
            self._follow(1.0 - decay)
            self.num_updates += 1

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if engine_of(trainer.strategy).steps_in_backward:
            self._averaging.join()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._averaging.join()  # the optimizer changes the weights that the update reads

    def _follow(self, fraction: float) -> None:
        """Move the average towards the weights by a fraction."""
        assert self._state is not None
        if not self._moves:
            self._averaging.update(fraction)
            return
        # The next pass moves the weights: read them now, and keep no reference.
        weights = [shard.master for shard in self._state.parameter_shards()]
        self._averaging.follow([*self._shadow.values()], weights)
        self._averaging.update(fraction)
        self._averaging.join()
        self._averaging.forget()

    def _averages_of(self, shards: list[ParameterShard], device: torch.device) -> dict[tuple[str, int], Tensor]:
        """Return the shards' averages from an earlier fit, or float32 copies of their weights."""
        apart = [shard for shard in shards if self._needs_pinning(shard)]
        memory = host_memory([tensor_of(shard.master).shape for shard in apart], device)
        offloaded = dict(zip((shard.key for shard in apart), memory))
        return {shard.key: self._average_of(shard, offloaded.get(shard.key)) for shard in shards}

    def _needs_pinning(self, shard: ParameterShard) -> bool:
        """Return whether a shard's average is apart from its weights, and not in pinned memory since an earlier fit."""
        if not self.offload or not isinstance(shard.master, Tensor):
            return False
        average = self._shadow.get(shard.key)
        is_pinned = average is not None and average.is_pinned()
        return not is_pinned and (self._moves or shard.master.device != torch.device("cpu"))

    def _average_of(self, shard: ParameterShard, memory: Tensor | None) -> Tensor:
        master = tensor_of(shard.master)
        device = torch.device("cpu") if self.offload else master.device
        average = self._shadow.get(shard.key)
        if memory is not None:
            return memory.copy_(master if average is None else average.reshape(master.shape))
        if average is not None:
            return average.to(device).reshape(master.shape)  # flat, if another engine kept it
        return torch.empty_like(master, dtype=torch.float32, device=device).copy_(master)

    def _divide_anew(self, trainer: pl.Trainer, shards: list[ParameterShard]) -> None:
        """Reshard the average of an earlier fit for this strategy; a collective call."""
        sizes = {key: average.numel() for key, average in self._shadow.items()}
        same = not sizes or sizes == {shard.key: shard.end - shard.begin for shard in shards}
        if trainer.strategy.reduce_boolean_decision(same, all=True):
            return
        old = {key: average for key, average in self._shadow.items() if key in self._owned}
        new: dict[tuple[str, int], Tensor] = {}
        for name, shape in self._shapes.items():
            ranges = [(begin, average) for (other, begin), average in old.items() if other == name]
            flat = whole(shape, torch.float32, ranges).reshape(-1)
            new |= {shard.key: flat[shard.begin : shard.end].clone() for shard in shards if shard.name == name}
        self._shadow = new

    def _restore(self, pl_module: pl.LightningModule) -> bool:
        """Swap the trained weights back in, unless others were loaded since; return whether it did."""
        if self._module is not pl_module or self._weights is None:
            return False
        if self._weights.holds(self.shadow):
            self._swap_out()
            return True
        log.warning(
            "EMA: weights were loaded since the last fit; training continues from them, and the average starts there"
        )
        self._weights.forget()
        self._shadow, self.num_updates, self._swapped = {}, 0, False
        return False

    def _swap_in(self) -> None:
        if self._weights is None:
            raise RuntimeError("EMA.averaged() needs a running trainer")
        self._weights.swap_in(self.shadow)
        self._swapped = True

    def _swap_out(self) -> None:
        if self._weights is not None and self._swapped:
            self._weights.swap_out()
            self._swapped = False

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights inside the block."""
        if self._swapped:  # during validation, or after fit
            yield
            return
        self._swap_in()
        try:
            yield
        finally:
            self._swap_out()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # after fit the module holds the average
            self._swap_in()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap_out()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._updates_before is not None:  # the fit was refused before it began
            self.num_updates, self._updates_before = self._updates_before, None
            if self._restored is not None:
                self._restored._hold(pl_module)
        elif self._module is pl_module and pl_module not in _holding_average:
            self._swap_out()  # interrupted during validation

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._averaging.settle()
        self._averaging = Averaging()
        self._state = None
        self._weights = engine_of(trainer.strategy).swappable_weights()  # by now the module is whole again
        self._hold(pl_module)

    def _hold(self, pl_module: pl.LightningModule) -> None:
        self._swap_in()
        assert self._weights is not None
        self._shapes = {name: whole_shape(p) for name, p in pl_module.named_parameters() if p.requires_grad}
        self._weights.unshare(self.shadow)  # loading weights into the module must not change the average
        _holding_average[pl_module] = self


def ema_of(trainer: pl.Trainer) -> EMA | None:
    """Return the trainer's EMA callback, if it has one."""
    return next(iter(callbacks_of(trainer, EMA)), None)


def inference_weights(trainer: pl.Trainer) -> contextlib.AbstractContextManager[None]:
    """Return a context that uses the exported weights: the average if there is one."""
    ema = ema_of(trainer)
    return ema.averaged() if ema is not None else contextlib.nullcontext()
