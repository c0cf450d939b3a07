"""Checks of plain configuration values against type annotations, and example values for messages.

Annotations that a YAML value cannot be checked against (tensors, protocols, third-party classes, …) accept every value.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import os
import re
import types
import typing
from collections import abc
from collections.abc import Sequence
from typing import Any

MISSING = "???"
SEQUENCES = (list, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
UNIONS = (typing.Union, types.UnionType)
_SCALARS: dict[type, Any] = {bool: bool, int: int, float: int | float, str: str}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value (as read from YAML) fits an annotation.

    An int fits a float and a str fits a path; a bool is no int, and a str that spells a number is no number. Nodes that
    Hydra still has to build (``_target_``) always fit.
    """
    hint, origin, arguments = _parts(hint)
    if hint is Any or (isinstance(value, dict) and "_target_" in value):
        return True
    if origin in UNIONS:
        return any(fits(value, each) for each in _judged(arguments))
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        is_list = isinstance(value, list | tuple)
        return is_list and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is tuple or origin in SEQUENCES:
        of_each = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(fits(each, of_each) for each in value)
    if origin in MAPPINGS:
        of_key, of_value = arguments or (Any, Any)
        return isinstance(value, dict) and all(fits(k, of_key) and fits(v, of_value) for k, v in value.items())
    if origin is abc.Callable:
        return callable(value)
    return _fits_class(value, origin) if inspect.isclass(origin) else True


def describe(hint: Any) -> str:
    """Describe an annotation in an error message, e.g. ``"int or null"`` or ``"one of a, b"``."""
    hint, origin, arguments = _parts(hint)
    if hint in (None, types.NoneType):
        return "null"
    if origin in UNIONS:
        ordered = sorted(_judged(arguments), key=lambda each: each is types.NoneType)
        return " or ".join(dict.fromkeys(describe(each) for each in ordered))
    if origin is typing.Literal:
        return "one of " + ", ".join(as_override(each) for each in arguments)
    if origin is abc.Callable:
        return "something callable (a node with _target_)"
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} ({', '.join(describe(each) for each in arguments)})"
    if origin in SEQUENCES or origin is tuple:
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    if origin in MAPPINGS:
        return "a dictionary"
    if isinstance(origin, enum.EnumType):
        return "one of " + ", ".join(origin.__members__)
    if inspect.isclass(origin) and issubclass(origin, os.PathLike):
        return "a path"
    return getattr(origin, "__name__", str(origin))


def example(hint: Any, given: Any, known: Sequence[Any]) -> Any:
    """Return a value that fits the annotation, to show in a message.

    Args:
        hint: The annotation.
        given: The rejected value; a choice with similar spelling is preferred.
        known: Candidates in order of preference, such as the default configuration's value.

    Returns:
        The example, or ``MISSING`` if none is found.
    """
    choices = [str(each) for each in _choices(hint)]
    near = difflib.get_close_matches(str(given), choices, n=1)
    if near:
        return near[0]
    for each in known:
        if each not in (None, MISSING, [], "") and fits(each, hint):
            return each
    readings: list[Any] = [[str(given)], str(given), [given]]
    if isinstance(given, str):
        readings = [_parsed(given)]
    elif isinstance(given, list | tuple):
        readings = [[str(each) for each in given]]
    elif isinstance(given, bool):  # never meant as text
        readings = [[given]]
    generic = (True, 1, 0.1, [1], "name", ["name"], *choices)
    fitting = (each for each in (*readings, *generic) if not _is_permissive(hint) and fits(each, hint))
    return next(fitting, MISSING)


def as_override(value: Any) -> str:
    """Format a value as on the command line, shortened to 80 characters."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list | tuple):
        text = f"[{','.join(as_override(each) for each in value)}]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{as_override(each)}" for key, each in value.items()) + "}"
    elif isinstance(value, str) and (value in ("null", "true", "false") or _parsed(value) != [value]):
        text = f"'\"{value}\"'"  # Hydra reads it as text only in quotes
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_element(text: str) -> str:
    """Format a text as an element of a Hydra list, quoted if it has special characters or would not stay text."""
    if re.fullmatch(r"[\w.+ -]+", text) and text not in ("null", "true", "false") and _parsed(text) == [text]:
        return text
    bare = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    return '"' + bare.replace('"', '\\"') + '"'


def _parts(hint: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return an annotation without Annotated, NewType and ``type X = …`` around it, its origin and its arguments."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # Python 3.12's `type` statement
            hint = hint.__value__
        else:
            return hint, typing.get_origin(hint) or hint, typing.get_args(hint)


def _judged(alternatives: tuple[Any, ...]) -> Sequence[Any]:
    """Drop from a union the classes that no plain value can have, such as Tensor in ``float | Tensor``."""
    kept = [each for each in alternatives if not _is_foreign_class(_parts(each)[0])]
    return kept if any(each is not types.NoneType for each in kept) else alternatives


def _is_foreign_class(hint: Any) -> bool:
    is_open = hint in (Any, object) or _is_protocol(hint)
    return inspect.isclass(hint) and not is_open and _is_permissive(hint)


def _is_protocol(hint: Any) -> bool:
    return getattr(hint, "_is_protocol", False)  # typing.is_protocol comes with Python 3.13


def _is_permissive(hint: Any) -> bool:
    return fits(object(), hint)


def _fits_class(value: Any, expected: type) -> bool:
    if expected in _SCALARS:
        return isinstance(value, _SCALARS[expected]) and (expected is bool or not isinstance(value, bool))
    if issubclass(expected, os.PathLike):
        return isinstance(value, str | os.PathLike)
    if issubclass(expected, enum.Enum):
        return isinstance(value, expected) or value in [*expected.__members__, *(each.value for each in expected)]
    if value is None:  # other classes do not accept null
        return expected in (types.NoneType, object) or _is_protocol(expected)
    return expected is not types.NoneType


def _choices(hint: Any) -> list[Any]:
    _, origin, arguments = _parts(hint)
    if origin is typing.Literal:
        return [each for each in arguments if each is not None]
    if origin in UNIONS:
        return [choice for each in arguments for choice in _choices(each)]
    return list(origin.__members__) if isinstance(origin, enum.EnumType) else []


def _parsed(text: str) -> Any:
    """Parse a number; return any other text in a list."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return [text]
