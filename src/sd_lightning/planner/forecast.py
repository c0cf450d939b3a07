"""Forecast of the device and host memory of a training run, without allocating it; and of a step by operation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sd_lightning.models.checkpointing import KINDS
from sd_lightning.models.encoder import CACHED_CAPTIONS_BYTES, images_per_call
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.footprint import Footprint, Holding, When, Workload
from sd_lightning.planner.passes import caption_numel, captions_encoded, drawing_peak, encoding_peak
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.segments import Reserved, replayed
from sd_lightning.planner.subject import DiffusionSubject, Subject
from sd_lightning.planner.trace import Trace
from sd_lightning.quantization.casting import kept_in_float32
from sd_lightning.state.averaging import room_bytes
from sd_lightning.state.host import pinned_bytes

GB = 1e9
DEVICE_ALLOWANCE = int(0.6 * GB)
"""Assumed, not measured: the CUDA context, workspaces of cuBLAS and cuDNN, and NCCL's buffers."""
HOST_ALLOWANCE = int(2.0 * GB)
"""Assumed, not measured: Python, torch and the CUDA libraries in host memory."""
_FLOAT_BYTES = 4
_SLICE_BYTES = 3 * 16 * 2**20
"""Buffers that stream a checkpoint to disk."""

OTHERS = "others"
"""Activations of normalisations, activation functions, sums, copies and casts."""

Parts = Mapping[str, int]
"""Bytes by kind."""
_TRACES: WeakKeyDictionary[LatentDiffusion | Subject, dict[Hashable, Trace]] = WeakKeyDictionary()
"""Training steps of each model by what they depend on: most forecasts differ in other settings."""


@dataclass(frozen=True)
class Phase:
    """The memory of one process in a part of a run, at its peak."""

    name: str
    """For tables: "a training step", "the optimizer's step", …"""
    parts: Parts
    where: str = ""
    """The moment of the peak: "at 61 % of the step, in unet.up_blocks.3.resnets.0"."""

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    def line(self) -> str:
        """Return its parts as text, the largest first."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in largest if size >= 0.005 * GB)
        return f"{self.nbytes / GB:5.2f} GB in {self.name}{self.where and ', '}{self.where}: {parts or 'nothing'}"


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one process: the phases of a run, none of which overlap."""

    on_device: tuple[Phase, ...]
    on_host: tuple[Phase, ...]
    disk: int = 0
    """Bytes of files that hold optimizer states."""

    @property
    def device(self) -> int:
        """Peak of the device's memory, bytes."""
        return self.device_phase.nbytes

    @property
    def host(self) -> int:
        """Peak of host memory, bytes."""
        return self.host_phase.nbytes

    @property
    def device_phase(self) -> Phase:
        """The phase with the most device memory."""
        return max(self.on_device, key=lambda phase: phase.nbytes)

    @property
    def host_phase(self) -> Phase:
        """The phase with the most host memory."""
        return max(self.on_host, key=lambda phase: phase.nbytes)

    def lines(self) -> list[str]:
        """Return a readable summary."""
        disk = [f"disk   {self.disk / GB:5.2f} GB of optimizer states"] * bool(self.disk)
        return [f"device {self.device_phase.line()}", f"host   {self.host_phase.line()}", *disk]


@dataclass(frozen=True)
class Timeline:
    """The memory of one process during each operation of a forward and backward pass."""

    kinds: Mapping[str, np.ndarray]
    """Bytes by kind; of activations by the kind of operation that made them: "activations: attention"."""
    blocks: Sequence[str]
    """The block of each operation; "" outside of blocks."""
    is_backward: np.ndarray
    description: str
    """Of what the peak consists: "at 61 % of its operations, backward in unet.up_blocks.3: …"."""

    @property
    def total(self) -> np.ndarray:
        return sum(self.kinds.values(), np.zeros(len(self.blocks)))


