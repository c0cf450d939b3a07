"""The optimizer that steps chunks, driven by the groups of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.accumulation import Accumulation
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.loss_scale import LossScale
from sd_lightning.gemini.progress import Progress
from sd_lightning.gemini.tiers import Kind, Tier
from sd_lightning.gemini.updates import Update, update_of


@dataclass(frozen=True)
class Run:
    """Neighbouring parameters that are stepped as one range of this rank's shard."""

    chunk: Chunk
    slot: Slot
    """The last parameter of them."""
    group: int
    progress: Progress | None
    """Before the step that comes; none before the first."""
    begin: int
    """First element of the shard."""
    end: int


class GeminiOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimizer, whose groups it shares: schedulers made for either drive both.

    A parameter is stepped if it got a gradient on any rank, as under DDP; others keep weights, moments and step
    count, as torch does where ``grad`` is None. A step uses the gradients up: ``zero_grad`` after it does nothing.

    Args:
        inner: An elementwise optimizer over trained parameters of the engine.
        engine: Owns the chunks.
        accumulation: Is told of steps.
        loss_scale: What the gradients are multiplied by, in float16.

    Raises:
        UsageError: The optimizer's update is not elementwise, or it steps parameters that the engine does not train.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        engine: ChunkedNetworks,
        accumulation: Accumulation,
        loss_scale: LossScale | None,
    ) -> None:
        self.inner = inner
        self.update: Update = update_of(inner, _step_devices(engine))
        inner.state.clear()  # some make states of whole parameters when they are built
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self._engine = engine
        self._accumulation = accumulation
        self._scaler = loss_scale
        self.progress: dict[nn.Parameter, Progress] = {}
        self._kinds: list[tuple[str, ...]] = []
        """Names of the states of each group."""
        # What the ranks found out together about the gradients of this version.
        self._agreed_version = -1
        self._touched: set[nn.Parameter] | None = None
        self._norm: float | None = None
        self._clip = 1.0
        self._aborts_before_clip = 0
        self.adopt()

    def adopt(self) -> None:
        """Take on the parameters and settings of all groups.

        Raises:
            UsageError: An update is not elementwise, or the engine does not train a parameter.
        """
        engine, group_of = self._engine, {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        trained = set(engine.trained.values())
        if not trained.issuperset(group_of):
            raise UsageError(
                f"{type(self.inner).__name__} got {len(group_of.keys() - trained)} parameters that Gemini does not "
                "train; expected parameters of the networks given to the engine that had requires_grad when it was "
                "made, taken after that; make others trainable before, with a learning rate of 0 for as long as they "
                "shall stay"
            )
        self._kinds = [self.update.states(group) for group in self.param_groups]
        self._group_of = group_of
        self._parameters = [p for p in engine.trained.values() if p in group_of]
        self.chunks = sorted({engine.chunk_of[p] for p in self._parameters}, key=lambda chunk: chunk.index)
        self._touched = None
        for parameter in self._parameters:
            self._allocate_states(engine.chunk_of[parameter], self._kinds[group_of[parameter]])

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further parameters, of those that the engine trains, from their next gradients on; all ranks call it.

        Raises:
            UsageError: The engine does not train them: they were frozen when it was made.
        """
        if not hasattr(self, "_group_of"):
            super().add_param_group(param_group)  # in the constructor
            return
        self.inner.add_param_group(param_group)
        try:
            self.adopt()
        except UsageError:
            self.param_groups.pop()
            raise
        for parameter in self.param_groups[-1]["params"]:
            self._engine.chunk_of[parameter].forget_gradient(parameter)
            self._engine.runtime.touched.discard(parameter)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, by the name under which Lightning's callbacks look for a wrapped one."""
        return self.inner

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this optimizer steps a parameter."""
        return parameter in self._group_of

    def state_kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the states kept for a parameter."""
        return self._kinds[self._group_of[parameter]]

    def _allocate_states(self, chunk: Chunk, names: Iterable[str]) -> None:
        for name in names:
            if name not in chunk.states:
                chunk.states[name] = chunk.memory.allocate(
                    chunk.placement.optim_tier, Kind.OPTIMIZER, *self.update.size(chunk.bounds), zero=True
                )

    # ---------------------------------------------------------------- torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the reduced gradients, on the tier where they are; skip if any is not finite
        under loss scaling.

        Args:
            closure: Computes the loss and its gradients again; called once.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made with it
        self._engine.check_can_step()
        scaler = self._scaler
        self._agree(with_norm=scaler is not None)
        self._accumulation.end_step()
        if scaler is not None and not self._is_finite():
            self._forget()
            scaler.overflowed()
            return loss
        self._apply(self._scale / self._pending_clip if self._pending_clip else math.inf)
        if scaler is not None:
            scaler.succeeded()
        self._forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters."""
        self._engine.runtime.recover()
        if any(chunk.has_gradients for chunk in self.chunks):
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters of the groups; states are in the engine's ``parameter_shards()``."""
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the hyper-parameters of the groups; states are in the engine's ``state.load``."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"{type(self.inner).__name__} got a state of {len(saved)} groups; expected one of "
                f"{len(self.param_groups)}: give the groups that it was saved with"
            )
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        self.adopt()

    # ---------------------------------------------------------------- gradients

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let the next step scale the gradients so that their global norm is at most ``max_norm``.

        Costs one pass over this rank's gradients; the scaling itself is part of the step.

        Returns:
            The norm before clipping, over all ranks, without the loss scale.
        """
        norm = self.grad_norm()
        coefficient = float(max_norm) / (float(norm) + 1e-6)
        self._clip = self._pending_clip * (min(coefficient, 1.0) if math.isfinite(coefficient) else coefficient)
        self._aborts_before_clip = self._engine.runtime.statistics["aborted"]
        return norm

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients over all ranks, without the loss scale."""
        self._engine.check_can_step()
        self._agree(with_norm=True)
        assert self._norm is not None
        is_double = any(chunk.bounds.master_dtype == torch.float64 for chunk in self.chunks)
        dtype = torch.float64 if is_double else torch.float32
        return torch.tensor(self._norm * self._pending_clip / self._scale, dtype=dtype)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``; leave them if they overflowed, for the step to see."""
        self._engine.check_can_step()
        self._agree(with_norm=self._scaler is not None)
        if not self._pending_clip or (self._scaler is not None and not self._is_finite()):
            return
        bound = float(clip_value) * self._scale / self._pending_clip
        for tensor in self._own_gradients():
            tensor.clamp_(-bound, bound)
        self._norm = None

    @property
    def _scale(self) -> float:
        """What the gradients are multiplied by."""
        return 1.0 if self._scaler is None else self._scaler.used

    @property
    def _pending_clip(self) -> float:
        """What the next step multiplies them by: clipping by norm, unless they were forgotten since."""
        return self._clip if self._aborts_before_clip == self._engine.runtime.statistics["aborted"] else 1.0

    def _own_gradients(self) -> Iterable[Tensor]:
        """Yield this rank's reduced gradients of this optimizer's parameters, in maximal ranges."""
        for run in self._runs(self._parameters):
            if run.chunk.accumulator is not None:
                if run.chunk.placement.step_tier is Tier.SLOW:
                    run.chunk.wait_on_host()
                yield run.chunk.accumulator.tensor[run.begin : run.end]

    def _sum_of_squares(self) -> float:
        """Return the sum over this rank's gradients: of each range in the type of its weights, of all in float64."""
        squares: list[Tensor] = []
        for gradient in self._own_gradients():
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            squares.append(gradient.square().sum(dtype=dtype).double())
        sums = torch.zeros(len(squares), dtype=torch.float64)
        for device in {square.device for square in squares}:  # one transfer from each
            indices = [index for index, square in enumerate(squares) if square.device == device]
            sums[indices] = torch.stack([squares[index] for index in indices]).cpu()
        return float(sums.sum())

    def _agree(self, *, with_norm: bool) -> None:
        """Find out, with one small collective, which parameters have gradients on any rank, and the norm."""
        runtime, trained = self._engine.runtime, list(self._engine.trained.values())
        is_agreed = self._touched is not None and self._agreed_version == runtime.gradients_version
        if self._engine.collectives.world_size > 1 and any(chunk.is_resident for chunk in self.chunks):
            is_agreed = False  # another rank may have got late gradients since
        if is_agreed and (self._norm is not None or not with_norm):
            return
        runtime.flush()
        late = [chunk.index in runtime.late for chunk in self._engine.chunks]
        values = torch.zeros(1 + len(late) + len(trained), dtype=torch.float64)
        if with_norm:
            values[0] = self._sum_of_squares()
        values[1:] = torch.tensor([*late, *(p in runtime.touched for p in trained)], dtype=torch.float64)
        values = self._engine.collectives.sum_with_order(values)
        late_anywhere = values[1 : 1 + len(late)].nonzero().flatten().tolist()
        if late_anywhere:
            runtime.flush(late_anywhere)
            self._agree(with_norm=with_norm)
            return
        # From here on all ranks know the same, also of parameters of other optimizers.
        runtime.touched = {p for p, count in zip(trained, values[1 + len(late) :].tolist(), strict=True) if count}
        self._agreed_version = runtime.gradients_version
        self._touched = runtime.touched.intersection(self._group_of)
        self._norm = float(values[0].sqrt()) if with_norm else None

    def _is_finite(self) -> bool:
        assert self._norm is not None
        return math.isfinite(self._norm)

    # ---------------------------------------------------------------- stepping

    def _apply(self, divisor: float) -> None:
        assert self._touched is not None
        by_chunk: dict[Chunk, list[Run]] = {}
        for run in self._runs([p for p in self._parameters if p in self._touched]):
            by_chunk.setdefault(run.chunk, []).append(run)
        changed = {self._engine.chunk_of[p] for p in self._touched}
        after: dict[tuple[int, Progress | None], Progress] = {}
        for chunk in sorted(changed, key=_order_of_stepping):
            if chunk.placement.step_tier is Tier.SLOW:
                chunk.wait_on_host()
            chunk.settle()  # another optimizer may just have stepped it
            after |= self._step_chunk(chunk, by_chunk.get(chunk, []), divisor)
            chunk.refresh(self._touched.intersection(chunk.slots))
        for parameter in self._touched:
            key = self._group_of[parameter], self.progress.get(parameter)
            if key in after:  # this rank owns some of it
                self.progress[parameter] = after[key]

    def _step_chunk(self, chunk: Chunk, runs: list[Run], divisor: float) -> dict[tuple[int, Progress | None], Progress]:
        """Step this rank's ranges of a chunk; return the progress by group and progress before."""
        after: dict[tuple[int, Progress | None], Progress] = {}
        if not runs:
            return after
        assert chunk.accumulator is not None
        if chunk.placement.optim_tier is Tier.DISK:
            nbytes = sum(state.nbytes for state in (*chunk.states.values(), *chunk.own_master()))
            for source, target in ((Tier.DISK, Tier.SLOW), (Tier.SLOW, Tier.DISK)):
                chunk.memory.ledger.move(source, target, nbytes)
        for group, progress in dict.fromkeys((run.group, run.progress) for run in runs):
            chosen = [run for run in runs if (run.group, run.progress) == (group, progress)]
            ranges = [(run.begin, run.end) for run in chosen]
            after[group, progress] = self.update.apply(
                _slices(chunk.master, ranges),
                _slices(chunk.accumulator.tensor, ranges),
                {name: self._parts(chunk, name, chosen) for name in self._kinds[group]},
                progress,
                self.param_groups[group],
                divisor,
            )
        return after

    def _parts(self, chunk: Chunk, name: str, runs: list[Run]) -> list[Tensor]:
        flat = chunk.states[name].tensor
        if self.update.joins_parameters:
            return _slices(flat, [(run.begin, run.end) for run in runs])
        return [self.update.part(chunk.bounds, run.slot, flat) for run in runs]

    def _runs(self, parameters: Iterable[nn.Parameter]) -> list[Run]:
        """Join what this rank owns of parameters to the longest ranges of one chunk, group and progress."""
        chosen = set(parameters)
        runs: list[Run] = []
        for chunk in self.chunks:
            previous: Run | None = None
            for slot in chunk.layout.slots:
                parameter = chunk.parameters[slot.name]
                first, last = chunk.bounds.range_of(slot)
                if parameter not in chosen or first == last:
                    previous = None
                    continue
                group, progress = self._group_of[parameter], self.progress.get(parameter)
                is_next = previous is not None and (previous.group, previous.progress) == (group, progress)
                if previous is not None and is_next and self.update.joins_parameters:
                    runs.pop()
                    first = previous.begin
                previous = Run(chunk, slot, group, progress, first, last)
                runs.append(previous)
        return runs

    def _forget(self) -> None:
        """Drop this optimizer's gradients, and the memory where no other optimizer has gradients in it."""
        runtime = self._engine.runtime
        runtime.touched.difference_update(self._parameters)
        for chunk in self.chunks:
            is_shared = any(p not in self._group_of for p in chunk.slots)
            if not is_shared or (self._touched is not None and not runtime.touched.intersection(chunk.slots)):
                chunk.drop_gradients()
                runtime.late.discard(chunk.index)
                continue
            for parameter in self._parameters:
                if parameter in chunk.slots:
                    chunk.forget_gradient(parameter)
        self._touched, self._norm, self._clip = None, None, 1.0


def _order_of_stepping(chunk: Chunk) -> tuple[bool, int]:
    """Put the accelerator's chunks first, which are only submitted: the host steps its own meanwhile.

    Those begin with the last one, whose gradients arrive first.
    """
    is_slow = chunk.placement.step_tier is Tier.SLOW
    return is_slow, -chunk.index if is_slow else chunk.index


def _step_devices(engine: ChunkedNetworks) -> tuple[torch.device, ...]:
    """Return where chunks are stepped, or may be once they have moved."""
    host, tiers = torch.device("cpu"), {chunk.placement.step_tier for chunk in engine.chunks if chunk.is_trained}
    if engine.config.placement == "auto":
        tiers = {Tier.FAST, Tier.SLOW}
    return tuple(dict.fromkeys(engine.memory.device if tier is Tier.FAST else host for tier in sorted(tiers)))


def _slices(flat: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in ranges]
