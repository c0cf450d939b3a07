"""Settings of a run, read from its configuration for the planner; and what its blocks keep for backward."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.models.checkpointing import Kept, description
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
from sd_lightning.strategies.predicted import with_callbacks

log = logging.getLogger(__name__)

_TYPICAL = "a100-80gb"
"""Its speeds decide what is cheap to recompute on a device without a table, and on a CPU."""


def typical_hardware() -> tuple[Device, Speeds]:
    """Return this machine's hardware, or a typical GPU in its place if it is not known."""
    if torch.cuda.is_available() or file_of(device_name()).is_file():
        try:
            return hardware_here()
        except UsageError as error:
            log.warning("%s; speeds of %s are assumed until then", error, _TYPICAL)
    return hardware(_TYPICAL)


def check_predictable(spec: RunSpec, who: str, remedy: str) -> None:
    """Check that the memory of a run can be predicted.

    Args:
        spec: The run.
        who: The setting that needs the prediction.
        remedy: What to write without one.

    Raises:
        UsageError: It cannot.
    """
    if spec.learned_token is not None or not spec.model.is_ours:
        what = "a learned token" if spec.learned_token is not None else f"model._target_={spec.model.target}"
        raise UsageError(f"{who}: the memory of {what} cannot be predicted; write {remedy}")
    if spec["data.resolution"] is None:
        raise UsageError(f"{who} needs the size of the images; write data.resolution=<that of the store>")


def recomputation(spec: RunSpec, plans: Plans | None = None) -> Recomputation:
    """Choose what blocks keep for backward, for the limit in ``speed.gradient_checkpointing``.

    Args:
        spec: The run.
        plans: Made for this machine: with its memory and speeds.

    Raises:
        UsageError: The limit cannot be kept, or what depends on it is not known.
    """
    given = spec.speed.gradient_checkpointing
    who = f"speed.gradient_checkpointing={given}"
    check_predictable(spec, who, "speed.gradient_checkpointing=true")
    if given == "auto" and plans is None and not torch.cuda.is_available():
        raise UsageError(f"{who} fills the memory of a GPU, and there is none; write GB of activations, e.g. 2.5")
    forecaster = Forecaster(model := spec.model.describe(), run_of(spec, model))
    footprint = engine_of(spec.strategy).footprint(forecaster.workload)
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
    found = choose(traced, total, limit, size, speeds, menu=footprint.menu, tf32=spec.speed.allow_tf32)
    what = "a step takes" if given == "auto" else "activations take"
    if found.peak > limit:
        raise UsageError(
            f"{who}: with {size} sample(s) per pass, {what} {found.peak / GB:.3g} GB even if all blocks are "
            f"recomputed, and the limit is {limit / GB:.3g}; write trainer.accumulate_grad_batches="
            f"{2 * spec['trainer.accumulate_grad_batches']} or a smaller data.batch_size"
        )
    log.info(
        "%s: %s %.3g GB; of the blocks, %s; recomputing takes %.1f %% of forward and backward (%s: %s)",
        *(who, what, found.peak / GB, description(found.kept.values()) or "all keep everything"),
        *(100 * found.slowdown, speeds.provenance, device.name),
    )
    return found


def run_of(spec: RunSpec, model: LatentDiffusion, world_size: int | None = None) -> TrainingRun:
    """Return the settings that memory and time depend on.

    Args:
        spec: The run.
        model: Described or on the meta device.
        world_size: Number of processes; those that the run asks for if not given.
    """
    world_size, accumulate = world_size or spec.num_processes, spec["trainer.accumulate_grad_batches"]
    batch_size = world_size if spec["data.batch_size"] == AUTO else spec["data.batch_size"]  # the planner chooses it
    run = TrainingRun(
        batch_size=-(-batch_size // (world_size * accumulate)),
        world_size=world_size,
        accumulate=accumulate,
        gradient_checkpointing=spec.speed.gradient_checkpointing is True,
        kept={} if spec.recomputation is None else spec.recomputation.kept,
        cache_latents=spec.get("data.cache_latents", "store" in spec["data"]),
        drawn_size=(spec.get("sampling.height"), spec.get("sampling.width")),
        vae_tiling=bool(spec.get("sampling.vae_tiling")),
        **settings_of(spec, model),
    )
    return with_callbacks(run, spec.callbacks.values())


def settings_of(spec: RunSpec, model: LatentDiffusion) -> dict[str, Any]:
    """Return the fields of :class:`TrainingRun` that programs name alike, whether they train or plan."""
    return {
        "resolution": spec["data.resolution"] or model.resolution,
        "precision": str(spec["trainer.precision"]),
        "train_text_encoder": spec["module.train_text_encoder"],
        "lora": spec.lora,
        "optimizer": spec.optimizer,
        "encoder_dtype": getattr(torch, spec["module.encoder_dtype"]),
        "offload_encoders": spec["module.offload_encoders"],
    }
