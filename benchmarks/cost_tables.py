"""The cost tables of docs/costs.md, and the README's sentence: predicted by the case `costs`, or measured on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from cases.costs import MODELS, PRE_TRAINED, STRATEGIES, TOGETHER, Machine, machines, suited
from lines import Row
from published import PER_MILLION, TWO_PHASES
from run import case_names, load_case
from training_runs import Run

SUMMARY_MACHINES = (
    ("rtx-4090", 1),
    ("l4", 1),
    ("l40s", 1),
    ("h100", 1),
    ("a100-40gb", TOGETHER),
    ("a100-80gb", TOGETHER),
    ("h100", TOGETHER),
)
"""Rows of the summary for every model."""
COMPARED = "a100-80gb"
"""The GPU whose prediction the summary compares with a published run on A100."""
ALONE_OR_DDP = ("single", "ddp")
"""Strategies that have one column in the summary."""
HEADLINE = ("sdxl", ("h100", TOGETHER))
"""The model and the machine of the README's sentence."""
NONE = "–"
NOT_MEASURED = "Nothing is predicted yet; write a line with `python benchmarks/run.py costs`.\n"
NO_RUNS = "There is no line of such a run yet.\n"


@dataclass(frozen=True)
class Measured:
    """A run with its figures and its line."""

    run: Run
    machine: Machine
    images_per_second: float
    gb: float | None
    line: Row

    @property
    def origin(self) -> str:
        """Where it comes from."""
        return f"{self.line['date'][:10]}, {self.line['commit'][:8]}, `{self.line['case']}`"

    @property
    def figures(self) -> str:
        """GB, images per second, and dollars for a million images."""
        return " · ".join(_figures(self.gb, self.images_per_second, self.machine))

    @property
    def is_in_tables(self) -> bool:
        """Whether the tables have a cell with its settings."""
        run, machine = self.run, self.machine
        alike = run.encoders == "all" and run.averages and run.precision == machine.precision
        return (
            alike and run.resolution == MODELS.get(run.model) and machine in machines() and run.strategy in STRATEGIES
        )


def measured_runs(rows: list[Row]) -> list[Measured]:
    """Return the runs of cases that have ``MEASURED``, the oldest line first.

    A line of a GPU that has no table in ``conf/devices`` is told on stderr, and left out.

    Args:
        rows: The newest line of each case and machine.
    """
    from sd_lightning.planner.devices import tables as device_tables

    names = {device.name: name for name, device in device_tables().items()}
    found = []
    for row in sorted(rows, key=lambda row: row["date"]):
        runs: Mapping[str, Run] = getattr(load_case(row["case"]), "MEASURED", {}) if row["case"] in case_names() else {}
        gpu = row["hardware"].get("gpu")
        if not runs or gpu is None:
            continue
        if gpu not in names:
            print(
                f"cost tables: the line of {row['case']} of {row['date'][:10]} is of {gpu}, which no table in "
                "conf/devices has as its name; add one to show it",
                file=sys.stderr,
            )
            continue
        for prefix, run in runs.items():
            speed = row["metrics"].get(f"{prefix}_images_per_second")
            if speed and row["metrics"].get("devices", run.gpus) == run.gpus:
                machine = Machine(names[gpu], device_tables()[names[gpu]], run.gpus)
                found.append(Measured(run, machine, speed, row["metrics"].get(f"{prefix}_gb") or None, row))
    return found


