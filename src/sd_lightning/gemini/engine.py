"""The Gemini engine: networks in chunks, and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.accumulation import Accumulation
from sd_lightning.gemini.auto import AutoPlacement
from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.loss_scale import LossScale
from sd_lightning.gemini.networks import Reader
from sd_lightning.gemini.optimizer import GeminiOptimizer
from sd_lightning.gemini.placement import Plan
from sd_lightning.gemini.state import EngineState


class GeminiEngine(ChunkedNetworks):
    """Training of networks whose parameters live in chunks: sharded, gathered when needed, placed on tiers.

    Call networks and ``loss.backward()`` as usual; build optimizers over the parameters afterwards and hand each to
    :meth:`optimizer`. All ranks make the same calls, in the same order. Arguments are those of
    :class:`~sd_lightning.gemini.chunked.ChunkedNetworks`.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        config: GeminiConfig,
        *,
        blocks: Iterable[nn.Module] | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        reader: Reader | None = None,
        order: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(networks, config, blocks=blocks, device=device, group=group, reader=reader, order=order)
        self.loss_scale: LossScale | None = None
        if config.compute_dtype == torch.float16:
            self.loss_scale = LossScale(self.memory.device)
        self.optimizers: list[GeminiOptimizer] = []
        self.access.optimizers, self.access.loss_scale = self.optimizers, self.loss_scale
        self.state = EngineState(self, self.optimizers)
        self.auto = AutoPlacement(self) if config.placement == "auto" else None
        self.accumulation = Accumulation(self, self.auto)

    def optimizer(self, inner: torch.optim.Optimizer) -> GeminiOptimizer:
        """Return an optimizer that steps the chunks with the parameter groups of a torch optimizer.

        Args:
            inner: An elementwise optimizer over parameters of the networks, made after this engine.

        Raises:
            UsageError: The optimizer's update is not elementwise, or another optimizer steps one of its parameters.
        """
        given = [parameter for group in inner.param_groups for parameter in group["params"]]
        if any(optimizer.owns(parameter) for optimizer in self.optimizers for parameter in given):
            raise UsageError(
                f"Gemini got a second optimizer ({type(inner).__name__}) for parameters that another one steps; call "
                "drop_optimizers() before a new stage, or give each parameter to one of them"
            )
        if self.auto is not None:
            self.auto.make_room()
        optimizer = GeminiOptimizer(inner, self, self.accumulation, self.loss_scale)
        self.optimizers.append(optimizer)
        return optimizer

    def drop_optimizers(self) -> None:
        """Drop all optimizers, their states and gradients, for example before a new fit."""
        self.abort()
        self.optimizers.clear()
        for chunk in self.chunks:
            chunk.free_states()
        self.memory.release_unused()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss for backward: multiplied by the loss scale in float16, unchanged otherwise."""
        return loss if self.loss_scale is None else self.loss_scale.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss, scaled in float16, and reduce the gradients."""
        self.scale_loss(loss).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Mark the backward passes of all micro-batches of a step but the last; a collective call.

        With ``reduce_once``, gradients are kept whole in float32, and reduced by the next pass outside of ``no_sync``.
        Without it, each pass reduces them and only this rank's shard is kept.
        """
        return self.runtime.reducer.keeping_gradients(self.accumulation.keeps_gradients())

    @override
    def move(self, plan: Plan) -> None:
        if plan != self.plan:
            self.accumulation.make_room(plan)
        super().move(plan)
