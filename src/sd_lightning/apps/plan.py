"""The planning program: a table of strategies with their predicted memory, time and cost."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps import planning
from sd_lightning.apps.plan_command import train_command
from sd_lightning.apps.plan_record import record, timeline_record
from sd_lightning.apps.run_spec import AUTO, RunSpec, target_of
from sd_lightning.apps.text_table import aligned
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.calibration import device_name, file_of, hardware
from sd_lightning.planner.candidates import Candidate
from sd_lightning.planner.comparison import on_other_gpus, smallest, speedup_of_memory
from sd_lightning.planner.devices import Device, tables
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.here import hardware_here
from sd_lightning.planner.remedies import Remedy, remedies
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Cluster, Plan, Plans, Search, search
from sd_lightning.planner.segments import EXPANDABLE
from sd_lightning.report.plan import write_plan_page
from sd_lightning.storage.atomic import new_file
from sd_lightning.strategies import engine_of
from sd_lightning.strategies.presets import PRESETS, candidates

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(cfg: DictConfig) -> int:
    """Print the plans, and write them to ``output``; or calibrate.

    Returns:
        Exit code: 0 if a plan fits, 1 if none does.
    """
    if cfg.action == "calibrate":
        from sd_lightning.apps import calibrate

        return calibrate.run(cfg)
    spec = RunSpec.of(cfg)
    check(spec)
    device, speeds = hardware_of(spec["gpu"])
    price = Price.of(spec, device)
    started = time.perf_counter()
    model = spec.model.describe()
    training = run_of(spec, model)
    prepared = search(
        model,
        device,
        spec["gpus"],
        run=training,
        host_memory=None if spec["host_gb"] is None else int(spec["host_gb"] * GB),
        batch_size=spec["data.batch_size"],
        checkpointing=spec["speed.gradient_checkpointing"],
        candidates=candidates() if spec["strategy_name"] in (None, AUTO) else [chosen(spec)],
        tf32=spec["speed.allow_tf32"],
        speeds=speeds,
    )
    found = prepared.plans()
    if not found.best and not found.too_large:
        raise UsageError(f"plan: nothing can be predicted: {'; '.join(found.skip_reasons)}")
    command = train_command(spec, training, found.best[0].options()) if found.best else None
    first = title(spec, training, found.cluster)
    print(*table(found, first, images=spec["images"], price=price, command=command), sep="\n")
    if not found.best:
        print(*advice(remedies(prepared, found)), sep="\n")
    hints = hint_lines(prepared, found)
    print(*hints, sep="\n")
    if spec["output"] is not None:
        data = {**record_of(spec, training, found, price), "command": command, "hints": hints}
        write(spec, prepared, found, data)
        print(f"written to {spec['output']} after {time.perf_counter() - started:.1f} s")
    return 0 if found.best else 1


@dataclass(frozen=True)
class Price:
    """Of a GPU."""

    per_hour: float
    """Dollars."""
    source: str

    @classmethod
    def of(cls, spec: RunSpec, device: Device) -> Price | None:
        """Return the price of the command line, or that of the GPU's table; None if there is none."""
        if spec["price"] is not None:
            return cls(spec["price"], "given")
        if device.price_per_hour is None:
            return None
        return cls(device.price_per_hour, device.price_source or "from the GPU's table")


def hint_lines(prepared: Search, found: Plans) -> list[str]:
    """Return what the allocator loses, the smallest GPU, and what more memory buys, as lines of text."""
    on_gpu = found.speeds.overlaps
    lines = _fragments(prepared, found.best[0]) if found.best and on_gpu else []
    least = smallest(prepared)
    if least is not None:
        device = least.cluster.device
        lines.append(
            f"smallest GPU that trains this: {device.name}, {device.memory_gib:g} GiB, with {least.candidate.name}"
        )
    faster = speedup_of_memory(prepared, found)
    if faster is not None:
        lines.append(f"1 GB more on each GPU: {100 * faster:+.1f} % images per second")
    return lines


