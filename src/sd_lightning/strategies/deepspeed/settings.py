"""Our arguments merged with a user's DeepSpeed configuration, checked, and the memory that ZeRO takes with them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_only
from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.data.contract import global_batch_size
from sd_lightning.models.checkpointing import SavedActivations, kept_by
from sd_lightning.planner.footprint import (
    Footprint,
    Holding,
    Traffic,
    When,
    Workload,
    page_locked_bytes,
    rounding,
)
from sd_lightning.state.replicated import is_eight_bit
from sd_lightning.strategies.deepspeed.config import (
    ARGUMENTS,
    Config,
    UserConfig,
    check,
    get,
    precision_section,
    put,
)
from sd_lightning.strategies.deepspeed.machine import Extension, check_buildable, check_swap_path
from sd_lightning.strategies.deepspeed.weights import checkpointed_blocks
from sd_lightning.strategies.networks import (
    configured_optimizers,
    is_adam,
    refuse_sparse_gradients,
    unsupported_option,
    user_hooks,
)

log = logging.getLogger(__name__)
_warn = rank_zero_only(log.warning)

Stage = Literal[1, 2, 3]
_CHECKPOINTING = ARGUMENTS["cpu_checkpointing"]
_DEFAULTS: Config = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization.stage": 2,
    "zero_optimization.reduce_bucket_size": 200_000_000,
    "zero_optimization.allgather_bucket_size": 200_000_000,
    "zero_optimization.overlap_comm": True,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
}
_NVME_SUB_GROUP_SIZE = 100_000_000
"""Elements swapped at once; host memory holds four buffers of this many float32 values."""


class DeepSpeedSettings:
    """Our arguments merged with DeepSpeed's own configuration.

    Args:
        config: DeepSpeed's configuration: a JSON file or a dictionary.
        arguments: Ours by name, of which those in :data:`ARGUMENTS` count; None if not given.

    Raises:
        UsageError: The configuration is wrong or contradicts an argument, a tool to compile an extension is missing, or
            the swap folder is unusable.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> None:
        self.user = UserConfig.read({}, who="DeepSpeedStrategy") if config is None else UserConfig.read(config)
        self.who = self.user.who
        for warning in self.user.warnings:
            _warn("%s", warning)
        ours = {name: value for name, value in arguments.items() if name in ARGUMENTS and value is not None}
        self.user.settle({"strategy": ours})
        self.config = copy.deepcopy(self.user.values)
        for name, value in ours.items():
            put(self.config, ARGUMENTS[name], value)
        for path, value in _DEFAULTS.items():
            put(self.config, path, self.get(path, value))
        check(self.config, self.who)
        self._has_warned = False
        self._check_offload()

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of the configuration."""
        return get(self.config, path, default)

    @property
    def stage(self) -> int:
        return int(self.get("zero_optimization.stage"))

    @property
    def offload_device(self) -> str:
        """Place of optimizer states: ``none`` (beside the gradients), ``cpu`` or ``nvme``."""
        return str(self.get("zero_optimization.offload_optimizer.device", "none"))

    @property
    def nvme_path(self) -> str | None:
        return self.get("zero_optimization.offload_optimizer.nvme_path")

    @property
    def uses_cpu_adam(self) -> bool:
        return self.offload_device != "none" and bool(self.get("zero_force_ds_cpu_optimizer", True))

    @property
    def extensions(self) -> list[Extension]:
        """DeepSpeed's extensions to compile before the first step."""
        adam: list[Extension] = ["cpu_adam"] if self.uses_cpu_adam else []
        return [*adam, "async_io"] if self.offload_device == "nvme" else adam

    def _check_offload(self) -> None:
        for name, place in (("offload_parameters", "cpu"), ("offload_optimizer", "nvme")):
            if self.stage != 3 and self.get(ARGUMENTS[name]) == place:
                raise UsageError(
                    f"{self.who}: {name}={place} with stage={self.stage}; only stage 3 can: set stage=3 "
                    "(strategy=deepspeed_zero3_offload, deepspeed_zero3_nvme)"
                )
        if self.offload_device == "nvme":
            check_swap_path(self.nvme_path)
        for extension in self.extensions:
            check_buildable(extension)

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compare the trainer and the module with the configuration.

        Raises:
            UsageError: They do not fit the configuration.
        """
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise UsageError("trainer.gradient_clip_algorithm=value: DeepSpeed clips by norm only; write norm")
        if (module, "configure_gradient_clipping") in user_hooks(trainer, module):
            raise UsageError(
                f"{type(module).__name__}.configure_gradient_clipping has no effect: DeepSpeed clips itself; remove "
                "it and set trainer.gradient_clip_val, or take strategy=fsdp, gemini or ddp"
            )
        refuse_sparse_gradients(module, self.who)
        if self.stage == 1 and self.get("data_types.grad_accum_dtype") in ("fp32", "float32"):
            raise UsageError(f"{self.who}: data_types.grad_accum_dtype=fp32 works at stages 2 and 3 only; remove it")
        optimizers = configured_optimizers(module)
        for optimizer in optimizers:
            self._check_optimizer(optimizer)
        self.user.settle(_run_of(trainer, optimizers), num_processes=trainer.world_size)
        if self.get(_CHECKPOINTING) and not checkpointed_blocks(module):
            self._refuse_unused_checkpointing()
        if self.stage == 3 and SavedActivations.PRODUCTS in kept_by(module.modules()):
            raise UsageError(
                f"{self.who}: at stage 3 DeepSpeed's linear layers change the products that a block keeps, and "
                'gradients would be wrong; let blocks keep "convolutions" or "inputs"'
            )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if is_eight_bit(optimizer):
            raise UsageError(
                f"{name} cannot step DeepSpeed's shards, flat ranges of many weights: its states are quantised in "
                "blocks; choose optimizer=adamw, or strategy=ddp"
            )
        if self.uses_cpu_adam:
            remedy = "write strategy.cpu_adam=false to step with torch's optimizer"
            if not is_adam(optimizer):
                raise UsageError(f"strategy.cpu_adam=true replaces torch's Adam or AdamW, not {name}; {remedy}")
            option = unsupported_option(optimizer)
            if option is not None:
                raise UsageError(f"strategy.cpu_adam=true: DeepSpeed's CPU Adam has no {option}; {remedy}")

    def _refuse_unused_checkpointing(self) -> None:
        if get(self.user.values, _CHECKPOINTING) is None:
            raise UsageError(
                "strategy.cpu_checkpointing=true keeps checkpointed activations in host memory, and no block is "
                "checkpointed; write speed.gradient_checkpointing=true too"
            )
        if not self._has_warned:  # this runs before processes start, and again afterwards
            _warn("%s: %s has no effect without speed.gradient_checkpointing=true", self.who, _CHECKPOINTING)
        self._has_warned = True

    def engine_config(self, trainer: Any, *, swap_folder: Path | None) -> Config:
        """Return the configuration for ``deepspeed.initialize``: only the engine's sections, with a run's sizes.

        Args:
            trainer: Its sizes and precision are filled in.
            swap_folder: Folder of this process's swap files; None without NVMe.
        """
        ours = ("optimizer", "scheduler", "train_batch_size", "fp16", "bf16")
        engine = {key: copy.deepcopy(value) for key, value in self.config.items() if key not in ours}
        batch_size = global_batch_size(trainer)
        micro = self.get("train_micro_batch_size_per_gpu", 1)
        if batch_size is not None:
            # Only the engine's own timers and logs read it, so ranks may have a sample more.
            micro = max(1, batch_size // (trainer.world_size * trainer.accumulate_grad_batches))
        clip = trainer.gradient_clip_val
        engine |= {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "gradient_clipping": float(self.get("gradient_clipping", 0.0) if clip is None else clip),
            # The optimizer is the module's, or CPU Adam by our option; the engine must not choose another.
            "zero_force_ds_cpu_optimizer": False,
        }
        section = precision_section(str(trainer.precision))
        if section is not None:
            engine[section] = {**self.get(section, {}), "enabled": True}
        if swap_folder is not None:
            put(engine, "zero_optimization.offload_optimizer.nvme_path", str(swap_folder))
            engine["zero_optimization"].setdefault("sub_group_size", _NVME_SUB_GROUP_SIZE)
        return engine


def _run_of(trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run in Python by the names that the programs give them."""
    run: dict[str, dict[str, Any]] = {
        "trainer": {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
        },
        "data": {"batch_size": global_batch_size(trainer)},
    }
    for optimizer in optimizers:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.defaults.items()}
        run["optimizer"] = {"_target_": f"torch.optim.{type(optimizer).__name__}", **values}
    return run


