"""Runs that a launcher starts on other machines: checks of what crosses to them, and what each start begins from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning._launchers import num_started_processes
from sd_lightning.apps.preflight import settings_of
from sd_lightning.apps.run_spec import AUTO, RunSpec
from sd_lightning.data.sampler import check_division
from sd_lightning.remote import training
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage import checkpoint, far_runs
from sd_lightning.storage.atomic import check_place
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.runs import check_output_dir
from sd_lightning.storage.uploads import whole_steps
from sd_lightning.strategies import engine_of


@dataclass(frozen=True)
class _Start:
    """Trains on a worker; it can be sent there."""

    spec: RunSpec
    run: Callable[..., int]
    before: Mapping[str, object]
    """Checkpoints that were there before the launch, which a new start does not resume by itself."""

    def __call__(self, *, devices: int, num_nodes: int, is_restart: bool, asked: Callable[[], bool]) -> int:
        changes: dict[str, Any] = {"trainer.devices": devices, "trainer.num_nodes": num_nodes}
        newest = self.newest() if is_restart else None
        if newest is not None:  # else it begins as at first
            goes_back = self.spec["resume"] not in (None, AUTO)  # later ones may not be set aside in the bucket yet
            changes |= {"resume": newest if goes_back else AUTO, "overwrite": False}
        return self.run(self.spec.with_settings(changes), asked=asked)

    def newest(self) -> str | None:
        """Return the newest checkpoint of this launch."""
        new = [place for place, digest in _saved(self.spec).items() if self.before.get(place) != digest]
        return max(new, key=checkpoint.step_of, default=None)

    def position(self) -> str:
        """Return from where a new start goes on."""
        try:
            newest = self.newest()
        except UsageError:  # the bucket does not answer now
            return "from its newest checkpoint"
        start = self.spec["resume"] if self.spec["resume"] not in (None, AUTO) else "the start"
        return f"from {start}" if newest is None else f"from step {checkpoint.step_of(newest)}"


def _saved(spec: RunSpec) -> dict[str, object]:
    """Return the checkpoints of a run, in its folder and in its bucket, each with what differs if it is saved anew."""
    paths = checkpoint.all_checkpoints(spec.output_dir)
    saved: dict[str, object] = {str(path): checkpoint.manifest_digest(path) for path in paths}
    if spec.url is not None:
        location = open_location(spec.url, key="output_dir")
        for step in whole_steps(entry.name for entry in location.entries("checkpoints/")):
            path = checkpoint.checkpoint_path("", step)
            saved[f"{spec.url}/{path}"] = location.read(f"{path}/{checkpoint.MANIFEST_NAME}")
    return {place: digest for place, digest in saved.items() if digest is not None}  # None: it is being deleted


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
    started = num_started_processes()
    if started > 1:
        raise UsageError(
            f"launcher=ray: another launcher has started {started} processes already; start the program once, without "
            "torchrun, or with srun --nodes=1 --ntasks=1, or leave launcher=ray out"
        )
    _check_number(spec, launcher)
    if spec.url is None:
        check_place(spec["output_dir"], key="output_dir")
        spec = spec.with_absolute_paths()
        folder = spec.output_dir
        check_output_dir(folder, resuming=spec["resume"] is not None, overwrite=spec["overwrite"], reads={})
    else:
        spec, folder = spec.with_absolute_paths(), far_runs.cache()
        os.environ.setdefault(far_runs.CACHE, str(folder))  # by it workers know that the run's folder is a URL's
    start = _Start(spec, run, {} if spec["resume"] == AUTO else _saved(spec))
    on_gpus = spec["trainer.accelerator"] in ("auto", "gpu", "cuda")
    return training.launch(launcher, start, folder=folder, on_gpus=on_gpus, position=start.position)


def _check_number(spec: RunSpec, launcher: Ray) -> None:
    """Check the number of workers against the batch, the strategy and the number of devices."""
    most = launcher.worker_range[1]
    for key in sorted({"trainer.devices", "trainer.num_nodes"} & spec.overridden):
        raise UsageError(
            f"launcher.num_workers={launcher.num_workers} is the number of processes on all machines; leave "
            f"{key}={spec[key]} out"
        )
    try:
        if not spec.chooses_strategy:
            engine_of(spec.strategy).check_settings(settings_of(spec, most))
        if spec["data.batch_size"] != AUTO:
            check_division(spec["data.batch_size"], most, spec["trainer.accumulate_grad_batches"])
    except UsageError as error:
        raise UsageError(f"launcher.num_workers={launcher.num_workers}: {error}") from error
