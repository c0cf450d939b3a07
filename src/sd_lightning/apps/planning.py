"""What a run takes from the planner: its strategy, batch and passes, and what its blocks keep for backward."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.apps.settings import options
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.preservation import check_adapters
from sd_lightning.models.checkpointing import SavedActivations, description
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.alternatives import remedies
from sd_lightning.planner.calibration import device_name, file_of, hardware, hardware_here
from sd_lightning.planner.checkpointing import Recomputation, choose
from sd_lightning.planner.choice import PlanChoice
from sd_lightning.planner.devices import USABLE, Cluster, Device
from sd_lightning.planner.footprint import Candidate
from sd_lightning.planner.forecast import GB, Forecaster, StepCurves
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans, Search
from sd_lightning.planner.trace import Trace
from sd_lightning.strategies import engine_of, presets
from sd_lightning.strategies.predicted import training_run

log = logging.getLogger(__name__)

_TYPICAL = "a100-80gb"
"""Its speeds decide what is cheap to recompute on a device without a table, and on a CPU."""
_RECOMPUTES = {"speed.gradient_checkpointing", "gradient_checkpointing"}


def check(spec: RunSpec) -> None:
    """Check that nothing contradicts what the run leaves to the planner.

    Raises:
        UsageError: Something does.
    """
    who = " ".join(spec.left_to_planner())
    passes = "trainer.accumulate_grad_batches"
    if passes in spec.overridden and spec[passes] != 1:
        raise UsageError(
            f"{who} got {passes}={spec[passes]}, which it chooses itself, so that data.batch_size samples make a step; "
            f"leave {passes} out"
        )
    limit = spec["speed.gradient_checkpointing"]
    if not isinstance(limit, bool | str):
        raise UsageError(
            f"{who} got speed.gradient_checkpointing={limit}, a limit beside the memory of the GPU; expected true, "
            "false or auto; leave it out, and as little is recomputed as fits"
        )
    if torch.cuda.is_available() and not spec.cuda_devices:
        raise UsageError(
            f"{who} got trainer.accelerator={spec['trainer.accelerator']}, and plans for this machine's GPU; write a "
            "strategy and a batch size, or leave trainer.accelerator out"
        )
    if spec["trainer.num_nodes"] > 1:
        raise UsageError(
            f"{who} got trainer.num_nodes={spec['trainer.num_nodes']}, and the planner knows the GPUs of one machine "
            "only; write a strategy, e.g. strategy=fsdp, and data.batch_size=<n>"
        )
    _check_predictable(spec, who, "a strategy, e.g. strategy=gemini, and data.batch_size=<n>")


def _check_predictable(spec: RunSpec, who: str, remedy: str) -> None:
    """Check that the memory of a run can be predicted.

    Args:
        spec: The run.
        who: The setting that needs the prediction.
        remedy: What to write without one.

    Raises:
        UsageError: It cannot.
    """
    if spec.learned_token is not None or not spec.model.is_ours:
        subject = "a learned token" if spec.learned_token is not None else f"model._target_={spec.model.target}"
        raise UsageError(f"{who}: the memory of {subject} cannot be predicted; write {remedy}")
    if spec["data.resolution"] is None:
        raise UsageError(f"{who} needs the size of the images; write data.resolution=<that of the store>")


def choose_plan(spec: RunSpec) -> tuple[RunSpec, PlanChoice]:
    """Choose what a run leaves to the planner.

    Returns:
        The run with the plan's settings, and the plan with its rivals.

    Raises:
        UsageError: Nothing fits, or the machine's speeds are not known.
    """
    who, chooses_strategy = " ".join(spec.left_to_planner()), spec.chooses_strategy
    if spec["data.batch_size"] == AUTO and spec.resumed_batch is not None:  # the order of samples depends on it
        spec = spec.with_settings({"data.batch_size": spec.resumed_batch})
    device, speeds = hardware_here()  # before the data is read, which may take long
    count, batch_size, micro_batches = spec.num_processes, spec["data.batch_size"], None
    if batch_size == AUTO:
        photos_only = {"class_prompts": None} if spec.get("data.class_prompts") else {}  # pictures are not drawn yet
        near = {f"data.{name}": value for name, value in vars(LoaderOptions()).items() if name in spec["data"]}
        data = spec.with_settings(near).build("data", batch_size=count, **photos_only)
        num_samples = int(data.num_train_samples)
        micro_batches = range(1, max(num_samples // count, 1) + 1)
    model = spec.model.describe()
    run = replace(run_of(spec, model, count), gradient_checkpointing=False)
    search = Search(
        model,
        run,
        Cluster.here(device, count, on_cpu=not spec.cuda_devices),
        candidates=presets.candidates() if chooses_strategy else [Candidate("", lambda: engine_of(spec.strategy))],
        speeds=speeds,
        batch_size=count * -(-batch_size // count) if micro_batches is None else None,  # parts differ by one sample
        micro_batches=micro_batches,
        checkpointing=spec["speed.gradient_checkpointing"] if _RECOMPUTES & spec.overridden else None,
        tf32=spec.speed.allow_tf32,
    )

    def remedy(plans: Plans) -> str:
        changes = remedies(search, plans)
        helping = [option for option in changes if not option.startswith(("gpu", "host", "encoders"))]
        return f"write {' or '.join(helping)}" if helping else "write a smaller data.resolution, or take a larger GPU"

    choice = PlanChoice.of(search, who, remedy)
    plan = choice.plan
    settings: dict[str, Any] = {
        "trainer.accumulate_grad_batches": plan.run.accumulate,
        "speed.gradient_checkpointing": plan.recompute,
    }
    if chooses_strategy:
        settings["strategy"] = {**options("strategy")[plan.candidate.strategy], **plan.candidate.settings}
    if batch_size == AUTO:
        settings["data.batch_size"] = plan.global_batch
    return spec.with_settings(settings), choice


def predict_step(spec: RunSpec) -> tuple[float, float | None]:
    """Return the predicted seconds of an optimizer step, and the price of a device in dollars per hour, if it is known.

    Raises:
        UsageError: The machine's speeds are not known, or the strategy cannot be predicted.
    """
    device, speeds = hardware_here()
    count, given = spec.num_processes, spec["speed.gradient_checkpointing"]
    model = spec.model.describe()
    plans = Search(
        model,
        replace(run_of(spec, model, count), gradient_checkpointing=False),
        Cluster.here(device, count, on_cpu=not spec.cuda_devices),
        candidates=[Candidate("", lambda: engine_of(spec.strategy))],
        speeds=speeds,
        batch_size=spec["data.batch_size"],
        checkpointing=given if isinstance(given, bool) else "auto",
        tf32=spec.speed.allow_tf32,
    ).plans()
    for plan in (*plans.best, *plans.too_large):
        return plan.time.total, device.price_per_hour
    raise UsageError("; ".join(plans.skip_reasons))


def recomputation(spec: RunSpec, choice: PlanChoice | None = None) -> Recomputation:
    """Choose what blocks keep for backward, for the limit in ``speed.gradient_checkpointing``.

    Args:
        spec: The run.
        choice: The plan of the run, made with this machine's memory and speeds.

    Raises:
        UsageError: The limit cannot be kept, or what depends on it is not known.
    """
    setting = spec.speed.gradient_checkpointing
    who = f"speed.gradient_checkpointing={setting}"
    _check_predictable(spec, who, "speed.gradient_checkpointing=true")
    if setting == "auto" and choice is None and not torch.cuda.is_available():
        raise UsageError(f"{who} fills the memory of a GPU, and there is none; write GB of activations, e.g. 2.5")
    model = spec.model.describe()
    run = run_of(spec, model, spec.num_processes)
    forecaster = Forecaster(model, run)
    footprint = engine_of(spec.strategy).footprint(forecaster.workload)
    if footprint is None:
        raise UsageError(
            f"{who}: the strategy chooses what it offloads by measurements in the run, so its memory is not known "
            "before; write strategy=gemini, or speed.gradient_checkpointing=true"
        )
    size, plans = run.batch_size, None if choice is None else choice.plans
    if setting == "auto":
        there = USABLE * torch.cuda.get_device_properties(0).total_memory if plans is None else plans.cluster.memory
        limit = int(there)
        always = sum(forecaster.always(footprint).values())
    else:
        limit, always = int(GB * float(setting)), 0

    def traced(kept: Mapping[str, SavedActivations]) -> Trace:
        return Forecaster(model, replace(run, kept=kept)).trace(footprint)

    def total(trace: Trace) -> np.ndarray:
        return StepCurves(trace, footprint).total(size) + always if setting == "auto" else trace.live(size)

    device, speeds = _typical_hardware() if plans is None else (plans.cluster.device, plans.speeds)
    speeds = speeds.with_tf32() if spec.speed.allow_tf32 else speeds
    chosen = choose(traced, total, limit, size, speeds, menu=footprint.menu)
    taken = "a step takes" if setting == "auto" else "activations take"
    if chosen.peak > limit:
        raise UsageError(
            f"{who}: with {size} sample(s) per pass, {taken} {chosen.peak / GB:.3g} GB even if all blocks are "
            f"recomputed, and the limit is {limit / GB:.3g}; write trainer.accumulate_grad_batches="
            f"{2 * spec['trainer.accumulate_grad_batches']} or a smaller data.batch_size"
        )
    log.info(
        "%s: %s %.3g GB; of the blocks, %s; recomputing takes %.1f %% of forward and backward (%s: %s)",
        *(who, taken, chosen.peak / GB, description(chosen.kept.values()) or "all keep everything"),
        *(100 * chosen.slowdown, speeds.provenance, device.name),
    )
    return chosen


def _typical_hardware() -> tuple[Device, Speeds]:
    """Return this machine's hardware, or a typical GPU in its place if it is not known."""
    if torch.cuda.is_available() or file_of(device_name()).is_file():
        try:
            return hardware_here()
        except UsageError as error:
            log.warning("%s; speeds of %s are assumed until then", error, _TYPICAL)
    return hardware(_TYPICAL)


