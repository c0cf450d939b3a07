"""Speed and memory of training on one CUDA GPU: Stable Diffusion 1.5 with random weights, 512 x 512 pixels."""

from __future__ import annotations

import gc
import sys
from functools import partial

import torch

from training_runs import Run

BARS: dict[str, str] = {}
TABLE = {
    "sd15 at 512 x 512 on a GPU, images per second: plain; with gradient checkpointing": "{plain_images_per_second}; "
    "{checkpointed_images_per_second}",
}
MEASURED = dict.fromkeys(("plain", "checkpointed"), Run("sd15", 512, "single", batch_size=8, encoders="text"))


DRY = {"architecture": "tiny", "batch_size": 2, "steps": 3}


def measure(*, architecture: str = "sd15", batch_size: int = 8, steps: int = 30, precision: str = "bf16-mixed") -> dict:
    """Train some steps with and without gradient checkpointing.

    Args:
        architecture: Which model is built.
        batch_size: Samples per step; their latents are cached.
        steps: Optimizer steps of each run.
        precision: Lightning's precision.

    Returns:
        Images per second, MFU and peak GB of each run.
    """
    metrics: dict[str, float] = {}
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        if torch.cuda.is_available():
            gc.collect()  # what the run before this one held in cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        summary = _train(architecture, batch_size, steps, precision, gradient_checkpointing=checkpointing)
        summary["gb"] = summary.pop("peak_memory_gib") * 2**30 / 1e9
        metrics |= {f"{name}_{key}": value for key, value in summary.items()}
        print(name, summary, file=sys.stderr, flush=True)
    return metrics


def _train(
    architecture: str, batch_size: int, steps: int, precision: str, *, gradient_checkpointing: bool
) -> dict[str, float]:
    import lightning.pytorch as pl

    from sd_lightning import LatentDiffusion, SDDataModule, SDLightningModule
    from sd_lightning.callbacks import EMA, Throughput
    from sd_lightning.data.source import SourceSubset
    from sd_lightning.data.sources.digits import Digits
    from sd_lightning.data.transform import ImageOptions
    from sd_lightning.training.speed import Speed

    model = LatentDiffusion.build(architecture)
    module = SDLightningModule(model, optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True))
    Speed(gradient_checkpointing=gradient_checkpointing, allow_tf32=True).apply_(module.trained_networks())
    resolution = model.resolution
    source = SourceSubset(Digits("train", size=resolution), range(4 * batch_size))
    data = SDDataModule(
        source, batch_size=batch_size, images=ImageOptions(resolution, True, False, 0.1), cache_latents=True
    )
    throughput = Throughput(window=steps)
    trainer = pl.Trainer(
        max_steps=steps,
        precision=precision,  # type: ignore[arg-type]
        devices=1,
        callbacks=[EMA(0.999), throughput],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    return throughput.summary()
