"""The ladders of `results/*.jsonl` as tables and charts: measured ones, and the predicted one."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder import RUNGS, Rung
from lines import Row, line_of
from published import NVIDIA_LADDER
from sd_lightning.planner.devices import Device, table_of
from sd_lightning.report.document import card, charts, rows, section
from sd_lightning.report.drawing import (
    AREAS,
    INKS,
    LINES,
    Panel,
    bar_height,
    bar_width,
    label_bars,
    number,
    render_panels,
    render_svg,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, PREDICTED = "measured", "predicted"
UNPRICED = "not predicted"
"""What the planner has no price for."""
_BAR, _MARK = "--area-1", "--line-2"
_SCALING = "scaling_"
_RATE, _MEMORY = "images_per_second", "gb"


@dataclass(frozen=True)
class Figure:
    """A figure of a rung."""

    value: float
    spread: float = 0.0


@dataclass(frozen=True)
class Ladder:
    """A line of a case that holds rungs."""

    row: Row
    told: Row | None = None
    """The newest line of what the planner predicts for the same rungs and machine, if it is not in ``row``."""

    @property
    def is_measured(self) -> bool:
        return any(f"{rung.name}_{_RATE}" in self.row["metrics"] for rung in RUNGS)

    @property
    def devices(self) -> int:
        return int(self.row["metrics"]["devices"])

    @cached_property
    def device(self) -> Device | None:
        """The GPU's table; None on a CPU, or if there is none."""
        name = self._notes.get("gpu") or self.row["hardware"].get("gpu")
        return None if name is None else table_of(str(name))

    @property
    def hardware(self) -> str:
        """What it ran on, or is predicted for."""
        name = self._notes.get("gpu") or self.row["hardware"].get("gpu")
        if name is not None:
            return f"{self.devices} x {name}"
        return f"{self.devices} processes on {self.row['hardware']['cores']} cores of {self.row['hardware']['cpu']}"

    @property
    def title(self) -> str:
        return f"{self._notes['model']}, {self.hardware}"

    @property
    def source(self) -> str:
        """Where its figures are from."""
        if self.is_measured:
            return f"{MEASURED} on {self.hardware} ({line_of(self.row)}), medians of {self.row['rounds']} runs"
        return f"{PREDICTED}, {self.assumed}, at {line_of(self.row).partition(',')[0]}"

    @property
    def heading(self) -> str:
        """Title and source of a picture, in one line."""
        return f"{self.title}: {_kind(self)} {self.row['date'][:10]}, at {self.row['commit'][:8]}"

    @property
    def forecast(self) -> str:
        """How the predicted figures beside measured ones are made."""
        return f"{PREDICTED} by the planner, {self.assumed}"

    @property
    def assumed(self) -> str:
        """Where the planner's speeds are from."""
        notes = self._notes if self.told is None else self.told.get("notes", {})
        speeds = notes.get("speeds", "assumed")
        return "speeds assumed from the data sheet" if speeds == "assumed" else f"speeds {speeds}"

    @property
    def _notes(self) -> Mapping[str, str]:
        notes: Mapping[str, str] = self.row.get("notes", {})
        return notes

    def figure(self, rung: Rung, metric: str, kind: str) -> Figure | None:
        """Return a rung's images per second or GB, measured or predicted."""
        name = f"{rung.name}_{metric}" if kind == MEASURED else f"{rung.name}_{PREDICTED}_{metric}"
        row = self.row if kind == MEASURED or self.told is None else self.told
        value = row["metrics"].get(name) if kind == MEASURED or rung.is_priced else None
        return None if value is None else Figure(value, self.row.get("spread", {}).get(name, 0.0))

    def shown(self, rung: Rung, metric: str) -> Figure | None:
        """Return the measured figure, or in a predicted ladder the predicted one."""
        return self.figure(rung, metric, MEASURED if self.is_measured else PREDICTED)

    def dollars(self, rung: Rung) -> float | None:
        """Return the price of a million images; None without a figure or a price."""
        rate = self.shown(rung, _RATE)
        if rate is None or self.device is None or self.device.price_per_hour is None:
            return None
        return 1e6 / rate.value / 3600 * self.device.price_per_hour * self.devices

    def has_forecast(self, metric: str) -> bool:
        """Return whether predicted figures stand beside measured ones."""
        return self.is_measured and any(self.figure(rung, metric, PREDICTED) for rung in self.rungs())

    @property
    def has_prices(self) -> bool:
        return any(self.dollars(rung) is not None for rung in self.rungs())

    def skipped(self, rung: Rung) -> str | None:
        """Return why a rung did not run."""
        return self._notes.get(f"{rung.name}_skipped")

    def absent(self, rung: Rung) -> str:
        """Return what stands in place of a rung's figure."""
        return "skipped" if self.skipped(rung) else UNPRICED

    def command(self, rung: Rung) -> str:
        return self._notes.get(f"{rung.name}_command", f"python -m sd_lightning.train experiment=ladder_{rung.name}")

    def rungs(self) -> list[Rung]:
        """Return the rungs that it has figures of, or reasons why not."""
        metrics, kind = self.row["metrics"], "" if self.is_measured else f"{PREDICTED}_"
        held = [rung for rung in RUNGS if f"{rung.name}_{kind}{_RATE}" in metrics or self.skipped(rung)]
        return held if self.is_measured else [rung for rung in RUNGS if rung in held or not rung.is_priced]

    def scaling(self, kind: str) -> dict[int, float]:
        """Return measured or predicted images per second by number of devices; empty if the case has none."""
        end = f"_{_RATE}" if kind == MEASURED else f"_{PREDICTED}_{_RATE}"
        found = {
            name.removeprefix(_SCALING).removesuffix(end): value
            for name, value in self.row["metrics"].items()
            if name.startswith(_SCALING) and name.endswith(end)
        }
        return dict(sorted((int(count), value) for count, value in found.items() if count.isdigit()))


