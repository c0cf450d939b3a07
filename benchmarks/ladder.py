"""The ladder: one training, one change at a time. A rung is `experiment=ladder_<name>`, a file of conf/experiment.

Each rung holds the changes below it. One that a machine cannot run is left out there, and what it changes is taken
back for those above it.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lines import Measured

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent / "conf" / "experiment"


@dataclass(frozen=True)
class Machine:
    """What decides which rungs run."""

    on_cuda: bool
    devices: int
    """GPUs; of a CPU the processes that train."""
    has_tf32: bool
    has_bf16: bool

    @classmethod
    def here(cls, processes: int) -> "Machine":
        """Look at this machine.

        Args:
            processes: That train on a machine without a GPU.
        """
        import torch

        if torch.cuda.is_available():
            is_ampere = torch.cuda.get_device_capability()[0] >= 8
            return cls(True, torch.cuda.device_count(), is_ampere, is_ampere)
        return cls(False, processes, False, re.search(r"\b(avx512_bf16|amx_bf16)\b", _cpu_flags()) is not None)


def _cpu_flags() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


Lacks = Callable[[Machine], str | None]
"""Machine -> why it cannot run a rung, or None."""


def _tf32(machine: Machine) -> str | None:
    where = "this GPU is older than Ampere and has" if machine.on_cuda else "a CPU has"
    return None if machine.has_tf32 else f"{where} no arithmetic in TensorFloat-32"


def _bf16(machine: Machine) -> str | None:
    where = "this GPU is older than Ampere and has" if machine.on_cuda else "this CPU has"
    return None if machine.has_bf16 else f"{where} no arithmetic in bfloat16"


def _several(machine: Machine) -> str | None:
    return None if machine.devices > 1 else "one GPU: there is nothing to share with"


def _tunes(machine: Machine) -> str | None:
    return None if machine.on_cuda else "on a CPU inductor has no such kernels to choose from"


def _nothing(machine: Machine) -> str | None:
    return None


@dataclass(frozen=True)
class Rung:
    """One change."""

    name: str
    title: str
    lacks: Lacks = _nothing
    undone: tuple[str, ...] = ()
    """Overrides that take the change back for the rungs above."""

    @property
    def is_stored(self) -> bool:
        """Whether it reads latents from a store."""
        return self.name in _FROM_STORE

    @property
    def file(self) -> Path:
        return EXPERIMENTS / f"ladder_{self.name}.yaml"

    @property
    def change(self) -> str:
        """What it changes, as its file says."""
        found = re.search(r"^# [^:\n]*: (.+?)\.(?: |$)", self.file.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is not None, f"{self.file.name} says nothing after a colon"
        return found[1]


_ONE_STRATEGY = ("strategy=ddp",)
RUNGS = (
    Rung("baseline", "float32"),
    Rung("tf32", "TF32", _tf32, ("speed.allow_tf32=false",)),
    Rung("bf16", "bfloat16", _bf16, ("trainer.precision=32-true", "module.encoder_dtype=float32")),
    Rung("loader", "loader", undone=("data.num_workers=0",)),
    Rung("adamw", "fused AdamW", undone=("optimizer.fused=false",)),
    Rung("fused_layers", "fused layers", undone=("speed.compile_blocks=false",)),
    Rung("flash", "flash attention", undone=("speed.attention=math",)),
    Rung("batch", "larger batch"),
    Rung("ema", "fused EMA", undone=("callbacks=weight_averaging",)),
    Rung("zero2", "ZeRO-2", _several, _ONE_STRATEGY),
    Rung("fsdp", "FSDP2", _several, _ONE_STRATEGY),
    Rung("latents", "stored latents"),
    Rung("compile", "tuned kernels", _tunes, ("speed.compile_mode=default",)),
)
_FROM_STORE = ("latents", "compile")
_LARGER = tuple(rung.name for rung in RUNGS[[rung.name for rung in RUNGS].index("batch") :])


@dataclass(frozen=True)
class Climb:
    """What is the same on all rungs."""

    options: tuple[str, ...]
    """Overrides."""
    photos: str
    """Folder of images with captions."""
    store: str
    """Of their latents."""
    batch_sizes: tuple[int, int]
    """Before and after the rung "batch"."""

    def command(self, rung: Rung, left_out: Sequence[Rung]) -> list[str]:
        """Return the overrides that run a rung, without those of others that cannot run."""
        below = RUNGS[: RUNGS.index(rung)]
        # FSDP2 stands beside ZeRO-2, and has a strategy of its own.
        undone = [each for each in left_out if each in below and not (rung.name == "fsdp" and each.name == "zero2")]
        data = [f"data.store={self.store}"] if rung.is_stored else [f"data.train_data_dir={self.photos}"]
        batch = self.batch_sizes[rung.name in _LARGER]
        changes = dict.fromkeys(change for each in undone for change in each.undone)
        return [f"experiment=ladder_{rung.name}", *changes, *self.options, *data, f"data.batch_size={batch}"]


def climb(
    machine: Machine, way: Climb, folder: Path, *, rounds: int, rungs: Sequence[Rung] = RUNGS
) -> tuple[Measured, list[Rung]]:
    """Train every rung that the machine can run, in turns.

    Args:
        machine: This one.
        way: What is the same on all rungs.
        folder: Where runs are written; each is deleted when it has been read.
        rounds: How often; in every other one from the top.
        rungs: To run.

    Returns:
        Metrics of every rung, with its command or the reason why it did not run; and those that did not.
    """
    left_out = []
    metrics: dict[str, float | list[float] | str] = {}
    for rung in rungs:
        why = rung.lacks(machine)
        if why is not None:
            left_out.append(rung)
            metrics[f"{rung.name}_skipped"] = why
    for number in range(rounds):
        running = [rung for rung in rungs if rung not in left_out]
        for rung in running if number % 2 == 0 else reversed(running):
            options = way.command(rung, left_out)
            print(f"ladder: {' '.join(options)}", file=sys.stderr, flush=True)
            found = trained(options, folder / rung.name)
            if isinstance(found, str):
                left_out.append(rung)
                metrics[f"{rung.name}_skipped"] = found
                continue
            metrics[f"{rung.name}_command"] = shown(options)
            for key, value in found.items():
                metrics.setdefault(f"{rung.name}_{key}", [])
                figures = metrics[f"{rung.name}_{key}"]
                assert isinstance(figures, list)
                figures.append(value)
            print(f"ladder: {rung.name} {found}", file=sys.stderr, flush=True)
    return metrics, left_out


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


@dataclass(frozen=True)
class Hardware:
    """What predictions are for."""

    device: Any
    """A `planner.devices.Device`."""
    speeds: Any
    """A `planner.roofline.Speeds`."""
    count: int
    on_cpu: bool = False


def predicted(options: Sequence[str], hardware: Hardware) -> tuple[float, float]:
    """Return the planner's images per second, and GB of a process at its peak."""
    from sd_lightning import _conf
    from sd_lightning.apps.planning import described, run_of
    from sd_lightning.apps.preflight import Parts
    from sd_lightning.planner.candidates import Candidate
    from sd_lightning.planner.here import cluster_here
    from sd_lightning.planner.search import Cluster, Search
    from sd_lightning.strategies import engine_of

    cfg = composed(options)
    parts, model, count = Parts.build(cfg), described(cfg), hardware.count
    cluster, speeds = Cluster(hardware.device, count), hardware.speeds
    if hardware.on_cpu:
        cluster, speeds = cluster_here(hardware.device, speeds, count, on_cpu=True)
    run = run_of(cfg, parts, model, count)
    candidate = Candidate("", lambda **_: engine_of(_conf.instantiate(cfg.strategy)))
    search = Search(
        model,
        replace(run, sample_batch_size=0),
        replace(cluster, host_memory=2**50),
        speeds=speeds,
        batch_size=cfg.data.batch_size,
        micro_batches=[run.batch_size],
        checkpointing=False,
        candidates=[candidate],
        tf32=cfg.speed.allow_tf32,
    )
    with explicit_attention() if cfg.speed.attention == "math" else nullcontext():
        found = search.plans()
    if found.missing:
        raise RuntimeError(f"{options[0]}: {found.missing[0]}")
    (plan,) = found.best or found.too_large
    return plan.images_per_second, (plan.memory.device + plan.memory.host * hardware.on_cpu) / 1e9


