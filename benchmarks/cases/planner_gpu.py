"""The planner on one GPU, calibrated there: predicted against measured memory and time, and its choice against a grid.

Stable Diffusion 1.5 at 512 x 512 with random weights and cached latents, under strategies, precisions, batch sizes and
ways of recomputation. Memory is what torch's allocator holds at the peak; the planner's allowance for
the CUDA context is left out.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch

from lines import Measured
from sd_lightning.planner.measuring import Effort
from training_runs import Run

BARS = {"memory_off_by": "<= 0.1", "time_off_by": "<= 0.15", "auto_to_best": ">= 0.95"}
TABLE = {
    "planner on a GPU, sd15, 13 settings: largest error of memory; median error of time; its choice to the best": (
        "{memory_off_by}; {time_off_by}; {auto_to_best}"
    ),
}


@dataclass(frozen=True)
class Setting:
    """A way to train; names of the planner's candidates."""

    strategy: str
    batch_size: int
    precision: str = "bf16-mixed"
    checkpointing: bool | str = False

    def __str__(self) -> str:
        return f"{self.strategy}_{self.batch_size}_{self.precision}_{self.checkpointing}".lower().replace("-", "_")


GRID = (
    Setting("single", 1),
    Setting("single", 4),
    Setting("single", 8),
    Setting("single", 16),
    Setting("single", 32),
    Setting("single", 8, "32-true"),
    Setting("single", 8, "bf16-true"),
    Setting("single", 8, checkpointing=True),
    Setting("single", 32, checkpointing=True),
    Setting("single", 32, checkpointing="auto"),
    Setting("gemini", 8),
    Setting("gemini", 32),
    Setting("gemini_offload", 8),
)
MEASURED = {
    str(each): Run(
        "sd15", 512, each.strategy, each.batch_size, precision=each.precision, encoders="text", averages=False
    )
    for each in GRID
}


DRY: dict[str, Any] = {
    "architecture": "tiny",
    "steps": 5,
    "grid": (Setting("single", 2), Setting("gemini", 4, checkpointing="auto")),
    "effort": Effort(least=1e-4, sizes=2, stepped=2**20, links=False),
}


def measure(
    *, architecture: str = "sd15", steps: int = 8, grid: tuple[Setting, ...] = GRID, effort: Any = None
) -> Iterator[Measured]:
    """Train under every setting, then by the planner's own choice; yield all metrics after each run.

    Args:
        architecture: Which model is built.
        steps: Optimizer steps of each run; the first three do not count.
        grid: The settings.
        effort: How long the calibration may take.
    """
    from sd_lightning import LatentDiffusion
    from sd_lightning.planner.measuring import calibrate
    from sd_lightning.planner.search import TrainingPlan

    found = calibrate(date.today().isoformat(), effort)
    model = LatentDiffusion.build(architecture, device="meta")
    metrics: dict[str, float | list[float] | str] = {}
    speeds_of: dict[str, float] = {}
    errors: dict[str, list[float]] = {"memory": [], "time": []}

    def compare(name: str, plan: TrainingPlan) -> None:
        seconds, peak = trained(architecture, plan, steps)
        told = max(plan.memory.on_device[:2], key=lambda phase: phase.nbytes)  # the step's; nothing is encoded before
        metrics[f"{name}_ms"], metrics[f"{name}_gb"] = 1e3 * seconds, peak / 1e9
        metrics[f"{name}_images_per_second"] = plan.run.batch_size / seconds
        metrics[f"{name}_time"] = plan.time.total / seconds
        errors["time"].append(abs(plan.time.total / seconds - 1))
        if peak:
            ratio = (told.nbytes - told.parts["allowance"]) / peak
            metrics[f"{name}_memory"] = ratio
            errors["memory"].append(abs(ratio - 1))
        speeds_of[name] = plan.run.batch_size / seconds
        print(name, {key: value for key, value in metrics.items() if key.startswith(name)}, file=sys.stderr, flush=True)

    for setting in grid:
        (plan,) = plans(model, found, [setting.strategy], setting, [setting.batch_size])
        compare(str(setting), plan)
        yield metrics
    comparable = [setting for setting in grid if setting.precision == "bf16-mixed"]
    names, sizes = ({getattr(each, key) for each in comparable} for key in ("strategy", "batch_size"))
    chosen = plans(model, found, sorted(names), None, sorted(sizes))[0]
    compare("auto", chosen)
    best = max(speeds_of[str(setting)] for setting in comparable)
    metrics["auto_to_best"] = speeds_of["auto"] / best
    metrics["time_off_by"] = statistics.median(errors["time"])
    metrics["memory_off_by"] = max(errors["memory"], default=0.0)
    yield metrics


def plans(model: Any, found: Any, names: list[str], setting: Setting | None, sizes: list[int]) -> Any:
    """Return the plans of some candidates on this machine, the fastest first; with the batch sizes to choose from."""
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.search import plan
    from sd_lightning.strategies import presets

    run = TrainingRun(
        1,
        model.resolution,
        "bf16-mixed" if setting is None else setting.precision,
        optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True),
        cache_latents=True,
    )
    candidates = [each for each in presets.candidates() if each.name in names]
    options: dict[str, Any] = {"speeds": found.speeds, "tf32": True, "run": run, "candidates": candidates}
    if setting is not None and setting.checkpointing != "auto":
        options["checkpointing"] = setting.checkpointing
    result = plan(model, found.device, micro_batches=sizes, **options)
    return result.best or result.too_large


def trained(architecture: str, plan: Any, steps: int) -> tuple[float, int]:
    """Train by a plan; return the median seconds of a step, and the peak bytes of torch's allocator."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from sd_lightning import LatentDiffusion, SDLightningModule
    from sd_lightning.strategies.processes.group import leave_process_group
    from sd_lightning.training.speed import Speed, precision_options

    on_cuda = torch.cuda.is_available()
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = LatentDiffusion.build(architecture)
    count, size = plan.run.batch_size, model.resolution
    module = SDLightningModule(model, optimizer=plan.run.optimizer)
    Speed(gradient_checkpointing=plan.recompute, allow_tf32=True).apply_(
        module.trained_networks(), plan.run.kept if plan.recompute == "auto" else None
    )
    ends: list[float] = []

    class Ends(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if on_cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    strategy = "auto" if plan.candidate.name == "single" else plan.candidate.build(**plan.candidate.settings)
    options: dict[str, Any] = precision_options(plan.run.precision, strategy)
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, devices=1, max_steps=steps, callbacks=[Ends()], enable_model_summary=False, **options
    )
    length = min(int(each.model_max_length) for each in model.tokenizers.values())
    batch = {
        "latent_moments": torch.randn(count, *model.latent_space.encoded_shape(size, size)),
        "input_ids": {name: torch.randint(0, 500, (count, length)) for name in model.text_encoders},
        "epoch": torch.zeros(count, dtype=torch.int64),
        "index": torch.arange(count),
    }
    batches: Any = [batch] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
    leave_process_group()
    seconds = statistics.median(after - before for before, after in zip(ends[2:], ends[3:]))
    return seconds, torch.cuda.max_memory_allocated() if on_cuda else 0
