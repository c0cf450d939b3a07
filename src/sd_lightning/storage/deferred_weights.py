"""Weights that stay in their files until each process knows its shard.

With sd21's UNet (3.46 GB in float32) on two processes, FSDP2 peaks at 1.76 GB per process and keeps 1.73 GB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.storage.safetensors_file import flat_blocks
from sd_lightning.storage.streamed_tensor import StreamedTensor
from sd_lightning.storage.tensor_store import ShardedTensors

_SLICE_NUMEL = 2**18
"""Elements that adapters are merged into at a time: 1 MiB in float32."""

Local = Callable[[Any], tuple[Tensor, int, int]]
"""Parameter -> this process's shard, and the shard's flat range ``[begin, end)``."""


def whole(parameter: Tensor) -> tuple[Tensor, int, int]:
    """Return the whole parameter as the shard."""
    return parameter, 0, parameter.numel()


class Change:
    """A change of a weight (O, …), whose rows are computed when they are needed; ``alpha / rank`` scales them."""

    alpha: float
    magnitude: Tensor | None
    """DoRA's (O,)."""
    strength: float
    """Share of the change that is added."""

    @property
    def type(self) -> str:
        """How it is stored: "lora", "loha" or "lokr"."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        raise NotImplementedError

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows of the change before it is scaled, flattened, in float32."""
        raise NotImplementedError

    def add_(self, values: Tensor, begin: int) -> None:
        """Add the change, without DoRA, to a flat range of the weight that begins there."""
        width, end = self.rows(0, 1).shape[1], begin + values.numel()
        first, last = begin // width, -(-end // width)
        change = self.rows(first, last).view(-1)[begin - first * width :][: values.numel()]
        values.add_(change.to(values.device), alpha=self.scale * self.strength)


@dataclass(frozen=True, eq=False)
class Adapter(Change):
    """A low-rank change of a weight (O, …): ``alpha / rank * up @ down``, with rows flattened (arXiv 2106.09685)."""

    down: Tensor
    """(R, …)"""
    up: Tensor
    """(O, R, …)"""
    alpha: float
    magnitude: Tensor | None = None
    strength: float = 1.0

    @property
    def type(self) -> str:
        return "lora"

    @property
    def rank(self) -> int:
        return len(self.down)

    def rows(self, first: int, last: int) -> Tensor:
        return self.up[first:last].float().flatten(1) @ self.down.float().flatten(1)


