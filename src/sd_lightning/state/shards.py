"""The one view of training state: what a rank owns of every trained parameter, whatever the engine.

EMA, portable checkpoints, export and the parity tests stand on :class:`ParameterShard` and
:class:`TrainingState` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.state.optimizer_change import optimizer_name
from sd_lightning.storage.tensor_store import Entry

LazyTensor = Tensor | Callable[[], Tensor]

# How an update is computed, not what it computes: never taken from a checkpoint.
_IMPLEMENTATION_KEYS = ("params", "fused", "foreach", "capturable", "differentiable")


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
    reads a float32 copy from where it is swapped to."""
    states: dict[str, LazyTensor] = field(default_factory=dict)
    """Optimizer states by name, elementwise like the master; a function makes a dequantised one when needed. Only a
    shard that is the whole parameter may have states of another shape (Adafactor's rows and columns)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """What the optimizer keeps once per parameter, such as ``step``."""
    writes: bool = True
    """Whether this rank writes the range to checkpoints (one of several that hold the same does)."""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.begin

    def saved(self) -> SavedParameter:
        """Return what a checkpoint says about the parameter."""
        shapes = {kind: tuple(s.shape) if self._is_other(s) else self.shape for kind, s in self.states.items()}
        return SavedParameter(self.shape, shapes, self.scalars)

    def entries(self, **averages: Tensor) -> list[Entry]:
        """Return what goes into the tensor store: ``master/…``, one per state, and averages by their kind."""
        entries = []
        for kind, tensor in {"master": self.master, **self.states, **averages}.items():
            key = f"{kind}/{self.name}"
            if self._is_other(tensor):
                entries.append(Entry(key, tuple(tensor.shape), 0, tensor.numel(), tensor))
            else:
                dtype = next((t.dtype for t in (tensor, self.master) if isinstance(t, Tensor)), torch.float32)
                entries.append(Entry(key, self.shape, self.begin, self.end, tensor, dtype))
        return entries

    def _is_other(self, state: LazyTensor) -> TypeGuard[Tensor]:
        """Whether a state does not hold one value per element of the master."""
        return isinstance(state, Tensor) and state.numel() != self.end - self.begin


@dataclass(frozen=True)
class SavedParameter:
    """What a checkpoint holds of one parameter, besides its weights."""

    shape: tuple[int, ...]
    states: dict[str, tuple[int, ...]]
    """Shape by name of each optimizer state."""
    scalars: dict[str, Any]


Read = Callable[[str, str, Tensor, int, int], None]
"""(kind, parameter name, out, begin, end): fill ``out`` with a flat range of the saved tensor ``kind/name``."""


class TrainingState(Protocol):
    """What every engine implements."""

    def parameter_shards(self) -> list[ParameterShard]:
        """Return what this rank owns, as live tensors."""
        ...

    def optimizer_groups(self) -> list[list[dict[str, Any]]]:
        """Return, per optimizer and group, its hyper-parameters and the names of its parameters (``params``)."""
        ...

    def optimizer_names(self) -> list[str]:
        """Return the class of each optimizer, as :func:`optimizer_name` writes it."""
        ...

    def load(self, saved: Mapping[str, SavedParameter], groups: list[list[dict[str, Any]]] | None, read: Read) -> None:
        """Take weights, optimizer states and hyper-parameters from a checkpoint."""
        ...

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Compute with other weights until :meth:`swap_out`; keys are ``ParameterShard.key``."""
        ...

    def swap_out(self) -> None:
        """Compute with the trained weights again, bit for bit."""
        ...