@dataclass
class Table:
    """Cells of a table, and the notes below it."""

    predicted: Mapping[str, float]
    """Metrics of a line of `costs`."""
    measured: list[Measured]
    notes: list[str] = field(default_factory=list)

    def cell(self, model: str, machine: Machine, strategy: str, *, details: bool) -> str:
        """Return what a strategy takes and costs.

        Args:
            model: The model.
            machine: GPUs of a kind.
            strategy: Of the planner.
            details: Whether the batch is told, and what is missing if it does not fit.
        """
        run = self._measured(model, machine, strategy)
        if run is not None:
            return self._measured_cell(run, details=details)
        key = f"{model}_{machine}_{strategy}"
        speed = self.predicted.get(f"{key}_images_per_second")
        if speed is None:
            return self._lacking(key) if details else NONE
        figures = _figures(self.predicted.get(f"{key}_gb"), speed, machine)
        host = self.predicted.get(f"{key}_host_gb")
        if details and host is not None:
            figures[0] += f" + {gigabytes(host)}"
        figures += [f"{self.predicted[f'{key}_batch']:.0f}"] * details
        offloaded = self.predicted.get(f"{key}_offloaded")
        return " · ".join(figures) + (f" ({offloaded:.0%})" if offloaded else "")

    def _measured(self, model: str, machine: Machine, strategy: str) -> Measured | None:
        alike = [
            each
            for each in self.measured
            if (each.run.model, each.machine, each.run.strategy) == (model, machine, strategy) and each.is_in_tables
        ]
        newest = [each for each in alike if each.line["date"] == alike[-1].line["date"]]
        return max(newest, key=lambda each: each.images_per_second, default=None)

    def _measured_cell(self, found: Measured, *, details: bool) -> str:
        note = f"Measured: {found.run}; {found.origin}."
        if note not in self.notes:
            self.notes.append(note)
        batch = f" · {found.run.batch_size}" * details
        return f"**{found.figures}{batch}**<sup>{self.notes.index(note) + 1}</sup>"

    def _lacking(self, key: str) -> str:
        sizes = [(self.predicted.get(f"{key}_needs_{what}"), told) for what, told in (("gb", ""), ("host_gb", " host"))]
        return ", ".join(f"needs {figure(size)}{told}" for size, told in sizes if size is not None) or NONE

    def text(self, header: list[str], rows: list[list[str]]) -> str:
        """Return the table in Markdown, and its notes."""
        notes = [f"<sup>{number}</sup> {note}" for number, note in enumerate(self.notes, start=1)]
        return markdown(header, rows) + "".join(f"\n{note}\n" for note in notes)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(value: float) -> str:
    """Return three digits."""
    return format(value, "#.3g" if value < 1000 else ",.0f").removesuffix(".")


def _figures(gb: float | None, images_per_second: float, machine: Machine) -> list[str]:
    return [gigabytes(gb), figure(images_per_second), dollars(per_million(machine, images_per_second))]


def gigabytes(value: float | None) -> str:
    """Return gigabytes, or a dash."""
    return NONE if value is None else f"{value:.1f}"


def dollars(value: float | None) -> str:
    """Return dollars, or a dash."""
    return NONE if value is None else f"${figure(value)}"


def per_million(machine: Machine, images_per_second: float) -> float | None:
    """Return the dollars of a million images; None without a price."""
    price = machine.device.price_per_hour
    return None if price is None else 1e6 / images_per_second / 3600 * machine.count * price


def tables(line: Row | None, rows: list[Row]) -> dict[str, str]:
    """Return the generated parts of the pages: "summary", "one", "eight", "two-phases", "prices" and "other-settings".

    Args:
        line: The newest of `costs`; None if there is none.
        rows: The newest of each case and machine.
    """
    runs = measured_runs(rows)
    found = {"other-settings": other_settings(runs), "prices": prices()}
    if line is None:
        return found | dict.fromkeys(("summary", "one", "eight", "two-phases"), NOT_MEASURED)
    metrics = line["metrics"]
    found |= {"summary": summary_table(metrics, runs), "two-phases": two_phases(metrics)}
    return found | {"one": whole_table(metrics, runs, 1), "eight": whole_table(metrics, runs, TOGETHER)}