def composed(options: Sequence[str]) -> Any:
    """Return the configuration that these overrides of `train` compose."""
    from sd_lightning import _conf
    from sd_lightning.train import PROGRAM

    received: list[Any] = []
    with patch.object(sys, "argv", ["train", *options]):
        _conf.main(replace(PROGRAM, task=received.append))
    return received[0]


@contextmanager
def explicit_attention() -> Iterator[None]:
    """Let traced attention write the matrix of its weights, as torch's math kernel does."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    def explicit(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        weights = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)).softmax(-1)
        return torch.matmul(weights.to(value.dtype), value)

    with patch.object(F, "scaled_dot_product_attention", explicit):
        yield


def forecasts(way: Climb, left_out: Sequence[Rung], hardware: Hardware, rungs: Sequence[Rung] = RUNGS) -> Measured:
    """Return the planner's figures of the rungs that run; a rung that it does not know has those of the one below."""
    metrics: dict[str, float | list[float] | str] = {}
    for rung in rungs:
        if rung not in left_out:
            rate, memory = predicted(way.command(rung, left_out), hardware)
            metrics |= {f"{rung.name}_predicted_images_per_second": rate, f"{rung.name}_predicted_gb": memory}
    return metrics


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


def table(metric: str) -> str:
    """Return the figures of a row of a case's table: a metric of every rung."""
    return "; ".join(f"{{{rung.name}_{metric}}}" for rung in RUNGS)


