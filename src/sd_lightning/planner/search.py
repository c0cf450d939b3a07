"""Search for the fastest plan that fits: strategy, offload fractions, checkpointing, micro-batch and accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.calibration import hardware
from sd_lightning.planner.candidates import Candidate
from sd_lightning.planner.checkpointing import Choice, Simulation
from sd_lightning.planner.devices import Device
from sd_lightning.planner.footprint import Footprint
from sd_lightning.planner.forecast import GB, Forecast, Forecaster
from sd_lightning.planner.passes import encoding_recordings
from sd_lightning.planner.roofline import Speeds, StepTime, Work, step_time
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.segments import Reserved
from sd_lightning.planner.subject import Subject
from sd_lightning.planner.timeline import Timeline, timeline
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
class Cluster:
    """The GPUs of a run, of one kind, in one machine."""

    device: Device
    count: int = 1
    host_memory: int | None = None
    """Bytes per GPU; the device table's if not given."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"plan got gpus={self.count}; expected at least 1")
        if self.host_memory is not None and self.host_memory <= 0:
            raise UsageError(f"plan got host_gb={self.host_memory / GB}; expected gigabytes per GPU, above 0")

    @property
    def memory(self) -> int:
        """Usable bytes of a GPU."""
        return self.device.usable_memory

    @property
    def host(self) -> int:
        """Bytes of host memory per GPU."""
        return self.device.host_memory if self.host_memory is None else self.host_memory


@dataclass(frozen=True)
class Plan:
    """A way to train, with its predicted memory and time."""

    candidate: Candidate
    run: TrainingRun
    """With the chosen micro-batch, accumulation and checkpointing."""
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

    best: tuple[Plan, ...]
    """The fastest plan of each candidate that fits, the fastest first."""
    too_large: tuple[Plan, ...]
    """Candidates that do not fit, with a micro-batch of 1 or the smallest allowed; the smallest first."""
    skip_reasons: tuple[str, ...]
    """Why candidates could not be considered."""
    speeds: Speeds
    cluster: Cluster
    considered: tuple[Plan, ...] = ()
    """All plans that fit, of every candidate, batch size and choice of recomputation."""