def _fragments(prepared: Search, fastest: Plan) -> list[str]:
    lost = prepared.segments(fastest).fragments
    if lost < max(_WORTH_TELLING * fastest.memory.device, _LEAST_TOLD):
        return []
    fits = fastest.memory.device + lost <= fastest.cluster.memory
    return [
        f"train sets PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}; without it, CUDA's allocator loses {lost / GB:.1f} GB more "
        "between the blocks of the fastest plan" + ("" if fits else ", which does not fit then")
    ]


_WORTH_TELLING = 0.01
"""Part of a plan's memory."""
_LEAST_TOLD = 0.05 * GB
"""Less is printed as 0.0 GB."""


def record_of(spec: RunSpec, training: TrainingRun, found: Plans, price: Price | None) -> dict[str, Any]:
    """Return what ``output`` holds, without what takes longer to compute."""
    made = f"given: {' '.join(sys.argv[1:])}; the others by default"
    found_record = record(
        found, title=what_is_trained(spec, training), settings=made, price=None if price is None else price.per_hour
    )
    return {
        **found_record,
        "images": spec["images"],
        "price_source": None if price is None else price.source,
    }


def write(spec: RunSpec, prepared: Search, found: Plans, data: dict[str, Any]) -> None:
    """Write the page or the JSON file, with the timeline of the fastest plan and other GPUs."""
    data["timeline"] = timeline_record(prepared.timeline(found.best[0])) if found.best else None
    data["gpus"] = []
    if spec["compare"]:
        for each in on_other_gpus(prepared, found):
            price = each.cluster.device.price_per_hour
            data["gpus"].append(
                {
                    "gpu": each.cluster.device.name,
                    "count": each.cluster.count,
                    "name": each.candidate.name,
                    "options": list(each.options()),
                    "images_per_second": each.images_per_second,
                    "price": price,
                    "dollars_per_million": None if price is None else each.dollars_per_million(price),
                }
            )
    if spec["output"].endswith(".html"):
        write_plan_page(Path(spec["output"]), data)
        return
    with new_file(Path(spec["output"])) as path:
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def check(spec: RunSpec) -> None:
    """Check what no constructor sees.

    Raises:
        UsageError: A number is not positive, or the output is neither HTML nor JSON.
    """
    for name, example in (("images", "1e6"), ("price", "2.5"), ("host_gb", "64"), ("loader", "200")):
        if spec[name] is not None and not spec[name] > 0:
            raise UsageError(f"plan got {name}={spec[name]}; expected a number above 0; write {name}={example}")
    resolution = spec["data.resolution"]
    if resolution is not None and (resolution < 8 or resolution % 8):
        raise UsageError(f"plan got data.resolution={resolution}; expected a multiple of 8 pixels, e.g. 512")
    if spec["output"] is not None and not spec["output"].endswith((".html", ".json")):
        raise UsageError(
            f"plan got output={spec['output']}; expected a file that ends with .html or .json; write output=plan.html"
        )


def hardware_of(name: str | None) -> tuple[Device, Speeds]:
    """Return a device by the name of its table or file, or this machine's GPU or calibrated CPU; and its speeds.

    Raises:
        UsageError: There is no such table, or no GPU here.
    """
    if name is not None:
        return hardware(name)
    known = ", ".join(sorted(tables()))
    if not torch.cuda.is_available() and not file_of(device_name()).is_file():
        raise UsageError(f"plan got no gpu, and this machine has none; write gpu=<name>, one of {known}")
    try:
        return hardware_here()
    except UsageError as error:
        raise UsageError(f"{error}; or write gpu=<name>, one of {known}, or a YAML file") from error


def run_of(spec: RunSpec, model: LatentDiffusion) -> TrainingRun:
    """Return the settings of the run; batch size, accumulation and checkpointing are chosen by the search."""
    encoders = spec["encoders"]
    return replace(
        planning.run_of(spec, model, world_size=1),
        batch_size=1,
        averages=spec["ema"],
        encodes=encoders != "none",
        cache_latents=encoders != "all",
        loaded_per_second=spec["loader"],
    )


