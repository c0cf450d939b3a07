"""Counts what would make the host wait for a GPU, on a machine without one.

The device is pretended: it is ``cpu:0``, and host memory is ``cpu``. Torch drops the index, so tensors on the device
are known by their storage: those made with ``device=cpu:0``, moved there, or computed from others that are there.
Python sees ``cpu:0`` as their device. All computing is the CPU's own, so a training does what it does uncounted.

Counted are reads of values (``item``, ``bool``, ``tolist``, ``numpy``, …), operations whose result's size depends on
values, and copies between the device and host memory that are not ``non_blocking``. Batches that Lightning moves are
not: on a GPU it moves them with ``non_blocking``.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core import hooks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as _GROUP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import small_training as small
from one_rank import with_collectives
from sd_lightning.callbacks import (
    EMA,
    NonFiniteLossGuard,
    PortableCheckpoint,
    StopOnSignal,
    Throughput,
    TrainingProgress,
)
from sd_lightning.diffusion import randomness
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from strategy_table import strategy_of

DEVICE = torch.device("cpu", 0)
_aten = torch.ops.aten
_READS = {
    *(_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.masked_select),
    *(_aten.unique_consecutive, _aten.unique_dim, _aten._unique2, _aten._unique, _aten.bincount, _aten.histc),
}
_READ_IN_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_COPIES_OF_NUMBERS = {torch.tensor, torch.as_tensor}
_MOVES = {Tensor.to, Tensor.cpu}
_UNINTERESTING = ("host_waits.py", "_python_dispatch.py", "overrides.py", "eval_frame.py", "_compile.py")


class HostWaits:
    """The count of waits, and where they came from."""

    def __init__(self) -> None:
        self.count = 0
        self.places: list[str] = []
        self._storages: dict[int, StorageWeakRef] = {}
        self._is_paused = False
        self.computes_on_host = False
        """Whether a function of Python runs whose arguments are not on the device; C++ makes what it needs there."""

    @contextmanager
    def counting(self) -> Iterator[HostWaits]:
        """Pretend that ``cpu:0`` is a device, and count."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(randomness, "NUMPY_DEVICE", None))
            stack.enter_context(mock.patch.object(hooks, "move_data_to_device", self._move))
            stack.enter_context(mock.patch.object(clip_grad, _GROUP.__name__, self._group))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operations(self))
            yield self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def computing(self, *, on_host: bool) -> Iterator[None]:
        """Run a function of Python."""
        before, self.computes_on_host = self.computes_on_host, on_host
        try:
            yield
        finally:
            self.computes_on_host = before

    def _move(self, batch: Any, device: Any) -> Any:
        with self.paused():
            return move_data_to_device(batch, device)

    def _group(self, tensors: Any, with_indices: bool = False) -> Any:
        """Group tensors by their devices as Python sees them; torch does so in C++."""
        grouped = _GROUP(tensors, with_indices)
        there = {key: any(map(self.is_there, lists[0])) for key, (lists, _) in grouped.items()}
        return {(DEVICE if there[key] else key[0], key[1]): found for key, found in grouped.items()}

    def is_there(self, value: Any) -> bool:
        """Return whether a value is a tensor on the device."""
        if not isinstance(value, Tensor):
            return False
        kept = self._storages.get(value.untyped_storage()._cdata)
        return kept is not None and not kept.expired()

    def put(self, value: Any) -> None:
        """Note that a tensor is on the device."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)  # keeps the number from being given again

    def take(self, value: Any) -> None:
        """Note that a tensor is in host memory, though it was made from one on the device."""
        if isinstance(value, Tensor):
            self._storages.pop(value.untyped_storage()._cdata, None)

    def wait(self, what: Any) -> None:
        """Count a wait."""
        if self._is_paused:
            return
        self.count += 1
        self.places.append(" < ".join([getattr(what, "__name__", str(what)), *islice(_callers(), 6)]))


def _callers() -> Iterator[str]:
    """Yield file and line of the callers, the innermost first."""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if not name.endswith(_UNINTERESTING):
            yield f"{name.rpartition('/')[2]}:{line}"


class _Functions(TorchFunctionMode):
    """Functions of Python: devices of tensors, and what no operation shows."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits = kwargs or {}, self._waits
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if waits.is_there(args[0]) else func(*args, **kwargs)
        if func is Tensor.backward:
            gradients = kwargs.pop("gradient", None)
            with self:  # for hooks
                return torch.autograd.backward(args[0], gradients, **kwargs)
        if func in _READ_IN_PYTHON and waits.is_there(args[0]):
            waits.wait(func)
            with waits.paused():
                return func(*args, **kwargs)
        if func in _MOVES and waits.is_there(args[0]) and _goes_to_host(func, args, kwargs):
            if not kwargs.get("non_blocking"):
                waits.wait(func)
            with waits.paused(), waits.computing(on_host=True):
                plain = torch.empty(args[0].shape, dtype=args[0].dtype)
                return func(plain.copy_(args[0].detach()), *args[1:], **kwargs)
        there = any(map(waits.is_there, tree_leaves((args, kwargs))))
        with waits.computing(on_host=not there):
            found = func(*args, **kwargs)
        if func in _COPIES_OF_NUMBERS and kwargs.get("device") == DEVICE:
            waits.wait(func)
            waits.put(found)
        if there and kwargs.get("device") is not None and _goes_to_host(func, (), kwargs):  # torch.empty_like
            waits.take(found)
        elif there and func not in (Tensor.copy_, torch._foreach_copy_, *_MOVES):
            for leaf in tree_leaves(found):
                waits.put(leaf)
        return found


