"""What the resolved configurations of runs say: the options of ``conf/`` in them, and how runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sd_lightning import _conf
from sd_lightning._conf.annotations import as_override

_PASSIVE = {"timeout_seconds", "build_timeout_seconds"}
"""Settings that change nothing about a run that works."""
_OWN = ("output_dir", "name", "resume", "overwrite")
"""Settings of where a run is kept, and how it was started."""
_ABSENT = object()


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


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Return the settings that differ, with the value of each run as text, None where it has none.

    A section stands for itself by its class, told as the option of ``conf/``; if that differs, what only some runs
    have in it is left out.
    So is what follows from another setting: the run's folder in its callbacks, its seed in its parts.
    """
    settings = [dict(_settings(config)) for config in configs]
    keys = dict.fromkeys(key for each in settings for key in each)
    values_of = {key: [each.get(key, _ABSENT) for each in settings] for key in keys}
    differing = {key: values for key, values in values_of.items() if any(value != values[0] for value in values)}

    def is_implied(key: str) -> bool:
        above = key.split(".")[:-1]
        return _ABSENT in differing[key] and any(".".join(above[:n]) in differing for n in range(1, len(above) + 1))

    def shown(key: str, value: Any, config: Mapping[str, Any]) -> str | None:
        if value is _ABSENT:
            return None
        has_class = isinstance(config.get(key), Mapping)  # a section at the top, which may be an option of conf/
        return preset_name(key, config[key]) if has_class else as_override(value)

    return {
        key: [shown(key, value, config) for value, config in zip(values, configs)]
        for key, values in differing.items()
        if not is_implied(key)
    }


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values; lists stay whole, and sections with a class are it, too."""

    def walk(node: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            where = f"{path}.{key}" if path else str(key)
            if isinstance(value, Mapping):
                target = value.get("_target_")
                if isinstance(target, str):
                    yield where, target.rpartition(".")[2]
                yield from walk(value, where)
            elif key != "_target_" and not (path and _follows(str(key), value, config)):
                yield where, value

    return walk({key: value for key, value in config.items() if key not in _OWN}, "")


def _follows(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a value deep in a configuration is that of a setting at its top."""
    of_run = isinstance(value, str) and value in (config.get("output_dir"), config.get("name"))
    return of_run or key in ("run_dir", "save_dir") or (key == "seed" and value == config.get("seed"))
