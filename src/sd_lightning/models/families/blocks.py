"""The repeated blocks of a network, which engines shard, checkpoint and compile, and their execution order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import FAMILIES


def repeated_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a network by name: resnet blocks, transformer blocks, encoder layers, …

    Blocks are the modules of the families' :attr:`Family.block_classes`. If a network has none, they are the modules
    in ``_no_split_modules`` (diffusers, transformers), or else the members of module lists with a single class.
    """
    known = {name for family in FAMILIES.values() for name in family.block_classes}
    # Compare the names of all base classes: engines replace a block's class by a subclass of another name.
    return _of_classes(network, known) or _declared(network) or _listed(network)


def blocks_of(networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the repeated blocks of several networks: "unet.mid_block.resnets.0", …"""
    return {f"{prefix}.{n}": block for prefix, each in networks.items() for n, block in repeated_blocks(each).items()}


def recomputable(networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that may be recomputed alone, by name: blocks, or the layers of blocks with several alike.

    The transformers of Stable Diffusion XL have up to ten layers; recomputed one at a time, they need less memory.
    """
    found: dict[str, nn.Module] = {}
    for name, block in blocks_of(networks).items():
        layers = {f"{name}.{key}": layer for key, layer in _listed(block).items()}
        found |= layers or {name: block}
    return found


def _of_classes(network: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in network.named_modules()
        if any(base.__name__ in names for base in type(module).__mro__)
    }


def _declared(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of the classes in ``_no_split_modules`` of the network or its submodules."""
    names = {name for module in network.modules() for name in getattr(type(module), "_no_split_modules", None) or ()}
    return _outermost({n: m for n, m in _of_classes(network, names).items() if m is not network})


def _listed(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost members of module lists with several members of one class, except nested containers."""
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        members = list(module.children())
        if not isinstance(module, nn.ModuleList) or len({type(member) for member in members}) != 1:
            continue
        if len(members) > 1 and not isinstance(members[0], nn.ModuleList | nn.ModuleDict):
            found |= {f"{name}.{key}" if name else key: member for key, member in module.named_children()}
    return _outermost({name: module for name, module in found.items() if any(True for _ in module.parameters())})


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules.items()
        if not any(name.startswith(other + ".") for other in modules if other != name)
    }


def enable_gradient_checkpointing(network: Any) -> None:
    """Recompute the activations of every block of a network in backward."""
    if hasattr(network, "enable_gradient_checkpointing"):  # diffusers
        network.enable_gradient_checkpointing()
    elif hasattr(network, "gradient_checkpointing_enable"):  # transformers
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        raise UsageError(
            f"gradient_checkpointing=true: {type(network).__name__} has no blocks that can be checkpointed; "
            "set gradient_checkpointing=false"
        )


def execution_position(name: str) -> tuple[int, ...]:
    """Return a key that sorts module names of a UNet by execution order.

    The order of registration differs: up blocks come before the mid block, and attentions before the resnets that
    they follow. All names in other networks get the same key, so a stable sort keeps their order.
    """
    stages = {"conv_in": 1, "down_blocks": 2, "mid_block": 3, "up_blocks": 4, "conv_norm_out": 5, "conv_out": 6}
    stage, *inner = name.split(".")
    if stage not in ("down_blocks", "mid_block", "up_blocks"):
        return (stages.get(stage, 0),)
    block = 0 if stage == "mid_block" else int(inner.pop(0))
    kinds = ("resnets", "attentions")
    if len(inner) < 2 or inner[0] not in kinds:
        return stages[stage], block, 1000  # down- and upsamplers run after all layers
    return stages[stage], block, int(inner[1]), kinds.index(inner[0])
