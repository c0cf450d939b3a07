"""The comparing program: runs side by side, by what their folders hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from sd_lightning._console import print_lines
from sd_lightning._errors import UsageError
from sd_lightning.apps.compared_run import Run, read_runs
from sd_lightning.apps.scaling import Scaling, scalings
from sd_lightning.apps.settings import differences
from sd_lightning.apps.text_table import aligned
from sd_lightning.planner.devices import table_of
from sd_lightning.report.compare import columns, grouped, prices, write_compare_page, write_compare_picture
from sd_lightning.storage.atomic import new_file

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MOST_SETTINGS = 15
"""Differing settings that are printed."""
_MOST_VALUES = 4
"""Different values in the title."""
_ENDINGS = (".html", ".png", ".json")


def run(cfg: DictConfig) -> int:
    """Print a comparison of runs, and write it to ``output``.

    Returns:
        Exit code: 0.
    """
    check(cfg)
    given = OmegaConf.to_container(cfg.runs, resolve=False)  # resolved before; a folder's name may hold "${"
    runs = read_runs(cast("list[str]", given))
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
            with new_file(path) as unfinished:
                unfinished.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"output={path} cannot be written ({error.strerror}); choose another output=<file>") from error


def comparison(runs: Sequence[Run], *, price: float | None = None) -> dict[str, Any]:
    """Return the comparison as numbers and texts: what ``compare.json`` holds, and the page draws.

    Args:
        runs: At least two; the first is the baseline.
        price: Dollars per device and hour, of all runs; None: those of the GPUs' tables.
    """
    return {
        "title": title(runs),
        "runs": [_record(run, runs[0], price) for run in runs],
        "scaling": [_scaling_record(each) for each in scalings(runs)],
        "settings": differences([run.config for run in runs]),
        "notes": notes(runs),
    }


def _record(run: Run, baseline: Run, given_price: float | None) -> dict[str, Any]:
    rate, peak = run.images_per_second, run.peak_gib
    price, source = given_price, "given"
    if price is None and run.hardware is not None and (table := table_of(run.hardware)) is not None:
        price, source = table.price_per_hour, table.price_source or "from the GPU's table"
    seconds = None if rate is None or run.devices is None else 1e6 / rate * run.devices
    return {
        "name": run.name,
        "is_finished": run.is_finished,
        "is_measured": run.is_measured,
        **{name: getattr(run, name) for name in ("strategy", "devices", "precision", "batch_size")},
        **{name: getattr(run, name) for name in ("model", "data", "resolution", "hardware", "date", "torch")},
        "images_per_second": rate,
        "quartiles": run.quartiles,
        "images_per_second_and_device": None if rate is None or run.devices is None else rate / run.devices,
        "speedup": _ratio(rate, baseline.images_per_second),
        "peak_gib": peak,
        "memory_ratio": _ratio(peak, baseline.peak_gib),
        "final_loss": run.final_loss,
        "last_step": run.last_step,
        "price": price,
        "price_source": None if price is None else source,
        "dollars_per_million": None if price is None or seconds is None else price * seconds / 3600,
        "losses": list(run.losses),
        "rates": list(run.rates),
    }


def _ratio(value: float | None, of_baseline: float | None) -> float | None:
    return None if value is None or of_baseline is None else value / of_baseline


def _scaling_record(found: Scaling) -> dict[str, Any]:
    return {**asdict(found), "title": found.title, "lines": found.lines()}


def title(runs: Sequence[Run]) -> str:
    """Return what is the same in all runs, and which of it differs."""
    facts = (
        ("{}", "models", [run.model for run in runs]),
        ("{}", "data", [run.data for run in runs]),
        ("{}", "resolutions", [run.resolution for run in runs]),
        ("batch of {}", "batch sizes", [run.batch_size for run in runs]),
        ("{}", "hardware", [run.hardware for run in runs]),
    )
    told = [text for form, plural, values in facts if (text := _fact(form, plural, values))]
    return f"{len(runs)} runs: {'; '.join(told)}" if told else f"{len(runs)} runs"


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


def notes(runs: Sequence[Run]) -> list[str]:
    """Return what a reader has to know of single runs."""
    silent = [run.name for run in runs if not run.is_measured]
    unfinished = [run.name for run in runs if run.is_measured and not run.is_finished]
    found = [f"{name}: no metrics were logged" for name in silent]
    if unfinished:
        verb = "is" if len(unfinished) == 1 else "are"
        found.append(f"{', '.join(unfinished)} {verb} not finished, and compared by what was logged so far")
    if runs[0].images_per_second is None:
        found.append(f"{runs[0].name}, the baseline, has no img/s: give another run first for speed-ups")
    return found


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the comparison as lines of text."""
    out = [data["title"], ""]
    if data["settings"]:
        out += ["settings that differ:", *setting_lines(data), ""]
    out += table_lines(data["runs"])
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
    more = len(data["settings"]) - len(shown)
    width = 4 + max(map(len, shown))
    rows = [
        [f"  {key}" if place == 0 else "", part]
        for key, values in shown.items()
        for place, part in enumerate(_wrapped(grouped(values, names), max(40, 118 - width)))
    ]
    return aligned(rows, at_left=(0, 1)) + [f"  and {more} more; output=compare.json holds all"] * (more > 0)


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Join texts to lines of at most so many characters, if a text itself has no more."""
    out = [parts[0]]
    for part in parts[1:]:
        if len(out[-1]) + 3 + len(part) <= width:
            out[-1] += f"   {part}"
        else:
            out.append(part)
    return out


def table_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the runs as an aligned table; columns in which nothing is known are left out."""
    known = {name: cells for name, cells in columns(runs).items() if any(cell != "-" for cell in cells)}
    at_left = [i for i, name in enumerate(known) if name in ("run", "strategy", "precision")]
    return aligned([list(known), *(list(row) for row in zip(*known.values()))], at_left=at_left)
