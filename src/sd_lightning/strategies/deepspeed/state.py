"""Where DeepSpeed keeps a parameter: the flat partitions of ZeRO-1/2/3 as ``ParameterShard``s.

DeepSpeed packs the parameters of an optimizer group into one flat tensor and gives each rank a range of it
(stages 1 and 2), or gives each rank a range of every parameter and packs those (stage 3). The table of
(parameter, its range) -> (group, offset in this rank's flat tensor) is built here from the engine's own lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.state.optimizer_change import optimizer_name
from sd_lightning.state.shards import (
    LazyTensor,
    ParameterShard,
    Read,
    SavedParameter,
    check_same_groups,
    hyper_parameters,
)


@dataclass(frozen=True)
class Fragment:
    """A range of a parameter and where this rank's flat tensors hold it."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    group: int
    """Index of the flat tensor."""
    offset: int
    """First element in it."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the fragment's view of its flat tensor."""
        return flat.narrow(0, self.offset, self.end - self.begin)


class DeepSpeedState:
    """What ZeRO-1/2 and ZeRO-3 have in common: flat float32 tensors that a torch optimizer steps.

    Args:
        zero: ``engine.optimizer``.
        parameters: Trained parameters by name.
    """

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.zero = zero
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters.items()
        }
        self.fragments = self._fragments()
        self._check_complete()
        self._check_layout()

    # What the stages say differently.

    def _fragments(self) -> list[Fragment]:
        raise NotImplementedError

    def _flats(self) -> list[Tensor]:
        """Return this rank's flat float32 weights, the tensors that the optimizer steps."""
        raise NotImplementedError

    def _group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each optimizer group, in the optimizer's order."""
        raise NotImplementedError

    def _compute(self, fragment: Fragment) -> Tensor:
        """Return what this rank computes with in the fragment's place, flat."""
        raise NotImplementedError

    def _begin_refresh(self) -> None:
        """Prepare for new compute weights."""

    def _refresh(self, group: int) -> None:
        """Make the compute weights of a flat tensor what its float32 weights say, while it is resident."""

    def _end_refresh(self) -> None:
        """Bring the new compute weights to all ranks."""
        raise NotImplementedError

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Let the engine's step inside the block drop its gradients: no update, and nothing is left of them."""
        raise NotImplementedError

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        raise NotImplementedError

    def swap_out(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ the view

    def parameter_shards(self) -> list[ParameterShard]:
        """Return the ranges that this rank owns."""
        flats = self._flats()
        shards = []
        for fragment in self.fragments:
            states, scalars = self._split(flats[fragment.group], fragment)
            master = fragment.of(flats[fragment.group].detach())
            shards.append(
                ParameterShard(fragment.name, fragment.shape, fragment.begin, fragment.end, master, states, scalars)
            )
        return shards

    def optimizer_groups(self) -> list[list[dict[str, Any]]]:
        """Return hyper-parameters and parameter names of every group."""
        groups = self.zero.optimizer.param_groups
        return [[hyper_parameters(g) | {"params": names} for g, names in zip(groups, self._group_names(), strict=True)]]

    def optimizer_names(self) -> list[str]:
        """Return the class of the optimizer that steps the flat tensors."""
        return [optimizer_name(self.zero.optimizer)]

    def load(self, saved: Mapping[str, SavedParameter], groups: list[list[dict[str, Any]]] | None, read: Read) -> None:
        """Fill the flat weights, create the optimizer's flat states, and refresh the compute weights."""
        if groups is not None:
            check_same_groups(self.optimizer_groups(), groups)
            for group, values in zip(self.zero.optimizer.param_groups, groups[0], strict=True):
                group.update(hyper_parameters(values))
        with self._writing() as flats:
            for index, flat in flats:
                fragments = [fragment for fragment in self.fragments if fragment.group == index]
                for fragment in fragments:
                    read("master", fragment.name, fragment.of(flat), fragment.begin, fragment.end)
                if groups is not None:
                    self._load_states(flat, fragments, saved, read)

    def restore_precision(self, weights: Mapping[str, Callable[[Tensor, int, int], None]]) -> None:
        """Take float32 weights from before the engine rounded them to its compute type.

        Where another rank's weights were broadcast, they stay what the engine made of them.

        Args:
            weights: Parameter -> what fills a tensor with its flat range ``[begin, end)``.
        """
        with self._writing() as flats:
            for index, flat in flats:
                for fragment in self.fragments:
                    if fragment.group != index or fragment.name not in weights:
                        continue
                    rounded, computed = fragment.of(flat), self._compute(fragment).dtype
                    exact = torch.empty_like(rounded)
                    weights[fragment.name](exact, fragment.begin, fragment.end)
                    rounded.copy_(torch.where(exact.to(computed).to(rounded.dtype) == rounded, exact, rounded))

    @contextmanager
    def _writing(self) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """Yield the flat tensors by index, each to be written to, and then compute with what was written."""

        def flats() -> Iterator[tuple[int, Tensor]]:
            for index in range(len(self._flats())):
                with self._resident(index) as flat:
                    yield index, flat.detach()
                    self._refresh(index)

        with torch.no_grad():
            self._begin_refresh()
            yield flats()
            self._end_refresh()

    @contextmanager
    def _resident(self, group: int) -> Iterator[Tensor]:
        """Have a flat tensor and its optimizer states in memory."""
        yield self._flats()[group]

    def _load_states(
        self, flat: Tensor, fragments: list[Fragment], saved: Mapping[str, SavedParameter], read: Read
    ) -> None:
        present = [saved[f.name] for f in fragments if saved[f.name].scalars or saved[f.name].states]
        if not present:
            return
        scalars = present[0].scalars
        steps = {float(parameter.scalars.get("step", 0)) for parameter in present}
        if len(steps) > 1:
            raise UsageError(
                f"resume: parameters were updated {sorted(steps)} times; DeepSpeed keeps one count for all of a group: "
                "resume with strategy=fsdp or ddp"
            )
        key = self._flats()[fragments[0].group]  # the optimizer's, not a detached one
        existing = self.zero.optimizer.state.get(key, {})
        state: dict[str, Any] = {}
        for name, value in scalars.items():
            state[name] = value.clone() if isinstance(value, Tensor) else value
        for kind in present[0].states:
            state[kind] = existing[kind].zero_() if kind in existing else torch.zeros_like(flat)
            for fragment in fragments:
                if kind in saved[fragment.name].states:
                    read(kind, fragment.name, fragment.of(state[kind]), fragment.begin, fragment.end)
        self.zero.optimizer.state[key] = self._adapt(state)

    def _adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """DeepSpeed's own CPU Adam counts steps in an int, torch's optimizers in a tensor."""
        if "step" in state and type(self.zero.optimizer).__module__.startswith("deepspeed"):
            state["step"] = int(state["step"])
        elif "step" in state and not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]))
        return state

    def _split(self, flat: Tensor, fragment: Fragment) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
        states: dict[str, LazyTensor] = {}
        scalars: dict[str, Any] = {}
        for kind, value in self.zero.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.dim() > 0:
                states[kind] = fragment.of(value.reshape(-1))
            elif isinstance(value, Tensor) and value.dim() > 0:
                raise UsageError(
                    f"{type(self.zero.optimizer).__name__} keeps {kind!r}, which is not one value per weight and cannot"
                    " be divided over processes; choose optimizer=adamw, or strategy=ddp"
                )
            elif isinstance(value, Tensor):
                scalars[kind] = value.detach().cpu()
            else:
                scalars[kind] = torch.tensor(float(value)) if kind == "step" else value
        return states, scalars

    def _check_complete(self) -> None:
        """Fail loudly if a DeepSpeed release arranges its partitions in another way; a collective call."""
        total = _sum_over_ranks(sum(fragment.end - fragment.begin for fragment in self.fragments))
        expected = sum(math.prod(shape) for shape in self._shapes.values())
        if total != expected:
            raise RuntimeError(
                f"DeepSpeedState found {total} elements in DeepSpeed's partitions; expected {expected}: {_OTHER_LAYOUT}"
            )

    def _check_layout(self) -> None:
        """Fail loudly if a fragment is not where the table says: what is computed with is the rounded master."""
        wrong = None
        for fragment in self.fragments:
            computed = self._compute(fragment)
            if not torch.equal(self._master(fragment).to(computed.device, computed.dtype), computed):
                wrong = f"{fragment.name}[{fragment.begin}:{fragment.end}]"
                break
        if _sum_over_ranks(wrong is not None):
            raise RuntimeError(
                f"DeepSpeedState found other weights than {wrong or 'those of another process'} where DeepSpeed should "
                f"keep them: {_OTHER_LAYOUT}"
            )

    def _master(self, fragment: Fragment) -> Tensor:
        """Return a fragment's float32 weights."""
        return fragment.of(self._flats()[fragment.group].detach())