class Forecaster:
    """Forecasts for one model and one way to train it, under any strategy and batch size.

    Args:
        model: On any device, or what else is trained; it is not changed.
        run: Settings of the run.
    """

    def __init__(self, model: LatentDiffusion | Subject, run: TrainingRun) -> None:
        self._given = model
        self.subject = DiffusionSubject(model) if isinstance(model, LatentDiffusion) else model
        self.run = run
        self._curves: dict[Footprint, StepCurves] = {}
        self._activations: dict[Hashable, int] = {}
        """Of encoding and drawing, by what they depend on."""

    @cached_property
    def workload(self) -> Workload:
        """What a strategy is given to train."""
        run = self.run
        return Workload(self.subject.weights(run), run.precision, run.optimizer, run.world_size, run.accumulate > 1)

    @property
    def model(self) -> LatentDiffusion:
        """The model with the frozen encoders, which encodes and draws."""
        assert isinstance(self._given, LatentDiffusion)
        return self._given

    def trace(self, footprint: Footprint) -> Trace:
        """Return the trace of a training step in a footprint's dtypes."""
        run, dtypes = self.run, (footprint.dtype, footprint.autocast)
        known = _TRACES.setdefault(self._given, {})
        recomputed = run.gradient_checkpointing, *sorted((name, each.value) for name, each in run.kept.items())
        key = run.resolution, run.train_text_encoder, repr(run.lora), run.preserves, recomputed, *dtypes
        if key not in known:
            known[key] = self.subject.trace(run, *dtypes)
        return known[key]

    def step_memory(self, footprint: Footprint, batch_size: int) -> np.ndarray:
        """Return the bytes on the device during each operation of a forward and backward pass."""
        return self._curves_of(footprint).total(batch_size) + sum(self.always(footprint).values())

    def _curves_of(self, footprint: Footprint) -> StepCurves:
        if footprint not in self._curves:
            self._curves[footprint] = StepCurves(self.trace(footprint), footprint)
        return self._curves[footprint]

    def segments(self, footprint: Footprint) -> Reserved:
        """Return what CUDA's allocator reserves for activations and gradients of the run's steps.

        Args:
            footprint: What the strategy holds.
        """
        trace = self.trace(footprint)
        kept = _held(footprint.device, When.AS_READY)["gradients"]
        return replayed(trace, self.run.batch_size, min(kept / max(trace.gradient_bytes, 1), 1.0))

    def timeline(self, footprint: Footprint) -> Timeline:
        """Return the memory of the run's step, operation by operation."""
        trace, size = self.trace(footprint), self.run.batch_size
        count = len(trace.operations)
        kinds = {kind: np.full(count, float(nbytes)) for kind, nbytes in self.always(footprint).items()}
        for kind, curve in self._curves_of(footprint).curves.items():
            kinds[kind] = kinds.get(kind, 0) + curve
        makers = [trace.operations[index] for index in trace.born.clip(max=count - 1)]
        made_by = np.array([KINDS.get(each.cost.name, OTHERS) for each in makers])
        activations = {each: trace.live(size, made_by == each) for each in (*dict.fromkeys(KINDS.values()), OTHERS)}
        kinds |= {f"activations: {kind}": curve for kind, curve in activations.items()}
        total = sum(kinds.values(), np.zeros(count))
        peak = int(total.argmax())
        shares = sorted(((kind, int(curve[peak])) for kind, curve in activations.items()), key=lambda each: -each[1])
        description = (
            f"{_moment(trace, peak)}: {sum(nbytes for _, nbytes in shares) / GB:.2f} GB of {total[peak] / GB:.2f} are "
            f"activations ({', '.join(f'{kind} {nbytes / GB:.2f}' for kind, nbytes in shares if nbytes)})"
        )
        by_block: Counter[str] = Counter()
        is_live = (trace.born <= peak) & (trace.freed > peak)
        for maker, nbytes in zip(itertools.compress(makers, is_live), trace.sizes(size)[is_live].tolist()):
            by_block[maker.block] += nbytes
        del by_block[""]
        for block, nbytes in by_block.most_common(1):
            description += f"; {block} made {nbytes / GB:.2f} of them"
        kinds = {kind: curve for kind, curve in kinds.items() if curve.any()}
        return Timeline(kinds, [each.block for each in trace.operations], trace.is_backward, description)

    def forecast(
        self, footprint: Footprint, batch_size: int | None = None, change: np.ndarray | None = None
    ) -> Forecast:
        """Predict the memory of a run.

        Args:
            footprint: What the strategy holds: ``strategy.footprint(forecaster.workload)``.
            batch_size: Samples per forward pass and process; the run's if not given.
            change: Bytes that are simulated to be more or less during each operation of a pass.
        """
        run, always = self.run, self.always(footprint)
        phases = [
            self._curves_of(footprint).phase(batch_size or run.batch_size, always, change),
            Phase("the optimizer's step", always + _held(footprint.device, When.AS_READY, When.UPDATE)),
        ]
        waiting = Counter({"encoders": self._kept_encoders * run.offload_encoders})
        if run.encodes:
            encoding = Counter(activations=self._encoding(batch_size or run.batch_size))
            phases.append(Phase("encoding", always + waiting + encoding))
        elif run.offload_encoders and self._beside_trained:
            phases.append(Phase("encoding", always + Counter(encoders=self._beside_trained)))
        if run.sample_batch_size:
            drawn = self._drawing(run.sample_batch_size, footprint.dtype, run.encoder_dtype)
            gathered = Counter({"gathered weights": footprint.drawing, "activations": drawn})
            swapped = _held(footprint.device, *self._swapped)
            phases.append(Phase("drawing images", always + waiting + gathered + swapped))
        if run.prior_batch_size:
            phases.append(Phase("drawing class images", self._class_images))
        return Forecast(tuple(phases), self._host_phases(footprint, waiting), footprint.disk)

    def always(self, footprint: Footprint) -> Counter[str]:
        """Return the bytes that are on the device during the whole training, by kind."""
        run = self.run
        always = _held(footprint.device, When.ALWAYS)
        always["allowance"] += DEVICE_ALLOWANCE
        if run.averages:
            averaged, apart = footprint.averaged, run.offload_averages
            always["EMA"] += 0 if apart else _FLOAT_BYTES * averaged
            always["EMA"] += room_bytes(averaged, is_apart=apart, is_cast=footprint.master_dtype != torch.float32)
        if not run.offload_encoders:
            always["encoders"] += self._kept_encoders
        always["frozen networks"] += self._frozen_bytes
        return always

    @cached_property
    def _frozen_bytes(self) -> int:
        return self.subject.frozen_bytes(self.run, self.workload.lightning_dtype)

    @property
    def _swapped(self) -> tuple[When, ...]:
        """What is held while the EMA is in the trained weights' place."""
        if not self.run.averages:
            return ()
        return (When.SWAPPED, When.SWAPPED_APART) if self.run.offload_averages else (When.SWAPPED,)

    def _host_phases(self, footprint: Footprint, waiting: Counter[str]) -> tuple[Phase, ...]:
        run = self.run
        at_home = Counter({kind: pinned_bytes(nbytes) for kind, nbytes in waiting.items()})
        kept = at_home + _held(footprint.host, When.ALWAYS, When.AS_READY)
        apart = pinned_bytes(_FLOAT_BYTES * footprint.averaged) * run.offload_averages
        averages = _FLOAT_BYTES * footprint.averaged_on_host + apart
        training = Counter({"EMA": averages * run.averages, "buffers": _SLICE_BYTES})
        if run.sample_batch_size:
            training += _held(footprint.host, *self._swapped)
        if run.cache_latents and run.encodes:
            model, size = self.model, run.resolution
            encoded = math.prod(model.latent_space.encoded_shape(size, size))
            training["cached latents"] = run.num_images * encoded * _FLOAT_BYTES
        if run.encodes and run.offload_encoders and not run.train_text_encoder and not run.random_captions:
            captions = run.num_images * caption_numel(self.model) * run.encoder_dtype.itemsize
            training["cached captions"] = min(captions, CACHED_CAPTIONS_BYTES)
        allowance = Counter(allowance=HOST_ALLOWANCE)
        # Encoders are read, cast and moved; then the trained networks are read, if from files a weight at a time; then
        # the optimizer makes its states.
        frozen = Counter(encoders=self._encoders_being_read(is_locked=at_home.total() > 0))
        largest = _FLOAT_BYTES * max(weight.numel for weight in self.workload.weights)
        adapters = _FLOAT_BYTES * sum(w.numel for w in self.workload.trained) if run.lora is not None else 0
        reading = at_home + _held(footprint.host, When.ALWAYS) + Counter({"weights being read": largest + adapters})
        del reading["optimizer states"]
        if run.lora is not None and run.lora.base is not None:
            reading["quantised base"] = self._frozen_bytes
        parts = {"training": kept + training, "loading encoders": frozen, "loading": reading}
        if not run.from_files:
            parts["loading"] = Counter({"the whole model": _FLOAT_BYTES * sum(self._numel.values())})
        return tuple(Phase(name, each + allowance) for name, each in parts.items())

    @cached_property
    def _frozen(self) -> list[str]:
        """Names of the networks that only encode."""
        trained = {weight.name.partition(".")[0] for weight in self.workload.weights}
        return [name for name in self.subject.networks if name not in trained]

    @cached_property
    def _numel(self) -> Mapping[str, int]:
        """Number of weights by network."""
        return {name: sum(p.numel() for p in network.parameters()) for name, network in self.subject.networks.items()}

    def _read_width(self, name: str) -> int:
        """Return the bytes per weight of a frozen network while it is read: language models stay in 16 bits."""
        family = self._given.family if isinstance(self._given, LatentDiffusion) else None
        return _FLOAT_BYTES // (2 if family is not None and name in family.frozen else 1)

    def _encoders_being_read(self, *, is_locked: bool) -> int:
        """Return the most bytes on the host until encoders are cast, and copied one by one to page-locked memory."""
        held = {name: self._read_width(name) * self._numel[name] for name in self._frozen}
        most = sum(held.values())
        for name in held if is_locked else ():
            cast = self._bytes_of([name])
            held[name] = cast + pinned_bytes(cast)
            most = max(most, sum(held.values()))
            held[name] -= cast
        return most

    @cached_property
    def _encoder_bytes(self) -> int:
        return self._bytes_of(self._frozen)

    @property
    def _kept_encoders(self) -> int:
        """Bytes of the encoders after loading; with a store for all that they would encode, they are left out."""
        return self._encoder_bytes if self.run.encodes or self.run.train_text_encoder else 0

    @cached_property
    def _beside_trained(self) -> int:
        """Bytes of the frozen text encoders that compute in each step, as others are trained."""
        frozen = self.model.family.frozen if self.run.train_text_encoder else ()
        return self._bytes_of(name for name in self._frozen if name in frozen)

    def _bytes_of(self, names: Iterable[str], dtype: torch.dtype | None = None) -> int:
        """Return the bytes of networks in a dtype, that of the encoders if not given; in float32 what overflows."""
        dtypes = dict.fromkeys(names, dtype or self.run.encoder_dtype)
        if "vae" in dtypes and isinstance(self._given, LatentDiffusion):
            dtypes["vae"] = self.model.family.vae_dtype(self.model.vae, dtypes["vae"])
        wide = [w.numel() for name, each in dtypes.items() for w in kept_in_float32(self.subject.networks[name], each)]
        return sum(dtypes[name].itemsize * self._numel[name] for name in dtypes) + 2 * sum(wide)

    @property
    def encoder_memory(self) -> int:
        """Bytes on the GPU of a process that only encodes, as many images at a time as ``LatentEncoder`` takes."""
        count = images_per_call(self.run.resolution, self.run.resolution)
        activations = max(encoding_peak(self.model, self.run, count), self._encoding_captions(count))
        return DEVICE_ALLOWANCE + self._encoder_bytes + activations

    def _encoding(self, batch_size: int) -> int:
        """Return the bytes of activations while a batch is encoded."""
        run = self.run
        at_a_time = min(
            run.num_images if run.cache_latents else batch_size, images_per_call(run.resolution, run.resolution)
        )
        count = 1 if run.offload_encoders else at_a_time
        if count not in self._activations:
            self._activations[count] = encoding_peak(self.model, run, count)
        return max(self._activations[count], 0 if run.train_text_encoder else self._encoding_captions(batch_size))

    def _encoding_captions(self, count: int) -> int:
        return captions_encoded(self.model, self.run.encoder_dtype).peak(count)

    def _drawing(self, count: int, dtype: torch.dtype, vae_dtype: torch.dtype) -> int:
        """Return the bytes of activations while images are drawn."""
        key = count, dtype, vae_dtype
        if key not in self._activations:
            self._activations[key] = drawing_peak(self.model, self.run, count, dtype, vae_dtype)
        return self._activations[key]

    @cached_property
    def _class_images(self) -> Parts:
        """The whole model in the dtype of class images, or its quantised base, and the activations of drawing them."""
        model, dtype = self.model, self.run.prior_dtype
        vae_dtype = model.family.vae_dtype(model.vae, dtype)
        weights = self._bytes_of(model.networks, dtype)
        if self._frozen_bytes:
            denoiser = model.family.denoiser
            own = sum(w.numel for w in self.workload.weights if w.name.startswith(f"{denoiser}.") and not w.is_trained)
            weights += self._frozen_bytes + dtype.itemsize * own - self._bytes_of([denoiser], dtype)
        drawn = self._drawing(self.run.prior_batch_size, dtype, vae_dtype)
        return {"weights": weights, "activations": drawn, "allowance": DEVICE_ALLOWANCE}


