"""The precision plugin of DeepSpeed's engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision as LightningDeepSpeedPrecision
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.networks import EnginePrecision


class DeepSpeedPrecision(EnginePrecision, LightningDeepSpeedPrecision):
    """Lightning's plugin with support of ``keeps_batches``, and with the engine's step left to the strategy."""

    _is_by_hand = _has_gradients = False

    @override
    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        self._is_by_hand = not model.automatic_optimization
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Create new tensors in the weights' dtype: the engine uses it for "-mixed", too, without autocast."""
        if self._keeps_batches or self._desired_dtype == torch.float32:
            return nullcontext()
        half = HalfPrecision("bf16-true" if self._desired_dtype == torch.bfloat16 else "16-true")
        return half.tensor_init_context()

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Call the pre-step hooks once per optimizer step: with accumulation, the engine steps for every batch."""
        engine: Any = model.trainer.model
        if engine.is_gradient_accumulation_boundary():
            super()._after_closure(model, optimizer)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Let the engine compute gradients; Lightning has divided the loss by the number of accumulated batches.

        Raises:
            UsageError: Gradients are accumulated by hand where the engine loses those of the first pass.
        """
        strategy: Any = model.trainer.strategy
        if self._is_by_hand and self._has_gradients and not strategy.zero_stage_3:
            raise UsageError(
                "a second manual_backward before optimizer.step(): DeepSpeed at stages 1 and 2 keeps gradients of one "
                "pass; add the losses up, let trainer.accumulate_grad_batches accumulate, or take strategy=fsdp or ddp"
            )
        self._has_gradients = True
        super().backward(tensor, model, optimizer, *args, **({"scale_wrt_gas": False} | kwargs))

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Leave it to the engine, if that has been told to clip.

        Raises:
            UsageError: A module that optimizes by hand clips, which would have no effect.
        """
        if self._is_by_hand:
            raise UsageError(
                "clip_gradients has no effect under DeepSpeed in manual optimization; give DeepSpeed's configuration "
                '"gradient_clipping", or take strategy=fsdp, gemini or ddp'
            )

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result, self._has_gradients = closure(), False
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise UsageError("training_step returned None: DeepSpeed cannot skip a backward pass; return a loss")
        strategy: Any = model.trainer.strategy  # the one that this plugin belongs to
        return strategy.engine_step(**kwargs)
