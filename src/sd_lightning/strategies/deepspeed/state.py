"""The flat partitions of ZeRO-1/2/3 as ``ParameterShard``s.

Stages 1 and 2 pack the parameters of an optimizer group into one flat tensor and give each rank a range of it. Stage 3
gives each rank a range of every parameter and packs those. This module builds the table (parameter, range) ->
(group, offset in this rank's flat tensor) from the engine's own lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.ranks import gathered
from sd_lightning.state.shards import LazyTensor, OptimizerGroups, ParameterShard, Read, SavedParameter, tensor_of
from sd_lightning.strategies.base import whole_shape
from sd_lightning.strategies.whole_tensors import FlatOptimizerState

_OTHER_LAYOUT = "this DeepSpeed release lays them out differently"


@dataclass(frozen=True)
class Fragment:
    """A range of a parameter and its place in this rank's flat tensors."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    group: int
    """Index of the flat tensor."""
    offset: int
    """First element in the flat tensor."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the fragment's view of its flat tensor."""
        return flat.narrow(0, self.offset, self.end - self.begin)


class DeepSpeedState(FlatOptimizerState):
    """Training state common to ZeRO-1/2 and ZeRO-3: flat float32 tensors that a torch optimizer steps.

    Args:
        zero: ``engine.optimizer``.
        parameters: Trained parameters by name.
    """

    overflow_switches: ClassVar[tuple[str, ...]]
    """Attributes of ``zero`` that tell a step whether gradients overflowed, the check function first."""

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.zero = zero
        self.optimizers = [zero.optimizer]
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: whole_shape(parameter) for name, parameter in parameters.items()}
        self.fragments = self._fragments()
        self._check_complete()
        self._check_layout()

    def _fragments(self) -> list[Fragment]:
        raise NotImplementedError

    def _flats(self) -> list[Tensor]:
        """Return this rank's flat float32 weights, the tensors that the optimizer steps."""
        raise NotImplementedError

    def _compute(self, fragment: Fragment) -> Tensor:
        """Return this rank's compute weights of a fragment, flat."""
        raise NotImplementedError

    def _begin_refresh(self) -> None:
        """Prepare for new compute weights."""

    def _refresh(self, group: int) -> None:
        """Update a flat tensor's compute weights from its float32 weights, while it is resident."""

    def _end_refresh(self) -> None:
        """Distribute the new compute weights to all ranks."""
        raise NotImplementedError

    def parameter_shards(self) -> list[ParameterShard]:
        """Return this rank's ranges."""
        return [
            ParameterShard(f.name, f.shape, f.begin, f.end, self._master(f), *self._states(f)) for f in self.fragments
        ]

    def _master(self, fragment: Fragment) -> LazyTensor:
        """Return a fragment's float32 weights."""
        return fragment.of(self._flats()[fragment.group].detach())

    def _states(self, fragment: Fragment) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
        """Return a fragment's optimizer states and scalars."""
        flat = self._flats()[fragment.group]
        states: dict[str, LazyTensor] = {}
        scalars: dict[str, Any] = {}
        for kind, value in self.zero.optimizer.state.get(flat, {}).items():
            if not isinstance(value, Tensor):
                scalars[kind] = torch.tensor(float(value)) if kind == "step" else value
            elif value.dim() == 0:
                scalars[kind] = value.detach().cpu()
            elif value.numel() == flat.numel():
                states[kind] = fragment.of(value.reshape(-1))
            else:
                raise UsageError(
                    f"{type(self.zero.optimizer).__name__} keeps {kind!r}, which is not one value per weight and cannot"
                    " be divided over processes; choose optimizer=adamw, or strategy=ddp"
                )
        return states, scalars

    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Fill the flat weights, create the optimizer's flat states, and refresh the compute weights."""
        if groups is not None:
            self._take_groups(groups)
        for flat, fragments in self._flats_to_write():
            for fragment in fragments:
                read("master", fragment.name, fragment.of(flat), fragment.begin, fragment.end)
            if groups is not None:
                self._load_states(flat, fragments, saved, read)

    @torch.no_grad()
    def restore_precision(self, weights: Mapping[str, Callable[[Tensor, int, int], None]]) -> None:
        """Restore the exact float32 weights, which the engine rounded to its compute dtype.

        Where a weight does not round to the engine's, another rank's was broadcast; the engine's stays.

        Args:
            weights: Parameter name -> function that fills a tensor with its flat range ``[begin, end)``.
        """
        for flat, fragments in self._flats_to_write():
            for fragment in fragments:
                if fragment.name not in weights:
                    continue
                rounded, computed = fragment.of(flat), self._compute(fragment).dtype
                exact = torch.empty_like(rounded)
                weights[fragment.name](exact, fragment.begin, fragment.end)
                rounded.copy_(torch.where(exact.to(computed).to(rounded.dtype) == rounded, exact, rounded))

    @torch.no_grad()
    def adopt(self, names: set[str]) -> None:
        """Take over compute weights of these names that a hook has written: those that are not the masters, rounded."""
        ours = [fragment for fragment in self.fragments if fragment.name in names]
        for group in sorted({fragment.group for fragment in ours}):
            with self._resident(group) as flat:
                for fragment in ours:
                    if fragment.group == group:
                        master = fragment.of(flat.detach())
                        computed = self._compute(fragment).to(master.device)
                        is_same = master.to(computed.dtype) == computed
                        master.copy_(torch.where(is_same, master, computed.to(master.dtype)))

    def _flats_to_write(self) -> Iterator[tuple[Tensor, list[Fragment]]]:
        """Yield the flat tensors with their fragments for writing, and then refresh the compute weights."""
        self._begin_refresh()
        for group in range(len(self._flats())):
            with self._resident(group) as flat:
                yield flat.detach(), [fragment for fragment in self.fragments if fragment.group == group]
                self._refresh(group)
        self._end_refresh()

    @contextmanager
    def _resident(self, group: int) -> Iterator[Tensor]:
        """Yield a flat tensor while it and its optimizer states are in memory."""
        yield self._flats()[group]

    def _load_states(
        self, flat: Tensor, fragments: list[Fragment], saved: Mapping[str, SavedParameter], read: Read
    ) -> None:
        present = [saved[f.name] for f in fragments if saved[f.name].scalars or saved[f.name].states]
        if not present:
            return
        steps = {float(parameter.scalars.get("step", 0)) for parameter in present}
        if len(steps) > 1:
            raise UsageError(
                f"resume: parameters were updated {sorted(steps)} times; DeepSpeed keeps one count for all of a group: "
                "resume with strategy=fsdp or ddp"
            )
        optimizer, key = self.zero.optimizer, self._flats()[fragments[0].group]  # the optimizer's, not a detached one
        existing = optimizer.state.get(key, {})
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in present[0].scalars.items()}
        for kind in present[0].states:
            state[kind] = existing[kind].zero_() if kind in existing else torch.zeros_like(flat)
            for fragment in fragments:
                if kind in saved[fragment.name].states:
                    read(kind, fragment.name, fragment.of(state[kind]), fragment.begin, fragment.end)
        if "step" in state:  # DeepSpeed's own CPU Adam counts steps in an int, torch's optimizers in a tensor
            counts_in_int = type(optimizer).__module__.startswith("deepspeed")
            if counts_in_int:
                state["step"] = int(state["step"])
            else:  # fused and capturable optimizers count on the device
                on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
                place = flat.device if on_device else "cpu"
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=place)
        optimizer.state[key] = state

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Make the engine's step inside the block drop all gradients, as after an overflow."""

        def overflow(*_: Any, **__: Any) -> None:
            self.zero.overflow = True

        before = {name: getattr(self.zero, name) for name in self.overflow_switches}
        for name in self.overflow_switches:
            setattr(self.zero, name, overflow if callable(before[name]) else True)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.zero, name, value)

    def _check_complete(self) -> None:
        """Raise if the fragments miss elements, as with a changed DeepSpeed layout; a collective call."""
        total = sum(gathered(sum(fragment.end - fragment.begin for fragment in self.fragments)))
        expected = sum(math.prod(shape) for shape in self._shapes.values())
        if total != expected:
            raise RuntimeError(
                f"DeepSpeedState found {total} elements in DeepSpeed's partitions; expected {expected}: {_OTHER_LAYOUT}"
            )

    def _check_layout(self) -> None:
        """Raise if a fragment's compute weights are not its rounded master weights; a collective call."""
        wrong = None
        for fragment in self.fragments:
            computed = self._compute(fragment)
            if not torch.equal(tensor_of(self._master(fragment)).to(computed.device, computed.dtype), computed):
                wrong = f"{fragment.name}[{fragment.begin}:{fragment.end}]"
                break
        if any(gathered(wrong)):
            raise RuntimeError(
                f"DeepSpeedState found other weights than {wrong or 'those of another process'} where DeepSpeed should "
                f"keep them: {_OTHER_LAYOUT}"
            )


