"""Networks in chunks: what is behind their parameters, and how it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.layout import ChunkLayout, ParameterSpec, default_search, pack, search_chunk_numel
from sd_lightning.gemini.placement import ChunkPlacement, Plan, plan_static, plan_trace
from sd_lightning.gemini.runtime import Runtime
from sd_lightning.gemini.tiers import Ledger, Memory
from sd_lightning.gemini.units import Unit, find_units

Reader = Callable[[str, int, int], Tensor]
"""(name, begin, end): values of a flat range of a parameter or buffer, of any type, on the CPU."""


class ChunkedNetworks:
    """Networks whose parameters live in chunks: sharded, gathered when needed, placed on tiers.

    Parameters stay the modules' ``nn.Parameter`` objects, except those on the meta device, which are replaced. Call
    networks and ``loss.backward()`` as usual; all ranks do the same calls, in the same order.

    Args:
        networks: By the prefix of their parameters' names ("unet"; "" for none).
        config: How to cut and place.
        blocks: The repeated modules; by default the children of module lists and sequences.
        device: The fast tier.
        group: The ranks to shard over; the default process group if there is one.
        reader: Gives initial values; needed for networks on the meta device. Each rank reads only what it owns.
        order: Sort key for the names of units, if they do not run in the order of registration.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        config: GeminiConfig,
        *,
        blocks: Iterable[nn.Module] | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        reader: Reader | None = None,
        order: Callable[[str], Any] | None = None,
    ) -> None:
        self.networks = dict(networks)
        self.config = config
        self.collectives = Collectives(group, torch.device(device), config.reduce_dtype)
        self.memory = Memory(torch.device(device), config.offload_dir)
        _replace_meta_parameters(self.networks.values(), reader)
        names = _parameter_names(self.networks)
        units = find_units(self.networks, blocks)
        if order is not None:
            units.sort(key=lambda unit: order(unit.name))
        specs = _specs(units, names, config)
        self.layouts = self._pack(specs)
        self.plan = plan_trace(self.layouts) if config.placement == "auto" else plan_static(self.layouts, config)
        self.is_closed = False
        self.is_swapped = False
        """Whether the networks compute with other weights than the trained ones."""
        self.num_moves = 0
        """How often chunks were moved to other tiers; tensors of :class:`OwnedRange` from before are not live."""
        self.collectives.require_agreement("the layout of chunks", repr((self.layouts, self.plan)))
        self.chunks: list[Chunk] = []
        self.chunk_of: dict[nn.Parameter, Chunk] = {}
        by_name = {name: parameter for parameter, name in names.items()}
        with torch.no_grad():
            for layout, placement in zip(self.layouts, self.plan.chunks, strict=True):
                self._create(layout, placement, by_name, reader)
            self._place_others(reader)
        self.trained = {n: p for p, n in names.items() if p in self.chunk_of and self.chunk_of[p].is_trained}
        self.runtime = Runtime(
            [_chunked(unit, self.chunk_of) for unit in units if any(p in self.chunk_of for p in unit.parameters)],
            self.chunks,
            self.chunk_of,
            budget=self.plan.gathered_budget,
            prefetch=config.prefetch,
            networks=self.networks.values(),
        )

    def _pack(self, specs: list[ParameterSpec]) -> list[ChunkLayout]:
        world_size = self.collectives.world_size
        size = self.config.chunk_numel
        if size is None:
            search = self.config.chunk_search or default_search(specs)
            size = search_chunk_numel(specs, search, world_size)
        return pack(specs, size, world_size)

    def _create(
        self,
        layout: ChunkLayout,
        placement: ChunkPlacement,
        parameters: Mapping[str, nn.Parameter],
        reader: Reader | None,
    ) -> None:
        """Allocate a chunk, fill what this rank owns of it, and make its parameters views of it."""
        chunk = Chunk(layout, placement, self.memory, self.collectives)
        values = torch.zeros(chunk.bounds.numel, dtype=chunk.bounds.master_dtype)
        for slot in layout.slots:
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                source = parameters[slot.name].detach().reshape(-1)[begin:end] if reader is None else None
                source = reader(slot.name, begin, end) if source is None and reader is not None else source
                assert source is not None
                chunk.bounds.view_of(slot, values).copy_(source.reshape(-1))
        for slot in layout.slots:
            chunk.add(slot, parameters[slot.name])
            self.chunk_of[parameters[slot.name]] = chunk
        chunk.fill(values)
        self.chunks.append(chunk)

    def _place_others(self, reader: Reader | None) -> None:
        """Bring what is in no chunk to the fast tier, whole: buffers, and parameters of integers."""

        def read(name: str, tensor: Tensor) -> Tensor:
            assert reader is not None
            return reader(name, 0, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)

        for prefix, network in self.networks.items():
            for module_name, module in network.named_modules():
                path = ".".join(part for part in (prefix, module_name) if part)
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        values = read(f"{path}.{key}".lstrip("."), buffer) if buffer.is_meta else buffer
                        module._buffers[key] = values.to(self.memory.device)
                for key, parameter in module._parameters.items():
                    if parameter is not None and parameter not in self.chunk_of:
                        name = f"{path}.{key}".lstrip(".")
                        values = parameter.data if reader is None else read(name, parameter)
                        parameter.data = values.to(self.memory.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, plan: Plan) -> None:
        """Place chunks otherwise, outside of backward passes; no value changes, and all ranks do the same."""
        if plan == self.plan:
            return
        self.runtime.release()
        pairs = zip(self.chunks, plan.chunks, strict=True)
        moving = [(chunk, placement) for chunk, placement in pairs if placement != chunk.placement]
        # What leaves the fast tier makes room for what comes.
        for chunk, placement in sorted(moving, key=lambda pair: pair[1].fast_parts - pair[0].placement.fast_parts):
            chunk.place(placement)
        self.memory.release_unused()
        self.plan, self.runtime.budget = plan, plan.gathered_budget
        self.num_moves += 1

    def check_can_step(self) -> None:
        """Raise if an optimizer cannot step now."""
        if self.is_swapped:
            raise RuntimeError("an optimizer stepped between swap_in and swap_out")
        if self.runtime.is_in_backward:
            raise RuntimeError("an optimizer stepped after a backward pass that did not end; call abort() first")

    def abort(self) -> None:
        """Forget an unfinished backward pass and all gradients."""
        self.runtime.abort()

    @property
    def ledger(self) -> Ledger:
        """Bytes on each tier and bytes moved."""
        return self.memory.ledger

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and copies of whole parameters in host memory, gathered chunk by chunk; all ranks call it."""
        for chunk in self.chunks:
            whole = self._whole(chunk).cpu()
            for name, slot in zip(chunk.parameters, chunk.layout.slots, strict=True):
                yield name, whole[slot.begin : slot.end].view(chunk.parameters[name].shape).clone()

    @torch.no_grad()
    def full_parameter(self, name: str) -> Tensor:
        """Return a copy of a whole parameter, in the optimizer's type if it is trained; all ranks call it."""
        chunk = next(chunk for chunk in self.chunks if name in chunk.parameters)
        slot = chunk.slots[chunk.parameters[name]]
        return self._whole(chunk)[slot.begin : slot.end].view(chunk.parameters[name].shape).clone()

    def _whole(self, chunk: Chunk) -> Tensor:
        source = chunk.master if chunk.is_trained else chunk.shard
        whole = torch.empty(chunk.layout.numel, dtype=source.dtype, device=self.memory.device)
        chunk.wait()
        self.collectives.shard(whole).copy_(source)
        self.collectives.all_gather(whole, chunk.index).wait()
        return whole

    @torch.no_grad()
    def restore(self) -> None:
        """End the engine and give every parameter its whole weights again, in host memory; all ranks call it.

        Trained parameters come back in float32, others in the type they computed in. Optimizers are of no use after it.
        """
        self.abort()
        for chunk in self.chunks:
            whole = self._whole(chunk).cpu()
            for name, slot in zip(chunk.parameters, chunk.layout.slots, strict=True):
                parameter = chunk.parameters[name]
                parameter.data = whole[slot.begin : slot.end].view(parameter.shape).clone()
            chunk.discard()
        self.end()

    def end(self) -> None:
        """Remove the hooks and forget the chunks."""
        self.close()
        self.chunks.clear()
        self.chunk_of.clear()

    def release(self) -> None:
        """Free temporarily gathered weights, as after a validation run."""
        self.runtime.release()

    def synchronize(self) -> None:
        """Wait for everything under way, such as weights gathered beside the computation."""
        for chunk in self.chunks:
            chunk.wait()
        self.memory.wait_for_copies()

    def close(self) -> None:
        """Remove the hooks; parameters that are not gathered read as NaN."""
        self.is_closed = True
        self.synchronize()
        self.memory.release_unused()
        self.runtime.detach()

    def statistics(self) -> dict[str, Any]:
        """Return counters since the beginning: bytes by tier, moves, hits and misses of gathering, collectives."""
        ledger = self.ledger
        return {
            **{f"bytes/{tier}": ledger.current[tier] for tier in ledger.peak},
            **{f"peak_bytes/{tier}": peak for tier, peak in ledger.peak.items()},
            **{f"moved_bytes/{source}_to_{target}": n for (source, target), n in ledger.moved.items()},
            "gathered_bytes": self.collectives.gathered_bytes,
            "reduced_bytes": self.collectives.reduced_bytes,
            **self.runtime.statistics,
        }


