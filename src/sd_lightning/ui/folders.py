"""What the page shows of the folders that our programs write: runs, their pictures and curves, latent stores."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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


def children(root: Path) -> dict[str, Path]:
    """Return the folders in a folder by name, the newest first; links that lead elsewhere are left out."""
    place = root.resolve()
    found = [each for each in root.iterdir() if not each.name.startswith(".") and each.is_dir()] if root.is_dir() else []
    inside = [each for each in found if each.resolve().is_relative_to(place)]
    return {each.name: each for each in sorted(inside, key=lambda each: each.stat().st_mtime, reverse=True)}


@dataclass(frozen=True)
class ShownRun:
    """A run as its folder tells it, which may not be there yet."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> ShownRun:
        """Read its settings and its summary."""
        known: list[dict[str, Any]] = []
        for read, name in ((read_yaml, "config.yaml"), (read_json, "summary.json")):
            value: Any = None
            with suppress(OSError, ValueError):
                value = read(path / name)
            known.append(value if isinstance(value, dict) else {})
        return cls(path.name, path, *known)

    def setting(self, key: str) -> Any:
        """Return a setting at a dotted path; None if it is not there."""
        node: Any = self.config
        for each in key.split("."):
            node = node.get(each) if isinstance(node, dict) else None
        return node

    @property
    def base(self) -> str | None:
        """The model that it started from."""
        return self.setting("model.pretrained")

    @property
    def has_pipeline(self) -> bool:
        return (self.path / "pipeline/model_index.json").is_file() or runs.newest_step(self.path) >= 0

    @property
    def has_lora(self) -> bool:
        return (self.path / "pipeline" / LORA_NAME).is_file()

    @property
    def samples(self) -> list[int]:
        """Steps with a grid of samples."""
        found = (re.fullmatch(r"step-(\d+)\.png", each.name) for each in (self.path / "samples").glob("step-*.png"))
        return sorted(int(each[1]) for each in found if each)

    @property
    def step(self) -> int:
        """The last step that is known."""
        logged = [int(series[-1][0]) + 1 for series in self.metrics.values() if series]
        return max([0, runs.newest_step(self.path), *logged])

    @property
    def metrics(self) -> dict[str, Any]:
        with suppress(OSError, UsageError, ValueError):
            return read_metrics(self.path / "logs")
        return {}

    def chart(self) -> str:
        """Return the curves as HTML; those of a run that goes on are drawn again every ten seconds at most."""
        files = [each.stat() for each in (self.path / "logs").rglob("metrics.csv")]
        newest = max((each.st_mtime for each in files), default=0.0)
        return _chart(self, newest if self.summary else newest // 10, len(files)) if files else ""

    def __hash__(self) -> int:
        return hash(self.path)


@functools.lru_cache(maxsize=16)
def _chart(run: ShownRun, version: float, files: int) -> str:
    return render_charts(run.metrics, CHARTS if run.summary else CHARTS[:1])


def stores(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what is known of the latent stores in some folders: samples, bytes and recipe of each, or what is wrong."""
    found: dict[Path, dict[str, Any]] = {}
    for path in (path.parent for root in roots for each in ("recipes", "*/recipes") for path in root.glob(each)):
        told: dict[str, Any] = {"path": path, "parts": []}
        try:
            location = open_location(str(path), key="store")
            for recipe in recipes(location):
                store = LatentStore(location, recipe)
                samples = {split: store.generation().num_samples(split) for split in ("train", "val")}
                size = sum(each.size for each in store.folder.entries())
                told["parts"].append({"recipe": recipe.description(), "samples": samples, "gb": size / 1e9})
        except (OSError, UsageError) as error:
            told["error"] = str(error)
        found[path.resolve()] = told
    return list(found.values())
