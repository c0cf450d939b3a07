"""The comparing program: runs side by side, by what their folders hold, and how much faster more devices make them."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from sd_lightning._console import aligned, print_lines
from sd_lightning._errors import UsageError
from sd_lightning.apps.compared_run import ComparedRun, read_runs, section
from sd_lightning.apps.settings import differences
from sd_lightning.planner.devices import table_of
from sd_lightning.report.compare import columns, grouped, prices, write_compare_page, write_compare_picture
from sd_lightning.report.evaluation import circumstances
from sd_lightning.storage.atomic import write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MOST_SETTINGS = 15
"""Differing settings that are printed."""
_MOST_VALUES = 4
"""Different values in the title."""
_ENDINGS = (".html", ".png", ".json")
_SECTIONS = ("model", "data", "module", "speed", "objective", "optimizer", "lora")
"""What decides the time of a step, beside the trainer's precision and accumulation."""
_MOST_NAMED = 2
"""Settings that a title names."""


def run(cfg: DictConfig) -> int:
    """Print a comparison of runs, and write it to ``output``.

    Returns:
        Exit code: 0.
    """
    check(cfg)
    paths = OmegaConf.to_container(cfg.runs, resolve=False)  # resolved before; a folder's name may hold "${"
    runs = read_runs(cast("list[str]", paths))
    data = comparison(runs, price=cfg.price)
    print_lines(lines(data))
    if cfg.output is not None:
        write(Path(cfg.output), data)
        print_lines([f"written to {cfg.output}"])
    return 0


def check(cfg: DictConfig) -> None:
    """Check what is known before a run is read.

    Raises:
        UsageError: The price is not positive, or the output is no kind of file that is written.
    """
    if cfg.price is not None and not (cfg.price > 0 and math.isfinite(cfg.price)):
        raise UsageError(f"compare got price={cfg.price}; expected dollars per GPU and hour, above 0; write price=2.5")
    output = cfg.output
    if output is not None and (not output.endswith(_ENDINGS) or Path(output).name in _ENDINGS):
        raise UsageError(
            f"compare got output={output}; expected a file that ends with .html, .png or .json; write "
            "output=compare.html"
        )
    if output is not None and (Path(output).is_dir() or not Path(output).parent.is_dir()):
        why = "which is a folder" if Path(output).is_dir() else f"but there is no folder {Path(output).parent}"
        raise UsageError(f"compare got output={output}, {why}; expected a file; write output=compare.html, or make it")


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page, the picture or the numbers.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        if path.suffix == ".html":
            write_compare_page(path, data)
        elif path.suffix == ".png":
            write_compare_picture(path, data)
        else:
            write_whole(path, json.dumps(data, indent=1))
    except OSError as error:
        raise UsageError(f"output={path} cannot be written ({error.strerror}); choose another output=<file>") from error


def comparison(runs: Sequence[ComparedRun], *, price: float | None = None) -> dict[str, Any]:
    """Return the comparison as numbers and texts: what ``compare.json`` holds, and the page draws.

    Args:
        runs: At least two; the first is the baseline.
        price: Dollars per device and hour, of all runs; None: those of the GPUs' tables.
    """
    return {
        "title": title(runs),
        "runs": [_record(run, runs[0], price) for run in runs],
        "scaling": scalings(runs),
        "settings": differences([run.config for run in runs]),
        "notes": notes(runs),
    }


