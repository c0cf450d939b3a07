"""The planning program: a table of strategies with their predicted memory, time and cost; and ``plan calibrate``."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf
from sd_lightning._conf.annotations import as_override
from sd_lightning._conf.command_line import CommandLine
from sd_lightning._errors import UsageError
from sd_lightning.apps import planning
from sd_lightning.apps.plan_output import advice, calibration_table, gpu_record, record, table, timeline_record
from sd_lightning.apps.preflight import settings_of
from sd_lightning.apps.run_spec import AUTO, RunSpec, target_of
from sd_lightning.models.families import architecture
from sd_lightning.models.families.base import SIZE_MULTIPLE
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.alternatives import on_other_gpus, remedies, smallest, speedup_of_memory
from sd_lightning.planner.calibration import file_of, hardware, hardware_here
from sd_lightning.planner.devices import Cluster, Device, tables
from sd_lightning.planner.encoders import check_encoders, encoding_bills, options_of
from sd_lightning.planner.footprint import Candidate
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans, Search
from sd_lightning.planner.segments import EXPANDABLE
from sd_lightning.planner.texts import TextBill
from sd_lightning.report.plan import write_plan_page
from sd_lightning.storage.atomic import write_whole
from sd_lightning.strategies import engine_of
from sd_lightning.strategies.presets import PRESETS, candidates

if TYPE_CHECKING:
    from omegaconf import DictConfig

_OF_PLAN = frozenset(
    "action gpu gpus host_gb images captions price loader compare output encoders ema strategy hydra".split()
)
"""Settings of the planning program that a plan's options or :func:`_implied` say in the words of ``train``."""
_CHOSEN = frozenset(("data.batch_size", "trainer.precision", "speed.gradient_checkpointing"))
"""Settings that are among the options of every plan, or are left at the default of both programs."""
_SHARED = ("module.train_text_encoder", "module.encoder_dtype", "module.offload_encoders", "speed.allow_tf32")
"""Settings of both programs whose defaults differ, or that a model's preset sets."""
_WORTH_TELLING = 0.01
"""Part of a plan's memory."""
_LEAST_TOLD = 0.05 * GB
"""Less is printed as 0.0 GB."""


def run(cfg: DictConfig) -> int:
    """Print the plans, and write them to ``output``; or calibrate.

    Returns:
        Exit code: 0 if a plan fits, 1 if none does.
    """
    if cfg.action == "calibrate":
        return calibrate(cfg.output if "output" in _conf.overridden_keys() else None)
    started = time.perf_counter()
    spec = RunSpec.of(cfg)
    check(spec)
    device, speeds = hardware_of(spec["gpu"])
    spec.model.check(spec.trained_text)
    model = spec.model.describe()
    encoders = [hardware(name, "encoders") for name in encoder_gpus(spec)]
    host_memory = None if spec["host_gb"] is None else int(spec["host_gb"] * GB)
    search = Search(
        model,
        run_of(spec, model),
        Cluster(device, spec["gpus"], host_memory),
        speeds=speeds,
        batch_size=spec["data.batch_size"],
        checkpointing=spec["speed.gradient_checkpointing"],
        candidates=candidates() if spec["strategy_name"] in (None, AUTO) else [chosen(spec)],
        tf32=spec["speed.allow_tf32"],
    )
    check_encoders(model, search.run, encoders)
    plans = search.plans()
    if not plans.best and not plans.too_large:
        raise UsageError(f"plan: nothing can be predicted: {'; '.join(plans.skip_reasons)}")
    title = title_of(spec, search.run)
    price, price_source = spec["price"], "given"
    if price is None and device.price_per_hour is not None:
        price, price_source = device.price_per_hour, device.price_source or "from the GPU's table"
    command, bills = None, []
    if plans.best:
        if encoders:
            bills = encoding_bills(search, plans.best[0], encoders, price=price, loader=spec["loader"])
        command = train_command(spec, search.run, [*plans.best[0].options(), *options_of(bills)])
    count, host = search.cluster.count, search.cluster.host
    memory = f"{device.memory_gib:g} GiB, with {host / GB:.0f} GB of host memory each"
    print(f"{title}, on {count} x {device.name} ({memory})", end="\n\n")
    print(*table(plans, command, spec["images"], price, bills), sep="\n")
    if price is not None:
        print(f"dollars: {price:g} per hour and GPU, {price_source}")
    if count > 1:
        print(f"micro-batch: {count} GPUs x samples per GPU and pass, x passes per step")
    if not plans.best:
        print(*advice(remedies(search, plans)), sep="\n")
    hints, text = hint_lines(search, plans), None
    if plans.best and not search.run.train_text_encoder:
        text = TextBill.of(search, plans.best[0], spec["captions"])
        hints.insert(0, text.line())
    print(*hints, sep="\n")
    if spec["output"] is not None:
        settings = f"given: {' '.join(sys.argv[1:])}; the others by default"
        data = record(plans, title=title, settings=settings, price=price, bills=bills) | {
            "command": command,
            "hints": hints,
            "text": text and vars(text) | {"choice": text.choice},
            "images": spec["images"],
            "price_source": None if price is None else price_source,
            "timeline": timeline_record(search.timeline(plans.best[0])) if plans.best else None,
            "gpus": list(map(gpu_record, on_other_gpus(search, plans))) if spec["compare"] else [],
        }
        write(data, Path(spec["output"]))
        print(f"written to {spec['output']} after {time.perf_counter() - started:.1f} s")
    return 0 if plans.best else 1


