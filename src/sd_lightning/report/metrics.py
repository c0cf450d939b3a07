"""Metric series from the CSV files of a run."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from sd_lightning._errors import UsageError

Series = Sequence[tuple[int, float]]
"""Points of one metric as ``(step, value)``, ascending in step."""


def read_metrics(path: str | Path) -> dict[str, Series]:
    """Read the metrics that Lightning's ``CSVLogger`` wrote.

    A resumed run repeats the steps since its last checkpoint, in the same file or in the next ``version_<n>`` folder:
    the later value of a step counts.

    Args:
        path: A ``metrics.csv``, or a folder whose ``metrics.csv`` files are joined in the order of their versions.

    Returns:
        The points of each metric, ascending in step, without empty cells. NaN and infinite values are kept.
        Lightning's epoch column is left out.

    Raises:
        UsageError: ``path`` does not exist, or a file has rows but no ``step`` column.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"read_metrics got {path}, which does not exist; expected a metrics.csv or a run folder.")
    files = [path] if path.is_file() else sorted(path.rglob("metrics.csv"), key=_natural_order)
    points: dict[str, dict[int, float]] = {}
    for file in files:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            if rows.fieldnames and "step" not in rows.fieldnames:
                raise UsageError(f"read_metrics found no 'step' column in {file}; expected a file of CSVLogger.")
            for row in rows:
                _add_row(points, row)
    return {name: sorted(series.items()) for name, series in sorted(points.items())}


def _add_row(points: dict[str, dict[int, float]], row: dict[str, str | None]) -> None:
    step = _number(row.get("step"))
    if step is None or not math.isfinite(step):  # the last line of a killed run can be cut anywhere
        return
    for name, cell in row.items():
        value = _number(cell)
        if name and name not in ("step", "epoch") and value is not None:
            points.setdefault(name, {})[int(step)] = value


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):  # no such cell, or not a number
        return None


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``version_2`` before ``version_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def smooth(series: Series, width: float) -> Series:
    """Average with a Gaussian window centred on each point, cut off and renormalised at the ends.

    Unlike a running average it does not lag: a falling loss is not drawn above its own points.

    Args:
        series: Finite points.
        width: Standard deviation of the window in points, above 0.
    """
    reach = math.ceil(3 * width)
    window = np.exp(-((np.arange(-reach, reach + 1) / width) ** 2) / 2)
    steps, values = zip(*series)
    totals, weights = (np.convolve(each, window)[reach:-reach] for each in (values, np.ones(len(values))))
    return list(zip(steps, (totals / weights).tolist()))


def smoothed(series: Series) -> Series:
    """Smooth a curve as charts show it; one of few points stays as it is."""
    return smooth(series, width=min(len(series) / 40, 50)) if len(series) >= _SMOOTH_FROM else series


_SMOOTH_FROM = 20
"""Number of points from which a curve is smoothed."""


def wants_log_axis(values: Sequence[float]) -> bool:
    """Return whether ``values`` are positive and span more than a decade, ignoring 2 % at either end."""
    if len(values) < 3 or min(values) <= 0:
        return False
    ordered = sorted(values)
    tail = int(len(ordered) * 0.02)
    return ordered[-1 - tail] / ordered[tail] > 10


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match the first file-name pattern with any match."""
    groups = ([name for name in names if fnmatchcase(name, pattern)] for pattern in patterns)
    return next(filter(None, groups), [])
