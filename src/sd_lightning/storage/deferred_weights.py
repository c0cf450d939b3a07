"""Weights that stay in their files until each process knows its shard.

With sd21's UNet (3.46 GB in float32) on two processes, FSDP2 peaks at 1.76 GB per process and keeps 1.73 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.storage.streamed_tensor import StreamedTensor
from sd_lightning.storage.tensor_store import ShardedTensors

Local = Callable[[Any], tuple[Tensor, int, int]]
"""Parameter -> this process's shard, and the shard's flat range ``[begin, end)``."""


def whole(parameter: Tensor) -> tuple[Tensor, int, int]:
    """Return the whole parameter as the shard."""
    return parameter, 0, parameter.numel()


class DeferredWeights:
    """Weights, still in files, of a network whose parameters are on the meta device.

    Only the files' headers are in memory. Values are read in slices and converted to the parameters' dtype, so that a
    process needs memory for its shard and one slice.

    Args:
        store: The files.
        keys: Name in the network -> key in the files, for every parameter and persistent buffer; renaming parameters
            changes only this mapping.
    """

    def __init__(self, store: ShardedTensors, keys: Mapping[str, str]) -> None:
        self._store = store
        self._keys = dict(keys)
        self._present: dict[str, Tensor] = {}
        """Values, by name, of parameters that are in no file, such as adapters'; set by :meth:`fill_in_turn`."""

    def renamed(self, names: Mapping[str, str]) -> DeferredWeights:
        """Return the same weights for a network whose parameters have been renamed.

        Args:
            names: Old name -> new name, for all of them.
        """
        return DeferredWeights(self._store, {names[name]: key for name, key in self._keys.items()})

    def streamed(self, name: str) -> StreamedTensor:
        """Return a weight, by its name in the network, for a writer; call :meth:`close` afterwards."""
        return self._store.streamed(self._keys[name])

    def read(self, name: str, out: Tensor, begin: int = 0, end: int | None = None) -> None:
        """Fill ``out`` with the flat range ``[begin, end)`` of a weight, by its name in the network."""
        if name in self._present:
            out.copy_(self._present[name].reshape(-1)[begin:end].view_as(out))
            return
        self._store.read_into(self._keys[name], out, begin, end)

    def fill_(self, network: nn.Module, device: torch.device, local: Local = whole) -> None:
        """Allocate memory for meta-device parameters, and read this process's shard of each.

        Args:
            network: The network, sharded or not.
            device: Where the values go.
            local: Returns this process's shard of a parameter.
        """
        names = [name for name, parameter in network.named_parameters() if parameter.is_meta]
        # Not to_empty: it would also empty tensors that are not on the meta device.
        network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        with torch.no_grad(), self._store:
            for name in names:
                self.read(name, *local(network.get_parameter(name)))
        self.fill_buffers(network)

    def fill_in_turn(
        self, network: nn.Module, device: torch.device, dtype: torch.dtype | None, *, reading: bool
    ) -> Iterator[nn.Parameter]:
        """Allocate and fill one parameter after the other, for a caller that shards each one immediately.

        Args:
            network: The network, not sharded.
            device: Where the values go.
            dtype: Dtype of the allocated parameters; None keeps their own.
            reading: False leaves the values to the caller.

        Yields:
            Every parameter; those that were not on the meta device are converted to ``dtype``, too.
        """
        with torch.no_grad(), self._store:
            for prefix, module in network.named_modules():
                for key, parameter in list(module.named_parameters(recurse=False)):
                    values = torch.empty_like(parameter, device=device, dtype=dtype)
                    name = f"{prefix}.{key}" if prefix else key
                    if not parameter.is_meta:
                        values.copy_(parameter)
                        self._present[name] = parameter.detach()
                    elif reading:
                        self.read(name, values)
                    filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    module.register_parameter(key, filled)
                    del values
                    yield filled
        self.fill_buffers(network)

    def fill_parameters(self, network: nn.Module, names: list[str]) -> None:
        """Read some parameters whole into host memory."""
        with torch.no_grad(), self._store:
            for name in names:
                prefix, _, key = name.rpartition(".")
                parameter = network.get_parameter(name)
                values = torch.empty_like(parameter, device="cpu")
                self.read(name, values)
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                network.get_submodule(prefix).register_parameter(key, filled)

    def close(self) -> None:
        """Close the files that were opened to read single weights."""
        self._store.close()

    def fill_buffers(self, network: nn.Module) -> None:
        """Overwrite the persistent buffers with their saved values, and close the files."""
        with torch.no_grad(), self._store:
            for name, buffer in network.named_buffers():
                if name in self._keys:
                    self.read(name, buffer)
