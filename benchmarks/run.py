"""Run benchmark cases; print one JSON line per case and append it to `results/<hardware>.jsonl`.

    python benchmarks/run.py                                    list the cases
    python benchmarks/run.py import_time gemini                 run some; ends with 1 when a bar is missed
    python benchmarks/run.py int8_quality --set max_steps=150   with another argument of the case's `measure`: a trial

A case is a file `cases/NAME.py`:

- its docstring says what is measured;
- `measure()` returns its metrics: a number, or a list with the figure of every round, of which the line keeps the
  median and, as its spread, the interquartile range; a comparison is a named ratio; or a text, kept as a note.
  A long one yields all it has after each run, so that its line is in the file whatever stops it, and may take as `done`
  the metrics of a run that was stopped, to go on after them;
- `BARS`: metric -> the bar it has to meet, written `"<= 1.1"`, `">= 1.3"` or `"== 1"`;
- `TABLE`: what a row of docs/benchmarks.md compares -> its figures, as a format string over the metrics;
- `REVISION`, 1 if not given: counts up when a metric comes to mean something else, and older lines are not shown;
- `MEASURED`, where it trains on a GPU: beginning of metric names -> what was trained (`training_runs.py`);
- `peers()`, where there are any: package -> the settings it is measured with;
- `DRY`, where it needs a GPU: arguments with which `measure` takes seconds on a CPU;
- `NEEDS`, where it needs something from outside: environment variable -> what it has to hold; without it the case is
  skipped.
"""

import argparse
import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent / "src", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from lines import RESULTS, Origin, add_line, clean, first_figures, missed_bars  # noqa: E402


def case_names() -> list[str]:
    """Return all cases, by name."""
    return sorted(path.stem for path in (HERE / "cases").glob("*.py"))


def load_case(name: str) -> ModuleType:
    """Import a case."""
    return importlib.import_module(f"cases.{name}")


def revision_of(case: ModuleType) -> int:
    """Return which lines a case's metrics can be compared with: those of the same revision."""
    return getattr(case, "REVISION", 1)


def run_case(name: str, results: Path | None, arguments: dict[str, Any], *, dry: bool = False) -> int:
    """Measure one case in this process, print and append its line; 1 if a bar is missed.

    A case whose needs are not met is skipped with a line on stderr, and 0. Of a dry run, with the case's arguments
    `DRY`, the figures say nothing: bars do not count.
    """
    origin, case = Origin.now(), load_case(name)
    unmet = [f"{key}=<{meaning}>" for key, meaning in getattr(case, "NEEDS", {}).items() if not os.environ.get(key)]
    if unmet:
        print(f"{name}: skipped; set {' and '.join(unmet)}", file=sys.stderr)
        return 0
    peers = case.peers() if hasattr(case, "peers") else {}
    kept = {"origin": origin, "arguments": {"dry": True} if dry else arguments, "revision": revision_of(case)}
    given = dict(case.DRY if dry else arguments)
    if "done" in inspect.signature(case.measure).parameters:
        given["done"] = first_figures(name, results, **kept)
    found = case.measure(**given)
    measured: Any = found
    if isinstance(found, Iterator):
        for measured in found:
            add_line(name, measured, results, peers=peers, unfinished=True, **kept)
    row = add_line(name, measured, results, peers=peers, **kept)
    if dry:
        return 0
    if not clean([row]):
        why = f"the arguments are {arguments}" if arguments else f"the commit is {row['commit']}"
        print(f"{name}: {why}, so this line is not shown as a result", file=sys.stderr)
    missed = missed_bars(case.BARS, row)
    for text in missed:
        print(f"{name}: bar missed: {text}", file=sys.stderr)
    return int(bool(missed))


def argument(text: str) -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE`."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--dry-run", action="store_true", help="print the lines, append nothing")
    parser.add_argument("--dry", action="store_true", help="with the case's arguments DRY, in seconds on a CPU")
    parser.add_argument("--set", type=argument, action="append", default=[], metavar="NAME=VALUE", dest="arguments")
    options = parser.parse_args(words)
    # What cases start finds this checkout, whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    known = case_names()
    if not options.cases:
        for name in known:
            print(f"{name:20} {(load_case(name).__doc__ or '').splitlines()[0]}")
        return 0
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        print(f"benchmarks/run.py: no case {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    results = None if options.dry_run else options.results
    if options.dry:
        code, environment = 0, dict(os.environ)
        for name in options.cases:
            code |= run_case(name, results, {}, dry=True)
            os.environ.clear()  # what a launcher was told: processes of the next case would wait for others
            os.environ.update(environment)
        return code
    if len(options.cases) == 1:
        return run_case(options.cases[0], results, dict(options.arguments))
    if options.arguments:
        print("benchmarks/run.py: --set is for one case; name one", file=sys.stderr)
        return 2
    # A process per case: threads, imports and allocators of one do not reach the figures of the next.
    passed_on = ["--results", str(options.results), *(["--dry-run"] if options.dry_run else [])]
    return max(subprocess.run([sys.executable, __file__, name, *passed_on]).returncode for name in options.cases)


if __name__ == "__main__":
    sys.exit(main())
