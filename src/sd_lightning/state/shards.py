"""Training state that is independent of the engine: this rank's part of every trained parameter.

EMA, portable checkpoints, export and the parity tests use only :class:`ParameterShard` and :class:`TrainingState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError

LazyTensor = Tensor | Callable[[], Tensor]
"""A tensor, or a function that makes it when needed."""

OptimizerGroups = list[list[dict[str, Any]]]
"""Per optimizer and parameter group: its hyper-parameters, and the names of its parameters under ``params``."""

_ENGINES = ("deepspeed", "colossalai")
# How an update is computed, not what it computes: never taken from a checkpoint.
_IMPLEMENTATION_KEYS = ("params", "fused", "foreach", "capturable", "differentiable")


def tensor_of(values: LazyTensor) -> Tensor:
    """Return the tensor; make it now if it is lazy."""
    return values if isinstance(values, Tensor) else values()


@dataclass(frozen=True)
class TensorRange:
    """The range ``[begin, end)`` of a named, row-major flattened tensor."""

    name: str
    shape: tuple[int, ...]
    """Global shape of the whole tensor."""
    begin: int
    end: int
    values: LazyTensor
    """``end - begin`` values in row-major order, any shape, strides and device."""
    dtype: torch.dtype | None = None
    """Required if the values are lazy; otherwise that of the values."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype in the file."""
        if self.dtype is not None:
            return self.dtype
        if not isinstance(self.values, Tensor):
            raise ValueError(f"TensorRange {self.name!r} makes its values when they are written; give its dtype.")
        return self.values.dtype


@dataclass
class ParameterShard:
    """A flat range of one trained parameter and everything an optimizer keeps for it."""

    name: str
    """Name in the module: "unet.conv_in.weight"."""
    shape: tuple[int, ...]
    """Global shape of the whole parameter."""
    begin: int
    end: int
    """The range ``[begin, end)`` of the row-major flattened parameter that this rank owns."""
    master: LazyTensor
    """The weights that the optimizer updates; ``end - begin`` elements in row-major order, any strides. A function
    reads a float32 copy of swapped-out weights."""
    states: dict[str, LazyTensor] = field(default_factory=dict)
    """Optimizer states by name, elementwise like the master; a function dequantises them when called. Only a
    shard that is the whole parameter may have states of another shape (Adafactor's rows and columns)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Scalars that the optimizer keeps per parameter, such as ``step``."""
    writes: bool = True
    """Whether this rank writes the range to checkpoints; of the ranks that hold the same range, one does."""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.begin

    def saved(self) -> SavedParameter:
        """Return the parameter's record for ``trainer.json``."""
        shapes = {kind: tuple(s.shape) if self._is_other(s) else self.shape for kind, s in self.states.items()}
        return SavedParameter(self.shape, shapes, self.scalars)

    def ranges(self, **averages: Tensor) -> list[TensorRange]:
        """Return the ranges that a checkpoint stores: ``master/<name>``, one per state, and one per average."""
        ranges = []
        for kind, tensor in {"master": self.master, **self.states, **averages}.items():
            name = f"{kind}/{self.name}"
            if self._is_other(tensor):
                ranges.append(TensorRange(name, tuple(tensor.shape), 0, tensor.numel(), tensor))
            else:
                # States are dequantised to float32, also those of bfloat16 weights.
                wide = self.master.dtype if isinstance(self.master, Tensor) else torch.float32
                dtype = tensor.dtype if isinstance(tensor, Tensor) else torch.promote_types(wide, torch.float32)
                ranges.append(TensorRange(name, self.shape, self.begin, self.end, tensor, dtype))
        return ranges

    def _is_other(self, state: LazyTensor) -> TypeGuard[Tensor]:
        """Return whether a state does not have one value per element of the master."""
        return isinstance(state, Tensor) and state.numel() != self.end - self.begin


@dataclass(frozen=True)
class SavedParameter:
    """The record of one parameter in a checkpoint's ``trainer.json``."""

    shape: tuple[int, ...]
    states: dict[str, tuple[int, ...]]
    """Shape of each optimizer state, by name."""
    scalars: dict[str, Any]


