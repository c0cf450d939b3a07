"""Validate a configuration tree against the signatures of what it will build.

Runs before anything is built, so that a wrong key or type costs seconds, not a started run.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from sd_lightning._conf.annotations import MISSING, as_override, describe, example, fits
from sd_lightning._conf.other_names import VALUES
from sd_lightning._errors import UsageError

SPECIAL_KEYS = frozenset({"_target_", "_partial_", "_convert_", "_recursive_", "_args_"})
EXTRA_OF_PACKAGE = {
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "ray": "ray",
    "wandb": "loggers",
}
"""Which extra of this package installs an optional package that a ``_target_`` may name."""


@dataclass(frozen=True)
class _Walk:
    """What stays the same while the tree is walked."""

    given: Mapping[str, set[str]] = field(default_factory=dict)
    """By path of a node: the arguments that the entry point itself passes to its target."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """By path of a value: an annotation that the entry point adds, or that goes before its target's."""
    default_at: Callable[[str], Any] = lambda path: None
    """The value that the default configuration has at a path, or None."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """By path: the values before resolving, which tell where an interpolated value is set."""


def check(
    node: Any,
    path: str = "",
    *,
    given: Mapping[str, set[str]] | None = None,
    hints: Mapping[str, Any] | None = None,
    default_at: Callable[[str], Any] | None = None,
) -> None:
    """Check every ``_target_`` node of a tree: it exists, and its arguments are right.

    Args:
        node: A DictConfig, ListConfig or plain container.
        path: Dotted path of ``node``, for the messages.
        given: By path of a node, the arguments its target receives from the entry point and
            that the configuration therefore must not hold, e.g. ``{"trainer": {"callbacks"}}``.
        hints: By path of a value, an annotation: of values that belong to no target, or narrower
            than the target's, e.g. ``{"overwrite": bool}``.
        default_at: Gives the default configuration's value at a path, used as the example in
            a message.

    Raises:
        UsageError: At the first missing value (``???``), target that cannot be imported,
            unknown or missing argument, or value of a wrong type.
        OmegaConfBaseException: At a broken interpolation; ``main`` words it for the user.
    """
    written = _plain(node, resolve=False)
    walk = _Walk(given or {}, hints or {}, default_at or (lambda path: None), dict(_leaves(written, path)))
    resolved = _plain(node, resolve=True)
    _check_node(resolved, path, walk, lenient=False)
    _check_finite(resolved, path, walk)


def nearest_argument(node: Any, key: str) -> str | None:
    """Return the argument of a node's target that a key most likely means, if there is one."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        return None
    try:
        names = list(inspect.signature(_locate(node["_target_"], "")).parameters)
    except (TypeError, ValueError):  # a UsageError is one, too
        return None
    return next(iter(difflib.get_close_matches(key, names, n=1)), None)


def _plain(node: Any, *, resolve: bool) -> Any:
    """Turn a config node into plain containers; ``???`` stays as it is."""
    if isinstance(node, dict | list | tuple | str | int | float | bool) or node is None:
        return node
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=resolve) if OmegaConf.is_config(node) else node


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        where = _join(path, str(key))
        if isinstance(value, dict | list):
            yield from _leaves(value, where)
        else:
            yield where, value


def _check_node(node: Any, path: str, walk: _Walk, lenient: bool) -> None:
    """Check a node and what is below it; ``lenient`` where arguments may still be added."""
    if isinstance(node, list | tuple):
        for position, each in enumerate(node):
            _check_node(each, _join(path, str(position)), walk, lenient)
    elif isinstance(node, dict) and "_target_" in node:
        _check_target(node, path, walk, lenient or bool(node.get("_partial_", False)))
        lenient = lenient or node.get("_recursive_", True) is False
        _check_values(node, path, walk, lenient)
    elif isinstance(node, dict):
        _check_values(node, path, walk, lenient)


def _check_values(node: dict[Any, Any], path: str, walk: _Walk, lenient: bool) -> None:
    may_miss = lenient or bool(node.get("_partial_", False))
    for key, value in node.items():
        where = _join(path, str(key))
        if value == MISSING and isinstance(value, str):
            if may_miss or key in walk.given.get(path, ()):
                continue
            raise UsageError(f"{where} has no value and no default; give one: {where}=<value>")
        if where in walk.hints:
            _check_type(where, value, walk.hints[where], MISSING, walk)
        _check_node(value, where, walk, lenient)


