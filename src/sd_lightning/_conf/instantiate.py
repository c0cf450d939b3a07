"""Build objects from configuration nodes with errors that say what is wrong with the node."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from sd_lightning._conf.annotations import as_override
from sd_lightning._conf.check import SPECIAL_KEYS
from sd_lightning._conf.command_line import CommandLine
from sd_lightning._conf.messages import raised_by
from sd_lightning._errors import UsageError

USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
"""What a constructor raises when it dislikes its arguments; others raise anything then, from assertions to KeyError."""


def instantiate(node: Any, **kwargs: Any) -> Any:
    """Build the object that a node describes (``hydra.utils.instantiate``, plain containers).

    Args:
        node: A config node with ``_target_``, a container of such nodes, or None.
        **kwargs: Further arguments of the target, which win over the node's. They reach it as
            they are: Hydra would turn dataclass instances and containers among them into
            configs and back into dictionaries.

    Returns:
        The object; with ``_partial_: true`` a ``functools.partial``; None for None.

    Raises:
        UsageError: Raised unchanged if the target raised one; otherwise if the target refused
            its arguments, with whatever exception. Only those that this package's own code raises, and that
            are none of ``USER_ERRORS``, are taken for mistakes of its own: they keep type and stack trace.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import OmegaConf

    if node is None:
        return None
    if isinstance(node, dict | list):
        node = OmegaConf.create(node, flags={"allow_objects": True})
    path = node._get_full_key(None)
    try:
        is_partial = OmegaConf.is_dict(node) and bool(node.get("_partial_", False))
        if not kwargs and not is_partial:
            return hydra_instantiate(node, _convert_="all")
        build = functools.partial(_deferred(node, set(kwargs)), **kwargs)
        return functools.partial(_call, build, node, path) if is_partial else build()
    except InstantiationException as error:
        _raise_cause(error, node, path)
    except Exception as error:
        if _is_our_bug(error):
            raise
        raise _refusal(error, node, path) from error


def _call(build: Any, node: Any, path: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a partial; the target refuses its arguments with a UsageError, as if it had been built at once."""
    try:
        return build(*args, **kwargs)
    except Exception as error:
        if _is_our_bug(error):
            raise
        raise _refusal(error, node, path) from error


def _deferred(node: Any, replaced: set[str]) -> Any:
    """Return the node's target with the node's own arguments bound, but not called."""
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import DictConfig, open_dict

    node_copy: DictConfig = node.copy()  # keeps the parent, so interpolations still resolve
    with open_dict(node_copy):
        for key in replaced & set(node_copy):
            del node_copy[key]
    return hydra_instantiate(node_copy, _convert_="all", _partial_=True)


def _raise_cause(error: Exception, node: Any, path: str) -> None:
    """Raise what an InstantiationException hides."""
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    for each in causes:
        if isinstance(each, UsageError):
            raise each
    cause = causes[1] if len(causes) > 1 else error
    if cause is not error and _is_our_bug(cause):
        raise cause
    raise _refusal(cause, node, _key_of(error) or path) from error


def _refusal(error: Exception, node: Any, path: str) -> UsageError:
    if isinstance(error, UsageError):
        return error
    from omegaconf import OmegaConf

    is_dict = OmegaConf.is_dict(node)
    who = path or (node.get("_target_") if is_dict else None) or "configuration"
    of_node = is_dict and path == node._get_full_key(None)
    arguments = {str(k): v for k, v in node.items() if k not in SPECIAL_KEYS} if of_node else {}
    text = str(error)
    meant = {k: v for k, v in arguments.items() if k in text or (isinstance(v, str) and v in text)} or arguments
    given = " ".join(f"{key}={as_override(value)}" for key, value in meant.items())
    remedy = leave_out(path, meant) or "change them"
    return UsageError(
        f"{who}: cannot build it with these arguments: {error} ({type(error).__name__}; "
        f"{f'given {given}; ' if given else ''}{remedy}, or see where with HYDRA_FULL_ERROR=1)"
    )


def leave_out(path: str, names: Iterable[str]) -> str | None:
    """Return the remedy that undoes what the command line says of a node: of these arguments, or of others."""
    keys = [each.lstrip("+").partition("=")[0] for each in CommandLine.parse("", sys.argv[1:]).overrides]
    below = [key for key in keys if path and key.startswith(f"{path}.")]
    meant = [key for key in below if key.removeprefix(f"{path}.").partition(".")[0] in set(names)]
    return f"change or leave out {' and '.join(dict.fromkeys(meant or below))}" if below else None


def _key_of(error: Exception) -> str:
    """Read the config path that Hydra appends to its messages."""
    return str(error).rpartition("full_key: ")[2].strip() if "full_key: " in str(error) else ""


def _is_our_bug(error: Exception) -> bool:
    """Whether an exception is no refusal of arguments, but a mistake of this package."""
    return raised_by(error) == "sd_lightning" and not isinstance(error, USER_ERRORS)
