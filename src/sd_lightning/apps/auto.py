"""``strategy=auto`` and ``data.batch_size=auto``: a run with what the planner chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps.plan_record import record
from sd_lightning.apps.planning import check_predictable, run_of
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.apps.settings import options
from sd_lightning.planner.candidates import Candidate
from sd_lightning.planner.choice import Choice, NothingFits
from sd_lightning.planner.here import cluster_here, hardware_here
from sd_lightning.planner.remedies import remedies
from sd_lightning.planner.search import Plan, Recompute, Search
from sd_lightning.storage.atomic import new_file
from sd_lightning.storage.runs import PLAN
from sd_lightning.strategies import engine_of


def check(spec: RunSpec) -> None:
    """Check that nothing contradicts what the run leaves to the planner.

    Raises:
        UsageError: Something does.
    """
    who = " ".join(spec.left_to_planner())
    passes = "trainer.accumulate_grad_batches"
    if passes in spec.given and spec[passes] != 1:
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
    check_predictable(spec, who, "a strategy, e.g. strategy=gemini, and data.batch_size=<n>")


def choose(spec: RunSpec, *, batch_size: int | None = None) -> tuple[RunSpec, Choice]:
    """Choose what a run leaves to the planner.

    Args:
        spec: The run.
        batch_size: Samples per step of the run that is resumed, if one is: the order of samples depends on it.

    Returns:
        The run with the plan's settings, and the plan with its rivals.

    Raises:
        UsageError: Nothing fits, or the machine's speeds are not known.
    """
    who, chooses_strategy = " ".join(spec.left_to_planner()), spec.chooses_strategy
    if spec["data.batch_size"] == AUTO and batch_size is not None:
        spec = spec.with_settings({"data.batch_size": batch_size})
    device, speeds = hardware_here()
    count, batch_size = spec.num_processes, spec["data.batch_size"]
    is_free = batch_size == AUTO
    model = spec.model.describe()
    search = Search(
        model,
        replace(run_of(spec, model), gradient_checkpointing=False),
        cluster_here(device, count, on_cpu=not spec.cuda_devices),
        speeds=speeds,
        batch_size=None if is_free else count * -(-batch_size // count),  # parts may differ by one sample
        micro_batches=range(1, max(num_samples(spec) // count, 1) + 1) if is_free else None,
        checkpointing=_recomputes(spec),
        candidates=None if chooses_strategy else [fixed(spec)],
        tf32=spec.speed.allow_tf32,
    )
    try:
        choice = Choice.of(search, who)
    except NothingFits as error:
        ours = (each.option for each in remedies(search, error.plans) if error.plans.too_large)
        helping = [option for option in ours if not option.startswith(("gpu", "host", "encoders"))]
        smaller = "write a smaller data.resolution, or take a larger GPU"
        raise error.with_remedy(f"write {' or '.join(helping)}" if helping else smaller) from None
    return with_plan(spec, choice.plan), choice


def with_plan(spec: RunSpec, plan: Plan) -> RunSpec:
    """Return a run with a plan's settings."""
    changes: dict[str, Any] = {
        "trainer.accumulate_grad_batches": plan.run.accumulate,
        "speed.gradient_checkpointing": plan.recompute,
    }
    if spec.chooses_strategy:
        changes["strategy"] = {**options("strategy")[plan.candidate.strategy], **plan.candidate.settings}
    if spec["data.batch_size"] == AUTO:
        changes["data.batch_size"] = plan.global_batch
    return spec.with_settings(changes)


def write(choice: Choice, run_dir: Path) -> None:
    """Write the plans into the run's folder, for its report."""
    data = record(choice.plans, title=choice.who, settings="of this run, in config.yaml")
    with new_file(run_dir / PLAN) as tmp:
        tmp.write_text(json.dumps(data, indent=1), encoding="utf-8")


def num_samples(spec: RunSpec) -> int:
    """Return the number of training samples, which a batch cannot exceed."""
    photos_only = {"class_prompts": None} if spec.get("data.class_prompts") else {}  # pictures are not drawn yet
    return int(spec.build("data", batch_size=spec.num_processes, **photos_only).num_train_samples)


def fixed(spec: RunSpec) -> Candidate:
    """Return the strategy of the run."""
    return Candidate("", lambda: engine_of(spec.strategy))


def _recomputes(spec: RunSpec) -> Recompute | None:
    """Return whether blocks recompute; None if the planner may choose."""
    names = {"speed.gradient_checkpointing", "gradient_checkpointing"}
    return spec["speed.gradient_checkpointing"] if names & spec.given else None
