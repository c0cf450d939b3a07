"""The update of running averages: in groups of bounded memory, and beside the computation on CUDA."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sd_lightning.state.host import host_step, streams_of
from sd_lightning.state.shards import LazyTensor, tensor_of

GROUP_BYTES = 64 * 2**20
"""Float32 values of an average that are cast, or brought to the device, at a time."""
_STREAMS = 2
"""While the average of one group leaves the device, that of the next comes."""
_HOST = torch.device("cpu")


def room_bytes(numel: int, *, is_apart: bool, is_cast: bool) -> int:
    """Return the device memory that updates keep.

    Args:
        numel: Averaged elements on this rank.
        is_apart: Whether the average is in host memory, and the weights are not.
        is_cast: Whether the weights are not float32.
    """
    return min(4 * numel, GROUP_BYTES * (_STREAMS if is_apart else 1)) * (is_apart + is_cast)


@dataclass(frozen=True)
class _Group:
    """Averages, or rows of them, that are updated at once."""

    averages: list[Tensor]
    weights: list[LazyTensor]
    device: torch.device
    """Where the update is computed."""
    is_apart: bool
    """Whether the averages are elsewhere: in host memory, one behind the other."""
    is_cast: bool
    """Whether the weights are in another dtype or place than the update needs."""

    @property
    def numel(self) -> int:
        return sum(average.numel() for average in self.averages)

    @property
    def flat(self) -> Tensor:
        """The memory of averages that are apart."""
        assert all(average.is_contiguous() for average in self.averages)
        return self.averages[0].as_strided((self.numel,), (1,))


class Averaging:
    """Moves averages towards weights: in place, and without making the host wait for the device.

    On CUDA the updates run on streams of their own. Averages in host memory come to the device group by group, since
    the device updates them faster than the host and neither waits for the other.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._streams: list[Any] = []
        self._module: Any = None
        self._device = _HOST
        self._room: dict[tuple[int, bool], Tensor] = {}
        """Room on the device by stream: for averages that come, and (True) for weights that are cast."""
        self._is_on_host = False

    def follow(self, averages: Sequence[Tensor], weights: Sequence[LazyTensor]) -> None:
        """Set which averages :meth:`update` moves towards which weights; a function makes its weights when called."""
        self._is_on_host = any(average.device == _HOST for average in averages)
        self.settle()
        self._groups = _divided(averages, weights)
        for group in self._groups:
            module = streams_of(group.device)
            if module is not None and self._device != group.device:
                self._module, self._device = module, group.device
                self._streams = [module.Stream(group.device) for _ in range(_STREAMS)]

    def forget(self) -> None:
        """Keep no reference to averages and weights."""
        self._groups = []

    @torch.no_grad()
    def update(self, fraction: float) -> None:
        """Move the averages towards the weights by a fraction, after the work submitted so far."""
        self.join()
        for stream in self._streams:
            stream.wait_stream(self._module.current_stream(self._device))
        computes_on_host = any(group.device == _HOST for group in self._groups)
        with host_step() if computes_on_host else contextlib.nullcontext():
            for number, group in enumerate(self._groups):
                stream = number % _STREAMS if group.is_apart else 0
                with self._on(stream, group.device):
                    self._update(group, stream, fraction)

    def join(self) -> None:
        """Make the device's current stream wait for the updates; the host does not wait."""
        for stream in self._streams:
            self._module.current_stream(self._device).wait_stream(stream)

    def settle(self) -> None:
        """Make whoever reads averages wait for the updates: the current stream, and the host if it holds any."""
        self.join()
        for stream in self._streams if self._is_on_host else ():
            stream.synchronize()

    @contextlib.contextmanager
    def _on(self, number: int, device: torch.device) -> Iterator[None]:
        if self._module is None or device != self._device:
            yield
            return
        with self._module.stream(self._streams[number]):
            yield

    def _update(self, group: _Group, stream: int, fraction: float) -> None:
        weights = [tensor_of(each) for each in group.weights]
        averages = group.averages
        if group.is_apart:
            here, averages = self._place(group, stream, is_cast=False)
            if fraction != 1.0:
                here.copy_(group.flat, non_blocking=True)
        if fraction == 1.0:
            torch._foreach_copy_(averages, weights, non_blocking=True)
        else:
            if group.is_cast:
                _, cast = self._place(group, stream, is_cast=True)
                torch._foreach_copy_(cast, weights, non_blocking=True)
                weights = cast
            torch._foreach_lerp_(averages, weights, fraction)
        if group.is_apart:
            group.flat.copy_(here, non_blocking=True)

    def _place(self, group: _Group, stream: int, *, is_cast: bool) -> tuple[Tensor, list[Tensor]]:
        """Return room on the device for a group: as one tensor, and as tensors like its averages."""
        room = self._room.get((stream, is_cast))
        if room is None or room.numel() < group.numel or room.device != group.device:
            largest = max(each.numel for each in self._groups if each.is_apart or each.is_cast)
            room = torch.empty(largest, dtype=torch.float32, device=group.device)
            self._room[stream, is_cast] = room
        here = room[: group.numel]
        parts = here.split([average.numel() for average in group.averages])
        return here, [_like(average, part) for average, part in zip(group.averages, parts)]


