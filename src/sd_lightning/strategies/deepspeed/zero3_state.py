"""The training state of ZeRO-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from sd_lightning.strategies.deepspeed.state import DeepSpeedState, Fragment


class Zero3State(DeepSpeedState):
    """Training state of ZeRO-3: every rank keeps a range of each parameter, packed into flat tensors by sub-group."""

    overflow_switches = ("_overflow_check_and_loss_scale_update",)
    _trained: list[Tensor | None] | None = None

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

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Write other weights into this rank's partitions of the compute weights."""
        if self._trained is not None:
            raise RuntimeError("swap_in called twice without swap_out")
        self._begin_refresh()
        compute = self.zero.fp16_partitioned_groups_flat
        # In float32 training the compute weights may be the masters themselves; otherwise the masters restore them.
        self._trained = [
            flat.detach().clone() if master.data_ptr() == flat.data_ptr() else None
            for flat, master in zip(compute, self._flats(), strict=True)
        ]
        for fragment in self.fragments:
            fragment.of(compute[fragment.group].data).copy_(weights[fragment.name, fragment.begin])
        self._end_refresh()

    def swap_out(self) -> None:
        """Restore the trained compute weights, rounded as after a step."""
        if self._trained is None:
            raise RuntimeError("swap_out called without swap_in")
        self._begin_refresh()
        for group, (flat, trained) in enumerate(
            zip(self.zero.fp16_partitioned_groups_flat, self._trained, strict=True)
        ):
            flat.data.copy_(self._master_flat(group) if trained is None else trained)
        self._trained = None
        self._end_refresh()

    def _master_flat(self, group: int) -> Tensor:
        return self._flats()[group].detach()