Read = Callable[[str, str, Tensor, int, int], None]
"""(kind, parameter name, out, begin, end): fill ``out`` with a flat range of the saved tensor ``kind/name``."""


class SwappableWeights(Protocol):
    """The trained weights of a module, which others can take the place of."""

    _trained: Any = None
    """What :meth:`_exchange` returned, while other weights are swapped in."""

    @torch.no_grad()
    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Swap other weights in until :meth:`swap_out`; keys are ``ParameterShard.key``."""
        if self._trained is not None:
            raise RuntimeError("swap_in called twice without swap_out")
        self._trained = self._exchange(weights)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the trained weights, bit for bit."""
        if self._trained is None:
            raise RuntimeError("swap_out called without swap_in")
        self._restore(self._trained)
        self._trained = None

    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> Any:
        """Put other weights in place of the trained ones, and return what :meth:`_restore` needs; not None."""

    def _restore(self, trained: Any) -> None:
        """Put the trained weights back."""

    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Return whether the module still computes with these weights, as after :meth:`swap_in`."""

    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Give swapped-in weights memory of their own, so that loading into the module does not change the others."""

    def forget(self) -> None:
        """Keep the swapped-in weights for good: drop the trained ones."""


class TrainingState(SwappableWeights, Protocol):
    """The interface that every engine implements."""

    def parameter_shards(self) -> list[ParameterShard]:
        """Return this rank's shards as live tensors; all ranks together cover everything."""

    def optimizer_groups(self) -> OptimizerGroups:
        """Return hyper-parameters and parameter names of every group."""

    def optimizer_names(self) -> list[str]:
        """Return the class of each optimizer, as :func:`optimizer_name` writes it."""

    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load weights, optimizer states and hyper-parameters from a checkpoint; only weights if groups are None."""


class ShardedState(TrainingState):
    """Training state of an engine that holds the weights in parts, which users cannot reach between two fits."""

    @override
    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        return True

    @override
    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        pass  # the engine copies what it swaps in

    @override
    def forget(self) -> None:
        raise RuntimeError("forget called for weights that only the engine can replace")


def optimizer_name(optimizer: Optimizer) -> str:
    """Return an optimizer's name in checkpoints: its package and class, such as ``torch.AdamW``.

    Adam classes of engines have the name of the torch class they replace.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if package in _ENGINES and "Adam" in kind.__name__:
        decoupled = getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", True))
        return "torch.AdamW" if decoupled else "torch.Adam"
    return f"{package}.{kind.__name__}"


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer group's settings, without ``params`` and keys that only choose the implementation."""
    return {k: v for k, v in group.items() if k not in _IMPLEMENTATION_KEYS}


def named_groups(optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str]) -> OptimizerGroups:
    """Return hyper-parameters and parameter names of every group of optimizers."""
    return [
        [hyper_parameters(group) | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def load_groups(optimizers: Sequence[Optimizer], ours: OptimizerGroups, saved: OptimizerGroups) -> None:
    """Load the hyper-parameters of optimizers' groups.

    Args:
        optimizers: The optimizers.
        ours: Their groups, with names of parameters.
        saved: Those of a checkpoint.

    Raises:
        UsageError: The groups do not hold the same parameters as those saved.
    """
    check_same_groups(ours, saved)
    for optimizer, groups in zip(optimizers, saved, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(hyper_parameters(values))


def check_same_groups(ours: OptimizerGroups, theirs: OptimizerGroups) -> None:
    """Check that optimizer groups hold the same parameters as those of a checkpoint.

    Raises:
        UsageError: The parameters differ.
    """
    names = [[group["params"] for group in optimizer] for optimizer in ours]
    saved = [[group["params"] for group in optimizer] for optimizer in theirs]
    if names != saved:
        sizes = [[[len(group) for group in optimizer] for optimizer in each] for each in (names, saved)]
        raise UsageError(
            f"resume: the optimizer's parameter groups hold {sizes[0]} parameters, those of the checkpoint {sizes[1]}, "
            "or others by name; resume with the same trained networks, or start a new run from its weights with "
            "init_from="
        )
