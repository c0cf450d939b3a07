"""Weights that stay in their files until it is decided which process keeps which part of them.

With sd21's UNet (3.46 GB in float32) on two processes FSDP2 peaks at 1.76 GB each for the 1.73 GB that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.storage.streamed_tensor import StreamedTensor
from sd_lightning.storage.tensor_store import ShardedTensors

Local = Callable[[Any], tuple[Tensor, int, int]]
"""Parameter -> what this process holds of it, and the flat range ``[begin, end)`` that this is."""


def whole(parameter: Tensor) -> tuple[Tensor, int, int]:
    """Hold all of a parameter."""
    return parameter, 0, parameter.numel()


class DeferredWeights:
    """The weights of a network whose parameters are on the meta device, and no use until they are read.

    Nothing is held but the files' headers. Values are read in slices and converted to the parameters' type on the
    way, so that a process needs memory for what it keeps and for one slice.

    Args:
        store: The files.
        keys: Name in the network -> key in the files, for every parameter and persistent buffer; renaming a network
            changes these alone.
    """

    def __init__(self, store: ShardedTensors, keys: Mapping[str, str]) -> None:
        self._store = store
        self._keys = dict(keys)
        self._present: dict[str, Tensor] = {}
        """Values, by name, of parameters that are in no file, such as adapters', once they have been taken apart."""

    def renamed(self, names: Mapping[str, str]) -> DeferredWeights:
        """Return the same weights for a network whose parameters have been renamed.

        Args:
            names: Name as it was -> name as it is, for all of them.
        """
        return DeferredWeights(self._store, {names[name]: key for name, key in self._keys.items()})

    def streamed(self, name: str) -> StreamedTensor:
        """Describe a weight, by its name in the network, for a writer; call :meth:`close` after."""
        return self._store.streamed(self._keys[name])

    def read(self, name: str, out: Tensor, begin: int = 0, end: int | None = None) -> None:
        """Fill a tensor with the flat range ``[begin, end)`` of the weight of that name in the network."""
        if name in self._present:
            out.copy_(self._present[name].reshape(-1)[begin:end].view_as(out))
            return
        self._store.read_into(self._keys[name], out, begin, end)

    def fill_(self, network: nn.Module, device: torch.device, local: Local = whole) -> None:
        """Give parameters that are on the meta device storage, and read what this process holds of each.

        Args:
            network: As it was built, or sharded since.
            device: Where the values go.
            local: What this process holds of a parameter.
        """
        names = [name for name, parameter in network.named_parameters() if _is_meta(parameter)]
        # As to_empty does, which would also empty what is not on the meta device.
        network._apply(lambda t: torch.empty_like(t, device=device) if _is_meta(t) else t)
        with torch.no_grad(), self._store:
            for name in names:
                self.read(name, *local(network.get_parameter(name)))
        self.fill_buffers(network)

    def fill_in_turn(
        self, network: nn.Module, device: torch.device, dtype: torch.dtype | None, *, reading: bool
    ) -> Iterator[nn.Parameter]:
        """Give one parameter after the other storage and values, for a caller that takes each apart at once.

        Args:
            network: As it was built.
            device: Where the values go.
            dtype: What parameters are made in; their own type if None.
            reading: False leaves the values to the caller.

        Yields:
            The parameters, all of them; those that were not on the meta device in ``dtype`` as well.
        """
        with torch.no_grad(), self._store:
            for prefix, module in network.named_modules():
                for key, parameter in list(module.named_parameters(recurse=False)):
                    values = torch.empty_like(parameter, device=device, dtype=dtype)
                    name = f"{prefix}.{key}" if prefix else key
                    if not _is_meta(parameter):
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
        """Read some parameters as a whole into host memory: those that are not trained."""
        with torch.no_grad(), self._store:
            for name in names:
                prefix, _, key = name.rpartition(".")
                parameter = network.get_parameter(name)
                values = torch.empty_like(parameter, device="cpu")
                self.read(name, values)
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                network.get_submodule(prefix).register_parameter(key, filled)

    def close(self) -> None:
        """Close the files that have been opened to read single weights."""
        self._store.close()

    def fill_buffers(self, network: nn.Module) -> None:
        """Read buffers that are saved with the weights over what the constructor made, and close the files."""
        with torch.no_grad(), self._store:
            for name, buffer in network.named_buffers():
                if name in self._keys:
                    self.read(name, buffer)


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"