def calibrate(output: str | None) -> int:
    """Measure this machine, print the figures, and write them to ``output``, so that plans are made with them."""
    from sd_lightning.planner import measuring

    unused = sorted(_conf.overridden_keys() - {"action", "output"})
    if unused:
        raise UsageError(f"plan calibrate got {unused[0]}; it measures this machine, whatever is trained; leave it out")
    if output is not None and not output.endswith(".json"):
        raise UsageError(f"plan calibrate got output={output}; expected a file that ends with .json; leave it out")
    started = time.perf_counter()
    calibration = measuring.calibrate(datetime.date.today().isoformat())
    file = file_of(calibration.device.name) if output is None else Path(output)
    calibration.write(file)
    print(*calibration_table(calibration), sep="\n")
    print(f"written to {file} after {time.perf_counter() - started:.0f} s; plans for this machine use it from here on,")
    print(f"and those made elsewhere with gpu={file}")
    return 0


def hint_lines(search: Search, plans: Plans) -> list[str]:
    """Return what the allocator loses, the smallest GPU, and what more memory buys, as lines of text."""
    lines = []
    if plans.best and plans.speeds.overlaps:
        fastest = plans.best[0]
        lost = search.segments(fastest).fragments
        if lost >= max(_WORTH_TELLING * fastest.memory.device, _LEAST_TOLD):
            fits = fastest.memory.device + lost <= fastest.cluster.memory
            lines.append(
                f"train sets PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}; without it, CUDA's allocator loses "
                f"{lost / GB:.1f} GB more between the blocks of the fastest plan"
                + ("" if fits else ", which does not fit then")
            )
    least = smallest(search)
    if least is not None:
        device = least.cluster.device
        lines.append(
            f"smallest GPU that trains this: {device.name}, {device.memory_gib:g} GiB, with {least.candidate.name}"
        )
    faster = speedup_of_memory(search, plans)
    if faster is not None:
        lines.append(f"1 GB more on each GPU: {100 * faster:+.1f} % images per second")
    return lines


def write(data: Mapping[str, Any], file: Path) -> None:
    """Write the page or the JSON file."""
    if file.suffix == ".html":
        write_plan_page(file, data)
    else:
        write_whole(file, json.dumps(data, indent=1))


def check(spec: RunSpec) -> None:
    """Check what no constructor sees.

    Raises:
        UsageError: A number is not positive, or the output is neither HTML nor JSON.
    """
    examples = {"images": "1e6", "captions": "10000", "price": "2.5", "host_gb": "64", "loader": "200"}
    for name, example in examples.items():
        if spec[name] is not None and not spec[name] > 0:
            raise UsageError(f"plan got {name}={spec[name]}; expected a number above 0; write {name}={example}")
    resolution = spec["data.resolution"]
    if resolution is not None and (resolution < SIZE_MULTIPLE or resolution % SIZE_MULTIPLE):
        raise UsageError(
            f"plan got data.resolution={resolution}; expected a multiple of {SIZE_MULTIPLE} pixels, e.g. 512"
        )
    if spec["encoders"] == []:
        raise UsageError("plan got encoders=[]; expected GPUs beside the trainers, e.g. 'encoders=[a10g,l4]'; or all")
    if spec["output"] is not None and not spec["output"].endswith((".html", ".json")):
        raise UsageError(
            f"plan got output={spec['output']}; expected a file that ends with .html or .json; write output=plan.html"
        )


def hardware_of(name: str | None) -> tuple[Device, Speeds]:
    """Return a device by the name of its table or file, or this machine's GPU or calibrated CPU; and its speeds.

    Raises:
        UsageError: There is no such table, or none of this machine.
    """
    if name is not None:
        return hardware(name)
    try:
        return hardware_here()
    except UsageError as error:
        known = ", ".join(sorted(tables()))
        raise UsageError(f"{error}; or write gpu=<name>, one of {known}, or a YAML file") from error