class StepCurves:
    """The memory of a training step under a strategy, operation by operation.

    Args:
        trace: Of the step, in the footprint's dtypes.
        footprint: What the strategy holds.
    """

    def __init__(self, trace: Trace, footprint: Footprint) -> None:
        self.trace = trace
        ready, is_backward = trace.ready(), trace.is_backward
        shapes = {
            When.FORWARD: ~is_backward,
            When.COMPUTE: np.ones_like(ready),
            When.BACKWARD: is_backward,
            When.AS_READY: ready,
            When.UNTIL_UPDATE: ready,
            When.UNTIL_READY: 1 - ready,
        }
        in_block = [
            (footprint.in_backward if operation.is_backward else footprint.in_forward).get(operation.block, 0)
            for operation in trace.operations
        ]
        self.curves: dict[str, np.ndarray] = {"blocks in use": np.array(in_block)}
        """Bytes that are held in part of the step, by kind."""
        for held in footprint.device:
            if held.when in shapes:
                self.curves[held.kind] = self.curves.get(held.kind, 0) + held.nbytes * shapes[held.when]
        self._sum = sum(self.curves.values(), np.zeros(len(ready)))

    def total(self, batch_size: int) -> np.ndarray:
        """Return the bytes of activations and of what is held in part of the step, for each operation."""
        return self.trace.live(batch_size) + self._sum

    def phase(self, batch_size: int, always: Parts, change: np.ndarray | None = None) -> Phase:
        """Return the memory of the step at its peak.

        Args:
            batch_size: Samples per forward pass and process.
            always: Bytes that are held during the whole step.
            change: Bytes that are simulated to be more or less during each operation.
        """
        total = self.total(batch_size) + (0 if change is None else change)
        peak = int(total.argmax())
        parts = Counter(always)
        for kind, curve in self.curves.items():
            parts[kind] += int(curve[peak])
        parts["activations"] += int(total[peak] - self._sum[peak])
        return Phase("a training step", +parts, _moment(self.trace, peak))


def _moment(trace: Trace, index: int) -> str:
    """Return when an operation runs: "at 61 % of its operations, backward in unet.up_blocks.3.resnets.0"."""
    operation = trace.operations[index]
    where = f" in {operation.block}" if operation.block else ""
    direction = "backward" if operation.is_backward else "forward"
    return f"at {100 * index / len(trace.operations):.0f} % of its operations, {direction}{where}"


def _held(holdings: Iterable[Holding], *when: When) -> Counter[str]:
    """Return the bytes that are held at certain times, by kind."""
    parts: Counter[str] = Counter()
    for held in holdings:
        if held.when in when:
            parts[held.kind] += held.nbytes
    return parts
