"""The places where bytes live, and an account of every byte."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError

log = logging.getLogger(__name__)

_MAX_LANDING = 4
"""Buffers whose copies to the host may be under way while it goes on; as many as reductions."""
_MAX_WAITING = 2
"""Kept buffers of one size that copies still need, before the host waits for one: it fills the other meanwhile."""


class Tier(StrEnum):
    """Where a buffer lives."""

    FAST = "fast"
    """The accelerator's memory; host memory where the host computes."""
    SLOW = "slow"
    """Host memory, pinned beside an accelerator."""
    DISK = "disk"
    """Files mapped into memory."""


class Kind(StrEnum):
    """What a buffer is for."""

    WEIGHTS = "weights"
    """Resident weights in the compute type, or shards of them."""
    GATHERED = "gathered"
    """Temporarily gathered weights, and the gradients that take their place."""
    GRADIENTS = "gradients"
    """Whole gradients before they are reduced, where they have memory of their own."""
    ACCUMULATED = "accumulated"
    """This rank's part of the reduced float32 gradients."""
    OPTIMIZER = "optimizer"
    """Float32 weights where they are not the compute weights themselves, and optimizer states."""
    SWAPPED = "swapped"
    """The trained weights while others are computed with."""
    STAGED = "staged"
    """Weights in the compute type, on their way from the host's float32 ones to the accelerator."""
    KEPT = "kept"
    """Pinned host memory that nothing is in, kept to be used again."""


