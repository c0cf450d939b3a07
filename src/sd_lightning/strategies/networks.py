"""What strategies ask of a LightningModule: its networks, its optimizers, and its own hooks.

The members of :class:`TrainingProtocol` are optional; ``docs/modules.md`` explains them. Only this file reads them and
defines their defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.storage.deferred_weights import DeferredWeights


class TrainingProtocol(Protocol):
    """Optional members of a LightningModule that strategies use."""

    keeps_batches: bool
    """Whether no precision converts batches, because the module itself casts its networks' inputs."""

    def trained_networks(self) -> dict[str, nn.Module]:
        """Return the networks to train by prefix of their parameters' names, in execution order.

        The default is the module's children.
        """

    def repeated_blocks(self) -> Mapping[str, nn.Module]:
        """Return the blocks to gather one at a time; see :mod:`sd_lightning.models.families.blocks`."""

    def take_deferred(self, name: str) -> DeferredWeights | None:
        """Return a network's weights that are still in their files, once; None by default."""


def trained_networks(module: pl.LightningModule, later: Collection[Tensor] = ()) -> dict[str, nn.Module]:
    """Return a module's trained networks by prefix of their parameters' names.

    Without ``trained_networks()`` they are its children with trainable parameters. ``ModuleList`` and ``ModuleDict``
    are never called themselves, so the modules in them count instead.

    Args:
        module: The module.
        later: Frozen parameters that count as trainable.
    """
    named: Callable[[], dict[str, nn.Module]] | None = getattr(module, "trained_networks", None)
    return dict(_called("", module, later)) if named is None else named()


def unfrozen_later(trainer: pl.Trainer, module: pl.LightningModule) -> set[Tensor]:
    """Return the frozen parameters that a run may train in the end: an optimizer or Lightning's finetuning has them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        return {parameter for parameter in module.parameters() if not parameter.requires_grad}
    stepped = (p for each in configured_optimizers(module) for group in each.param_groups for p in group["params"])
    return {parameter for parameter in stepped if not parameter.requires_grad}


def sharded_networks(module: pl.LightningModule, who: str, later: Collection[Tensor] = ()) -> dict[str, nn.Module]:
    """Return a module's trained networks for an engine that gathers weights when a network is called.

    Args:
        module: The module.
        who: The strategy's name, for the message.
        later: See :func:`trained_networks`.

    Raises:
        UsageError: A trained parameter is in no network, so nothing would gather it; or no parameter is trained.
    """
    networks = trained_networks(module, later)
    inside = {id(parameter) for network in networks.values() for parameter in network.parameters()}
    # A module with trained_networks() may have other networks, which no optimizer steps.
    named = module.named_parameters(recurse=not hasattr(module, "trained_networks"))
    outside = [n for n, p in named if p.requires_grad and id(p) not in inside]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UsageError(
            f"{who} got {type(module).__name__}.{outside[0]}{more} to train, a parameter of no network, so that no "
            "call says when to gather it; put it into an nn.Module that uses it in its forward, or take strategy=ddp"
        )
    if not inside:
        raise UsageError(f"{who} got {type(module).__name__}, which has no parameters to train; expected some")
    return networks


def refuse_sparse_gradients(module: nn.Module, who: str) -> None:
    """Raise if a trained embedding makes sparse gradients, which engines cannot divide.

    Raises:
        UsageError: It does.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise UsageError(
                f"{who} got {name} with sparse=True, and divides dense gradients only; write sparse=False, or take "
                "strategy=ddp"
            )


def blocks_of(module: pl.LightningModule, networks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the networks' repeated blocks, which engines gather one at a time."""
    named: Callable[[], Mapping[str, nn.Module]] | None = getattr(module, "repeated_blocks", None)
    if named is not None:
        return list(named().values())
    return [block for network in networks.values() for block in repeated_blocks(network).values()]


def take_deferred(module: pl.LightningModule, name: str) -> DeferredWeights | None:
    """Return a trained network's weights that are still in their files, once; the caller reads them."""
    take: Callable[[str], DeferredWeights | None] | None = getattr(module, "take_deferred", None)
    return None if take is None else take(name)


def keeps_batches(module: pl.LightningModule) -> bool:
    """Return whether batches must not be converted to the precision's dtype."""
    return getattr(module, "keeps_batches", False)


def configured_optimizers(module: pl.LightningModule) -> list[Optimizer]:
    """Return a list with the module's optimizer if it configures a single one; Lightning checks other lists."""
    configured: Any = module.configure_optimizers()
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured = configured[0]  # optimizers, schedulers
    if isinstance(configured, Sequence) and len(configured) == 1:
        (configured,) = configured
    optimizer = configured["optimizer"] if isinstance(configured, Mapping) else configured
    return [optimizer] if isinstance(optimizer, Optimizer) else []


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's Adam or AdamW, not a subclass."""
    return type(optimizer) in (Adam, AdamW)


def unsupported_option(optimizer: Optimizer) -> str | None:
    """Return an option that a group sets and only torch's Adam has, or None."""
    options = ("amsgrad", "maximize")
    return next((option for group in optimizer.param_groups for option in options if group.get(option)), None)


def replace_adam(optimizer: Optimizer, kind: Callable[..., Optimizer]) -> Optimizer:
    """Return an Adam of class ``kind`` for the groups of torch's Adam or AdamW, with their hyper-parameters.

    Both optimizers share the groups, so learning-rate schedulers of the old one keep working.
    """
    defaults: dict[str, Any] = optimizer.defaults
    adam = kind(
        optimizer.param_groups,
        lr=float(defaults["lr"]),
        betas=defaults["betas"],
        eps=defaults["eps"],
        weight_decay=defaults["weight_decay"],
        adamw_mode=isinstance(optimizer, AdamW),
    )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns that nobody steps it
    return adam


def place_rest(
    module: pl.LightningModule, networks: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Move everything outside of the networks to a device: frozen parts, metrics, buffers.

    Args:
        module: The module.
        networks: Networks that are not moved.
        device: Target device.
        dtype: Target dtype of floating-point values; None keeps theirs.
    """
    inside = {part for network in networks.values() for part in network.modules()}
    for part in module.modules():
        if part in inside:
            continue
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
                if isinstance(tensor, nn.Parameter):
                    tensor.data = moved
                else:
                    part._buffers[name] = moved
    module._device = device  # Module.to() would move the networks as well


def _called(prefix: str, module: nn.Module, later: Collection[Tensor]) -> list[tuple[str, nn.Module]]:
    """Return the outermost submodules, by name, that are called and have trainable parameters."""
    called = []
    for name, child in module.named_children():
        # ParameterLists are never called: their parameters are the module's own.
        is_trained = any(parameter.requires_grad or parameter in later for parameter in child.parameters())
        if not is_trained or isinstance(child, nn.ParameterList | nn.ParameterDict):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            called += _called(f"{prefix}{name}.", child, later)
        else:
            called.append((prefix + name, child))
    return called


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
    hooks: list[tuple[Any, str]] = [(module, name) for name in names if is_overridden(name, module, pl.LightningModule)]
    for callback in callbacks:
        hooks += [(callback, name) for name in names[:-1] if is_overridden(name, callback, pl.Callback)]
    places = [getattr(owner, name).__module__ for owner, name in hooks]
    return [hook for hook, p in zip(hooks, places, strict=True) if not p.startswith(_SAFE) or p.endswith(_CHANGING)]


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