def _goes_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func is Tensor.cpu:
        return True
    devices = [torch.device(a) for a in (*args[1:], *kwargs.values()) if isinstance(a, (str, torch.device))]
    return any(device.type == "cpu" and device.index is None for device in devices)


class _Operations(TorchDispatchMode):
    """Operations, also those that C++ calls: the backward pass, the reducer of DDP."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits = kwargs or {}, self._waits
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(map(waits.is_there, tensors))
        packet = func.overloadpacket
        if there and (packet in _READS or _depends_on_values(packet, args, waits)):
            waits.wait(func)
        device = kwargs.get("device")
        moves_there = device is not None and device.index == DEVICE.index
        found = func(*args, **kwargs)
        if packet in (_aten.copy_, _aten._foreach_copy_):
            pairs = zip(*args[:2]) if packet is _aten._foreach_copy_ else [args[:2]]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            for to, source in pairs:
                if waits.is_there(to) != waits.is_there(source) and source.numel() > 0 and not non_blocking:
                    waits.wait(func)
            return found
        if packet is _aten._to_copy and moves_there and not there and not kwargs.get("non_blocking"):
            waits.wait(func)
        if there or moves_there or (not tensors and not self._waits.computes_on_host):
            for leaf in tree_leaves(found):
                waits.put(leaf)
        return found


def _depends_on_values(packet: Any, args: Any, waits: HostWaits) -> bool:
    if packet not in (_aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_):
        return False
    indices = [index for index in args[1] if index is not None]
    return any(i.dtype in (torch.bool, torch.uint8) or not waits.is_there(i) for i in indices)


class PerStep(Callback):
    """Counts the waits of every step, from the start of its batch to the start of the next."""

    def __init__(self, waits: HostWaits | CudaWarnings) -> None:
        self._waits = waits
        self.steps: list[list[str]] = []

    def _cut(self) -> None:
        if self.steps:
            self.steps[-1] += self._waits.places
        self._waits.places = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._cut()
        self.steps.append([])

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._cut()


class _Single(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__(DEVICE)


class _DDP(DDPStrategy):
    @property
    def root_device(self) -> torch.device:
        return DEVICE


class _Gemini(GeminiStrategy):
    @property
    def root_device(self) -> torch.device:
        return DEVICE


STRATEGIES: dict[str, Any] = {"single": _Single, "ddp": _DDP, "gemini": _Gemini}
EVERY = 5
"""Steps between two logs."""


def run(job: dict[str, Any]) -> list[list[str]]:
    """Train with the default callbacks; return where the host waited, by step."""
    on_cuda = job.get("accelerator") == "cuda"
    waits = CudaWarnings() if on_cuda else HostWaits()
    per_step, folder = PerStep(waits), Path(job["folder"])
    callbacks = [
        per_step,
        TrainingProgress(refresh_seconds=job.get("refresh_seconds", 1000.0)),
        Throughput(),
        EMA(offload=job.get("offload_average", False)),
        StopOnSignal(),
        NonFiniteLossGuard(run_dir=folder),
        PortableCheckpoint(folder, every_n_steps=job.get("every_n_steps", 7)),
    ]
    options: dict[str, Any] = {"enable_progress_bar": True, "log_every_n_steps": EVERY, "logger": CSVLogger(folder)}
    settings = job.get("settings", {})
    if on_cuda:
        options |= {"accelerator": "cuda", "strategy": strategy_of(job["strategy"], **settings)}
    else:
        options["strategy"] = STRATEGIES[job["strategy"]](**settings)
        if job.get("scaled"):  # Lightning refuses the name on the CPU; engines scale by themselves
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = small.trainer_of(job["steps"], *callbacks, devices=job["devices"], **options | job.get("trainer", {}))
    module = small.module()
    with waits.counting(), with_collectives() if job.get("with_collectives") else nullcontext():
        trainer.fit(module, small.data(cache_latents=False))
    if job["devices"] == 1:
        leave_process_group()
    return per_step.steps


class CudaWarnings:
    """What CUDA itself says of waits; not of ``synchronize``, which is meant."""

    def __init__(self) -> None:
        self.places: list[str] = []

    @contextmanager
    def counting(self) -> Iterator[CudaWarnings]:
        """Let torch warn of every operation that waits, and count."""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = self._note
                yield self
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _note(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.places.append(f"{filename.rpartition('/')[2]}:{lineno}")