def run_of(spec: RunSpec, model: LatentDiffusion, world_size: int) -> TrainingRun:
    """Return the settings of a run, or of a plan, that memory and time depend on.

    Args:
        spec: Of ``train`` and ``dreambooth``, or of ``plan``, which leaves the batch to the search.
        model: Described or on the meta device.
        world_size: Number of processes.
    """
    batch_size, sampling = spec["data.batch_size"], spec.get("sampling", {})
    resolution = spec["data.resolution"] or model.resolution
    model.family.check_sizes(resolution, vae_config=model.vae.config, setting="data.resolution")
    check_adapters(spec.get("preservation"), spec.lora)
    caches = spec.get("data.cache_latents", "store" in spec["data"])
    return training_run(
        world_size if batch_size in (AUTO, None) else batch_size,
        world_size=world_size,
        accumulate=spec.get("trainer.accumulate_grad_batches", 1),
        callbacks=spec.callbacks.values(),
        resolution=resolution,
        precision=str(spec["trainer.precision"]),
        train_text_encoder=spec["module.train_text_encoder"],
        lora=spec.lora,
        preserves=spec.get("preservation") is not None,
        optimizer=spec.optimizer,
        gradient_checkpointing=spec["speed.gradient_checkpointing"] is True,
        kept={} if spec.recomputation is None else spec.recomputation.kept,
        encoder_dtype=getattr(torch, spec["module.encoder_dtype"]),
        offload_encoders=spec["module.offload_encoders"],
        random_captions=any(spec.get(f"data.{name}") for name in ("shuffle_tags", "tag_dropout", "enable_wildcard")),
        cache_latents=caches,
        drawn_size=(sampling.get("height"), sampling.get("width")),
        vae_tiling=bool(sampling.get("vae_tiling")),
    )
