"""The Gemini engine: training of networks in chunks, and its state for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.auto import AutoPlacement
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.gathering import Reducer
from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.optimizer import GeminiOptimizer, LossScale
from sd_lightning.gemini.outside import OutsideAccess
from sd_lightning.gemini.placement import ChunkPlan, Ledger
from sd_lightning.gemini.runtime import Runtime
from sd_lightning.state.shards import (
    LazyTensor,
    OptimizerGroups,
    ParameterShard,
    Read,
    SavedParameter,
    ShardedState,
    load_groups,
    named_groups,
    optimizer_name,
)


class GeminiEngine(ChunkedNetworks):
    """Training of networks whose parameters live in chunks: sharded, gathered when needed, placed on tiers.

    Call networks and ``loss.backward()`` as usual; build optimizers over the parameters afterwards and hand each to
    :meth:`optimizer`. All ranks make the same calls, in the same order.

    Args:
        networks: By name prefix of their parameters ("unet"; "" for none).
        config: Sizes and placement of chunks.
        **settings: All others are those of :class:`~sd_lightning.gemini.chunk.ChunkedNetworks`.
    """

    def __init__(self, networks: Mapping[str, nn.Module], config: GeminiConfig, **settings: Any) -> None:
        super().__init__(networks, config, **settings)
        self.is_closed = False
        self.is_restored = False
        """Whether all memory is freed."""
        self.num_moves = 0
        """Number of moves of chunks to other tiers; master tensors returned before a move are stale."""
        self.loss_scale = LossScale(self.memory.device) if config.compute_dtype == torch.float16 else None
        self.optimizers: list[GeminiOptimizer] = []
        reducer = Reducer(self.chunks)
        self.access = OutsideAccess(self, reducer, self.optimizers, self._gradient_scale)
        self.auto = AutoPlacement(self, self.move) if config.placement == "auto" else None
        self.runtime = Runtime(self, reducer, self.access, self.auto)
        self.state = ChunkedState(self)

    def optimizer(self, inner: torch.optim.Optimizer) -> GeminiOptimizer:
        """Return an optimizer that steps the chunks with the parameter groups of a torch optimizer.

        Args:
            inner: An elementwise optimizer over parameters of the networks, made after this engine.

        Raises:
            UsageError: The optimizer's update is not elementwise, or another optimizer steps one of its parameters.
        """
        if self.config.step_in_backward and self.optimizers:
            raise UsageError(
                f"Gemini got a second optimizer ({type(inner).__name__}) with step_in_backward, where the backward "
                "pass steps everything; expected one: use parameter groups, or leave step_in_backward out"
            )
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        if any(optimizer.owns(parameter) for optimizer in self.optimizers for parameter in parameters):
            raise UsageError(
                f"Gemini got a second optimizer ({type(inner).__name__}) for parameters that another one steps; call "
                "drop_optimizers() before a new stage, or give each parameter to one of them"
            )
        if self.auto is not None:
            self.auto.make_room()
        optimizer = GeminiOptimizer(inner, self.runtime, self.loss_scale)
        self.optimizers.append(optimizer)
        return optimizer

    def drop_optimizers(self) -> None:
        """Drop all optimizers, their states and gradients, for example before a new fit."""
        self.abort()
        for optimizer in self.optimizers:
            optimizer.stepper.finish(set())  # its scratch, if a backward pass has stepped
        self.optimizers.clear()
        self.runtime.reducer.step_chunk = None
        for chunk in self.chunks:
            chunk.free_states()
        self.memory.release_unused()

    def _gradient_scale(self) -> float | Tensor:
        return 1.0 if self.loss_scale is None else self.loss_scale.used

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss for backward: multiplied by the loss scale in float16, unchanged otherwise."""
        return loss if self.loss_scale is None else self.loss_scale.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss, scaled in float16, and reduce the gradients."""
        if not self.skips_backward(loss):
            self.scale_loss(loss).backward()

    def skips_backward(self, loss: Tensor) -> bool:
        """Return whether the loss of any rank is not finite and its backward pass would step; drop its graph's pass.

        With ``step_in_backward`` nothing after the pass could prevent that step. A collective call then, which waits
        for the loss.
        """
        if not self.config.step_in_backward:
            return False
        is_bad = torch.tensor([not bool(loss.isfinite().all())], dtype=torch.int64)
        if not self.collectives.all_reduce(is_bad, dist.ReduceOp.MAX).any():
            return False
        self.abort()
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        """Mark the backward passes of all micro-batches of a step but the last; a collective call.

        With ``reduce_once``, gradients are kept whole in float32, and reduced by the next pass outside of ``no_sync``.
        Without it, each pass reduces them and only this rank's shard is kept.

        Raises:
            UsageError: The backward pass steps.
        """
        if self.config.step_in_backward:
            raise UsageError(
                "Gemini got several micro-batches with step_in_backward, where each backward pass steps; expected one "
                "(trainer.accumulate_grad_batches=1), or leave step_in_backward out"
            )
        return self.runtime.reducer.keeping_gradients(self.runtime.accumulation.keeps_gradients())

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, plan: ChunkPlan) -> None:
        """Move chunks to the tiers of a plan, outside of backward passes; no value changes. A collective call."""
        if plan == self.plan:
            self.plan = plan
            return
        self.runtime.accumulation.make_room(plan)
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

    def abort(self) -> None:
        """Forget an unfinished backward pass and all gradients."""
        self.runtime.abort()

    @property
    def ledger(self) -> Ledger:
        """Bytes on each tier and bytes moved."""
        return self.memory.ledger

    def whole_weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters, and copies of them in host memory, gathered chunk by chunk; a collective call."""
        self.access.close()
        self.runtime.check_is_consistent()
        for chunk in self.chunks:
            whole = self.whole(chunk).cpu()
            for parameter in chunk.slots:
                yield parameter, chunk.part_of(parameter, whole).clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Give every parameter its whole weights in host memory, and end the engine; a collective call.

        Trained parameters get the type of their master weights, others their compute type. Optimizers become unusable.
        Restored weights stay as they are.

        Raises:
            UsageError: The engine is closed, and its weights are freed; or a backward pass has stepped some of them.
        """
        if self.is_restored:
            return
        if self.is_closed:
            raise UsageError("Gemini got restore() after close(), which frees the weights; call it instead of close()")
        self.access.close()
        self.runtime.check_is_consistent()
        self.access.end()
        self.abort()
        for chunk in self.chunks:
            whole = self.whole(chunk).cpu()
            for parameter in chunk.slots:
                parameter.data = chunk.part_of(parameter, whole).clone()
            chunk.discard()
        self.is_restored = True
        self.close()

    def close(self) -> None:
        """Remove the hooks and free all memory; parameters that got no other memory read as NaN."""
        self.is_closed = True
        self.access.end()
        self.synchronize()
        self.runtime.reducer.drop()
        for chunk in self.chunks:
            chunk.discard()
        self.memory.release_unused()
        self.runtime.detach()
        self.chunks.clear()
        self.chunk_of.clear()

    def release(self) -> None:
        """Free temporarily gathered weights, for example after a validation run."""
        self.runtime.gatherer.release()

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


class ChunkedState(ShardedState):
    """Training state of an engine: the parameter ranges in this rank's shards of all chunks.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: GeminiEngine) -> None:
        self._engine = engine

    @override
    def parameter_shards(self) -> list[ParameterShard]:
        self._engine.access.close()
        if self._is_ahead:
            self._engine.runtime.check_is_consistent()
        owned = []
        for chunk, slot, parameter in self._slots():
            begin, end = chunk.bounds.owned(slot)
            if begin == end and slot.numel > 0:
                continue
            optimizer = self._optimizer_of(parameter)
            states: dict[str, LazyTensor] = {}
            scalars: dict[str, Any] = {}
            if optimizer is not None and (progress := optimizer.stepper.progress.get(parameter)) is not None:
                update = optimizer.stepper.update
                for kind in optimizer.stepper.state_kinds(parameter):
                    part = update.part(chunk.bounds, slot, chunk.states[kind].tensor)
                    states[kind] = update.values(kind, part, end - begin)
                scalars = update.scalars(progress)
            master = chunk.master.part(slot)
            owned.append(ParameterShard(slot.name, tuple(parameter.shape), begin, end, master, states, scalars))
        return owned

    @override
    def optimizer_groups(self) -> OptimizerGroups:
        return named_groups(self._engine.optimizers, self._names())

    @override
    def optimizer_names(self) -> list[str]:
        return [optimizer_name(optimizer.inner) for optimizer in self._engine.optimizers]

    @override
    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load weights, optimizer states and hyper-parameters; then refresh the compute weights.

        Raises:
            UsageError: The states belong to another optimizer, or to other groups.
        """
        self._check_not_swapped("load")
        if groups is not None:
            load_groups(self._engine.optimizers, self.optimizer_groups(), groups)
        self._engine.synchronize()
        for optimizer in self._engine.optimizers if groups is not None else ():
            optimizer.adopt()  # the groups' settings have been loaded
        for chunk, slot, parameter in self._slots():
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                with chunk.master.stepping(*chunk.bounds.range_of(slot)) as values:
                    read("master", slot.name, values, begin, end)
            if groups is not None:
                self._load_states(chunk, slot, parameter, saved[slot.name], read)
        for chunk in self._engine.trained_chunks:
            chunk.master.refresh()
        if groups is not None or not self._is_ahead:
            self._engine.runtime.reducer.complete.clear()
            self._engine.runtime.reducer.stepped.clear()
            for optimizer in self._engine.optimizers:
                optimizer.early.reset()

    @property
    def _is_ahead(self) -> bool:
        """Whether a backward pass has stepped states; those of a new optimizer may be listed, to be loaded."""
        return any(optimizer.early.has_stepped for optimizer in self._engine.optimizers)

    def _load_states(
        self, chunk: Chunk, slot: Slot, parameter: nn.Parameter, saved: SavedParameter, read: Read
    ) -> None:
        optimizer = self._optimizer_of(parameter)
        if optimizer is None:
            return
        stepper, update = optimizer.stepper, optimizer.stepper.update
        kinds = stepper.state_kinds(parameter)
        has_states = bool(saved.states or saved.scalars)
        progress = update.progress(saved.scalars) if has_states else None
        if has_states and (set(kinds) != set(saved.states) or progress is None):
            raise UsageError(
                f"resume: the checkpoint holds {_listed(saved.states, saved.scalars)} of {slot.name}, and "
                f"{type(optimizer.inner).__name__} keeps {_listed(kinds, update.scalar_names)}; resume with the "
                "optimizer of the checkpoint, or start a new run from its weights with init_from="
            )
        stepper.progress.pop(parameter, None)
        if progress is not None:
            stepper.progress[parameter] = progress
        begin, end = chunk.bounds.owned(slot)
        for kind in kinds:
            part = update.part(chunk.bounds, slot, chunk.states[kind].tensor)
            if not has_states or begin == end:
                part.zero_()
                continue
            values = part if update.joins_parameters else torch.empty(end - begin, device=part.device)
            read(kind, slot.name, values, begin, end)
            update.store(kind, part, values)

    @override
    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        self._check_not_swapped("swap_in")
        self._engine.release()
        self._engine.synchronize()
        for chunk in self._engine.trained_chunks:
            chunk.master.swap_in(weights)
        self._engine.is_swapped = True
        return True

    @override
    def _restore(self, trained: bool) -> None:
        self._engine.access.close()
        self._engine.release()
        self._engine.synchronize()
        for chunk in self._engine.trained_chunks:
            chunk.master.swap_out()
        self._engine.is_swapped = False

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._engine.trained.items()}

    def _check_not_swapped(self, action: str) -> None:
        self._engine.access.close()
        if self._engine.is_swapped:
            raise RuntimeError(f"{action} called between swap_in and swap_out")

    def _slots(self) -> Iterator[tuple[Chunk, Slot, nn.Parameter]]:
        for chunk in self._engine.trained_chunks:
            for parameter, slot in chunk.slots.items():
                yield chunk, slot, parameter

    def _optimizer_of(self, parameter: nn.Parameter) -> GeminiOptimizer | None:
        return next((optimizer for optimizer in self._engine.optimizers if optimizer.owns(parameter)), None)


def _listed(kinds: Iterable[str], scalars: Iterable[str]) -> str:
    return ", ".join([*kinds, *scalars]) or "no states"
