"""Buffers that a forward changes (BatchNorm): every rank takes those of rank 0, as under DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MESSAGE_BYTES = 250 * 2**20


class BufferBroadcast:
    """Broadcast of a module's persistent buffers; it does nothing for a module without.

    Args:
        module: The module. Buffers outside of its ``state_dict`` are constants.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set
        ]

    @torch.no_grad()
    def from_rank_0(self) -> None:
        """Give every rank the buffers of rank 0; a collective call."""
        if not self._places or dist.get_world_size() == 1:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for part, name in self._places:
            buffer = part._buffers.get(name)
            if buffer is not None:  # pruning removes some
                by_device.setdefault(buffer.device, []).append(buffer)
        world = dist.group.WORLD
        assert world is not None
        for buffers in by_device.values():
            dist._broadcast_coalesced(world, buffers, _MESSAGE_BYTES, 0)
