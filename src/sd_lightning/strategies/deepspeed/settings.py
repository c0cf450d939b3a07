"""Our arguments merged with a user's DeepSpeed configuration, and checked before processes start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_only
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.data.contract import global_batch_size
from sd_lightning.models.checkpointing import Kept, kept_by
from sd_lightning.strategies.deepspeed import precedence
from sd_lightning.strategies.deepspeed.builds import Extension, check_buildable, import_deepspeed
from sd_lightning.strategies.deepspeed.config import load, name_of
from sd_lightning.strategies.deepspeed.host_checkpointing import checkpointed_blocks
from sd_lightning.strategies.deepspeed.nested import Config, explicit, put, with_defaults
from sd_lightning.strategies.deepspeed.nvme import check_swap_path
from sd_lightning.strategies.deepspeed.optimizer import check_cpu_adam, check_elementwise
from sd_lightning.strategies.networks import configured_optimizers, refuse_sparse_gradients, user_hooks

log = logging.getLogger(__name__)
_warn = rank_zero_only(log.warning)

Stage = Literal[1, 2, 3]
_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
_DEFAULTS: Config = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_param_persistence_threshold": 100_000,
    },
}
_NVME_SUB_GROUP_SIZE = 100_000_000
"""Elements swapped at once; host memory holds four buffers of this many float32 values."""


@dataclass(frozen=True)
class Buckets:
    """Sizes that trade memory for fewer, larger messages; names as in DeepSpeed's configuration."""

    reduce_bucket_size: int | None = None
    """Elements reduced at once; 200 million if not given."""
    allgather_bucket_size: int | None = None
    """Elements gathered at once (stages 1 and 2); 200 million if not given."""
    overlap_comm: bool | None = None
    """Reduce gradients during backward; true if not given."""
    stage3_param_persistence_threshold: int | None = None
    """Parameters with fewer elements stay whole on every rank (stage 3); 100 000 if not given."""


@dataclass(frozen=True)
class Offload:
    """What is offloaded from the device, and where to."""

    optimizer: Literal["none", "cpu", "nvme"] | None = None
    """Optimizer states and float32 weights: to host memory, or to a disk (stage 3)."""
    parameters: Literal["none", "cpu"] | None = None
    """Weights that are not in use at the moment (stage 3)."""
    nvme_path: str | None = None
    """Folder on a fast local disk for ``optimizer="nvme"``."""
    cpu_adam: bool | None = None
    """Step offloaded states with DeepSpeed's CPU Adam (compiled once per machine) instead of torch's Adam or AdamW,
    with the same hyper-parameters; true if not given. False keeps the module's optimizer."""


