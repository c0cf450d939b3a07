"""Run benchmark cases; print one JSON line per case and append it to `results/<hardware>.jsonl`.

    python benchmarks/run.py                  list the cases
    python benchmarks/run.py import_time      run some; --check ends with 1 when a bar is missed

A case is a file `cases/NAME.py` with a docstring, `measure() -> dict[str, float]` (its metrics; a comparison is a
named ratio) and `BARS`: metric -> the bar it has to meet, written `"<= 1.1"`, `">= 1.3"` or `"== 1"`. A case that needs
something from outside says so in `NEEDS`: environment variable -> what it has to hold; without it the case is skipped.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import operator
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "lightning", "diffusers", "transformers", "bitsandbytes", "deepspeed")
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


def case_names() -> list[str]:
    """All cases, by name."""
    return sorted(path.stem for path in (HERE / "cases").glob("*.py") if not path.stem.startswith("_"))


def load_case(name: str) -> ModuleType:
    """Import a case; the benchmarks folder and `src/` are importable for it."""
    for folder in (HERE.parent / "src", HERE):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(f"cases.{name}")


def missed_bars(bars: dict[str, str], metrics: dict[str, float]) -> list[str]:
    """One line for every bar that the metrics do not meet."""
    missed = []
    for metric, bar in bars.items():
        sign, limit = bar.split()
        if metric not in metrics or not COMPARE[sign](metrics[metric], float(limit)):
            missed.append(f"{metric} is {metrics.get(metric, 'missing')}; the bar is {bar}")
    return missed


def unmet_needs(case: ModuleType) -> list[str]:
    """What has to be set in the environment before the case can run."""
    needs: dict[str, str] = getattr(case, "NEEDS", {})
    return [f"{name}=<{meaning}>" for name, meaning in needs.items() if not os.environ.get(name)]


def cpu_name() -> str:
    """The processor's marketing name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, str | int | float]:
    """What the figures were taken on. Imports torch only to ask for the GPU."""
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, str | int | float] = {
        "system": platform.system(),
        "cpu": cpu_name(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return found


def hardware_slug(found: dict[str, str | int | float]) -> str:
    """A file name for a machine: `2-cores-intel-xeon-…`, or `1x-nvidia-h100-80gb-hbm3`."""
    name = f"{found['gpus']}x {found['gpu']}" if "gpu" in found else f"{found['cores']} cores {found['cpu']}"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)| @.*| cpu\b", "", name.lower())).strip("-")


def versions() -> dict[str, str]:
    """Python and the packages that the figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with `-dirty` when tracked files differ from it, or `unknown`."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
        except OSError:  # no git on this machine
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    # A new line in results/ does not change what was measured.
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
    return (head + ("-dirty" if dirty else "")) or "unknown"


def add_line(name: str, metrics: dict[str, float], results: Path | None) -> None:
    """Print the line of a case, and append it to the file of this machine."""
    machine = hardware()
    line = json.dumps(
        {
            "case": name,
            "metrics": metrics,
            "hardware": machine,
            "versions": versions(),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    )
    print(line, flush=True)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        with (results / f"{hardware_slug(machine)}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def run_case(name: str, results: Path | None, *, check: bool) -> int:
    """Measure one case in this process, print and append its line; 1 if `check` and a bar is missed.

    A case whose needs are not met is skipped with a line on stderr, and 0.
    """
    case = load_case(name)
    unmet = unmet_needs(case)
    if unmet:
        print(f"{name}: skipped; set {' and '.join(unmet)}", file=sys.stderr)
        return 0
    metrics = {key: float(f"{value:.6g}") for key, value in case.measure().items()}
    add_line(name, metrics, results)
    missed = missed_bars(case.BARS, metrics)
    for text in missed:
        print(f"{name}: bar missed: {text}", file=sys.stderr)
    return int(check and bool(missed))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--check", action="store_true", help="end with 1 when a bar is missed")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where lines are appended")
    parser.add_argument("--dry-run", action="store_true", help="print the lines, append nothing")
    options = parser.parse_args(arguments)
    known = case_names()
    if not options.cases:
        for name in known:
            print(f"{name:20} {(load_case(name).__doc__ or '').splitlines()[0]}")
        return 0
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        print(f"benchmarks/run.py: no case {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if len(options.cases) == 1:
        return run_case(options.cases[0], None if options.dry_run else options.results, check=options.check)
    # A process per case: threads, imports and allocators of one do not reach the figures of the next.
    passed_on = [*(["--check"] if options.check else []), *(["--dry-run"] if options.dry_run else [])]
    codes = [
        subprocess.run([sys.executable, __file__, name, "--results", str(options.results), *passed_on]).returncode
        for name in options.cases
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