def summary_table(metrics: Mapping[str, float], runs: list[Measured]) -> str:
    """Return the first table: some machines, and one column for one process and DDP."""
    by_name = {(machine.gpu, machine.count): machine for machine in machines()}
    others = [name for name in STRATEGIES if name not in ALONE_OR_DDP]
    table, rows = Table(metrics, runs), []
    for model, resolution in MODELS.items():
        for name in SUMMARY_MACHINES:
            machine = by_name[name]
            here = set(suited(machine.count))
            columns = [next(each for each in ALONE_OR_DDP if each in here), *others]
            cells = [table.cell(model, machine, each, details=False) if each in here else "" for each in columns]
            rows.append([f"`{model}`, {resolution}", f"{machine.count} x `{machine.gpu}`", *cells])
    header = [" or ".join(f"`{each}`" for each in ALONE_OR_DDP), *(f"`{each}`" for each in others)]
    ratio = _to_published(metrics).get(COMPARED)
    told = NONE if ratio is None else f"{1 / ratio:.1f}"
    note = f"MosaicML's published pre-training on {TWO_PHASES.gpus} {TWO_PHASES.gpu} took {told} times the days that"
    return table.text(["model, pixels", "GPUs", *header], rows) + f"\n{note} are predicted so for `{COMPARED}`.\n"


def headline(metrics: Mapping[str, float]) -> str | None:
    """Return the README's sentence: the cheapest strategy for a model on a machine; None if no line predicts it."""
    model, name = HEADLINE
    machine = next(each for each in machines() if (each.gpu, each.count) == name)
    speeds = {each: metrics.get(f"{model}_{machine}_{each}_images_per_second", 0.0) for each in suited(machine.count)}
    best = max(speeds, key=lambda each: speeds[each])
    if not speeds[best]:
        return None
    side, price = MODELS[model], dollars(per_million(machine, speeds[best]))
    return (
        f"A million images of {side} x {side} pixels train `{model}` for **{price}** on {machine.count} `{machine.gpu}`"
        f", under `{best}`: predicted by the planner, not measured."
    )


def whole_table(metrics: Mapping[str, float], runs: list[Measured], count: int) -> str:
    """Return all machines with a number of GPUs, and all strategies that are for it."""
    strategies = list(suited(count))
    table, rows = Table(metrics, runs), []
    for model, resolution in MODELS.items():
        for machine in machines():
            if machine.count == count:
                cells = [table.cell(model, machine, each, details=True) for each in strategies]
                half = ", fp16" if machine.precision == "16-mixed" else ""
                rows.append([f"`{model}`, {resolution}", f"`{machine.gpu}`{half}", *cells])
    return table.text(["model, pixels", "GPU", *(f"`{each}`" for each in strategies)], rows)


def other_settings(runs: list[Measured]) -> str:
    """Return the measured runs that no cell of the tables is about."""
    rows = [
        [
            f"`{each.run.model}`, {each.run.resolution}",
            f"{each.machine.count} x `{each.machine.gpu}`",
            f"`{each.run.strategy}`",
            str(each.run),
            f"**{each.figures}**",
            each.origin,
        ]
        for each in runs
        if not each.is_in_tables
    ]
    return markdown(["model, pixels", "GPUs", "strategy", "settings", "measured", "line"], rows) if rows else NO_RUNS


def prices() -> str:
    """Return whose price each GPU has, and when."""
    devices = {machine.gpu: machine.device for machine in machines()}
    rows = [
        [
            f"`{name}`",
            NONE if device.price_per_hour is None else f"${device.price_per_hour:g}",
            device.price_source or NONE,
        ]
        for name, device in devices.items()
    ]
    return markdown(["GPU", "an hour", "whose price, and when"], rows)


