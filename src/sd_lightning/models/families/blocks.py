"""The repeated units of a network: what engines shard, checkpoint and compile, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sd_lightning.models.families import FAMILIES


def repeated_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated units of a network by name, such as resnet blocks, transformer blocks, encoder layers.

    They are of the classes that a family names (:attr:`Family.block_classes`). A network without any of those has
    what its authors declare to be units that stay in one piece (``_no_split_modules``, of diffusers and
    transformers), or the equal members of its module lists.
    """
    known = {name for family in FAMILIES.values() for name in family.block_classes}
    # By the name of any base class: engines wrap a block's class in a subclass of another name.
    return _of_classes(network, known) or _declared(network) or _listed(network)


def _of_classes(network: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    chosen = set(names)
    return {
        name: module
        for name, module in network.named_modules()
        if any(base.__name__ in chosen for base in type(module).__mro__)
    }


def _declared(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of the classes that the network, or a part of it, declares."""
    names: set[str] = set()
    for module in network.modules():
        declared = getattr(type(module), "_no_split_modules", None)
        names.update(declared or ())
    return _outermost({n: m for n, m in _of_classes(network, names).items() if m is not network})


def _listed(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost members of module lists whose members are of one class, and called."""
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


def execution_position(name: str) -> tuple[int, ...]:
    """Return a sort key that brings parts of a UNet, by name, into the order in which they run.

    They are registered in another: up before mid blocks, and attention before the resnets that it follows. Names in
    other networks have one key, so that a stable sort leaves them as they are.
    """
    stages = {"conv_in": 1, "down_blocks": 2, "mid_block": 3, "up_blocks": 4, "conv_norm_out": 5, "conv_out": 6}
    stage, *inner = name.split(".")
    if stage not in ("down_blocks", "mid_block", "up_blocks"):
        return (stages.get(stage, 0),)
    block = 0 if stage == "mid_block" else int(inner.pop(0))
    kinds = ("resnets", "attentions")
    if len(inner) < 2 or inner[0] not in kinds:
        return stages[stage], block, 1000  # the samplers, after all layers
    return stages[stage], block, int(inner[1]), kinds.index(inner[0])
