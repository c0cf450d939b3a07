"""Turn what Hydra, OmegaConf and YAML raise into one line that says how to mend it."""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_lightning._conf.check import SPECIAL_KEYS, nearest_argument
from sd_lightning._conf.folder import config_dir
from sd_lightning._conf.other_names import in_our_words
from sd_lightning._errors import UsageError


@dataclass(frozen=True)
class CommandLine:
    """What the user asked Hydra for."""

    config_name: str
    """The primary config."""
    folders: tuple[str, ...]
    """Config folders: the primary one and, if given, the user's ``--config-dir``."""
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, config_name: str, arguments: Sequence[str]) -> CommandLine:
        """Read Hydra's options; an unreadable command line counts as an empty one."""
        from hydra._internal.utils import get_args

        try:
            options = get_args(list(arguments))
        except (SystemExit, Exception):
            return cls(config_name, (config_dir(),), ())
        folder = str(Path(options.config_path or config_dir()).absolute())
        more = (str(Path(options.config_dir).absolute()),) if options.config_dir else ()
        name = str(options.config_name or config_name).removesuffix(".yaml")
        return cls(name, (folder, *more), tuple(options.overrides))

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The composed configuration with the user's choice of options, but none of his values."""
        choices = [each for each in self.overrides if self._is_choice(each)]
        for overrides in (choices, []):
            try:
                return self._compose(overrides)
            except Exception:  # this serves a message about another error
                continue
        return {}

    def is_group(self, name: str) -> bool:
        """Tell whether a config group of that name exists."""
        return any((Path(folder) / name).is_dir() for folder in self.folders)

    def option_with(self, key: str) -> str | None:
        """Return the choice of a group's option, such as ``trainable=lora``, that would bring a key."""
        import yaml

        for path in sorted(path for folder in self.folders for path in Path(folder).glob("*/*.yaml")):
            text = path.read_text(encoding="utf-8")
            is_global, group = text.startswith("# @package _global_"), path.parent.name
            if group != "experiment" and group in self.groups:
                node = yaml.safe_load(text)
                if key in _paths(node if is_global else {group: node}):
                    return f"{group}={path.stem}"
        return None

    @functools.cached_property
    def groups(self) -> set[str]:
        """The config groups that the primary config has a choice of."""
        import yaml

        for folder in self.folders:
            path = Path(folder, f"{self.config_name}.yaml")
            if path.is_file():
                defaults = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
                return {str(name) for entry in defaults if isinstance(entry, dict) for name in entry}
        return set()

    def _is_choice(self, override: str) -> bool:
        chosen = re.fullmatch(r"\+?([\w/]+)(@[\w.]+)?=[\w/-]+", override)
        return bool(chosen) and self.is_group(chosen[1])  # type: ignore[index]

    def default_at(self, path: str) -> Any:
        """Return the default value at a dotted path, or None."""
        node: Any = self.defaults
        for part in path.split("."):
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return None
        return node

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        # Not hydra.compose: it finds no primary config in --config-dir, and refuses to work while a job runs.
        from hydra import version
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.utils import create_config_search_path
        from hydra.core.config_search_path import SearchPathQuery
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        search_path = create_config_search_path(self.folders[0])
        for folder in self.folders[1:]:
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        version.setbase("1.3")
        cfg = ConfigLoaderImpl(search_path).load_configuration(self.config_name, list(overrides), RunMode.RUN)
        plain = OmegaConf.to_container(cfg, resolve=False)
        return {key: value for key, value in plain.items() if key != "hydra"}  # type: ignore[misc, union-attr]

    def nearest(self, key: str) -> str | None:
        """Return the existing key that a wrong dotted key most likely means."""
        keys = _paths(self.defaults)
        last = key.rpartition(".")[2]
        same_name = [each for each in keys if each.rpartition(".")[2] == last and each != key]
        if len(same_name) == 1:
            return same_name[0]
        node, found = self.defaults, ""
        for part in key.split("."):
            names = [str(each) for each in node] if isinstance(node, dict) else []
            near = [part] if part in names else difflib.get_close_matches(part, names, n=1)
            if not near:
                break
            found = f"{found}.{near[0]}" if found else near[0]
            node = node[near[0]]
        else:
            return found
        return next(iter(difflib.get_close_matches(key, keys, n=1)), found or None)


def check_additions(command_line: CommandLine) -> None:
    """Refuse ``+key=…`` whose top-level key no part of the program reads.

    Additions below a node with ``_target_`` are checked against the target's signature.

    Raises:
        UsageError: Naming the addition and the nearest key.
    """
    for each in command_line.overrides:
        key = re.match(r"^\++([\w]+)(\.[\w.]+)?=", each)
        if not key or not command_line.defaults or key[1] in command_line.defaults:
            continue
        if command_line.is_group(key[1]):
            continue  # such as +experiment=…
        raise UsageError(_unknown_key(each, key[0].strip("+="), command_line))