def _record(run: ComparedRun, baseline: ComparedRun, given_price: float | None) -> dict[str, Any]:
    rate = run.images_per_second
    price, source = given_price, "given"
    if price is None and run.hardware is not None and (table := table_of(run.hardware)) is not None:
        price, source = table.price_per_hour, table.price_source or "from the GPU's table"
    seconds = None if rate is None or run.devices is None else 1e6 / rate * run.devices
    return {
        **{each.name: getattr(run, each.name) for each in fields(run) if each.name != "config"},
        **{name: getattr(run, name) for name in ("is_measured", "model", "data", "resolution")},
        "images_per_second_and_device": None if rate is None or run.devices is None else rate / run.devices,
        "speedup": _ratio(rate, baseline.images_per_second),
        "memory_ratio": _ratio(run.peak_gib, baseline.peak_gib),
        "final_loss": run.final_loss,
        "last_step": run.last_step,
        "price": price,
        "price_source": None if price is None else source,
        "dollars_per_million": None if price is None or seconds is None else price * seconds / 3600,
    }


def _ratio(value: float | None, of_baseline: float | None) -> float | None:
    return None if value is None or of_baseline is None else value / of_baseline


def title(runs: Sequence[ComparedRun]) -> str:
    """Return what is the same in all runs, and which of it differs."""
    facts = (
        ("{}", "models", [run.model for run in runs]),
        ("{}", "data", [run.data for run in runs]),
        ("{}", "resolutions", [run.resolution for run in runs]),
        ("batch of {}", "batch sizes", [run.batch_size for run in runs]),
        ("{}", "hardware", [run.hardware for run in runs]),
    )
    texts = [text for form, plural, values in facts if (text := _fact(form, plural, values))]
    return f"{len(runs)} runs: {'; '.join(texts)}" if texts else f"{len(runs)} runs"


def _fact(form: str, plural: str, values: Sequence[Any]) -> str:
    different = list(dict.fromkeys(values))
    if different == [None]:
        return ""
    if len(different) == 1:
        return form.format(different[0])
    if all(isinstance(value, int) for value in different):
        different.sort()
    shown = ["unknown" if value is None else str(value) for value in different[:_MOST_VALUES]]
    more = len(different) - len(shown)
    return f"different {plural}: {', '.join(shown)}" + (f" and {more} more" if more else "")


def notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return what a reader has to know of single runs."""
    silent = [run.name for run in runs if not run.is_measured]
    unfinished = [run.name for run in runs if run.is_measured and not run.is_finished]
    out = [f"{name}: no metrics were logged" for name in silent]
    if unfinished:
        verb = "is" if len(unfinished) == 1 else "are"
        out.append(f"{', '.join(unfinished)} {verb} not finished, and compared by what was logged so far")
    measured = {each for run in runs for each in circumstances(run.evaluation)}
    if len(measured) > len({name for name, _ in measured}):
        out.append("evaluations differ in pictures, settings or networks: only metrics measured alike can be compared")
    if runs[0].images_per_second is None:
        out.append(f"{runs[0].name}, the baseline, has no img/s: give another run first for speed-ups")
    return out


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the comparison as lines of text."""
    out = [data["title"], ""]
    if data["settings"]:
        out += ["settings that differ:", *setting_lines(data), ""]
    # Columns in which nothing is known are left out.
    known = {name: cells for name, cells in columns(data["runs"]).items() if any(cell != "-" for cell in cells)}
    at_left = [i for i, name in enumerate(known) if name in ("run", "strategy", "precision")]
    out += aligned([list(known), *(list(row) for row in zip(*known.values()))], at_left=at_left)
    out += [line for each in data["scaling"] for line in ("", *each["lines"])]
    if data["notes"]:
        out += ["", *data["notes"]]
    quartiles = [each for each in data["runs"] if each["quartiles"]]
    out += [
        "",
        "img/s: median of the values logged after the first" + ", ± half the range of its quartiles" * bool(quartiles),
    ]
    out += [f"dollars: {price:g} per hour and device, {source}" for price, source in prices(data)]
    if not prices(data):
        out.append("dollars: no price is known of this hardware; price=<dollars per hour and device> sets one")
    return out


