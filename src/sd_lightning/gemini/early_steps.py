"""Steps of chunks in the backward pass, which frees their gradients at once (setting ``step_in_backward``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.agreement import GradientAgreement
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.runtime import Runtime
from sd_lightning.gemini.stepper import Stepper


class EarlySteps:
    """The part of an optimizer's step that the backward pass has done.

    Without clipping, the result is bitwise that of a step after the pass. With ``step_in_backward="running_norm"``, a
    chunk's gradients are multiplied by ``max_norm / (n + 1e-6)``, at most 1. Clipping by the global norm has the norm
    of this step's gradients for ``n``; here it is the larger of the last step's norm and the norm of the chunks so
    far. So no chunk's part is ever larger than ``max_norm``, and one that comes early after a small last step is
    clipped less than it would be.

    Args:
        runtime: Computes the gradients.
        stepper: Steps chunks.
        agreement: Of all ranks on a chunk's gradients.
    """

    def __init__(self, runtime: Runtime, stepper: Stepper, agreement: GradientAgreement) -> None:
        self.max_norm: float | None = None
        """Limit of the norm for ``"running_norm"``; set before the first backward pass."""
        self.last_norm = 0.0
        """The norm of the last step's gradients; checkpoints keep it."""
        self._runtime = runtime
        self._reducer = runtime.reducer
        self._stepper = stepper
        self._agreement = agreement
        self.divisor = 1.0
        """Of the gradients of the latest chunk."""
        self._touched: set[nn.Parameter] = set()
        self._squares = 0.0
        self._rates: list[float] = []
        """Learning rates of the groups in this backward pass."""

    @property
    def norm(self) -> Tensor:
        """The norm of the gradients that this backward pass has stepped."""
        return torch.tensor(math.sqrt(self._squares))

    @torch.no_grad()
    def step(self, chunk: Chunk) -> None:
        """Step a chunk, all of whose gradients are reduced, and free them; a collective call."""
        if not self._touched:
            self._rates = self._current_rates()
        touched, square = self._agreement.reach_of(chunk, with_norm=self.max_norm is not None)
        if self.max_norm is not None:
            self._squares += square
            self.divisor = max((max(self.last_norm, math.sqrt(self._squares)) + 1e-6) / self.max_norm, 1.0)
        if touched:
            self._stepper.step_chunk(chunk, touched, self.divisor)
        self._touched |= touched
        self._reducer.touched.difference_update(chunk.slots)
        chunk.gradients.drop()

    def finish(self) -> None:
        """Note that the optimizer steps, for what the backward pass has stepped.

        Raises:
            UsageError: A learning rate has changed since the backward pass.
        """
        if not self._reducer.complete:
            return
        if self._touched and self._rates != (rates := self._current_rates()):
            raise UsageError(
                f"Gemini got learning rates {rates} after the backward pass has stepped with {self._rates} "
                "(step_in_backward); change them before the backward pass or after the step, or leave "
                "step_in_backward out"
            )
        self._stepper.finish(self._touched)
        if self.max_norm is not None:
            self.last_norm = math.sqrt(self._squares)
        self._touched.clear()
        self._squares = 0.0
        self._reducer.complete.clear()

    def check_nothing(self, purpose: str) -> None:
        """Raise if the backward pass has stepped.

        Raises:
            UsageError: It has, and its gradients are freed.
        """
        if self._reducer.complete:
            raise UsageError(
                f"Gemini was asked {purpose} after the backward pass, which has stepped and freed them "
                "(step_in_backward); write trainer.gradient_clip_val=null, or step_in_backward=running_norm to clip "
                "by the norm so far, or leave step_in_backward out"
            )

    def _current_rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._stepper.groups]
