"""Weights in host memory: a block is copied to the device while the one before it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.placement import Kind, Tier, TierBuffer
from sd_lightning.models.families.blocks import execution_position, repeated_blocks
from sd_lightning.models.latent_diffusion import LatentDiffusion

Offload = Literal["blocks"]

_ALIGNMENT = 512
"""Bytes between beginnings of tensors, as CUDA's caching allocator has them: kernels choose by alignment."""


class _Unit:
    """Tensors that are copied together: those of a block, or those of a network outside of its blocks.

    Their values do not change, so the copy on the host is never written again.
    """

    def __init__(self, memory: Memory, tensors: Sequence[Tensor]) -> None:
        self._memory = memory
        self.nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        self._host = memory.allocate(Tier.SLOW, Kind.WEIGHTS, self.nbytes, torch.uint8)
        self._places: list[tuple[Tensor, Tensor, int]] = []
        """Tensors, what they are on the host, and where they begin."""
        begin = 0
        for tensor in tensors:
            strides = torch.empty_like(tensor, device="meta").stride()  # its own, if it is dense
            view = self._host.tensor[begin : begin + tensor.nbytes].view(tensor.dtype)
            tensor.data = view.as_strided(tensor.shape, strides).copy_(tensor.detach())
            self._places.append((tensor, tensor.data, begin))
            begin += aligned(tensor.nbytes)

    def copy_to(self, buffer: TierBuffer) -> Arrival:
        """Begin to copy the values to the device, after the work submitted so far."""
        with self._memory.copying(Tier.FAST) as arrival:
            self._memory.copy(buffer.tensor[: self.nbytes], self._host.tensor, Tier.SLOW, Tier.FAST)
        return arrival

    def point_to(self, buffer: TierBuffer | None) -> None:
        """Let the tensors be those in a buffer, or those on the host."""
        for tensor, on_host, begin in self._places:
            if buffer is None:
                tensor.data = on_host
            else:
                flat = buffer.tensor[begin : begin + on_host.nbytes].view(on_host.dtype)
                tensor.data = flat.as_strided(on_host.shape, on_host.stride())


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a unit."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _OffloadedNetwork:
    """A network of which the device has two blocks at a time, and while it runs, what is outside of blocks.

    Which block follows which is learned: at first it is the order of registration, then that of the last call.
    """

    def __init__(self, memory: Memory, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._memory = memory
        inside, groups = _grouped(network, blocks)
        self.hooked = [module for module in network.modules() if inside.get(module, module) is module]
        """Modules outside of blocks, and blocks: all of them, since a VAE is not called itself, but its decoder is."""
        self._rest = _Unit(memory, groups[None])
        self.units = {block: _Unit(memory, groups[block]) for block in blocks}
        units = list(self.units.values())
        self._next = dict(zip(units, [*units[1:], *units[:1]]))
        self._buffers: list[TierBuffer] = []
        """On the device: of the rest, and of blocks."""
        self._spare: list[TierBuffer] = []
        self._copies: dict[_Unit, tuple[TierBuffer, Arrival]] = {}
        """On the device, of the block that computes, and of the one that is expected next."""
        self._current: _Unit | None = None

    def enter(self) -> None:
        """Bring what is outside of blocks to the device, and take the memory for two blocks there."""
        rest = self._memory.allocate(Tier.FAST, Kind.WEIGHTS, self._rest.nbytes, torch.uint8)
        pair = [max((unit.nbytes for unit in self.units.values()), default=0)] * min(len(self.units), 2)
        self._spare = [self._memory.allocate(Tier.FAST, Kind.GATHERED, size, torch.uint8) for size in pair]
        self._buffers = [rest, *self._spare]
        arrival = self._rest.copy_to(rest)  # now that no allocation can fail
        self._rest.point_to(rest)
        arrival.join()

    def use(self, unit: _Unit) -> None:
        """Let a block compute on the device, and begin to copy the one that is expected next."""
        before, self._current = self._current, unit
        if before is unit:
            return
        for other in self._copies.keys() - {before, unit}:  # copies are in order, so the next may overwrite it
            self._spare.append(self._copies.pop(other)[0])
        buffer, arrival = self._fetch(unit)
        arrival.join()
        unit.point_to(buffer)
        if before is not None:
            before.point_to(None)
            self._spare.append(self._copies.pop(before)[0])
            self._next[before] = unit
        self._fetch(self._next[unit])

    def _fetch(self, unit: _Unit) -> tuple[TierBuffer, Arrival]:
        if unit not in self._copies:
            buffer = self._spare.pop()
            self._copies[unit] = buffer, unit.copy_to(buffer)
        return self._copies[unit]

    def leave(self) -> None:
        """Give the memory on the device back."""
        for _, arrival in self._copies.values():
            arrival.join()
        for unit in (self._rest, *self._copies):
            unit.point_to(None)
        for buffer in self._buffers:
            self._memory.free(buffer)
        self._current, self._copies, self._buffers, self._spare = None, {}, [], []


def _grouped(
    network: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module | None, list[Tensor]]]:
    """Return the block of each module that is in one, and the tensors by block; None has those not of one block."""
    inside = {module: block for block in blocks for module in block.modules()}
    homes: dict[Tensor, nn.Module | None] = {}
    for module in network.modules():
        home = inside.get(module)
        for tensor in chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                homes[tensor] = home if homes.get(tensor, home) is home else None
    groups: dict[nn.Module | None, list[Tensor]] = {each: [] for each in (None, *blocks)}
    for tensor, home in homes.items():
        groups[home].append(tensor)
    return inside, groups


