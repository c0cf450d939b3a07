"""``strategy=auto`` and ``data.batch_size=auto``: the planner's choice, written into the configuration of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning.apps.plan_record import record
from sd_lightning.apps.planning import check_predictable, described, run_of
from sd_lightning.apps.trainer_checks import AUTO, AUTO_STRATEGY, cuda_devices, left_to_planner, num_processes
from sd_lightning.planner.candidates import Candidate
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.here import cluster_here, hardware_here
from sd_lightning.planner.remedies import remedies
from sd_lightning.planner.search import Plan, Plans, Search
from sd_lightning.storage.atomic import new_file
from sd_lightning.storage.run_folder import PLAN
from sd_lightning.strategies import engine_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sd_lightning.apps.preflight import Parts

_RIVALS = 3
_SAFER = 0.9
"""Part of the memory that a plan may take after one ran out of memory."""


@dataclass(frozen=True)
class Chosen:
    """The plan of a run."""

    plans: Plans
    """The first one is that of the run."""
    search: Search
    who: str
    """The settings that the planner chose for: "strategy=auto"."""

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.plans.best[0]

    def lines(self) -> list[str]:
        """Return the choice and its best rivals as lines of text."""
        cluster = self.plans.cluster
        times = f"seconds {self.plans.speeds.provenance}"
        first = f"{self.who} on {cluster.count} x {cluster.device.name}, {times}: "
        told = [_told(plan) for plan in self.plans.best[: 1 + _RIVALS]]
        return [first + told[0], *(f"  rival: {each}" for each in told[1:])]

    def write(self, run_dir: Path) -> None:
        """Write the plans into the run's folder, for its report."""
        data = record(self.plans, title=self.who, settings="of this run, in config.yaml")
        with new_file(run_dir / PLAN) as tmp:
            tmp.write_text(json.dumps(data, indent=1), encoding="utf-8")

    def out_of_memory(self) -> UsageError:
        """Return the error of a run that ran out of the device's memory, with a plan that takes less."""
        plan, cluster = self.plan, self.plans.cluster
        safer = self.search.within(int(_SAFER * plan.memory.device)).plans().best
        remedy = f"write {' '.join(safer[0].options())}" if safer else "no plan takes less; train on a larger GPU"
        return UsageError(
            f"{self.who}: out of memory with {' '.join(plan.options())}; {cluster.memory / GB:.1f} GB should be "
            f"usable, and predicted were {plan.memory.device_phase.line().strip()}; {remedy}"
        )


def _told(plan: Plan) -> str:
    each = " on each" if plan.cluster.count > 1 else ""
    batch = f"{plan.run.accumulate} x " * (plan.run.accumulate > 1) + f"{plan.run.batch_size} samples a step{each}"
    recomputed = {False: "", True: ", all blocks recomputed", "auto": ", some blocks recomputed"}[plan.recompute]
    memory = f"{plan.memory.device / GB:.1f} GB, {plan.memory.host / GB:.1f} GB of host memory"
    time = f"{plan.time.total:.3g} s a step, {plan.images_per_second:.3g} img/s"
    return f"{plan.candidate.name}, {batch}{recomputed}: {memory}, {time}"


def check(cfg: DictConfig) -> None:
    """Check that nothing contradicts what the configuration leaves to the planner.

    Raises:
        UsageError: Something does.
    """
    who, given = " ".join(left_to_planner(cfg)), _conf.overridden_keys()
    passes = "trainer.accumulate_grad_batches"
    if passes in given and cfg.trainer.accumulate_grad_batches != 1:
        raise UsageError(
            f"{who} got {passes}={cfg.trainer.accumulate_grad_batches}, which it chooses itself, so that "
            f"data.batch_size samples make a step; leave {passes} out"
        )
    limit = cfg.speed.gradient_checkpointing
    if not isinstance(limit, bool | str):
        raise UsageError(
            f"{who} got speed.gradient_checkpointing={limit}, a limit beside the memory of the GPU; expected true, "
            "false or auto; leave it out, and as little is recomputed as fits"
        )
    if torch.cuda.is_available() and not cuda_devices(cfg):
        raise UsageError(
            f"{who} got trainer.accelerator={cfg.trainer.accelerator}, and plans for this machine's GPU; write a "
            "strategy and a batch size, or leave trainer.accelerator out"
        )
    if cfg.trainer.num_nodes > 1:
        raise UsageError(
            f"{who} got trainer.num_nodes={cfg.trainer.num_nodes}, and the planner knows the GPUs of one machine only; "
            "write a strategy, e.g. strategy=fsdp, and data.batch_size=<n>"
        )
    check_predictable(cfg, who, "a strategy, e.g. strategy=gemini, and data.batch_size=<n>")


