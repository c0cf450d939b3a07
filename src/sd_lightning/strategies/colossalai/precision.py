"""The precision plugin of ColossalAI's engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.host import host_step
from sd_lightning.strategies.colossalai.engine import ColossalAIEngine
from sd_lightning.strategies.colossalai.settings import OURS, WHO


class ColossalAIPrecision(Precision):
    """Precision plugin: the engine gathers weights around every step, computes gradients, and steps.

    Args:
        precision: "bf16-mixed" or "16-mixed".
    """

    engine: ColossalAIEngine

    def __init__(self, precision: Any) -> None:
        self.precision = precision

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        self.engine = model.trainer.strategy.engine
        return model, optimizers, lr_schedulers

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator's there
        return self.engine.training()

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        return self.engine.evaluating()

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.engine.backward(tensor)

    @override
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clips while it steps."""

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if result is None:
            raise UsageError(f"training_step returned None: {WHO} cannot skip a backward pass; return a loss, {OURS}")
        with host_step():
            self.engine.step()
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.engine.scaler_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.load_scaler_state(state_dict)