@dataclass(frozen=True)
class OffloadedBytes:
    """Bytes of a network's weights if its blocks are offloaded."""

    blocks: Mapping[str, int]
    """By name; each is copied when it runs."""
    rest: int
    """On the device while the network runs."""

    @classmethod
    def of(cls, model: LatentDiffusion, name: str) -> OffloadedBytes:
        """Count them, also on the meta device."""
        blocks = offloaded_blocks(model, name)
        groups = _grouped(model.networks[name], list(blocks.values()))[1]
        sizes = {block: sum(aligned(tensor.nbytes) for tensor in tensors) for block, tensors in groups.items()}
        return cls({key: sizes[block] for key, block in blocks.items()}, sizes[None])

    @property
    def on_device(self) -> int:
        """Bytes there while the network runs: what is outside of blocks, and two buffers for blocks."""
        return self.rest + max(self.blocks.values(), default=0) * min(len(self.blocks), 2)


def offloaded_blocks(model: LatentDiffusion, name: str) -> dict[str, nn.Module]:
    """Return the blocks of a network that are offloaded, by name, in the order in which they are expected.

    Those of the denoiser and the text encoders: others are small, and a VAE that decodes in tiles runs often.
    """
    is_large = name in (model.family.denoiser, *model.text_encoders)
    blocks = repeated_blocks(model.networks[name]) if is_large else {}
    return dict(sorted(blocks.items(), key=lambda each: execution_position(each[0])))


def check_offload(offload: str | None, device: torch.device) -> None:
    """Refuse what cannot be done, before anything is read or moved.

    Raises:
        UsageError: Nothing is known by that name, or that device cannot compute with weights in host memory.
    """
    if offload not in (None, *get_args(Offload)):
        raise UsageError(f"generate got offload={offload}; expected None or blocks; write offload=blocks")
    if offload is not None and device.type not in ("cpu", "cuda"):
        raise UsageError(f"generate got offload={offload} device={device}; expected cuda or cpu; or leave offload out")


@contextmanager
def offloading(model: LatentDiffusion, device: torch.device) -> Iterator[Memory]:
    """Keep the weights in host memory, page-locked if there is an accelerator, and compute on a device.

    The device has the weights of one network at a time: two buffers of the size of its largest block, and what is
    outside of its blocks. Afterwards all weights are in host memory. Weights of any dtype are offloaded; none may be
    trained meanwhile.

    Args:
        model: The model.
        device: Where it computes.

    Yields:
        The memory, whose ledger tells the bytes on the tiers.

    Raises:
        UsageError: The host's memory is too small, or may not be locked.
    """
    memory = Memory(device)
    try:
        networks = [
            _OffloadedNetwork(memory, network, list(offloaded_blocks(model, name).values()))
            for name, network in model.networks.items()
        ]
    except UsageError as error:
        raise UsageError(
            "generate got offload=blocks, and the host cannot hold the model's weights page-locked; free host memory, "
            "raise the limit (ulimit -l; docker run --ulimit memlock=-1), or take quantization=int8 or a larger GPU"
        ) from error
    active: list[_OffloadedNetwork] = []

    def leave() -> None:
        while active:
            active.pop().leave()

    def use(network: _OffloadedNetwork, module: nn.Module) -> None:
        if network not in active:
            leave()
            active.append(network)
            network.enter()
        if module in network.units:
            network.use(network.units[module])

    hooked = ((network, module) for network in networks for module in network.hooked)
    hooks = [module.register_forward_pre_hook(lambda m, _, n=network: use(n, m)) for network, module in hooked]
    try:
        yield memory
    finally:
        for hook in hooks:
            hook.remove()
        leave()
