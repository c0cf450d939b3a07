"""The step of one optimizer on this rank, and the agreement of all ranks on the gradients before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.gathering import Reducer
from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.memory import Arrival
from sd_lightning.gemini.own_update import update_of
from sd_lightning.gemini.placement import Kind, Tier
from sd_lightning.gemini.updates import Progress, Ranges
from sd_lightning.state.host import host_step


@dataclass(frozen=True)
class StepRange:
    """Neighbouring parameters that are stepped as one range of this rank's shard."""

    slot: Slot
    """The last of the parameters."""
    group: int
    progress: Progress | None
    """Progress before the next step; None before the first."""
    begin: int
    """First element in the shard."""
    end: int


class Stepper:
    """Steps of this rank's ranges of chunks, with the user's parameter groups.

    Args:
        inner: The user's optimizer.
        chunked: The networks and their chunks.
    """

    def __init__(self, inner: torch.optim.Optimizer, chunked: ChunkedNetworks) -> None:
        self.update = update_of(inner, _step_devices(chunked))
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
            for run in self._runs(chunk, self.group_of):
                if chunk.placement.step_tier is Tier.SLOW:
                    chunk.wait_on_host()
                yield accumulated.tensor[run.begin : run.end]

    def step(self, touched: set[nn.Parameter], divisor: float | Tensor, found_inf: Tensor | None = None) -> None:
        """Step parameters with their gradients, and refresh the compute weights.

        Args:
            touched: Parameters that have gradients on any rank.
            divisor: Gradients are divided by it; a tensor only if this stepper ``decides_on_device``.
            found_inf: Like ``divisor``; the step changes nothing if it is 1.
        """
        before = {} if found_inf is None else {parameter: self.progress.get(parameter) for parameter in touched}
        after: dict[tuple[int, Progress | None], Progress] = {}
        has_host_chunks = any(device.type == "cpu" for device in _step_devices(self._chunked))
        with host_step() if has_host_chunks else nullcontext():
            for chunk in sorted({self._chunked.chunk_of[p] for p in touched}, key=_order_of_stepping):
                if chunk.placement.step_tier is Tier.SLOW:
                    chunk.wait_on_host()
                chunk.weights.settle()  # another optimizer may just have stepped it
                if runs := self._runs(chunk, touched):
                    after |= self._step_chunk(chunk, runs, divisor, found_inf)
                chunk.master.refresh(touched.intersection(chunk.slots))
        for parameter in touched:
            key = self.group_of[parameter], self.progress.get(parameter)
            if key in after:  # this rank owns a part
                self.progress[parameter] = after[key]
        if found_inf is not None:
            self._latest = *self._chunked.memory.copy_to_host(found_inf), before

    def _step_chunk(
        self, chunk: Chunk, runs: list[StepRange], divisor: float | Tensor, found_inf: Tensor | None
    ) -> dict[tuple[int, Progress | None], Progress]:
        """Step this rank's ranges of a chunk; return the new progress by group and old progress."""
        assert chunk.gradients.accumulated is not None
        if chunk.placement.optim_tier is Tier.DISK:
            nbytes = sum(state.nbytes for state in chunk.states.values()) + chunk.master.tensor.nbytes
            for source, target in ((Tier.DISK, Tier.SLOW), (Tier.SLOW, Tier.DISK)):
                chunk.memory.ledger.move(source, target, nbytes)
        after: dict[tuple[int, Progress | None], Progress] = {}
        for group, progress in dict.fromkeys((run.group, run.progress) for run in runs):
            chosen = [run for run in runs if (run.group, run.progress) == (group, progress)]
            ranges = Ranges(
                _slices(chunk.master.tensor, chosen),
                _slices(chunk.gradients.accumulated.tensor, chosen),
                {name: self._parts(chunk, name, chosen) for name in self._kinds[group]},
                progress,
            )
            after[group, progress] = self.update.apply(ranges, self._inner.param_groups[group], divisor, found_inf)
        return after

    def _parts(self, chunk: Chunk, name: str, runs: list[StepRange]) -> list[Tensor]:
        flat = chunk.states[name].tensor
        if self.update.joins_parameters:
            return _slices(flat, runs)
        return [self.update.part(chunk.bounds, run.slot, flat) for run in runs]

    def _runs(self, chunk: Chunk, chosen: Collection[nn.Parameter]) -> list[StepRange]:
        """Join this rank's parts of parameters in a chunk into the longest ranges of one group and progress."""
        runs: list[StepRange] = []
        previous: StepRange | None = None
        for parameter, slot in chunk.slots.items():
            first, last = chunk.bounds.range_of(slot)
            if parameter not in chosen or first == last:
                previous = None
                continue
            group, progress = self.group_of[parameter], self.progress.get(parameter)
            is_next = previous is not None and (previous.group, previous.progress) == (group, progress)
            if previous is not None and is_next and self.update.joins_parameters:
                runs.pop()
                first = previous.begin
            previous = StepRange(slot, group, progress, first, last)
            runs.append(previous)
        return runs


