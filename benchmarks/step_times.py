"""Measured and predicted time of a training step under strategies in turns; started by `cases/step_time.py`.

    torchrun --nproc-per-node=2 benchmarks/step_times.py RESULTS.json ROUNDS

RESULTS.json: "<model>/<strategy>" -> {"measured": seconds of a step in each round, "predicted": the same}, of rank 0.
All ranks are calibrated at the same time, as they train, and anew in each round: a shared machine changes its speed.
"""

import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import unet_35m
from hand_written import Batch
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning._console import quiet_libraries
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.measuring import Effort, calibrate, links_in_group
from sd_lightning.planner.roofline import Speeds, Work, step_time
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import engine_of
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "deepspeed_zero1": partial(deepspeed, stage=1),
    "deepspeed_zero2": partial(deepspeed, stage=2),
    "deepspeed_zero3": partial(deepspeed, stage=3),
    "gemini": GeminiStrategy,
}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)
STEPS, WARM_UP = 8, 3


@dataclass(frozen=True)
class Subject:
    """A model and its batches."""

    build: Callable[[], LatentDiffusion]
    batch_size: int
    side: int
    """Of latents."""

    def batches(self) -> list[Batch]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        latents = 4, self.side, self.side
        return unet_35m.make_batches(STEPS, rank, world_size, batch_size=self.batch_size, latents=latents)


SUBJECTS = {
    "tiny": Subject(partial(LatentDiffusion.build, "tiny"), 16, 8),
    "35m": Subject(unet_35m.build, unet_35m.BATCH_SIZE, unet_35m.LATENTS[-1]),
}


class Steps(pl.Callback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        dist.barrier()
        self.ends.append(time.perf_counter())


def measured(subject: Subject, make: Callable[[], Any]) -> float:
    """Train a few steps; return the median of their seconds."""
    gc.collect()
    callback = Steps()
    module = SDLightningModule(subject.build(), optimizer=OPTIMIZER)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size(), "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options["gradient_clip_val"] = 1.0  # as in the programs; the planner counts it
    trainer = pl.Trainer(
        strategy=make(), max_steps=STEPS, callbacks=[callback], use_distributed_sampler=False, **options
    )
    batches: Any = subject.batches()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    ends = callback.ends[WARM_UP - 1 :]
    return statistics.median(after - before for before, after in zip(ends, ends[1:]))


def speeds_now() -> Speeds:
    """Measure what this process reaches while the others do the same."""
    cpu = torch.device("cpu")
    links, start = links_in_group(cpu)
    dist.barrier()
    speeds = replace(calibrate("today", Effort(least=0.01, links=False)).speeds, link=links, collective=start)
    dist.barrier()
    return speeds


def predicted(subject: Subject, make: Callable[[], Any], speeds: Speeds) -> float:
    """Predict the seconds of a step."""
    from sd_lightning.planner.passes import encoding_traces

    model = subject.build()
    run = TrainingRun(
        subject.batch_size,
        subject.side * model.latent_space.stride,
        "32-true",
        world_size=dist.get_world_size(),
        optimizer=OPTIMIZER,
        cache_latents=True,
    )
    forecaster = Forecaster(model, run)
    footprint = engine_of(make()).footprint(forecaster.workload)
    assert footprint is not None
    traces = encoding_traces(model, run, subject.batch_size)
    encoding = sum(float(speeds.seconds(each, 0).sum()) for each in traces)
    work = Work(run.world_size, 1, encoding, 0)
    return step_time(forecaster.trace(footprint), subject.batch_size, footprint.traffic, speeds, work).total


def main() -> None:
    """The command line."""
    quiet_libraries()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[str, list[float]]] = {
        f"{name}/{strategy}": {"measured": [], "predicted": []} for name in SUBJECTS for strategy in STRATEGIES
    }
    for number in range(int(sys.argv[2]) + 1):  # the first one warms up
        speeds = speeds_now() if number else None
        for name, subject in SUBJECTS.items():
            for strategy in list(STRATEGIES)[:: 1 if number % 2 else -1]:
                seconds = measured(subject, STRATEGIES[strategy])
                if speeds is not None:
                    found[f"{name}/{strategy}"]["measured"].append(seconds)
                    found[f"{name}/{strategy}"]["predicted"].append(predicted(subject, STRATEGIES[strategy], speeds))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main()
