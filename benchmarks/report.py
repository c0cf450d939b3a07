"""Turn the lines of `results/*.jsonl` into tables and plots.

    python benchmarks/report.py               print the table; write results/README.md and results/*.svg
    python benchmarks/report.py --html        the page results/index.html with the ladders' charts, and these as PNG
    python benchmarks/report.py --readme      write the tables of docs/ and the figures of README.md, between markers

Shown is the newest line of every case, in results/ of every case on every machine. A line of a checkout with changes is
no result, and neither is one with arguments of `--set`, or from before a case came to measure something else. The
README has the sentences of `HEADLINES`. The tables of costs are made in `cost_tables.py`. The plots show a case's first
metric over time.
"""

import argparse
import string
import sys
from pathlib import Path
from typing import Any

import cost_tables
import ladder_page
from lines import RESULTS, Row, clean, line_of, read_rows, verdict
from run import HERE, case_names, load_case, revision_of

README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
PAGE, COSTS = DOCS / "benchmarks.md", DOCS / "costs.md"
HEADLINES = {
    "step_overhead": "A training step takes **{ratio} ×** a bare PyTorch loop's, with the same model, data and EMA.",
    "gemini": "Gemini's step takes **{gathered_vs_fsdp2} ×** FSDP2's in its fastest setting, weights gathered in both.",
}
"""Case -> its sentence in the README, as a format string over the metrics."""
SIGNS = {"<=": "≤", ">=": "≥", "==": "="}


class Figure(float):
    """A median that is shown with its spread, in three digits unless the format says otherwise."""

    spread: float | None

    def __new__(cls, value: float, spread: float | None) -> "Figure":
        figure = super().__new__(cls, value)
        figure.spread = spread
        return figure

    def __format__(self, form: str) -> str:
        text = format(float(self), form or ("#.3g" if abs(self) < 1000 else ".4g"))
        return text.removesuffix(".") + ("" if self.spread is None or form else f" ± {self.spread:.1g}")


class Absent:
    """Stands for a metric that a line does not have."""

    def __format__(self, form: str) -> str:
        return "–"


def bars_of(case: str) -> dict[str, str]:
    """Return the bars of a case; none for a case that no longer exists."""
    return load_case(case).BARS if case in case_names() else {}


def newest(rows: list[Row], *keys: str) -> dict[tuple[str, ...], Row]:
    """Return the newest result by some of its entries; one that was stopped midway only if there is no whole one."""
    in_order = sorted(rows, key=lambda row: not row.get("unfinished"))
    return {tuple(row[key] for key in keys): row for row in clean(in_order) if _is_comparable(row)}


def _is_comparable(row: Row) -> bool:
    case = row["case"]
    return case not in case_names() or row.get("revision", 1) == revision_of(load_case(case))


def tables(rows: list[Row]) -> dict[Path, dict[str, str]]:
    """Return the tables of each page, by the name of their markers: `<!-- name -->` and `<!-- /name -->`."""
    every = list(newest(rows, "case", "machine").values())
    costs = cost_tables.tables(newest(rows, "case").get(("costs",)), every)
    return {
        README: {"headlines": headlines(rows)},
        PAGE: {
            "benchmarks": case_table(rows),
            "ladders": ladder_page.markdown(every),
            "published": ladder_page.published(every),
        },
        COSTS: costs,
    }


def headlines(rows: list[Row]) -> str:
    """Return the figures of the README, a sentence each, from the newest line of its case."""
    found = newest(rows, "case")
    sentences = {case: _filled(found.get((case,)), text) for case, text in HEADLINES.items()}
    costs = found.get(("costs",))
    sentences["costs"] = cost_tables.headline(costs["metrics"]) if costs else None
    return "".join(
        f"- {sentence} ({line_of(found[(case,)])}.)\n" if sentence else f"- `{case}`: not measured yet.\n"
        for case, sentence in sentences.items()
    )


def _filled(row: Row | None, template: str) -> str | None:
    return None if row is None else string.Formatter().vformat(template, (), _figures_of(row, template))


def _figures_of(row: Row, template: str) -> dict[str, Any]:
    spread = row.get("spread", {})
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    return {
        name: Figure(row["metrics"][name], spread.get(name)) if name in row["metrics"] else Absent() for name in names
    }


def case_table(rows: list[Row]) -> str:
    """Return the rows of every case's `TABLE`, from its newest line."""
    lines = ["| case | what is compared | measured | bar | met | line |", "|---|---|---|---|---|---|"]
    found = newest(rows, "case")
    for case in case_names():
        row = found.get((case,))
        for text, figures in load_case(case).TABLE.items():
            lines.append(f"| {' | '.join([f'`{case}`', text, *_cells(case, row, figures)])} |")
    return "\n".join(lines) + "\n"


