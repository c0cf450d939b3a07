"""Runs that a launcher starts on other machines: checks of what crosses to them, and what each start begins from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.data.sampler import check_division
from sd_lightning.remote import training
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage import checkpoint
from sd_lightning.storage.atomic import check_place
from sd_lightning.storage.runs import check_output_dir
from sd_lightning.strategies.base import RunSettings, engine_of


@dataclass(frozen=True)
class _Start:
    """Trains on a worker; it can be sent there."""

    spec: RunSpec
    run: Callable[..., int]
    before: frozenset[tuple[str, int]]
    """Checkpoints that were there before the launch."""

    def __call__(self, *, devices: int, num_nodes: int, is_restart: bool, asked: Callable[[], bool]) -> int:
        changes: dict[str, Any] = {"trainer.devices": devices, "trainer.num_nodes": num_nodes}
        if is_restart and not _saved(self.spec.output_dir) <= self.before:
            changes |= {"resume": AUTO, "overwrite": False}  # else it begins as at first
        return self.run(self.spec.with_settings(changes), asked=asked)


def _saved(run_dir: Path) -> frozenset[tuple[str, int]]:
    """Return the names and times of a run's checkpoints."""
    return frozenset((path.name, path.stat().st_mtime_ns) for path in checkpoint.all_checkpoints(run_dir))


def _position(run_dir: Path) -> str:
    saved = checkpoint.all_checkpoints(run_dir)
    return f"from step {checkpoint.step_of(saved[-1])}" if saved else "from the start"


def launch(spec: RunSpec, launcher: Ray, run: Callable[..., int]) -> int:
    """Run a training program's run on the workers of a Ray cluster.

    Args:
        spec: The run.
        launcher: Workers and their number.
        run: Trains; gets the run and ``asked``, and returns the exit code.

    Returns:
        The exit code.

    Raises:
        UsageError: The run does not fit the number of workers; see :func:`sd_lightning.remote.training.launch`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"launcher=ray: another launcher has started {os.environ['WORLD_SIZE']} processes already; start the "
            "program once, without torchrun or srun, or leave launcher=ray out"
        )
    _check_number(spec, launcher)
    check_place(spec["output_dir"], key="output_dir")
    spec = spec.with_absolute_paths()
    check_output_dir(spec.output_dir, resuming=spec["resume"] is not None, overwrite=spec["overwrite"], reads={})
    return training.launch(
        launcher,
        _Start(spec, run, _saved(spec.output_dir)),
        folder=spec.output_dir,
        on_gpus=spec["trainer.accelerator"] in ("auto", "gpu", "cuda"),
        position=partial(_position, spec.output_dir),
    )


def _check_number(spec: RunSpec, launcher: Ray) -> None:
    """Check the number of workers against the batch, the strategy and the number of devices."""
    least, most = launcher.worker_range
    given = {"trainer.devices", "trainer.num_nodes"} & spec.overridden
    if given and not (least == most == spec.num_processes):
        raise UsageError(
            f"launcher.num_workers={launcher.num_workers}: {' '.join(f'{key}={spec[key]}' for key in sorted(given))} "
            f"ask(s) for {spec.num_processes} process(es); launcher.num_workers is the number of processes on all "
            f"machines; leave {' and '.join(sorted(given))} out"
        )
    channels_last, batch_size = spec.get("speed.channels_last", False), spec["data.batch_size"]
    try:
        if not spec.chooses_strategy:
            settings = RunSettings(str(spec["trainer.precision"]), most, 1, channels_last=channels_last)
            engine_of(spec.strategy).check_settings(settings)
        if batch_size != AUTO:
            check_division(batch_size, most, spec["trainer.accumulate_grad_batches"])
    except UsageError as error:
        raise UsageError(f"launcher.num_workers={launcher.num_workers}: {error}") from error
