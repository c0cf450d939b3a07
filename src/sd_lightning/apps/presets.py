"""Names of what a resolved configuration holds: the option of ``conf/`` that a section was composed from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sd_lightning import _conf

_PASSIVE = {"timeout_seconds", "build_timeout_seconds"}
"""Settings that change nothing about a run that works."""


def preset_name(group: str, section: Any) -> str | None:
    """Return the name of a section, with the settings that are not its option's: ``gemini offload_optim_frac=0.5``.

    Args:
        group: Folder of ``conf/``: "strategy".
        section: The section of a resolved configuration.

    Returns:
        The option with the same ``_target_`` and the most equal values; the name of the ``_target_`` if no option has
        it, None if the section has none.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("_target_"), str):
        return None
    target = section["_target_"]
    alike = {name: option for name, option in options(group).items() if option.get("_target_") == target}
    if not alike:
        return target.rpartition(".")[2]
    differing = {name: _differing(option, section) for name, option in alike.items()}
    name = min(alike, key=lambda each: len(differing[each]))
    return " ".join([name, *(f"{key}={section[key]}" for key in differing[name] if key in section)])


def _differing(option: Mapping[str, Any], section: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*option, *section))
    compared = [key for key in keys if key not in _PASSIVE and not key.endswith(("_dir", "_path", "_target_"))]
    return [key for key in compared if option.get(key) != section.get(key)]


@cache
def options(group: str) -> dict[str, dict[str, Any]]:
    """Return the options of a group of ``conf/``, by name."""
    files = sorted(Path(_conf.config_dir(), group).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in files}
