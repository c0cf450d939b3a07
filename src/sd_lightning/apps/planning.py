"""Settings of a run, read from its configuration for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sd_lightning.apps.preflight import Parts
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.run import TrainingRun

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_of(cfg: DictConfig, parts: Parts, model: LatentDiffusion, world_size: int) -> TrainingRun:
    """Return the settings that memory and time depend on.

    Args:
        cfg: Configuration of a training program.
        parts: Built from it.
        model: Described or on the meta device.
        world_size: Number of processes.
    """
    ema, samples = cfg.callbacks.get("ema"), cfg.callbacks.get("samples")
    num_samples = 0 if samples is None else len(samples.prompts or ()) or 2 * samples.columns
    return TrainingRun(
        batch_size=-(-cfg.data.batch_size // (world_size * cfg.trainer.accumulate_grad_batches)),
        resolution=cfg.data.resolution,
        precision=str(cfg.trainer.precision),
        world_size=world_size,
        accumulate=cfg.trainer.accumulate_grad_batches,
        train_text_encoder=cfg.module.train_text_encoder,
        lora=parts.lora,
        optimizer=parts.optimizer,  # type: ignore[arg-type]
        gradient_checkpointing=cfg.speed.gradient_checkpointing,
        encoder_dtype=getattr(torch, cfg.module.encoder_dtype),
        averages=ema is not None,
        offload_averages=ema is not None and ema.get("offload", False),
        offload_encoders=cfg.module.offload_encoders,
        cache_latents=cfg.data.get("cache_latents", False),
        drawn_size=(cfg.sampling.get("height") or model.resolution, cfg.sampling.get("width") or model.resolution),
        vae_tiling=bool(cfg.sampling.get("vae_tiling")),
        sample_batch_size=min(cfg.sampling.batch_size, -(-num_samples // world_size)),
    )
