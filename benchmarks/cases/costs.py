"""What training costs, predicted by the planner: models, GPUs and strategies; and pre-training in two phases.

Nothing is measured, so the figures are the same on every machine. GPUs with links between them (`link_gb_per_s` in
their table) are taken alone and eight at a time, others alone, as their price is that of a machine with one of them.
All weights are trained, with fused AdamW and an EMA; images and captions are encoded in each step; the batch and what
is recomputed are the planner's fastest. Precision is bf16-mixed, and 16-mixed where a GPU computes bfloat16 slower.

Of a strategy that fits, the line has the peak of a GPU (`_gb`), images per second of all GPUs, the batch per GPU, and
where it offloads, the host memory per GPU (`_host_gb`); of one that does not, what its smallest batch needs
(`_needs_gb`, `_needs_host_gb`). Where Gemini does not fit, a part of the optimizer goes to host memory, the one that is
the fastest (`_offloaded`). Dollars are computed in the report.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from published import TWO_PHASES

if TYPE_CHECKING:
    from sd_lightning import LatentDiffusion
    from sd_lightning.planner.devices import Cluster, Device
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.search import TrainingPlan

BARS: dict[str, str] = {}
TABLE = {
    "predicted images per second, SDXL at 1024 x 1024 on eight A100 80 GB: DDP; FSDP2; ZeRO-2; Gemini; all offloaded": (
        "{sdxl_8x_a100-80gb_ddp_images_per_second}; {sdxl_8x_a100-80gb_fsdp_images_per_second}; "
        "{sdxl_8x_a100-80gb_deepspeed_zero2_images_per_second}; {sdxl_8x_a100-80gb_gemini_images_per_second}; "
        "{sdxl_8x_a100-80gb_gemini_offload_images_per_second}"
    ),
    "predicted images per second, sd21 on eight A100 80 GB: 256 x 256, stored; online; 512 x 512, stored; online": (
        "{sd21_256_8x_a100-80gb_stored_images_per_second}; {sd21_256_8x_a100-80gb_online_images_per_second}; "
        "{sd21_512_8x_a100-80gb_stored_images_per_second}; {sd21_512_8x_a100-80gb_online_images_per_second}"
    ),
}
MODELS = {"sd15": 512, "sd21": 512, "sdxl": 1024}
"""Model -> side of the images in the tables, pixels. SD 2.1 was made for 768; its published recipes train at 512."""
STRATEGIES = (
    "single",
    "ddp",
    "fsdp",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "gemini",
    "gemini_offload",
    "deepspeed_zero2_offload",
)
"""Names of the planner's candidates, in the order of the tables."""
GEMINI, FRACTION = "gemini", "offload_optim_frac"
PRE_TRAINED = "sd21"
"""The model of the two phases."""
TOGETHER = 8
"""GPUs of a machine whose GPUs have links."""


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind."""

    gpu: str
    """Name of its table in ``conf/devices``."""
    device: Device
    count: int

    def __str__(self) -> str:
        return f"{self.count}x_{self.gpu}"

    @property
    def cluster(self) -> Cluster:
        """The same for the planner, with the host memory that the table assumes."""
        from sd_lightning.planner.devices import Cluster

        return Cluster(self.device, self.count)

    @property
    def precision(self) -> str:
        """Lightning's name of the fastest mixed precision."""
        peaks = self.device.peak_tflops
        return "16-mixed" if peaks["bfloat16"] < peaks["float16"] else "bf16-mixed"


def machines(gpus: Iterable[str] | None = None) -> list[Machine]:
    """Return the machines of the tables, the smallest GPU first.

    Args:
        gpus: Names of tables in ``conf/devices``; all if not given.

    Raises:
        SystemExit: There is no such table.
    """
    from sd_lightning.planner.devices import tables

    known = tables()
    unknown = sorted(set(gpus or ()) - set(known))
    if unknown:
        raise SystemExit(f"costs: got gpus with {unknown[0]}; expected names of {', '.join(known)}")
    return [
        Machine(name, device, count)
        for name, device in known.items()
        if gpus is None or name in gpus
        for count in ((1,) if device.link_gb_per_s is None else (1, TOGETHER))
    ]


def measure(
    *, models: dict[str, int] = MODELS, gpus: Iterable[str] | None = None, pre_trained: str = PRE_TRAINED
) -> dict[str, float]:
    """Predict all cells.

    Args:
        models: Name -> side of the images, pixels.
        gpus: Names of tables in ``conf/devices``; all if not given.
        pre_trained: The model that is pre-trained in two phases.
    """
    import deepspeed  # noqa: F401  without it, columns would be empty

    from sd_lightning import LatentDiffusion

    metrics: dict[str, float] = {}
    found = machines(gpus)
    for name in dict.fromkeys([*models, pre_trained]):
        model = LatentDiffusion.build(name, device="meta")  # its traces serve all GPUs
        for machine in found:
            if name in models:
                metrics |= cells(model, f"{name}_{machine}", machine, models[name])
            if name == pre_trained and machine.count == TOGETHER:
                metrics |= phases(model, name, machine)
            print(name, machine, file=sys.stderr, flush=True)
    return {key: float(f"{value:.4g}") for key, value in metrics.items()}


