"""Preparation of networks for chunks: units, parameters, and their packing into flat memory.

Packing is done by pure functions with the same result on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.config import GeminiConfig, Master


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered before it runs, forward and backward."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_container: bool = False
    """Whether other units run inside it, so that it stays in use until the backward pass ends."""


def find_units(networks: Mapping[str, nn.Module], blocks: Iterable[nn.Module] | None = None) -> list[Unit]:
    """Divide networks into units that together own all parameters.

    Each block is a unit, with everything inside it. So is each largest module that contains no block and is in none. A
    module that contains blocks is a unit for its own direct parameters, if it has any.

    Args:
        networks: By name prefix of their parameters ("unet"; "" for none).
        blocks: Repeated modules; by default the children of every ``nn.ModuleList`` and ``nn.Sequential``.
    """
    if blocks is None:
        blocks = [
            child
            for network in networks.values()
            for module in network.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child in module.children()
        ]
    chosen = set(blocks)
    outer = [unit for prefix, network in networks.items() for unit in _units(prefix, network, chosen)]
    seen: set[nn.Module] = set()
    return [u for u in outer if not (u.module in seen or seen.add(u.module))]  # type: ignore[func-returns-value]


def _units(name: str, module: nn.Module, blocks: set[nn.Module]) -> Iterator[Unit]:
    inside = [child for child in module.modules() if child is not module and child in blocks]
    # ModuleList and ModuleDict are never called, so no hook can gather for them.
    is_callable = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_callable and (module in blocks or not inside):
        parameters = tuple(module.parameters())
        if parameters:
            yield Unit(name, module, parameters)
        return
    # ParameterList and ParameterDict are never called either: the parent owns theirs.
    lists = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    own = tuple(parameter for owner in (module, *lists) for parameter in owner.parameters(recurse=False))
    if own:
        yield Unit(name, module, own, is_container=True)
    for child_name, child in module.named_children():
        if child in lists:
            continue
        yield from _units(f"{name}.{child_name}" if name else child_name, child, blocks)


Reader = Callable[[str, int, int], Tensor]
"""(name, begin, end): returns a flat range of a parameter or buffer, in any dtype, on the CPU."""


def replace_meta_parameters(networks: Iterable[nn.Module], reader: Reader | None) -> None:
    """Replace parameters on the meta device by host parameters that take no memory.

    Raises:
        UsageError: There are parameters or buffers on the meta device and no reader.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for network in networks for module in network.modules()):
        tensors = [*module._parameters.items(), *module._buffers.items()]
        meta = [name for name, tensor in tensors if tensor is not None and tensor.is_meta]
        if meta and reader is None:
            raise UsageError(
                f"Gemini got {type(module).__name__}.{meta[0]} on the meta device and no reader; expected "
                "reader=(name, begin, end) -> values, or networks with weights"
            )
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in replaced:
                empty = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced[parameter]


