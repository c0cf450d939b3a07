"""Training state of engines that hold whole parameters on every rank, also with 8-bit optimizers of bitsandbytes.

Checkpoints hold block-quantised states dequantised, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import (
    LazyTensor,
    OptimizerGroups,
    ParameterShard,
    Read,
    SavedParameter,
    TrainingState,
    load_groups,
    named_groups,
    optimizer_name,
)


class ReplicatedState(TrainingState):
    """Training state of one process, or of DDP.

    Args:
        parameters: Trained parameters by name.
        optimizers: The optimizers that step them.
        rank: Rank of this process; rank 0 writes checkpoints.

    Raises:
        UsageError: An 8-bit optimizer got weights that are not contiguous.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer], *, rank: int = 0
    ) -> None:
        self._parameters = dict(parameters)
        self._optimizers = list(optimizers)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._rank = rank
        for optimizer in self._optimizers:
            # bitsandbytes replaces other weights by contiguous copies, so all views of them would go stale.
            if is_eight_bit(optimizer) and not all(p.is_contiguous() for p in self._parameters.values()):
                raise UsageError(
                    f"{type(optimizer).__name__} works on contiguous weights only, and some are in the NHWC layout; "
                    "set speed.channels_last=false or choose optimizer=adamw"
                )

    @override
    def parameter_shards(self) -> list[ParameterShard]:
        """Return one shard per parameter: this rank's part of it."""
        shards = []
        for name, parameter in self._parameters.items():
            states, scalars = self._states_of(parameter)
            begin, end = self._range(parameter)
            part, writes = self._local(parameter), self._writes(parameter)
            shape = tuple(parameter.shape)
            shards.append(ParameterShard(name, shape, begin, end, part, states, scalars, writes=writes))
        return shards

    @override
    def optimizer_groups(self) -> OptimizerGroups:
        """Return hyper-parameters and parameter names of every group."""
        return named_groups(self._optimizers, self._names)

    @override
    def optimizer_names(self) -> list[str]:
        """Return the name of each optimizer's class."""
        return [optimizer_name(optimizer) for optimizer in self._optimizers]

    @override
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load parameters and optimizer states; only parameters with ``groups=None``.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                read("master", name, self._local(parameter), *self._range(parameter))
        if groups is None:
            return
        load_groups(self._optimizers, self.optimizer_groups(), groups)
        for optimizer in self._optimizers:
            for gindex, group in enumerate(optimizer.param_groups):
                for pindex, parameter in enumerate(group["params"]):
                    name = self._names[parameter]
                    if not saved[name].states and not saved[name].scalars:
                        continue  # saved before the first step, or a parameter that never had a gradient
                    if is_eight_bit(optimizer):
                        optimizer.init_state(group, parameter, gindex, pindex)
                        fill_quantised(self._optimizer_state(parameter), name, saved[name], read)
                    else:
                        optimizer.state[parameter] = self._load_states(group, parameter, name, saved[name], read)

    @override
    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
        """Point the parameters at other weights, without a copy if dtype and device agree."""
        trained = {}
        for name, parameter in self._parameters.items():
            other = weights[name, 0]
            if (other.dtype, other.device) != (parameter.dtype, parameter.device):
                other = torch.empty_like(parameter).copy_(other)
            trained[name] = parameter.data
            parameter.data = other
        return trained

    @override
    def _restore(self, trained: dict[str, Tensor]) -> None:
        """Point the parameters back at the trained weights."""
        for name, parameter in self._parameters.items():
            parameter.data = trained[name].to(parameter.device)  # the trainer may have moved them meanwhile

    @override
    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Return whether the parameters still equal these weights, as after :meth:`swap_in`."""
        return all(
            torch.equal(parameter.detach(), weights[name, 0].to(parameter.device, parameter.dtype))
            for name, parameter in self._parameters.items()
        )

    @override
    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Copy the parameters that :meth:`swap_in` has pointed at these weights to separate memory."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() == weights[name, 0].data_ptr():
                parameter.data = parameter.data.clone()

    @override
    def forget(self) -> None:
        """Keep the swapped-in weights for good: drop the trained ones."""
        self._trained = None

    # Sharding engines override which part of a parameter, or of an optimizer state like it, this rank holds.

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
        return next((o.state[parameter] for o in self._optimizers if parameter in o.state), {})

    def _states_of(self, parameter: nn.Parameter) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
        """Return the optimizer's state of a parameter, split into tensors and scalars."""
        state = self._optimizer_state(parameter)
        if "qmap1" in state:
            return dequantised(state), {"step": state["step"]}
        states: dict[str, LazyTensor] = {}
        scalars: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                states[name] = self._local(value)
            else:
                scalars[name] = value.detach().cpu() if isinstance(value, Tensor) else value
        return states, scalars


BLOCK = 256
"""Values that share a scale."""


class EightBitOptimizer(Protocol):
    """The part of bitsandbytes' ``Optimizer2State`` that is used here."""

    def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Create ``state[p]``."""


def is_eight_bit(optimizer: object) -> TypeGuard[EightBitOptimizer]:
    """Return whether an optimizer is from bitsandbytes, without importing bitsandbytes."""
    return hasattr(optimizer, "init_state")


def dequantise(codes: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """Return the float32 values of quantised ones, in their shape.

    Args:
        codes: One byte per value.
        scales: One per block.
        code: The value of each byte.
    """
    from bitsandbytes.functional import dequantize_blockwise

    values: Tensor = dequantize_blockwise(codes.reshape(-1), absmax=scales, code=code, blocksize=BLOCK)
    return values.reshape(codes.shape)


def quantise(values: Tensor, codes: Tensor, scales: Tensor, code: Tensor) -> None:
    """Fill codes and scales from float32 values; not bit-exact for values that were dequantised."""
    from bitsandbytes.functional import quantize_blockwise

    quantised, state = quantize_blockwise(values.reshape(-1), code=code, blocksize=BLOCK)
    codes.reshape(-1).copy_(quantised)
    scales.copy_(state.absmax)


def dequantised(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return functions that dequantise a parameter's states, one at a time."""
    return {kind: partial(dequantise, *_parts(state, kind)) for kind in ("state1", "state2") if kind in state}


def fill_quantised(state: dict[str, Any], name: str, saved: SavedParameter, read: Read) -> None:
    """Fill a parameter's states that ``init_state`` has made.

    Args:
        state: The optimizer's state of the parameter.
        name: The parameter's name.
        saved: The checkpoint's record of the parameter.
        read: Reads its saved states.
    """
    state["step"] = int(saved.scalars["step"])
    for kind in saved.states:
        if "qmap1" not in state:  # bitsandbytes keeps small parameters' states in float32
            read(kind, name, state[kind], 0, state[kind].numel())
            continue
        values = torch.empty_like(state[kind], dtype=torch.float32)
        read(kind, name, values, 0, values.numel())
        quantise(values, *_parts(state, kind))


def _parts(state: Mapping[str, Any], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and code of a state."""
    number = kind.removeprefix("state")
    return state[kind], state[f"absmax{number}"], state[f"qmap{number}"]
