"""bitsandbytes' 8-bit AdamW: moments in blocks of 256 values with one scale each (Dettmers et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.layout import Shard, Slot, align
from sd_lightning.gemini.update import Group, Progress, Ranges, Update, next_step
from sd_lightning.state.eight_bit import BLOCK, dequantise, quantise

_SIGNED = {"state1": True, "state2": False}
"""Whether the codes of a state are signed."""


class BlockwiseUpdate(Update):
    """``bitsandbytes.optim.AdamW8bit``, with its kernels for the accelerator and the host.

    Each state of a chunk is one byte buffer. Each parameter has a part of it: codes followed by the blocks' scales, or
    float32 values if the parameter is smaller than ``min_8bit_size``. Blocks start at this rank's part of a parameter,
    so they depend on the world size and not on the placement of chunks.

    Args:
        inner: The user's optimizer.

    Raises:
        UsageError: The optimizer pages its states to the host itself.
    """

    joins_parameters = False

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        if getattr(inner, "is_paged", False):
            raise UsageError(
                f"Gemini got {type(inner).__name__} with is_paged=True, which moves states by itself; expected "
                "is_paged=False, with offload_optim_frac to move them"
            )
        self._least_numel = int(inner.args.min_8bit_size)  # type: ignore[attr-defined]

    def states(self, group: Group) -> tuple[str, ...]:
        return tuple(_SIGNED)

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        return sum(self._nbytes(shard, slot) for slot in shard.layout.slots), torch.uint8

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        slots = shard.layout.slots
        begin = sum(self._nbytes(shard, other) for other in slots[: slots.index(slot)])
        part = flat[begin : begin + self._nbytes(shard, slot)]
        return part if slot.numel >= self._least_numel else part.view(torch.float32)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        if part.dtype == torch.float32:
            return part[:numel]
        return partial(dequantise, *_split(part, numel), _code(kind, part.device))

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        if part.dtype == torch.float32:
            part[: values.numel()].copy_(values)
        else:
            quantise(values, *_split(part, values.numel()), _code(kind, values.device))

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        assert found_inf is None and not isinstance(divisor, Tensor)
        from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

        step = next_step(ranges.progress)
        (beta1, beta2), eps, lr, decay = group["betas"][:2], group["eps"], float(group["lr"]), group["weight_decay"]
        first_moments, second_moments = ranges.states["state1"], ranges.states["state2"]
        for weight, gradient, first, second in zip(
            ranges.weights, ranges.gradients, first_moments, second_moments, strict=True
        ):
            n = weight.numel()
            if first.dtype == torch.float32:
                optimizer_update_32bit(
                    "adam", gradient, weight, first[:n], beta1, eps, step, lr, second[:n], beta2, 0.0, 0.0, decay,
                    gnorm_scale=1 / divisor,
                )  # fmt: skip
                continue
            (codes1, scales1), (codes2, scales2) = _split(first, n), _split(second, n)
            maps = _code("state1", weight.device), _code("state2", weight.device)
            optimizer_update_8bit_blockwise(
                "adam", gradient, weight, codes1, codes2, beta1, beta2, 0.0, 0.0, eps, step, lr, *maps, scales1,
                scales2, decay, gnorm_scale=1 / divisor,
            )  # fmt: skip
        return Progress(step)

    def _nbytes(self, shard: Shard, slot: Slot) -> int:
        begin, end = shard.owned(slot)
        numel = end - begin
        is_quantised = slot.numel >= self._least_numel
        return align(numel) + align(4 * -(-numel // BLOCK)) if is_quantised else align(4 * numel)


@cache
def _code(kind: str, device: torch.device) -> Tensor:
    """Return the value of each byte of a state."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor = create_dynamic_map(signed=_SIGNED[kind]).to(device)
    return code


def _split(part: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a part."""
    return part[:numel], part[align(numel) :].view(torch.float32)[: -(-numel // BLOCK)]