def run_of(spec: RunSpec, model: LatentDiffusion) -> TrainingRun:
    """Return the settings of the run; batch size, accumulation and checkpointing are chosen by the search."""
    encoders = spec["encoders"]
    if encoders in ("text", "none"):
        model.family.check_latents(f"plan encoders={encoders}")
    return replace(
        planning.run_of(spec, model, world_size=1),
        batch_size=1,
        averages=spec["ema"],
        encodes=encoders in ("all", "text"),
        cache_latents=encoders in ("text", "none"),
        loaded_per_second=None if encoder_gpus(spec) else spec["loader"],
    )


def chosen(spec: RunSpec) -> Candidate:
    """Return the strategy of the command line.

    Raises:
        UsageError: It is not for so many GPUs, or not for these settings.
    """
    name, gpus = spec["strategy_name"], spec["gpus"]
    least, most = PRESETS[name].processes or (1, None) if name in PRESETS else (1, None)
    if most is not None and max(gpus, least) > most:
        raise UsageError(
            f"plan got strategy={name} and gpus={gpus}; at most {most} is expected; write strategy=ddp, or leave gpus "
            "out"
        )
    engine_of(spec.strategy).check_settings(settings_of(spec, gpus))
    own = sorted(key for key in spec.overridden if key.startswith("strategy."))
    settings = {key.removeprefix("strategy."): spec[key] for key in own}
    return Candidate(name, lambda **_: engine_of(spec.strategy), settings)


def encoder_gpus(spec: RunSpec) -> list[str]:
    """Return the GPUs on which encoders run beside the trainers; none if the trainers encode, or a store is read."""
    encoders = spec["encoders"]
    return list(dict.fromkeys(encoders)) if isinstance(encoders, list) else []


def title_of(spec: RunSpec, training: TrainingRun) -> str:
    """Return model, size, trained weights, precision and optimizer."""
    weights = "all weights" if training.lora is None else f"LoRA of rank {training.lora.rank}"
    target = target_of(spec.optimizer)
    optimizer = getattr(target, "__name__", type(target).__name__)
    size = training.resolution
    model = spec.model.get("pretrained") or spec.model.get("architecture")
    return f"{model} at {size} x {size}, {weights}, {training.precision}, {optimizer}"


def train_command(spec: RunSpec, training: TrainingRun, options: Sequence[str]) -> str:
    """Return the command that trains what was planned: what this command line gave, and what ``train`` has otherwise.

    Args:
        spec: Of the planning program.
        training: Its settings of the run.
        options: Those of a plan.
    """
    line = CommandLine.parse("train", sys.argv[1:])
    chosen = {_key(each) for each in options}
    left_out = _OF_PLAN | _CHOSEN | chosen
    given = [each for each in line.overrides if not {_key(each), _key(each).partition(".")[0]} & left_out]
    if not any(_key(each) == "model" for each in given):
        given.insert(0, f"model={spec.model.get('architecture')}")
    settings = list(given)
    if spec["encoders"] == "none":
        settings += ["data=latents", "data.store=store"]
    elif not architecture(spec.model.get("architecture"), who="plan").is_tiny:  # they train on digits, without a folder
        settings += ["data=images", "data.train_data_dir=photos"]
    known = chosen | {_key(each) for each in given}
    implied = _implied(spec, training, CommandLine("train", line.folders, tuple(settings)))
    settings += [f"{key}={as_override(value)}" for key, value in implied if key not in known]
    folders = [word for folder in line.folders[1:] for word in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "sd_lightning.train", *folders, *settings, *options])


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _implied(spec: RunSpec, training: TrainingRun, command: CommandLine) -> Iterator[tuple[str, Any]]:
    """Yield what ``train`` has otherwise than the plan with this command line."""
    from omegaconf import OmegaConf

    train = OmegaConf.create(command.compose(list(command.overrides)))
    wanted: dict[str, Any] = {key: spec[key] for key in _SHARED}
    wanted["data.resolution"] = training.resolution
    if spec["encoders"] == "none":
        wanted["callbacks.samples"] = None  # they would need the encoders
    else:
        wanted["data.cache_latents"] = training.cache_latents
        if training.cache_latents:
            wanted["data.center_crop"] = True  # latents can be cached of images that do not change
    if not training.averages:
        wanted["callbacks.ema"] = None
    for key, value in wanted.items():
        if OmegaConf.select(train, key) != value:
            yield key, value
