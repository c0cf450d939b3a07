"""Updates with 8-bit states: by kernels of bitsandbytes on an accelerator, by torch's vectorised ones on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.elementwise import AdamUpdate, Group, Progress, Ranges, StepRange, Update, next_step
from sd_lightning.gemini.layout import Shard, Slot, align
from sd_lightning.gemini.rounding import hashed, keys_of
from sd_lightning.state.replicated import BLOCK, dequantise, quantise

_SIGNED = {"state1": True, "state2": False}
"""Whether the codes of a state are signed."""


class BlockwiseUpdate(Update):
    """``bitsandbytes.optim.AdamW8bit`` (Dettmers et al. 2021), with its kernels on an accelerator.

    bitsandbytes has no vectorised step for a CPU. The host dequantises a block, steps it with torch's fused AdamW, and
    quantises it again, with codes of its own that take no search in a table: :func:`encode` for first moments, and
    :func:`encode_stochastically` for second ones.

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
        self._fused = AdamUpdate()

    def states(self, group: Group) -> tuple[str, ...]:
        return tuple(_SIGNED)

    def num_scratch(self, device: torch.device) -> int:
        return 3 if device.type == "cpu" else 0

    def moved(self, shard: Shard, kind: str, flat: Tensor, source: torch.device) -> None:
        if "cpu" not in (source.type, flat.device.type):
            return
        for slot in shard.layout.slots:
            begin, end = shard.owned(slot)
            part = self.part(shard, slot, flat)
            if begin < end and part.dtype != torch.float32:
                self.store(kind, part, _values(kind, *_halves(part, end - begin), source))

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        return sum(self._nbytes(shard, slot) for slot in shard.layout.slots), torch.uint8

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        slots = shard.layout.slots
        begin = sum(self._nbytes(shard, other) for other in slots[: slots.index(slot)])
        part = flat[begin : begin + self._nbytes(shard, slot)]
        return part if slot.numel >= self._least_numel else part.view(torch.float32)

    def ranges(self, shard: Shard, kind: str, flat: Tensor, chosen: Sequence[StepRange]) -> dict[str, list[Tensor]]:
        values, scales = [], []
        for begin, end, slot in chosen:
            part, (first, last) = self.part(shard, slot, flat), shard.range_of(slot)
            codes, of_blocks = (part, part) if part.dtype == torch.float32 else _halves(part, last - first)
            values.append(codes[begin - first : end - first])
            scales.append(of_blocks[(begin - first) // BLOCK : -(-(end - first) // BLOCK)])
        return {kind: values, f"{kind}/scales": scales}

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        if part.dtype == torch.float32:
            return part[:numel]
        return partial(_values, kind, *_halves(part, numel), part.device)

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        if part.dtype == torch.float32:
            part[: values.numel()].copy_(values)
        elif part.device.type == "cpu":
            encode(values, *_halves(part, values.numel()), is_signed=_SIGNED[kind], scratch=torch.empty_like(values))
        else:
            quantise(values, *_halves(part, values.numel()), _code(kind, values.device))

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        assert found_inf is None and not isinstance(divisor, Tensor)
        step_range = self._step_on_host if ranges.weights[0].device.type == "cpu" else self._step_on_device
        for index in range(len(ranges.weights)):
            step_range(ranges, index, group, divisor)
        return Progress(next_step(ranges.progress))

    def _step_on_host(self, ranges: Ranges, index: int, group: Group, divisor: float) -> None:
        weight, numel = ranges.weights[index], ranges.weights[index].numel()
        packed = {kind: (ranges.states[kind][index], ranges.states[f"{kind}/scales"][index]) for kind in _SIGNED}
        *moments, scratch = (row[:numel] for row in ranges.scratch)
        states = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        is_quantised = packed["state1"][0].dtype != torch.float32
        for (kind, (codes, scales)), values in zip(packed.items(), moments, strict=True):
            if is_quantised:
                decode(codes, scales, values, is_signed=_SIGNED[kind], scratch=scratch)
        if not is_quantised:
            states = {name: values for name, (values, _) in zip(states, packed.values(), strict=True)}
        settings = {**group, "decoupled_weight_decay": True, "amsgrad": False, "maximize": False}
        of_one = {name: [values] for name, values in states.items()}
        self._fused.apply(Ranges([weight], [ranges.gradients[index]], of_one, ranges.progress), settings, divisor)
        if is_quantised:
            first, second = moments
            encode(first, *packed["state1"], is_signed=True, scratch=scratch)
            seed, name, begin = ranges.draws[index]
            keys = keys_of(seed, next_step(ranges.progress), f"{name}/state2")
            encode_stochastically(second, *packed["state2"], keys, begin, (scratch, first))

    def _step_on_device(self, ranges: Ranges, index: int, group: Group, divisor: float) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

        step, weight, gradient = next_step(ranges.progress), ranges.weights[index], ranges.gradients[index]
        (beta1, beta2), eps, lr, decay = group["betas"][:2], group["eps"], float(group["lr"]), group["weight_decay"]
        (codes1, scales1), (codes2, scales2) = (
            (ranges.states[kind][index], ranges.states[f"{kind}/scales"][index]) for kind in _SIGNED
        )
        if codes1.dtype == torch.float32:
            optimizer_update_32bit(
                "adam", gradient, weight, codes1, beta1, eps, step, lr, codes2, beta2, 0.0, 0.0, decay,
                gnorm_scale=1 / divisor,
            )  # fmt: skip
            return
        maps = _code("state1", weight.device), _code("state2", weight.device)
        optimizer_update_8bit_blockwise(
            "adam", gradient, weight, codes1, codes2, beta1, beta2, 0.0, 0.0, eps, step, lr, *maps, scales1, scales2,
            decay, gnorm_scale=1 / divisor,
        )  # fmt: skip

    def _nbytes(self, shard: Shard, slot: Slot) -> int:
        begin, end = shard.owned(slot)
        numel = end - begin
        is_quantised = slot.numel >= self._least_numel
        return align(numel) + align(4 * -(-numel // BLOCK)) if is_quantised else align(4 * numel)


@cache
def _code(kind: str, device: torch.device) -> Tensor:
    """Return bitsandbytes' value of each byte of a state."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor = create_dynamic_map(signed=_SIGNED[kind]).to(device)
    return code


def _halves(part: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a part."""
    return part[:numel], part[align(numel) :].view(torch.float32)[: -(-numel // BLOCK)]


def _values(kind: str, codes: Tensor, scales: Tensor, written_on: torch.device) -> Tensor:
    """Return the float32 values of a state, whose codes are those of the device that has stepped it."""
    if written_on.type != "cpu":
        return dequantise(codes, scales, _code(kind, codes.device))
    values = torch.empty_like(codes, dtype=torch.float32)
    decode(codes, scales, values, is_signed=_SIGNED[kind], scratch=torch.empty_like(values))
    return values


_ROUND = 1.5 * 2.0**23
"""Added to a float32 number below 2^22, it rounds it to an integer, which is then in the lowest bits."""
_ZERO, _LARGEST = 128, {True: 127.0, False: 255.0}
"""The code of zero of signed states, and the largest distance of a code from zero."""
_LEAST = 1e-28
"""The least scale of a block; its inverse times ``255^4`` is finite."""
_FLOOR = 10
"""The lowest code of a second moment above zero, 2.4e-6 of the largest in its block.

Lower codes are so far apart (1 and 2 by 16 times) that a moment rounded stochastically is often much too small, and the
update much too large. With this one no update of the spikes in ``test_gemini_eight_bit.py`` is larger than in float32.
"""


def encode(values: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool, scratch: Tensor) -> None:
    """Quantise float32 values in blocks of 256, with few passes of vector instructions.

    A code is the value's root, in units of the largest in its block: the square root with the sign of first moments,
    the fourth root of second moments. So the distance between codes shrinks with the value, as it does in the dynamic
    map of bitsandbytes. Second moments above zero get code 10 at least, so that updates get smaller and never larger.

    Args:
        values: (n,), from the beginning of a block.
        codes: (n,) bytes, overwritten.
        scales: (blocks,) float32: the largest absolute value of each block, at least 1e-28; overwritten.
        is_signed: Whether values may be negative.
        scratch: (n,) float32, overwritten.
    """
    torch.abs(values, out=scratch)
    for part, scale in _blocks(scratch, scales):
        torch.amax(part, 1, out=scale)
        part.mul_((_LARGEST[is_signed] ** (2 if is_signed else 4) / scale.clamp_min_(_LEAST))[:, None])
    scratch.sqrt_()
    if is_signed:
        torch.copysign(scratch, values, out=scratch).add_(_ROUND + _ZERO)
    else:
        scratch.sqrt_().clamp_min_(_FLOOR).mul_(values != 0).add_(_ROUND)
    codes.copy_(scratch.view(torch.int32))  # keeps the lowest byte


def encode_stochastically(
    values: Tensor, codes: Tensor, scales: Tensor, keys: tuple[int, int], first: int, scratch: tuple[Tensor, Tensor]
) -> None:
    """Quantise second moments as :func:`encode` does, but so that the expectation is the value.

    A step changes a second moment by 0.1 %, and codes differ by 1.6 % and more: rounded to the nearest, most changes
    would be lost. With ``h`` in the middle of two codes, their values differ by ``4 h^3 + h`` and have the mean
    ``h^4 + 1.5 h^2 + 1/16``. The upper one is taken if the value is above that mean by a random part of the difference.

    Args:
        values: (n,), from the beginning of a block; overwritten.
        codes: (n,) bytes, overwritten.
        scales: (blocks,) float32, overwritten.
        keys: Of the random numbers.
        first: Index of the first element; even.
        scratch: Two tensors, (n,) float32, overwritten.
    """
    middle, noise = scratch
    for part, scale in _blocks(values, scales):
        torch.amax(part, 1, out=scale)
        part.mul_((_LARGEST[False] ** 4 / scale.clamp_min_(_LEAST))[:, None])
    is_stepped = values != 0
    torch.sqrt(values, out=middle).sqrt_().floor_().clamp_(_FLOOR, _LARGEST[False] - 1)
    codes.copy_(torch.add(middle, _ROUND, out=noise).view(torch.int32))
    noise.copy_(hashed(values.numel(), keys, first, values.device)).mul_(middle.add_(0.5))
    noise.addcmul_(noise, middle.mul_(middle), value=4.0)
    values.addcmul_(middle, middle, value=-1.0).sub_(middle, alpha=1.5).sub_(noise, alpha=2.0**-16)
    codes.add_((values > 1 / 16).view(torch.uint8)).mul_(is_stepped.view(torch.uint8))


def decode(codes: Tensor, scales: Tensor, values: Tensor, *, is_signed: bool, scratch: Tensor) -> None:
    """Fill ``values`` with the numbers that have been quantised; the arguments are those of :func:`encode`."""
    values.copy_(codes)
    if is_signed:
        values.sub_(_ZERO).mul_(torch.abs(values, out=scratch))
    else:
        values.mul_(values).mul_(values)
    for part, scale in _blocks(values, scales):
        part.mul_((scale / _LARGEST[is_signed] ** (2 if is_signed else 4))[:, None])


def _blocks(values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole blocks as a matrix with their scales, and the rest as one row with its scale."""
    whole = values.numel() // BLOCK
    if whole:
        yield values[: whole * BLOCK].view(whole, BLOCK), scales[:whole]
    if values.numel() > whole * BLOCK:
        yield values[whole * BLOCK :].view(1, -1), scales[whole:]
