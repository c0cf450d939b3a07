"""The precision plugin of Gemini: its engine casts, scales and clips."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiEngine, GeminiOptimizer
from sd_lightning.strategies.networks import EnginePrecision

log = logging.getLogger(__name__)

COMPUTE_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}


class GeminiPrecision(EnginePrecision):
    """Precision plugin that gathers weights in the compute dtype; master weights are as ``GeminiConfig.master`` says.

    ``bf16-mixed`` and ``16-mixed`` run under autocast, so that norms and the softmax compute in float32. ``bf16-true``
    computes in bfloat16 throughout. As in Lightning, it converts batches and creates new tensors in bfloat16, unless
    the module has ``keeps_batches``. With float16, the engine scales the loss.

    Args:
        precision: Lightning's name of the precision.
        engine: Returns the engine, once it exists.

    Raises:
        UsageError: The engine does not support the precision.
    """

    def __init__(self, precision: str, engine: Callable[[], GeminiEngine]) -> None:
        if precision not in COMPUTE_DTYPES:
            raise UsageError(
                f"GeminiStrategy got precision={precision}; expected one of {', '.join(COMPUTE_DTYPES)}: the "
                "optimizer's weights are always float32"
            )
        self.precision = precision  # type: ignore[assignment]
        self.compute_dtype = COMPUTE_DTYPES[precision]
        self._engine = engine
        self._half = HalfPrecision("bf16-true")

    @override
    def convert_input(self, data: Any) -> Any:
        return self._half.convert_input(data) if self._is_half else data

    @property
    def _is_half(self) -> bool:
        return self.precision == "bf16-true" and not self._keeps_batches

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self._is_half:
            return self._half.forward_context()
        if not self.precision.endswith("-mixed"):
            return nullcontext()
        return torch.autocast(self._engine().memory.device.type, dtype=self.compute_dtype)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not self._engine().skips_backward(tensor):
            model.backward(self._engine().scale_loss(tensor), *args, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        engine_optimizer(optimizer).clip_grad_norm_(clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        engine_optimizer(optimizer).clip_grad_value_(clip_val)

    @override
    def state_dict(self) -> dict[str, Any]:
        scale = self._engine().loss_scale
        norms = [each.early.last_norm for each in self._engine().optimizers if each.early.max_norm]
        scales = {} if scale is None else {"loss_scale": scale.state_dict()}
        rounded = {} if self._rounding_seed is None else {"rounding_seed": self._rounding_seed}
        return scales | rounded | ({"last_norm": norms[0]} if norms else {})

    @property
    def _rounding_seed(self) -> int | None:
        config = self._engine().config
        return config.rounding_seed if config.master == "bfloat16" else None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scale = self._engine().loss_scale
        if scale is not None and "loss_scale" in state_dict:
            scale.load_state_dict(state_dict["loss_scale"])
        for optimizer in self._engine().optimizers:
            optimizer.early.last_norm = state_dict.get("last_norm", 0.0)
        seeds = state_dict.get("rounding_seed"), self._rounding_seed
        if seeds[0] != seeds[1]:
            before, now = (
                "no rounded weights" if seed is None else f"master=bfloat16 rounding_seed={seed}" for seed in seeds
            )
            log.warning("the checkpoint was trained with %s, and this run has %s: not the same bits", before, now)


def engine_optimizer(optimizer: Optimizer) -> GeminiOptimizer:
    """Return the engine's optimizer inside of Lightning's wrapper."""
    wrapper = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    assert isinstance(wrapper, GeminiOptimizer)
    return wrapper
