"""The precision plugin of DeepSpeed's engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision as LightningDeepSpeedPrecision
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.engine_precision import EnginePrecision


class DeepSpeedPrecision(EnginePrecision, LightningDeepSpeedPrecision):
    """Lightning's plugin with support of ``keeps_batches``, and with the engine's step left to the strategy."""

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
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise UsageError("training_step returned None: DeepSpeed cannot skip a backward pass; return a loss")
        strategy: Any = model.trainer.strategy  # the one that this plugin belongs to
        return strategy.engine_step(**kwargs)
