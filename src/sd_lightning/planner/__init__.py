"""Memory and time of training and inference, predicted without a GPU, and the search for the fastest plan that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_lightning.planner.search import plan

__all__ = ["plan"]


def __getattr__(name: str) -> Any:  # strategies import a part of this package, and need not load all of it
    if name != "plan":
        raise AttributeError(f"module 'sd_lightning.planner' has no attribute {name!r}")
    from sd_lightning.planner.search import plan

    return plan