def cells(model: LatentDiffusion, prefix: str, machine: Machine, resolution: int) -> dict[str, float]:
    """Return the figures of all strategies for a machine."""
    from sd_lightning.planner.forecast import GB
    from sd_lightning.planner.search import Search

    cluster = machine.cluster
    search = Search(model, _run(machine, resolution), cluster, candidates=_candidates(), tf32=True)
    found = search.plans()
    for reason in found.skip_reasons:
        print(f"{prefix}: {reason}", file=sys.stderr)
    fitting, too_large = {plan.candidate.name: plan for plan in found.best}, found.too_large
    metrics = {}
    if any(plan.candidate.name == GEMINI for plan in too_large):
        partly = search.with_changes(search.run, cluster, _offloading_partly()).plans().best
        if partly:
            fitting[GEMINI] = partly[0]
            too_large = tuple(plan for plan in too_large if plan.candidate.name != GEMINI)
            metrics[f"{prefix}_{GEMINI}_offloaded"] = partly[0].candidate.settings[FRACTION]
    for name, plan in fitting.items():
        metrics[f"{prefix}_{name}_gb"] = plan.memory.device / GB
        metrics[f"{prefix}_{name}_images_per_second"] = plan.images_per_second
        metrics[f"{prefix}_{name}_batch"] = plan.run.batch_size
        if name.endswith("_offload") or FRACTION in plan.candidate.settings:
            metrics[f"{prefix}_{name}_host_gb"] = plan.memory.host / GB
    for plan in too_large:
        key = f"{prefix}_{plan.candidate.name}_needs"
        if plan.memory.device > cluster.memory:
            metrics[f"{key}_gb"] = plan.memory.device / GB
        if plan.memory.host > cluster.host:
            metrics[f"{key}_host_gb"] = plan.memory.host / GB
    return metrics


def phases(model: LatentDiffusion, name: str, machine: Machine) -> dict[str, float]:
    """Return images per second of the two phases of pre-training: stored, encoded in the step, and encoding alone."""
    metrics = {}
    for resolution in TWO_PHASES.images:
        prefix = f"{name}_{resolution}_{machine}"
        for kind, encodes in (("stored", False), ("online", True)):
            plan = _fastest(model, machine, _run(machine, resolution, encodes=encodes))
            if plan is not None:
                metrics[f"{prefix}_{kind}_images_per_second"] = plan.images_per_second
        seconds = _seconds_to_encode(model, machine, resolution)
        metrics[f"{prefix}_encoding_images_per_second"] = machine.count / seconds
    return metrics


def _fastest(model: LatentDiffusion, machine: Machine, run: TrainingRun) -> TrainingPlan | None:
    """Return the fastest plan of a step of the recipe's size, if one fits; nothing is offloaded."""
    from sd_lightning.planner.search import Search

    kept = [each for each in _candidates() if not each.name.endswith("_offload")]
    options = {"batch_size": TWO_PHASES.batch_size, "candidates": kept, "tf32": True}
    found = Search(model, run, machine.cluster, **options).plans().best
    return found[0] if found else None


def _seconds_to_encode(model: LatentDiffusion, machine: Machine, resolution: int) -> float:
    """Return the seconds in which one GPU encodes an image and its caption, as many at a time as `precompute` does."""
    from sd_lightning.models.encoder import images_per_call
    from sd_lightning.planner.passes import encoding_traces
    from sd_lightning.planner.roofline import Speeds

    count, speeds = images_per_call(resolution, resolution), Speeds.of(machine.device).with_tf32()
    traces = encoding_traces(model, _run(machine, resolution), count)
    return sum(float(speeds.seconds(each, 0).sum()) for each in traces) / count


def _run(machine: Machine, resolution: int, **options: Any) -> TrainingRun:
    import torch

    from sd_lightning.planner.run import TrainingRun

    return TrainingRun(
        1,
        resolution,
        machine.precision,
        world_size=machine.count,
        optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True),
        encoder_dtype=torch.float16 if machine.precision == "16-mixed" else torch.bfloat16,
        averages=True,
        **options,
    )


def _candidates() -> list[Any]:
    from sd_lightning.strategies.presets import candidates

    return [each for each in candidates() if each.name in STRATEGIES]


def _offloading_partly() -> list[Any]:
    from sd_lightning.strategies.presets import candidates

    return [each for each in candidates() if each.strategy == GEMINI and FRACTION in each.settings]


def suited(count: int) -> Iterator[str]:
    """Yield the strategies that are for a number of GPUs, in the order of the tables."""
    names = {each.name for each in _candidates() if each.suits(count)}
    yield from (name for name in STRATEGIES if name in names)