class Zero12State(DeepSpeedState):
    """Training state of ZeRO-1/2: each rank steps a range of one flat tensor per group; weights are replicated."""

    overflow_switches = ("check_overflow", "check_grad_overflow")

    @override
    def _fragments(self) -> list[Fragment]:
        fragments = []
        for group, parameters in enumerate(self.zero.round_robin_bit16_groups):
            size = int(self.zero.partition_size[group])
            start = dist.get_rank(group=self.zero.real_dp_process_group[group]) * size
            offsets = self.zero.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                begin = max(start - offset, 0)
                end = min(start + size - offset, parameter.numel())
                if begin < end:
                    name = self._names[id(parameter)]
                    fragments.append(Fragment(name, self._shapes[name], begin, end, group, offset + begin - start))
        return fragments

    @override
    def _flats(self) -> list[Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    @override
    def _group_names(self) -> list[list[list[str]]]:
        return [[[self._names[id(p)] for p in group] for group in self.zero.bit16_groups]]

    @override
    def _compute(self, fragment: Fragment) -> Tensor:
        parameter = self._parameters[fragment.name].detach().reshape(-1)
        return parameter[fragment.begin : fragment.end]

    @override
    def _end_refresh(self) -> None:
        self.zero.update_lp_params()

    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Write other weights into this rank's range of the compute weights, and all-gather them."""
        flats, groups = self.zero.parallel_partitioned_bit16_groups, self.zero.real_dp_process_group
        ours = [partitions[dist.get_rank(group=group)] for partitions, group in zip(flats, groups, strict=True)]
        for fragment in self.fragments:
            fragment.of(ours[fragment.group].data).copy_(weights[fragment.name, fragment.begin])
        for partitions, own, group in zip(flats, ours, groups, strict=True):
            dist.all_gather(partitions, own.clone(), group=group)
        return True

    def _restore(self, trained: bool) -> None:
        """Restore the trained compute weights: the float32 partitions, rounded as after a step."""
        self.zero.update_lp_params()


class Zero3State(DeepSpeedState):
    """Training state of ZeRO-3: every rank keeps a range of each parameter, packed into flat tensors by sub-group."""

    overflow_switches = ("_overflow_check_and_loss_scale_update",)

    @override
    def _fragments(self) -> list[Fragment]:
        fragments = []
        rank = dist.get_rank(group=self.zero.dp_process_group)
        for group, parameters in enumerate(self.zero.fp16_groups):
            offset = 0
            for parameter in parameters:
                name = self._names[id(parameter)]
                each = int(parameter.partition_numel())
                begin = min(rank * each, parameter.ds_numel)
                end = min(begin + each, parameter.ds_numel)
                fragments.append(Fragment(name, self._shapes[name], begin, end, group, offset))
                offset += each
        return fragments

    @override
    def _flats(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    @override
    def _group_names(self) -> list[list[list[str]]]:
        names: list[list[str]] = [[] for _ in self.zero.optimizer.param_groups]
        for sub_group, parameters in enumerate(self.zero.fp16_groups):
            names[self.zero.sub_group_to_group_id[sub_group]] += [self._names[id(p)] for p in parameters]
        return [names]

    @override
    def _compute(self, fragment: Fragment) -> Tensor:
        partition: Any = self._parameters[fragment.name]
        return partition.ds_tensor.detach()[: fragment.end - fragment.begin]

    @override
    def _begin_refresh(self) -> None:
        """Free gathered copies, which would be used instead of the newly written partitions."""
        self.zero.parameter_offload.partition_all_parameters()

    @override
    def _refresh(self, group: int) -> None:
        self.zero._reassign_or_swap_out_partitioned_parameters(group)

    @override
    @torch.inference_mode(False)  # weights gathered for a validation may be trained next
    @torch.no_grad()
    def _end_refresh(self) -> None:
        persistent = self.zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> list[Tensor | None]:
        """Write other weights into this rank's partitions of the compute weights."""
        self._begin_refresh()
        compute = self.zero.fp16_partitioned_groups_flat
        # In float32 training the compute weights may be the masters themselves; otherwise the masters restore them.
        trained = [
            flat.detach().clone() if master.data_ptr() == flat.data_ptr() else None
            for flat, master in zip(compute, self._flats(), strict=True)
        ]
        for fragment in self.fragments:
            fragment.of(compute[fragment.group].data).copy_(weights[fragment.name, fragment.begin])
        self._end_refresh()
        return trained

    def _restore(self, trained: list[Tensor | None]) -> None:
        """Restore the trained compute weights, rounded as after a step."""
        self._begin_refresh()
        for group, (flat, kept) in enumerate(zip(self.zero.fp16_partitioned_groups_flat, trained, strict=True)):
            flat.data.copy_(self._master_flat(group) if kept is None else kept)
        self._end_refresh()

    def _master_flat(self, group: int) -> Tensor:
        return self._flats()[group].detach()
