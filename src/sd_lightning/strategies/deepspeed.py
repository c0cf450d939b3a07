"""DeepSpeed ZeRO-1/2/3, on CUDA and, for tests and small experiments, on CPU over gloo."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.strategies.deepspeed_state import DeepSpeedState, Zero3State, Zero12State

Stage = Literal[1, 2, 3]


@dataclass(frozen=True)
class Buckets:
    """Sizes that trade memory for fewer, larger messages; names as in DeepSpeed's configuration."""

    reduce_bucket_size: int = 200_000_000
    """Elements reduced at once."""
    allgather_bucket_size: int = 200_000_000
    """Elements gathered at once (stages 1 and 2)."""
    overlap_comm: bool = True
    """Reduce gradients while backward goes on."""
    stage3_param_persistence_threshold: int = 100_000
    """Parameters with fewer elements stay whole on every rank (stage 3)."""


class DeepSpeedStrategy(LightningDeepSpeedStrategy):
    """Shard optimizer states (stage 1), gradients (2) and weights (3) over all processes with DeepSpeed.

    Usage: ``Trainer(strategy=DeepSpeedStrategy(stage=2), devices=2)`` or ``Trainer(strategy="sd_deepspeed_zero2")``.

    Args:
        stage: ZeRO stage: 1, 2 or 3.
        offload_optimizer: Keep optimizer states and step in host memory.
        offload_parameters: Keep weights in host memory (stage 3).
        buckets: Sizes of DeepSpeed's messages.
        timeout_seconds: A collective that takes longer ends the run.
    """

    def __init__(
        self,
        *,
        stage: Stage = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        buckets: Buckets | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if stage not in (1, 2, 3):
            raise UsageError(f"DeepSpeedStrategy got stage={stage}; expected 1, 2 or 3")
        if offload_parameters and stage != 3:
            raise UsageError(
                f"DeepSpeedStrategy got offload_parameters=true with stage={stage}; only stage 3 shards weights: set "
                "stage=3 (strategy=deepspeed_zero3_offload)"
            )
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
        require("deepspeed", extra="deepspeed", who=f"strategy=deepspeed_zero{stage}")
        buckets = buckets or Buckets()
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            reduce_bucket_size=buckets.reduce_bucket_size,
            allgather_bucket_size=buckets.allgather_bucket_size,
            overlap_comm=buckets.overlap_comm,
            logging_level=logging.WARNING,
            timeout=timedelta(seconds=timeout_seconds),
        )
        assert isinstance(self.config, dict)
        zero = self.config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = buckets.stage3_param_persistence_threshold
        # The optimizer is the one the module configures, offloaded or not.
        self.config["zero_force_ds_cpu_optimizer"] = False
        self._state: DeepSpeedState | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # the index becomes args.device_rank

    @property
    def _on_cuda(self) -> bool:
        return isinstance(self.accelerator, CUDAAccelerator)

    @override
    def setup_environment(self) -> None:
        if self._on_cuda:
            super().setup_environment()
            return
        import deepspeed

        # gloo serves all collectives: without this DeepSpeed compiles a shared-memory extension.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    @override
    def setup_distributed(self) -> None:
        if self._on_cuda:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _auto_select_batch_size(self) -> int:
        """Samples per rank and forward pass, without asking for the loader before the module is on its device."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        return max(1, trainer.datamodule.batch_size // (self.world_size * trainer.accumulate_grad_batches))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.zero_stage_3:
            self._register_external_parameters()

    def _register_external_parameters(self) -> None:
        """Tell ZeRO-3 of weights that a module reads from its child: CLIP's embeddings look at a shape in theirs.

        DeepSpeed finds them by itself only inside its engine's forward, and pictures are drawn outside of it.
        """
        from deepspeed.runtime.zero import register_external_parameter

        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            embedding = getattr(module, "position_embedding", None)
            if isinstance(embedding, torch.nn.Embedding):
                register_external_parameter(module, embedding.weight)

    def training_state(self) -> DeepSpeedState:
        """Return this rank's ranges of the trained parameters."""
        zero = self.deepspeed_engine.optimizer
        if self._state is None or self._state.zero is not zero:
            assert self.lightning_module is not None
            parameters = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
            self._state = (Zero3State if self.zero_stage_3 else Zero12State)(zero, parameters)
        return self._state

    @override
    def teardown(self) -> None:
        super().teardown()
        self._state = None


def deepspeed(
    *,
    stage: Stage,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    reduce_bucket_size: int = 200_000_000,
    allgather_bucket_size: int = 200_000_000,
    overlap_comm: bool = True,
    stage3_param_persistence_threshold: int = 100_000,
) -> DeepSpeedStrategy:
    """Build the strategy from flat command-line keys."""
    buckets = Buckets(reduce_bucket_size, allgather_bucket_size, overlap_comm, stage3_param_persistence_threshold)
    return DeepSpeedStrategy(
        stage=stage, offload_optimizer=offload_optimizer, offload_parameters=offload_parameters, buckets=buckets
    )
