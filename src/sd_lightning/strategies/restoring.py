"""The base class of strategies that restore a module's whole weights when a run ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
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
from sd_lightning.state.ranks import rank_and_world_size
from sd_lightning.state.shards import SwappableWeights
from sd_lightning.strategies.networks import WrappedHooks, trained_networks
from sd_lightning.strategies.sharding import ShardingStrategy
from sd_lightning.strategies.whole_tensors import whole

log = logging.getLogger(__name__)


class RestoringStrategy(ShardingStrategy):
    """Base class of strategies that restore the module's whole weights after a run, in host memory on every rank.

    A strategy calls :meth:`attach` before its engine takes the module, and ``teardown`` restores it. The module stays
    sharded only if host memory cannot hold whole weights for every process of a machine, or if a rank failed and
    collectives are unreliable. Then the same strategy can continue with it, and others refuse it.
    """

    _snapshot: ModuleSnapshot | None = None
    _whole: WholeWeightsState | None = None
    _hooks: WrappedHooks | None = None
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

    def attach(self, trainer: pl.Trainer) -> bool:
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
            self._snapshot = holder._snapshot
            return True
        gather_whole(module)
        keeps_weights = not self._fits and not any(p.is_meta for p in module.parameters())
        self._snapshot = ModuleSnapshot(module, keeps_weights=keeps_weights)
        return False

    def record_hooks(self) -> None:
        """Record which hooks the engine has added, once it has the module."""
        assert self._snapshot is not None
        self._snapshot.record_hooks()

    def _wrap_hooks(self, trainer: pl.Trainer, inside: Callable[[Any, str], AbstractContextManager[Any]]) -> None:
        """Run users' hooks inside of a context until the run ends; see :class:`WrappedHooks`."""
        self._hooks = WrappedHooks(trainer, self._module, inside)

    @override
    def teardown(self) -> None:
        if self._hooks is not None:
            self._hooks.release()
        self.release()
        super().teardown()

    def release(self) -> None:
        """Restore whole weights, or log why the module stays sharded; a collective call unless a rank failed."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        if not self._has_engine():
            self._snapshot = None
            return
        reason = self._reason_to_hold(snapshot)
        if reason is None:
            try:
                self.gather_whole()
                return
            except Exception as error:
                if not self._has_failed:
                    raise
                reason = f"its run ended in an exception, and so did gathering its weights ({error})"
        module = self._module
        if not self._has_failed:  # the exception says more
            log.warning("%s stays in the parts of %s: %s", type(module).__name__, type(self).__name__, reason)
        refusal = _Refusal(self, f"{type(module).__name__} is in the parts of {type(self).__name__}: {reason}")
        for part in (module, *trained_networks(module).values()):
            part.register_forward_pre_hook(refusal, prepend=True)

    def gather_whole(self) -> None:
        """Gather the weights one at a time and end the engine; a collective call."""
        snapshot = self._snapshot
        assert snapshot is not None
        if snapshot.kept is not None:
            snapshot.restore(snapshot.kept.items())
        else:
            has_fitted = self._fits and not self._has_failed
            shards = self.training_state().parameter_shards() if has_fitted else []
            owned = [shard.key for shard in shards if shard.writes]  # none where another replica writes them
            del shards
            snapshot.restore(self._whole_weights())
            self._whole = WholeWeightsState(self._module, owned) if has_fitted else None
        self._end_engine()
        self.optimizers = []  # they step weights that no longer exist
        self._snapshot = None

    def _reason_to_hold(self, snapshot: ModuleSnapshot) -> str | None:
        remedy = "go on with the same strategy, or build the module anew from a checkpoint"
        if snapshot.kept is not None:
            return None
        if self._has_failed:
            many = f"its run ended in an exception, and processes may not be in step; {remedy}"
            return many if self.world_size > 1 else None
        needed, free = snapshot.nbytes * len(self.parallel_devices or [0]), free_host_bytes()
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
    def is_released(self) -> bool:
        """Whether the last run is over and its module whole, without an engine."""
        return self._snapshot is None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_released:
            return Strategy.lightning_module_state_dict(self)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if not self.is_released:
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


def gather_whole(module: pl.LightningModule) -> None:
    """Restore whole weights of a module that an earlier run left sharded; a collective call.

    Raises:
        UsageError: Host memory still cannot hold whole weights.
    """
    holder = _holder_of(module)
    if holder is None:
        return
    assert holder._snapshot is not None
    holder._has_failed = False
    reason = holder._reason_to_hold(holder._snapshot)
    if reason is not None:
        raise UsageError(f"{type(module).__name__} is in the parts of {type(holder).__name__}: {reason}")
    holder.gather_whole()
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


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""Attributes that hold hooks, or facts about them, by the number of the hook."""
_LEFT_BEHIND = {
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "pre_bwd_fn",
    "post_bwd_fn",
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
}
"""Attributes that DeepSpeed and FSDP2 leave in modules, besides those that start with ``_PREFIXES``."""
_PREFIXES = ("ds_", "__composable_api_")


