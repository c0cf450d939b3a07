"""Trains the rungs of the ladder in turns, each as a run of the program; and predicts them for this machine."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from ladder import RUNGS, Climb, Machine, Rung
from ladder_forecast import Hardware, forecasts, predicted
from lines import Measured


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    architecture: str
    resolution: int
    """Side of the images, pixels."""
    photo_size: int
    """The same of the files."""
    batch_sizes: tuple[int, int]
    """Per device, before and after the rung "batch"."""
    steps: int
    """Of each run; the first one does not count."""
    photos: int = 512
    """Number of files."""

    @property
    def title(self) -> str:
        return f"{self.architecture} at {self.resolution} x {self.resolution}"

    @property
    def options(self) -> tuple[str, ...]:
        """Overrides that choose model and pictures."""
        return f"model={self.architecture}", f"data.resolution={self.resolution}", "data.center_crop=true"

    def batches(self, devices: int) -> tuple[int, int]:
        """Return the samples of a step on all devices, before and after the rung "batch"."""
        return self.batch_sizes[0] * devices, self.batch_sizes[1] * devices


_IN_MEMORY = Path("/dev/shm")
_ROOM = 40 * 10**9
"""Free bytes there that hold a run's checkpoint."""


Metrics = dict[str, float | list[float] | str]
NOTHING: Measured = {}


def measure(
    setting: Setting,
    *,
    rounds: int,
    processes: int = 2,
    rungs: Sequence[str] | None = None,
    done: Measured = NOTHING,
) -> Iterator[Metrics]:
    """Train the rungs that this machine can run, in turns; yield all metrics after each run.

    Args:
        setting: What is trained.
        rounds: Runs of each rung.
        processes: That train on a machine without a GPU.
        rungs: Names of those to run; all if not given.
        done: Metrics of a run that was stopped; rungs that it has are not run again.
    """
    from sd_lightning import LatentDiffusion

    machine = Machine.here(processes)
    chosen = [rung for rung in RUNGS if rungs is None or rung.name in rungs]
    about: Metrics = {"model": setting.title, "devices": machine.devices}
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if has_room else None) as folder:
        here = Path(folder)
        LatentDiffusion.build(setting.architecture).save_pretrained(here / "model")
        write_photos(here / "photos", setting.photos, setting.photo_size)
        pretrained = f"model.pretrained={here / 'model'}"
        if any(rung.is_stored for rung in chosen):
            precompute(here / "photos", here / "store", [*setting.options, pretrained])

        def way(count: int) -> Climb:
            options = (*setting.options, pretrained, f"trainer.max_steps={setting.steps}", f"trainer.devices={count}")
            return Climb(options, str(here / "photos"), str(here / "store"), setting.batches(count))

        climbing = climb(machine, way(machine.devices), here / "runs", rounds=rounds, rungs=chosen, done=done)
        for so_far in climbing:
            metrics, left_out = so_far
            yield {**metrics, **gained(metrics, chosen), **about}
        if machine.on_cuda and machine.devices > 1:
            metrics |= scaling(way, left_out, machine.devices, here / "runs")
            yield {**metrics, **gained(metrics, chosen), **about}


def forecast(
    setting: Setting, *, processes: int = 2, rungs: Sequence[str] | None = None, effort: Any = None
) -> Iterator[Metrics]:
    """Calibrate this machine, and predict the rungs that it can run; yield all metrics after each.

    Args:
        setting: What is trained.
        processes: That train on a machine without a GPU.
        rungs: Names of those to predict; all if not given.
        effort: How long the calibration may take.
    """
    from sd_lightning.planner.measuring import calibrate

    machine = Machine.here(processes)
    found = calibrate(date.today().isoformat(), effort)
    hardware = Hardware(found.device, found.speeds, machine.devices, on_cpu=not machine.on_cuda)
    chosen = [rung for rung in RUNGS if (rungs is None or rung.name in rungs) and not rung.lacks(machine)]
    left_out = [rung for rung in RUNGS if rung.lacks(machine) or (rung.aside_on_cpu and not machine.on_cuda)]

    def way(count: int) -> Climb:
        return Climb((*setting.options, f"trainer.devices={count}"), "photos", "latents", setting.batches(count))

    about: Metrics = {"speeds": found.speeds.source, "model": setting.title, "devices": machine.devices}
    metrics: Metrics = {}
    for metrics in forecasts(way(machine.devices), left_out, hardware, chosen):
        yield {**metrics, **about}
    if machine.on_cuda and machine.devices > 1:
        for count in counts(machine.devices):
            rate, _ = predicted(way(count).command(TOP, left_out), replace(hardware, count=count))
            metrics[f"scaling_{count}_predicted_images_per_second"] = rate
        yield {**metrics, **about}


