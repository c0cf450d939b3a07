"""The step of one optimizer on this rank: its ranges of chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.elementwise import Progress, Ranges, StepRange, Update, next_step, slices
from sd_lightning.gemini.memory import Arrival
from sd_lightning.gemini.placement import STEP_BLOCK, Kind, Tier, TierBuffer
from sd_lightning.state.host import host_step

StepKey = tuple[int, Progress | None]
"""What ranges that are stepped together have in common: their group, and their progress before the step."""


class Stepper:
    """Steps of this rank's ranges of chunks, with the user's parameter groups.

    Args:
        inner: The user's optimizer.
        chunked: The networks and their chunks.
        update: Its update.
    """

    def __init__(self, inner: torch.optim.Optimizer, chunked: ChunkedNetworks, update: Update) -> None:
        self.update = update
        self._progress: dict[nn.Parameter, Progress] = {}
        self._latest: tuple[Tensor, Arrival, dict[nn.Parameter, Progress | None]] | None = None
        """Whether the latest step was skipped, when the host may read that, and the progress before it."""
        self.group_of: dict[nn.Parameter, int] = {}
        trained, self._frozen = set(chunked.trained.values()), list[nn.Parameter]()
        """Parameters that the optimizer was given without a gradient to step them by."""
        for group in inner.param_groups:  # torch skips them, too
            self._frozen += [p for p in group["params"] if not p.requires_grad and p not in trained]
            group["params"] = [p for p in group["params"] if p.requires_grad or p in trained]
        self.chunks: list[Chunk] = []
        self._inner = inner
        self._chunked = chunked
        self._kinds: list[tuple[str, ...]] = []
        """Names of the states of each group."""
        self._after: dict[StepKey, Progress] = {}
        """Progress after the step under way."""
        self._scratch: dict[tuple[Tier, int], TierBuffer] = {}
        """By tier and number of tensors: memory for float32 values of a block during a step."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the user's optimizer."""
        return self._inner.param_groups

    @property
    def decides_on_device(self) -> bool:
        """Whether no step waits for the norm of the gradients, or for whether to skip: the device steps all chunks."""
        is_fast = all(chunk.placement.step_tier is Tier.FAST for chunk in self.chunks)
        return is_fast and self.update.takes_found_inf and self._chunked.config.placement != "auto"

    @property
    def progress(self) -> dict[nn.Parameter, Progress]:
        """Progress of the parameters that were stepped; waits for the latest step if the device decided to skip it.

        The next step reads it while the device has its forward and backward pass queued.
        """
        if self._latest is not None:
            (was_skipped, arrival, before), self._latest = self._latest, None
            arrival.wait()
            if was_skipped:
                for parameter, progress in before.items():
                    if progress is None:
                        self._progress.pop(parameter, None)
                    else:
                        self._progress[parameter] = progress
        return self._progress

    def adopt(self) -> None:
        """Adopt the parameters and settings of all groups.

        Raises:
            UsageError: An update is not elementwise, or the engine does not train a parameter.
        """
        chunked, groups = self._chunked, self._inner.param_groups
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self._check_trained(group_of.keys() - chunked.trained.values())
        self._kinds = [self.update.states(group) for group in groups]
        if chunked.config.master == "bfloat16" and "step" not in self.update.scalar_names:
            raise UsageError(
                f"Gemini got master=bfloat16 and {type(self._inner).__name__}, which keeps no number of steps in "
                "checkpoints, so that a resumed run would round by other random numbers; expected an optimizer that "
                "does, such as AdamW, or master=split"
            )
        self.group_of = group_of
        self.chunks = sorted({chunked.chunk_of[p] for p in group_of}, key=lambda chunk: chunk.index)
        for parameter in group_of:
            chunk = chunked.chunk_of[parameter]
            for name in self.state_kinds(parameter):
                if name not in chunk.states:
                    numel, dtype = self.update.size(chunk.bounds)
                    tier = chunk.placement.optim_tier
                    chunk.states[name] = chunk.memory.allocate(tier, Kind.OPTIMIZER, numel, dtype, zero=True)
                    chunk.converters[name] = self.update.moved

    def check_frozen(self) -> None:
        """Raise if a parameter got trainable that was frozen when the engine was made.

        Raises:
            UsageError: One did; the engine would never step it.
        """
        if unfrozen := {p for p in self._frozen if p.requires_grad}:
            self._check_trained(unfrozen - set(self._chunked.trained.values()))

    def _check_trained(self, foreign: Set[nn.Parameter]) -> None:
        if foreign:
            raise UsageError(
                f"{type(self._inner).__name__} got {len(foreign)} parameters that Gemini does not train; expected "
                "parameters of the networks given to the engine that had requires_grad when it was made, taken after "
                "that; let the callback BaseFinetuning (BackboneFinetuning) unfreeze others, or make them trainable "
                "before, with a learning rate of 0 for as long as they shall stay"
            )

    def state_kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the states kept for a parameter."""
        return self._kinds[self.group_of[parameter]]

    def gradients(self, chunks: Iterable[Chunk] | None = None) -> Iterator[Tensor]:
        """Yield this rank's reduced gradients of all parameters, or of those in some chunks, in maximal ranges."""
        for chunk in self.chunks if chunks is None else chunks:
            if (accumulated := chunk.gradients.accumulated) is None:
                continue
            for begin, end, _ in sorted(
                each for ranges in self._ranges(chunk, self.group_of).values() for each in ranges
            ):
                if chunk.placement.step_tier is Tier.SLOW:
                    chunk.wait_on_host()
                yield accumulated.tensor[begin:end]

    def step(self, touched: set[nn.Parameter], divisor: float | Tensor, found_inf: Tensor | None = None) -> None:
        """Step parameters with their gradients, and refresh the compute weights.

        Args:
            touched: Parameters that have gradients on any rank.
            divisor: Gradients are divided by it; a tensor only if this stepper ``decides_on_device``.
            found_inf: Like ``divisor``; the step changes nothing if it is 1.
        """
        before = {} if found_inf is None else {parameter: self.progress.get(parameter) for parameter in touched}
        for chunk in sorted({self._chunked.chunk_of[p] for p in touched}, key=_order_of_stepping):
            self.step_chunk(chunk, touched, divisor, found_inf)
        self.finish(touched)
        if found_inf is not None:
            self._latest = *self._chunked.memory.copy_to_host(found_inf), before

    def step_chunk(
        self, chunk: Chunk, touched: set[nn.Parameter], divisor: float | Tensor, found_inf: Tensor | None = None
    ) -> None:
        """Step the parameters of one chunk, and refresh its compute weights; :meth:`finish` must follow."""
        if chunk.placement.step_tier is Tier.SLOW:
            chunk.wait_on_host()
        chunk.weights.settle()  # another optimizer may just have stepped it
        with host_step() if chunk.step_device.type == "cpu" else nullcontext():
            if ranges := self._ranges(chunk, touched):
                self._step_ranges(chunk, ranges, divisor, found_inf)
            chunk.master.refresh(touched.intersection(chunk.slots))

    def finish(self, touched: set[nn.Parameter]) -> None:
        """Note that these parameters have been stepped."""
        for parameter in touched:
            key = self.group_of[parameter], self.progress.get(parameter)
            if key in self._after:  # this rank owns a part
                self.progress[parameter] = self._after[key]
        self._after.clear()
        while self._scratch:
            self._chunked.memory.free(self._scratch.popitem()[1])

    def _step_ranges(
        self,
        chunk: Chunk,
        ranges: Mapping[StepKey, list[StepRange]],
        divisor: float | Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Step this rank's ranges of a chunk, and note the new progress."""
        assert chunk.gradients.accumulated is not None
        if chunk.placement.optim_tier is Tier.DISK:
            nbytes = sum(state.nbytes for state in chunk.states.values()) + chunk.master.kept_bytes
            for source, target in ((Tier.DISK, Tier.SLOW), (Tier.SLOW, Tier.DISK)):
                chunk.memory.ledger.move(source, target, nbytes)
        gradients = chunk.gradients.accumulated.tensor
        for (group, progress), chosen in ranges.items():
            scratch, numel = self._scratch_of(chunk), STEP_BLOCK[chunk.placement.step_tier]
            parts = [[block] for each in chosen for block in each.blocks(numel)] if scratch else [chosen]
            for part in parts:
                rows = [row[: part[0].end - part[0].begin] for row in scratch]
                weights = rows.pop() if chunk.master.needs_scratch else None
                own = slices(gradients, part)
                if own[0].dtype != chunk.layout.master_dtype:
                    own = [rows.pop().copy_(own[0])]
                states: dict[str, list[Tensor]] = {}
                for name in self._kinds[group]:
                    states |= self.update.ranges(chunk.bounds, name, chunk.states[name].tensor, part)
                with ExitStack() as open_ranges:
                    opened = [
                        open_ranges.enter_context(chunk.master.stepping(begin, end, next_step(progress), weights))
                        for begin, end, _ in part
                    ]
                    settings = self._inner.param_groups[group]
                    seed, bounds = self._chunked.config.rounding_seed, chunk.bounds
                    draws = [
                        (seed, slot.name, bounds.owned(slot)[0] - bounds.range_of(slot)[0] + begin)
                        for begin, _, slot in part
                    ]
                    arguments = Ranges(opened, own, states, progress, rows, draws)
                    self._after[group, progress] = self.update.apply(arguments, settings, divisor, found_inf)

    def _scratch_of(self, chunk: Chunk) -> list[Tensor]:
        """Return memory for float32 values of a block: of weights, gradients and states, as far as they need it."""
        accumulated, tier = chunk.gradients.accumulated, chunk.placement.step_tier
        is_narrow = accumulated is not None and accumulated.tensor.dtype != chunk.layout.master_dtype
        count = chunk.master.needs_scratch + is_narrow + self.update.num_scratch(chunk.step_device)
        if not count:
            return []
        numel = min(STEP_BLOCK[tier], max(each.bounds.numel for each in self.chunks))
        if (tier, count) not in self._scratch:
            self._scratch[tier, count] = chunk.memory.allocate(tier, Kind.SCRATCH, count * numel, torch.float32)
        return list(self._scratch[tier, count].tensor.split(numel))

    def _ranges(self, chunk: Chunk, chosen: Collection[nn.Parameter]) -> dict[StepKey, list[StepRange]]:
        """Join this rank's parts of parameters in a chunk into the longest ranges of one group and progress."""
        ranges: dict[StepKey, list[StepRange]] = {}
        previous: StepKey | None = None
        for parameter, slot in chunk.slots.items():
            begin, end = chunk.bounds.range_of(slot)
            if parameter not in chosen or begin == end:
                previous = None
                continue
            key = self.group_of[parameter], self.progress.get(parameter)
            alike = ranges.setdefault(key, [])
            if key == previous and self.update.joins_parameters:
                begin = alike.pop().begin
            alike.append(StepRange(begin, end, slot))
            previous = key
        return ranges


def _order_of_stepping(chunk: Chunk) -> tuple[bool, int]:
    """Return a sort key: the accelerator's chunks first, so that the host steps its own chunks meanwhile.

    Chunks on the host start with the last one, whose gradients arrive first.
    """
    is_slow = chunk.placement.step_tier is Tier.SLOW
    return is_slow, -chunk.index if is_slow else chunk.index


def step_devices(chunked: ChunkedNetworks) -> tuple[torch.device, ...]:
    """Return the devices on which chunks are stepped, or may be after a move."""
    host, tiers = torch.device("cpu"), {chunk.placement.step_tier for chunk in chunked.trained_chunks}
    if chunked.config.placement == "auto":
        tiers = {Tier.FAST, Tier.SLOW}
    return tuple(dict.fromkeys(chunked.memory.device if tier is Tier.FAST else host for tier in sorted(tiers)))