_FLOAT_BYTES = 4
_SWAP_BUFFERS = 4
"""Buffers of a sub-group's size that NVMe swapping keeps in host memory."""


def footprint_of(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    """Count what the settings' stage keeps."""
    if settings.stage != 3:
        return _of_zero12(settings, workload)
    return replace(
        _of_zero3(settings, workload),
        menu=tuple(each for each in SavedActivations if each is not SavedActivations.PRODUCTS),
    )


def _of_zero12(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    size = workload.engine_dtype.itemsize
    numel = sum(weight.numel for weight in workload.trained)
    part = -(-numel // workload.world_size)
    buffers = 2 if settings.get("zero_optimization.overlap_comm", True) else 1
    bucket = buffers * size * int(settings.get("zero_optimization.reduce_bucket_size"))
    device = [
        Holding("weights", size * sum(weight.numel for weight in workload.weights)),
        Holding("buckets", bucket, When.BACKWARD),
    ]
    states = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    if settings.stage == 1:  # reduces when the backward pass has ended
        device.append(Holding("gradients", size * numel, When.UNTIL_UPDATE))
    late = size * numel * (settings.stage == 1)
    traffic = Traffic(
        reduced=size * numel - late,
        exposed=late + size * numel,
        collectives=2 + numel // int(settings.get("zero_optimization.reduce_bucket_size")),
        copied=3 * size * numel + 2 * _FLOAT_BYTES * part,  # in a profile of DeepSpeed 0.19
        hooks=len(workload.trained),  # ``create_gradient_handling_hooks``
        stepped=part,
    )
    if settings.offload_device == "none":
        narrow = size * part if size < _FLOAT_BYTES else 0
        reduced = When.UPDATE if settings.stage == 1 else When.AS_READY
        device += [
            *states,
            Holding("gradients", size * part, reduced),
            Holding("float32 gradients", _FLOAT_BYTES * part + narrow, When.UPDATE),
        ]
        return Footprint(workload.engine_dtype, None, device, traffic=traffic, averaged=part)
    largest = size * max(weight.numel for weight in workload.trained)
    device.append(Holding("buckets", largest))
    accumulated = [size * weight.numel for weight in workload.trained] if workload.accumulates else []
    host = [
        *states,
        Holding("gradients", _FLOAT_BYTES * part + sum(accumulated)),
        Holding("weights", size * part),
        Holding("buckets", largest),
    ]
    if _page_locks(settings, "optimizer"):
        host.append(rounding([_FLOAT_BYTES * part, _FLOAT_BYTES * part, size * part, largest, *accumulated]))
    traffic = replace(traffic, to_host=size * part, refreshed=size * part, stepped=0, stepped_on_host=part)
    return Footprint(workload.engine_dtype, None, device, host, traffic=traffic, averaged_on_host=part)


def _page_locks(settings: DeepSpeedSettings, what: str) -> bool:
    """Return whether what is offloaded of the "optimizer" or "param" is page-locked, as it is by default."""
    return bool(settings.get(f"zero_optimization.offload_{what}.pin_memory", True))


def _of_zero3(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    def key(name: str) -> int:
        return int(settings.get(f"zero_optimization.{name}"))

    size, world_size = workload.engine_dtype.itemsize, workload.world_size
    threshold = key("stage3_param_persistence_threshold")
    persistent = sum(weight.numel for weight in workload.weights if weight.numel <= threshold)
    whole = sum(weight.numel for weight in workload.weights)
    shard = sum(-(-weight.numel // world_size) for weight in workload.weights)
    part = sum(-(-weight.numel // world_size) for weight in workload.trained)
    live = min(int(settings.get("zero_optimization.stage3_max_live_parameters", 1e9)), whole)
    ahead = min(int(settings.get("zero_optimization.stage3_prefetch_bucket_size", 5e7)), whole)
    device = [
        Holding("gathered weights", size * persistent),
        Holding("gathered weights", size * max(live - persistent, 0), When.UNTIL_READY),
        Holding("gathered weights", size * ahead, When.FORWARD),
        Holding("buckets", size * key("reduce_bucket_size")),
    ]
    weights = Holding("weights", size * shard)
    states = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    gradients = Holding("gradients", size * part)
    stepped = min(int(settings.get("zero_optimization.sub_group_size", 1e9)), part)
    host: list[Holding] = []
    disk = 0
    if settings.offload_device == "none":
        narrow = size * stepped if size < _FLOAT_BYTES else 0
        device += [*states, gradients, Holding("float32 gradients", _FLOAT_BYTES * stepped + narrow, When.UPDATE)]
    elif settings.offload_device == "cpu":
        host += [*states, gradients, Holding("float32 gradients", _FLOAT_BYTES * part)]
        if _page_locks(settings, "optimizer"):
            whole_groups, rest = divmod(part, max(stepped, 1))
            groups = [_FLOAT_BYTES * stepped] * whole_groups + [_FLOAT_BYTES * rest]
            host.append(rounding([size * part, *groups]))
    else:
        disk = sum(state.nbytes for state in states) + _FLOAT_BYTES * part
        swapped = min(int(settings.get("zero_optimization.sub_group_size", 1e8)), part)
        # libaio's buffers are its own (``new_cpu_locked_tensor``), and not rounded.
        host += [gradients, Holding("swap buffers", _SWAP_BUFFERS * _FLOAT_BYTES * swapped)]
        host += [rounding([size * part])] * _page_locks(settings, "optimizer")
    is_offloaded = settings.get("zero_optimization.offload_param.device", "none") != "none"
    (host if is_offloaded else device).append(weights)
    if is_offloaded:
        host.append(_page_locked_weights(settings, workload))
    on_device = settings.offload_device == "none"
    # Modules are gathered one at a time; weights below the threshold once per step, one at a time.
    modules = {weight.name.rpartition(".")[0] for weight in workload.weights if weight.numel > threshold}
    passes = 1 if live == whole else 2  # released after the forward pass if they are too many
    traffic = Traffic(
        gathered=passes * size * whole,
        reduced=size * sum(weight.numel for weight in workload.trained),
        collectives=passes * len(modules) + sum(weight.numel <= threshold for weight in workload.weights),
        copied=3 * size * (passes * whole + sum(weight.numel for weight in workload.trained)),  # as above
        hooks=10 * len({weight.name.rpartition(".")[0] for weight in workload.weights}) + 2 * len(workload.trained),
        to_device=passes * size * shard * is_offloaded,
        to_host=size * part * (not on_device),
        stepped=part * on_device,
        stepped_on_host=part * (not on_device),
    )
    return Footprint(
        workload.engine_dtype,
        None,
        device,
        host,
        disk,
        traffic=traffic,
        averaged=part if on_device else 0,
        averaged_on_host=0 if on_device else part,
    )


def _page_locked_weights(settings: DeepSpeedSettings, workload: Workload) -> Holding:
    """Return what ZeRO-3's offloaded weights take beside what they hold.

    ``Init`` page-locks each partition (``partition_parameters.py``). The engine then copies those of trained weights
    into one page-locked block (``_create_param_groups_fp16_flat_cpu_memory``), and torch keeps what that frees.
    """
    size, world_size = workload.engine_dtype.itemsize, workload.world_size
    shards = [(-(-weight.numel // world_size) * size, weight.is_trained) for weight in workload.weights]
    flat = rounding([sum(nbytes for nbytes, is_trained in shards if is_trained)])
    if not _page_locks(settings, "param"):
        return flat
    frozen = rounding(nbytes for nbytes, is_trained in shards if not is_trained)
    freed = sum(page_locked_bytes(nbytes) for nbytes, is_trained in shards if is_trained)
    return replace(flat, nbytes=flat.nbytes + frozen.nbytes + freed)
