"""What strategies share whose engines take weights apart: what cannot go with them, and how a module is whole again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import TrainingState
from sd_lightning.strategies.networks import trained_networks
from sd_lightning.strategies.plain import PlainModule, PlainState

log = logging.getLogger(__name__)

_held: WeakKeyDictionary[pl.LightningModule, TakesWeightsApart] = WeakKeyDictionary()
"""Modules that could not be put together when a run ended, and the strategy whose engine holds their weights."""


class TakesWeightsApart(ParallelStrategy):
    """Mixin: while a run lasts, the trained weights are not the module's parameters, or no rank has them whole.

    A strategy calls :meth:`take` before its engine takes the module, and :meth:`give_back` when the run ends: then the
    module is a plain one again on every rank, in host memory, whatever comes next. It stays in parts only if host
    memory cannot hold the whole for every process of a machine, or if a rank failed and no collective can be relied
    on; the same strategy goes on with it, and others refuse it.
    """

    _plain: PlainModule | None = None
    _whole: PlainState | None = None
    _has_failed = False
    _fits = False

    # What engines say differently.

    def _adopts(self, other: TakesWeightsApart) -> bool:
        """Go on with the engine of an earlier run, if that can be."""
        return False

    def _engine_state(self) -> TrainingState:
        """Return this rank's ranges of the trained parameters."""
        raise NotImplementedError

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole value of every parameter, one gathered after the other; a collective call."""
        raise NotImplementedError

    def _has_engine(self) -> bool:
        """Whether the engine has the weights: a run may be refused before."""
        raise NotImplementedError

    def _end_engine(self) -> None:
        """Remove what the engine has left behind, once the weights are out of it."""

    # ------------------------------------------------------------------ refusals

    @override
    def connect(self, model: Any) -> None:
        if model.trainer.state.fn == TrainerFn.FITTING:
            self._refuse_averages(model.trainer)
        super().connect(model)

    def _refuse_averages(self, trainer: Any) -> None:
        """Refuse callbacks that average the module's own parameters: it would have no effect, or be lost."""
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise UsageError(
                    f"{type(self).__name__} got the callback {type(callback).__name__}, which averages the module's "
                    "own parameters, and those are not what this engine trains; take sd_lightning.callbacks.EMA in its "
                    "place, or strategy=ddp"
                )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    # ------------------------------------------------------------------ apart and together

    def take(self, trainer: pl.Trainer) -> bool:
        """Note what the module is before the engine takes its weights; a collective call.

        Returns:
            Whether the engine of an earlier run, which still holds the module, is gone on with.

        Raises:
            UsageError: The module is in the parts of another engine, and host memory cannot hold the whole.
        """
        module = self.lightning_module
        assert module is not None
        self._whole, self._has_failed, self._fits = None, False, trainer.state.fn == TrainerFn.FITTING
        holder = _held.get(module)
        if holder is not None and self._adopts(holder):
            allow_training(module)
            self._plain = holder._plain
            return True
        put_together(module)
        keeps_weights = not self._fits and not any(p.is_meta for p in module.parameters())
        self._plain = PlainModule(module, keeps_weights=keeps_weights)
        return False

    def give_back(self) -> None:
        """Make the module a plain one again, or say why it stays in parts; a collective call unless a rank failed."""
        plain, module = self._plain, self.lightning_module
        if plain is None or module is None:
            return
        if not self._has_engine():
            self._plain = None
            return
        reason = self._reason_to_hold(plain)
        if reason is None:
            try:
                self.put_together()
                return
            except Exception as error:
                if not self._has_failed:
                    raise
                reason = f"its run ended in an exception, and so did putting it together ({error})"
        _held[module] = self
        if not self._has_failed:  # the exception says more
            log.warning("%s stays in the parts of %s: %s", type(module).__name__, type(self).__name__, reason)
        _forbid_training(module, f"{type(module).__name__} is in the parts of {type(self).__name__}: {reason}")

    def put_together(self) -> None:
        """Gather the weights one after the other and end the engine; a collective call."""
        plain, module = self._plain, self.lightning_module
        assert plain is not None and module is not None
        if plain.kept is not None:
            plain.restore(plain.kept.items())
        else:
            has_fitted = self._fits and not self._has_failed
            shards = self._engine_state().parameter_shards() if has_fitted else []
            owned = [shard.key for shard in shards if shard.writes]  # none where another replica writes them
            del shards
            plain.restore(self._whole_weights())
            self._whole = PlainState(module, owned) if has_fitted else None
        self._end_engine()
        self.optimizers = []  # of weights that are no more
        self._plain = None

    def _reason_to_hold(self, plain: PlainModule) -> str | None:
        remedy = "go on with the same strategy, or build the module anew from a checkpoint"
        if plain.kept is not None:
            return None
        if self._has_failed and self.world_size > 1:
            return f"its run ended in an exception, and processes may not be in step; {remedy}"
        needed, free = plain.nbytes * len(self.parallel_devices or [0]), free_host_bytes()
        if self._has_failed:
            return None
        if self.reduce_boolean_decision(needed <= free, all=True):
            return None
        return (
            f"all processes of this machine need {needed / 2**30:.3g} GiB of host memory for whole weights, and "
            f"{free / 2**30:.3g} GiB are free here; {remedy}"
        )

    # ------------------------------------------------------------------ what is asked after a fit

    def training_state(self) -> Any:
        """Return this rank's view of the trained parameters: the engine's, or that of a module that is whole again."""
        return self._engine_state() if self._whole is None else self._whole

    @property
    def is_together(self) -> bool:
        """Whether the last run is over and its module whole: there is no engine any more."""
        return self._plain is None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_together:
            return Strategy.lightning_module_state_dict(self)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if not self.is_together:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._whole is not None and "optimizer_states" in checkpoint:
            raise UsageError(
                f"trainer.save_checkpoint after fit: {type(self).__name__} has freed the optimizer's states; let "
                "ModelCheckpoint or PortableCheckpoint save during the fit, or save weights_only=True"
            )
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)


def put_together(module: pl.LightningModule) -> None:
    """Make a module a plain one that an earlier run could not; a collective call.

    Raises:
        UsageError: Host memory still cannot hold it.
    """
    holder = _held.get(module)
    if holder is None:
        return
    assert holder._plain is not None
    holder._has_failed = False
    reason = holder._reason_to_hold(holder._plain)
    if reason is not None:
        raise UsageError(f"{type(module).__name__} is in the parts of {type(holder).__name__}: {reason}")
    holder.put_together()
    allow_training(module)


def allow_training(module: pl.LightningModule) -> None:
    """Forget that a module was in parts."""
    _held.pop(module, None)
    for network in trained_networks(module).values():
        for number, hook in list(network._forward_pre_hooks.items()):
            if isinstance(hook, _Refusal):
                del network._forward_pre_hooks[number]


class _Refusal:
    """A hook that keeps strategies that know nothing of engines from training what they cannot see."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, network: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            raise UsageError(self.reason)


def _forbid_training(module: pl.LightningModule, reason: str) -> None:
    for network in trained_networks(module).values():
        network.register_forward_pre_hook(_Refusal(reason), prepend=True)


def free_host_bytes() -> int:
    """Return how much host memory this process may still take: of the machine, or of its control group."""
    free = 2**62
    lines = Path("/proc/meminfo")
    if lines.is_file():
        free = next(int(line.split()[1]) * 1024 for line in lines.read_text().splitlines() if "MemAvailable" in line)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        cached = sum(
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
        free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
    return free