def explain(error: Exception, config_name: str, arguments: Sequence[str]) -> str | None:
    """Word an exception as one line for the user.

    Args:
        error: What ended the program.
        config_name: The primary config of the entry point.
        arguments: The command line, without the program's name.

    Returns:
        The line, without ``error: ``; None if the exception is not the user's doing.
    """
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UsageError):
        return str(error)
    command_line = CommandLine.parse(config_name, arguments)
    if isinstance(error, OverrideParseException):
        return _one_line(_unreadable_override(error.override, error.message, command_line))
    if isinstance(error, MissingConfigException):
        return _one_line(_missing_config(error, command_line))
    if isinstance(error, OmegaConfBaseException):
        return _one_line(_bad_value(error, command_line))
    if isinstance(error, HydraException):
        return _one_line(_bad_composition(error, command_line))
    if isinstance(error, yaml.YAMLError):
        return _one_line(f"a config file is no valid YAML: {error}")
    raised_by = _raised_by(error)
    if isinstance(error, ValueError | OSError) and raised_by == "hydra":
        return _one_line(_bad_choice(command_line) or f"command line: {error}; see --help")
    # What Lightning finds out about its arguments only when it starts.
    if raised_by == "lightning" and (isinstance(error, ValueError) or "Misconfiguration" in type(error).__name__):
        return _one_line(f"trainer: {error} (change trainer.*, or see where with HYDRA_FULL_ERROR=1)")
    return None


def _bad_choice(command_line: CommandLine) -> str | None:
    """Word an option of a config group that is no name, such as ``logger=null``."""
    for each in command_line.overrides:
        group, _, value = each.lstrip("+").partition("=")
        if command_line.is_group(group) and re.fullmatch(r"(?i)null|true|false|[\d.eE+-]+", value):
            folders = [Path(folder) / group for folder in command_line.folders]
            options = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
            return (
                f"{group}={value}: {group} is a group of configs, and {value} is none of them; available: "
                f"{', '.join(options)}; write {group}={options[0] if options else '<name>'}"
            )
    return None


def _unreadable_override(override: str, message: str, command_line: CommandLine) -> str:
    reason = message.partition("\nSee https")[0]
    if "=" not in override:
        key = override.lstrip("+~").partition(" ")[0]
        known = key if command_line.default_at(key) is not None else command_line.nearest(key)
        return f"{override!r} is no setting: write key=value, e.g. {known or 'key'}=<value>"
    key, _, value = override.partition("=")
    reason = re.sub(r" expecting \{.*\}", "", reason)
    reason = re.sub(r"^Error parsing override .*?\n", "", reason)
    reason = re.sub(r"^LexerNoViableAltException: .*", "unexpected character", reason, flags=re.S)
    quoted = f"{key}='\"{value}\"'" if "'" not in value else shlex.quote(f'{key}="{value}"')
    return (
        f"cannot read {override!r} ({reason}); expected key=value, with special characters "
        f"quoted for Hydra inside quotes for the shell: {quoted}"
    )


def _missing_config(error: Any, command_line: CommandLine) -> str:
    wanted = error.missing_cfg_file
    if not wanted:
        return str(error)
    if error.options is None:
        return _missing_primary(str(wanted).removesuffix(".yaml"), command_line)
    group, _, name = wanted.rpartition("/")
    near = difflib.get_close_matches(name, error.options, n=1)
    remedy = f"; write {group}={near[0]}" if near else ""
    options = ", ".join(sorted(error.options)) or "none"
    return f"{group}={name}: there is no such option; available: {options}{remedy}"


def _missing_primary(name: str, command_line: CommandLine) -> str:
    names = sorted(file.stem for folder in command_line.folders for file in Path(folder).glob("*.yaml"))
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"; write -cn {near[0]}" if near else ""
    searched = " and ".join(command_line.folders)
    return f"there is no config {name!r} in {searched}; available: {', '.join(names)}{remedy}"


