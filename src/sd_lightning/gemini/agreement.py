"""Agreement of all ranks on which parameters have gradients, and on their norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.gathering import Reducer
from sd_lightning.gemini.stepper import Stepper


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
        # Another rank may have got late gradients meanwhile.
        may_differ = not chunked.collectives.is_alone and any(c.weights.is_resident for c in self._stepper.chunks)
        is_agreed = self._version == reducer.version and not may_differ
        if self.touched is not None and is_agreed and (self.norm is not None or not with_norm):
            return self.touched
        reducer.flush()
        late = [chunk.index in reducer.late for chunk in chunked.chunks]
        on_device = self._stepper.decides_on_device
        square = self._sum_on_host() if with_norm and not on_device else 0.0
        own = [square, *late, *(p in reducer.touched for p in trained)]
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

    def reach_of(self, chunk: Chunk, *, with_norm: bool) -> tuple[set[nn.Parameter], float]:
        """Agree on one chunk in the backward pass.

        Returns:
            Its touched parameters, and the sum of squares of its gradients over all ranks; 0.0 unless ``with_norm``.
        """
        own = [self._sum_on_host([chunk]) if with_norm else 0.0, *(p in self._reducer.touched for p in chunk.slots)]
        square, *counts = self._chunked.collectives.sum_with_order(torch.tensor(own, dtype=torch.float64)).tolist()
        touched = {p for p, count in zip(chunk.slots, counts, strict=True) if count}
        return touched.intersection(self._stepper.group_of), square

    def _squares(self, chunks: Sequence[Chunk] | None = None) -> list[Tensor]:
        """Return sums of squares of this rank's gradients: in at least float32 per range, each then in float64."""
        squares = []
        for gradient in self._stepper.gradients(chunks):
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            wide = gradient.to(dtype)
            squares.append(torch.mul(wide, wide, out=None if wide is gradient else wide).sum(dtype=dtype).double())
        return squares

    def _sum_on_host(self, chunks: Sequence[Chunk] | None = None) -> float:
        """Return their sum, with one transfer per device."""
        squares = self._squares(chunks)
        sums = torch.zeros(len(squares), dtype=torch.float64)
        for device in {square.device for square in squares}:
            indices = [index for index, square in enumerate(squares) if square.device == device]
            sums[indices] = torch.stack([squares[index] for index in indices]).cpu()
        return float(sums.sum())
