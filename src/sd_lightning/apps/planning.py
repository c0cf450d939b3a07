"""Settings of a run, read from its configuration for the planner; and what its blocks keep for backward."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps.preflight import LOAD_MODEL, Parts, averages_by_lightning
from sd_lightning.apps.trainer_checks import num_processes
from sd_lightning.models.checkpointing import Kept, told
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.calibration import device_name, file_of, hardware
from sd_lightning.planner.checkpointing import Recomputation, choose
from sd_lightning.planner.devices import USABLE, Device
from sd_lightning.planner.forecast import GB, Forecaster, StepCurves
from sd_lightning.planner.here import hardware_here
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans
from sd_lightning.planner.trace import Trace
from sd_lightning.strategies import engine_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

_TYPICAL = "a100-80gb"
"""Its speeds decide what is cheap to recompute on a device without a table, and on a CPU."""


def described(cfg: DictConfig) -> LatentDiffusion:
    """Return the model of ``model=`` without weights."""
    if cfg.model.get("pretrained") is None:
        return LatentDiffusion.build(cfg.model.architecture, device="meta")
    return LatentDiffusion.describe(cfg.model.pretrained, revision=cfg.model.get("revision"), vae=cfg.model.get("vae"))


def typical_hardware() -> tuple[Device, Speeds]:
    """Return this machine's hardware, or a typical GPU in its place if it is not known."""
    if torch.cuda.is_available() or file_of(device_name()).is_file():
        try:
            return hardware_here()
        except UsageError as error:
            log.warning("%s; speeds of %s are assumed until then", error, _TYPICAL)
    return hardware(_TYPICAL)


def check_predictable(cfg: DictConfig, who: str, remedy: str) -> None:
    """Check that the memory of a run can be predicted.

    Args:
        cfg: Configuration of a training program.
        who: The setting that needs the prediction.
        remedy: What to write without one.

    Raises:
        UsageError: It cannot.
    """
    if cfg.get("learned_token") is not None or cfg.model["_target_"] != LOAD_MODEL:
        what = "a learned token" if cfg.get("learned_token") is not None else f"model._target_={cfg.model['_target_']}"
        raise UsageError(f"{who}: the memory of {what} cannot be predicted; write {remedy}")
    if cfg.data.resolution is None:
        raise UsageError(f"{who} needs the size of the images; write data.resolution=<that of the store>")


def recomputation(cfg: DictConfig, strategy: Strategy | str, parts: Parts, plans: Plans | None = None) -> Recomputation:
    """Choose what blocks keep for backward, for the limit in ``speed.gradient_checkpointing``.

    Args:
        cfg: Configuration of a training program.
        strategy: Of the run.
        parts: Built from ``cfg``.
        plans: Made for this machine: with its memory and speeds.

    Raises:
        UsageError: The limit cannot be kept, or what depends on it is not known.
    """
    given = parts.speed.gradient_checkpointing
    who = f"speed.gradient_checkpointing={given}"
    check_predictable(cfg, who, "speed.gradient_checkpointing=true")
    if given == "auto" and plans is None and not torch.cuda.is_available():
        raise UsageError(f"{who} fills the memory of a GPU, and there is none; write GB of activations, e.g. 2.5")
    forecaster = Forecaster(model := described(cfg), run_of(cfg, parts, model, num_processes(cfg)))
    footprint = engine_of(strategy).footprint(forecaster.workload)
    if footprint is None:
        raise UsageError(
            f"{who}: the strategy chooses what it offloads by measurements in the run, so its memory is not known "
            "before; write strategy=gemini, or speed.gradient_checkpointing=true"
        )
    size = forecaster.run.batch_size
    if given == "auto":
        there = USABLE * torch.cuda.get_device_properties(0).total_memory if plans is None else plans.cluster.memory
        limit = int(there)
        always = sum(forecaster.always(footprint).values())
    else:
        limit, always = int(GB * float(given)), 0

    def traced(kept: Mapping[str, Kept]) -> Trace:
        return Forecaster(model, replace(forecaster.run, kept=kept)).trace(footprint)

    def total(trace: Trace) -> np.ndarray:
        return StepCurves(trace, footprint).total(size) + always if given == "auto" else trace.live(size)

    device, speeds = typical_hardware() if plans is None else (plans.cluster.device, plans.speeds)
    found = choose(traced, total, limit, size, speeds, menu=footprint.menu, tf32=parts.speed.allow_tf32)
    what = "a step takes" if given == "auto" else "activations take"
    if found.peak > limit:
        raise UsageError(
            f"{who}: with {size} sample(s) per pass, {what} {found.peak / GB:.3g} GB even if all blocks are "
            f"recomputed, and the limit is {limit / GB:.3g}; write trainer.accumulate_grad_batches="
            f"{2 * cfg.trainer.accumulate_grad_batches} or a smaller data.batch_size"
        )
    log.info(
        "%s: %s %.3g GB; of the blocks, %s; recomputing takes %.1f %% of forward and backward (%s: %s)",
        *(who, what, found.peak / GB, told(found.kept.values()) or "all keep everything"),
        *(100 * found.slowdown, speeds.provenance, device.name),
    )
    return found


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
    batch_size = world_size if cfg.data.batch_size == "auto" else cfg.data.batch_size  # the planner chooses it
    return TrainingRun(
        batch_size=-(-batch_size // (world_size * cfg.trainer.accumulate_grad_batches)),
        resolution=cfg.data.resolution,
        precision=str(cfg.trainer.precision),
        world_size=world_size,
        accumulate=cfg.trainer.accumulate_grad_batches,
        train_text_encoder=cfg.module.train_text_encoder,
        lora=parts.lora,
        optimizer=parts.optimizer,  # type: ignore[arg-type]
        gradient_checkpointing=cfg.speed.gradient_checkpointing is True,
        kept={} if parts.recomputation is None else parts.recomputation.kept,
        encoder_dtype=getattr(torch, cfg.module.encoder_dtype),
        averages=ema is not None or averages_by_lightning(cfg),
        offload_averages=ema is not None and ema.get("offload", False),
        offload_encoders=cfg.module.offload_encoders,
        cache_latents=cfg.data.get("cache_latents", "store" in cfg.data),
        drawn_size=(cfg.sampling.get("height") or model.resolution, cfg.sampling.get("width") or model.resolution),
        vae_tiling=bool(cfg.sampling.get("vae_tiling")),
        sample_batch_size=min(cfg.sampling.batch_size, -(-num_samples // world_size)),
    )
