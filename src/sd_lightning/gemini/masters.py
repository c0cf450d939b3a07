"""Master weights of a chunk: apart from its compute weights, the same memory, or divided between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.placement import ChunkPlacement, Kind, Tier, TierBuffer
from sd_lightning.gemini.rounding import join, keys_of, round_stochastically, split
from sd_lightning.gemini.weights import ComputeWeights

_PIECE = 2**22
"""Elements that are split, joined or rounded at once; their temporary memory is not counted."""


class MasterWeights:
    """This rank's shard of a chunk's weights as the optimizer steps them: in float32, or float64 if computed in that.

    They are kept in one of these forms (:class:`~sd_lightning.gemini.config.Master`):

    - apart: in memory of their own, in the layout's ``kept_dtype``;
    - as the compute weights, if these have that type and live on the same tier, or are frozen;
    - split: the compute weights on the host are the upper halves, and the lower ones have memory of their own. To lose
      nothing takes a third store: a list of the ties that the halves do not tell, 4 bytes each. That is next to nothing
      for trained weights, and 1 weight in 16 just read from a float16 file, until a step changes it (one with a
      learning rate of 0, as a warm-up begins, does not).

    Args:
        compute: The compute weights of the chunk.
        seed: Of stochastic rounding.
    """

    def __init__(self, compute: ComputeWeights, seed: int = 0) -> None:
        self._compute = compute
        self._seed = seed
        self._trained: TierBuffer | None = None
        """During a swap: the trained compute weights, unless the master weights are apart."""
        self._is_swapped = False
        self._ties: dict[int, Tensor] = {}
        """By piece: int32, the positions of split weights that their halves do not tell; see :func:`split`."""
        self._rest = self._allocate(compute.placement)
        """Memory beside the compute weights."""

    @property
    def is_split(self) -> bool:
        """Whether the compute weights hold the upper halves."""
        return self._rest is not None and self._compute.placement.splits_master(self._compute.layout)

    @property
    def needs_scratch(self) -> bool:
        """Whether :meth:`stepping` gives copies of the weights."""
        return self._compute.placement.steps_copies(self._compute.layout)

    @property
    def kept_bytes(self) -> int:
        """Bytes beside the compute weights."""
        return 0 if self._rest is None else self._rest.nbytes

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Return elements of the trained weights, also during a swap: live, or a float32 copy of split ones."""
        end = self._compute.bounds.numel if end is None else end
        if not self.is_split:
            return self._whole[begin:end]
        values = torch.empty(end - begin, dtype=torch.float32)
        self._join(begin, values)
        return values

    def part(self, slot: Slot) -> Tensor | Callable[[], Tensor]:
        """Return one parameter's part: live, or a function that reads it."""
        begin, end = self._compute.bounds.range_of(slot)
        return partial(self.read, begin, end) if self.is_split else self.read(begin, end)

    @contextmanager
    def stepping(
        self, begin: int, end: int, step: int | None = None, scratch: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield elements to be changed in place; :meth:`refresh` must follow.

        Args:
            begin: First element in the shard; a multiple of ``ALIGNMENT``, or that of a parameter's part.
            end: After the last one.
            step: Number of the step, for stochastic rounding; None rounds to the nearest.
            scratch: Memory for ``end - begin`` float32 values where the optimizer steps, if this ``needs_scratch``.
        """
        if not self.needs_scratch:
            yield self.read(begin, end)
            return
        place, ledger, nbytes = self._compute.placement, self._compute.memory.ledger, 0
        if scratch is None:
            device = self._compute.memory.device if place.step_tier is Tier.FAST else None
            scratch = torch.empty(end - begin, dtype=torch.float32, device=device)
            nbytes = scratch.nbytes
        ledger.add(place.step_tier, Kind.SCRATCH, nbytes)
        try:
            if self.is_split:
                self._join(begin, scratch)
            else:
                scratch.copy_(self._whole[begin:end])
            yield scratch
            self._store(begin, scratch, step)
        finally:
            ledger.add(place.step_tier, Kind.SCRATCH, -nbytes)

    def fill(self, values: Tensor) -> None:
        """Set this rank's master and compute weights."""
        compute = self._compute
        with self.stepping(0, compute.bounds.numel) as weights:
            weights.copy_(values)
        if self._is_apart:
            compute.memory.copy(compute.shard, values, Tier.SLOW, Tier.SLOW)
        compute.invalidate()

    def publish(self) -> None:
        """Copy master weights that are apart to the compute weights; ``compute.invalidate`` must follow."""
        if self._is_apart:
            self._compute.refresh(self._whole)

    def refresh(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Update the compute weights from the master weights.

        Args:
            changed: Parameters whose values changed; all by default.
        """
        self.publish()
        self._compute.invalidate(changed)

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Swap other weights in: by name and first element, the parts of parameters that this rank owns."""
        compute = self._compute
        if not self._is_apart:
            self._trained = self._keep(compute.shard, compute.placement.param_tier)
            compute.memory.wait_for_copies()
        self._is_swapped = True
        compute.wait()
        for slot in compute.layout.slots:
            begin, end = compute.bounds.owned(slot)
            if begin < end:
                compute.bounds.view_of(slot, compute.shard).copy_(weights[slot.name, begin].reshape(-1))
        compute.invalidate()

    def swap_out(self) -> None:
        """Restore the trained weights."""
        self._compute.wait()
        self._compute.shard.copy_(self._in_compute if self.is_split else self._whole)
        if self._trained is not None:
            self._compute.memory.free(self._trained)
            self._trained = None
        self._is_swapped = False
        self._compute.invalidate()

    def move(self, placement: ChunkPlacement) -> None:
        """Move to another tier, and to the form that it asks for; call before the compute weights move."""
        compute, memory = self._compute, self._compute.memory
        if not compute.layout.is_trained:
            return
        source = self._rest or self._trained
        tier = compute.placement.param_tier if source is None else source.tier
        values = self.read()
        rest, trained = self._allocate(placement), None
        is_split = rest is not None and placement.splits_master(compute.layout)
        if self._is_swapped and (rest is None or is_split):
            trained = self._keep(values, tier)
        if rest is not None and not is_split:
            memory.copy(rest.tensor, values, tier, rest.tier)
        memory.wait_for_copies()
        self.discard()
        self._rest, self._trained = rest, trained
        if rest is not None and is_split:  # the compute weights already are, or get, the upper halves
            self._split(0, values.cpu(), torch.empty_like(values, dtype=torch.bfloat16, device="cpu"), rest.tensor)

    def discard(self) -> None:
        """Free the memory beside the compute weights."""
        for buffer in filter(None, (self._rest, self._trained)):
            self._compute.memory.free(buffer)
        self._rest = self._trained = None
        for piece in list(self._ties):
            self._list(piece, _NO_TIES)

    @property
    def _is_apart(self) -> bool:
        return self._rest is not None and not self.is_split

    @property
    def _in_compute(self) -> Tensor:
        """The trained compute weights, if the master weights are not apart."""
        return self._compute.shard if self._trained is None else self._trained.tensor

    @property
    def _whole(self) -> Tensor:
        """Master weights that are not split."""
        return self._in_compute if self._rest is None else self._rest.tensor

    def _join(self, begin: int, out: Tensor) -> None:
        assert self._rest is not None
        lower, upper = self._rest.tensor, self._in_compute
        for first, last in _pieces(begin, begin + out.numel()):
            ties = self._ties.get(first // _PIECE, _NO_TIES) - first % _PIECE
            inside = ties[(ties >= 0) & (ties < last - first)]
            join(upper[first:last], lower[first:last], inside, out[first - begin : last - begin])

    def _split(self, begin: int, values: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Split float32 values, and list their ties."""
        for first, last in _pieces(begin, begin + values.numel()):
            here = slice(first - begin, last - begin)
            piece = first // _PIECE
            found = split(values[here], upper[here], lower[here]) + first % _PIECE
            ties = self._ties.get(piece, _NO_TIES)
            outside = ties[(ties < first % _PIECE) | (ties >= first % _PIECE + last - first)]
            self._list(piece, torch.cat([outside, found]))

    def _list(self, piece: int, ties: Tensor) -> None:
        before, tier = self._ties.pop(piece, _NO_TIES), Tier.SLOW
        self._compute.memory.ledger.add(tier, Kind.OPTIMIZER, ties.nbytes - before.nbytes)
        if len(ties):
            self._ties[piece] = ties

    def _store(self, begin: int, values: Tensor, step: int | None) -> None:
        """Write float32 values, which are overwritten, in the form in which they are kept."""
        end = begin + values.numel()
        if self.is_split:
            assert self._rest is not None
            self._split(begin, values, self._in_compute[begin:end], self._rest.tensor[begin:end])
        elif step is None:
            self._whole[begin:end].copy_(values)
        else:
            bounds = self._compute.bounds
            for slot in self._compute.layout.slots:
                first, last = bounds.range_of(slot)
                offset = bounds.owned(slot)[0] - first  # from the shard to the parameter
                for low, high in _pieces(max(begin, first), min(end, last)):
                    part = values[low - begin : high - begin]
                    round_stochastically(
                        part, keys_of(self._seed, step, slot.name), low + offset, self._whole[low:high]
                    )

    def _allocate(self, placement: ChunkPlacement) -> TierBuffer | None:
        """Return memory for what a placement keeps beside the compute weights."""
        compute = self._compute
        if not compute.layout.is_trained or placement.aliases_master(compute.layout):
            return None
        dtype = torch.int16 if placement.splits_master(compute.layout) else compute.layout.kept_dtype
        return compute.memory.allocate(placement.optim_tier, Kind.OPTIMIZER, compute.bounds.numel, dtype)

    def _keep(self, weights: Tensor, tier: Tier) -> TierBuffer:
        """Copy trained weights for the time of a swap."""
        memory, dtype = self._compute.memory, self._compute.layout.dtype
        kept = memory.allocate(Tier.SLOW, Kind.SWAPPED, weights.numel(), dtype)
        memory.copy(kept.tensor, weights, tier, Tier.SLOW)
        return kept


_NO_TIES = torch.empty(0, dtype=torch.int32)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a range, which is empty if its end is not after its beginning, at multiples of ``_PIECE``."""
    for first in range(begin // _PIECE * _PIECE, end if begin < end else 0, _PIECE):
        yield max(begin, first), min(end, first + _PIECE)
