"""Runs that a launcher starts on other machines: checks of what crosses to them, and what each start begins from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.data.sampler import check_division
from sd_lightning.remote import training
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage import checkpoint, far_runs
from sd_lightning.storage.atomic import check_place
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.runs import check_output_dir
from sd_lightning.storage.uploads import whole_steps
from sd_lightning.strategies.base import RunSettings, engine_of


@dataclass(frozen=True)
class _Start:
    """Trains on a worker; it can be sent there."""

    spec: RunSpec
    run: Callable[..., int]
    before: frozenset[tuple[int, int]]
    """Checkpoints that were there before the launch."""

    def __call__(self, *, devices: int, num_nodes: int, is_restart: bool, asked: Callable[[], bool]) -> int:
        changes: dict[str, Any] = {"trainer.devices": devices, "trainer.num_nodes": num_nodes}
        if is_restart and not _saved(self.spec) <= self.before:
            changes |= {"resume": AUTO, "overwrite": False}  # else it begins as at first
        return self.run(self.spec.with_settings(changes), asked=asked)


def _saved(spec: RunSpec) -> frozenset[tuple[int, int]]:
    """Return the steps of a run's checkpoints, with their times if they are in its folder, and those in its bucket."""
    paths = checkpoint.all_checkpoints(spec.output_dir)
    saved = {(checkpoint.step_of(path), path.stat().st_mtime_ns) for path in paths}
    if spec.url is not None:
        entries = open_location(spec.url, key="output_dir").entries("checkpoints/")
        saved |= {(step, 0) for step in whole_steps(entry.name for entry in entries)}
    return frozenset(saved)


def _position(spec: RunSpec) -> str:
    try:
        saved = _saved(spec)
    except UsageError:  # the bucket does not answer now
        return "from its newest checkpoint"
    return f"from step {max(saved)[0]}" if saved else "from the start"


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
    if spec.url is None:
        check_place(spec["output_dir"], key="output_dir")
        spec = spec.with_absolute_paths()
        check_output_dir(spec.output_dir, resuming=spec["resume"] is not None, overwrite=spec["overwrite"], reads={})
    elif spec["overwrite"]:
        raise UsageError(
            f"launcher=ray: output_dir={spec.url} overwrite=true: a start after a worker's death could not tell the "
            "old run's checkpoints from its own; delete that run, or choose another output_dir"
        )
    else:
        spec = spec.with_absolute_paths()
        os.environ.setdefault(far_runs.CACHE, str(far_runs.cache()))  # by it workers know that the folder is a URL's
    return training.launch(
        launcher,
        _Start(spec, run, _saved(spec)),
        folder=spec.output_dir,
        on_gpus=spec["trainer.accelerator"] in ("auto", "gpu", "cuda"),
        position=partial(_position, spec),
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