def ladders(found: Sequence[Row]) -> list[Ladder]:
    """Return the ladders among the newest lines of each case and machine, measured ones first."""
    told = {row["machine"]: row for row in found if row["case"] == "ladder_forecast"}
    all_of_them = [
        Ladder(row, told.get(row["machine"]) if row["case"] == "ladder" else None)
        for row in found
        if row["case"] in ("ladder", "ladder_gpu", "ladder_plan")
    ]
    return sorted(all_of_them, key=lambda each: not each.is_measured)


def ladder_section(ladder: Ladder) -> str:
    """Return a ladder's section of the page."""
    cards = []
    for panel in panels(ladder):
        svg = render_svg(f"{panel.title}: {ladder.title}", panel.draw, wide=True, height=bar_height(ladder.rungs()))
        told = note(ladder) if len(panel.keys) > 1 else f"Bars are {ladder.source}."
        cards.append(card(panel.title, html.escape(told), keys=panel.keys, picture=svg, wide=True))
    network = f'<p class="note">{html.escape(between_machines(ladder))}</p>'
    return section(
        f"The ladder, {_kind(ladder)}: {ladder.title}", table(ladder) + charts(*cards) + _scaling_card(ladder) + network
    )


def note(ladder: Ladder, figures: str = "Bars are", others: str = "Marks are") -> str:
    """Return where the figures of a chart, or of a table, are from."""
    text = f"{figures} {ladder.source}."
    return text + (f" {others} {ladder.forecast}." if ladder.has_forecast(_RATE) else "")


def table(ladder: Ladder) -> str:
    """Return the rungs as an HTML table, and their commands."""
    return f'<div class="told">{rows(*cells(ladder))}{_commands(ladder)}</div>'