@dataclass(frozen=True, eq=False)
class Factors(Change):
    """A change by LoHa or LoKr (LyCORIS, arXiv 2309.14859).

    LoHa's is ``(w1_a @ w1_b) * (w2_a @ w2_b)``, LoKr's the Kronecker product of ``w1`` and ``w2``, each of which is
    whole or ``a @ b``; if both are whole, ``alpha`` does not scale them.
    """

    values: Mapping[str, Tensor]
    """By LyCORIS' names: ``hada_w1_a``, ``lokr_w1``, …"""
    alpha: float
    magnitude: None = None
    strength: float = 1.0

    @property
    def type(self) -> str:
        return "loha" if "hada_w1_b" in self.values else "lokr"

    @property
    def rank(self) -> int:
        inner = (self.values.get(name) for name in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b"))
        return next((len(each) for each in inner if each is not None), max(1, int(self.alpha)))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the weight, and values of each."""
        rows = [len(each) for name, each in self.values.items() if not name.endswith("_b")]
        return rows[0] if self.type == "loha" and rows[0] == rows[1] else math.prod(rows), self.rows(0, 1).shape[1]

    @property
    def scale(self) -> float:
        return 1.0 if {"lokr_w1", "lokr_w2"} <= self.values.keys() else self.alpha / self.rank

    def rows(self, first: int, last: int) -> Tensor:
        if self.type == "loha":
            return self._part("hada_w1", first, last) * self._part("hada_w2", first, last)
        w1, w2 = self._part("lokr_w1"), self._part("lokr_w2")
        at = torch.arange(first, last, device=w1.device)
        return (w1[at // len(w2), :, None] * w2[at % len(w2), None]).flatten(1)

    def _part(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        if name in self.values:
            return self.values[name].float().flatten(1)
        return self.values[f"{name}_a"][first:last].float() @ self.values[f"{name}_b"].float()


class DeferredWeights:
    """Weights, still in files, of a network whose parameters are on the meta device.

    Only the files' headers are in memory. Values are read in slices and converted to the parameters' dtype, so that a
    process needs memory for its shard and one slice.

    Args:
        store: The files.
        keys: Name in the network -> key in the files, for every parameter and persistent buffer; renaming parameters
            changes only this mapping.
        adapters: By key in the files, adapters that are merged into what is read, in float32.
    """

    def __init__(
        self, store: ShardedTensors, keys: Mapping[str, str], adapters: Mapping[str, Sequence[Change]] | None = None
    ) -> None:
        self._store = store
        self._keys = dict(keys)
        self._adapters = dict(adapters or {})
        self._present: dict[str, Tensor] = {}
        """Values, by name, of parameters that are in no file, such as adapters'; set by :meth:`fill_in_turn`."""

    def renamed(self, names: Mapping[str, str]) -> DeferredWeights:
        """Return the same weights for a network whose parameters have been renamed.

        Args:
            names: Old name -> new name; others are left out.
        """
        keys = {names[name]: key for name, key in self._keys.items() if name in names}
        return DeferredWeights(self._store, keys, self._adapters)

    def with_adapters(self, adapters: Mapping[str, Sequence[Change]]) -> DeferredWeights:
        """Return the same weights with adapters, by the weights' names in the network, merged in."""
        return DeferredWeights(self._store, self._keys, {self._keys[name]: each for name, each in adapters.items()})

    def streamed(self, name: str) -> StreamedTensor:
        """Return a weight, by its name in the network, for a writer; call :meth:`close` afterwards."""
        stored = self._store.streamed(self._keys[name])
        is_adapted = self._keys[name] in self._adapters
        return replace(stored, slices=lambda: self._merged(name, stored)) if is_adapted else stored

    def _merged(self, name: str, stored: StreamedTensor) -> Iterator[Tensor]:
        for begin in range(0, stored.numel, _SLICE_NUMEL):
            block = torch.empty(min(_SLICE_NUMEL, stored.numel - begin))
            self.read(name, block, begin, begin + block.numel())
            yield block.to(stored.dtype)

    def read(self, name: str, out: Tensor, begin: int = 0, end: int | None = None) -> None:
        """Fill ``out`` with the flat range ``[begin, end)`` of a weight, by its name in the network."""
        if name in self._present:
            out.copy_(self._present[name].reshape(-1)[begin:end].view_as(out))
            return
        key = self._keys[name]
        if key not in self._adapters:
            self._store.read_into(key, out, begin, end)
            return
        for target in flat_blocks(out.detach(), 0, out.numel(), _SLICE_NUMEL):
            block = torch.empty(target.shape)
            self._store.read_into(key, block, begin, begin + block.numel())
            for adapter in self._adapters[key]:
                adapter.add_(block.view(-1), begin)
            target.copy_(block)
            begin += block.numel()

    def first(self, name: str, count: int) -> Tensor:
        """Return the first values of a weight, by its name in the network: (count,), float32."""
        values = torch.empty(count)
        self.read(name, values, 0, count)
        return values

    def fill_(
        self, network: nn.Module, device: torch.device, local: Local = whole, *, skip: Collection[str] = ()
    ) -> None:
        """Allocate memory for meta-device tensors, and read this process's shard of each parameter.

        Args:
            network: The network, sharded or not.
            device: Where the values go.
            local: Returns this process's shard of a parameter.
            skip: Buffers that have their values.
        """
        parameters = network.named_parameters(remove_duplicate=False)  # which no longer share their memory below
        names = [name for name, parameter in parameters if parameter.is_meta]
        # Not to_empty: it would also empty tensors that are not on the meta device.
        network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        with torch.no_grad(), self._store:
            for name in names:
                self.read(name, *local(network.get_parameter(name)))
        self.fill_buffers(network, skip=skip)

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

    def close(self) -> None:
        """Close the files that were opened to read single weights."""
        self._store.close()

    def fill_buffers(self, network: nn.Module, *, skip: Collection[str] = ()) -> None:
        """Overwrite the persistent buffers, except those in ``skip``, with their saved values, and close the files."""
        with torch.no_grad(), self._store:
            for name, buffer in network.named_buffers():
                if name in self._keys and name not in skip:
                    self.read(name, buffer)