class ModuleSnapshot:
    """A record of a module before an engine takes it: classes, hooks, and dtypes of parameters and buffers.

    Args:
        module: The module.
        keeps_weights: Also keep the weights, which an evaluation does not change. They take memory beside the engine's.
    """

    def __init__(self, module: pl.LightningModule, *, keeps_weights: bool) -> None:
        self._parts = [(part, type(part), _dtype_of(part)) for part in module.modules()]
        self._hooks = {part: _hook_ids(part) for part in module.modules()}
        self._added: dict[nn.Module, set[tuple[str, int]]] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = names.setdefault(parameter, name)
            path, _, key = name.rpartition(".")
            self._places.setdefault(first, []).append((module.get_submodule(path), key))
            self._dtypes[first] = parameter.dtype
        buffers = ((part, key, buffer) for part in module.modules() for key, buffer in part._buffers.items())
        self._buffers = [(part, key, buffer.dtype) for part, key, buffer in buffers if buffer is not None]
        self.nbytes = sum(parameter.numel() * parameter.itemsize for parameter in names)
        self.kept = {name: parameter.detach() for parameter, name in names.items()} if keeps_weights else None
        """The original weights by name, if they were kept."""

    def record_hooks(self) -> None:
        """Record which hooks the engine has added; others may be added and removed later."""
        self._added = {part: _hook_ids(part) - before for part, before in self._hooks.items()}

    @torch.no_grad()
    def restore(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Restore whole weights as ordinary parameters, and the module's own classes and hooks.

        Args:
            weights: Name and whole value of every parameter, one at a time.
        """
        for name, value in weights:
            owner, key = self._places[name][0]
            now: Tensor | None = owner._parameters[key]  # a hook may have frozen or unfrozen it
            trained = now is not None and now.requires_grad
            parameter = nn.Parameter(value.to("cpu", self._dtypes[name]), requires_grad=trained)
            for owner, key in self._places[name]:
                owner._parameters[key] = parameter
        for part, key, dtype in self._buffers:
            buffer = part._buffers.get(key)
            if buffer is not None:
                part._buffers[key] = buffer.to("cpu", dtype)
        for part, kind, remembered in self._parts:
            if type(part) is not kind:
                part.__class__ = kind
            if type(part._parameters) is not dict:
                part.__dict__["_parameters"] = dict(part._parameters)
            for name in [n for n in part.__dict__ if n in _LEFT_BEHIND or n.startswith(_PREFIXES)]:
                del part.__dict__[name]
            for attribute, number in self._added.get(part, ()):
                part.__dict__[attribute].pop(number, None)
            if remembered is not None:
                part.__dict__["_dtype"], part.__dict__["_device"] = remembered, torch.device("cpu")


class WholeWeightsState(SwappableWeights):
    """The trained weights of a module that is whole again, for swapping with their average.

    Args:
        module: The module.
        owned: Keys of the ranges that this rank owned in the engine; all ranks' ranges cover every element once.
    """

    def __init__(self, module: pl.LightningModule, owned: Iterable[tuple[str, int]]) -> None:
        self._module = module
        self._owned = set(owned)
        self._world_size = rank_and_world_size()[1]

    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """Put other weights into the module; a collective call."""
        ours = {key: tensor for key, tensor in weights.items() if key in self._owned}
        trained = {
            (name, begin): self._flat(name)[begin : begin + tensor.numel()].clone()
            for (name, begin), tensor in ours.items()
        }
        self._fill(ours)
        return trained

    def _restore(self, trained: dict[tuple[str, int], Tensor]) -> None:
        """Put the trained weights back; a collective call."""
        self._fill(trained)

    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Return whether the module still holds these weights as :meth:`swap_in` wrote them; a collective call."""
        same = all(
            torch.equal(self._flat(name)[begin : begin + tensor.numel()], tensor.reshape(-1).to(self._flat(name)))
            for (name, begin), tensor in weights.items()
            if (name, begin) in self._owned
        )
        rank, world_size = rank_and_world_size()
        return bool(whole((world_size,), torch.float32, [(rank, torch.tensor([float(same)]))]).all())

    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Do nothing: the module shares no memory with swapped-in weights."""

    def forget(self) -> None:
        """Keep the current parameters, and drop the trained weights."""
        self._trained = None

    def _fill(self, ranges: Mapping[tuple[str, int], Tensor]) -> None:
        world_size = rank_and_world_size()[1]
        if world_size != self._world_size:
            raise UsageError(
                f"the trained weights of {type(self._module).__name__} are divided among the {self._world_size} "
                f"processes of its last fit, and {world_size} are there now; train on before they part, or load a "
                "checkpoint into a new module"
            )
        by_name: dict[str, list[tuple[int, Tensor]]] = {}
        for (name, begin), tensor in ranges.items():
            by_name.setdefault(name, []).append((begin, tensor))
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                value = whole(parameter.shape, parameter.dtype, by_name.get(name, []))
                parameter.data = value.to(parameter.device)

    def _flat(self, name: str) -> Tensor:
        return self._module.get_parameter(name).detach().reshape(-1).cpu()


def _hook_ids(part: nn.Module) -> set[tuple[str, int]]:
    return {(attribute, number) for attribute in _HOOKS for number in part.__dict__[attribute]}


def _dtype_of(part: nn.Module) -> torch.dtype | None:
    """Return the dtype that a Lightning module or metric has recorded as its own, or None."""
    dtype = part.__dict__.get("_dtype")
    return dtype if isinstance(dtype, torch.dtype) else None
