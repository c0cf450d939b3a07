"""Train latent-diffusion models (Stable Diffusion, Flux, Z-Image, Qwen-Image, Krea 2) with PyTorch Lightning.

Names are imported on first use, so ``import sd_lightning`` is fast. Our strategies are registered with Lightning as
soon as both packages are imported, in either order.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_lightning._errors import UsageError
    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.strategies.auto import AutoStrategy
    from sd_lightning.training.module import SDLightningModule

    __version__: str

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
    if name == "__version__":
        from importlib.metadata import version

        return version("sd-lightning")
    if name not in _MODULES:
        raise AttributeError(f"module 'sd_lightning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sd_lightning.{_MODULES[name]}"), name)


class _LightningHook(MetaPathFinder):
    """Registers the names of our strategies at the end of the first ``import lightning.pytorch``.

    Lightning has no entry point for strategies, and importing it here would cost every user seconds.
    """

    name = "lightning.pytorch"

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the others find it
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register_strategies()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_strategies() -> None:
    from sd_lightning.strategies import presets

    presets.register_strategies()


if _LightningHook.name in sys.modules:
    _register_strategies()
else:
    sys.meta_path.insert(0, _LightningHook())
