"""Whole gradients for user code, outside of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.guarded import OUTSIDE

if TYPE_CHECKING:
    from sd_lightning.gemini.engine import GeminiEngine
    from sd_lightning.gemini.optimizer import GeminiOptimizer


class WholeGradients:
    """Gradients averaged over the ranks and added up since the last step, gathered on first touch.

    Args:
        engine: The networks and their chunks.
        close: Writes back all that user code may have written.
    """

    def __init__(self, engine: GeminiEngine, close: Callable[[], None]) -> None:
        self._engine = engine
        self._close = close
        self._whole: dict[int, Tensor] = {}
        """By chunk: whole gradients that user code sees."""
        self._touched: dict[GeminiOptimizer, set[nn.Parameter]] = {}
        """By optimizer: parameters with gradients on any rank."""

    @property
    def is_open(self) -> bool:
        """Whether user code holds any."""
        return bool(self._whole or self._touched)

    def read(self, parameter: nn.Parameter, *, is_asked_to_drop: bool) -> Tensor | None:
        """Return the gradient of a parameter.

        Args:
            parameter: The parameter.
            is_asked_to_drop: Only to be set to None, as Lightning does before each validation.
        """
        optimizer = self._optimizer_of(parameter)
        if optimizer is None or is_asked_to_drop and optimizer.has_stepped:
            return None
        return self._gathered(parameter) if self._has_gradient(parameter, optimizer) else None

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of a parameter."""
        engine, optimizer = self._engine, self._optimizer_of(parameter)
        if value is None:
            if optimizer is not None and not optimizer.has_stepped and self._has_gradient(parameter, optimizer):
                self._close()
                engine.chunk_of[parameter].gradients.forget(parameter)
                engine.runtime.touched.discard(parameter)
                engine.runtime.gradients_version += 1
            return
        if optimizer is None:
            raise UsageError(
                f"Gemini got a gradient of {engine.name_of(parameter)} from outside, and no optimizer steps it; "
                "expected a parameter of an optimizer"
            )
        if not self._has_gradient(parameter, optimizer):
            engine.chunk_of[parameter].gradients.allocate()
            engine.runtime.touched.add(parameter)
            self._touched[optimizer].add(parameter)
        self._gathered(parameter).copy_(value)

    def release(self) -> dict[int, Tensor]:
        """Let go of whole gradients, and return them by chunk."""
        whole, self._whole = self._whole, {}
        self._touched.clear()
        return whole

    def write_back(self, whole: Mapping[int, Tensor]) -> None:
        """Take over this rank's parts of whole gradients."""
        for index, gradients in whole.items():
            accumulated = self._engine.chunks[index].gradients.accumulated
            if accumulated is not None:
                accumulated.tensor.copy_(self._engine.collectives.shard(gradients) * self._scale)
        if whole:
            self._engine.runtime.gradients_version += 1

    def _optimizer_of(self, parameter: nn.Parameter) -> GeminiOptimizer | None:
        if torch._C._current_graph_task_id() != OUTSIDE:
            raise UsageError(
                f"Gemini got {self._engine.name_of(parameter)}.grad inside of a backward pass, where gradients are not "
                "summed yet; use it in on_after_backward or on_before_optimizer_step"
            )
        return next((optimizer for optimizer in self._engine.optimizers if optimizer.owns(parameter)), None)

    def _has_gradient(self, parameter: nn.Parameter, optimizer: GeminiOptimizer) -> bool:
        """Return whether a parameter has a gradient on any rank; a collective call."""
        if optimizer.has_stepped:
            raise UsageError(
                f"Gemini got {self._engine.name_of(parameter)}.grad after {type(optimizer.inner).__name__} has "
                "stepped, which frees the gradients; use it between the backward pass and the step, in "
                "on_after_backward or on_before_optimizer_step"
            )
        if optimizer not in self._touched:
            self._engine.collectives.meet(f"touches {self._engine.name_of(parameter)}.grad")
            self._touched[optimizer] = set(optimizer.touched)
        return parameter in self._touched[optimizer]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        engine, chunk = self._engine, self._engine.chunk_of[parameter]
        if chunk.index not in self._whole:
            engine.collectives.meet(f"touches {engine.name_of(parameter)}.grad")
            chunk.gradients.wait_on_host()
            accumulated = chunk.gradients.accumulated
            assert accumulated is not None
            whole = torch.empty(chunk.layout.numel, dtype=chunk.layout.master_dtype, device=engine.memory.device)
            engine.collectives.shard(whole).copy_(accumulated.tensor)
            engine.collectives.all_gather(whole, chunk.index).wait()
            self._whole[chunk.index] = whole.div_(self._scale)
        return chunk.part_of(parameter, self._whole[chunk.index])

    @property
    def _scale(self) -> float | Tensor:
        """The factor of gradients in chunks, without which they are shown."""
        return 1.0 if self._engine.loss_scale is None else self._engine.loss_scale.used