def cells(ladder: Ladder) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of a table of the rungs."""
    first = ladder.shown(ladder.rungs()[0], _RATE)
    lines = []
    for rung in ladder.rungs():
        rate, told = ladder.shown(rung, _RATE), ladder.figure(rung, _RATE, PREDICTED)
        memory, told_memory = ladder.shown(rung, _MEMORY), ladder.figure(rung, _MEMORY, PREDICTED)
        price = ladder.dollars(rung)
        why = ladder.skipped(rung)
        cells = [
            rung.title,
            _told(rate) if rate else ladder.absent(rung),
            f"{rate.value / first.value:.2f}" if rate and first else "—",
        ]
        cells += [_told(told) if rung.is_priced else UNPRICED] * ladder.has_forecast(_RATE) + [_told(memory)]
        cells += [_told(told_memory)] * ladder.has_forecast(_MEMORY)
        cells += ["—" if price is None else f"{price:,.2f}"] * ladder.has_prices
        lines.append([*cells, f"skipped: {why}" if why else rung.change])
    told = "" if ladder.is_measured else f", {PREDICTED}"
    head = ["rung", f"img/s{told}", f"× first{told}", *["img/s, predicted"] * ladder.has_forecast(_RATE)]
    head += [f"GB{told}", *["GB, predicted"] * ladder.has_forecast(_MEMORY)]
    return [*head, *[f"$ per million{told}"] * ladder.has_prices, "what it changes"], lines


def _commands(ladder: Ladder) -> str:
    """Return what to type for each rung."""
    lines = []
    for rung in ladder.rungs():
        rate = ladder.shown(rung, _RATE)
        if rate is not None:
            lines.append(f"# {rung.title}: {number(rate.value)} img/s, {_kind(ladder)}\n{ladder.command(rung)}")
    text = html.escape("\n".join(lines))
    return f'<details class="card"><summary>The commands of these rungs</summary><pre>{text}</pre></details>'


def panels(ladder: Ladder) -> list[Panel]:
    """Return throughput, memory and cost by rung as charts."""
    found = [
        Panel(
            f"Images per second, {_kind(ladder)}",
            lambda axes: _bars(axes, ladder, _RATE, "images per second"),
            _keys(ladder, _RATE),
        ),
    ]
    if any(ladder.shown(rung, _MEMORY) for rung in ladder.rungs()):
        draw = partial(_bars, ladder=ladder, metric=_MEMORY, label="GB of a process at its peak")
        found.append(Panel(f"Memory, {_kind(ladder)}", draw, _keys(ladder, _MEMORY)))
    if ladder.has_prices:
        found.append(Panel(f"Cost, {_kind(ladder)}", lambda axes: _costs(axes, ladder), [(_BAR, _kind(ladder), "")]))
    return found


def write_picture(ladder: Ladder, path: Path) -> Path:
    """Write a ladder's charts as one PNG."""
    drawn = panels(ladder)
    if len(ladder.scaling(PREDICTED)) > 1:
        drawn.append(Panel("Scaling", lambda axes: _scaling(axes, ladder), _scaling_keys(ladder)))
    height = max(bar_height(ladder.rungs()), 2.7)
    return render_panels(path, ladder.heading, drawn, columns=2, size=(6.4, height))


def _keys(ladder: Ladder, metric: str) -> list[tuple[str, str, str]]:
    return [(_BAR, _kind(ladder), ""), *[(_MARK, PREDICTED, "")] * ladder.has_forecast(metric)]


def _kind(ladder: Ladder) -> str:
    return MEASURED if ladder.is_measured else PREDICTED


def _told(figure: Figure | None) -> str:
    if figure is None:
        return "—"
    spread = f"{figure.spread:.0f}" if figure.spread >= 10 else f"{figure.spread:.1g}"
    return number(figure.value) + (f" ± {spread}" if figure.spread else "")


def _bars(axes: Axes, ladder: Ladder, metric: str, label: str) -> None:
    shown = {rung: ladder.shown(rung, metric) for rung in ladder.rungs()}
    marks = {rung: ladder.figure(rung, metric, PREDICTED) for rung in shown} if ladder.is_measured else {}
    _draw(axes, ladder, {rung: each for rung, each in shown.items() if each is not None}, label, marks)


def _costs(axes: Axes, ladder: Ladder) -> None:
    prices = {rung: price for rung in ladder.rungs() if (price := ladder.dollars(rung)) is not None}
    _draw(axes, ladder, {rung: Figure(price) for rung, price in prices.items()}, "dollars for a million images", {})


def _draw(
    axes: Axes, ladder: Ladder, bars: Mapping[Rung, Figure], label: str, marks: Mapping[Rung, Figure | None]
) -> None:
    """Draw a bar for each rung, the first at the top, and marks beside them."""
    order = ladder.rungs()
    most = 1.1 * max([each.value + each.spread for each in bars.values()] + [m.value for m in marks.values() if m])
    for place, rung in enumerate(order):
        bar, mark = bars.get(rung), marks.get(rung)
        if bar is None:
            axes.text(0, place, f" {ladder.absent(rung)}", va="center", fontsize=8, color=INKS["--muted"])
            continue
        axes.barh(
            place,
            bar.value,
            xerr=bar.spread / 2 or None,
            color=AREAS[_BAR],
            height=bar_width(axes),
            ecolor=INKS["--ink"],
        )
        if mark is not None:
            axes.plot(mark.value, place, marker="D", markersize=5, color=LINES[_MARK])
    axes.set_xlim(0, 1.12 * most)  # room for the numbers
    axes.set_xlabel(label)
    label_bars(axes, [rung.title for rung in order], [_told(bars[rung]) if rung in bars else "" for rung in order])


def _scaling(axes: Axes, ladder: Ladder) -> None:
    told, found = ladder.scaling(PREDICTED), ladder.scaling(MEASURED)
    counts = list(told)
    alone = (found or told)[counts[0]] / counts[0]
    axes.plot(counts, [alone * count for count in counts], color=INKS["--muted"], linestyle="--")
    axes.plot(counts, list(told.values()), color=LINES[_MARK], marker="D", markersize=5, linewidth=2)
    if found:
        axes.plot(list(found), list(found.values()), color=LINES["--line-1"], marker="o", linewidth=2)
    axes.set_xticks(counts)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("images per second")
    tidy(axes)


