"""What the page shows of the folders that our programs write: runs, their pictures and curves, latent stores."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.data.store.layout import LatentStore, recipes
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.report.charts import CHARTS, render_charts
from sd_lightning.report.metrics import read_metrics
from sd_lightning.storage import runs
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.untrusted import read_json, read_yaml

_CHARTS = [replace(chart, wide=False) for chart in CHARTS if chart.title in ("Loss", "Throughput")]


def inside(root: Path, path: Path) -> bool:
    """Return whether a path is there, and lies in a folder, links followed."""
    try:
        return path.exists() and path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError):  # no name of a file, too long, or a link to itself
        return False


def children(root: Path) -> dict[str, Path]:
    """Return the runs in a folder by name, the newest first; links that lead out of it are left out."""
    found = root.iterdir() if root.is_dir() else ()
    shown = [each for each in found if each.name.isprintable() and inside(root, each) and runs.is_run(each)]
    return {each.name: each for each in sorted(shown, key=lambda each: each.stat().st_mtime, reverse=True)}


class ShownRun:
    """A run as its folder tells it, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What its ``config.yaml`` says; empty if there is none."""
        return mapping(read_yaml, self.path / "config.yaml")

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the settings; empty if there is none."""
        found = self.settings.get(name)
        return found if isinstance(found, dict) else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What it wrote at its end; empty before."""
        return mapping(read_json, self.path / "summary.json")

    @property
    def saved(self) -> int:
        """The last step of which there is a checkpoint or a result."""
        return max(0, runs.newest_step(self.path))

    @cached_property
    def steps(self) -> tuple[int, int]:
        """The last step that is known, and the last of all, 0 if that is not known."""
        last = self.section("trainer").get("max_steps")
        last = last if isinstance(last, int) else 0
        logged = max((int(series[-1][0]) + 1 for series in _metrics(self.path).values()), default=0)
        return max(self.saved, min(logged, last)), last

    @property
    def base(self) -> str | None:
        """The model that it started from."""
        found = self.section("model").get("pretrained")
        return found if isinstance(found, str) else None

    @property
    def has_pipeline(self) -> bool:
        return (self.path / "pipeline/model_index.json").is_file() or self.saved > 0

    @property
    def lora(self) -> Path | None:
        """The file of its adapters, if they are not merged."""
        path = self.path / "pipeline" / LORA_NAME
        return path if inside(self.path, path) else None

    @property
    def samples(self) -> list[int]:
        """Steps with a grid of samples."""
        found = (re.fullmatch(r"step-(\d{8})\.png", each.name) for each in (self.path / "samples").glob("step-*"))
        return sorted(int(each[1]) for each in found if each)

    @property
    def is_written(self) -> bool:
        """Whether a process seems to train it, such as one that was started in a shell."""
        since = time.time() - 60
        return not self.summary and any(each.stat().st_mtime > since for each in self.path.glob("logs/**/metrics.csv"))

    def chart(self) -> str:
        """Return loss and speed as HTML, drawn at most every ten seconds."""
        times = [each.stat().st_mtime for each in (self.path / "logs").rglob("metrics.csv")]
        return _chart(self.path, max(times) // 10, bool(self.summary)) if times else ""


@functools.lru_cache(maxsize=16)
def _chart(path: Path, time: float, is_finished: bool) -> str:
    return render_charts(_metrics(path), _CHARTS)


def mapping(read: Callable[[Path], Any], path: Path) -> dict[str, Any]:
    """Return what a file holds; empty if it is not there, or something else: others may have written it."""
    with suppress(OSError, ValueError):
        found = read(path) if inside(path.parent, path) else None
        return found if isinstance(found, dict) else {}
    return {}


def _metrics(path: Path) -> dict[str, Any]:
    return _read(path, sum(each.stat().st_size for each in (path / "logs").rglob("metrics.csv")))


@functools.lru_cache(maxsize=16)
def _read(path: Path, size: int) -> dict[str, Any]:
    with suppress(OSError, UsageError, ValueError):
        return read_metrics(path / "logs")
    return {}


def stores(roots: Sequence[Path]) -> dict[Path, list[str]]:
    """Return lines about each latent store in some folders: its samples, bytes and recipe, or what is wrong."""
    found: dict[Path, list[str]] = {}
    places = [each for root in roots for pattern in ("recipes", "*/recipes") for each in root.glob(pattern)]
    for path in (each.parent for each in places if any(inside(root, each) for root in roots)):
        try:
            location = open_location(str(path), key="store")
            for store in (LatentStore(location, recipe) for recipe in recipes(location)):
                train, held_out = (store.generation().num_samples(split) for split in ("train", "val"))
                size = sum(each.size for each in store.folder.entries()) / 1e9
                state = "" if train else "; not complete: run the same precompute again"
                text = f"{train:,} samples to train on, {held_out:,} held out, {size:.3g} GB{state}"
                found.setdefault(path, []).append(f"{text}; {store.recipe.description()}")
        except (OSError, UsageError) as error:
            found[path] = [str(error)]
    return found
