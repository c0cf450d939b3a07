"""The training state of ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from sd_lightning.strategies.deepspeed.state import DeepSpeedState, Fragment


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

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Write other weights into this rank's range of the compute weights, and all-gather them."""
        flats, groups = self.zero.parallel_partitioned_bit16_groups, self.zero.real_dp_process_group
        ours = [partitions[dist.get_rank(group=group)] for partitions, group in zip(flats, groups, strict=True)]
        for fragment in self.fragments:
            fragment.of(ours[fragment.group].data).copy_(weights[fragment.name, fragment.begin])
        for partitions, own, group in zip(flats, ours, groups, strict=True):
            dist.all_gather(partitions, own.clone(), group=group)

    def swap_out(self) -> None:
        """Restore the trained compute weights: the float32 partitions, rounded as after a step."""
        self.zero.update_lp_params()