class Search:
    """The candidates for one model and one kind of training on one cluster.

    Args:
        model: On any device, or what else is trained; it is not changed.
        run: Settings of the run. Its ``batch_size``, ``accumulate`` and ``world_size`` are chosen here.
        cluster: The GPUs.
        candidates: Strategies to compare, the simplest first: of two that are equally fast, the first is taken.
        speeds: What their machine reaches, whose cores the processes share; assumed from the device table if not given.
        batch_size: Samples per optimizer step on all GPUs; if not given, the fewest that are the fastest.
        micro_batches: Samples per forward pass and process to choose from, ascending; all if not given.
        checkpointing: Whether blocks are recomputed; "auto": as few activations as it takes to fit; None is
                the faster of False and "auto".

    Raises:
        UsageError: The batch size cannot be divided among the GPUs.
    """

    def __init__(
        self,
        model: LatentDiffusion | Subject,
        run: TrainingRun,
        cluster: Cluster,
        *,
        candidates: Iterable[Candidate],
        speeds: Speeds | None = None,
        batch_size: int | None = None,
        micro_batches: Sequence[int] | None = None,
        checkpointing: Recompute | None = None,
        tf32: bool = False,
    ) -> None:
        if batch_size is not None and (batch_size < 1 or batch_size % cluster.count):
            raise UsageError(
                f"plan got data.batch_size={batch_size} for {cluster.count} GPU(s); expected a multiple of "
                f"{cluster.count}, e.g. data.batch_size={8 * cluster.count}"
            )
        self._model = model
        self.run = replace(run, world_size=cluster.count)
        self.cluster = cluster
        self._measured = speeds or Speeds.of(cluster.device)
        self._speeds = self._measured.shared_by(cluster.count)
        self._batch_size = batch_size
        self._per_gpu = None if batch_size is None else batch_size // cluster.count
        self._micro_batches = micro_batches
        self._choices: tuple[Recompute, ...] = (False, "auto") if checkpointing is None else (checkpointing,)
        self._forecasters: dict[bool, Forecaster] = {}
        self._simulations: dict[tuple[Trace, int], Simulation] = {}
        self._candidates = list(candidates)
        self._tf32 = tf32

    def plans(self) -> Plans:
        """Compare all candidates."""
        found: list[Plan] = []
        considered: list[Plan] = []
        large: list[Plan] = []
        skip_reasons: dict[str, None] = {}
        for candidate in self._candidates:
            if not candidate.suits(self.cluster.count):
                continue
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
                found.append(self._fastest(fitting))
            elif made:
                large.append(min(made, key=self._excess))
        too_large = tuple(sorted(large, key=self._excess))
        best = _fastest_first(found, max(_EQUAL, self._speeds.spread))
        return Plans(best, too_large, tuple(skip_reasons), self._speeds, self.cluster, tuple(considered))

    def timeline(self, plan: Plan) -> Timeline:
        """Return the memory of a plan's step, operation by operation."""
        return timeline(*self._traced(plan))

    def segments(self, plan: Plan) -> Reserved:
        """Return what CUDA's allocator reserves for a plan's activations and gradients."""
        forecaster, footprint = self._traced(plan)
        return forecaster.segments(footprint)

    def _traced(self, plan: Plan) -> tuple[Forecaster, Footprint]:
        """Return what traces a plan with what its blocks keep, and what its strategy holds."""
        forecaster = Forecaster(self._model, plan.run)
        footprint = plan.candidate.footprint(forecaster.workload)
        assert footprint is not None
        return forecaster, footprint

    def within(self, memory: int, candidates: Iterable[Candidate] | None = None) -> Search:
        """Return the same search for GPUs of which a plan may take another number of bytes."""
        device = replace(self.cluster.device, memory_gib=memory / self.cluster.memory * self.cluster.device.memory_gib)
        return Search(
            self._model,
            self.run,
            replace(self.cluster, device=device),
            speeds=self._measured,
            batch_size=self._batch_size,
            micro_batches=self._micro_batches,
            checkpointing=self._choices[0] if len(self._choices) == 1 else None,
            candidates=self._candidates if candidates is None else candidates,
            tf32=self._tf32,
        )

    def with_changes(self, run: TrainingRun, cluster: Cluster, candidates: Iterable[Candidate] | None = None) -> Search:
        """Return a search for any batch size, in which blocks are recomputed unless that was excluded."""
        options: dict[str, Any] = {"checkpointing": self._choices[-1], "tf32": self._tf32}
        options["candidates"] = self._candidates if candidates is None else candidates
        options["micro_batches"] = self._micro_batches if self._per_gpu is not None else None
        return Search(self._model, run, cluster, **options)

    def smallest_that_fits(self) -> Plan | None:
        """Return a plan with the smallest micro-batch that fits, if there is one; of the simplest strategy."""
        recompute = self._choices[-1]
        for candidate in self._candidates:
            if not candidate.suits(self.cluster.count):
                continue
            try:
                footprint = candidate.footprint(self._forecaster(recompute).workload)
            except UsageError:
                continue
            if footprint is not None:
                plan = self._plan(candidate, recompute, footprint, self._sizes[0], least=True)
                if plan.fits:
                    return plan
        return None

    def _of(self, candidate: Candidate, recompute: Recompute) -> Iterator[Plan]:
        """Yield plans of a candidate with the batch sizes that are worth a try; with the smallest if none fits."""
        forecaster = self._forecaster(recompute)
        once = candidate.footprint(forecaster.workload)
        several = candidate.footprint(replace(forecaster.workload, accumulates=True))
        if once is None or several is None:
            return
        sizes = self._sizes

        def of(size: int, *, least: bool) -> Plan:
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
            self._forecasters[whole] = Forecaster(self._model, replace(self.run, gradient_checkpointing=whole))
        return self._forecasters[whole]

    def _choice(self, forecaster: Forecaster, footprint: Footprint, size: int, *, least: bool) -> Choice:
        """Return what blocks keep: as little as possible, or as much as fits."""
        key = forecaster.trace(footprint), size
        if key not in self._simulations:
            self._simulations[key] = Simulation(*key, self._speeds, tf32=self._tf32)
        simulation = self._simulations[key]
        if least:
            return simulation.least(footprint.menu)
        limit = int(_SIMULATED * self.cluster.memory)
        return simulation.cheapest(forecaster.step_memory(footprint, size), limit, footprint.menu)

    @cached_property
    def _sizes(self) -> Sequence[int]:
        """The micro-batches to choose from, ascending."""
        if self._micro_batches is not None:
            return self._micro_batches
        if self._per_gpu is None:
            return range(1, _MOST + 1)
        return [size for size in range(1, self._per_gpu + 1) if self._per_gpu % size == 0]

    def _plan(
        self, candidate: Candidate, recompute: Recompute, footprint: Footprint, size: int, *, least: bool
    ) -> Plan:
        forecaster = self._forecaster(recompute)
        chosen = self._choice(forecaster, footprint, size, least=least) if recompute == "auto" else None
        accumulate = 1 if self._per_gpu is None else self._per_gpu // size
        run = replace(forecaster.run, batch_size=size, accumulate=accumulate, kept=chosen.kept if chosen else {})
        memory = forecaster.forecast(footprint, size, chosen.change if chosen else None)
        encoding = self._encoding(size) if run.encodes else 0.0
        again = chosen.seconds if chosen else 0.0
        loading = size / run.loaded_per_second if run.loaded_per_second else 0.0
        settings: dict[str, Any] = {"recomputation": again, "tf32": self._tf32, "loading": loading}
        work = Work(run.world_size, accumulate, encoding, **settings, **_averaging(run, footprint))
        time = step_time(forecaster.trace(footprint), size, footprint.traffic, self._speeds, work)
        return Plan(candidate, run, memory, time, self.cluster)

    def _encoding(self, count: int) -> float:
        """Return the seconds to encode images and captions, which grow with their number."""
        return count * self._encoding_per_sample

    @cached_property
    def _encoding_per_sample(self) -> float:
        count = 4
        seconds = 0.0
        for recording in encoding_recordings(self._forecaster(self._choices[0]).model, self.run, count):
            tf32 = self.run.encoder_dtype != torch.float32  # as `models.tf32.products_of` decides
            seconds += float(self._speeds.seconds(Trace(recording), 0, tf32=tf32).sum())
        return seconds / count

    def _fastest(self, plans: Sequence[Plan]) -> Plan:
        """Return the fastest plan; if the batch is free, the smallest batch that is equally fast."""
        fastest = max(plans, key=lambda plan: plan.images_per_second)
        if self._per_gpu is not None:
            return fastest
        equal = [plan for plan in plans if plan.images_per_second >= (1 - _EQUAL) * fastest.images_per_second]
        return min(equal, key=lambda plan: plan.run.batch_size)

    def _excess(self, plan: Plan) -> int:
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
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle - 1]) else (low, middle)
    return low


