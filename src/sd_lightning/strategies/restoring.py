"""The base class of strategies that restore a module's whole weights when a run ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import SwappableWeights
from sd_lightning.strategies.networks import trained_networks
from sd_lightning.strategies.plain_module import PlainModule, PlainState
from sd_lightning.strategies.sharding import ShardingStrategy

log = logging.getLogger(__name__)


class RestoringStrategy(ShardingStrategy):
    """Base class of strategies that restore the module's whole weights after a run, in host memory on every rank.

    A strategy calls :meth:`take` before its engine takes the module, and ``teardown`` restores it. The module stays
    sharded only if host memory cannot hold whole weights for every process of a machine, or if a rank failed and
    collectives are unreliable. Then the same strategy can continue with it, and others refuse it.
    """

    _plain: PlainModule | None = None
    _whole: PlainState | None = None
    _has_failed = False
    _fits = False

    def _adopts(self, other: RestoringStrategy) -> bool:
        """Take over the engine of an earlier run; return whether that is possible."""
        return False

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather every parameter, one at a time, and yield its name and whole value; a collective call."""
        raise NotImplementedError

    def _has_engine(self) -> bool:
        """Return whether the engine has the weights; a run may be refused before that."""
        raise NotImplementedError

    def _end_engine(self) -> None:
        """Clean up after the engine, once the weights are out of it."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def take(self, trainer: pl.Trainer) -> bool:
        """Record the module before the engine takes its weights; a collective call.

        Returns:
            Whether the engine of an earlier run, which still holds the module, is reused.

        Raises:
            UsageError: Another engine still shards the module, and host memory cannot hold whole weights.
        """
        module = self._module
        self._whole, self._has_failed, self._fits = None, False, trainer.state.fn == TrainerFn.FITTING
        holder = _holder_of(module)
        if holder is not None and self._adopts(holder):
            _allow_training(module)
            self._plain = holder._plain
            return True
        put_together(module)
        keeps_weights = not self._fits and not any(p.is_meta for p in module.parameters())
        self._plain = PlainModule(module, keeps_weights=keeps_weights)
        return False

    def _taken(self) -> None:
        """Record which hooks the engine has added, once it has the module."""
        assert self._plain is not None
        self._plain.note_hooks()

    @override
    def teardown(self) -> None:
        self._give_back()
        super().teardown()

    def _give_back(self) -> None:
        """Restore whole weights, or log why the module stays sharded; a collective call unless a rank failed."""
        plain = self._plain
        if plain is None:
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
        module = self._module
        if not self._has_failed:  # the exception says more
            log.warning("%s stays in the parts of %s: %s", type(module).__name__, type(self).__name__, reason)
        refusal = _Refusal(self, f"{type(module).__name__} is in the parts of {type(self).__name__}: {reason}")
        for part in (module, *trained_networks(module).values()):
            part.register_forward_pre_hook(refusal, prepend=True)

    def put_together(self) -> None:
        """Gather the weights one at a time and end the engine; a collective call."""
        plain = self._plain
        assert plain is not None
        if plain.kept is not None:
            plain.restore(plain.kept.items())
        else:
            has_fitted = self._fits and not self._has_failed
            shards = self.training_state().parameter_shards() if has_fitted else []
            owned = [shard.key for shard in shards if shard.writes]  # none where another replica writes them
            del shards
            plain.restore(self._whole_weights())
            self._whole = PlainState(self._module, owned) if has_fitted else None
        self._end_engine()
        self.optimizers = []  # they step weights that no longer exist
        self._plain = None

    def _reason_to_hold(self, plain: PlainModule) -> str | None:
        remedy = "go on with the same strategy, or build the module anew from a checkpoint"
        if plain.kept is not None:
            return None
        if self._has_failed:
            many = f"its run ended in an exception, and processes may not be in step; {remedy}"
            return many if self.world_size > 1 else None
        needed, free = plain.nbytes * len(self.parallel_devices or [0]), free_host_bytes()
        if self.reduce_boolean_decision(needed <= free, all=True):
            return None
        return (
            f"all processes of this machine need {needed / 2**30:.3g} GiB of host memory for whole weights, and "
            f"{free / 2**30:.3g} GiB are free here; {remedy}"
        )

    @override
    def swappable_weights(self) -> SwappableWeights:
        return self.training_state() if self._whole is None else self._whole

    @property
    def is_together(self) -> bool:
        """Whether the last run is over and its module whole, without an engine."""
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


class _Refusal:
    """Forward pre-hook of a sharded module: names the strategy with the weights, and refuses training."""

    def __init__(self, holder: RestoringStrategy, reason: str) -> None:
        self.holder = holder
        self.reason = reason

    def __call__(self, network: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            raise UsageError(self.reason)


def _holder_of(module: pl.LightningModule) -> RestoringStrategy | None:
    """Return the strategy whose engine still holds a module's weights after its run, or None."""
    return next((hook.holder for hook in module._forward_pre_hooks.values() if isinstance(hook, _Refusal)), None)


def _allow_training(module: pl.LightningModule) -> None:
    for part in (module, *trained_networks(module).values()):
        for number, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, _Refusal):
                del part._forward_pre_hooks[number]


def put_together(module: pl.LightningModule) -> None:
    """Restore whole weights of a module that an earlier run left sharded; a collective call.

    Raises:
        UsageError: Host memory still cannot hold whole weights.
    """
    holder = _holder_of(module)
    if holder is None:
        return
    assert holder._plain is not None
    holder._has_failed = False
    reason = holder._reason_to_hold(holder._plain)
    if reason is not None:
        raise UsageError(f"{type(module).__name__} is in the parts of {type(holder).__name__}: {reason}")
    holder.put_together()
    _allow_training(module)


def free_host_bytes() -> int:
    """Return the free host memory in bytes, of the machine or of this process's control group."""
    free = psutil.virtual_memory().available
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
