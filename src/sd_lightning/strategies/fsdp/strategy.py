"""FSDP2: every trained network sharded by ``fully_shard``, block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.planner.footprint import Footprint, Holding, Traffic, Weight, When, Workload, rounding
from sd_lightning.state.host import step_on_host
from sd_lightning.state.replicated import is_eight_bit
from sd_lightning.strategies.base import EngineStrategy, RunSettings
from sd_lightning.strategies.fsdp.tensors import DTensorState, WholeWhereNeeded, local_rows, remedy_of
from sd_lightning.strategies.networks import (
    blocks_of,
    place_rest,
    refuse_sparse_gradients,
    sharded_networks,
    take_deferred,
    unfrozen_later,
)
from sd_lightning.strategies.processes.group import timeout_of
from sd_lightning.strategies.restoring import RestoringStrategy
from sd_lightning.strategies.sharding import CPU_AND_CUDA

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of FSDP2; ``FSDPStrategy`` explains them.

    Raises:
        UsageError: A number is too small.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: int = 1
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    forward_prefetch: int = 0

    def __post_init__(self) -> None:
        check_at_least("FSDPStrategy", 1, replicas=self.replicas)
        check_at_least("FSDPStrategy", 0, forward_prefetch=self.forward_prefetch)

    def dtype(self, name: Literal["param_dtype", "reduce_dtype"]) -> torch.dtype | None:
        """Return one of the two dtypes as torch's."""
        value: str | None = getattr(self, name)
        return None if value is None else getattr(torch, value)


