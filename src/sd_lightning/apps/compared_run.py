"""What a run's folder says about the run, for a comparison with others."""

from __future__ import annotations

import csv
import difflib
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.apps.settings import preset_name
from sd_lightning.report.evaluation import read_evaluation
from sd_lightning.report.metrics import Series, read_metrics, smoothed
from sd_lightning.storage import atomic, far_runs, runs
from sd_lightning.storage.untrusted import read_json, read_yaml

RATE, PEAK, LOSS = "perf/images_per_second", "perf/peak_memory_gib", "train/loss"


@dataclass(frozen=True)
class ComparedRun:
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
    evaluation: Mapping[str, Any]
    """What ``evaluate`` has written; empty if it was not evaluated."""

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
        model = section(self.config, "model")
        name = model.get("pretrained") or model.get("architecture") or preset_name("model", model)
        return None if name is None else str(name)

    @property
    def data(self) -> str | None:
        """Kind of the data, and where it lies."""
        data = section(self.config, "data")
        places = ("train_data_dir", "dataset_name", "store", "instance_data_dir")
        place = next((str(data[key]) for key in places if data.get(key)), None)
        kind = (preset_name("data", data) or "").split(" ")[0]
        return " ".join(filter(None, (kind, place))) or None

    @property
    def resolution(self) -> str | None:
        """Side of the images."""
        side = section(self.config, "data").get("resolution")
        return f"{side} x {side} pixels" if isinstance(side, int) else None


def read_runs(paths: Sequence[str]) -> list[ComparedRun]:
    """Read runs from their folders.

    Raises:
        UsageError: One is no run, is given twice or has a damaged file; or fewer than two have anything to compare.
    """
    folders = [_folder(each) for each in paths]
    if len(folders) < 2:
        raise UsageError(
            f"compare got {f'one run, {paths[0]}' if paths else 'no runs'}; expected at least two; write python -m "
            "sd_lightning.compare runs/one runs/two"
        )
    for index, folder in enumerate(folders):
        earlier = [path for path, other in zip(paths[:index], folders) if other.resolve() == folder.resolve()]
        if earlier:
            raise UsageError(
                f"compare got {earlier[0]} and {paths[index]}, which are the same run; expected different runs; leave "
                "one out"
            )
    runs = [read_run(folder, name) for folder, name in zip(folders, _names(folders))]
    if sum(run.is_measured for run in runs) < 2:
        without = ", ".join(path for path, run in zip(paths, runs) if not run.is_measured)
        raise UsageError(
            f"compare found no metrics in {without}: neither logs/**/metrics.csv with values nor figures in "
            "summary.json; expected at least two runs with some; let them train to trainer.log_every_n_steps, or give "
            "others"
        )
    return runs


def read_run(folder: Path, name: str) -> ComparedRun:
    """Read a run from its folder.

    Raises:
        UsageError: A file is damaged.
    """
    config, summary = read_part(folder / "config.yaml", read_yaml), read_part(folder / "summary.json", read_json)
    plan, metrics = read_part(folder / runs.PLAN, read_json), _metrics(folder)
    rates = _finite(metrics.get(RATE, ()))
    values = [rate for _, rate in rates[1:] or rates if rate > 0]  # the first is of a machine that warms up
    peaks = [peak for _, peak in _finite(metrics.get(PEAK, ())) if peak > 0]
    trainer = section(config, "trainer")
    precision = summary.get("precision") or trainer.get("precision")
    return ComparedRun(
        name=name,
        config=config,
        is_finished=bool(summary),
        strategy=_text(summary.get("strategy")) or preset_name("strategy", config.get("strategy")),
        devices=_count(summary.get("devices")) or _devices(trainer),
        precision=None if precision is None else str(precision),
        batch_size=_count(summary.get("batch_size")) or _count(section(config, "data").get("batch_size")),
        hardware=_text(summary.get("hardware")) or _text(plan.get("device")),
        date=_text(summary.get("date")),
        torch=_text(summary.get("torch")),
        images_per_second=statistics.median(values) if values else _positive(summary.get("images_per_second")),
        quartiles=_quartiles(values),
        peak_gib=max(peaks) if peaks else _positive(summary.get("peak_memory_gib")),
        losses=_finite(metrics.get(LOSS, ())),
        rates=rates,
        evaluation=read_evaluation(folder),
    )


def _folder(text: str) -> Path:
    """Return the folder of a run, or of what is fetched of a run in a bucket.

    Raises:
        UsageError: There is no such folder, or it is no run.
    """
    if far_runs.is_url(text):
        path = far_runs.working_folder(text, "records")
        with atomic.new_folder(path) as tmp:
            far_runs.fetch_records(text, tmp, _is_compared, who="runs")
    else:
        path = Path(text)
    if not text or not path.exists():
        beside = path.parent if path.parent.is_dir() else Path("runs")
        runs = {each.name: str(each) for each in sorted(beside.glob("*")) if _is_run(each)}
        near = difflib.get_close_matches(path.name, runs, n=1)
        existing = ", ".join([*runs.values()][:5])
        remedy = f"runs that exist are {existing}" if existing else "give the output_dir of a training"
        remedy = f"write {runs[near[0]]}" if near else remedy
        raise UsageError(f"compare got {text or 'an empty path'}, which does not exist; expected a run; {remedy}")
    if not _is_run(path):
        inside = [str(each) for each in sorted(path.glob("*")) if _is_run(each)]
        around = [str(each) for each in (*path.parents, *path.resolve().parents) if _is_run(each)]
        meant = inside[:5] or around[:1]
        remedy = f"write {' '.join(meant)}" if meant else "give the output_dir of a training"
        raise UsageError(f"compare got {text}, which is no run: it has neither its mark nor its files; {remedy}")
    return path


def _is_compared(name: str) -> bool:
    return name in ("config.yaml", "summary.json", runs.PLAN, runs.EVALUATION) or name.endswith("/metrics.csv")


def _is_run(folder: Path) -> bool:
    has_files = (folder / "config.yaml").is_file() and ((folder / "summary.json").is_file() or _logs(folder) != [])
    return folder.is_dir() and (has_files or runs.is_run(folder))


def _logs(folder: Path) -> list[Path]:
    return list((folder / "logs").rglob("metrics.csv"))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    ends = (["/".join(each[-count:]) for each in parts] for count in range(1, 1 + max(map(len, parts))))
    return next(names for names in ends if len(set(names)) == len(names))


def read_part(file: Path, read: Callable[[Path], Any], *, who: str = "compare") -> dict[str, Any]:
    """Return the dictionary in a run's file, for a program; an empty one if there is no file."""
    if not file.is_file():
        return {}
    remedy = f"copy it from the run again, or delete it: the run is then {who}d without it"
    try:
        content = read(file)
    except (ValueError, OSError) as error:
        raise UsageError(f"{who} cannot read {file}: {error}; expected what a run writes; {remedy}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{who} found a {type(content).__name__} in {file}; expected a dictionary; {remedy}")
    return content


def _metrics(folder: Path) -> dict[str, Series]:
    if not _logs(folder):
        return {}
    try:
        return read_metrics(folder / "logs")
    except (csv.Error, OSError, ValueError) as error:
        raise UsageError(
            f"compare cannot read a metrics.csv in {folder / 'logs'}: {error}; delete the damaged one, or give another "
            "run"
        ) from error


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; an empty one if there is none."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


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
