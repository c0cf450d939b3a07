"""The step of one optimizer on this rank: its ranges of chunks, and their update by Adam, AdamW and SGD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.layout import Shard, Slot
from sd_lightning.gemini.memory import Arrival
from sd_lightning.gemini.placement import Kind, Tier
from sd_lightning.state.host import host_step

Group = Mapping[str, Any]
"""A parameter group of the user's optimizer, with its current learning rate."""


class Progress(NamedTuple):
    """State kept once per parameter; parameters with equal progress are stepped together."""

    step: int
    """Number of steps if the engine counts them; 1 if the scalars hold the number."""
    scalars: tuple[tuple[str, float], ...] = ()
    """Scalars that the user's own class keeps per parameter, by name: NAdam's ``mu_product``."""


@dataclass(frozen=True)
class Ranges:
    """Flat ranges on one device that are stepped together."""

    weights: list[Tensor]
    """Each range is in one parameter, unless the update joins parameters."""
    gradients: list[Tensor]
    """Like the weights; may be overwritten."""
    states: dict[str, list[Tensor]]
    """By state name, one tensor per range."""
    progress: Progress | None
    """Progress of all ranges before this step; None before the first."""


class Update(ABC):
    """An elementwise update; by default, states have one value per weight, in the type of the weights."""

    joins_parameters = True
    """Whether neighbouring parameters can be updated as one range."""
    takes_found_inf = False
    """Whether :meth:`apply` takes its divisor, and whether to skip, from tensors on the device."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of the scalars per parameter."""
        return ("step",)

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the states that a group keeps, one value per weight.

        Raises:
            UsageError: The update is not elementwise with these settings.
        """

    @abstractmethod
    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        """Divide the gradients by ``divisor`` and update ranges in place; return the progress after this step.

        Args:
            ranges: The ranges.
            group: Their settings.
            divisor: A tensor only if the update ``takes_found_inf``.
            found_inf: Like ``divisor``; where it is 1, weights and states stay as they are.
        """

    def scalars(self, progress: Progress) -> dict[str, Any]:
        """Return the scalars that the user's optimizer keeps per parameter, in its own types."""
        return {"step": progress.step}

    def progress(self, scalars: Mapping[str, Any]) -> Progress | None:
        """Return a parameter's progress from the result of :meth:`scalars`; None if a scalar is missing."""
        return Progress(int(scalars.get("step", 1)))

    def step_number(self, progress: Progress | None) -> int:
        """Return the number of the step that follows a progress, counted from 1."""
        done = 0 if progress is None else progress.step
        return 1 + int(dict(() if progress is None else progress.scalars).get("step", done))

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        """Return the number and type of the elements of one state of a shard."""
        return shard.numel, shard.layout.master_dtype

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        """Return the view of one parameter's part in a state of a shard."""
        return shard.view_of(slot, flat)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        """Return a part as float32 values: a live tensor, or a function that dequantises them."""
        return part

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        """Fill a part from float32 values."""
        part.copy_(values)


class AdamUpdate(Update):
    """``torch.optim.Adam`` and ``AdamW``, with torch's fused kernels."""

    takes_found_inf = True

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {"step": torch.tensor(float(progress.step))}

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        step = next_step(ranges.progress)
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        device = ranges.weights[0].device
        count = torch.full((), float(step), device=device)  # torch.tensor would wait for the device
        kernel(
            ranges.weights,
            ranges.gradients,
            ranges.states["exp_avg"],
            ranges.states["exp_avg_sq"],
            ranges.states.get("max_exp_avg_sq", []),
            [count] * len(ranges.weights),
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=_grad_scale(ranges.gradients, divisor),
            found_inf=found_inf,
        )
        return Progress(step)


class SGDUpdate(Update):
    """``torch.optim.SGD``, with torch's fused kernel."""

    scalar_names = ()
    takes_found_inf = True

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {}

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        torch._fused_sgd_(
            ranges.weights,
            ranges.gradients,
            ranges.states.get("momentum_buffer", []),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=ranges.progress is None,
            grad_scale=_grad_scale(ranges.gradients, divisor),
            found_inf=found_inf,
        )
        return Progress(next_step(ranges.progress))


