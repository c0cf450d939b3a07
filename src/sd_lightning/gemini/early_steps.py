"""Steps of chunks in the backward pass, which frees their gradients at once (setting ``step_in_backward``)."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

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
        """Limit of the norm for ``"running_norm"``; the strategy sets it, or the user of a bare engine."""
        self.last_norm = 0.0
        """The norm of the last step's gradients; checkpoints keep it."""
        self._runtime = runtime
        self._reducer = runtime.reducer
        self._stepper = stepper
        self._agreement = agreement
        self._clips = runtime.chunked.config.step_in_backward == "running_norm"
        self.has_stepped = False
        """Whether some weights and states are one step ahead of the others, or of the optimizer."""
        self._squares = 0.0
        self._settings: list[dict[str, Any]] = []
        """Those of the groups in this backward pass."""

    @property
    def norm(self) -> Tensor:
        """The norm of the gradients that this backward pass has stepped."""
        return torch.tensor(math.sqrt(self._squares))

    @torch.no_grad()
    def step(self, chunk: Chunk) -> None:
        """Step a chunk, all of whose gradients are reduced, and free them; a collective call.

        Raises:
            UsageError: Gradients are to be clipped, and ``max_norm`` is not set.
        """
        if self._clips and not self.max_norm:
            raise UsageError(
                f"Gemini got step_in_backward=running_norm and max_norm={self.max_norm}; set "
                "engine.optimizers[0].early.max_norm before the first backward pass (trainer.gradient_clip_val does)"
            )
        if not self._reducer.stepped:
            self._settings, self._squares = self._current_settings(), 0.0
        touched, square = self._agreement.reach_of(chunk, with_norm=self._clips)
        divisor = 1.0
        if self.max_norm:
            self._squares += square
            divisor = max((max(self.last_norm, math.sqrt(self._squares)) + 1e-6) / self.max_norm, 1.0)
        if touched:
            self.has_stepped = True
            self._reducer.stepped |= touched
            self._stepper.step_chunk(chunk, touched, divisor)
        else:  # torch.autograd.grad with respect to inputs
            self._reducer.complete.discard(chunk.index)
        self._reducer.touched.difference_update(chunk.slots)
        chunk.gradients.drop()

    def finish(self, late: Set[nn.Parameter]) -> None:
        """Note that the optimizer steps, for what the backward pass has stepped.

        Args:
            late: Parameters that have gradients still.

        Raises:
            UsageError: A setting has changed since the backward pass, or late gradients would not be clipped.
        """
        if self._clips and late:
            name = self._runtime.chunked.name_of(next(iter(late)))
            raise UsageError(
                f"Gemini got a gradient of {name} from outside of its block's forward with "
                "step_in_backward=running_norm, which clips what blocks compute; use the weight inside of its block, "
                "or write step_in_backward=true or false"
            )
        if not self._reducer.stepped:
            return
        before_and_now = zip(self._settings, self._current_settings())
        changed = {key for old, new in before_and_now for key in old | new if old.get(key) != new.get(key)}
        if changed:
            raise UsageError(
                f"Gemini got other values of {', '.join(sorted(changed))} in parameter groups after the backward pass "
                "has stepped with the earlier ones (step_in_backward); change them before the backward pass or after "
                "the step, or leave step_in_backward out"
            )
        self._stepper.finish(self._reducer.stepped)
        if self._clips:
            self.last_norm = math.sqrt(self._squares)
        self._reducer.complete.clear()
        self.reset()

    def reset(self) -> None:
        """Forget what backward passes have stepped: the optimizer has stepped as well, or a checkpoint is loaded."""
        self._stepper.finish(set())
        self._reducer.stepped.clear()
        self.has_stepped, self._squares = False, 0.0

    def check_nothing(self, purpose: str, remedy: str) -> None:
        """Raise if the backward pass has stepped.

        Raises:
            UsageError: It has, and its gradients are freed.
        """
        if self._reducer.complete:
            raise UsageError(
                f"Gemini was asked {purpose} after the backward pass, which has stepped and freed them "
                f"(step_in_backward); {remedy}, or leave step_in_backward out"
            )

    def _current_settings(self) -> list[dict[str, Any]]:
        """Return what steps depend on: of a tensor, which may be on a device, how often it was written."""
        return [
            {
                key: (id(value), value._version) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._stepper.groups
        ]