def chosen(spec: RunSpec) -> Candidate:
    """Return the strategy of the command line.

    Raises:
        UsageError: It is not for so many GPUs.
    """
    name, gpus = spec["strategy_name"], spec["gpus"]
    least, most = PRESETS[name].processes or (1, None) if name in PRESETS else (1, None)
    if most is not None and max(gpus, least) > most:
        raise UsageError(
            f"plan got strategy={name} and gpus={gpus}; at most {most} is expected; write strategy=ddp, or leave gpus "
            "out"
        )
    own = sorted(key for key in spec.overridden if key.startswith("strategy."))
    settings = {key.removeprefix("strategy."): spec[key] for key in own}
    return Candidate(name, lambda **_: engine_of(spec.strategy), settings)


def what_is_trained(spec: RunSpec, training: TrainingRun) -> str:
    """Return model, size, trained weights, precision and optimizer."""
    what = "all weights" if training.lora is None else f"LoRA of rank {training.lora.rank}"
    target = target_of(spec.optimizer)
    optimizer = getattr(target, "__name__", type(target).__name__)
    size = training.resolution
    model = spec.model.get("pretrained") or spec.model.get("architecture")
    return f"{model} at {size} x {size}, {what}, {training.precision}, {optimizer}"


def title(spec: RunSpec, training: TrainingRun, cluster: Cluster) -> str:
    """Return the first line of the table."""
    return (
        f"{what_is_trained(spec, training)}, on {cluster.count} x {cluster.device.name} "
        f"({cluster.device.memory_gib:g} GiB, with {cluster.host / GB:.0f} GB of host memory each)"
    )


def table(found: Plans, first: str, *, images: float | None, price: Price | None, command: str | None) -> list[str]:
    """Return the plans as lines of text."""
    count, per_hour = found.cluster.count, None if price is None else price.per_hour
    header = ["strategy", "micro-batch", "recompute", "GPU GB", "host GB", "s/step", "img/s"]
    header += ["$/million"] * (price is not None) + ["days"] * (images is not None)
    header += ["dollars"] * (images is not None and price is not None)
    rows = [header, *(_row(each, images, per_hour) for each in found.best)]
    lines = [first, "", *aligned(rows)] if found.best else [first, "", "nothing fits"]
    if found.best:
        lines += ["", f"fastest: {command}", *(f"  {line}" for line in found.best[0].memory.lines())]
    if found.too_large:
        lines += ["", "do not fit, with the smallest batch:"]
        lines += aligned([_row_too_large(each) for each in found.too_large])
    lines += [f"not considered: {reason}" for reason in found.skip_reasons]
    lines += ["", f"GB are predicted from shapes; seconds are {found.speeds.provenance}"]
    if price is not None:
        lines.append(f"dollars: {price.per_hour:g} per hour and GPU, {price.source}")
    if count > 1:
        lines.append(f"micro-batch: {count} GPUs x samples per GPU and pass, x passes per step")
    return lines


def advice(found: list[Remedy]) -> list[str]:
    """Return what makes the run fit as lines of text."""
    if not found:
        return ["", "no single change makes it fit: try a smaller model, a lower resolution or several changes"]
    return ["", "it fits with one of these:", *aligned([[f"  {each.option}", each.strategy] for each in found])]


def _row(each: Plan, images: float | None, price: float | None) -> list[str]:
    run = each.run
    parts = f"{each.cluster.count} x {run.batch_size}" if each.cluster.count > 1 else f"{run.batch_size}"
    row = [
        each.candidate.name,
        f"{parts} x {run.accumulate}" if run.accumulate > 1 else parts,
        "some" if each.recompute == "auto" else "all" if each.recompute else "no",
        f"{each.memory.device / GB:.1f}",
        f"{each.memory.host / GB:.1f}",
        f"{each.time.total:.3g}",
        f"{each.images_per_second:.3g}",
    ]
    days = None if images is None else images / each.images_per_second / 86400
    if price is not None:
        row.append(f"{each.dollars_per_million(price):,.2f}")
    if days is not None:
        row.append(f"{days:,.1f}")
    if images is not None and price is not None:
        row.append(f"{each.dollars_per_million(price) * images / 1e6:,.0f}")
    return row


def _row_too_large(each: Plan) -> list[str]:
    return [f"  {each.candidate.name}", f"needs {each.lacks} more"]
