"""16-bit precision that converts only the weights of the trained networks."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from sd_lightning.strategies.base import engine_of


class HalfWeights(HalfPrecision):
    """Precision plugin for ``precision="bf16-true"`` that casts only the trained networks to 16 bits.

    Lightning's plugin also casts the batch and makes 16 bits the default dtype. Latents, noise and timesteps then lose
    more precision than by casting the network's inputs. Here they stay float32 until the network's call.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def precision_options(precision: Any, strategy: Strategy | str) -> dict[str, Any]:
    """Return the arguments of ``Trainer`` that set a precision; engines bring their own plugins."""
    if precision in ("bf16-true", "16-true") and not engine_of(strategy).owns_precision:
        return {"plugins": [HalfWeights(precision)]}
    return {"precision": precision}
