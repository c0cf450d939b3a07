"""What a run's folder says about the run, for a comparison with others."""

from __future__ import annotations

import csv
import difflib
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.apps.settings import preset_name
from sd_lightning.report.metrics import Series, read_metrics, smoothed
from sd_lightning.storage import runs
from sd_lightning.storage.untrusted import read_json, read_yaml

RATE, PEAK, LOSS = "perf/images_per_second", "perf/peak_memory_gib", "train/loss"


@dataclass(frozen=True)
class Run:
    """A run, as its folder tells it; None and empty curves stand for what is not known."""

    name: str
    config: Mapping[str, Any]
    """Resolved; empty if the run kept none."""
    is_finished: bool
    """Whether it wrote its summary."""
    strategy: str | None
    devices: int | None
    """Processes, of which each has one device."""
    precision: str | None
    batch_size: int | None
    """Samples per optimizer step, on all devices together."""
    hardware: str | None
    date: str | None
    """Of its end, ISO 8601."""
    torch: str | None
    images_per_second: float | None
    """On all devices: the median of the values logged after the first; the run's mean if none were."""
    quartiles: tuple[float, float] | None
    """Of these values; None for fewer than four."""
    peak_gib: float | None
    """Of the first rank's device; of its process on a CPU."""
    losses: Series
    """Step, counted from 1, and loss."""
    rates: Series
    """Step, counted from 1, and images per second."""

    @property
    def is_measured(self) -> bool:
        """Whether there is anything to compare."""
        return self.images_per_second is not None or self.peak_gib is not None or bool(self.losses)

    @property
    def final_loss(self) -> float | None:
        """Last value of the smoothed loss."""
        return smoothed(self.losses)[-1][1] if self.losses else None

    @property
    def last_step(self) -> int | None:
        """Step of the last logged loss."""
        return self.losses[-1][0] if self.losses else None

    @property
    def model(self) -> str | None:
        """Pretrained weights or architecture."""
        section = _section(self.config, "model")
        found = section.get("pretrained") or section.get("architecture") or preset_name("model", section)
        return None if found is None else str(found)

    @property
    def data(self) -> str | None:
        """Kind of the data, and where it lies."""
        section = _section(self.config, "data")
        places = ("train_data_dir", "dataset_name", "store", "instance_data_dir")
        place = next((str(section[key]) for key in places if section.get(key)), None)
        kind = (preset_name("data", section) or "").split(" ")[0]
        return " ".join(filter(None, (kind, place))) or None

    @property
    def resolution(self) -> str | None:
        """Side of the images."""
        side = _section(self.config, "data").get("resolution")
        return f"{side} x {side} pixels" if isinstance(side, int) else None


def read_runs(given: Sequence[str]) -> list[Run]:
    """Read runs from their folders.

    Raises:
        UsageError: One is no run, is given twice or has a damaged file; or fewer than two have anything to compare.
    """
    folders = [_folder(each) for each in given]
    if len(folders) < 2:
        told = f"one run, {given[0]}" if given else "no runs"
        raise UsageError(
            f"compare got {told}; expected at least two; write python -m sd_lightning.compare runs/one runs/two"
        )
    places: dict[Path, str] = {}
    for text, folder in zip(given, folders):
        if folder.resolve() in places:
            other = places[folder.resolve()]
            same = f"{text} twice" if other == text else f"{other} and {text}, which are the same run"
            raise UsageError(f"compare got {same}; expected different runs; leave one out")
        places[folder.resolve()] = text
    runs = [read_run(folder, name) for folder, name in zip(folders, _names(folders))]
    if sum(run.is_measured for run in runs) < 2:
        without = ", ".join(text for text, run in zip(given, runs) if not run.is_measured)
        raise UsageError(
            f"compare found no metrics in {without}: neither logs/**/metrics.csv with values nor figures in "
            "summary.json; expected at least two runs with some; let them train to trainer.log_every_n_steps, or give "
            "others"
        )
    return runs