def choose(cfg: DictConfig, parts: Parts, *, batch_size: int | None) -> Chosen:
    """Choose what a run leaves to the planner, and write it into the configuration.

    Args:
        cfg: The configuration; it is changed.
        parts: Built from it.
        batch_size: Samples per step of the run that is resumed, if one is.

    Returns:
        The plan and its rivals.

    Raises:
        UsageError: Nothing fits, or the machine's speeds are not known.
    """
    who = " ".join(left_to_planner(cfg))
    device, speeds = hardware_here()
    count = num_processes(cfg)
    if cfg.data.batch_size == AUTO and batch_size is not None:
        cfg.data.batch_size = batch_size  # the order of samples depends on it
    is_free = cfg.data.batch_size == AUTO
    model = described(cfg)
    cluster = cluster_here(device, count, on_cpu=not cuda_devices(cfg))
    search = Search(
        model,
        replace(run_of(cfg, parts, model, count), gradient_checkpointing=False),
        cluster,
        speeds=speeds,
        batch_size=None if is_free else count * -(-cfg.data.batch_size // count),  # parts may differ by one sample
        micro_batches=range(1, max(num_samples(cfg, count) // count, 1) + 1) if is_free else None,
        checkpointing=_recomputes(cfg),
        candidates=None if cfg.strategy["_target_"] == AUTO_STRATEGY else [fixed(cfg)],
        tf32=parts.speed.allow_tf32,
    )
    found = search.plans()
    if not found.best:
        raise _nothing_fits(who, search, found)
    chosen = Chosen(found, search, who)
    apply(cfg, chosen.plan)
    return chosen


def apply(cfg: DictConfig, plan: Plan) -> None:
    """Write a plan into a configuration."""
    if cfg.strategy["_target_"] == AUTO_STRATEGY:
        candidate = plan.candidate
        preset = OmegaConf.load(Path(_conf.config_dir(), "strategy", f"{candidate.strategy}.yaml"))
        cfg.strategy = OmegaConf.merge(preset, dict(candidate.settings))
    if cfg.data.batch_size == AUTO:
        cfg.data.batch_size = plan.global_batch
    cfg.trainer.accumulate_grad_batches = plan.run.accumulate
    cfg.speed.gradient_checkpointing = plan.recompute


def num_samples(cfg: DictConfig, count: int) -> int:
    """Return the number of training samples, which a batch cannot exceed."""
    photos_only = {"class_prompts": None} if cfg.data.get("class_prompts") else {}  # pictures are not drawn yet
    return int(_conf.instantiate(cfg.data, batch_size=count, **photos_only).num_train_samples)


def fixed(cfg: DictConfig) -> Candidate:
    """Return the strategy of the configuration."""
    return Candidate("", lambda: engine_of(_conf.instantiate(cfg.strategy)))


def _recomputes(cfg: DictConfig) -> Any:
    """Return whether blocks recompute; None if the planner may choose."""
    names = {"speed.gradient_checkpointing", "gradient_checkpointing"}
    return cfg.speed.gradient_checkpointing if names & _conf.overridden_keys() else None


def _nothing_fits(who: str, search: Search, found: Plans) -> UsageError:
    cluster = found.cluster
    machine = f"{cluster.count} x {cluster.device.name}"
    if not found.too_large:
        reasons = "; ".join(found.missing)
        return UsageError(
            f"{who} on {machine}: no strategy can be planned: {reasons}; write a strategy and a batch size"
        )
    closest = found.too_large[0]
    options = [
        each.option for each in remedies(search, found) if not each.option.startswith(("gpu", "host", "encoders"))
    ]
    remedy = f"write {' or '.join(options)}" if options else "write a smaller data.resolution, or take a larger GPU"
    return UsageError(
        f"{who} on {machine}: nothing fits with {closest.run.batch_size} sample(s) per pass; the closest, "
        f"{' '.join(closest.candidate.options)}, lacks {closest.lacks}; {remedy}"
    )
