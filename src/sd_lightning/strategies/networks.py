"""What strategies ask of a LightningModule.

The members of :class:`TrainingProtocol` are optional; ``docs/modules.md`` explains them. Only this file reads them, and
it holds the default of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.storage.deferred_weights import DeferredWeights


class TrainingProtocol(Protocol):
    """Members by which a LightningModule may direct strategies; each is optional."""

    keeps_batches: bool
    """Whether batches stay as they are under every precision: the module itself casts what its networks take."""

    def trained_networks(self) -> dict[str, nn.Module]:
        """Return the networks to train, by the prefix of their parameters' names, in the order in which they run.

        The default is the module's children.
        """
        ...

    def repeated_blocks(self) -> Mapping[str, nn.Module]:
        """Return the units to gather one after the other; see :mod:`sd_lightning.models.families.blocks`."""
        ...

    def take_deferred(self, name: str) -> DeferredWeights | None:
        """Return the weights of a network that are still in their files, once; by default they are in memory."""
        ...


def trained_networks(module: pl.LightningModule) -> dict[str, nn.Module]:
    """Return the networks of a module that are trained, by the prefix of their parameters' names.

    Without ``trained_networks()`` they are its children with trainable parameters; of lists and dictionaries of
    modules, which are never called themselves, the modules in them.
    """
    named: Callable[[], dict[str, nn.Module]] | None = getattr(module, "trained_networks", None)
    return dict(_called("", module)) if named is None else named()


def sharded_networks(module: pl.LightningModule, who: str) -> dict[str, nn.Module]:
    """Return the networks of a module for an engine that gathers weights when a network is called.

    Args:
        module: The module.
        who: The strategy, for the message.

    Raises:
        UsageError: Trained parameters are in none of them, and nothing would gather them.
    """
    networks = trained_networks(module)
    inside = {id(parameter) for network in networks.values() for parameter in network.parameters()}
    # A module that names its networks may have others, which no optimizer steps.
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


def blocks_of(module: pl.LightningModule, networks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the repeated units of networks: what engines gather one after the other."""
    named: Callable[[], Mapping[str, nn.Module]] | None = getattr(module, "repeated_blocks", None)
    if named is not None:
        return list(named().values())
    return [block for network in networks.values() for block in repeated_blocks(network).values()]


def take_deferred(module: pl.LightningModule, name: str) -> DeferredWeights | None:
    """Return the weights of a trained network that are still in their files, once: the caller reads them."""
    take: Callable[[str], DeferredWeights | None] | None = getattr(module, "take_deferred", None)
    return None if take is None else take(name)


def keeps_batches(module: pl.LightningModule) -> bool:
    """Return whether batches are not to be converted to the precision's type."""
    return getattr(module, "keeps_batches", False)


def configured_optimizers(module: pl.LightningModule) -> list[Optimizer]:
    """Return the optimizer that a module configures, if it is one alone: lists and tuples are Lightning's to check."""
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, Mapping) else configured
    return [optimizer] if isinstance(optimizer, Optimizer) else []


def is_quantised(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes, which is imported only where it is used."""
    return hasattr(optimizer, "init_state")


def place_rest(
    module: pl.LightningModule, networks: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Bring what is in none of the networks to a device: frozen parts, metrics, buffers.

    Args:
        module: The module.
        networks: Stay where they are.
        device: Where the rest goes.
        dtype: What floating-point values are converted to; None leaves them.
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


def _called(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules below one that are called and have trainable parameters."""
    found = []
    for name, child in module.named_children():
        # Lists of parameters are never called: they are the module's own.
        is_trained = any(parameter.requires_grad for parameter in child.parameters())
        if not is_trained or isinstance(child, nn.ParameterList | nn.ParameterDict):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _called(f"{prefix}{name}.", child)
        else:
            found.append((prefix + name, child))
    return found
