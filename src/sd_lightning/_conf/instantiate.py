"""Building of objects from configuration nodes, with errors that explain what is wrong with the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sd_lightning._conf.annotations import as_override
from sd_lightning._conf.check import SPECIAL_KEYS
from sd_lightning._conf.command_line import given_keys
from sd_lightning._conf.messages import raised_by
from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
"""Exceptions with which this package's constructors refuse arguments; those of others may raise any, e.g. KeyError."""


@dataclass(frozen=True)
class Builder:
    """The target of a section with the section's arguments; it is called later, perhaps with further arguments."""

    target: Callable[..., Any]
    positional: tuple[Any, ...]
    """The section's ``_args_``, built."""
    arguments: Mapping[str, Any]
    """The section's others, built."""
    node: DictConfig

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the object; raise as :func:`instantiate` does. ``kwargs`` override the section's arguments."""
        try:
            return self.target(*self.positional, *args, **{**self.arguments, **kwargs})
        except Exception as error:
            _refuse(error, self.node)

    def __reduce__(self) -> tuple[Any, ...]:
        from omegaconf import OmegaConf

        path = self.node._get_full_key(None)
        return _builder_at, (path, OmegaConf.to_container(self.node, resolve=True))


def instantiate(node: Any, **kwargs: Any) -> Any:
    """Build the object that a node describes (``hydra.utils.instantiate``, plain containers).

    Args:
        node: A config node with ``_target_``, a container of such nodes, or None.
        **kwargs: Further arguments of the target, which override the node's. They are passed
            unchanged: Hydra would turn dataclass instances and containers among them into
            configs and back into dictionaries.

    Returns:
        The object; with ``_partial_: true`` a :class:`Builder`; None for None.

    Raises:
        UsageError: The target raised one, or any other exception. Exceptions that this package's own code raises
            and that are not ``USER_ERRORS`` count as bugs: they keep type and stack trace.
    """
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import OmegaConf

    if node is None:
        return None
    if isinstance(node, dict | list):
        node = OmegaConf.create(node, flags={"allow_objects": True})
    is_partial = OmegaConf.is_dict(node) and bool(node.get("_partial_", False))
    if kwargs or is_partial:
        build = builder(node, without=kwargs)
        return replace(build, arguments={**build.arguments, **kwargs}) if is_partial else build(**kwargs)
    try:
        return hydra_instantiate(node, _convert_="all")
    except Exception as error:
        _refuse(error, node)


def builder(node: DictConfig, *, without: Iterable[str] = ()) -> Builder:
    """Return what builds the object of a node with ``_target_``.

    Args:
        node: The node.
        without: Arguments to leave out.

    Raises:
        UsageError: As :func:`instantiate` does for the arguments that are objects themselves.
    """
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import open_dict

    node_copy = node.copy()  # keeps the parent, so interpolations still resolve
    with open_dict(node_copy):
        for key in set(without) & set(node_copy):
            del node_copy[key]
    try:
        made: partial[Any] = hydra_instantiate(node_copy, _convert_="all", _partial_=True)
    except Exception as error:
        _refuse(error, node)
    return Builder(made.func, made.args, made.keywords, node)


def section(path: str, value: Any) -> Any:
    """Return a plain section of a configuration as a node that knows its path, for messages."""
    from omegaconf import OmegaConf

    for key in reversed(path.split(".")):
        value = {key: value}
    return OmegaConf.select(OmegaConf.create(value, flags={"allow_objects": True}), path)


def _builder_at(path: str, value: Mapping[str, Any]) -> Builder:
    return builder(section(path, value))


def _refuse(error: Exception, node: DictConfig | ListConfig) -> NoReturn:
    """Raise a UsageError for a target's exception; re-raise bugs of this package unchanged."""
    from hydra.errors import InstantiationException

    path = own_path = node._get_full_key(None)
    cause: BaseException = error
    if isinstance(error, InstantiationException):  # wraps the target's; its text ends with the node's path
        causes = [cause]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        cause = next((each for each in causes if isinstance(each, UsageError)), causes[:2][-1])
        path = str(error).partition("full_key: ")[2].strip() or path
    is_our_bug = raised_by(cause) == "sd_lightning" and not isinstance(cause, USER_ERRORS)
    if isinstance(cause, UsageError) or is_our_bug:
        raise cause
    is_own = isinstance(node, Mapping) and path == own_path
    arguments = {str(k): v for k, v in node.items() if k not in SPECIAL_KEYS} if is_own else {}
    text = str(cause)
    meant = {k: v for k, v in arguments.items() if k in text or (isinstance(v, str) and v in text)} or arguments
    given = " ".join(f"{key}={as_override(value)}" for key, value in meant.items())
    remedy = leave_out(path, meant) or "change them"
    raise UsageError(
        f"{path or 'configuration'}: cannot build it with these arguments: {cause} ({type(cause).__name__}; "
        f"{f'given {given}; ' if given else ''}{remedy}, or see where with HYDRA_FULL_ERROR=1)"
    ) from error


def leave_out(path: str, names: Iterable[str]) -> str | None:
    """Return a remedy that names the command line's overrides of these arguments of a node, or else of others."""
    below = [key for key in given_keys() if path and key.startswith(f"{path}.")]
    meant = [key for key in below if key.removeprefix(f"{path}.").partition(".")[0] in set(names)]
    return f"change or leave out {' and '.join(dict.fromkeys(meant or below))}" if below else None
