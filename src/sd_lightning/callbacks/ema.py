"""Exponential moving average of the trained weights, on the shards that each rank owns."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import LazyTensor, ParameterShard, TrainingState
from sd_lightning.strategies import engine_of, training_state
from sd_lightning.strategies.plain_module import PlainState
from sd_lightning.strategies.whole_tensors import whole

log = logging.getLogger(__name__)

_holding_average: weakref.WeakKeyDictionary[pl.LightningModule, EMA] = weakref.WeakKeyDictionary()
"""Modules that hold an average since their last ``fit`` ended, and who keeps their trained weights."""


class EMA(Callback):
    """Average the weights: ``ema = decay * ema + (1 - decay) * weights`` after an optimizer step, in float32.

    One fused update over all local shards, without communication; the numbers are the same under every strategy. On
    CUDA it runs beside the next forward and backward pass, on a stream of its own.
    Sampling, validation and exported pipelines use the average. When ``fit`` ends the module holds it, and the next
    ``fit`` continues from the trained weights, which checkpoints keep as well. Weights that are loaded in between are
    what the next ``fit`` trains, with an average that starts at them.

    Args:
        decay: The limit; with ``n`` updates before it, an update has the decay ``min(decay, (1 + n) / (10 + n))``, and
            the first one 0, as in diffusers' ``EMAModel``: the average forgets its start.
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
            raise UsageError(f"EMA got update_every={update_every}; expected at least 1, e.g. update_every=1")
        if update_after_step < 0:
            raise UsageError(
                f"EMA got update_after_step={update_after_step}; expected at least 0, e.g. update_after_step=0"
            )
        self.decay = decay
        self.update_after_step = update_after_step
        self.update_every = update_every
        self.offload = offload
        self.num_updates = 0
        self._shadow: dict[tuple[str, int], Tensor] = {}
        self._state: TrainingState | PlainState | None = None
        self._module: pl.LightningModule | None = None
        self._live: list[LazyTensor] = []
        self._average: list[Tensor] = []
        self._owned: set[tuple[str, int]] = set()
        """Ranges that no other rank gives, when the average is put together."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._moves = False
        self._last_step = 0
        self._swapped = False
        self._given_back: EMA | None = None
        self._updates_before: int | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def shadow(self) -> dict[tuple[str, int], Tensor]:
        """The average of every local shard, by ``ParameterShard.key``: flat, in float32."""
        self._join()
        return self._shadow

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its trained weights back before Lightning loads others, or leave those loaded since."""
        if stage != "fit":
            return
        is_other = self._module is not None and self._module is not pl_module
        self._updates_before, self._given_back = self.num_updates, None
        if is_other or trainer.ckpt_path is not None:
            self.num_updates = 0
        holder = _holding_average.get(pl_module)
        if holder is not None and (holder._module is not pl_module or holder._replicated is not None):
            del _holding_average[pl_module]
            self._given_back = holder if holder._give_back(pl_module) else None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        holder = _holding_average.pop(pl_module, None)
        if holder is not None:
            holder._swap_out()  # engines that shard weights take none between two fits
        self._updates_before = self._given_back = None
        if (self._module is not None and self._module is not pl_module) or trainer.ckpt_path is not None:
            self._shadow, self._swapped = {}, False  # of another module, or of weights that have been replaced
        state = training_state(trainer)
        self._module, self._state = pl_module, state
        shards = state.parameter_shards()
        self._divide_anew(trainer, shards)
        self._moves = engine_of(trainer.strategy).moves_weights
        self._live = [] if self._moves else [shard.master for shard in shards]
        self._shadow = {shard.key: self._average_of(shard) for shard in shards}
        self._owned = {shard.key for shard in shards if shard.writes}
        self._average = list(self._shadow.values())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step  # by now a checkpoint has been restored

    def restart(self) -> None:
        """Let the average begin at the present weights (a checkpoint without an average was loaded)."""
        self.num_updates = 0
        self._follow(1.0)

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
            self._follow(1.0)
        elif step % self.update_every == 0:
            n = self.num_updates
            decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
            self._follow(1.0 - decay)
            self.num_updates += 1

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._join()  # the weights that it reads are about to change

    def _follow(self, weight: float) -> None:
        """Move the average to the weights by a fraction of the way."""
        assert self._state is not None and not isinstance(self._state, PlainState)
        if self._moves:  # nothing reads weights, or keeps their memory, when the next pass moves them
            self._live = [shard.master for shard in self._state.parameter_shards()]
            self._move(weight)
            self._live = []
            return
        device = self._average[0].device if self._average else torch.device("cpu")
        if device.type != "cuda":
            self._move(weight)
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._move(weight)

    def _join(self) -> None:
        """Let what the current stream does next come after the last update."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _move(self, weight: float) -> None:
        live = [tensor for tensor in self._live if isinstance(tensor, Tensor)]
        if len(live) < len(self._live):  # swapped to a disk: one at a time in memory
            for average, read in zip(self._average, self._live, strict=True):
                average.lerp_((read if isinstance(read, Tensor) else read()).to(average.device), weight)
        elif weight == 1.0:
            torch._foreach_copy_(self._average, live)
        else:
            torch._foreach_lerp_(self._average, self._like_average(live), weight)

    def _like_average(self, live: list[Tensor]) -> list[Tensor]:
        alike = all(t.dtype == torch.float32 and t.device == a.device for t, a in zip(live, self._average))
        if not self.offload and alike:
            return live
        return [tensor.to(average.device, torch.float32) for tensor, average in zip(live, self._average)]

    def _average_of(self, shard: ParameterShard) -> Tensor:
        """Return the average of an earlier fit, or a copy of the weights to begin with."""
        master = shard.master if isinstance(shard.master, Tensor) else shard.master()
        device = torch.device("cpu") if self.offload else master.device
        average = self._shadow.get(shard.key)
        if average is not None:
            return average.to(device).reshape(master.shape)  # of flat shards, if another engine kept it
        return torch.empty_like(master, dtype=torch.float32, device=device).copy_(master)

    def _divide_anew(self, trainer: pl.Trainer, shards: list[ParameterShard]) -> None:
        """Divide the average of an earlier fit as this strategy divides weights; a collective call."""
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

    @property
    def _replicated(self) -> ReplicatedState | PlainState | None:
        """The state of a module with whole weights, where anyone may load others."""
        state = self._state
        return state if isinstance(state, PlainState) or type(state) is ReplicatedState else None

    def _give_back(self, pl_module: pl.LightningModule) -> bool:
        """Let a module that holds the average have the trained weights, unless others were loaded into it since."""
        if self._module is not pl_module or self._replicated is None:
            return False
        if self._replicated.holds(self.shadow):
            self._swap_out()
            return True
        log.warning(
            "EMA: weights were loaded since the last fit; training continues from them, and the average starts there"
        )
        self._replicated.forget()
        self._shadow, self.num_updates, self._swapped = {}, 0, False
        return False

    def _swap_in(self) -> None:
        if self._state is None:
            raise RuntimeError("EMA.averaged() needs a running trainer")
        self._state.swap_in(self.shadow)
        self._swapped = True

    def _swap_out(self) -> None:
        if self._state is not None and self._swapped:
            self._state.swap_out()
            self._swapped = False

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the average inside the block."""
        if self._swapped:  # in a validation, or after fit
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
            if self._given_back is not None:
                self._given_back._hold(pl_module)
        elif self._module is pl_module and pl_module not in _holding_average:
            self._swap_out()  # interrupted in a validation

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._live = []
        self._state = training_state(trainer)  # by now an engine has given the module back
        self._hold(pl_module)

    def _hold(self, pl_module: pl.LightningModule) -> None:
        self._swap_in()
        if self._replicated is not None:
            self._shapes = {name: tuple(p.shape) for name, p in pl_module.named_parameters() if p.requires_grad}
            self._replicated.unshare(self.shadow)  # what is loaded into the module must not change the average
        _holding_average[pl_module] = self


def ema_of(trainer: pl.Trainer) -> EMA | None:
    """Return the trainer's EMA callback, if it has one."""
    return next((c for c in trainer.callbacks if isinstance(c, EMA)), None)  # type: ignore[attr-defined]


def inference_weights(trainer: pl.Trainer) -> contextlib.AbstractContextManager[None]:
    """Compute with the weights that are exported: the average if there is one."""
    ema = ema_of(trainer)
    return ema.averaged() if ema is not None else contextlib.nullcontext()
