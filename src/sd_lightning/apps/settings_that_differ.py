"""Which settings differ between resolved configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sd_lightning._conf.annotations import as_override
from sd_lightning.apps.presets import preset_name

_OWN = ("output_dir", "name", "resume", "overwrite")
"""Settings of where a run is kept, and how it was started."""
_ABSENT = object()


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Return the settings that differ, with the value of each run as text, None where it has none.

    A section stands for itself by its class, told as the option of ``conf/``; if that differs, what only some runs
    have in it is left out.
    So is what follows from another setting: the run's folder in its callbacks, its seed in its parts.
    """
    settings = [dict(_settings(config)) for config in configs]
    keys = dict.fromkeys(key for each in settings for key in each)
    found = {key: [each.get(key, _ABSENT) for each in settings] for key in keys}
    differing = {key: values for key, values in found.items() if any(value != values[0] for value in values)}

    def is_implied(key: str) -> bool:
        above = key.split(".")[:-1]
        return _ABSENT in differing[key] and any(".".join(above[:n]) in differing for n in range(1, len(above) + 1))

    def told(key: str, value: Any, config: Mapping[str, Any]) -> str | None:
        if value is _ABSENT:
            return None
        has_class = isinstance(config.get(key), Mapping)  # a section at the top, which may be an option of conf/
        return preset_name(key, config[key]) if has_class else as_override(value)

    return {
        key: [told(key, value, config) for value, config in zip(values, configs)]
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
