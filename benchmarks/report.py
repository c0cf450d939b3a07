"""Turn the lines of `results/*.jsonl` into a table and plots.

    python benchmarks/report.py               print the table; write results/README.md and results/*.svg

The table holds the newest line of every case on every machine; the plots show a case's first metric over time.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from run import HERE, case_names, hardware_slug, load_case, missed_bars

Row = dict[str, Any]


def read_rows(results: Path) -> list[Row]:
    """All lines of all machines, oldest first; each gets the name of its machine as `machine`."""
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


def bars_of(case: str) -> dict[str, str]:
    """The bars of a case; none for a case that no longer exists."""
    return load_case(case).BARS if case in case_names() else {}


def table(rows: list[Row]) -> str:
    """A Markdown table of the newest line per case and machine."""
    newest = {(row["case"], row["machine"]): row for row in rows}
    lines = [
        "| case | metrics | bar | met | machine | torch | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (case, machine), row in sorted(newest.items()):
        bars = bars_of(case)
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        met = ("no" if missed_bars(bars, row["metrics"]) else "yes") if bars else ""
        bar = ", ".join(f"{name} {limit}" for name, limit in bars.items())
        head, _, dirty = row["commit"].partition("-")
        short = head[:10] + (f"-{dirty}" if dirty else "")
        cells = [case, metrics, bar, met, machine, row["versions"].get("torch", ""), short, row["date"][:10]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot_case(case: str, rows: list[Row], path: Path) -> None:
    """One SVG: the metric of the case's first bar (else its first metric) over time, a line per machine."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = case  # the same lines give the same file
    from datetime import datetime

    from matplotlib import pyplot as plt

    bars = bars_of(case)
    metric = next(iter(bars), None) or next(iter(rows[0]["metrics"]))
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for machine in sorted({row["machine"] for row in rows}):
        points = [row for row in rows if row["machine"] == machine and metric in row["metrics"]]
        dates = [datetime.fromisoformat(row["date"]) for row in points]
        axes.plot(dates, [row["metrics"][metric] for row in points], marker="o", label=machine)
    if metric in bars:
        axes.axhline(float(bars[metric].split()[1]), color="0.5", linestyle="--", label=f"bar {bars[metric]}")
    axes.set_title(f"{case}: {metric}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.autofmt_xdate()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    rows = read_rows(options.results)
    if not rows:
        print(f"no lines in {options.results}; run benchmarks/run.py CASE first", file=sys.stderr)
        return 2
    text = table(rows)
    print(text, end="")
    plots = []
    for case in sorted({row["case"] for row in rows}):
        plot_case(case, [row for row in rows if row["case"] == case], options.results / f"{case}.svg")
        plots.append(f"![{case}]({case}.svg)\n")
    page = ["# Benchmarks\n", "Made by `python benchmarks/report.py`; the newest line of each case and machine.\n"]
    (options.results / "README.md").write_text("\n".join([*page, text, *plots]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
