"""Weights in 16 bits, without what Lightning's plugin does to everything else."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from sd_lightning.strategies.base import engine_of


class HalfWeights(HalfPrecision):
    """``precision="bf16-true"`` for diffusion: only the trained networks are in 16 bits.

    Lightning's plugin also rounds the batch and makes 16 bits the default type of new tensors. Latents, noise and
    timesteps then lose more bits than the network's inputs have; here they stay float32 until the network takes them.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def precision_options(precision: Any, strategy: Strategy | str) -> dict[str, Any]:
    """Return the arguments of ``Trainer`` that set a precision; engines have plugins of their own."""
    if precision in ("bf16-true", "16-true") and not engine_of(strategy).owns_precision:
        return {"plugins": [HalfWeights(precision)]}
    return {"precision": precision}
