"""diffusers' sampling schedulers: short names, and their repeated warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sd_lightning._errors import UsageError

_said: set[tuple[object, ...]] = set()
"""Warnings that have been shown."""
_listening = False


def scheduler_names() -> set[str]:
    """Return the class names of diffusers' schedulers."""
    import diffusers

    return {name for name in dir(diffusers) if name.endswith("Scheduler") and not name.startswith("Flax")}


def scheduler_class(name: str) -> str:
    """Return the diffusers class name of a scheduler, given a class name or short name.

    Raises:
        UsageError: diffusers has no such scheduler.
    """
    known = scheduler_names()
    short = {
        "ddim": "DDIMScheduler",
        "ddpm": "DDPMScheduler",
        "pndm": "PNDMScheduler",
        "lms": "LMSDiscreteScheduler",
        "euler": "EulerDiscreteScheduler",
        "euler_a": "EulerAncestralDiscreteScheduler",
        "heun": "HeunDiscreteScheduler",
        "dpmsolver++": "DPMSolverMultistepScheduler",
        "unipc": "UniPCMultistepScheduler",
        "deis": "DEISMultistepScheduler",
    }
    chosen = short.get(name.lower(), name)
    if chosen not in known:
        raise UsageError(
            f"scheduler={name}: diffusers has no such scheduler; expected {', '.join(short)} or a class name such as "
            "DDIMScheduler"
        )
    return chosen


@contextmanager
def said_once() -> Iterator[None]:
    """Show each diffusers warning once per process: schedulers repeat them when built and at each step."""
    global _listening
    if _listening:
        yield
        return
    show = warnings.showwarning

    def show_once(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if _is_new(category, str(message)):
            show(message, category, *where, **more)

    handlers = [*logging.getLogger("diffusers").handlers, *logging.getLogger().handlers]
    filters = [(handler, _once(handler)) for handler in handlers]
    _listening = True
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_once
            for handler, once in filters:
                handler.addFilter(once)
            yield
    finally:
        _listening = False
        for handler, once in filters:
            handler.removeFilter(once)


def _once(handler: logging.Handler) -> Callable[[logging.LogRecord], bool]:
    """Return a filter that drops messages of diffusers that a handler has shown before."""
    is_of_diffusers = logging.Filter("diffusers").filter
    return lambda record: not is_of_diffusers(record) or _is_new(handler, record.name, record.getMessage())


def _is_new(*said: object) -> bool:
    is_new = said not in _said
    _said.add(said)
    return is_new