def _fastest_first(plans: list[Plan], spread: float) -> tuple[Plan, ...]:
    """Sort by speed; of those whose speeds differ by less than a part of it, the simpler strategy is first."""
    left, found = list(plans), []
    while left:
        fastest = max(plan.images_per_second for plan in left)
        chosen = next(plan for plan in left if plan.images_per_second >= (1 - spread) * fastest)
        found.append(chosen)
        left.remove(chosen)
    return tuple(found)


def plan(model: LatentDiffusion, device: str | Device, num_devices: int = 1, **options: Any) -> Plans:
    """Compare strategies on GPUs of one kind, without one; the arguments are those of :func:`search`."""
    return search(model, device, num_devices, **options).plans()


def search(
    model: LatentDiffusion,
    device: str | Device,
    num_devices: int = 1,
    *,
    run: TrainingRun | None = None,
    host_memory: int | None = None,
    **options: Any,
) -> Search:
    """Prepare a search.

    Args:
        model: On any device; it is not changed.
        device: Name of a table in ``conf/devices``, path of a YAML file like these or of a calibration, or
            the figures themselves.
        num_devices: GPUs.
        run: Settings of the run; training of all weights at the model's own resolution if not given.
        host_memory: Bytes per GPU; what the device's table assumes if not given.
        **options: Of :class:`Search`, with ``candidates``.

    Raises:
        UsageError: The device is unknown, or an option is invalid.
    """
    if isinstance(device, str):
        device, speeds = hardware(device)
        options = {"speeds": speeds, **options}
    cluster = Cluster(device, num_devices, host_memory)
    return Search(model, run or TrainingRun(1, model.resolution), cluster, **options)
