"""Run one part of what needs a CUDA GPU: its tests, then its cases, within one call of ten minutes.

    python benchmarks/gpu_check.py                               list the parts
    python benchmarks/gpu_check.py smoke --results "$OUT"        run one
    python benchmarks/gpu_check.py gemini_gpu --results "$OUT"   run one case
    python benchmarks/gpu_check.py all --seconds 9999            all parts, on a machine of your own
    python benchmarks/gpu_check.py all --dry                     the same tests and cases on a CPU, tiny

`make gpu-check PART=…` calls it. What is in which part, and how long it should take, stands in `PARTS` and `TESTS`. A
test that `TESTS` does not name is in the part `DEFAULT`. Every test and every run of a case leaves a line when it ends;
a case that the time limit stops goes on from its line in the next call, if that finds the line in the same folder.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
START_UP = 25
"""Seconds that collecting tests takes."""
LEAST = 30
"""Seconds below which no case is started."""
LAST_WORDS = 15
"""Seconds that what is stopped has to tell what it has done."""


@dataclass(frozen=True)
class Part:
    """What one call runs."""

    about: str
    limit: int
    """Seconds that it may take by estimate."""
    cases: tuple[tuple[str, int], ...] = ()
    """Cases of `run.py`, in this order, and the seconds that each should take."""


PARTS = {
    "smoke": Part("every engine trains, saves and resumes; buckets, a NaN step, one step of the program", 480),
    "1": Part(
        "what can spoil the rest: allocator, Gemini, offloading, precision",
        540,
        (("offload_gpu", 80), ("gemini_gpu", 285)),  # the second can go on from its line
    ),
    "2": Part("the planner and its calibration", 540, (("planner_gpu", 440),)),
    "3": Part("presets and training", 540, (("train_step_gpu", 80), ("dreambooth_gpu", 260))),
    "4": Part("compiled layers, and the ladder: its last rungs may need a second call", 540, (("ladder_gpu", 440),)),
    "5": Part(
        "today's models at their published size, int8, and adapters on quantised weights",
        540,
        (("families_gpu", 200), ("int8_gpu", 50), ("qlora_gpu", 120)),
    ),
}
TRAINS = "test_each_trains_as_one_plain_process_or_stops_at_a_signal"
TESTS = (
    ("tests/strategies/test_strategies_gpu.py", "smoke", 10),
    ("tests/gemini", "smoke", 2),
    ("tests/diffusion", "smoke", 2),
    ("tests/storage", "smoke", 1),
    ("tests/strategies/test_engines_gpu.py", "1", 9),
    (f"tests/strategies/test_engines_gpu.py::{TRAINS}[zero2_cpu_adam", "smoke", 60),  # DeepSpeed compiles it
    ("tests/training/test_speed.py", "1", 4),
    ("tests/callbacks/test_ema.py", "1", 10),
    ("tests/models", "1", 2),
    ("tests/models/test_families_gpu.py", "5", 3),
    ("tests/planner", "2", 40),
    ("tests/training/test_speed.py::test_cuda_compiled", "4", 70),
)
"""Beginning of a test's id -> its part, and the seconds that each should take. The longest beginning counts."""
DEFAULT = ("3", 6)


def part_of(test: str) -> tuple[str, int]:
    """Return the part of a test, and the seconds that it should take."""
    found = [row for row in TESTS if test.startswith(row[0])]
    return max(found, key=lambda row: len(row[0]))[1:] if found else DEFAULT


ALL = "all"


def is_in(part: str, test: str) -> bool:
    """Return whether a test belongs to a part, or to all of them."""
    return part in (ALL, part_of(test)[0])


def estimates(part: str, tests: Sequence[str]) -> list[str]:
    """Return what a part, or each of all, runs and should take.

    Args:
        part: Its name.
        tests: Ids of the tests that were found.
    """
    told = []
    for name in PARTS if part == ALL else [part]:
        seconds = [part_of(test)[1] for test in tests if is_in(name, test)]
        cases = [case for case, _ in PARTS[name].cases]
        total = START_UP + sum(seconds) + sum(case[1] for case in PARTS[name].cases)
        found = f"{len(seconds)} tests and {', '.join(cases) or 'no cases'}"
        told.append(f"part {name}: {found}, about {total} of {PARTS[name].limit} s")
    return told


