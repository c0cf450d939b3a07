"""Plain values of a configuration: whether they fit a type annotation, and how messages spell them.

Annotations that a YAML value cannot be checked against (tensors, protocols, third-party classes, …) accept every value.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import types
import typing
from collections import abc
from collections.abc import Sequence
from typing import Any

MISSING = "???"
SEQUENCES = (list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
UNIONS = (typing.Union, types.UnionType)
_SCALARS: dict[Any, Any] = {bool: bool, int: int, float: int | float, str: str}
_VALUES = {
    "trainer.precision": {
        **dict.fromkeys(("fp16", "float16", "16"), "16-mixed"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16-mixed"),
        **dict.fromkeys(("fp32", "float32", "no"), "32"),
    },
    "objective.weighting_scheme": {"uniform": "none"},
    **dict.fromkeys(("base", "lora.base"), dict.fromkeys(("int4", "fp4", "4bit", "4", "qlora"), "nf4")),
    "data.masked_loss": {"True": "files", "true": "files", "False": "none", "false": "none"},
    "resume": {"latest": "auto", "True": "auto"},
    "data": {"imagefolder": "images", "image_folder": "images", "folder": "images"},
    "strategy": {
        **{f"zero{stage}": f"deepspeed_zero{stage}" for stage in (1, 2, 3)},
        "deepspeed": "deepspeed_zero2",
        **{f"deepspeed_stage_{stage}": f"deepspeed_zero{stage}" for stage in (1, 2, 3)},
    },
}
"""Setting or group -> {value of diffusers', kohya's or Lightning's: ours}."""


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value (as read from YAML) fits an annotation.

    An int fits a float and a str fits a path; a bool is no int, and a str that spells a number is no number. Nodes that
    Hydra still has to build (``_target_``) always fit.
    """
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Any or (isinstance(value, dict) and "_target_" in value):
        return True
    if origin in UNIONS:
        return any(fits(value, each) for each in _judged(arguments))
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if _has_length(origin, arguments):
        is_list = isinstance(value, list | tuple)
        return is_list and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in SEQUENCES:
        of_each = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(fits(each, of_each) for each in value)
    if origin in MAPPINGS:
        of_key, of_value = arguments or (Any, Any)
        return isinstance(value, dict) and all(fits(k, of_key) and fits(v, of_value) for k, v in value.items())
    if origin is abc.Callable:
        return callable(value)
    if origin in _SCALARS:
        return isinstance(value, _SCALARS[origin]) and (origin is bool or not isinstance(value, bool))
    if not inspect.isclass(origin) or _is_open(origin):
        return True
    if issubclass(origin, os.PathLike):
        return isinstance(value, str | os.PathLike)
    return (value is None) == (origin is types.NoneType)


def describe(hint: Any) -> str:
    """Describe an annotation in an error message, e.g. ``"int or null"`` or ``"one of a, b"``."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.NoneType:
        return "null"
    if origin in UNIONS:
        ordered = sorted(_judged(arguments), key=lambda each: each is types.NoneType)
        return " or ".join(dict.fromkeys(describe(each) for each in ordered))
    if origin is typing.Literal:
        return "one of " + ", ".join(as_override(each) for each in arguments)
    if origin is abc.Callable:
        return "something callable (a node with _target_)"
    if _has_length(origin, arguments):
        return f"a list of {len(arguments)} ({', '.join(describe(each) for each in arguments)})"
    if origin in SEQUENCES:
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    if origin in MAPPINGS:
        return f"a dictionary of {' to '.join(map(describe, arguments))}" if arguments else "a dictionary"
    if inspect.isclass(origin) and issubclass(origin, os.PathLike):
        return "a path"
    return getattr(origin, "__name__", str(origin))


def example(hint: Any, value: Any, known: Sequence[Any]) -> Any:
    """Return a value that fits the annotation, to show in a message.

    Args:
        hint: The annotation.
        value: The rejected value; a choice with similar spelling is preferred.
        known: Candidates in order of preference, such as the default configuration's value.

    Returns:
        The example, or ``MISSING`` if none is found.
    """
    choices = [str(each) for each in _choices(hint)]
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    likely = [*near, *(each for each in known if each not in (None, MISSING, [], (), ""))]
    if not fits(object(), hint):
        texts = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
        readings = [_parsed(value)] if isinstance(value, str) else [texts, texts[0] if texts else "", [value]]
        readings = [[value]] if isinstance(value, bool) else readings  # never meant as text
        likely += [*readings, True, 1, 0.1, [1], "name", ["name"], *choices]
    return next((each for each in likely if each in near or fits(each, hint)), MISSING)


def our_value(key: str, value: Any) -> str:
    """Return our spelling of a value of one of our settings."""
    return _VALUES.get(key, {}).get(str(value), str(value))


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
    elif isinstance(value, str) and not _stays_text(value):
        text = f"'\"{value}\"'"  # Hydra reads it as text only in quotes
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_element(text: str) -> str:
    """Format a text as an element of a Hydra list, quoted if it has special characters or would not stay text."""
    if re.fullmatch(r"[\w.+ -]+", text) and _stays_text(text):
        return text
    bare = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    return '"' + bare.replace('"', '\\"') + '"'


def _has_length(origin: Any, arguments: tuple[Any, ...]) -> bool:
    return origin is tuple and arguments != () and arguments[-1] is not Ellipsis


def _judged(alternatives: tuple[Any, ...]) -> Sequence[Any]:
    """Drop from a union the classes that no plain value can have, such as Tensor in ``float | Tensor``."""
    kept = [each for each in alternatives if not inspect.isclass(each) or _is_open(each) or not fits(object(), each)]
    return kept if any(each is not types.NoneType for each in kept) else alternatives


def _is_open(hint: type) -> bool:
    return hint is object or getattr(hint, "_is_protocol", False)  # typing.is_protocol comes with Python 3.13


def _choices(hint: Any) -> list[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return [each for each in arguments if each is not None]
    return [choice for each in arguments for choice in _choices(each)] if typing.get_origin(hint) in UNIONS else []


def _stays_text(text: str) -> bool:
    """Return whether Hydra reads a text without quotes as a text."""
    return text not in ("null", "true", "false") and _parsed(text) == [text]


def _parsed(text: str) -> Any:
    """Parse a number; return any other text in a list."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return [text]
