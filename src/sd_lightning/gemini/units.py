"""The units of gathering: a network's blocks, and whatever owns the rest of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered before it runs, forward and backward."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_container: bool = False
    """Other units run inside it: it is in use until the backward pass ends."""


def find_units(networks: Mapping[str, nn.Module], blocks: Iterable[nn.Module] | None = None) -> list[Unit]:
    """Divide networks into units that together own all parameters.

    A block is a unit with all that is inside it. Outside of blocks, the largest modules without a block inside are
    units; a module that has blocks inside and parameters of its own is one for the latter.

    Args:
        networks: By the prefix of their parameters' names ("unet"; "" for none).
        blocks: Repeated units; by default the children of every ``nn.ModuleList`` and ``nn.Sequential``.
    """
    if blocks is None:
        blocks = [
            child
            for network in networks.values()
            for module in network.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child in module.children()
        ]
    chosen = set(blocks)
    outer = [unit for prefix, network in networks.items() for unit in _units(prefix, network, chosen)]
    seen: set[nn.Module] = set()
    return [u for u in outer if not (u.module in seen or seen.add(u.module))]  # type: ignore[func-returns-value]


def _units(name: str, module: nn.Module, blocks: set[nn.Module]) -> Iterator[Unit]:
    inside = [child for child in module.modules() if child is not module and child in blocks]
    # Lists and dictionaries of modules are never called, so they cannot be gathered for.
    is_callable = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_callable and (module in blocks or not inside):
        parameters = tuple(module.parameters())
        if parameters:
            yield Unit(name, module, parameters)
        return
    # Lists of parameters are never called either: they are the parent's own.
    lists = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    own = tuple(parameter for owner in (module, *lists) for parameter in owner.parameters(recurse=False))
    if own:
        yield Unit(name, module, own, is_container=True)
    for child_name, child in module.named_children():
        if child in lists:
            continue
        yield from _units(f"{name}.{child_name}" if name else child_name, child, blocks)
