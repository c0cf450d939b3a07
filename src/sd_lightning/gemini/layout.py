"""Pack parameters into flat chunks: pure functions with the same result on every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_lightning.gemini.config import GeminiConfig

ALIGNMENT = 16
"""Parameters and shards begin at multiples of this many elements, for vector instructions and quantised blocks."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter to be packed."""

    name: str
    numel: int
    dtype: torch.dtype
    """Compute type."""
    is_trained: bool


@dataclass(frozen=True)
class Slot:
    """The range of a chunk that holds one parameter."""

    name: str
    begin: int
    numel: int

    @property
    def end(self) -> int:
        return self.begin + self.numel


@dataclass(frozen=True)
class ChunkLayout:
    """Flat memory and its parameters, which have one type and are either all trained or all frozen."""

    index: int
    dtype: torch.dtype
    is_trained: bool
    slots: tuple[Slot, ...]
    numel: int
    """Elements, with padding; a multiple of ``ALIGNMENT * world_size``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered chunk."""
        return self.numel * self.dtype.itemsize

    @property
    def master_dtype(self) -> torch.dtype:
        """Type of the master weights and of accumulated gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges between and after the parameters."""
        ends = [0, *(slot.end for slot in self.slots)]
        begins = [*(slot.begin for slot in self.slots), self.numel]
        return [(end, begin) for end, begin in zip(ends, begins) if begin > end]


@dataclass(frozen=True)
class Shard:
    """The part of a chunk that one rank owns."""

    layout: ChunkLayout
    rank: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements, with padding; the same on every rank."""
        return self.layout.numel // self.world_size

    @property
    def begin(self) -> int:
        """First element in the chunk."""
        return self.numel * self.rank

    @property
    def end(self) -> int:
        return self.begin + self.numel

    def owned(self, slot: Slot) -> tuple[int, int]:
        """Return the range of a parameter's elements that the rank owns, possibly empty."""
        begin = min(max(self.begin - slot.begin, 0), slot.numel)
        end = min(max(self.end - slot.begin, 0), slot.numel)
        return (begin, end) if begin < end else (0, 0)

    def range_of(self, slot: Slot) -> tuple[int, int]:
        """Return the range of the shard that holds the owned part of a parameter."""
        begin, end = self.owned(slot)
        offset = slot.begin - self.begin
        return (offset + begin, offset + end) if begin < end else (0, 0)

    def view_of(self, slot: Slot, flat: Tensor) -> Tensor:
        """Return the view of one parameter's part in a flat tensor of the shard's size."""
        begin, end = self.range_of(slot)
        return flat[begin:end]


def align(numel: int, multiple: int = ALIGNMENT) -> int:
    """Round up to a multiple."""
    return -(-numel // multiple) * multiple


def pack_as_set(specs: Sequence[ParameterSpec], config: GeminiConfig, world_size: int) -> list[ChunkLayout]:
    """Pack parameters into chunks of the size in the settings; by default the one with the least padding."""
    search = config.chunk_search or default_search(specs)
    return pack(specs, config.chunk_numel or search_chunk_numel(specs, search, world_size), world_size)


def pack(specs: Sequence[ParameterSpec], chunk_numel: int, world_size: int) -> list[ChunkLayout]:
    """Pack parameters, in order, into chunks of one size.

    A parameter larger than a chunk gets its own chunk. The last chunk of each kind ends where its parameters end.

    Args:
        specs: In the order of execution; names are unique.
        chunk_numel: Elements of a chunk; rounded up to a multiple of ``ALIGNMENT * world_size``.
        world_size: Each chunk is cut into this many shards of one size.

    Returns:
        Chunks in the order of their first parameters.
    """
    unit = ALIGNMENT * world_size
    chunk_numel = align(chunk_numel, unit)
    open_chunks: dict[tuple[torch.dtype, bool], _OpenChunk] = {}
    chunks: list[_OpenChunk] = []
    for spec in specs:
        kind = (spec.dtype, spec.is_trained)
        needed = align(spec.numel)
        if needed > chunk_numel:
            chunks.append(_OpenChunk(kind, [Slot(spec.name, 0, spec.numel)], needed))
            continue
        current = open_chunks.get(kind)
        if current is None or current.used + needed > chunk_numel:
            if current is not None:
                current.numel = chunk_numel
            current = open_chunks[kind] = _OpenChunk(kind, [], 0)
            chunks.append(current)
        current.slots.append(Slot(spec.name, current.used, spec.numel))
        current.used += needed
    return [
        ChunkLayout(index, *chunk.kind, tuple(chunk.slots), chunk.numel or align(max(chunk.used, 1), unit))
        for index, chunk in enumerate(chunks)
    ]


@dataclass
class _OpenChunk:
    kind: tuple[torch.dtype, bool]
    slots: list[Slot]
    used: int
    numel: int = 0
    """Final size, set when the next chunk is opened; 0 before."""


def default_search(specs: Sequence[ParameterSpec]) -> tuple[int, int]:
    """Return the range of chunk sizes to search: up to about 100 chunks, of 16 Ki to 32 Mi elements.

    The range is wide because few sizes pack a UNet's convolutions well (SD 2.1: 3 % padding at 5.0 Mi elements, 12 %
    at 18.8 Mi).
    """
    lower = min(max(sum(spec.numel for spec in specs) // 96, 2**14), 2**22)
    return lower, 8 * lower


def search_chunk_numel(
    specs: Sequence[ParameterSpec], search: Sequence[int], world_size: int, *, candidates: int = 256
) -> int:
    """Return the chunk size with the least padding; the largest one in a tie.

    Args:
        specs: Parameters in the order of execution.
        search: Smallest and largest size in elements.
        world_size: Number of shards of a chunk.
        candidates: Number of sizes to try, evenly spread.
    """
    return _searched(tuple(specs), (search[0], search[1]), world_size, candidates)  # a configuration has a list


@functools.lru_cache(maxsize=8)  # the planner asks for the same weights in many placements
def _searched(specs: tuple[ParameterSpec, ...], search: tuple[int, int], world_size: int, candidates: int) -> int:
    unit = ALIGNMENT * world_size
    lower, upper = align(search[0], unit), align(search[1], unit)
    stride = max(align((upper - lower) // max(candidates - 1, 1), unit), unit)
    sizes = range(lower, upper + 1, stride)
    return min(sizes, key=lambda size: (sum(chunk.padding for chunk in pack(specs, size, world_size)), -size))