class ReplicatedState:
    """Training state of engines in which every rank holds everything: one process, or DDP.

    Args:
        parameters: Trained parameters by name.
        optimizers: The optimizers that step them.
        rank: This process; rank 0 writes checkpoints.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        rank: int = 0,
    ) -> None:
        self._parameters = dict(parameters)
        self._optimizers = list(optimizers)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._rank = rank
        self._trained: dict[str, Tensor] | None = None
        self._refuse_replaced_parameters()

    def parameter_shards(self) -> list[ParameterShard]:
        """Return one shard per parameter: the whole of it."""
        shards = []
        for name, parameter in self._parameters.items():
            states, scalars = _split(self._optimizer_state(parameter), self._local)
            begin, end = self._range(parameter)
            shards.append(
                ParameterShard(
                    name,
                    tuple(parameter.shape),
                    begin,
                    end,
                    self._local(parameter),
                    states,
                    scalars,
                    writes=self._writes(parameter),
                )
            )
        return shards

    def optimizer_groups(self) -> list[list[dict[str, Any]]]:
        """Return hyper-parameters and parameter names of every group."""
        return [
            [
                hyper_parameters(group) | {"params": [self._names[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def optimizer_names(self) -> list[str]:
        """Return the class of each optimizer."""
        return [optimizer_name(optimizer) for optimizer in self._optimizers]

    def load(self, saved: Mapping[str, SavedParameter], groups: list[list[dict[str, Any]]] | None, read: Read) -> None:
        """Fill parameters and create the optimizers' states; with ``groups=None`` only weights are loaded.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                read("master", name, self._local(parameter), *self._range(parameter))
        if groups is None:
            return
        check_same_groups(self.optimizer_groups(), groups)
        for optimizer, saved_groups in zip(self._optimizers, groups, strict=True):
            for gindex, (group, values) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
                group.update(hyper_parameters(values))
                for pindex, parameter in enumerate(group["params"]):
                    name = self._names[parameter]
                    if not saved[name].states and not saved[name].scalars:
                        continue  # saved before the first step, or a parameter that never had a gradient
                    if hasattr(optimizer, "init_state"):  # bitsandbytes: block-quantised states
                        _load_quantised(optimizer, (group, parameter, gindex, pindex), name, saved[name], read)
                    else:
                        optimizer.state[parameter] = self._load_states(group, parameter, name, saved[name], read)

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Point the parameters at other weights: no copy where dtype, device and layout agree."""
        if self._trained is not None:
            raise RuntimeError("swap_in called twice without swap_out")
        self._trained = {}
        for name, parameter in self._parameters.items():
            other = weights[name, 0]
            if (other.dtype, other.device) != (parameter.dtype, parameter.device):
                other = torch.empty_like(parameter).copy_(other)
            self._trained[name] = parameter.data
            parameter.data = other

    def swap_out(self) -> None:
        """Point the parameters back at the trained weights."""
        if self._trained is None:
            raise RuntimeError("swap_out called without swap_in")
        for name, parameter in self._parameters.items():
            parameter.data = self._trained[name].to(parameter.device)  # the trainer may have moved them meanwhile
        self._trained = None

    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Return whether the parameters still are what :meth:`swap_in` has made of these weights."""
        return all(
            torch.equal(parameter.detach(), weights[name, 0].to(parameter.device, parameter.dtype))
            for name, parameter in self._parameters.items()
        )

    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Give the parameters memory of their own where :meth:`swap_in` has pointed them at these weights."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() == weights[name, 0].data_ptr():
                parameter.data = parameter.data.clone()

    def forget(self) -> None:
        """Let the parameters stay what they are: there is no going back to the trained weights."""
        self._trained = None

    def _refuse_replaced_parameters(self) -> None:
        """bitsandbytes puts a contiguous copy in the place of a weight in another layout: all views of it go stale."""
        for optimizer in self._optimizers:
            if hasattr(optimizer, "init_state") and not all(p.is_contiguous() for p in self._parameters.values()):
                raise UsageError(
                    f"{type(optimizer).__name__} works on contiguous weights only, and some are in the NHWC layout; "
                    "set speed.channels_last=false or choose optimizer=adamw"
                )

    # What a rank holds of a parameter, or of an optimizer state like it: engines that shard say it here.

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def _range(self, parameter: nn.Parameter) -> tuple[int, int]:
        return 0, parameter.numel()

    def _writes(self, parameter: nn.Parameter) -> bool:
        return self._rank == 0

    def _load_states(
        self, group: Mapping[str, Any], parameter: nn.Parameter, name: str, saved: SavedParameter, read: Read
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, value in saved.scalars.items():
            on_device = isinstance(value, Tensor) and (group.get("fused") or group.get("capturable"))
            state[key] = value.to(parameter.device) if on_device else value
        for kind, shape in saved.states.items():
            if shape == tuple(parameter.shape):
                state[kind] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
                read(kind, name, self._local(state[kind]), *self._range(parameter))
            else:
                state[kind] = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
                read(kind, name, state[kind], 0, state[kind].numel())
        return state

    def _optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return dict(optimizer.state[parameter])
        return {}


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer group sets for its parameters, without how the update is computed."""
    return {k: v for k, v in group.items() if k not in _IMPLEMENTATION_KEYS}


def check_same_groups(ours: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]]) -> None:
    """Compare the parameters of optimizer groups with those of a checkpoint.

    Raises:
        UsageError: They differ.
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


def _split(state: Mapping[str, Any], local: Callable[[Tensor], Tensor]) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Divide what an optimizer keeps for a parameter into elementwise states and scalars."""
    if "qmap1" in state:
        return _dequantised(state), {"step": state["step"]}
    states: dict[str, LazyTensor] = {}
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            states[name] = local(value)
        else:
            scalars[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return states, scalars


# ---------------------------------------------------------------------- 8-bit optimizer states (bitsandbytes)


def _dequantised(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return functions that dequantise block-quantised states, one at a time."""

    def dequantise(kind: str) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        number = kind.removeprefix("state")
        quantised: Tensor = state[kind]
        return dequantize_blockwise(
            quantised.reshape(-1), absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=256
        ).reshape(quantised.shape)

    return {kind: partial(dequantise, kind) for kind in ("state1", "state2") if kind in state}


def _load_quantised(
    optimizer: Any, where: tuple[dict[str, Any], nn.Parameter, int, int], name: str, saved: SavedParameter, read: Read
) -> None:
    """Make the optimizer's own 8-bit state and fill it; not bit-exact, since blocks are quantised again."""
    from bitsandbytes.functional import quantize_blockwise

    group, parameter, gindex, pindex = where
    optimizer.init_state(group, parameter, gindex, pindex)
    state = optimizer.state[parameter]
    state["step"] = int(saved.scalars["step"])
    for kind in saved.states:
        if "qmap1" not in state:  # bitsandbytes keeps small parameters' states in float32
            read(kind, name, state[kind], 0, parameter.numel())
            continue
        number = kind.removeprefix("state")
        values = torch.empty_like(state[kind], dtype=torch.float32)
        read(kind, name, values, 0, parameter.numel())
        quantised, quant_state = quantize_blockwise(values.reshape(-1), code=state[f"qmap{number}"], blocksize=256)
        state[kind].reshape(-1).copy_(quantised)
        state[f"absmax{number}"].copy_(quant_state.absmax)