def read_run(folder: Path, name: str) -> Run:
    """Read a run from its folder.

    Raises:
        UsageError: A file is damaged.
    """
    config, summary = _config(folder / "config.yaml"), _json(folder / "summary.json")
    plan, metrics = _json(folder / runs.PLAN), _metrics(folder)
    rates = _finite(metrics.get(RATE, ()))
    values = [rate for _, rate in rates[1:] or rates if rate > 0]  # the first is of a machine that warms up
    peaks = [peak for _, peak in _finite(metrics.get(PEAK, ())) if peak > 0]
    trainer = _section(config, "trainer")
    precision = summary.get("precision") or trainer.get("precision")
    return Run(
        name=name,
        config=config,
        is_finished=bool(summary),
        strategy=_text(summary.get("strategy")) or preset_name("strategy", config.get("strategy")),
        devices=_count(summary.get("devices")) or _devices(trainer),
        precision=None if precision is None else str(precision),
        batch_size=_count(summary.get("batch_size")) or _count(_section(config, "data").get("batch_size")),
        hardware=_text(summary.get("hardware")) or _text(plan.get("device")),
        date=_text(summary.get("date")),
        torch=_text(summary.get("torch")),
        images_per_second=statistics.median(values) if values else _positive(summary.get("images_per_second")),
        quartiles=_quartiles(values),
        peak_gib=max(peaks) if peaks else _positive(summary.get("peak_memory_gib")),
        losses=_finite(metrics.get(LOSS, ())),
        rates=rates,
    )


def _folder(text: str) -> Path:
    """Return the folder of a run.

    Raises:
        UsageError: There is no such folder, or it is no run.
    """
    path = Path(text)
    if not text or not path.exists():
        raise UsageError(f"compare got {text or 'an empty path'}, which does not exist; expected a run; {_near(path)}")
    if path.is_file():
        own = next((str(each) for each in path.parents if _is_run(each)), None)
        remedy = f"write {own}" if own else "give the output_dir of a training"
        raise UsageError(f"compare got {text}, which is a file; expected the folder of a run; {remedy}")
    if not _is_run(path):
        inside = sorted(str(each) for each in path.iterdir() if each.is_dir() and _is_run(each))
        inside += [str(each) for each in path.resolve().parents if _is_run(each)][: not inside]
        remedy = f"write {' '.join(inside[:5])}" if inside else "give the output_dir of a training"
        raise UsageError(f"compare got {text}, which is no run: it has neither its mark nor its files; {remedy}")
    return path


def _near(path: Path) -> str:
    """Return a remedy: the run beside a path with a name like its own, or the runs beside it."""
    folder = path.parent if path.parent.is_dir() else Path("runs")
    runs = {each.name: str(each) for each in sorted(folder.iterdir()) if _is_run(each)} if folder.is_dir() else {}
    near = difflib.get_close_matches(path.name, runs, n=1)
    if near:
        return f"write {runs[near[0]]}"
    return f"runs that exist are {', '.join([*runs.values()][:5])}" if runs else "give the output_dir of a training"


def _is_run(folder: Path) -> bool:
    has_files = (folder / "config.yaml").is_file() and ((folder / "summary.json").is_file() or _logs(folder) != [])
    return folder.is_dir() and (has_files or runs.is_run(folder))


def _logs(folder: Path) -> list[Path]:
    return list((folder / "logs").rglob("metrics.csv"))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    remedy = "copy it from the run again, or delete it: the run is then compared without its settings"
    try:
        read = read_yaml(file)
    except (ValueError, OSError) as error:
        raise UsageError(f"compare cannot read {file}: {error}; expected a run's configuration; {remedy}") from error
    if not isinstance(read, dict):
        raise UsageError(f"compare found no settings in {file}; expected a run's configuration; {remedy}")
    return read


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    remedy = "copy it from the run again, or delete it: the run is then compared by its logs"
    try:
        read = read_json(file)
    except (ValueError, OSError) as error:
        raise UsageError(f"compare cannot read {file}: {error}; expected what a run writes; {remedy}") from error
    if not isinstance(read, dict):
        raise UsageError(f"compare found a {type(read).__name__} in {file}; expected a dictionary; {remedy}")
    return read


def _metrics(folder: Path) -> dict[str, Series]:
    if not _logs(folder):
        return {}
    remedy = "delete the damaged metrics.csv, or give another run"
    try:
        return read_metrics(folder / "logs")
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise UsageError(f"compare cannot read a metrics.csv in {folder / 'logs'}: {error}; {remedy}") from error
    except UsageError as error:
        raise UsageError(f"compare: {error} {remedy[0].upper()}{remedy[1:]}") from error


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _devices(trainer: Mapping[str, Any]) -> int | None:
    """Return the number of processes that the trainer's settings name; None if the machine decided."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, str) and "," in devices:
        devices = [each for each in devices.split(",") if each.strip()]
    count = len(devices) if isinstance(devices, list) else _count(devices)
    return count * nodes if count and _count(nodes) else None


def _finite(series: Series) -> Series:
    return [(step + 1, value) for step, value in series if math.isfinite(value)]


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 4:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number and value > 0 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