def parameter_names(networks: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the first name of every parameter."""
    names: dict[nn.Parameter, str] = {}
    for prefix, network in networks.items():
        for name, parameter in network.named_parameters():
            names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
    return names


def parameter_specs(
    units: Iterable[Unit], names: Mapping[nn.Parameter, str], config: GeminiConfig
) -> list[ParameterSpec]:
    """Return the parameters that go into chunks, in the order of the units: all floating-point ones.

    Raises:
        UsageError: A parameter cannot be trained in a chunk.
    """
    specs = []
    for parameter in dict.fromkeys(p for unit in units for p in unit.parameters):
        if not parameter.is_floating_point():
            if parameter.requires_grad:
                raise UsageError(
                    f"Gemini got {names[parameter]} of type {parameter.dtype} to train; expected a floating-point type"
                )
            continue  # replicated on every rank
        is_row_major = parameter.is_contiguous() or parameter.dim() != 4
        if not is_row_major and parameter.is_contiguous(memory_format=torch.channels_last):
            raise UsageError(
                f"Gemini got {names[parameter]} in the channels_last format, and chunks are flat and row-major; leave "
                "it out (speed.channels_last=false)"
            )
        dtype = config.compute_dtype or parameter.dtype
        specs.append(ParameterSpec(names[parameter], parameter.numel(), dtype, parameter.requires_grad))
    return specs


def place_others(
    networks: Mapping[str, nn.Module], in_chunks: Container[nn.Parameter], device: torch.device, reader: Reader | None
) -> None:
    """Move all tensors outside of chunks to the fast tier: buffers, and integer parameters."""

    def read(name: str, tensor: Tensor) -> Tensor:
        assert reader is not None
        return reader(name, 0, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)

    for prefix, network in networks.items():
        for module_name, module in network.named_modules():
            path = "".join(f"{part}." for part in (prefix, module_name) if part)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    values = read(path + key, buffer) if buffer.is_meta else buffer
                    module._buffers[key] = values.to(device)
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter not in in_chunks:
                    values = parameter.data if reader is None else read(path + key, parameter)
                    parameter.data = values.to(device)


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
    master: Master = Master.FLOAT32
    """How its master weights are kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered chunk."""
        return self.numel * self.dtype.itemsize

    @property
    def master_dtype(self) -> torch.dtype:
        """Type in which master weights are stepped, and of accumulated gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def kept_dtype(self) -> torch.dtype:
        """Type in which whole master weights are kept from step to step."""
        return torch.bfloat16 if self.master is Master.BFLOAT16 else self.master_dtype

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
    """Pack parameters into chunks of the size in the settings; by default the one with the least padding.

    Raises:
        UsageError: The settings ask for another form of the master weights than their type has.
    """
    chunks = pack(specs, config.chunk_numel or best_chunk_numel(tuple(specs), world_size), world_size)
    if config.master == "float32":
        return chunks
    check_master(config, {chunk.dtype for chunk in chunks if chunk.is_trained})
    return [replace(chunk, master=Master(config.master)) if chunk.is_trained else chunk for chunk in chunks]


def check_master(config: GeminiConfig, dtypes: AbstractSet[torch.dtype]) -> None:
    """Raise if weights that are computed with in these types have no master weights of the form in the settings.

    Raises:
        UsageError: They have not.
    """
    if config.master != "float32" and dtypes - {torch.bfloat16}:
        given = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(
            f"GeminiConfig got master={config.master} for trained weights that are computed with in {given}; expected "
            "bfloat16 alone, whose bits are the upper half of float32's: set precision=bf16-mixed or bf16-true, "
            "compute_dtype=bfloat16 outside of Lightning, or leave master=float32"
        )


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
    open_of: dict[tuple[torch.dtype, bool], int] = {}
    """By kind: the chunk that is being filled."""
    chunks: list[tuple[tuple[torch.dtype, bool], list[Slot]]] = []
    sizes: list[int] = []
    """Of the chunks, as far as they are filled."""
    for spec in specs:
        kind, needed = (spec.dtype, spec.is_trained), align(spec.numel)
        index = open_of.get(kind)
        if needed > chunk_numel or index is None or sizes[index] + needed > chunk_numel:
            if needed <= chunk_numel:
                if index is not None:
                    sizes[index] = chunk_numel
                open_of[kind] = len(chunks)
            index = len(chunks)
            chunks.append((kind, []))
            sizes.append(0)
        chunks[index][1].append(Slot(spec.name, sizes[index], spec.numel))
        sizes[index] += needed
    return [
        ChunkLayout(index, *kind, tuple(slots), align(max(numel, 1), unit))
        for index, ((kind, slots), numel) in enumerate(zip(chunks, sizes, strict=True))
    ]


@functools.lru_cache(maxsize=8)  # the planner asks for the same weights in many placements
def best_chunk_numel(specs: tuple[ParameterSpec, ...], world_size: int) -> int:
    """Return the chunk size with the least padding, of about 256; the largest one in a tie.

    They leave up to about 100 chunks, of 16 Ki to 32 Mi elements. The range is wide because few sizes pack a UNet's
    convolutions well (SD 2.1: 3 % padding at 5.0 Mi elements, 12 % at 18.8 Mi).
    """
    unit = ALIGNMENT * world_size
    least = min(max(sum(spec.numel for spec in specs) // 96, 2**14), 2**22)
    lower, upper = align(least, unit), align(8 * least, unit)
    sizes = range(lower, upper + 1, max(align((upper - lower) // 255, unit), unit))
    return min(sizes, key=lambda size: (sum(chunk.padding for chunk in pack(specs, size, world_size)), -size))