class FSDPStrategy(RestoringStrategy, ModelParallelStrategy):
    """Strategy that shards weights, gradients and optimizer states over all processes (PyTorch FSDP2).

    Usage: ``Trainer(strategy=FSDPStrategy(), devices=2)`` or ``Trainer(strategy="sd_fsdp")``. Gradients are reduced
    after every micro-batch: keeping them whole would undo the sharding.

    Args:
        reshard_after_forward: Free gathered weights after a block's forward pass. False keeps them until backward:
            more memory, less communication (SHARD_GRAD_OP, ZeRO-2).
        cpu_offload: Keep weights, gradients and optimizer states in host memory.
        replicas: Copies of the sharded model (HSDP): weights are sharded over ``world_size / replicas`` processes.
        param_dtype: Gather and compute in this dtype; the weights' own dtype if not given.
        reduce_dtype: Reduce gradients in this dtype; ``param_dtype`` if not given.
        forward_prefetch: Number of blocks gathered ahead of the one that computes; 0 keeps FSDP2's default.
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.
    """

    steps_flat_ranges = False
    loads_weights = True  # each rank reads its rows
    keeps_layout = False

    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: int = 1,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        forward_prefetch: int = 0,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout_of("FSDPStrategy", timeout_seconds))
        self.config = FSDPConfig(
            reshard_after_forward, cpu_offload, replicas, param_dtype, reduce_dtype, forward_prefetch
        )

    @override
    @classmethod
    def whole_shape_of(cls, parameter: Tensor) -> tuple[int, ...] | None:
        return tuple(parameter.shape) if isinstance(parameter, DTensor) else None

    @override
    def check_settings(self, settings: RunSettings) -> None:
        super().check_settings(settings)
        if settings.precision.startswith("16"):
            raise UsageError(
                f"trainer.precision={settings.precision}: FSDP2 does not scale losses, and float16 underflows without; "
                "write trainer.precision=bf16-mixed"
            )

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        networks = sharded_networks(module, type(self).__name__)
        _refuse_shared_weights(networks)
        _refuse_other_formats(networks)
        refuse_sparse_gradients(module, type(self).__name__)
        super().check(trainer, module)

    @override
    def check_optimizer(self, optimizer: Optimizer) -> None:
        super().check_optimizer(optimizer)
        if is_eight_bit(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} cannot step the shards of FSDP2: its kernels do not know distributed "
                "tensors; choose optimizer=adamw, or strategy=gemini or ddp"
            )

    @override
    def footprint(self, workload: Workload) -> Footprint:
        return footprint_of(self.config, workload)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self.set_world_ranks()
        self._process_group_backend = CPU_AND_CUDA if self.root_device.type == "cuda" else "gloo"
        assert self.cluster_environment is not None
        with self.joining():
            _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=self._timeout)
        replicas, parts = self.config.replicas, self.world_size // self.config.replicas
        if parts * replicas != self.world_size:
            raise UsageError(
                f"FSDPStrategy got replicas={replicas} for {self.world_size} processes; expected a divisor"
            )
        shape = (replicas, parts) if replicas > 1 else (parts,)
        names = ("replicate", "shard")[-len(shape) :]
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    @override
    def _set_up_engine(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.check(trainer, module)
        later = unfrozen_later(trainer, module) if trainer.state.fn == TrainerFn.FITTING else ()
        self.attach(trainer)
        networks = sharded_networks(module, type(self).__name__, later)
        _refuse_shared_weights(networks)
        blocks = blocks_of(module, networks)
        for name, network in networks.items():
            if not isinstance(network, FSDPModule):  # else an earlier run could not restore it and left it sharded
                shard_network(network, self.device_mesh, self.config, blocks)
            weights = take_deferred(module, name)
            if weights is not None:
                weights.fill_(network, torch.device("cpu") if self.config.cpu_offload else self.root_device, local_rows)
        self.record_hooks()
        self.model = self.precision_plugin.convert_module(module)
        if self.config.cpu_offload:
            place_rest(module, networks, self.root_device, None)
        else:
            self.model_to_device()
        self._wrap_hooks(trainer, partial(self._in_hook, dict(module.named_parameters())))
        self.barrier()

    @contextmanager
    def _in_hook(self, parameters: Mapping[str, nn.Parameter], owner: Any, name: str) -> Iterator[None]:
        """Let a hook use and write weights and gradients, and freeze or unfreeze what is sharded.

        Raises:
            UsageError: The hook unfreezes a network that is not sharded.
        """
        before = [parameter.requires_grad for parameter in parameters.values()]
        with WholeWhereNeeded():
            yield
        if before == [parameter.requires_grad for parameter in parameters.values()]:
            return
        self._state = None  # it knows what was trained before
        for (key, parameter), was_trained in zip(parameters.items(), before, strict=True):
            if parameter.requires_grad and not was_trained and not isinstance(parameter, DTensor):
                raise UsageError(
                    f"{type(owner).__name__}.{name} unfreezes {key}, and FSDPStrategy has not sharded that network: no "
                    "optimizer had its parameters when the run began; give them to the optimizer, or take strategy=ddp"
                )

    @override
    def _remedy_of(self, error: BaseException) -> str | None:
        return remedy_of(error)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if not self.config.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)
            return
        for optimizer in self.optimizers:
            step_on_host(optimizer)

    @override
    def skip_update_if(self, optimizer: Optimizer, is_bad: Tensor) -> bool:
        if self.config.cpu_offload:  # the host steps, so it must know
            return False
        return EngineStrategy.skip_update_if(self, optimizer, is_bad)

    @override
    def _make_state(self) -> DTensorState:
        return DTensorState(self._trained_parameters(), self.optimizers, modules=self._sharded_modules())

    def _sharded_modules(self) -> list[FSDPModule]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]

    @override
    def _adopts(self, other: RestoringStrategy) -> bool:
        settings = attrgetter("cpu_offload", "replicas", "param_dtype", "reduce_dtype")
        return isinstance(other, FSDPStrategy) and settings(self.config) == settings(other.config)

    @override
    def _has_engine(self) -> bool:
        return bool(self._sharded_modules())

    @override
    def _end_engine(self) -> None:
        for part in self._module.modules():
            _module_state_mapping.pop(part, None)

    @override
    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._sharded_modules():
            part.reshard()  # where a pass left weights gathered, parameters are not shards
        for name, parameter in list(self._module.named_parameters()):
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def shard_network(network: nn.Module, mesh: DeviceMesh, config: FSDPConfig, blocks: Iterable[nn.Module]) -> None:
    """Apply ``fully_shard`` to the network's blocks, and then to its root, which takes the remaining parameters."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(config.dtype("param_dtype"), config.dtype("reduce_dtype")),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if config.cpu_offload
        else OffloadPolicy(),
    }
    inside = set(network.modules()) - {network}
    ours = [block for block in blocks if block in inside and not _shares_weights(block, network)]
    sharded = [fully_shard(block, **settings) for block in ours]
    fully_shard(network, **settings)
    if config.forward_prefetch:
        for i, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + config.forward_prefetch])


def _shares_weights(block: nn.Module, network: nn.Module) -> bool:
    """Return whether another part of the network shares a parameter with the block; the root then gathers it."""
    parts, parameters = set(block.modules()), {id(parameter) for parameter in block.parameters()}
    others = (part for part in network.modules() if part not in parts)
    return any(id(parameter) in parameters for part in others for parameter in part._parameters.values())


def _refuse_other_formats(networks: Mapping[str, nn.Module]) -> None:
    """Refuse weights that do not lie row by row, before torch does with a ``NotImplementedError``."""
    for name, network in networks.items():
        for parameter_name, parameter in network.named_parameters():
            is_elsewhere = isinstance(parameter, DTensor) or 0 in parameter.stride()  # in the parts of another engine
            if not is_elsewhere and not parameter.is_contiguous():
                raise UsageError(
                    f"FSDPStrategy got {name}.{parameter_name}, whose values do not lie row by row, as in the "
                    "channels_last format, and FSDP2 shards rows; leave it out (speed.channels_last=false), or choose "
                    "strategy=ddp"
                )


def _refuse_shared_weights(networks: Mapping[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    for name, network in networks.items():
        for key, parameter in network.named_parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise UsageError(
                    f"FSDPStrategy got {name}.{key}, which {owners[id(parameter)]} has, too, and FSDP2 cannot gather "
                    "one weight for two networks; put both into one nn.Module that is called, or take strategy=gemini"
                )


def footprint_of(config: FSDPConfig, workload: Workload) -> Footprint:
    """Count shards of rows, the blocks that are gathered, and gradients on their way.

    An all-gather fills a flat buffer, from which the block's weights are copied; in the forward pass the buffer is kept
    until those of the next block are copied (``FSDPParamGroup.wait_for_unshard`` of torch 2.13). A reduce-scatter reads
    another flat buffer. Offloaded weights and gradients are page-locked one by one (``FSDPParam``, ``foreach_reduce``),
    states are not.
    """
    own = workload.lightning_dtype
    gathered = config.dtype("param_dtype") or own
    reduced = config.dtype("reduce_dtype") or gathered
    parts = workload.world_size // config.replicas
    sizes = [weight.rows_of(parts) for weight in workload.trained]
    shards = own.itemsize * sum(weight.rows_of(parts) for weight in workload.weights)
    gradients = own.itemsize * sum(sizes)
    held = [
        Holding("weights", shards),
        Holding("optimizer states", workload.states(sizes, own)),
        Holding("swapped weights", gradients, When.SWAPPED),
    ]
    if workload.accumulates:
        held.append(Holding("gradients", gradients))
    else:
        held += [Holding("gradients", gradients, When.FORWARD), Holding("gradients", gradients, When.AS_READY)]
    if config.cpu_offload:
        page_locked = [weight.rows_of(parts) for weight in workload.weights] + sizes
        held.append(rounding(own.itemsize * numel for numel in page_locked))
    blocks: dict[str, list[Weight]] = defaultdict(list)
    for weight in workload.weights:
        blocks[weight.block].append(weight)
    size = {name: gathered.itemsize * sum(w.numel for w in weights) for name, weights in blocks.items()}
    trained = {name: sum(w.numel for w in weights if w.is_trained) for name, weights in blocks.items()}
    sent = {name: reduced.itemsize * numel for name, numel in trained.items()}
    names = [name for name in size if name]
    kept = [Holding("gathered weights", size.get("", 0), When.COMPUTE)]
    before = {name: size[last] for name, last in zip(names[1:], names)}
    own_block = dict.fromkeys(names, 0)
    if config.reshard_after_forward:
        own_block = {name: size[name] for name in names}
    else:
        kept.append(Holding("gathered weights", sum(size[name] for name in names), When.UNTIL_READY))
    in_forward = {name: own_block[name] + size[name] + before.get(name, 0) for name in names}
    # The block before it is gathered ahead.
    in_backward = {
        name: own_block[name] + before.get(name, 0) + gathered.itemsize * trained[name] + sent[name] for name in names
    }
    numel = sum(sizes)
    passes = 2 if config.reshard_after_forward else 1
    traffic = Traffic(
        gathered=passes * sum(size.values()),
        reduced=sum(sent.values()),
        collectives=(passes + 1) * len(size),
        hooks=2 * passes * len(workload.weights),
        copied=(passes * sum(size.values()) + sum(sent.values())) * (parts > 1),
        to_device=passes * shards if config.cpu_offload else 0,
        to_host=gradients if config.cpu_offload else 0,
        stepped=0 if config.cpu_offload else numel,
        stepped_on_host=numel if config.cpu_offload else 0,
    )
    return Footprint(
        dtype=gathered,
        autocast=workload.half if workload.is_mixed else None,
        device=kept if config.cpu_offload else [*held, *kept],
        host=held if config.cpu_offload else [],
        in_forward=in_forward,
        in_backward=in_backward,
        traffic=traffic,
        averaged=0 if config.cpu_offload else numel,
        averaged_on_host=numel if config.cpu_offload else 0,
        master_dtype=own,
    )
