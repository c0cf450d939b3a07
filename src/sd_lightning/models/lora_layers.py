"""Layers that get adapters, by their names.

A target is the end of a layer's name, a pattern any part of it between dots; ``*`` is any number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn


def is_adapter(key: str) -> bool:
    """Return whether a name in memory belongs to an adapter's weight."""
    return any(kind in key for kind in (".lora_", ".hada_", ".lokr_"))


def layer_names(network: nn.Module) -> list[str]:
    return [key for key, _ in network.named_modules() if "base_layer" not in key and not is_adapter(key)]


def matching(targets: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return the layers whose names end in one of the targets, as :attr:`Lora.target_modules` has them."""
    endings = tuple(f".{each}" for target in targets for each in expanded(target, layers))
    return {layer for layer in layers if f".{layer}".endswith(endings)}


def expanded(target: str, layers: Iterable[str]) -> list[str]:
    """Return a target with ``*`` as the names of all layers that it stands for; peft knows no such patterns."""
    if "*" not in target:
        return [target]
    pattern = re.compile(rf"(?:.*\.)?{re.escape(target)}".replace(r"\*", r"\d+"))
    return sorted({layer for layer in layers if pattern.fullmatch(layer)})


def longest(patterns: Iterable[str], layer: str) -> str | None:
    """Return the longest of the patterns that a layer's name has; None if it has none of them."""
    return max((pattern for pattern in patterns if _has(pattern, layer)), key=len, default=None)


def _has(pattern: str, layer: str) -> bool:
    if "*" not in pattern:
        return f".{pattern}." in f".{layer}."
    return re.search(rf"\.{re.escape(pattern)}\.".replace(r"\*", r"\d+"), f".{layer}.") is not None


def name_parts(layers: Iterable[str]) -> list[str]:
    """Return the parts of layers' names that are no numbers, for messages."""
    return list(dict.fromkeys(part for layer in layers for part in layer.split(".") if not part.isdecimal()))
