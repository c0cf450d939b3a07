"""Imports of optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from sd_lightning._errors import UsageError


def require(module: str, *, extra: str, who: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: Dotted module name, e.g. ``"deepspeed"``.
        extra: The extra of this package that installs it, e.g. ``"deepspeed"``.
        who: The feature that needs it, for the message, e.g. ``"strategy=deepspeed"``.

    Returns:
        The imported module.

    Raises:
        UsageError: The module is not installed, or its import fails.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages such as deepspeed also raise other types on import
        reason = (
            f"package {module.partition('.')[0]!r} is not installed"
            if isinstance(error, ModuleNotFoundError) and error.name is not None and module.startswith(error.name)
            else f"importing {module!r} failed ({type(error).__name__}: {error})"
        )
        raise UsageError(f"{who}: {reason}; install it with: pip install 'sd-lightning[{extra}]'") from error