def _like(average: Tensor, flat: Tensor) -> Tensor:
    """View memory as a tensor like an average: with its strides, so that both are updated in one pass."""
    is_dense = 1 + sum((n - 1) * stride for n, stride in zip(average.shape, average.stride())) == flat.numel()
    return flat.as_strided(average.shape, average.stride()) if is_dense else flat.view(average.shape)


def _divided(averages: Sequence[Tensor], weights: Sequence[LazyTensor]) -> list[_Group]:
    """Divide averages into groups; only those that need memory of their own are bounded."""
    kinds: dict[tuple[torch.device, bool, bool], list[tuple[Tensor, LazyTensor]]] = defaultdict(list)
    groups: list[_Group] = []
    for average, weight in zip(averages, weights, strict=True):
        if not isinstance(weight, Tensor):  # on the disk, or split in halves: one copy at a time in memory
            groups.append(_Group([average], [weight], average.device, False, average.device != _HOST))
            continue
        is_apart = average.device == _HOST != weight.device
        device = weight.device if is_apart else average.device
        is_cast = weight.dtype != torch.float32 or weight.device != device
        kinds[device, is_apart, is_cast].append((average, weight))
    for (device, is_apart, is_cast), pairs in kinds.items():
        if is_apart:
            pairs.sort(key=lambda pair: pair[0].data_ptr())
        for members in _bounded(pairs, is_apart) if is_apart or is_cast else [pairs]:
            parts = [average for average, _ in members], [weight for _, weight in members]
            groups.append(_Group(*parts, device, is_apart, is_cast))
    return groups


def _bounded(pairs: Sequence[tuple[Tensor, LazyTensor]], is_apart: bool) -> Iterator[list[tuple[Tensor, LazyTensor]]]:
    """Yield pairs, or rows of large ones, that have at most ``GROUP_BYTES`` together.

    Averages that are apart share a group only if they lie one behind the other.
    """
    members: list[tuple[Tensor, LazyTensor]] = []
    numel = 0
    for average, weight in pairs:
        assert isinstance(weight, Tensor)
        for rows, row_weights in zip(*(_rows(tensor, average) for tensor in (average, weight)), strict=True):
            last = members[-1][0] if members else rows
            is_next = not members or _is_behind(rows, last)
            if members and (4 * (numel + rows.numel()) > GROUP_BYTES or is_apart and not is_next):
                yield members
                members, numel = [], 0
            members.append((rows, row_weights))
            numel += rows.numel()
    if members:
        yield members


def _is_behind(rows: Tensor, last: Tensor) -> bool:
    """Return whether rows follow others in one block of memory; separate blocks may touch, too."""
    is_same = rows.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return is_same and rows.data_ptr() == last.data_ptr() + last.nbytes


def _rows(tensor: Tensor, average: Tensor) -> Sequence[Tensor]:
    if average.nbytes <= GROUP_BYTES or not average.ndim:
        return (tensor,)
    rows: Sequence[Tensor] = tensor.split(max(GROUP_BYTES // average[0].nbytes, 1))
    return rows