def _check_target(node: dict[str, Any], path: str, walk: _Walk, is_partial: bool) -> None:
    if node["_target_"] == MISSING:
        where = _join(path, "_target_")
        raise UsageError(f"{where} has no value and no default; choose what to build there")
    target = _locate(node["_target_"], path)
    name = str(node["_target_"]).rpartition(".")[2]
    try:
        parameters = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # some builtins publish no signature
        return
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {
        key: each for key, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    arguments = {key: value for key, value in node.items() if key not in SPECIAL_KEYS}
    if not open_ended:
        for key in arguments:
            if key not in named:
                raise UsageError(_unknown_argument(path, name, str(key), list(named), arguments[key], walk))
    for key in walk.given.get(path, set()) & set(arguments):
        if arguments[key] != MISSING:
            raise UsageError(
                f"{_join(path, key)}={as_override(arguments[key])}: the program sets this argument of {name} itself; "
                f"leave it out{f', and choose with {key}=<option>' if walk.default_at(key) is not None else ''}"
            )
    if not is_partial:
        received = set(arguments) | set(walk.given.get(path, ()))
        received |= set(list(named)[: len(node.get("_args_") or ())])
        _check_required(path, name, named, received)
    hints = _type_hints(target)
    for key, value in arguments.items():
        if key in hints and key in named and value != MISSING and _join(path, key) not in walk.hints:
            _check_type(_join(path, key), value, hints[key], named[key].default, walk)


def _check_required(path: str, name: str, named: Mapping[str, inspect.Parameter], received: set[str]) -> None:
    lacking = [key for key, each in named.items() if each.default is inspect.Parameter.empty and key not in received]
    if lacking:
        raise UsageError(
            f"{path or name}: {name} needs {', '.join(lacking)}; "
            f"give {'them' if len(lacking) > 1 else 'it'}: "
            + " ".join(f"+{_join(path, key)}=<value>" for key in lacking)
        )


def _check_finite(node: Any, path: str, walk: _Walk) -> None:
    """Refuse NaN and infinity: torch accepts them nearly everywhere, and the run would train to no avail."""
    for where, value in _leaves(node, path):
        if isinstance(value, float) and not math.isfinite(value):
            place = _written_at(where, walk)
            default = walk.default_at(place)
            remedy = f"; write {place}={as_override(default)}" if default not in (None, MISSING) else ""
            raise UsageError(f"{place}={value}: expected a finite number{remedy}")


def _written_at(where: str, walk: _Walk) -> str:
    """Return the path at which a value is set: another one where it is interpolated."""
    source = re.fullmatch(r"\$\{([\w.]+)\}", str(walk.written.get(where)))
    return source[1] if source else where


def _check_type(where: str, value: Any, hint: Any, default: Any, walk: _Walk) -> None:
    if fits(value, hint) or (value is None and default is None):
        return
    place = _written_at(where, walk)
    user = f" (as {where})" if place != where else ""
    ours = VALUES.get(place, {}).get(str(value))
    instead = example(hint, value, [walk.default_at(place), default])
    setting = f"{place}={ours or as_override(instead)}"
    setting = f"'{setting}'" if "$" in setting else setting  # or the shell would put its own variable there
    remedy = "" if instead == MISSING else f"; write {setting}"
    raise UsageError(f"{place}={as_override(value)}: expected {describe(hint)}{user}{remedy}")


def _unknown_argument(path: str, name: str, key: str, known: list[str], value: Any, walk: _Walk) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"it takes {', '.join(known) or 'none'}; leave it out"
    if near:
        where = _join(path, near[0])
        section = walk.default_at(path)
        addition = "" if isinstance(section, dict) and near[0] in section else "+"
        remedy = f"the nearest is {where}: write {addition}{where}={as_override(value)}"
    return f"{_join(path, key)}: {name} has no argument {key!r}; {remedy}"


def _type_hints(target: Any) -> dict[str, Any]:
    """Read a callable's annotations, without those that cannot be evaluated.

    They are evaluated one by one: a single name imported under TYPE_CHECKING makes
    ``typing.get_type_hints`` of the whole function fail.
    """
    function = target.__init__ if inspect.isclass(target) else target
    if inspect.isclass(target) and function is object.__init__:
        function = target.__new__
    function = inspect.unwrap(function)
    names = getattr(function, "__globals__", {})
    hints: dict[str, Any] = {}
    for key, annotation in getattr(function, "__annotations__", {}).items():
        holder = SimpleNamespace(__annotations__={key: annotation})
        try:
            hints |= typing.get_type_hints(holder, names, include_extras=True)
        except Exception:  # evaluating foreign annotations may raise anything
            continue
    return hints


def _locate(target: Any, path: str) -> Callable[..., Any]:
    """Import what a ``_target_`` names."""
    where = f"{_join(path, '_target_')}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"{where}: expected a dotted name such as package.module.Class")
    parts = target.split(".")
    found: Any = _import(parts[0], where)
    for count in range(1, len(parts)):
        parent, part = ".".join(parts[:count]), parts[count]
        if not hasattr(found, part) and isinstance(found, ModuleType) and _exists(parent, part):
            found = _import(f"{parent}.{part}", where)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            near = difflib.get_close_matches(part, [n for n in dir(found) if n[0] != "_"], n=1)
            remedy = f"; the nearest is {parent}.{near[0]}" if near else ""
            raise UsageError(f"{where}: {parent} has no {part!r}{remedy}")
    if not callable(found):
        raise UsageError(f"{where}: expected a class or function, got a {type(found).__name__}")
    return typing.cast(Callable[..., Any], found)


def _exists(parent: str, part: str) -> bool:
    try:
        return importlib.util.find_spec(f"{parent}.{part}") is not None
    except (ImportError, ValueError):
        return False


def _import(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        remedy = f"install it with: pip install 'sd-lightning[{extra}]'" if extra else "install it, or correct the name"
        raise UsageError(f"{where}: package {package!r} is not installed; {remedy}") from error
    except ImportError as error:
        raise UsageError(f"{where}: importing {module} failed: {error}") from error


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