def _grad_scale(gradients: list[Tensor], divisor: float | Tensor) -> Tensor | None:
    """Return ``grad_scale`` for torch's fused kernels; it is float32, so float64 gradients are divided here."""
    is_known = not isinstance(divisor, Tensor)
    if is_known and divisor == 1.0:
        return None
    if gradients[0].dtype == torch.float64:
        torch._foreach_div_(gradients, divisor)
        return None
    if isinstance(divisor, Tensor):
        return divisor.float()
    return torch.full((), divisor, dtype=torch.float32, device=gradients[0].device)


def next_step(progress: Progress | None) -> int:
    """Return the number of the next step, counted from 1."""
    return 1 if progress is None else progress.step + 1


class StepRange(NamedTuple):
    """Neighbouring parameters that are stepped as one range of this rank's shard."""

    begin: int
    """First element in the shard."""
    end: int
    slot: Slot
    """The last of the parameters."""


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
        self.group_of = group_of
        self.chunks = sorted({chunked.chunk_of[p] for p in group_of}, key=lambda chunk: chunk.index)
        for parameter in group_of:
            chunk = chunked.chunk_of[parameter]
            for name in self.state_kinds(parameter):
                if name not in chunk.states:
                    numel, dtype = self.update.size(chunk.bounds)
                    tier = chunk.placement.optim_tier
                    chunk.states[name] = chunk.memory.allocate(tier, Kind.OPTIMIZER, numel, dtype, zero=True)

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

    def gradients(self) -> Iterator[Tensor]:
        """Yield this rank's reduced gradients of all parameters, in maximal ranges."""
        for chunk in self.chunks:
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
        after: dict[StepKey, Progress] = {}
        has_host_chunks = any(device.type == "cpu" for device in step_devices(self._chunked))
        with host_step() if has_host_chunks else nullcontext():
            for chunk in sorted({self._chunked.chunk_of[p] for p in touched}, key=_order_of_stepping):
                if chunk.placement.step_tier is Tier.SLOW:
                    chunk.wait_on_host()
                chunk.weights.settle()  # another optimizer may just have stepped it
                if ranges := self._ranges(chunk, touched):
                    after |= self._step_chunk(chunk, ranges, divisor, found_inf)
                chunk.master.refresh(touched.intersection(chunk.slots))
        for parameter in touched:
            key = self.group_of[parameter], self.progress.get(parameter)
            if key in after:  # this rank owns a part
                self.progress[parameter] = after[key]
        if found_inf is not None:
            self._latest = *self._chunked.memory.copy_to_host(found_inf), before

    def _step_chunk(
        self,
        chunk: Chunk,
        ranges: Mapping[StepKey, list[StepRange]],
        divisor: float | Tensor,
        found_inf: Tensor | None,
    ) -> dict[StepKey, Progress]:
        """Step this rank's ranges of a chunk; return the new progress."""
        assert chunk.gradients.accumulated is not None
        gradients = chunk.gradients.accumulated.tensor
        if chunk.placement.optim_tier is Tier.DISK:
            nbytes = sum(state.nbytes for state in chunk.states.values()) + chunk.master.kept_bytes
            for source, target in ((Tier.DISK, Tier.SLOW), (Tier.SLOW, Tier.DISK)):
                chunk.memory.ledger.move(source, target, nbytes)
        after: dict[StepKey, Progress] = {}
        for (group, progress), chosen in ranges.items():
            states = {name: self._parts(chunk, name, chosen) for name in self._kinds[group]}
            settings, step = self._inner.param_groups[group], self.update.step_number(progress)
            with ExitStack() as open_ones:
                weights = [open_ones.enter_context(chunk.master.stepping(b, e, step)) for b, e, _ in chosen]
                arguments = Ranges(weights, _slices(gradients, chosen), states, progress)
                after[group, progress] = self.update.apply(arguments, settings, divisor, found_inf)
        return after

    def _parts(self, chunk: Chunk, name: str, ranges: list[StepRange]) -> list[Tensor]:
        flat = chunk.states[name].tensor
        if self.update.joins_parameters:
            return _slices(flat, ranges)
        return [self.update.part(chunk.bounds, each.slot, flat) for each in ranges]

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


def _slices(flat: Tensor, ranges: list[StepRange]) -> list[Tensor]:
    return [flat[begin:end] for begin, end, _ in ranges]
