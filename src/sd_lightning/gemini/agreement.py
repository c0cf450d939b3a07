"""What ranks have to know together before an optimizer steps: which parameters have gradients, and their norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.stepper import Stepper


class GradientAgreement:
    """Finds out about the gradients of one optimizer, as long as they do not change only once.

    Args:
        engine: Owns the gradients.
        stepper: Steps them.
    """

    def __init__(self, engine: ChunkedNetworks, stepper: Stepper) -> None:
        self.touched: set[nn.Parameter] | None = None
        """The optimizer's parameters that have gradients on any rank; None if that is not known."""
        self.norm: float | None = None
        """The 2-norm of the gradients over all ranks; None if that is not known."""
        self._engine = engine
        self._stepper = stepper
        self._version = -1

    @property
    def is_finite(self) -> bool:
        """Whether the norm is finite, and so all gradients are."""
        assert self.norm is not None
        return math.isfinite(self.norm)

    def reset(self) -> None:
        """Forget what is known: the gradients are used up."""
        self.touched, self.norm = None, None

    def reach(self, *, with_norm: bool) -> set[nn.Parameter]:
        """Agree with one small collective, unless nothing has changed since; return the touched parameters."""
        engine, runtime, trained = self._engine, self._engine.runtime, list(self._engine.trained.values())
        is_agreed = self.touched is not None and self._version == runtime.gradients_version
        if engine.collectives.world_size > 1 and any(chunk.weights.is_resident for chunk in self._stepper.chunks):
            is_agreed = False  # another rank may have got late gradients since
        if is_agreed and self.touched is not None and (self.norm is not None or not with_norm):
            return self.touched
        runtime.reducer.flush()
        late = [chunk.index in runtime.reducer.late for chunk in engine.chunks]
        values = torch.zeros(1 + len(late) + len(trained), dtype=torch.float64)
        if with_norm:
            values[0] = self._sum_of_squares()
        values[1:] = torch.tensor([*late, *(p in runtime.touched for p in trained)], dtype=torch.float64)
        values = engine.collectives.sum_with_order(values)
        late_anywhere = values[1 : 1 + len(late)].nonzero().flatten().tolist()
        if late_anywhere:
            runtime.reducer.flush(late_anywhere)
            return self.reach(with_norm=with_norm)
        # From here on all ranks know the same, also of parameters of other optimizers.
        runtime.touched = {p for p, count in zip(trained, values[1 + len(late) :].tolist(), strict=True) if count}
        self._version = runtime.gradients_version
        self.touched = runtime.touched.intersection(self._stepper.group_of)
        self.norm = float(values[0].sqrt()) if with_norm else None
        return self.touched

    def _sum_of_squares(self) -> float:
        """Return the sum over this rank's gradients: of each range in at least float32, of all ranges in float64."""
        squares = []
        for gradient in self._stepper.gradients():
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            squares.append(gradient.square().sum(dtype=dtype).double())
        sums = torch.zeros(len(squares), dtype=torch.float64)
        for device in {square.device for square in squares}:  # one transfer from each
            indices = [index for index, square in enumerate(squares) if square.device == device]
            sums[indices] = torch.stack([squares[index] for index in indices]).cpu()
        return float(sums.sum())
