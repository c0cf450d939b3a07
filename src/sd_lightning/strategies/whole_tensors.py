"""Flat ranges that ranks own: the states of engines that step them, and whole tensors gathered one at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.ranks import of_all_ranks, rank_and_world_size
from sd_lightning.state.shards import (
    OptimizerGroups,
    ParameterShard,
    SavedParameter,
    ShardedState,
    SwappableWeights,
    TrainingState,
    hyper_parameters,
    load_groups,
    optimizer_name,
    tensor_of,
)


def whole(shape: Sequence[int], dtype: torch.dtype, ranges: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Assemble a tensor from the flat ranges that each rank owns; a collective call.

    Args:
        shape: Shape of the whole tensor.
        dtype: Dtype of the whole tensor.
        ranges: First index and values of each range; together, all ranks' ranges cover every element once.

    Returns:
        The tensor in host memory on every rank, bit for bit.
    """
    carried = dtype if dtype.itemsize >= 4 else torch.float32  # backends can sum integers of 32 and 64 bits
    flat = torch.zeros(math.prod(shape), dtype=carried, device=_device())
    for begin, values in ranges:
        flat[begin : begin + values.numel()].copy_(values.detach().reshape(-1))
    if rank_and_world_size()[1] > 1:  # other ranks hold zeros: the integer sum is the owner's bits
        dist.all_reduce(flat.view(torch.int64 if carried.itemsize == 8 else torch.int32))
    return flat.view(*shape).to("cpu", dtype)