@dataclass(frozen=True)
class PreTraining:
    """Days of pre-training in two phases."""

    encoding: float
    """To encode the data set once."""
    stored: tuple[float, ...]
    """Of each phase, on latents and text embeddings from a store."""
    online: tuple[float, ...]
    """Of each phase, encoded in the step; empty if only the total is known."""
    online_total: float
    gpus: int
    price: float | None
    """Dollars per GPU and hour."""

    def cells(self) -> list[str]:
        """Return its days and dollars, the ratios of both ways, and dollars per million images."""
        trained, images = sum(self.stored), sum(TWO_PHASES.images.values()) / 1e6
        whole = self.encoding + trained
        online = [self._cost(days) for days in self.online] or [NONE] * len(self.stored)
        ratios = f"{self.online_total / trained:.2f} ×; {self.online_total / whole:.2f} ×"
        millions = [
            dollars(None if self.price is None else self._dollars(d) / images) for d in (whole, self.online_total)
        ]
        days = [self.encoding, *self.stored, whole]
        return [*map(self._cost, days), *online, self._cost(self.online_total), ratios, "; ".join(millions)]

    def _dollars(self, days: float) -> float:
        assert self.price is not None
        return 24 * days * self.gpus * self.price

    def _cost(self, days: float) -> str:
        return f"{days:.1f} · " + (NONE if self.price is None else f"${self._dollars(days):,.0f}")


def two_phases(metrics: Mapping[str, float]) -> str:
    """Return days and dollars of pre-training in two phases, predicted and published, and the ratio of both."""
    sizes = [f"{size}²" for size in TWO_PHASES.images]
    header = ["GPUs", "encode once", *(f"{size}, stored" for size in sizes), "stored, all"]
    header += [*(f"{size}, online" for size in sizes), "online, all", "online to stored", "$ per million"]
    rows = [
        [f"{machine.count} x `{machine.gpu}`", *found.cells()]
        for machine in machines()
        if (found := _predicted(metrics, machine)) is not None
    ]
    rows.append([f"{TWO_PHASES.gpus} x {TWO_PHASES.gpu}, published", *_published().cells()])
    lines = [f"Published: {TWO_PHASES.source}; ${TWO_PHASES.price:g} per GPU and hour."]
    ours = [f"{ratio:.2f} of them on `{gpu}`" for gpu, ratio in _to_published(metrics).items()]
    if ours:
        lines.append(f"Of the published days of both phases, stored, are predicted: {', '.join(ours)}.")
    told = "; ".join(f"{dollars(value)} ({who})" for who, value in PER_MILLION.items())
    lines.append(f"Published dollars per million images of these phases: {told}.")
    return markdown(header, rows) + "".join(f"\n{line}\n" for line in lines)


def _to_published(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return days predicted for both phases on stored latents to the published ones, by kind of A100."""
    published = sum(_published().stored)
    found = {machine.gpu: _predicted(metrics, machine) for machine in machines() if machine.gpu.startswith("a100")}
    return {gpu: sum(each.stored) / published for gpu, each in found.items() if each is not None}


def _days(images: float, per_second: float) -> float:
    return images / per_second / 86400


def _predicted(metrics: Mapping[str, float], machine: Machine) -> PreTraining | None:
    """Return what a line of `costs` predicts for a machine; None if it has no links, is not known, or nothing fits."""
    passes, distinct = TWO_PHASES.images, TWO_PHASES.distinct
    speeds = {
        kind: [metrics.get(f"{PRE_TRAINED}_{size}_{machine}_{kind}_images_per_second") for size in passes]
        for kind in ("encoding", "stored", "online")
    }
    if not all(all(each) for each in speeds.values()):
        return None
    days = {
        kind: tuple(_days(images, speed or 0) for images, speed in zip(counts.values(), speeds[kind]))
        for kind, counts in (("encoding", distinct), ("stored", passes), ("online", passes))
    }
    online, price = days["online"], machine.device.price_per_hour
    return PreTraining(sum(days["encoding"]), days["stored"], online, sum(online), machine.count, price)


def _published() -> PreTraining:
    recipe = TWO_PHASES
    stored = tuple(_days(recipe.images[size], speed) for size, speed in recipe.images_per_second.items())
    encoding, online = recipe.encoding_gpu_hours / recipe.gpus / 24, recipe.online * sum(stored)
    return PreTraining(encoding, stored, (), online, recipe.gpus, recipe.price)
