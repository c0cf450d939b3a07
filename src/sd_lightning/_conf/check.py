"""Validation of a configuration tree against the signatures of its targets.

It runs before anything is built, so that a wrong key or type costs seconds, not a started run.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sd_lightning._conf.annotations import MISSING, as_override, describe, example, fits
from sd_lightning._conf.other_names import VALUES
from sd_lightning._conf.targets import join, leaves, locate, type_hints
from sd_lightning._errors import UsageError

SPECIAL_KEYS = frozenset({"_target_", "_partial_", "_convert_", "_recursive_", "_args_"})


def check(
    node: Any,
    path: str = "",
    *,
    given: Mapping[str, set[str]] | None = None,
    hints: Mapping[str, Any] | None = None,
    default_at: Callable[[str], Any] = lambda path: None,
) -> None:
    """Check that every ``_target_`` of a tree exists, and that its arguments fit.

    Args:
        node: A DictConfig, ListConfig or plain container.
        path: Dotted path of ``node``, for the messages.
        given: Path of a node -> arguments that the program passes and the configuration must not set, e.g.
            ``{"trainer": {"callbacks"}}``.
        hints: Path of a value -> annotation, for values without a target or with a narrower type than the target's,
            e.g. ``{"overwrite": bool}``.
        default_at: Returns the default configuration's value at a path, for the example in a message.

    Raises:
        UsageError: At the first missing value (``???``), target that cannot be imported,
            unknown or missing argument, or value of a wrong type.
        OmegaConfBaseException: At a broken interpolation; ``main`` turns it into a message.
    """
    from omegaconf import OmegaConf

    written = resolved = node
    if OmegaConf.is_config(node):
        written, resolved = (OmegaConf.to_container(node, resolve=resolve) for resolve in (False, True))
    checker = _Checker(given or {}, hints or {}, default_at, dict(leaves(written, path)))
    checker.check_node(resolved, path, lenient=False)
    checker.check_finite(resolved, path)


def nearest_argument(node: Any, key: str) -> str | None:
    """Return the argument of a node's target that a key most likely means, if there is one."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        return None
    try:
        names = list(inspect.signature(locate(node["_target_"], "")).parameters)
    except (TypeError, ValueError):  # UsageError is a ValueError
        return None
    return next(iter(difflib.get_close_matches(key, names, n=1)), None)


@dataclass(frozen=True)
class _Checker:
    """The arguments of :func:`check`, and the unresolved values, which show where a value is set."""

    given: Mapping[str, set[str]]
    hints: Mapping[str, Any]
    default_at: Callable[[str], Any]
    written: Mapping[str, Any]

    def check_node(self, node: Any, path: str, *, lenient: bool) -> None:
        """Check a node and its children; ``lenient`` if arguments may still be added."""
        if isinstance(node, list | tuple):
            for position, each in enumerate(node):
                self.check_node(each, join(path, str(position)), lenient=lenient)
        if not isinstance(node, dict):
            return
        is_partial = lenient or bool(node.get("_partial_", False))
        if "_target_" in node:
            self._check_target(node, path, is_partial)
            lenient = lenient or node.get("_recursive_", True) is False
        for key, value in node.items():
            where = join(path, str(key))
            if value != MISSING:
                if where in self.hints:
                    self._check_type(where, value, self.hints[where], MISSING)
                self.check_node(value, where, lenient=lenient)
            elif not (is_partial or lenient or key in self.given.get(path, ())):
                raise UsageError(f"{where} has no value and no default; give one: {where}=<value>")

    def _check_target(self, node: dict[str, Any], path: str, is_partial: bool) -> None:
        if node["_target_"] == MISSING:
            raise UsageError(f"{join(path, '_target_')} has no value and no default; choose what to build there")
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
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            for key, value in arguments.items():
                if key not in named:
                    raise UsageError(self._unknown_argument(path, name, str(key), list(named), value))
        passed = self.given.get(path, set())
        for key in passed & arguments.keys():
            if arguments[key] != MISSING:
                choice = f", and choose with {key}=<option>" if self.default_at(key) is not None else ""
                raise UsageError(
                    f"{join(path, key)}={as_override(arguments[key])}: the program sets this argument of {name} "
                    f"itself; leave it out{choice}"
                )
        received = {*arguments, *passed, *list(named)[: len(node.get("_args_") or ())]}
        lacking = [key for key, each in named.items() if each.default is each.empty and key not in received]
        if lacking and not is_partial:
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
        ours = VALUES.get(place, {}).get(str(value))
        instead = example(hint, value, [self.default_at(place), default])
        setting = f"{place}={ours or as_override(instead)}"
        setting = f"'{setting}'" if "$" in setting else setting  # or the shell would expand it
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