def whole_masters(
    shards: Sequence[ParameterShard], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Gather and yield the whole float32 master weights by name; a collective call.

    Args:
        shards: This rank's shards.
        shapes: Shapes of all trained parameters by name, in the same order on all ranks.
    """
    mine = _by_name(shards)
    for name, shape in shapes.items():
        yield name, whole(shape, torch.float32, ((shard.begin, tensor_of(shard.master)) for shard in mine[name]))


def torch_optimizer_state(state: TrainingState, number: int, groups: list[dict[str, Any]], *, keep: bool) -> Any:
    """Return an optimizer's state in the format of ``torch.optim.Optimizer.state_dict``, with whole tensors.

    A collective call that gathers one tensor at a time.

    Args:
        state: The training state of a sharding engine.
        number: Index of the optimizer.
        groups: ``param_groups`` of the user's own ``state_dict()``, which number the parameters.
        keep: Whether this rank wants the result; other ranks get an empty dictionary.
    """
    mine = _by_name(state.parameter_shards())
    known = of_all_ranks(  # each parameter's kinds of states, with shape and dtype, and its scalars
        {
            name: ({k: (shards[0].shape, tensor_of(s).dtype) for k, s in shards[0].states.items()}, shards[0].scalars)
            for name, shards in mine.items()
        }
    )
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(_names(state, number)):
        entry: dict[str, Any] = {}
        kinds, scalars = known[name]
        for kind, (shape, dtype) in kinds.items():
            tensor = whole(shape, dtype, ((shard.begin, tensor_of(shard.states[kind])) for shard in mine[name]))
            entry |= {kind: tensor} if keep else {}
        if keep and (entry or scalars):
            states[index] = dict(scalars) | entry
    return {"state": states, "param_groups": groups} if keep else {}


def load_torch_optimizer_states(state: TrainingState, saved: Sequence[Mapping[str, Any]]) -> None:
    """Load optimizer states that torch's optimizers or :func:`torch_optimizer_state` have saved, but no weights.

    Raises:
        UsageError: The optimizers' groups have other sizes than those saved.
    """
    ours = state.optimizer_groups()
    sizes, theirs = _sizes(ours), _sizes([each["param_groups"] for each in saved])
    if sizes != theirs:
        raise UsageError(
            f"ckpt_path: the optimizers' groups hold {sizes} parameters, those of the checkpoint {theirs}; resume with "
            "the same trained networks and groups, or load only its weights with module.load_state_dict"
        )
    shapes = {shard.name: shard.shape for shard in state.parameter_shards()}
    tensors: dict[tuple[str, str], Tensor] = {}
    parameters: dict[str, SavedParameter] = {}
    groups: list[list[dict[str, Any]]] = []
    for number, each in enumerate(saved):
        for index, name in enumerate(_names(state, number)):
            values = each["state"].get(index, {})
            states = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() > 0}
            tensors |= {(kind, name): tensor for kind, tensor in states.items()}
            scalars = {k: v for k, v in values.items() if k not in states}
            shape = next((tuple(tensor.shape) for tensor in states.values()), shapes.get(name, ()))
            parameters[name] = SavedParameter(shape, {k: tuple(v.shape) for k, v in states.items()}, scalars)
        groups.append(
            [
                hyper_parameters(group) | {"params": mine["params"]}
                for group, mine in zip(each["param_groups"], ours[number], strict=True)
            ]
        )

    def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
        if kind != "master":
            out.copy_(tensors[kind, name].reshape(-1)[begin:end].view_as(out))

    state.load(parameters, groups, read)


def _by_name(shards: Sequence[ParameterShard]) -> dict[str, list[ParameterShard]]:
    """Return the shards that this rank writes, by name of the parameter."""
    mine: dict[str, list[ParameterShard]] = defaultdict(list)
    for shard in shards:
        if shard.writes:
            mine[shard.name].append(shard)
    return mine


def _names(state: TrainingState, number: int) -> list[str]:
    return [name for group in state.optimizer_groups()[number] for name in group["params"]]


def _sizes(optimizers: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    return [[len(group["params"]) for group in groups] for groups in optimizers]


def _device() -> torch.device:
    """Return a device on which the process group can reduce."""
    if rank_and_world_size()[1] == 1 or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class FlatOptimizerState(ShardedState):
    """Training state of an engine whose optimizers' ``param_groups`` hold the hyper-parameters."""

    optimizers: Sequence[Any]
    """The engine's optimizers, whose ``param_groups`` are used in a step."""

    def _group_names(self) -> list[list[list[str]]]:
        """Return the names of the parameters by optimizer and group, in the optimizer's order."""
        raise NotImplementedError

    def _inner(self, optimizer: Any) -> Any:
        """Return the torch optimizer inside of an engine's; its class is the optimizer's name."""
        return optimizer

    @override
    def optimizer_groups(self) -> OptimizerGroups:
        return [
            [
                hyper_parameters(group) | {"params": names}
                for group, names in zip(optimizer.param_groups, each, strict=True)
            ]
            for optimizer, each in zip(self.optimizers, self._group_names(), strict=True)
        ]

    @override
    def optimizer_names(self) -> list[str]:
        return [optimizer_name(self._inner(optimizer)) for optimizer in self.optimizers]

    def _take_groups(self, saved: OptimizerGroups) -> None:
        """Load hyper-parameters from a checkpoint.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        load_groups(self.optimizers, self.optimizer_groups(), saved)


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

    @override
    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """Put other weights into the module; a collective call."""
        ours = {key: tensor for key, tensor in weights.items() if key in self._owned}
        trained = {
            (name, begin): self._flat(name)[begin : begin + tensor.numel()].clone()
            for (name, begin), tensor in ours.items()
        }
        self._fill(ours)
        return trained

    @override
    def _restore(self, trained: dict[tuple[str, int], Tensor]) -> None:
        """Put the trained weights back; a collective call."""
        self._fill(trained)

    @override
    def holds(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Return whether the module still holds these weights as :meth:`swap_in` wrote them; a collective call."""
        same = all(
            torch.equal(self._flat(name)[begin : begin + tensor.numel()], tensor.reshape(-1).to(self._flat(name)))
            for (name, begin), tensor in weights.items()
            if (name, begin) in self._owned
        )
        rank, world_size = rank_and_world_size()
        return bool(whole((world_size,), torch.float32, [(rank, torch.tensor([float(same)]))]).all())

    @override
    def unshare(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Do nothing: the module shares no memory with swapped-in weights."""

    @override
    def forget(self) -> None:
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