def climb(
    machine: Machine,
    way: Climb,
    folder: Path,
    *,
    rounds: int,
    rungs: Sequence[Rung] = RUNGS,
    done: Measured = NOTHING,
) -> Iterator[tuple[Metrics, list[Rung]]]:
    """Train every rung that the machine can run, in turns.

    Args:
        machine: This one.
        way: What is the same on all rungs.
        folder: Where runs are written; each is deleted when it has been read.
        rounds: How often; in every other one from the top.
        rungs: To run.
        done: Metrics of rungs that are not run again.

    Yields:
        After each run, the metrics of every rung so far, with its command or the reason why it did not run; and the
        changes that rungs above do without.
    """
    aside = [rung for rung in RUNGS if rung.aside_on_cpu and not machine.on_cuda]
    lacking = {rung: why for rung in RUNGS if (why := rung.lacks(machine)) is not None}
    left_out = [rung for rung in RUNGS if rung in lacking or f"{rung.name}_skipped" in done]
    metrics: Metrics = {f"{rung.name}_skipped": why for rung, why in lacking.items() if rung in rungs} | dict(done)
    finished = [rung for rung in rungs if f"{rung.name}_images_per_second" in done]
    yield metrics, [*left_out, *aside]
    for number in range(rounds):
        running = [rung for rung in rungs if rung not in (*left_out, *finished)]
        for rung in running if number % 2 == 0 else reversed(running):
            options = way.command(rung, [*left_out, *aside])
            print(f"ladder: {' '.join(options)}", file=sys.stderr, flush=True)
            found = trained(options, folder / rung.name)
            if isinstance(found, str):
                left_out.append(rung)
                metrics[f"{rung.name}_skipped"] = found
            else:
                _add(metrics, rung, found)
                metrics[f"{rung.name}_command"] = shown(options)
            print(f"ladder: {rung.name} {found}", file=sys.stderr, flush=True)
            yield metrics, [*left_out, *aside]


def _add(metrics: Metrics, rung: Rung, found: Mapping[str, float]) -> None:
    for key, value in found.items():
        figures = metrics.setdefault(f"{rung.name}_{key}", [])
        assert isinstance(figures, list)
        figures.append(value)


TOP = next(rung for rung in RUNGS if rung.name == "latents")
"""The rung that is also run on fewer devices."""


def counts(devices: int) -> list[int]:
    """Return 1, 2, 4, … and at last all devices."""
    return [*(2**power for power in range(devices.bit_length()) if 2**power < devices), devices]


def scaling(
    way: Callable[[int], Climb], left_out: Sequence[Rung], devices: int, folder: Path
) -> dict[str, float | list[float] | str]:
    """Train the top on one device, then on twice as many until all.

    Args:
        way: Number of devices -> what is the same on all rungs.
        left_out: Changes that it does without.
        devices: How many there are.
        folder: Where runs are written.
    """
    metrics: dict[str, float | list[float] | str] = {}
    for count in counts(devices):
        found = trained(way(count).command(TOP, left_out), folder / f"scaling-{count}")
        if isinstance(found, str):
            metrics[f"scaling_{count}_skipped"] = found
        else:
            metrics[f"scaling_{count}_images_per_second"] = found["images_per_second"]
    return metrics


def shown(options: Sequence[str]) -> str:
    """Return the command of a rung, without the folders of this machine."""
    folders = {"data.train_data_dir": "photos", "data.store": "latents", "model.pretrained": "model"}
    words = [(key, folders.get(key, value)) for key, _, value in (each.partition("=") for each in options)]
    return "python -m sd_lightning.train " + " ".join(f"{key}={value}" for key, value in words)


def trained(options: Sequence[str], folder: Path) -> dict[str, float] | str:
    """Train by the program; return images per second, peak GB and waiting, or the last line of its error."""
    command = [sys.executable, "-W", "ignore", "-m", "sd_lightning.train", *options, f"output_dir={folder}"]
    done = subprocess.run([*command, "overwrite=true"], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr, flush=True)
        return "failed: " + (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    summary = json.loads((folder / "summary.json").read_text())
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return {
        "images_per_second": summary["images_per_second"],
        "gb": summary["peak_memory_gib"] * 2**30 / 1e9,
        "data_wait": summary["data_wait"],
    }


def write_photos(folder: Path, count: int, size: int) -> None:
    """Write JPEG files with captions: digits, with noise as a camera adds it."""
    import numpy as np
    from PIL import Image

    from sd_lightning.data.sources.digits import Digits

    folder.mkdir(parents=True)
    digits, random = Digits("train", size=size), np.random.default_rng(0)
    for i in range(count):
        pixels = np.asarray(digits.image(i)) + random.normal(0, 8, (size, size, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:04}.jpg", quality=90)
        (folder / f"{i:04}.txt").write_text(digits.captions(i)[0])


def precompute(photos: Path, store: Path, options: Sequence[str]) -> None:
    """Encode the photos by the program."""
    words = ["data=images", f"data.train_data_dir={photos}", f"store={store}", *options]
    subprocess.run([sys.executable, "-W", "ignore", "-m", "sd_lightning.precompute", *words], check=True)


def gained(metrics: Measured, rungs: Sequence[Rung] = RUNGS) -> dict[str, float]:
    """Return as "gained" how many times as fast as the first rung the fastest is; nothing if the first did not run."""
    rates = {
        rung.name: statistics.median(figures) if isinstance(figures, list) else float(figures)
        for rung in rungs
        if (figures := metrics.get(f"{rung.name}_images_per_second")) is not None
    }
    return {"gained": max(rates.values()) / rates[rungs[0].name]} if rungs[0].name in rates else {}