class GradientAgreement:
    """Agreement of all ranks on the gradients of one optimizer, cached until the gradients change.

    Args:
        chunked: The networks and their chunks.
        reducer: Reduces their gradients.
        stepper: Steps the parameters.
    """

    def __init__(self, chunked: ChunkedNetworks, reducer: Reducer, stepper: Stepper) -> None:
        self.touched: set[nn.Parameter] | None = None
        """The optimizer's parameters that have gradients on any rank; None if unknown."""
        self.norm: Tensor | None = None
        """The 2-norm of the gradients over all ranks; None if unknown. In float64, on the device if that decides."""
        self._chunked = chunked
        self._reducer = reducer
        self._stepper = stepper
        self._version = -1

    @property
    def found_inf(self) -> Tensor:
        """1 if the norm, and so a gradient, is not finite, else 0."""
        assert self.norm is not None
        return (~self.norm.isfinite()).float()

    def reset(self) -> None:
        """Forget the agreement, after the gradients were consumed."""
        self.touched, self.norm = None, None

    def reach(self, *, with_norm: bool) -> set[nn.Parameter]:
        """Agree with one small all-reduce unless the gradients are unchanged; return the touched parameters."""
        chunked, reducer, trained = self._chunked, self._reducer, list(self._chunked.trained.values())
        is_agreed = self.touched is not None and self._version == reducer.version
        if not chunked.collectives.is_alone and any(chunk.weights.is_resident for chunk in self._stepper.chunks):
            is_agreed = False  # another rank may have got late gradients meanwhile
        if is_agreed and self.touched is not None and (self.norm is not None or not with_norm):
            return self.touched
        reducer.flush()
        late = [chunk.index in reducer.late for chunk in chunked.chunks]
        on_device = self._stepper.decides_on_device
        own = [
            self._sum_on_host() if with_norm and not on_device else 0.0,
            *late,
            *(p in reducer.touched for p in trained),
        ]
        values = chunked.collectives.sum_with_order(torch.tensor(own, dtype=torch.float64))
        late_anywhere = values[1 : 1 + len(late)].nonzero().flatten().tolist()
        if late_anywhere:
            reducer.flush(late_anywhere)
            return self.reach(with_norm=with_norm)
        # From here on ``touched`` is the same on all ranks, also for parameters of other optimizers.
        reducer.touched = {p for p, count in zip(trained, values[1 + len(late) :].tolist(), strict=True) if count}
        self._version = reducer.version
        self.touched = reducer.touched.intersection(self._stepper.group_of)
        self.norm = None
        if with_norm and on_device:
            squares = self._squares() or [torch.zeros((), dtype=torch.float64, device=chunked.memory.device)]
            self.norm = chunked.collectives.sum_on_device(torch.stack(squares).sum()).sqrt()
        elif with_norm:
            self.norm = values[0].sqrt()
        return self.touched

    def _squares(self) -> list[Tensor]:
        """Return sums of squares of this rank's gradients: in at least float32 per range, each then in float64."""
        squares = []
        for gradient in self._stepper.gradients():
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            squares.append(gradient.square().sum(dtype=dtype).double())
        return squares

    def _sum_on_host(self) -> float:
        """Return their sum, with one transfer per device."""
        squares = self._squares()
        sums = torch.zeros(len(squares), dtype=torch.float64)
        for device in {square.device for square in squares}:
            indices = [index for index, square in enumerate(squares) if square.device == device]
            sums[indices] = torch.stack([squares[index] for index in indices]).cpu()
        return float(sums.sum())


def _order_of_stepping(chunk: Chunk) -> tuple[bool, int]:
    """Return a sort key: the accelerator's chunks first, so that the host steps its own chunks meanwhile.

    Chunks on the host start with the last one, whose gradients arrive first.
    """
    is_slow = chunk.placement.step_tier is Tier.SLOW
    return is_slow, -chunk.index if is_slow else chunk.index


def _step_devices(chunked: ChunkedNetworks) -> tuple[torch.device, ...]:
    """Return the devices on which chunks are stepped, or may be after a move."""
    host, tiers = torch.device("cpu"), {chunk.placement.step_tier for chunk in chunked.trained_chunks}
    if chunked.config.placement == "auto":
        tiers = {Tier.FAST, Tier.SLOW}
    return tuple(dict.fromkeys(chunked.memory.device if tier is Tier.FAST else host for tier in sorted(tiers)))


def _slices(flat: Tensor, runs: list[StepRange]) -> list[Tensor]:
    return [flat[run.begin : run.end] for run in runs]
