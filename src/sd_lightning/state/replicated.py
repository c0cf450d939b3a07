"""Training state of engines that hold whole parameters on every rank; sharding engines override three methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.state.eight_bit import dequantised, fill_quantised, is_eight_bit
from sd_lightning.state.optimizer_change import optimizer_name
from sd_lightning.state.shards import (
    LazyTensor,
    OptimizerGroups,
    ParameterShard,
    Read,
    SavedParameter,
    check_same_groups,
    hyper_parameters,
)


class ReplicatedState:
    """Training state of one process, or of DDP.

    Args:
        parameters: Trained parameters by name.
        optimizers: The optimizers that step them.
        rank: Rank of this process; rank 0 writes checkpoints.

    Raises:
        UsageError: An 8-bit optimizer got weights that are not contiguous.
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
        for optimizer in self._optimizers:
            # bitsandbytes replaces other weights by contiguous copies, so all views of them would go stale.
            if is_eight_bit(optimizer) and not all(p.is_contiguous() for p in self._parameters.values()):
                raise UsageError(
                    f"{type(optimizer).__name__} works on contiguous weights only, and some are in the NHWC layout; "
                    "set speed.channels_last=false or choose optimizer=adamw"
                )

    def parameter_shards(self) -> list[ParameterShard]:
        """Return one shard per parameter: this rank's part of it."""
        shards = []
        for name, parameter in self._parameters.items():
            states, scalars = self._states_of(parameter)
            begin, end = self._range(parameter)
            shape, writes = tuple(parameter.shape), self._writes(parameter)
            shards.append(
                ParameterShard(name, shape, begin, end, self._local(parameter), states, scalars, writes=writes)
            )
        return shards

    def optimizer_groups(self) -> OptimizerGroups:
        """Return hyper-parameters and parameter names of every group."""
        return [
            [
                hyper_parameters(group) | {"params": [self._names[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def optimizer_names(self) -> list[str]:
        """Return the name of each optimizer's class."""
        return [optimizer_name(optimizer) for optimizer in self._optimizers]

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
        check_same_groups(self.optimizer_groups(), groups)
        for optimizer, saved_groups in zip(self._optimizers, groups, strict=True):
            for gindex, (group, values) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
                group.update(hyper_parameters(values))
                for pindex, parameter in enumerate(group["params"]):
                    name = self._names[parameter]
                    if not saved[name].states and not saved[name].scalars:
                        continue  # saved before the first step, or a parameter that never had a gradient
                    if is_eight_bit(optimizer):
                        optimizer.init_state(group, parameter, gindex, pindex)
                        fill_quantised(self._optimizer_state(parameter), name, saved[name], read)
                    else:
                        optimizer.state[parameter] = self._load_states(group, parameter, name, saved[name], read)

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Point the parameters at other weights, without a copy if dtype and device agree."""
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
        """Return whether the parameters still equal these weights, as after :meth:`swap_in`."""
        return all(
            torch.equal(parameter.detach(), weights[name, 0].to(parameter.device, parameter.dtype))
            for name, parameter in self._parameters.items()
        )

    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Copy the parameters that :meth:`swap_in` has pointed at these weights to separate memory."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() == weights[name, 0].data_ptr():
                parameter.data = parameter.data.clone()

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
