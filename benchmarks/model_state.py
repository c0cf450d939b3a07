"""Bytes of model state under every strategy; started by `cases/model_state.py`.

    torchrun --nproc-per-node=2 benchmarks/model_state.py RESULTS.json

RESULTS.json: strategy -> bytes per trained parameter of all tensors on rank 0 at the optimizer's third step, without
the frozen encoders and the batches, in bfloat16 with float32 master weights.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import process_memory
from sd_lightning import SDLightningModule
from sd_lightning._console import quiet_libraries
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed.strategy import deepspeed
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from sd_lightning.training.precision import precision_options
from unet_35m import build, make_batches

# Buckets are no model state; these are small beside a network of 35 million parameters.
_BUCKETS: dict[str, int] = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "deepspeed_zero1": lambda: deepspeed(stage=1, **_BUCKETS),
    "deepspeed_zero2": lambda: deepspeed(stage=2, **_BUCKETS),
    "deepspeed_zero2_offload": lambda: deepspeed(stage=2, offload_optimizer="cpu", **_BUCKETS),
    "deepspeed_zero3": lambda: deepspeed(stage=3, stage3_param_persistence_threshold=0, **_BUCKETS),
    "deepspeed_zero3_offload": lambda: deepspeed(
        stage=3,
        offload_optimizer="cpu",
        offload_parameters="cpu",
        stage3_param_persistence_threshold=0,
        **_BUCKETS,
    ),
    "gemini": GeminiStrategy,
    "gemini_gathered": lambda: GeminiStrategy(shard_param_frac=0.0),
    "gemini_offload": lambda: GeminiStrategy(offload_optim_frac=1.0, offload_param_frac=1.0, gathered_budget=0),
}


class StateAtStep(pl.Callback):
    """Counts what was not there before."""

    def __init__(self) -> None:
        self.before = process_memory.storages()
        self.found = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.found = process_memory.bytes_beyond(self.before)


def measure(make: Callable[[], Any]) -> float:
    """Train three steps; return bytes per parameter."""
    callback, strategy = StateAtStep(), make()
    module = SDLightningModule(build(), optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True))
    parameters = sum(p.numel() for p in module.parameters())
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_steps": 3,
        "callbacks": [callback],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    trainer = pl.Trainer(strategy=strategy, **options, **precision_options("bf16-mixed", strategy))
    batches: Any = make_batches(4, dist.get_rank(), dist.get_world_size())
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return callback.found / parameters


def main() -> None:
    """The command line."""
    quiet_libraries()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, make in STRATEGIES.items():
        found[name] = measure(make)
        gc.collect()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main()
