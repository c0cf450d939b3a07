"""diffusers' sampling schedulers: short names, and their repeated warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sd_lightning._errors import UsageError

_said: set[tuple[object, ...]] = set()
"""Warnings that have been shown."""


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
    show = warnings.showwarning

    def show_once(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if is_new(category, str(message)):
            show(message, category, *where, **more)

    handlers = (*logging.getLogger("diffusers").handlers, *logging.getLogger().handlers)
    filtered = [handler for handler in handlers if _is_unsaid not in handler.filters]  # none within another said_once
    for handler in filtered:
        handler.addFilter(_is_unsaid)
    try:
        with warnings.catch_warnings():
            if show.__name__ != show_once.__name__:
                warnings.showwarning = show_once
            yield
    finally:
        for handler in filtered:
            handler.removeFilter(_is_unsaid)


def _is_unsaid(record: logging.LogRecord) -> bool:
    """Drop messages of diffusers that have been shown before; all handlers of a record decide alike."""
    if record.name.partition(".")[0] == "diffusers" and not hasattr(record, "is_new"):
        record.is_new = is_new(record.name, record.getMessage())
    return getattr(record, "is_new", True)


def is_new(*said: object) -> bool:
    """Return whether this is the first call with these values, as of a warning to be shown once."""
    is_new = said not in _said
    _said.add(said)
    return is_new
