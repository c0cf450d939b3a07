"""The common base of the engines' precision plugins."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from sd_lightning.strategies.networks import keeps_batches


class EnginePrecision(Precision):
    """Mixin of precision plugins: if a module has ``keeps_batches``, only its networks are converted."""

    _keeps_batches = False

    @override
    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        self._keeps_batches = keeps_batches(model)
        return model, optimizers, lr_schedulers

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self._keeps_batches else super().convert_input(data)