TITLES = "; ".join(rung.title for rung in RUNGS)


def rows(what: str) -> dict[str, str]:
    """Return the rows of a case that trains the rungs."""
    return {
        f"{what}, images per second of {TITLES}": table("images_per_second"),
        f"{what}, the same, as predicted": table("predicted_images_per_second"),
        f"{what}, peak GB of a process, in this order": table("gb"),
        f"{what}, these peaks, predicted": table("predicted_gb"),
    }


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


_IN_MEMORY = Path("/dev/shm")
_ROOM = 40 * 10**9
"""Free bytes there that hold a run's checkpoint."""


def measure(
    setting: Setting, *, rounds: int, processes: int = 2, rungs: Sequence[str] | None = None, effort: Any = None
) -> Measured:
    """Train the rungs that this machine can run, in turns, and predict them.

    Args:
        setting: What is trained.
        rounds: Runs of each rung.
        processes: That train on a machine without a GPU.
        rungs: Names of those to run; all if not given.
        effort: How long the calibration may take.
    """
    from sd_lightning import LatentDiffusion
    from sd_lightning.planner.calibration import calibrate

    machine, resolution = Machine.here(processes), setting.resolution
    chosen = [rung for rung in RUNGS if rungs is None or rung.name in rungs]
    calibrated = calibrate(date.today().isoformat(), effort)
    hardware = Hardware(calibrated.device, calibrated.speeds, machine.devices, on_cpu=not machine.on_cuda)
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if has_room else None) as folder:
        here = Path(folder)
        LatentDiffusion.build(setting.architecture).save_pretrained(here / "model")
        write_photos(here / "photos", setting.photos, setting.photo_size)
        options = [f"model={setting.architecture}", f"model.pretrained={here / 'model'}"]
        options += [f"data.resolution={resolution}", "data.center_crop=true"]
        if any(rung.is_stored for rung in chosen):
            precompute(here / "photos", here / "store", options)
        options += [f"trainer.max_steps={setting.steps}", f"trainer.devices={machine.devices}"]
        small, large = (size * machine.devices for size in setting.batch_sizes)
        way = Climb(tuple(options), str(here / "photos"), str(here / "store"), (small, large))
        metrics, left_out = climb(machine, way, here / "runs", rounds=rounds, rungs=chosen)
        told = forecasts(way, left_out, hardware, chosen)
    described = {"model": f"{setting.architecture} at {resolution} x {resolution}", "speeds": hardware.speeds.source}
    return {**metrics, **told, **described, "gained": gained(metrics, chosen), "devices": machine.devices}


def gained(metrics: Measured, rungs: Sequence[Rung] = RUNGS) -> float:
    """Return how many times as fast as the first rung the fastest is."""
    rates = {
        rung.name: statistics.median(figures)
        for rung in rungs
        if isinstance(figures := metrics.get(f"{rung.name}_images_per_second"), list)
    }
    return max(rates.values()) / rates[rungs[0].name]
