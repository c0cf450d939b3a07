"""Lookup of what a ``_target_`` names: the callable and its annotations."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from sd_lightning._errors import UsageError

EXTRA_OF_PACKAGE = {"datasets": "datasets", "deepspeed": "deepspeed", "ray": "ray", "wandb": "loggers"}
"""Optional package that a ``_target_`` may name -> extra of this package that installs it."""


def leaves(node: dict[Any, Any] | list[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree of plain containers with their dotted paths."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        where = join(path, str(key))
        if isinstance(value, dict | list):
            yield from leaves(value, where)
        else:
            yield where, value


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def locate(target: Any, path: str) -> Callable[..., Any]:
    """Import the class or function that a ``_target_`` names.

    Args:
        target: The dotted name.
        path: Path of its node in the configuration, for messages.

    Raises:
        UsageError: There is no such class or function.
    """
    where = f"{join(path, '_target_')}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"{where}: expected a dotted name such as package.module.Class")
    parent, *parts = target.split(".")
    found: Any = _import(parent, where)
    for part in parts:
        if not hasattr(found, part) and isinstance(found, ModuleType) and _exists(f"{parent}.{part}"):
            found = _import(f"{parent}.{part}", where)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            near = difflib.get_close_matches(part, [n for n in dir(found) if n[0] != "_"], n=1)
            remedy = f"; the nearest is {parent}.{near[0]}" if near else ""
            raise UsageError(f"{where}: {parent} has no {part!r}{remedy}")
        parent = f"{parent}.{part}"
    if not callable(found):
        raise UsageError(f"{where}: expected a class or function, got a {type(found).__name__}")
    return typing.cast(Callable[..., Any], found)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _import(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        remedy = f"install it with: pip install 'sd-lightning[{extra}]'" if extra else "install it, or correct the name"
        raise UsageError(f"{where}: package {package!r} is not installed; {remedy}") from error
    except ImportError as error:
        raise UsageError(f"{where}: importing {module} failed: {error}") from error


def type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return a callable's annotations, without those that cannot be evaluated.

    They are evaluated one by one: a single name imported under TYPE_CHECKING makes
    ``typing.get_type_hints`` of the whole function fail.
    """
    function: Any = target
    if inspect.isclass(target):
        function = target.__new__ if target.__init__ is object.__init__ else target.__init__
    function = inspect.unwrap(function)
    names = getattr(function, "__globals__", {})  # builtins have none
    hints: dict[str, Any] = {}
    for key, annotation in getattr(function, "__annotations__", {}).items():
        holder = SimpleNamespace(__annotations__={key: annotation})
        try:
            hints |= typing.get_type_hints(holder, names, include_extras=True)
        except Exception:  # evaluating foreign annotations may raise anything
            continue
    return hints
