"""The Gemini engine: networks in chunks, and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.auto import AutoPlacement
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.gathering import Accumulation
from sd_lightning.gemini.layout import (
    ChunkLayout,
    Reader,
    find_units,
    pack_as_set,
    parameter_names,
    parameter_specs,
    place_others,
    replace_meta_parameters,
)
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.optimizer import GeminiOptimizer, LossScale
from sd_lightning.gemini.outside import OutsideAccess
from sd_lightning.gemini.placement import ChunkPlacement, ChunkPlan, Ledger, plan_static, plan_trace
from sd_lightning.gemini.runtime import Runtime
from sd_lightning.gemini.state import ChunkedState


class GeminiEngine:
    """Training of networks whose parameters live in chunks: sharded, gathered when needed, placed on tiers.

    Parameters stay the modules' ``nn.Parameter`` objects, except those on the meta device, which are replaced. Call
    networks and ``loss.backward()`` as usual; build optimizers over the parameters afterwards and hand each to
    :meth:`optimizer`. All ranks make the same calls, in the same order.

    Args:
        networks: By name prefix of their parameters ("unet"; "" for none).
        config: Sizes and placement of chunks.
        blocks: The repeated modules; by default the children of module lists and sequences.
        device: The fast tier.
        group: The ranks to shard over; the default process group if there is one.
        reader: Gives initial values; needed for networks on the meta device. Each rank reads only its own shards.
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
        replace_meta_parameters(self.networks.values(), reader)
        names = parameter_names(self.networks)
        units = find_units(self.networks, blocks)
        if order is not None:
            units.sort(key=lambda unit: order(unit.name))
        self.layouts = pack_as_set(parameter_specs(units, names, config), config, self.collectives.world_size)
        self.plan = plan_trace(self.layouts) if config.placement == "auto" else plan_static(self.layouts, config)
        self.is_closed = False
        self.is_swapped = False
        """Whether other weights are swapped in."""
        self.num_moves = 0
        """Number of moves of chunks to other tiers; master tensors returned before a move are stale."""
        self.collectives.require_agreement("the layout of chunks", repr((self.layouts, self.plan)))
        self.chunks: list[Chunk] = []
        self.chunk_of: dict[nn.Parameter, Chunk] = {}
        by_name = {name: parameter for parameter, name in names.items()}
        with torch.no_grad():
            for layout, placement in zip(self.layouts, self.plan.chunks, strict=True):
                self._create(layout, placement, by_name, reader)
            place_others(self.networks, self.chunk_of, self.memory.device, reader)
        self.trained = {n: p for p, n in names.items() if p in self.chunk_of and self.chunk_of[p].is_trained}
        chunked = [replace(u, parameters=tuple(p for p in u.parameters if p in self.chunk_of)) for u in units]
        self.runtime = Runtime(
            [unit for unit in chunked if unit.parameters],
            self.chunks,
            networks=self.networks.values(),
            collectives=self.collectives,
            budget=self.plan.gathered_budget,
            prefetch=config.prefetch,
        )
        self.loss_scale = LossScale(self.memory.device) if config.compute_dtype == torch.float16 else None
        self.optimizers: list[GeminiOptimizer] = []
        self.access = self.runtime.access = OutsideAccess(self)
        self.state = ChunkedState(self)
        self.auto = AutoPlacement(self) if config.placement == "auto" else None
        self.accumulation = Accumulation(self)

    def _create(
        self,
        layout: ChunkLayout,
        placement: ChunkPlacement,
        parameters: Mapping[str, nn.Parameter],
        reader: Reader | None,
    ) -> None:
        """Allocate a chunk, fill this rank's shard, and make the parameters views of the chunk."""
        chunk = Chunk(layout, placement, self.memory, self.collectives)
        values = torch.zeros(chunk.bounds.numel, dtype=layout.master_dtype)
        for slot in layout.slots:
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                if reader is None:
                    source = parameters[slot.name].detach().reshape(-1)[begin:end]
                else:
                    source = reader(slot.name, begin, end)
                chunk.bounds.view_of(slot, values).copy_(source.reshape(-1))
        for slot in layout.slots:
            chunk.weights.storage.add(slot, parameters[slot.name])
            self.chunk_of[parameters[slot.name]] = chunk
        chunk.master.fill(values)
        self.chunks.append(chunk)

    def optimizer(self, inner: torch.optim.Optimizer) -> GeminiOptimizer:
        """Return an optimizer that steps the chunks with the parameter groups of a torch optimizer.

        Args:
            inner: An elementwise optimizer over parameters of the networks, made after this engine.

        Raises:
            UsageError: The optimizer's update is not elementwise, or another optimizer steps one of its parameters.
        """
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        if any(optimizer.owns(parameter) for optimizer in self.optimizers for parameter in parameters):
            raise UsageError(
                f"Gemini got a second optimizer ({type(inner).__name__}) for parameters that another one steps; call "
                "drop_optimizers() before a new stage, or give each parameter to one of them"
            )
        if self.auto is not None:
            self.auto.make_room()
        optimizer = GeminiOptimizer(inner, self)
        self.optimizers.append(optimizer)
        return optimizer

    def drop_optimizers(self) -> None:
        """Drop all optimizers, their states and gradients, for example before a new fit."""
        self.abort()
        self.optimizers.clear()
        for chunk in self.chunks:
            chunk.free_states()
        self.memory.release_unused()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss for backward: multiplied by the loss scale in float16, unchanged otherwise."""
        return loss if self.loss_scale is None else self.loss_scale.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss, scaled in float16, and reduce the gradients."""
        self.scale_loss(loss).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Mark the backward passes of all micro-batches of a step but the last; a collective call.

        With ``reduce_once``, gradients are kept whole in float32, and reduced by the next pass outside of ``no_sync``.
        Without it, each pass reduces them and only this rank's shard is kept.
        """
        return self.runtime.reducer.keeping_gradients(self.accumulation.keeps_gradients())

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, plan: ChunkPlan) -> None:
        """Move chunks to the tiers of a plan, outside of backward passes; no value changes. A collective call."""
        if plan == self.plan:
            return
        self.accumulation.make_room(plan)
        self.access.close()
        self.runtime.gatherer.release()
        pairs = zip(self.chunks, plan.chunks, strict=True)
        moving = [(chunk, placement) for chunk, placement in pairs if placement != chunk.placement]
        # Chunks leaving the fast tier move first, to make room.
        for chunk, placement in sorted(moving, key=lambda pair: pair[1].fast_parts - pair[0].placement.fast_parts):
            chunk.move(placement)
        self.memory.release_unused()
        self.plan, self.runtime.gatherer.budget = plan, plan.gathered_budget
        self.num_moves += 1

    def check_can_step(self) -> None:
        """Raise if an optimizer cannot step now."""
        self.access.close()
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

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter in a chunk."""
        return self.chunk_of[parameter].slots[parameter].name

    def whole_weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters, and copies of them in host memory, gathered chunk by chunk; a collective call."""
        self.access.close()
        for chunk in self.chunks:
            yield from self._whole_parameters(chunk)

    @torch.no_grad()
    def full_parameter(self, name: str) -> Tensor:
        """Return a copy of a whole parameter, in the type of the master weights if trained; a collective call."""
        self.access.close()
        parameter, chunk = next((p, chunk) for p, chunk in self.chunk_of.items() if chunk.slots[p].name == name)
        return chunk.part_of(parameter, self._whole(chunk)).clone()

    def _whole_parameters(self, chunk: Chunk) -> Iterator[tuple[nn.Parameter, Tensor]]:
        whole = self._whole(chunk).cpu()
        for parameter in chunk.slots:
            yield parameter, chunk.part_of(parameter, whole).clone()

    def shown(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return a copy of the whole weights that the networks compute with, as trained; a collective call."""
        if self.is_swapped and chunk.is_trained:
            return self._gathered(chunk, chunk.weights.shard).to(dtype)
        return self._whole(chunk).to(dtype)

    def _whole(self, chunk: Chunk) -> Tensor:
        return self._gathered(chunk, chunk.master.tensor if chunk.is_trained else chunk.weights.shard)

    def _gathered(self, chunk: Chunk, source: Tensor) -> Tensor:
        whole = torch.empty(chunk.layout.numel, dtype=source.dtype, device=self.memory.device)
        chunk.weights.wait()
        self.collectives.shard(whole).copy_(source)
        self.collectives.all_gather(whole, chunk.index).wait()
        return whole

    @torch.no_grad()
    def restore(self) -> None:
        """Give every parameter its whole weights in host memory, and end the engine; a collective call.

        Trained parameters get the type of their master weights, others their compute type. Optimizers become unusable.

        Raises:
            UsageError: The engine is closed, and its weights are freed; or a network has written its weights in its
                forward, and nothing has raised for it yet.
        """
        if self.is_closed and self.chunks:
            raise UsageError("Gemini got restore() after close(), which frees the weights; call it instead of close()")
        self.access.forwards.check_all()
        self.access.close()
        self.access.end()
        self.abort()
        for chunk in self.chunks:
            for parameter, weight in self._whole_parameters(chunk):
                parameter.data = weight
            chunk.discard()
        self.end()

    def end(self) -> None:
        """Remove the hooks and forget the chunks."""
        self.access.end()
        self.close()
        self.chunks.clear()
        self.chunk_of.clear()

    def release(self) -> None:
        """Free temporarily gathered weights, for example after a validation run."""
        self.runtime.gatherer.release()

    def synchronize(self) -> None:
        """Wait for all pending gathers and copies."""
        for chunk in self.chunks:
            chunk.weights.wait()
        self.memory.wait_for_copies()

    def close(self) -> None:
        """Remove the hooks and free all memory; reading parameters that are not whole on the fast tier raises."""
        self.access.close()
        self.is_closed = True
        self.synchronize()
        self.runtime.reducer.drop()
        for chunk in self.chunks:
            chunk.discard()
        self.memory.release_unused()
        self.runtime.detach()

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start: bytes by tier, bytes moved, gather hits and misses, bytes of collectives."""
        ledger = self.ledger
        return {
            **{f"bytes/{tier}": ledger.current[tier] for tier in ledger.peak},
            **{f"peak_bytes/{tier}": peak for tier, peak in ledger.peak.items()},
            **{f"moved_bytes/{source}_to_{target}": n for (source, target), n in ledger.moved.items()},
            "gathered_bytes": self.collectives.gathered_bytes,
            "reduced_bytes": self.collectives.reduced_bytes,
            **self.runtime.statistics,
        }
