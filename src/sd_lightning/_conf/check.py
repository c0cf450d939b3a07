"""Validation of a configuration tree against the signatures of its targets.

It runs before anything is built, so that a wrong key or type costs seconds, not a started run.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sd_lightning._conf.annotations import MISSING, as_override, describe, example, fits, our_value
from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

SPECIAL_KEYS = frozenset({"_target_", "_partial_", "_convert_", "_recursive_", "_args_"})
EXTRA_OF_PACKAGE = {"datasets": "datasets", "deepspeed": "deepspeed", "ray": "ray", "wandb": "loggers"}
"""Optional package that a ``_target_`` may name -> extra of this package that installs it."""


def check(
    node: Any,
    path: str = "",
    *,
    reserved: Mapping[str, set[str]] | None = None,
    hints: Mapping[str, Any] | None = None,
    default_at: Callable[[str], Any] = lambda path: None,
) -> None:
    """Check that every ``_target_`` of a tree exists, and that its arguments fit.

    Args:
        node: A DictConfig, ListConfig or plain container.
        path: Dotted path of ``node``, for the messages.
        reserved: Path of a node -> arguments that the program passes and the configuration must not set, e.g.
            ``{"trainer": {"callbacks"}}``.
        hints: Path of a value -> annotation, for values without a target or with a narrower type than the target's,
            e.g. ``{"overwrite": bool}``.
        default_at: Returns the default configuration's value at a path, for the example in a message.

    Raises:
        UsageError: At the first broken interpolation, missing value (``???``), target that cannot be imported, unknown
            or missing argument, or value of a wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    written: Any = node
    resolved: Any = node
    if OmegaConf.is_config(node):
        written = OmegaConf.to_container(node, resolve=False)
        try:
            resolved = OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            raise UsageError(_unresolved(error, dict(leaves(written, path)), default_at)) from error
    checker = _Checker(reserved or {}, hints or {}, default_at, dict(leaves(written, path)))
    checker.check_node(resolved, path)
    checker.check_finite(resolved, path)


def nearest_argument(node: Any, key: str) -> str | None:
    """Return the argument of a node's target that a key most likely means, if there is one."""
    if not isinstance(node, dict) or "_target_" not in node:
        return None
    try:
        names = list(inspect.signature(locate(node["_target_"], "")).parameters)
    except (TypeError, ValueError):  # UsageError is a ValueError
        return None
    return next(iter(difflib.get_close_matches(key, names, n=1)), None)


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
    from hydra._internal.utils import _locate

    where = f"{join(path, '_target_')}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"{where}: expected a dotted name such as package.module.Class")
    try:
        located = _locate(target)
    except ImportError as error:
        raise UsageError(f"{where}: {_import_problem(target, error.__cause__ or error)}") from error
    if not callable(located):
        raise UsageError(f"{where}: expected a class or function, got a {type(located).__name__}")
    return typing.cast(Callable[..., Any], located)