def _replace_meta_parameters(networks: Iterable[nn.Module], reader: Reader | None) -> None:
    """Put parameters on the host, without memory, in the place of those on the meta device."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for network in networks:
        for module in network.modules():
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


def _parameter_names(networks: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the first name of every parameter."""
    names: dict[nn.Parameter, str] = {}
    for prefix, network in networks.items():
        for name, parameter in network.named_parameters():
            names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
    return names


def _specs(units: Iterable[Unit], names: Mapping[nn.Parameter, str], config: GeminiConfig) -> list[ParameterSpec]:
    specs = []
    for parameter in dict.fromkeys(p for unit in units for p in unit.parameters):
        if not parameter.is_floating_point():
            if parameter.requires_grad:
                raise UsageError(
                    f"Gemini got {names[parameter]} of type {parameter.dtype} to train; expected a floating-point type"
                )
            continue  # whole on every rank
        is_row_major = parameter.is_contiguous() or parameter.dim() != 4
        if not is_row_major and parameter.is_contiguous(memory_format=torch.channels_last):
            raise UsageError(
                f"Gemini got {names[parameter]} in the channels_last format, and chunks are flat and row-major; leave "
                "it out (speed.channels_last=false)"
            )
        dtype = config.compute_dtype or parameter.dtype
        specs.append(ParameterSpec(names[parameter], parameter.numel(), dtype, parameter.requires_grad))
    return specs


def _chunked(unit: Unit, chunk_of: Mapping[nn.Parameter, Chunk]) -> Unit:
    """Return a unit with those of its parameters that are in chunks."""
    parameters = tuple(p for p in unit.parameters if p in chunk_of)
    return Unit(unit.name, unit.module, parameters, unit.is_container)