def files_with_gpu_tests() -> list[str]:
    """Return the files that hold tests marked `gpu`: no other file is imported, nor needs the packages it imports."""
    return sorted(
        str(path.relative_to(REPO))
        for path in (REPO / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8")
    )


@dataclass
class Call:
    """The time of this call, and what came of it."""

    end: float
    failed: bool = False

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, what: str, command: Sequence[str], environment: dict[str, str]) -> None:
        """Run a command until the time is over, and tell how it ended."""
        begin = time.monotonic()
        print(f"==> {what}", flush=True)
        process = subprocess.Popen(command, cwd=REPO, env=os.environ | environment, start_new_session=True)
        try:
            code: int | None = process.wait(max(self.left, 0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        told = "stopped: the time is over; its lines hold what is done" if code is None else f"exit code {code}"
        self.failed |= code != 0
        print(f"==> {what}: {told}, {time.monotonic() - begin:.0f} s", flush=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, and those that it has started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(LAST_WORDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_tests(call: Call, part: str, results: Path, *, dry: bool) -> None:
    """Run the tests of a part."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--gpu-part={part}", "--continue-on-collection-errors"]
    command += [f"--gpu-log={results / f'tests-{part}.log'}", "-p", "no:cacheprovider"]
    command.append("--gpu-dry" if dry else f"--results={results}")
    command += [*shlex.split(os.environ.get("PYTEST_ARGS", "")), *files_with_gpu_tests()]
    call.run(f"tests of part {part}", command, {})


def run_cases(call: Call, cases: Sequence[str], results: Path, *, dry: bool) -> None:
    """Run cases, each in a process of its own; of a dry run all in one, whose figures say nothing."""
    for case in [" ".join(cases)] if dry and cases else cases:
        if call.left < LEAST:
            print(f"==> {case}: not started, {max(call.left, 0):.0f} s are left; run PART={case}", flush=True)
            call.failed = True
            continue
        command = [sys.executable, str(HERE / "run.py"), *case.split(), "--results", str(results), *["--dry"] * dry]
        call.run(case, command, {"PYTHONUNBUFFERED": "1"})


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    known = [case for part in PARTS.values() for case, _ in part.cases]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, ALL, *known], metavar="PART")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the lines")
    parser.add_argument("--seconds", type=float, default=520, help="after which everything is stopped")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with the cases' arguments DRY")
    options = parser.parse_args(words)
    if options.part is None:
        for name, part in PARTS.items():
            print(f"PART={name:6} {part.about}; cases: {', '.join(case for case, _ in part.cases) or 'none'}")
        return 2
    if not options.dry and (lacking := _lacking()):
        print(f"make gpu-check: {lacking}", file=sys.stderr)
        return 2
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    call = Call(time.monotonic() + options.seconds)
    if options.part in known:
        cases = [options.part]
    else:
        run_tests(call, options.part, results, dry=options.dry)
        parts = PARTS if options.part == ALL else [options.part]
        cases = [case for name in parts for case, _ in PARTS[name].cases]
    run_cases(call, cases, results, dry=options.dry)
    return int(call.failed)


def _lacking() -> str | None:
    """Return what this machine lacks for lines that count, or None."""
    sys.path.insert(0, str(HERE))
    import torch

    from lines import COMMIT_VARIABLE, Origin

    if not torch.cuda.is_available():
        return "torch sees no CUDA device; run it on a machine with one, or DRY=1 on a CPU"
    if Origin.now().commit == "unknown":
        return f"here is no git to ask for the commit; set {COMMIT_VARIABLE}=$(git rev-parse HEAD) where there is"
    return None


if __name__ == "__main__":
    sys.exit(main())