def _import_problem(target: str, error: BaseException) -> str:
    """Say why a target cannot be imported: it is misspelled, or a package is missing or broken."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        parent, _, name = error.name.rpartition(".")
        if parent and f"{target}.".startswith(f"{error.name}."):
            near = difflib.get_close_matches(name, [n for n in dir(sys.modules[parent]) if n[0] != "_"], n=1)
            return f"{parent} has no {name!r}" + (f"; the nearest is {parent}.{near[0]}" if near else "")
        package = error.name.partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        remedy = f"install it with: pip install 'sd-lightning[{extra}]'" if extra else "install it, or correct the name"
        return f"package {package!r} is not installed; {remedy}"
    return f"importing it failed: {error}"


def _unresolved(error: OmegaConfBaseException, written: Mapping[str, Any], default_at: Callable[[str], Any]) -> str:
    """Say why an interpolation has no value: its source has none, was taken out, or does not exist."""
    reason = str(error).splitlines()[0]
    missing = re.search(r"Missing mandatory value: (\S+)", reason)
    if missing:
        return _no_value(missing[1])
    key = re.sub(r"\[(\w+)\]", r".\1", str(error.full_key))  # of an element of a list
    absent = re.search(r"Interpolation key '(.+?)' not found", reason)
    remedy = f"give {key}=<value>"
    if absent and default_at(absent[1]) is not None:
        remedy = f"do not take {absent[1]} out: give {absent[1]}=<value>, or {key}=<value> too"
    return f"{key}={written.get(key)}: {reason}; {remedy}"


def _no_value(key: str) -> str:
    return f"{key} has no value and no default; give one: {key}=<value>"


@dataclass(frozen=True)
class _Checker:
    """The arguments of :func:`check`, and the unresolved values, which show where a value is set."""

    reserved: Mapping[str, set[str]]
    hints: Mapping[str, Any]
    default_at: Callable[[str], Any]
    written: Mapping[str, Any]

    def check_node(self, node: Any, path: str) -> None:
        """Check a node and its children."""
        if isinstance(node, list | tuple):
            for position, each in enumerate(node):
                self.check_node(each, join(path, str(position)))
        if not isinstance(node, dict):
            return
        if "_target_" in node:
            self._check_target(node, path)
        for key, value in node.items():
            where = join(path, str(key))
            if value != MISSING:
                if where in self.hints:
                    self._check_type(where, value, self.hints[where], MISSING)
                self.check_node(value, where)
            elif not (node.get("_partial_") or key in self.reserved.get(path, ())):
                raise UsageError(_no_value(where))

    def _check_target(self, node: dict[str, Any], path: str) -> None:
        target = locate(node["_target_"], path)
        name = str(node["_target_"]).rpartition(".")[2]
        try:
            parameters = inspect.signature(target).parameters
        except (TypeError, ValueError):  # some builtins publish no signature
            return
        named = {
            k: each for k, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        arguments = {key: value for key, value in node.items() if key not in SPECIAL_KEYS}
        unknown = [key for key in arguments if key not in named]
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            raise UsageError(self._unknown_argument(path, name, unknown[0], list(named), arguments[unknown[0]]))
        passed = self.reserved.get(path, set())
        for key in passed & arguments.keys():
            if arguments[key] != MISSING:
                choice = f", and choose with {key}=<option>" if self.default_at(key) is not None else ""
                raise UsageError(
                    f"{join(path, key)}={as_override(arguments[key])}: the program sets this argument of {name} "
                    f"itself; leave it out{choice}"
                )
        received = {*arguments, *passed, *list(named)[: len(node.get("_args_") or ())]}
        lacking = [key for key, each in named.items() if each.default is each.empty and key not in received]
        if lacking and not node.get("_partial_"):
            raise UsageError(
                f"{path or name}: {name} needs {', '.join(lacking)}; give {'them' if len(lacking) > 1 else 'it'}: "
                + " ".join(f"+{join(path, key)}=<value>" for key in lacking)
            )
        annotations = type_hints(target)
        for key in [key for key in arguments if key in annotations and key in named]:
            if arguments[key] != MISSING and join(path, key) not in self.hints:
                self._check_type(join(path, key), arguments[key], annotations[key], named[key].default)

    def _check_type(self, where: str, value: Any, hint: Any, default: Any) -> None:
        if fits(value, hint) or (value is None and default is None):
            return
        place = self._written_at(where)
        user = f" (as {where})" if place != where else ""
        instead = example(hint, value, [self.default_at(place), default])
        ours = our_value(place, value)
        setting = f"{place}={ours if ours != str(value) else as_override(instead)}"
        is_bare = re.search("[$ ]", setting) and "'" not in setting  # the shell would expand or divide it
        setting = f"'{setting}'" if is_bare else setting
        remedy = "" if instead == MISSING else f"; write {setting}"
        raise UsageError(f"{place}={as_override(value)}: expected {describe(hint)}{user}{remedy}")

    def _unknown_argument(self, path: str, name: str, key: str, known: list[str], value: Any) -> str:
        near = difflib.get_close_matches(key, known, n=1)
        remedy = f"it takes {', '.join(known) or 'none'}; leave it out"
        if near:
            where = join(path, near[0])
            section = self.default_at(path)
            addition = "" if isinstance(section, dict) and near[0] in section else "+"
            remedy = f"the nearest is {where}: write {addition}{where}={as_override(value)}"
        return f"{join(path, key)}: {name} has no argument {key!r}; {remedy}"

    def check_finite(self, node: Any, path: str) -> None:
        """Raise at NaN and infinity: torch accepts them nearly everywhere, and the training would be useless."""
        for where, value in leaves(node, path):
            if isinstance(value, float) and not math.isfinite(value):
                place = self._written_at(where)
                default = self.default_at(place)
                remedy = f"; write {place}={as_override(default)}" if default not in (None, MISSING) else ""
                raise UsageError(f"{place}={value}: expected a finite number{remedy}")

    def _written_at(self, where: str) -> str:
        """Return the path at which a value is set: the source's path if it is interpolated."""
        source = re.fullmatch(r"\$\{([\w.]+)\}", str(self.written.get(where)))
        return source[1] if source else where


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
        try:
            hints |= typing.get_type_hints(SimpleNamespace(__annotations__={key: annotation}), names)
        except Exception:  # evaluating foreign annotations may raise anything
            continue
    return hints
