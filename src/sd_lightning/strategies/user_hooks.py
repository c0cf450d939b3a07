"""The hooks in which other people's modules and callbacks touch weights and gradients that an engine holds in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks of a module in which there are gradients."""
_WEIGHT_HOOKS = (
    *(f"on_{stage}_{end}" for stage in ("fit", "train", "train_epoch", "train_batch") for end in ("start", "end")),
    *(f"on_validation_{end}" for end in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")),
    *("on_before_zero_grad", "on_before_backward", "on_save_checkpoint"),
)
_SAFE = ("sd_lightning.", "lightning.", "pytorch_lightning.")
_CHANGING = ".finetuning"
"""Lightning's callbacks that change what is trained."""


def user_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> list[tuple[Any, str]]:
    """Return whose hooks of which name a run calls, without ours and those of Lightning that touch no weights.

    Args:
        trainer: The trainer, whose callbacks count.
        module: The module.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    names = (*_WEIGHT_HOOKS, *GRADIENT_HOOKS)
    found: list[tuple[Any, str]] = [(module, name) for name in names if is_overridden(name, module, pl.LightningModule)]
    for callback in callbacks:
        found += [(callback, name) for name in names[:-1] if is_overridden(name, callback, pl.Callback)]
    return [(owner, name) for owner, name in found if not _knows_engines(getattr(owner, name).__module__)]


def _knows_engines(place: str) -> bool:
    return place.startswith(_SAFE) and not place.endswith(_CHANGING)


class WrappedHooks:
    """Runs the user's hooks of a run inside of a context.

    Args:
        trainer: The trainer.
        module: The module.
        inside: Returns the context for a hook, given its owner and name.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        inside: Callable[[Any, str], AbstractContextManager[Any]],
    ) -> None:
        hooks = user_hooks(trainer, module)
        self._before = [(owner, name, owner.__dict__.get(name)) for owner, name in hooks]
        """What each owner itself had by that name, beside its class: a ``LambdaCallback`` has functions."""
        for owner, name in hooks:
            owner.__dict__[name] = _inside(getattr(owner, name), functools.partial(inside, owner, name))

    def release(self) -> None:
        """Make them the owners' own again."""
        for owner, name, own in self._before:
            owner.__dict__.pop(name, None)
            if own is not None:
                owner.__dict__[name] = own
        self._before = []


def _inside(hook: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @functools.wraps(hook)  # by which Lightning sees what is overridden
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    return call