class Ledger:
    """Bytes on each tier now and at most, and bytes moved between tiers."""

    def __init__(self) -> None:
        self.current: Counter[Tier] = Counter()
        self.peak: Counter[Tier] = Counter()
        self.by_kind: Counter[tuple[Tier, Kind]] = Counter()
        self.kind_peak: Counter[tuple[Tier, Kind]] = Counter()
        self.moved: Counter[tuple[Tier, Tier]] = Counter()

    def add(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        """Account for bytes that were allocated, or freed if negative."""
        self.current[tier] += nbytes
        self.by_kind[tier, kind] += nbytes
        if self.by_kind[tier, kind] < 0:
            raise RuntimeError(f"{-self.by_kind[tier, kind]} bytes of {kind} freed twice on the {tier} tier")
        self.peak[tier] = max(self.peak[tier], self.current[tier])
        self.kind_peak[tier, kind] = max(self.kind_peak[tier, kind], self.by_kind[tier, kind])

    def move(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Account for bytes that were copied from tier to tier."""
        if source != target:
            self.moved[source, target] += nbytes

    def reset_peak(self) -> None:
        """Measure peaks from now on."""
        self.peak = Counter(self.current)
        self.kind_peak = Counter(self.by_kind)


@dataclass(eq=False)
class Buffer:
    """A flat tensor on a tier, accounted for until it is freed."""

    tensor: Tensor
    tier: Tier
    kind: Kind

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Arrival:
    """When copies beside the computation are done; where there are no streams, they are done already.

    Args:
        module: Of the device, as ``torch.cuda``.
        device: Its streams wait.
    """

    def __init__(self, module: Any = None, device: torch.device | None = None) -> None:
        self._module = module
        self._device = device
        self._events: list[Any] = []

    def after(self, streams: Sequence[Any]) -> Arrival:
        """Include what has been submitted to these streams so far."""
        for stream in streams:
            self._events.append(self._module.Event())
            self._events[-1].record(stream)
        return self

    def join(self) -> None:
        """Let what is submitted next to the current stream come after the copies; the host does not wait."""
        for event in self._events:
            self._module.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Let the host wait for the copies."""
        for event in self._events:
            event.synchronize()

    @property
    def is_past(self) -> bool:
        """Whether the host need not wait."""
        return all(event.query() for event in self._events)


class Memory:
    """Allocate, move and free flat buffers on the tiers of one rank.

    Beside an accelerator's computation, what goes to the fast tier has a stream of its own, and what leaves it has
    another: both directions run at a time. Nothing orders the two but the arrivals that :meth:`copying` gives.

    Args:
        device: The fast tier.
        offload_dir: Where the disk tier keeps its files. They have no names, so that nothing is left behind when the
            process ends, however it ends.

    Raises:
        UsageError: No files can be made in ``offload_dir``, or later: it is full.
    """

    def __init__(self, device: torch.device, offload_dir: str | Path | None = None) -> None:
        self.device = device
        self.ledger = Ledger()
        self.on_accelerator = device.type != "cpu"
        self._offload_dir = offload_dir
        self._pinned: dict[int, list[tuple[Tensor, Arrival]]] = {}
        """Host memory to use again, by bytes, when the copies that may still need it are done; the oldest first."""
        self._landing: deque[tuple[Arrival, Callable[[], None]]] = deque()
        if offload_dir is not None:
            try:
                Path(offload_dir).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=offload_dir):
                    pass
            except OSError as error:
                raise UsageError(
                    f"GeminiConfig got offload_dir={offload_dir}, which cannot be written to ({error}); give another "
                    "folder"
                ) from error
        self._module: Any = None
        self._to_fast: Any = None
        self._to_slow: Any = None
        if self.on_accelerator:
            self._module = torch.get_device_module(device)
            self._to_fast, self._to_slow = self._module.Stream(device), self._module.Stream(device)
            _pin_as_much_as_is_asked_for()

    @torch.inference_mode(False)  # what is allocated in a validation may be used again in training
    @torch.no_grad()
    def allocate(self, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Buffer:
        """Return a new flat buffer."""
        self.ledger.add(tier, kind, numel * dtype.itemsize)
        if tier is Tier.FAST:
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        elif tier is Tier.SLOW:
            tensor = self._host(numel, dtype)
        else:
            tensor = self._mapped(numel, dtype)
        if zero:
            tensor.zero_()
        return Buffer(tensor, tier, kind)

    def free(self, buffer: Buffer, last_use: Arrival | None = None) -> None:
        """Give a buffer's memory back; the buffer must not be used again.

        Args:
            buffer: Of any tier.
            last_use: After which it may hold something else: by default, all copies beside the computation so far.
        """
        self.ledger.add(buffer.tier, buffer.kind, -buffer.nbytes)
        if buffer.tier is Tier.SLOW and self.on_accelerator:
            self.ledger.add(Tier.SLOW, Kind.KEPT, buffer.nbytes)
            kept = buffer.tensor, self.mark() if last_use is None else last_use
            self._pinned.setdefault(buffer.nbytes, []).append(kept)
        buffer.tensor = torch.empty(0)

    def copy(self, target: Tensor, source: Tensor, source_tier: Tier, target_tier: Tier) -> None:
        """Copy values, converting their type, and account for the bytes that cross tiers.

        What crosses is in the narrower of the two types, except on the way from an accelerator to the host: torch
        widens before it, as the host does not wait to do it afterwards.
        """
        staged: Buffer | None = None
        if self.on_accelerator and target_tier is Tier.FAST and source_tier is not Tier.FAST:
            if target.dtype.itemsize < source.dtype.itemsize:
                # torch would convert into pageable memory, from which no copy goes on beside the host.
                staged = self.allocate(Tier.SLOW, Kind.STAGED, source.numel(), target.dtype)
                source = staged.tensor.copy_(source)
        elif self.on_accelerator and target_tier is not source_tier and target.dtype.itemsize < source.dtype.itemsize:
            source = source.to(target.dtype)
        target.copy_(source, non_blocking=self.on_accelerator)
        if staged is not None:
            stream = self._module.current_stream(self.device)
            self.free(staged, Arrival(self._module, self.device).after([stream]))
        is_widened = self.on_accelerator and target_tier is not Tier.FAST
        width = target.element_size() if is_widened else min(target.element_size(), source.element_size())
        self.ledger.move(source_tier, target_tier, target.numel() * width)

    def moved(self, buffer: Buffer, tier: Tier) -> Buffer:
        """Return a buffer with the same values on another tier; the old one is freed."""
        if buffer.tier == tier:
            return buffer
        new = self.allocate(tier, buffer.kind, buffer.tensor.numel(), buffer.tensor.dtype)
        self.copy(new.tensor, buffer.tensor, buffer.tier, tier)
        self.wait_for_copies()
        self.free(buffer)
        return new

    @contextmanager
    def copying(self, target: Tier) -> Iterator[Arrival]:
        """Run what is inside beside the computation, after what has been submitted so far.

        Args:
            target: The tier that is copied to.

        Yields:
            When what is inside is done; of use after it.
        """
        arrival = Arrival(self._module, self.device)
        if self._module is None:
            yield arrival
            return
        stream = self._to_fast if target is Tier.FAST else self._to_slow
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            yield arrival
        arrival.after([stream])

    def mark(self) -> Arrival:
        """Return when all copies beside the computation that were submitted so far are done."""
        streams = [] if self._module is None else [self._to_fast, self._to_slow]
        return Arrival(self._module, self.device).after(streams)

    def land(self, arrival: Arrival, receive: Callable[[], None]) -> None:
        """Let the host do something with what has arrived, without waiting: later, if it has not yet.

        So much may be under way at a time, and the oldest is waited for when more is. Whoever reads what ``receive``
        writes before that calls it first.

        Args:
            arrival: Of what is received.
            receive: Waits for it; does nothing when called again.
        """
        self._landing.append((arrival, receive))
        while self._landing and (len(self._landing) > _MAX_LANDING or self._landing[0][0].is_past):
            self._landing.popleft()[1]()

    def wait_for_copies(self) -> None:
        """Let the host see what was copied, and the computation up to now."""
        if self._module is not None:
            for stream in (self._to_fast, self._to_slow, self._module.current_stream(self.device)):
                stream.synchronize()

    def release_unused(self) -> None:
        """Give host memory back that is kept to be used again, as when chunks have moved for good."""
        self.wait_for_copies()
        for nbytes, kept in self._pinned.items():
            self.ledger.add(Tier.SLOW, Kind.KEPT, -nbytes * len(kept))
        self._pinned.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)  # of builds with an accelerator
        if empty is not None and self.on_accelerator:
            empty()

    def _host(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        kept = self._pinned.get(nbytes, [])
        position = next((i for i, (_, last_use) in enumerate(kept) if last_use.is_past), 0)
        if len(kept) > position and (len(kept) >= _MAX_WAITING or kept[position][1].is_past):
            tensor, last_use = kept.pop(position)
            last_use.wait()
            self.ledger.add(Tier.SLOW, Kind.KEPT, -nbytes)
            return tensor.view(dtype)
        return torch.empty(numel, dtype=dtype, pin_memory=self.on_accelerator)

    def _mapped(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._offload_dir is not None
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)  # there are no empty files to map
        with tempfile.NamedTemporaryFile(prefix="gemini-", dir=self._offload_dir) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # writing to a mapped hole of a full disk would be fatal
            except OSError as error:
                raise UsageError(
                    f"GeminiConfig got offload_dir={self._offload_dir}, which has no room for {nbytes} bytes more "
                    f"({error}); give a folder on a larger disk, or a smaller disk_optim_frac"
                ) from error
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)


def _pin_as_much_as_is_asked_for() -> None:
    """Keep torch from rounding pinned memory up to powers of two, which would take up to twice as much."""
    name = "pinned_max_round_threshold_mb"
    try:
        given = torch._C._accelerator_getAllocatorSettings()
        if name not in given:
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [given, f"{name}:1"])))
    except (AttributeError, RuntimeError, ValueError) as error:  # of an earlier torch
        log.warning(
            "Gemini: this torch rounds pinned host memory up to powers of two (%s); what is offloaded may take twice "
            "the host memory that is counted",
            error,
        )