class DeepSpeedSettings:
    """Our arguments merged with DeepSpeed's own configuration.

    Args:
        config: DeepSpeed's configuration: a JSON file or a dictionary.
        ours: Our arguments, from :func:`as_config`.

    Raises:
        UsageError: The configuration is wrong or contradicts an argument, a tool to compile an extension is missing, or
            the swap folder is unusable.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | None, ours: Config) -> None:
        self.who = "DeepSpeedStrategy" if config is None else name_of(config)
        import_deepspeed(self.who)
        given, warnings = load({} if config is None else config)
        for warning in warnings:
            _warn("%s", warning)
        load(ours)
        self.config = with_defaults(precedence.merge(ours, given, self.who), _DEFAULTS)
        self._has_warned = False
        self._has_file_for_checkpointing = explicit(given, _CHECKPOINTING) is not None
        self._check_offload()

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of the configuration."""
        return explicit(self.config, path, default)

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
            if self.stage != 3 and self.get(precedence.SAME[f"strategy.{name}"]) == place:
                raise UsageError(
                    f"{self.who}: {name}={place} with stage={self.stage}; only stage 3 can: set stage=3 "
                    "(strategy=deepspeed_zero3_offload, deepspeed_zero3_nvme)"
                )
        if self.offload_device == "nvme":
            check_swap_path(self.nvme_path)
        if "cpu_adam" in self.extensions:
            instead = "strategy.cpu_adam=false to step with torch's optimizer"
            check_buildable("cpu_adam", "strategy.cpu_adam=true", instead=instead)
        if "async_io" in self.extensions:
            check_buildable("async_io", "strategy.offload_optimizer=nvme", instead="strategy.offload_optimizer=cpu")

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compare the trainer and the module with the configuration.

        Raises:
            UsageError: They do not fit the configuration.
        """
        same = (
            ("gradient_accumulation_steps", "trainer.accumulate_grad_batches", trainer.accumulate_grad_batches),
            ("gradient_clipping", "trainer.gradient_clip_val", trainer.gradient_clip_val),
            ("train_batch_size", "data.batch_size", global_batch_size(trainer)),
        )
        for key, name, value in same:
            asked = self.get(key)
            if asked is not None and value is not None and asked != value:
                raise UsageError(
                    f'{self.who}: {key}={asked} contradicts {name}={value}; make them agree, or write "{key}": "auto"'
                )
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
        for optimizer in configured_optimizers(module):
            check_elementwise(optimizer)
            if self.uses_cpu_adam:
                check_cpu_adam(optimizer)
            precedence.check_optimizer(self.config, optimizer, self.who)
        self._check_checkpointing(module)
        if self.stage == 3 and Kept.PRODUCTS in kept_by(module.modules()):
            raise UsageError(
                f"{self.who}: at stage 3 DeepSpeed's linear layers change the products that a block keeps, and "
                'gradients would be wrong; let blocks keep "convolutions" or "inputs"'
            )

    def _check_checkpointing(self, module: nn.Module) -> None:
        if not self.get(_CHECKPOINTING) or checkpointed_blocks(module):
            return
        if not self._has_file_for_checkpointing:
            raise UsageError(
                "strategy.cpu_checkpointing=true keeps checkpointed activations in host memory, and no block is "
                "checkpointed; write speed.gradient_checkpointing=true too"
            )
        if not self._has_warned:  # this runs before processes start, and again afterwards
            _warn("%s: %s has no effect without speed.gradient_checkpointing=true", self.who, _CHECKPOINTING)
        self._has_warned = True

    def engine_config(self, trainer: Any, *, swap_folder: Path | None) -> Config:
        """Return the configuration for ``deepspeed.initialize``.

        Args:
            trainer: Its sizes and precision replace "auto".
            swap_folder: Folder of this process's swap files; None without NVMe.
        """
        accumulate, batch_size = trainer.accumulate_grad_batches, global_batch_size(trainer)
        micro = self.get("train_micro_batch_size_per_gpu", 1)
        if batch_size is not None:
            # Only the engine's own timers and logs read it, so ranks may have a sample more.
            micro = max(1, batch_size // (trainer.world_size * accumulate))
        config = precedence.engine_config(
            self.config,
            micro_batch_size=micro,
            accumulate=accumulate,
            clip=trainer.gradient_clip_val,
            chosen_precision=str(trainer.precision),
        )
        # The optimizer is the module's, or CPU Adam by our option; the engine must not choose another.
        config["zero_force_ds_cpu_optimizer"] = False
        if swap_folder is not None:
            zero = config["zero_optimization"]
            zero["offload_optimizer"]["nvme_path"] = str(swap_folder)
            zero.setdefault("sub_group_size", _NVME_SUB_GROUP_SIZE)
        return config


def as_config(stage: Stage | None, offload: Offload, buckets: Buckets, cpu_checkpointing: bool | None) -> Config:
    """Return the given arguments as a DeepSpeed configuration, without those that are None."""
    given = {
        "stage": stage,
        "cpu_checkpointing": cpu_checkpointing,
        "offload_optimizer": offload.optimizer,
        "offload_parameters": offload.parameters,
        "nvme_path": offload.nvme_path,
        "cpu_adam": offload.cpu_adam,
        **vars(buckets),
    }
    config: Config = {}
    for name, value in given.items():
        if value is not None:
            put(config, precedence.SAME[f"strategy.{name}"], value)
    return config
