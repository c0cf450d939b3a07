"""Train latent-diffusion models (Stable Diffusion 1.x, 2.x, XL) with PyTorch Lightning.

Names are imported on first use, so ``import sd_lightning`` is fast. Our strategies are registered with Lightning on
import if Lightning is already imported, otherwise when :class:`SDLightningModule` is first used from here.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_lightning._errors import UsageError
    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.strategies.auto import AutoStrategy
    from sd_lightning.training.module import SDLightningModule

__all__ = [
    "AutoStrategy",
    "LatentDiffusion",
    "Objective",
    "SDDataModule",
    "SDLightningModule",
    "SamplingOptions",
    "UsageError",
]

_MODULES = {
    "AutoStrategy": "strategies.auto",
    "LatentDiffusion": "models.latent_diffusion",
    "Objective": "diffusion.objective",
    "SDDataModule": "data.datamodule",
    "SDLightningModule": "training.module",
    "SamplingOptions": "models.generation",
    "UsageError": "_errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sd_lightning' has no attribute {name!r}")
    if name == "SDLightningModule":  # training imports Lightning anyway
        register_strategies()
    return getattr(importlib.import_module(f"sd_lightning.{_MODULES[name]}"), name)


def register_strategies() -> None:
    """Tell Lightning and the planner which strategies there are."""
    from sd_lightning.strategies import candidates, registry

    registry.register_strategies()
    candidates.register_candidates()


if "lightning.pytorch" in sys.modules:
    register_strategies()