def _scaling_card(ladder: Ladder) -> str:
    if len(ladder.scaling(PREDICTED)) < 2:
        return ""
    is_measured = bool(ladder.scaling(MEASURED))
    points = "Circles are measured, diamonds" if is_measured else "Points are"
    text = f"{points} {PREDICTED}, {ladder.assumed}; the same batch on every GPU, with latents from a store."
    svg = render_svg(f"Scaling: {ladder.title}", lambda axes: _scaling(axes, ladder), wide=True)
    keys = _scaling_keys(ladder)
    title = "From one GPU to several" + (f", {MEASURED} and {PREDICTED}" if is_measured else f", {PREDICTED}")
    return charts(card(title, html.escape(text), keys=keys, picture=svg, wide=True))


def _scaling_keys(ladder: Ladder) -> list[tuple[str, str, str]]:
    keys = [("--muted", "linear", "")]
    for ink, kind in ((_MARK, PREDICTED), ("--line-1", MEASURED)):
        found = ladder.scaling(kind)
        if found:
            least, most = min(found), max(found)
            told = f"{found[most] / found[least] * least / most:.0%} of linear on {most}"
            keys.insert(0, (ink, kind, told))
    return keys


def sections(found: Sequence[Row]) -> list[str]:
    """Return the ladders' sections of the page; a sentence if there are none."""
    shown = [ladder_section(ladder) for ladder in ladders(found)]
    text = '<p class="absent">No ladder was measured: run <code>python benchmarks/run.py ladder ladder_plan</code>.</p>'
    return shown or [section("The ladder", text)]


def markdown(found: Sequence[Row]) -> str:
    """Return the ladders as Markdown, a table for each; a sentence if there are none."""
    shown = []
    for ladder in ladders(found):
        head, lines = cells(ladder)
        ruler = ["---"] * len(head)
        body = "".join(f"| {' | '.join(line)} |\n" for line in (head, ruler, *lines))
        network = f"\n{between_machines(ladder)}\n" if between_machines(ladder) else ""
        told = note(ladder, "Figures are", 'Those of "predicted" are')
        shown.append(f"**{ladder.title}**. {told}\n\n{body}{network}")
    return "\n".join(shown) or "No ladder is measured yet: `python benchmarks/run.py ladder ladder_plan`.\n"


def between_machines(ladder: Ladder) -> str:
    """Return what TCP and EFA are worth between two machines, as a sentence; "" if the case does not tell."""
    told = []
    for strategy, rung in (("DDP", "ema"), ("FSDP2", "fsdp")):
        rates = [ladder.row["metrics"].get(f"{rung}_{network}_{PREDICTED}_{_RATE}") for network in ("tcp", "efa")]
        if None not in rates:
            tcp, efa = rates
            told.append(f"{strategy} {number(tcp)} img/s over TCP, {number(efa)} over EFA ({efa / tcp - 1:+.0%})")
    return f"Two such machines, {PREDICTED}: {'; '.join(told)}." if told else ""


def published(found: Sequence[Row]) -> str:
    """Return NVIDIA's ladder beside ours, predicted for the same GPU, as Markdown."""
    row = next((row for row in found if row["case"] == "ladder_plan"), None)
    of = {rung.name: rung for rung in RUNGS}
    rates = {
        each: row["metrics"].get(f"nvidia_{each.rung}_{PREDICTED}_{_RATE}") if row and of[each.rung].is_priced else None
        for each in NVIDIA_LADDER
    }
    first, ours = NVIDIA_LADDER[0].images_per_second, rates[NVIDIA_LADDER[0]]
    lines = [
        "| NVIDIA's rung | published img/s | × first | ours | predicted img/s | × first |",
        "|---|---|---|---|---|---|",
    ]
    for each, rate in rates.items():
        absent = ["–" if of[each.rung].is_priced else UNPRICED, "–"]
        told = [number(rate), f"{rate / ours:.2f}"] if rate is not None and ours is not None else absent
        theirs = [number(each.images_per_second), f"{each.images_per_second / first:.2f}"]
        lines.append(f"| {' | '.join([each.title, *theirs, of[each.rung].title, *told])} |")
    return "\n".join(lines) + "\n"


def write_pictures(found: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG for each ladder; return their paths."""
    paths: list[Path] = []
    for ladder in ladders(found):
        machine: Any = ladder.row["machine"] if ladder.is_measured else PREDICTED
        paths.append(write_picture(ladder, folder / f"{ladder.row['case']}-{machine}.png"))
    return paths