def _cells(case: str, row: Row | None, template: str) -> list[str]:
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    bars = {name: bar for name in names if (bar := bars_of(case).get(name))}
    limits = "; ".join(dict.fromkeys(f"{SIGNS[bar[:2]]} {bar[3:]}" for bar in bars.values()))
    if row is None:
        return ["not measured yet", limits, "", ""]
    measured = _filled(row, template) or ""
    verdicts = {name: verdict(bar, name, row) for name, bar in bars.items()}
    if len(set(verdicts.values())) <= 1:
        met = next(iter(verdicts.values()), "")
    else:
        met = "; ".join(f"{verdict}: {name}" for name, verdict in verdicts.items() if verdict != "yes")
    return [measured, limits, met, line_of(row)]


def with_tables(text: str, found: dict[str, str], *, who: str) -> str:
    """Return a page with its tables between their markers.

    Raises:
        SystemExit: A marker is missing.
    """
    for name, each in found.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not 0 <= text.find(begin) < text.find(end):
            raise SystemExit(f"{who}: expected {begin} and below it {end}; write them where the table belongs")
        text = f"{text.partition(begin)[0]}{begin}\n{each}{end}{text.partition(end)[2]}"
    return text


def table(rows: list[Row]) -> str:
    """Return a Markdown table of everything in the newest line per case and machine."""
    head, lines = table_cells([row for _, row in sorted(newest(rows, "case", "machine").items())])
    ruler = ["---"] * len(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ruler, *lines))


def table_cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of a table of everything in some lines."""
    lines = []
    for row in rows:
        case = row["case"]
        bars, spread = bars_of(case), row.get("spread", {})
        metrics = ", ".join(f"{name} {Figure(value, spread.get(name))}" for name, value in row["metrics"].items())
        met = {name: verdict(bar, name, row) for name, bar in bars.items()}
        cells = [
            case,
            metrics,
            ", ".join(f"{name} {limit}" for name, limit in bars.items()),
            ", ".join(f"{name}: {found}" for name, found in met.items() if found != "yes") or ("yes" if bars else ""),
            row["versions"].get("torch", ""),
            ", ".join(f"{name} {settings['version']}" for name, settings in row.get("peers", {}).items()),
            line_of(row),
        ]
        lines.append(cells)
    return ["case", "metrics", "bar", "met", "torch", "peers", "line"], lines


def plot_case(case: str, rows: list[Row], path: Path) -> None:
    """Write one SVG: the metric of the case's first bar (else its first metric) over time, a line per machine."""
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
        dates: list[Any] = [datetime.fromisoformat(row["date"]) for row in points]
        spread = [row.get("spread", {}).get(metric, 0.0) / 2 for row in points]
        values = [row["metrics"][metric] for row in points]
        axes.errorbar(dates, values, spread, marker="o", capsize=2, label=machine)
    if metric in bars:
        axes.axhline(float(bars[metric].split()[1]), color="0.5", linestyle="--", label=f"bar {bars[metric]}")
    axes.set_title(f"{case}: {metric}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.autofmt_xdate()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_page(rows: list[Row], folder: Path) -> list[Path]:
    """Write the page with all results, and the ladders' charts as pictures; return their paths."""
    from sd_lightning.report import document

    found = [row for _, row in sorted(newest(rows, "case", "machine").items())]
    lead = '<p class="lead">The newest line of each case and machine in <code>benchmarks/results</code>.</p>'
    body = [lead, *ladder_page.sections(found)]
    body.append(document.section("All cases", document.rows(*table_cells(found))))
    page = document.write_document(folder / "index.html", "Benchmarks", "sd_lightning", "\n".join(body))
    return [page, *ladder_page.write_pictures(found, folder)]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--readme", action="store_true", help="write the figures of README.md and the tables of docs/, and nothing else"
    )
    parser.add_argument("--html", action="store_true", help="write results/index.html, and its charts as PNG")
    options = parser.parse_args(arguments)
    rows = clean(read_rows(options.results))
    if not rows:
        print(f"no lines of a commit in {options.results}; run benchmarks/run.py CASE first", file=sys.stderr)
        return 2
    if options.readme:
        # Every page is made before one is written.
        pages = {
            path: with_tables(path.read_text(encoding="utf-8"), found, who=path.name)
            for path, found in tables(rows).items()
        }
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    if options.html:
        for path in write_page(rows, options.results):
            print(path)
        return 0
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
