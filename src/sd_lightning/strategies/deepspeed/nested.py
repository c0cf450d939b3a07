"""Access to nested dictionaries, such as DeepSpeed's configuration, by dotted paths."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

Config = dict[str, Any]

AUTO = "auto"
"""Value of a key that a configuration leaves to the run."""
ABSENT = object()


def get(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or ``ABSENT``, which equals no value of a file."""
    node: Any = config
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def explicit(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; the default if it is absent or "auto"."""
    value = get(config, path)
    return default if value in (ABSENT, AUTO) else value


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_auto(config: Mapping[str, Any]) -> Config:
    """Return a copy without the values "auto"."""
    return {
        key: without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in config.items()
        if value != AUTO
    }


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """Return the configuration with absent and "auto" values taken from defaults."""
    filled = copy.deepcopy(dict(config))
    for path, value in leaves(defaults):
        if get(filled, path) in (ABSENT, AUTO):
            put(filled, path, value)
    return filled


def put(config: Config, path: str, value: Any) -> None:
    """Set the value at a dotted path, creating the sections on the way."""
    *parents, name = path.split(".")
    for part in parents:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[name] = value


def remove(config: Config, path: str) -> None:
    """Remove the key at a dotted path."""
    *parents, name = path.split(".")
    for part in parents:
        config = config[part]
    del config[name]


def equal(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal; a list equals a tuple of the same items."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)


def text(value: Any) -> str:
    """Return a value as JSON, as in a configuration file."""
    return json.dumps(value, default=str)
