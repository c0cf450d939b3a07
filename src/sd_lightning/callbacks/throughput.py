"""What a run measures of itself: images per second, wait for data, peak memory, MFU; and memory of the engine."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.callbacks.lightning_loops import FETCH
from sd_lightning.callbacks.steps import PauseListener, StepCallback, paused
from sd_lightning.data.contract import global_batch_size
from sd_lightning.gemini.memory import peak_allocated, peak_resident
from sd_lightning.planner.devices import table_of
from sd_lightning.report.memory import TIMELINE_NAME
from sd_lightning.storage.atomic import write_whole
from sd_lightning.strategies import EngineStrategy, engine_of

log = logging.getLogger(__name__)

_SAVE = "save_checkpoint"
_GIB = 2**30


@runtime_checkable
class CountsFlops(Protocol):
    """A module that counts its floating-point operations, for ``perf/mfu``."""

    def flops_per_sample(self, batch: Any) -> int:
        """Return the FLOPs of one training step per sample of ``batch``, forward and backward."""


class TrainingClock:
    """Clock of the seconds since its start, without those between ``pause`` and ``resume``, which nest."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._origin = now()
        self._depth = 0
        self._paused_at = 0.0

    def read(self) -> float:
        return (self._paused_at if self._depth else self._now()) - self._origin

    def pause(self) -> None:
        if self._depth == 0:
            self._paused_at = self._now()
        self._depth += 1

    def resume(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._origin += self._now() - self._paused_at


class _Mark(NamedTuple):
    """Totals at the end of one optimizer step."""

    seconds: float
    data_wait: float
    samples: int


class _ProfilerTap(Profiler):
    """Profiler that wraps the trainer's own and reports batch fetches and checkpoint saves.

    Lightning has no hook between one batch's callbacks and the fetch of the next batch, but it profiles the fetch.
    """

    def __init__(self, inner: Profiler, on_action: Callable[[str, bool], None]) -> None:
        super().__init__()
        self.inner = inner
        self._on_action = on_action

    @override
    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        if action_name in (FETCH, _SAVE):
            return super().profile(action_name)
        return self.inner.profile(action_name)  # about fifty per step

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._on_action(action_name, True)

    @override
    def stop(self, action_name: str) -> None:
        self._on_action(action_name, False)
        self.inner.stop(action_name)

    @override
    def summary(self) -> str:
        return self.inner.summary()


class Throughput(StepCallback, PauseListener):
    """Callback that logs speed and hardware use every ``trainer.log_every_n_steps`` steps.

    Logged from rank 0, over the last ``window`` optimizer steps:

    - ``perf/images_per_second``: images of all ranks per second of training,
    - ``perf/data_wait``: share of that time spent waiting for the data loader, in [0, 1],
    - ``perf/peak_memory_gib``: largest allocated CUDA memory of rank 0's device, else largest resident size of its
      process (not on Windows),
    - ``perf/mfu``: model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), in [0, 1]: achieved / peak
      FLOP/s, if the module is :class:`CountsFlops` and ``conf/devices`` has a table of the GPU.

    Validation, checkpoints and blocks marked with :func:`paused` count neither as training time nor as data wait. The
    first step of a run is left out: it includes warm-up, compilation and the start of the workers.

    Args:
        window: Optimizer steps to average over, at least 1.

    Raises:
        UsageError: ``window`` is below 1.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise UsageError(f"Throughput got window={window}; expected a whole number of steps of at least 1.")
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._warm: _Mark | None = None
        self._clock: TrainingClock | None = None
        self._fetch_started = 0.0
        self._data_wait = 0.0
        self._samples = 0
        self._device = torch.device("cpu")
        self._flops_per_sample: int | None = None
        self._peak_flops = 0.0
        self._peak: int | None = None

    @property
    def images_per_second(self) -> float | None:
        """Images of all ranks per second over the window; None before the second step."""
        return _rate(self._marks[0], self._marks[-1]) if len(self._marks) > 1 else None

    @property
    def data_wait(self) -> float | None:
        """Share of the window spent waiting for the data loader, in [0, 1]; None before the third step."""
        return _data_wait(self._marks[0], self._marks[-1]) if len(self._marks) > 2 else None

    def summary(self) -> dict[str, float]:
        """Return means of the whole run, ``images_per_second``, ``data_wait`` and ``mfu``, and ``peak_memory_gib``.

        Values that were not measured (a run of one step, a module without ``flops_per_sample``, no GPU) are left out.
        """
        return self._values(self._warm, self._marks[-1] if self._marks else None)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._device = trainer.strategy.root_device
        self._marks.clear()
        self._warm, self._data_wait, self._samples, self._peak = None, 0.0, 0, None
        self._clock = TrainingClock(time.perf_counter)
        trainer.profiler = _ProfilerTap(trainer.profiler, self._on_action)  # type: ignore[attr-defined]

    @override
    def on_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        assert self._clock is not None
        size = global_batch_size(trainer)
        self._samples += size or _num_samples(batch) * trainer.world_size * trainer.accumulate_grad_batches
        self._note_peak()
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        logging_step = every > 0 and trainer.global_step % every == 0  # 0: never
        if logging_step or not self._marks:
            self._synchronize()
        self._marks.append(_Mark(self._clock.read(), self._data_wait, self._samples))
        if self._warm is None:
            self._warm = self._marks[0]
            with paused(trainer, "counting operations"):
                self._prepare_mfu(trainer, pl_module, batch)
        if logging_step:
            values = self._values(self._marks[0], self._marks[-1])
            pl_module.log_dict({f"perf/{k}": v for k, v in values.items()}, on_step=True, rank_zero_only=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._untap(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._untap(trainer)

    @override
    def on_pause(self, activity: str) -> None:
        if self._clock is not None:  # None in the sanity check, which comes before training
            self._synchronize()
            self._clock.pause()

    @override
    def on_resume(self) -> None:
        if self._clock is not None:
            self._synchronize()
            self._clock.resume()

    def _untap(self, trainer: Trainer) -> None:
        profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, _ProfilerTap):
            trainer.profiler = profiler.inner  # type: ignore[attr-defined]
        self._clock = None

    def _on_action(self, action: str, begins: bool) -> None:
        if action == FETCH:
            if begins:
                self._fetch_started = time.perf_counter()
            else:
                self._data_wait += time.perf_counter() - self._fetch_started
        elif action == _SAVE and begins:
            self.on_pause("saving")
        elif action == _SAVE:
            self.on_resume()

    def _synchronize(self) -> None:
        # Queued kernels belong to the time before the clock is read.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _prepare_mfu(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if not isinstance(pl_module, CountsFlops):
            log.info("Throughput logs no perf/mfu: %s has no flops_per_sample(batch).", type(pl_module).__name__)
            return
        peak = peak_flops(self._device, str(trainer.precision))
        if peak is None:
            log.info("Throughput logs no perf/mfu: conf/devices has no figure for this device and precision.")
            return
        self._flops_per_sample = pl_module.flops_per_sample(batch)
        self._peak_flops = peak * trainer.world_size

    def _values(self, begin: _Mark | None, end: _Mark | None) -> dict[str, float]:
        values: dict[str, float] = {}
        if begin is not None and end is not None and end.seconds > begin.seconds:
            values["images_per_second"] = _rate(begin, end)
            values["data_wait"] = _data_wait(begin, end)
            if self._flops_per_sample is not None:
                values["mfu"] = values["images_per_second"] * self._flops_per_sample / self._peak_flops
        self._note_peak()
        if self._peak is not None:
            values["peak_memory_gib"] = self._peak / _GIB
        return values

    def _note_peak(self) -> None:
        """Keep the largest peak: other code may reset torch's counter."""
        peak = peak_memory_bytes(self._device)
        self._peak = peak if self._peak is None or peak is None else max(self._peak, peak)


def _rate(begin: _Mark, end: _Mark) -> float:
    return (end.samples - begin.samples) / (end.seconds - begin.seconds)


def _data_wait(begin: _Mark, end: _Mark) -> float:
    return (end.data_wait - begin.data_wait) / (end.seconds - begin.seconds)


def _num_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch of tensors, mappings and sequences."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    for part in parts:
        if isinstance(part, torch.Tensor | Mapping | list | tuple) and (num := _num_samples(part)):
            return num
    return 0


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the largest memory use so far: allocated on a CUDA ``device``, else resident in this process.

    Returns:
        Bytes, or None on Windows without CUDA, where the standard library cannot tell.
    """
    return peak_allocated(device) if device.type == "cuda" else peak_resident()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU, the maker's dense figure in ``conf/devices``; None without a table of it.

    Args:
        device: The device that computes.
        precision: Lightning's name: "bf16-mixed".
    """
    table = table_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    of_float32 = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    dtypes = (("bf16", "bfloat16"), ("16", "float16"), ("32", of_float32))
    dtype = next((name for start, name in dtypes if precision.startswith(start)), None)
    return None if table is None or dtype is None else 1e12 * table.peak_tflops[dtype]


class EngineMemory(Callback):
    """Callback that logs the Gemini engine's counters and records the memory of one step, unit by unit.

    Args:
        run_dir: Directory of the run; the timeline goes to ``memory_timeline.json`` there, which the report draws.
        every_n_steps: Optimizer steps between logged values.
        trace_step: Step to record, counted from 1; the order of units is known by step 3.
    """

    def __init__(self, run_dir: str | Path, *, every_n_steps: int = 10, trace_step: int = 3) -> None:
        check_at_least("EngineMemory", 1, every_n_steps=every_n_steps, trace_step=trace_step)
        self.run_dir = Path(run_dir)
        self.every_n_steps = every_n_steps
        self.trace_step = trace_step
        self._events: list[dict[str, Any]] | None = None
        self._is_tracing = False

    def check(self, strategy: Strategy) -> None:
        """Raise unless the strategy counts its bytes.

        Raises:
            UsageError: It does not.
        """
        if not engine_of(strategy).counts_bytes:
            raise UsageError(
                f"EngineMemory got strategy={type(strategy).__name__}, which keeps no account of its bytes; "
                "expected strategy=gemini, or leave callbacks=memory out"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check(trainer.strategy)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._events is None and trainer.global_step + 1 == self.trace_step:
            self._events, self._is_tracing = [], True
            engine = engine_of(trainer.strategy)
            engine.observe_units(partial(self._note, engine))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        engine = engine_of(trainer.strategy)
        if self._is_tracing and trainer.global_step == self.trace_step:
            self._is_tracing = False
            engine.observe_units(None)
            self._note(engine, "step", "")
            if trainer.is_global_zero:
                timeline = {"step": self.trace_step, "rank": trainer.global_rank, "events": self._events}
                write_whole(self.run_dir / TIMELINE_NAME, json.dumps(timeline))
        if trainer.global_step % self.every_n_steps == 0:
            values = {f"gemini/{name}": float(value) for name, value in engine.statistics().items()}
            pl_module.log_dict(values, batch_size=1)

    def _note(self, engine: EngineStrategy, phase: str, unit: str) -> None:
        assert self._events is not None
        self._events.append({"phase": phase, "unit": unit, "bytes": engine.bytes_by_tier()})
