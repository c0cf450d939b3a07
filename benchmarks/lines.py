"""A line of results: figures, and where they come from: commit, machine, versions, peers and their settings."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import operator
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import spread

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "lightning", "diffusers", "transformers", "bitsandbytes", "deepspeed")
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
DIRTY = "-dirty"
COMMIT_VARIABLE = "GPU_COMMIT"
"""Environment variable that names the commit on a machine to which the files came without their git."""
WITHIN_NOISE = "within noise"

Hardware = dict[str, str | int | float]
Measured = Mapping[str, float | list[float] | str]
"""Metric -> its figure, or its figures round by round; or a note's name -> its text."""
Row = dict[str, Any]
"""A line as it is read."""


@dataclass(frozen=True)
class Origin:
    """The code that is measured: read before the first measurement, as it may change meanwhile."""

    commit: str
    """That of the environment variable `GPU_COMMIT`, as the files may lie in the checkout of another one; else of the
    checkout, with `-dirty` when a file differs from it or is not in it; `unknown` without one."""
    date: str

    @classmethod
    def now(cls) -> Origin:
        """Read it."""
        return cls(_commit(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def _commit() -> str:
    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
        except OSError:  # no git on this machine
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    # A new line in results/ does not change what was measured.
    dirty = git("status", "--porcelain", "--untracked-files=all", "--", "..", ":!results")
    return os.environ.get(COMMIT_VARIABLE) or (head + (DIRTY if dirty else "")) or "unknown"


def add_line(
    case: str,
    measured: Measured,
    results: Path | None,
    *,
    origin: Origin,
    peers: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    revision: int = 1,
    unfinished: bool = False,
) -> Row:
    """Print the line of a case, append it to the file of this machine, and return it.

    It takes the place of an unfinished line of the same case, commit and arguments.

    Args:
        case: Its name.
        measured: Of a list the median is kept, and its interquartile range under ``spread``; texts under ``notes``.
        results: Folder of the files; None appends nothing.
        origin: Read before measuring.
        peers: Name of a peer -> its settings; ``version`` is added where it is a package.
        arguments: What the case was called with, beside its defaults.
        revision: Of what the case measures.
        unfinished: Whether more figures follow. The line says so, and is written to the file only.
    """
    rounds = {key: value for key, value in measured.items() if isinstance(value, list)}
    machine = hardware()
    line = {
        "case": case,
        "revision": revision,
        "metrics": {
            key: _rounded(statistics.median(value) if isinstance(value, list) else value)
            for key, value in measured.items()
            if not isinstance(value, str)
        },
        "spread": {key: _rounded(spread(figures)) for key, figures in rounds.items() if len(figures) > 1},
        "notes": {key: value for key, value in measured.items() if isinstance(value, str)},
        "rounds": min(map(len, rounds.values()), default=1),
        "peers": {name: {"version": _version(name)} | dict(settings) for name, settings in (peers or {}).items()},
        "arguments": dict(arguments or {}),
        "hardware": machine,
        "versions": {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))},
        "commit": origin.commit,
        "date": origin.date,
    }
    if unfinished:
        line["unfinished"] = True
    else:
        print(json.dumps(line), flush=True)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        path = results / f"{hardware_slug(machine)}.jsonl"
        others = [text for text in _lines_of(path) if not _goes_on(json.loads(text), line)]
        text = "".join(f"{each}\n" for each in (*others, json.dumps(line)))
        part = path.with_suffix(".part")  # a run that is killed now loses nothing
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return line


def _lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line] if path.is_file() else []


def _goes_on(row: Row, line: Row) -> bool:
    """Return whether a line holds the first figures of another."""
    same = ("case", "revision", "commit", "arguments")
    return bool(row.get("unfinished")) and all(row.get(key) == line[key] for key in same)


def first_figures(
    case: str, results: Path | None, *, origin: Origin, arguments: Mapping[str, Any], revision: int
) -> dict[str, float | str]:
    """Return the metrics and notes of a run of this case, commit and machine that was stopped; {} if there is none."""
    line = {"case": case, "revision": revision, "commit": origin.commit, "arguments": dict(arguments)}
    above = [] if results is None else _lines_of(results / f"{hardware_slug(hardware())}.jsonl")
    rows = [row for row in map(json.loads, above) if _goes_on(row, line) and _is_of_a_commit(row)]
    return rows[0]["metrics"] | rows[0]["notes"] if rows else {}


def read_rows(results: Path) -> list[Row]:
    """Return the lines of all machines, oldest first; each gets the name of its machine as `machine`."""
    rows = []
    for path in sorted(results.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path.name}:{number}: not a JSON line ({error.msg}); remove it") from None
            rows.append(row | {"machine": hardware_slug(row["hardware"])})
    return sorted(rows, key=lambda row: row["date"])


def clean(rows: list[Row]) -> list[Row]:
    """Return the lines that are results: those of a commit as it is, measured with the case's own arguments."""
    return [row for row in rows if _is_of_a_commit(row) and not row.get("arguments")]


def _is_of_a_commit(row: Row) -> bool:
    return not row["commit"].endswith(DIRTY) and row["commit"] != "unknown"


def line_of(row: Row) -> str:
    """Return where a figure comes from."""
    return f"{row['commit'][:8]}, {row['date'][:10]}, {row['machine']}"


def verdict(bar: str, metric: str, row: Row) -> str:
    """Return "yes", "no", "not measured", or "within noise" where the bar is closer than the figure's spread."""
    sign, limit = bar.split()
    if metric not in row["metrics"]:
        return "not measured"
    value = row["metrics"][metric]
    if abs(value - float(limit)) < row.get("spread", {}).get(metric, 0.0):
        return WITHIN_NOISE
    return "yes" if COMPARE[sign](value, float(limit)) else "no"


def missed_bars(bars: Mapping[str, str], row: Row) -> list[str]:
    """Return a sentence for every bar that the medians do not meet, however close."""
    missed = []
    for metric, bar in bars.items():
        sign, limit = bar.split()
        value = row["metrics"].get(metric)
        if value is None or not COMPARE[sign](value, float(limit)):
            is_noise = verdict(bar, metric, row) == WITHIN_NOISE
            noise = f" ({WITHIN_NOISE}: spread {row['spread'][metric]})" if is_noise else ""
            missed.append(f"{metric} is {'missing' if value is None else value}; the bar is {bar}{noise}")
    return missed


def hardware() -> Hardware:
    """Return what the figures are taken on. Imports torch only to ask for the GPU."""
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: Hardware = {
        "system": platform.system(),
        "cpu": _cpu_name(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def hardware_slug(found: Hardware) -> str:
    """Return a file name for a machine: `2-cores-intel-xeon-…`, or `1x-nvidia-h100-80gb-hbm3`."""
    name = f"{found['gpus']}x {found['gpu']}" if "gpu" in found else f"{found['cores']} cores {found['cpu']}"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)| @.*| cpu\b", "", name.lower())).strip("-")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
