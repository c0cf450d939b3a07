"""Search for the fastest plan that fits: strategy, offload fractions, checkpointing, micro-batch and accumulation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.calibration import hardware
from sd_lightning.planner.checkpointing import Simulated, Simulation
from sd_lightning.planner.devices import Cluster, Device
from sd_lightning.planner.footprint import Candidate, Footprint
from sd_lightning.planner.forecast import GB, Forecast, Forecaster, Timeline
from sd_lightning.planner.passes import captions_encoded, encoding_traces
from sd_lightning.planner.roofline import Speeds, StepTime, Work, step_time
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.segments import Reserved
from sd_lightning.planner.subject import Subject
from sd_lightning.planner.trace import Trace

_MOST = 4096
"""Largest micro-batch that is considered."""
_SIMULATED = 0.99
"""Part of the usable memory that a simulated peak may take; it differs by less from a traced one."""
_FLOAT_BYTES = 4
_EQUAL = 0.01
"""Two plans whose speeds differ by less are equally fast, however well speeds are known."""


Recompute = bool | Literal["auto"]
"""Whether blocks recompute their activations: all of them, none, or as little as fits into the memory."""


@dataclass(frozen=True)
class TrainingPlan:
    """A way to train, with its predicted memory and time."""

    candidate: Candidate
    run: TrainingRun
    """With the chosen micro-batch, accumulation and checkpointing."""
    footprint: Footprint
    """What the strategy holds."""
    memory: Forecast
    time: StepTime
    cluster: Cluster

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of device and host."""
        return self.memory.device <= self.cluster.memory and self.memory.host <= self.cluster.host

    @property
    def lacks(self) -> str:
        """What is missing: "1.6 GB of GPU memory and 2.1 GB of host memory"."""
        device, host = self.memory.device - self.cluster.memory, self.memory.host - self.cluster.host
        missing = [f"{size / GB:.3g} GB of {where}" for size, where in ((device, "GPU"), (host, "host")) if size > 0]
        return " and ".join(f"{each} memory" for each in missing)

    @property
    def recompute(self) -> Recompute:
        return "auto" if self.run.kept else self.run.gradient_checkpointing

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step on all GPUs."""
        return self.run.batch_size * self.run.accumulate * self.cluster.count

    @property
    def images_per_second(self) -> float:
        return self.global_batch / self.time.total

    def dollars_per_million(self, price: float) -> float:
        """Return the dollars for a million images, given those per hour and GPU."""
        return 1e6 / self.images_per_second / 3600 * price * self.cluster.count

    def options(self) -> tuple[str, ...]:
        """Return the command line that trains by this plan."""
        chosen = [*self.candidate.options, f"data.batch_size={self.global_batch}"]
        chosen += [f"trainer.precision={self.run.precision}"]
        chosen += [f"module.encoder_dtype={str(self.run.encoder_dtype).removeprefix('torch.')}"] * self.run.encodes
        chosen += [f"trainer.accumulate_grad_batches={self.run.accumulate}"] * (self.run.accumulate > 1)
        if self.recompute is not False:
            chosen.append(f"speed.gradient_checkpointing={str(self.recompute).lower()}")
        chosen += [f"trainer.devices={self.cluster.count}"] * (self.cluster.count > 1)
        return tuple(chosen)


@dataclass(frozen=True)
class Plans:
    """The result of a search."""

    best: tuple[TrainingPlan, ...]
    """The fastest plan of each candidate that fits, the fastest first."""
    too_large: tuple[TrainingPlan, ...]
    """Candidates that do not fit, with a micro-batch of 1 or the smallest allowed; the smallest first."""
    skip_reasons: tuple[str, ...]
    """Why candidates could not be considered."""
    speeds: Speeds
    cluster: Cluster
    considered: tuple[TrainingPlan, ...] = ()
    """All plans that fit, of every candidate, batch size and choice of recomputation."""


@dataclass(frozen=True, eq=False)
class Search:
    """The candidates for one model and one kind of training on one cluster.

    Raises:
        UsageError: The batch size cannot be divided among the GPUs.
    """

    model: LatentDiffusion | Subject
    """On any device, or what else is trained; it is not changed."""
    run: TrainingRun
    """Settings of the run; its ``batch_size``, ``accumulate`` and ``world_size`` are chosen here."""
    cluster: Cluster
    candidates: Sequence[Candidate]
    """Strategies to compare, the simplest first: of two that are equally fast, the first is taken."""
    speeds: Speeds | None = None
    """What the GPUs' machine reaches, whose cores the processes share; assumed from the device table if not given."""
    batch_size: int | None = None
    """Samples per optimizer step on all GPUs; if not given, the fewest that are the fastest."""
    micro_batches: Sequence[int] | None = None
    """Samples per forward pass and process to choose from, ascending; all if not given."""
    checkpointing: Recompute | None = None
    """Whether blocks are recomputed; "auto": as few activations as it takes to fit; None is the faster of False and
    "auto"."""
    tf32: bool = False
    """Products of float32 matrices use TensorFloat-32."""
    _forecasters: dict[bool, Forecaster] = field(default_factory=dict, init=False)
    _simulations: dict[tuple[Trace, int], Simulation] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        count, batch_size = self.cluster.count, self.batch_size
        if batch_size is not None and (batch_size < 1 or batch_size % count):
            raise UsageError(
                f"plan got data.batch_size={batch_size} for {count} GPU(s); expected a multiple of {count}, e.g. "
                f"data.batch_size={8 * count}"
            )
        object.__setattr__(self, "run", replace(self.run, world_size=count))

    def plans(self) -> Plans:
        """Compare all candidates."""
        fastest: list[TrainingPlan] = []
        considered: list[TrainingPlan] = []
        large: list[TrainingPlan] = []
        skip_reasons: dict[str, None] = {}
        for candidate in self._suited:
            try:
                made = [plan for each in self._choices for plan in self._of(candidate, each)]
            except UsageError as error:  # a package is missing, or the engine cannot train this
                skip_reasons[str(error)] = None
                continue
            if not made:
                skip_reasons[
                    f"{candidate.strategy or 'the strategy'} chooses what it offloads by measuring a step in the run, "
                    "so it cannot be predicted; write strategy=gemini with fractions to plan with it, or train with it "
                    "as it is"
                ] = None
            fitting = [plan for plan in made if plan.fits]
            considered += fitting
            if fitting:
                fastest.append(self._fastest(fitting))
            elif made:
                large.append(min(made, key=self._excess))
        too_large = tuple(sorted(large, key=self._excess))
        best = _fastest_first(fastest, max(_EQUAL, self._speeds.spread))
        return Plans(best, too_large, tuple(skip_reasons), self._speeds, self.cluster, tuple(considered))

    def timeline(self, plan: TrainingPlan) -> Timeline:
        """Return the memory of a plan's step, operation by operation."""
        return Forecaster(self.model, plan.run).timeline(plan.footprint)

    def segments(self, plan: TrainingPlan) -> Reserved:
        """Return what CUDA's allocator reserves for a plan's activations and gradients."""
        return Forecaster(self.model, plan.run).segments(plan.footprint)

    def within(self, memory: int, candidates: Sequence[Candidate] | None = None) -> Search:
        """Return the same search for GPUs of which a plan may take another number of bytes."""
        device, candidates = self.cluster.device, self.candidates if candidates is None else candidates
        device = replace(device, memory_gib=memory / self.cluster.memory * device.memory_gib)
        return replace(self, cluster=replace(self.cluster, device=device), candidates=candidates)

    def with_changes(self, run: TrainingRun, cluster: Cluster, candidates: Sequence[Candidate] | None = None) -> Search:
        """Return a search for any batch size, in which blocks are recomputed unless that was excluded."""
        return replace(
            self,
            run=run,
            cluster=cluster,
            speeds=None,
            batch_size=None,
            micro_batches=None if self.batch_size is None else self.micro_batches,
            checkpointing=self._choices[-1],
            candidates=self.candidates if candidates is None else candidates,
        )

    @cached_property
    def _speeds(self) -> Speeds:
        return (self.speeds or Speeds.of(self.cluster.device)).shared_by(self.cluster.count)

    @cached_property
    def _speeds_of_steps(self) -> Speeds:
        return self._speeds.with_tf32() if self.tf32 else self._speeds

    @property
    def _per_gpu(self) -> int | None:
        return None if self.batch_size is None else self.batch_size // self.cluster.count

    @property
    def _choices(self) -> tuple[Recompute, ...]:
        return (False, "auto") if self.checkpointing is None else (self.checkpointing,)

    @property
    def _suited(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.suits(self.cluster.count)]

    def smallest_that_fits(self) -> TrainingPlan | None:
        """Return a plan with the smallest micro-batch that fits, if there is one; of the simplest strategy."""
        recompute = self._choices[-1]
        for candidate in self._suited:
            try:
                footprint = candidate.footprint(self._forecaster(recompute).workload)
            except UsageError:
                continue
            if footprint is not None:
                plan = self._plan(candidate, recompute, footprint, self._sizes[0], least=True)
                if plan.fits:
                    return plan
        return None

    def _of(self, candidate: Candidate, recompute: Recompute) -> Iterator[TrainingPlan]:
        """Yield plans of a candidate with the batch sizes that are worth a try; with the smallest if none fits."""
        forecaster = self._forecaster(recompute)
        once = candidate.footprint(forecaster.workload)
        sizes = self._sizes
        try:
            several = candidate.footprint(replace(forecaster.workload, accumulates=True))
        except UsageError:  # all samples of a step are in one pass
            several, sizes = once, sizes if self._per_gpu is None else [self._per_gpu]
        if once is None or several is None:
            return

        def of(size: int, *, least: bool) -> TrainingPlan:
            footprint = once if self._per_gpu in (None, size) else several
            return self._plan(candidate, recompute, footprint, size, least=least)

        fitting = _count_that_fit(sizes, lambda size: of(size, least=True).fits)
        tried = sizes[: max(fitting, 1)]
        if self._per_gpu is None:
            # Less than the largest batch may be faster, if less is recomputed then.
            large = {tried[-1]} | ({tried[-1] * part // 8 for part in (5, 6, 7)} if recompute == "auto" else set())
            tried = sorted({size for size in tried if size & (size - 1) == 0} | large - {0})
        for size in tried:
            yield of(size, least=fitting == 0)

    def _forecaster(self, recompute: Recompute) -> Forecaster:
        whole = recompute is True
        if whole not in self._forecasters:
            self._forecasters[whole] = Forecaster(self.model, replace(self.run, gradient_checkpointing=whole))
        return self._forecasters[whole]

    def _choice(self, forecaster: Forecaster, footprint: Footprint, size: int, *, least: bool) -> Simulated:
        """Return what blocks keep: as little as possible, or as much as fits."""
        key = forecaster.trace(footprint), size
        if key not in self._simulations:
            self._simulations[key] = Simulation(*key, self._speeds_of_steps)
        simulation = self._simulations[key]
        if least:
            return simulation.least(footprint.menu)
        limit = int(_SIMULATED * self.cluster.memory)
        return simulation.cheapest(forecaster.step_memory(footprint, size), limit, footprint.menu)

    @cached_property
    def _sizes(self) -> Sequence[int]:
        """The micro-batches to choose from, ascending."""
        if self.micro_batches is not None:
            return self.micro_batches
        if self._per_gpu is None:
            return range(1, _MOST + 1)
        return [size for size in range(1, self._per_gpu + 1) if self._per_gpu % size == 0]

    def _plan(
        self, candidate: Candidate, recompute: Recompute, footprint: Footprint, size: int, *, least: bool
    ) -> TrainingPlan:
        forecaster = self._forecaster(recompute)
        chosen = self._choice(forecaster, footprint, size, least=least) if recompute == "auto" else None
        accumulate = 1 if self._per_gpu is None else self._per_gpu // size
        run = replace(forecaster.run, batch_size=size, accumulate=accumulate, kept=chosen.kept if chosen else {})
        memory = forecaster.forecast(footprint, size, chosen.change if chosen else None)
        encoding = size * self._encoding_per_sample if run.encodes else 0.0
        again = chosen.seconds if chosen else 0.0
        loading = size / run.loaded_per_second if run.loaded_per_second else 0.0
        averaging = _averaging(run, footprint)
        work = Work(run.world_size, accumulate, encoding, recomputation=again, loading=loading, **averaging)
        time = step_time(forecaster.trace(footprint), size, footprint.traffic, self._speeds_of_steps, work)
        return TrainingPlan(candidate, run, footprint, memory, time, self.cluster)

    @cached_property
    def _encoding_per_sample(self) -> float:
        return self.seconds_to_encode(self._speeds)

    def seconds_to_encode(self, speeds: Speeds, count: int = 4) -> float:
        """Return the seconds for an image and its caption, ``count`` of them at a time; they grow with their number."""
        if self.run.encoder_dtype != torch.float32:  # as `models.tf32.products_of` decides
            speeds = speeds.with_tf32()
        traces = encoding_traces(self.model_with_encoders, self.run, count)
        return sum(float(speeds.seconds(trace, 0).sum()) for trace in traces) / count

    def seconds_to_encode_captions(self, count: int) -> float:
        """Return the seconds for a caption, ``count`` of them at a time."""
        speeds = self._speeds if self.run.encoder_dtype == torch.float32 else self._speeds.with_tf32()
        trace = captions_encoded(self.model_with_encoders, self.run.encoder_dtype)
        return float(speeds.seconds(trace, count).sum()) / count

    @property
    def model_with_encoders(self) -> LatentDiffusion:
        """The model, of a search for one with frozen encoders."""
        return self._forecaster(self._choices[0]).model

    def _fastest(self, plans: Sequence[TrainingPlan]) -> TrainingPlan:
        """Return the fastest plan; if the batch is free, the smallest batch that is equally fast."""
        fastest = max(plans, key=lambda plan: plan.images_per_second)
        if self._per_gpu is not None:
            return fastest
        equal = [plan for plan in plans if plan.images_per_second >= (1 - _EQUAL) * fastest.images_per_second]
        return min(equal, key=lambda plan: plan.run.batch_size)

    def _excess(self, plan: TrainingPlan) -> int:
        return max(plan.memory.device - self.cluster.memory, plan.memory.host - self.cluster.host)


def _averaging(run: TrainingRun, footprint: Footprint) -> dict[str, Any]:
    """Return the fields of :class:`Work` for a run's EMA: where it is updated, and what is fetched for that."""
    if not run.averages:
        return {}
    if not run.offload_averages:
        return {"averaged": footprint.averaged, "averaged_on_host": footprint.averaged_on_host}
    on_host = footprint.averaged + footprint.averaged_on_host
    return {"averaged_on_host": on_host, "fetched": _FLOAT_BYTES * footprint.averaged}


def _count_that_fit(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return how many of the ascending sizes fit, by bisection: memory grows with the batch."""
    low, high = 0, 1
    while high <= len(sizes) and fits(sizes[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(sizes) + 1)
    return bisect_left(sizes, True, low, high - 1, key=lambda size: not fits(size))


def _fastest_first(plans: list[TrainingPlan], spread: float) -> tuple[TrainingPlan, ...]:
    """Sort by speed; of those whose speeds differ by less than a part of it, the simpler strategy is first."""
    left, ordered = list(plans), []
    while left:
        fastest = max(plan.images_per_second for plan in left)
        chosen = next(plan for plan in left if plan.images_per_second >= (1 - spread) * fastest)
        ordered.append(chosen)
        left.remove(chosen)
    return tuple(ordered)


def plan(
    model: LatentDiffusion,
    device: str | Device,
    num_devices: int = 1,
    *,
    candidates: Sequence[Candidate] = (),
    run: TrainingRun | None = None,
    host_memory: int | None = None,
    **options: Any,
) -> Plans:
    """Compare strategies on GPUs of one kind, without one.

    Args:
        model: On any device; it is not changed.
        device: Name of a table in ``conf/devices``, path of a YAML file like these or of a calibration, or
            the figures themselves.
        num_devices: GPUs.
        candidates: Strategies to compare, the simplest first: ``sd_lightning.strategies.presets.candidates()`` are all.
        run: Settings of the run; training of all weights at the model's own resolution if not given.
        host_memory: Bytes per GPU; what the device's table assumes if not given.
        **options: Of :class:`Search`.

    Raises:
        UsageError: There are no candidates, the device is unknown, or an option is invalid.
    """
    if not candidates:
        raise UsageError(
            "plan got no candidates; expected the strategies to compare; write plan(…, candidates=candidates()), with "
            "candidates from sd_lightning.strategies.presets"
        )
    if isinstance(device, str):
        device, speeds = hardware(device)
        options = {"speeds": speeds, **options}
    cluster = Cluster(device, num_devices, host_memory)
    run = run or TrainingRun(1, model.resolution)
    return Search(model, run, cluster, candidates, **options).plans()
