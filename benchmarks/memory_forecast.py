"""Peak memory of a training step under every strategy; started by `cases/memory_forecast.py`.

    torchrun --nproc-per-node=2 benchmarks/memory_forecast.py RESULTS.json

RESULTS.json: "<strategy>/<precision>" -> bytes that rank 0 needs for the second and third step, beyond what it had
before it built the model, and without the frozen encoders.
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
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from sd_lightning.training.speed import precision_options
from unet_35m import build, make_batches

BUCKETS: dict[str, int] = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
"""Small beside a network of 35 million parameters: the defaults would be most of the memory, never touched."""
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp_grad_op": lambda: FSDPStrategy(reshard_after_forward=False),
    "fsdp_offload": lambda: FSDPStrategy(cpu_offload=True),
    "deepspeed_zero1": lambda: deepspeed(stage=1, **BUCKETS),
    "deepspeed_zero2": lambda: deepspeed(stage=2, **BUCKETS),
    "deepspeed_zero2_offload": lambda: deepspeed(stage=2, offload_optimizer="cpu", **BUCKETS),
    "deepspeed_zero3": lambda: deepspeed(stage=3, stage3_param_persistence_threshold=0, **BUCKETS),
    "deepspeed_zero3_offload": lambda: deepspeed(
        stage=3,
        offload_optimizer="cpu",
        offload_parameters="cpu",
        stage3_param_persistence_threshold=0,
        **BUCKETS,
    ),
    "gemini": GeminiStrategy,
    "gemini_gathered": lambda: GeminiStrategy(shard_param_frac=0.0),
    "gemini_offload": lambda: GeminiStrategy(offload_optim_frac=1.0, offload_param_frac=1.0, gathered_budget=0),
}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def runs() -> list[tuple[str, str]]:
    """Return strategies and precisions; on a CPU, autocast also allocates inside of oneDNN, which nothing predicts."""
    mixed = [name for name in STRATEGIES if name.startswith(("deepspeed", "gemini"))]
    return [*((name, "32-true") for name in STRATEGIES), *((name, "bf16-mixed") for name in mixed)]


class PeakOfSteps(pl.Callback):
    """Notes the most memory in use during the second and third step."""

    def __init__(self) -> None:
        self.found = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            process_memory.begin_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.found = process_memory.peak()


def measure(make: Callable[[], Any], precision: str) -> int:
    """Train three steps; return bytes."""
    gc.collect()
    before = process_memory.begin_peak()
    callback, strategy = PeakOfSteps(), make()
    module = SDLightningModule(build(), optimizer=OPTIMIZER)
    networks = module.latent_diffusion.networks
    frozen = sum(4 * p.numel() for name, network in networks.items() if name != "unet" for p in network.parameters())
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
    trainer = pl.Trainer(strategy=strategy, **options, **precision_options(precision, strategy))
    batches: Any = make_batches(4, dist.get_rank(), dist.get_world_size())
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return callback.found - before - frozen


def main() -> None:
    """The command line."""
    quiet_libraries()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    process_memory.return_at_once()
    dist.init_process_group("gloo")
    for name in ("ddp", "deepspeed_zero1"):  # load what is loaded at the first use
        measure(STRATEGIES[name], "bf16-mixed")
    found = {f"{name}/{precision}": measure(STRATEGIES[name], precision) for name, precision in runs()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main()