def setting_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ as lines of text: key, and each value with its runs."""
    names = [each["name"] for each in data["runs"]]
    shown = dict(list(data["settings"].items())[:_MOST_SETTINGS])
    width = max(40, 114 - max(map(len, shown)))
    rows = [
        [f"  {key}" if place == 0 else "", line]
        for key, values in shown.items()
        for place, line in enumerate(_wrapped(grouped(values, names), width))
    ]
    more = len(data["settings"]) - len(shown)
    return aligned(rows, at_left=(0, 1)) + [f"  and {more} more; output=compare.json holds all"] * (more > 0)


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Join texts to lines of at most so many characters, if a text itself has no more."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines


def scalings(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return all groups of runs that differ in their devices alone, and how much faster more devices make them.

    A run on one device without a strategy is the beginning of every group: one process has nothing to divide. What
    stays in a group is its ``batch``: "64 in all" or "32 per device".
    """
    groups: defaultdict[tuple[str, str, str], list[ComparedRun]] = defaultdict(list)
    for strategy in dict.fromkeys(run.strategy or "" for run in runs):
        for run in runs:
            if not (run.images_per_second and run.batch_size and run.devices and run.config):
                continue
            if strategy == run.strategy or (run.devices == 1 and run.strategy == "single"):
                groups[strategy, f"{run.batch_size} in all", _same(run)].append(run)
                if run.batch_size % run.devices == 0:
                    groups[strategy, f"{run.batch_size // run.devices} per device", _same(run)].append(run)
    several = {key: members for key, members in groups.items() if len({run.devices for run in members}) > 1}
    return [
        _scaling(key[0], key[1], _apart(key, [other for other in several if other[:2] == key[:2]]), members)
        for key, members in several.items()
    ]


def _scaling(strategy: str, batch: str, apart: str, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return a group with its points, from the fewest devices, and as lines of text."""
    by_count: defaultdict[int, list[ComparedRun]] = defaultdict(list)
    for run in runs:
        by_count[run.devices or 0].append(run)
    rates = {n: statistics.median(run.images_per_second or 0 for run in by_count[n]) for n in sorted(by_count)}
    least = min(rates)
    points: list[dict[str, Any]] = [
        {
            "devices": count,
            "runs": [run.name for run in by_count[count]],
            "images_per_second": rate,
            "speedup": rate / rates[least],
            "efficiency": rate / rates[least] * least / count,  # 1 where twice the devices are twice as fast
        }
        for count, rate in rates.items()
    ]
    against = f"against {least} device{'s' * (least > 1)}, batch of {', '.join(filter(None, (batch, apart)))}"
    speedups = [
        f"  {each['devices']} devices: {each['speedup']:.2f} x, {100 * each['efficiency']:.0f} % of linear"
        for each in points[1:]
    ]
    return {
        "strategy": strategy,
        "batch": batch,
        "apart": apart,
        "points": points,
        "title": ", ".join(filter(None, (strategy, batch, apart))),
        "lines": [f"{strategy}, {against}:", *speedups],
    }


def _apart(key: tuple[str, str, str], alike: Sequence[tuple[str, str, str]]) -> str:
    """Return the first settings in which a group differs from others, as text; "" if there are no others."""
    differing = differences([json.loads(same) for _, _, same in alike]) if len(alike) > 1 else {}
    settings = [f"{name}={values[alike.index(key)]}" for name, values in differing.items()]
    more = len(settings) - _MOST_NAMED
    return ", ".join(settings[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _same(run: ComparedRun) -> str:
    """Return what has to be the same, as text."""
    kept: dict[str, Any] = {name: run.config.get(name) for name in _SECTIONS}
    data = section(run.config, "data")
    kept["data"] = {key: value for key, value in data.items() if key not in ("batch_size", "val_batch_size")}
    passes = section(run.config, "trainer").get("accumulate_grad_batches")
    kept |= {"hardware": run.hardware, "precision": run.precision, "passes": passes}
    return json.dumps(_without_seeds(kept), sort_keys=True, default=str)


def _without_seeds(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _without_seeds(value) for key, value in node.items() if key != "seed"}
    return node
