"""Lookup of what a ``_target_`` names: the callable, its annotations, and names that have moved."""

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
MOVED = {
    "sd_lightning.data.digits": "sd_lightning.data.sources.digits",
    "sd_lightning.data.images.HuggingFaceImages": "sd_lightning.data.sources.huggingface.HuggingFaceImages",
    "sd_lightning.data.images": "sd_lightning.data.sources.images",
    "sd_lightning.encoder": "sd_lightning.models.encoder",
    "sd_lightning.export.Request": "sd_lightning.apps.export.Request",
    "sd_lightning.generate.Pretrained": "sd_lightning.apps.generate.Pretrained",
    "sd_lightning.generate.Request": "sd_lightning.apps.generate.Request",
    "sd_lightning.generation": "sd_lightning.models.generation",
    "sd_lightning.latent_diffusion.load_model": "sd_lightning.loading.load_model",
    "sd_lightning.latent_diffusion": "sd_lightning.models.latent_diffusion",
    "sd_lightning.learned_token": "sd_lightning.models.adapters.learned_token",
    "sd_lightning.lora": "sd_lightning.models.adapters.lora",
    "sd_lightning.lr_schedules": "sd_lightning.training.lr_schedules",
    "sd_lightning.module": "sd_lightning.training.module",
    "sd_lightning.noise_schedule": "sd_lightning.diffusion.noise_schedule",
    "sd_lightning.objective": "sd_lightning.diffusion.objective",
    "sd_lightning.speed": "sd_lightning.training.speed",
}
"""Old module or name that a ``_target_`` may still use -> its current one."""


def current_name(target: str) -> str:
    """Return the current dotted name: an entry of :data:`MOVED`, or the entry above a name, is replaced."""
    head = target
    while head and head not in MOVED:
        head = head.rpartition(".")[0]
    return MOVED[head] + target.removeprefix(head) if head else target


def update_moved(node: Any) -> dict[str, str]:
    """Replace moved ``_target_`` names of a DictConfig or ListConfig in place.

    Returns:
        Replaced names -> current names.
    """
    from omegaconf import OmegaConf

    moved = {}
    for path, value in leaves(OmegaConf.to_container(node, resolve=False)):  # type: ignore[arg-type]
        if path.rpartition(".")[2] == "_target_" and isinstance(value, str) and current_name(value) != value:
            moved[value] = current_name(value)
            OmegaConf.update(node, path, moved[value])
    return moved


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
    parent, *parts = current_name(target).split(".")
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