_OTHER_LAYOUT = "this DeepSpeed release lays them out differently"


def _sum_over_ranks(value: int) -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([int(value)], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)


class Zero12State(DeepSpeedState):
    """ZeRO-1 and ZeRO-2: one flat tensor per group, of which each rank steps a range; weights are replicated."""

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

    def _flats(self) -> list[Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def _group_names(self) -> list[list[str]]:
        return [[self._names[id(p)] for p in group] for group in self.zero.bit16_groups]

    def _compute(self, fragment: Fragment) -> Tensor:
        parameter = self._parameters[fragment.name].detach().reshape(-1)
        return parameter[fragment.begin : fragment.end]

    def _end_refresh(self) -> None:
        self.zero.update_lp_params()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        check, is_checked = self.zero.check_overflow, self.zero.check_grad_overflow

        def overflow(*_: Any, **__: Any) -> None:
            self.zero.overflow = True

        self.zero.check_overflow, self.zero.check_grad_overflow = overflow, True
        try:
            yield
        finally:
            self.zero.check_overflow, self.zero.check_grad_overflow = check, is_checked

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Write other weights into this rank's range of the compute weights and gather the rest."""
        for fragment in self.fragments:
            partitions = self.zero.parallel_partitioned_bit16_groups[fragment.group]
            rank = dist.get_rank(group=self.zero.real_dp_process_group[fragment.group])
            fragment.of(partitions[rank].data).copy_(weights[fragment.name, fragment.begin])
        for flat, partitions, group in zip(
            self.zero.bit16_groups_flat,
            self.zero.parallel_partitioned_bit16_groups,
            self.zero.real_dp_process_group,
            strict=True,
        ):
            dist.all_gather(partitions, partitions[dist.get_rank(group=group)].clone(), group=group)
            del flat

    def swap_out(self) -> None:
        """Compute with the trained weights again: they are the float32 partitions, rounded as after a step."""
        self.zero.update_lp_params()


class Zero3State(DeepSpeedState):
    """ZeRO-3: every rank keeps a range of each parameter, packed into flat tensors by sub-group."""

    _trained: list[Tensor | None] | None = None

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

    def _flats(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def _group_names(self) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in self.zero.optimizer.param_groups]
        for sub_group, parameters in enumerate(self.zero.fp16_groups):
            names[self.zero.sub_group_to_group_id[sub_group]] += [self._names[id(p)] for p in parameters]
        return names

    def _compute(self, fragment: Fragment) -> Tensor:
        partition: Any = self._parameters[fragment.name]
        return partition.ds_tensor.detach()[: fragment.end - fragment.begin]

    def _begin_refresh(self) -> None:
        self._release()

    def _refresh(self, group: int) -> None:
        self.zero._reassign_or_swap_out_partitioned_parameters(group)

    def _end_refresh(self) -> None:
        self._gather_persistent()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        check = self.zero._overflow_check_and_loss_scale_update

        def overflow(*_: Any, **__: Any) -> None:
            self.zero.overflow = True

        self.zero._overflow_check_and_loss_scale_update = overflow
        try:
            yield
        finally:
            self.zero._overflow_check_and_loss_scale_update = check

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        if self._trained is not None:
            raise RuntimeError("swap_in called twice without swap_out")
        self._release()
        compute = self.zero.fp16_partitioned_groups_flat
        # In float32 training the compute weights may be the masters themselves; elsewhere the masters tell them.
        self._trained = [
            flat.detach().clone() if master.data_ptr() == flat.data_ptr() else None
            for flat, master in zip(compute, self._flats(), strict=True)
        ]
        for fragment in self.fragments:
            fragment.of(compute[fragment.group].data).copy_(weights[fragment.name, fragment.begin])
        self._gather_persistent()

    def swap_out(self) -> None:
        if self._trained is None:
            raise RuntimeError("swap_out called without swap_in")
        self._release()
        for group, (flat, trained) in enumerate(
            zip(self.zero.fp16_partitioned_groups_flat, self._trained, strict=True)
        ):
            flat.data.copy_(self._master_flat(group) if trained is None else trained)
        self._trained = None
        self._gather_persistent()

    def _master_flat(self, group: int) -> Tensor:
        return self._flats()[group].detach()

    def _release(self) -> None:
        """Free gathered copies: they would be used instead of what is written to the partitions."""
        self.zero.parameter_offload.partition_all_parameters()

    @torch.inference_mode(False)  # what is gathered for a validation may be trained with next
    @torch.no_grad()
    def _gather_persistent(self) -> None:
        persistent = self.zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)
