"""Record of a module, to restore it after an engine sharded it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import SwappableWeights
from sd_lightning.strategies.whole_tensors import rank_and_world_size, whole

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


class PlainModule:
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

    def note_hooks(self) -> None:
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


class PlainState(SwappableWeights):
    """The trained weights of a module that is whole again, for swapping with their average.

    Args:
        module: The module.
        owned: Keys of the ranges that this rank owned in the engine; all ranks' ranges cover every element once.
    """

    def __init__(self, module: pl.LightningModule, owned: Iterable[tuple[str, int]]) -> None:
        self._module = module
        self._owned = set(owned)
        self._world_size = rank_and_world_size()[1]
        self._trained: dict[tuple[str, int], Tensor] | None = None

    @torch.no_grad()
    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Put other weights into the module until :meth:`swap_out`; a collective call."""
        if self._trained is not None:
            raise RuntimeError("swap_in called twice without swap_out")
        ours = {key: tensor for key, tensor in weights.items() if key in self._owned}
        self._trained = {
            (name, begin): self._flat(name)[begin : begin + tensor.numel()].clone()
            for (name, begin), tensor in ours.items()
        }
        self._fill(ours)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the trained weights back; a collective call."""
        if self._trained is None:
            raise RuntimeError("swap_out called without swap_in")
        self._fill(self._trained)
        self._trained = None

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