def _bad_composition(error: Exception, command_line: CommandLine) -> str:
    from omegaconf.errors import OmegaConfBaseException

    text = str(error)
    cause = error.__cause__
    wrong = re.search(r"Could not override '(.+?)'", text)
    if wrong:
        override = _override_of(wrong[1], command_line)
        group = wrong[1].partition("@")[0]
        if command_line.is_group(group):
            choice = f"{group}={override.partition('=')[2]}"
            return f"{override}: the defaults list has no {wrong[1]!r}; write {choice} or +{override}"
        return _unknown_key(override, wrong[1], command_line)
    absent = re.search(r"Could not delete from config. '(.+?)' does not exist", text)
    if absent:
        if absent[1] in _paths(command_line.defaults):
            return f"~{absent[1]}: its value is null already; leave this out"
        near = command_line.nearest(absent[1])
        return f"~{absent[1]}: there is no such key" + (f"; the nearest is {near}" if near else "")
    existing = re.search(r"An item is already at '(.+?)'", text)
    if existing:
        override = _override_of(existing[1], command_line).lstrip("+")
        return f"+{override}: {existing[1]} exists already; write {override}"
    ambiguous = re.search(r"Ambiguous value for argument '(.+?)=(.*)'\n", text)
    if ambiguous:
        key, value = ambiguous[1], ambiguous[2]
        return (
            f"{key}={value}: a bare comma is ambiguous; write '{key}=[{value}]' for a list, "
            f"{key}='\"{value}\"' for text, or add -m to run once per value"
        )
    if isinstance(cause, OmegaConfBaseException):
        reason = _bad_value(cause, command_line)
        return f"{text}: {reason}" if text else reason
    return text


def _override_of(key: str, command_line: CommandLine) -> str:
    """Return the override that sets a key, as the user wrote it."""
    for each in command_line.overrides:
        if each.lstrip("+~").partition("=")[0] == key:
            return each
    return key


def _unknown_key(override: str, key: str, command_line: CommandLine) -> str:
    near = command_line.nearest(key)
    value = override.partition("=")[2]
    parent, _, name = key.rpartition(".")
    argument = nearest_argument(command_line.default_at(parent), name)
    elsewhere = _by_another_name(key, value, command_line)
    if argument == name:
        remedy = f"; write +{parent}.{argument}={value}"
    elif elsewhere:
        remedy = f"; write {elsewhere}"
    elif argument and near in (None, parent):
        remedy = f"; write +{parent}.{argument}={value}"
    elif near and "=" in override and not isinstance(command_line.default_at(near), dict):
        remedy = f"; write {near}={value}"
    elif near and key.startswith(f"{near}."):
        below = command_line.default_at(near)
        names = [str(each) for each in below if each not in SPECIAL_KEYS] if isinstance(below, dict) else []
        remedy = f"; {near} has {', '.join(names)}" if names else f"; {near} has no keys below it"
    elif near:
        remedy = f"; the nearest is {near}"
    else:
        remedy = f"; top-level keys are {', '.join(map(str, command_line.defaults))}"
    return f"{override}: there is no key {key!r}{remedy}"


def _by_another_name(key: str, value: str, command_line: CommandLine) -> str | None:
    """Return what to write for a key that another program, or an option that was not chosen, has."""
    ours, value = in_our_words(key, value) or (key, value)
    if ours in _paths(command_line.defaults):
        return f"{ours}={value}"
    option = command_line.option_with(ours)
    return f"{option} {ours}={value}" if option else None


def _bad_value(error: Any, command_line: CommandLine) -> str:
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

    key = getattr(error, "full_key", None) or ""
    reason = str(getattr(error, "msg", None) or error).partition("\n    full_key")[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key or reason} has no value and no default; give one: {key}=<value>"
    missing = re.search(r"Missing mandatory value: (\S+)", reason)
    if missing:  # found on the way to another key's value
        return f"{missing[1]} has no value and no default; give one: {missing[1]}=<value>"
    absent = re.search(r"Interpolation key '(.+?)' not found", reason)
    if isinstance(error, InterpolationKeyError) and absent:
        near = command_line.nearest(absent[1])
        remedy = f"; write ${{{near}}}" if near else ""
        if any(override.partition("=")[0] == f"~{absent[1]}" for override in command_line.overrides):
            remedy = f"; do not take {absent[1]} out: give {absent[1]}=<value>, or {key}=<value> too"
        return f"{key}=${{{absent[1]}}}: there is no key {absent[1]!r}{remedy}"
    if "is not in struct" in reason:
        return f"{key} is missing, but the program reads it; leave it as it was, or give it: +{key}=<value>"
    variable = re.search(r"Environment variable '(.+?)' not found", reason)
    if variable:
        return f"{key}: environment variable {variable[1]} is not set; export {variable[1]}=<value>"
    return f"{key}: {reason}" if key else reason


def _paths(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [path]
    items = [(key, value) for key, value in node.items() if key not in SPECIAL_KEYS]
    below = [found for key, value in items for found in _paths(value, f"{path}.{key}" if path else str(key))]
    return [path, *below] if path else below


def _raised_by(error: BaseException) -> str:
    """Return the top-level package of the code that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] if trace else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
