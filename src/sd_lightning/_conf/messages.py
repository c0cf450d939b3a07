"""One-line messages with a remedy for exceptions of Hydra, OmegaConf and YAML."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_lightning._conf.annotations import list_element
from sd_lightning._conf.check import SPECIAL_KEYS, nearest_argument
from sd_lightning._conf.command_line import CommandLine, paths
from sd_lightning._conf.other_names import in_our_words, model_like, our_value
from sd_lightning._conf.programs import Program, groups_of, owner_of
from sd_lightning._errors import UsageError


def check_additions(command_line: CommandLine) -> None:
    """Check that the program reads the top-level key of every ``+key=…``.

    Additions below a node with ``_target_`` are checked against the target's signature.

    Raises:
        UsageError: It does not; the message names the addition and the nearest key.
    """
    for each in command_line.overrides:
        key = re.match(r"^\++([\w]+)(\.[\w.]+)?=", each)
        if key and not command_line.is_group(key[1]):  # such as +experiment=…
            if command_line.defaults and key[1] not in command_line.defaults:
                raise UsageError(_unknown_key(each, key[0].strip("+="), command_line))


def check_choices(program: Program, command_line: CommandLine) -> None:
    """Check that groups and experiments are not another program's: Hydra would accept them, or not name the program.

    Raises:
        UsageError: One is; the message names the program that it belongs to.
    """
    folder = command_line.folders[0]  # has the primary configs of all programs
    groups = {name: groups_of(name, folder) for name in program.among}
    for override in command_line.overrides:
        group, _, value = override.lstrip("+").partition("=")
        owners = [name for name in program.among if group in groups[name]]
        if owners and program.name not in owners and group not in command_line.groups:
            plain = f"python -m sd_lightning.{owners[0]} {group}={value}"
            remedy = program.instead.get(group, f"leave it out, or write {plain}")
            raise UsageError(
                f"{override}: {program.name} has no group {group!r}, which is of {' and '.join(owners)}; {remedy}"
            )
        for name in value.split(",") if group == "experiment" else ():
            files = [file for each in command_line.folders if (file := Path(each, group, f"{name}.yaml")).is_file()]
            owner = owner_of(files[-1], folder, program.among) if files else None
            if owner not in (None, program.name):
                raise UsageError(
                    f"{override}: {name} is an experiment of {owner}, not of {program.name}; write python -m "
                    f"sd_lightning.{owner} experiment={name}"
                )


def explain(error: Exception, command_line: CommandLine) -> str | None:
    """Return a one-line message for an exception that ended a program.

    Returns:
        The line, without ``error: ``; None if it is not a user error.
    """
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UsageError):
        return str(error)
    text, package = None, raised_by(error)
    if isinstance(error, OverrideParseException):
        text = _unreadable_override(error.override, error.message, command_line)
    elif isinstance(error, MissingConfigException):
        text = _missing_config(error, command_line)
    elif isinstance(error, OmegaConfBaseException):
        text = _bad_value(error, command_line)
    elif isinstance(error, HydraException):
        text = _bad_composition(error, command_line)
    elif isinstance(error, yaml.YAMLError):
        text = f"a config file is no valid YAML: {error}"
    elif isinstance(error, ValueError | OSError) and package == "hydra":
        text = _bad_choice(command_line) or f"command line: {error}; see --help"
    # Arguments that Lightning checks only when it starts.
    elif package == "lightning" and (isinstance(error, ValueError) or "Misconfiguration" in type(error).__name__):
        text = f"trainer: {error} (change trainer.*, or see where with HYDRA_FULL_ERROR=1)"
    return text and " ".join(text.split())


def unreadable(arguments: Sequence[str], command_line: CommandLine) -> str:
    """Return a message for argparse's error, with the setting that an unknown option most likely means."""
    setting = _option_as_setting(str(command_line.problem), arguments, command_line)
    remedy = f"write {setting}" if setting else "write settings as key=value"
    return f"command line: {command_line.problem}; {remedy}, put options such as --cfg job before them, and see --help"


def _bad_choice(command_line: CommandLine) -> str | None:
    """Return a message for a group choice that is no name, such as ``logger=null``."""
    for override in command_line.overrides:
        group, _, value = override.lstrip("+").partition("=")
        if command_line.is_group(group) and re.fullmatch(r"(?i)null|true|false|[\d.eE+-]+", value):
            options = sorted({file.stem for each in command_line.folders for file in Path(each, group).glob("*.yaml")})
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
    if value.startswith("["):
        elements = (each.strip() for each in value.strip("[]").split(","))
        spelled = (each if re.fullmatch(r"[\w.+ -]+", each) else list_element(each) for each in elements if each)
        quoted = shlex.quote(f"{key}=[{','.join(spelled)}]")
    else:
        quoted = f"{key}='\"{value}\"'" if "'" not in value else shlex.quote(f'{key}="{value}"')
    return (
        f"cannot read {override!r} ({reason}); expected key=value, with special characters "
        f"quoted for Hydra inside quotes for the shell: {quoted}"
    )


def _option_as_setting(message: str, arguments: Sequence[str], command_line: CommandLine) -> str | None:
    """Return the setting that an unknown option, such as ``--strategy ddp``, most likely means."""
    unknown = re.search(r"unrecognized arguments: --([\w.-]+)(=\S*)?", message)
    if not unknown:
        return None
    name = unknown[1].replace("-", "_")
    value = (unknown[2] or "").lstrip("=")
    if f"--{unknown[1]}" in arguments:
        following = [*arguments[arguments.index(f"--{unknown[1]}") + 1 :], "-"][0]
        value = "true" if following.startswith("-") or "=" in following else following
    renamed = _by_another_name(name, value, command_line)
    if renamed is None and (name in command_line.groups or name in paths(command_line.defaults)):
        return f"{name}={our_value(name, value)}"
    return renamed or _of_another_option(name, value, command_line)


def _missing_config(error: Any, command_line: CommandLine) -> str:
    wanted = error.missing_cfg_file
    if not wanted:
        return str(error)
    for each in command_line.overrides:
        group, _, value = each.lstrip("+").partition("=")
        if group == "model" and "/" in value and wanted == f"{group}/{value}":
            return f"{each}: expected the kind of a model; write {group}={model_like(value)} {group}.pretrained={value}"
    if error.options is None:
        return _missing_primary(str(wanted).removesuffix(".yaml"), command_line)
    group, _, name = wanted.rpartition("/")
    ours = our_value(group, name)
    near = [ours] if ours in error.options else difflib.get_close_matches(name, error.options, n=1)
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
        if absent[1] in paths(command_line.defaults):
            return f"~{absent[1]}: its value is null already; leave this out"
        near = command_line.nearest(absent[1])
        return f"~{absent[1]}: there is no such key{f'; the nearest is {near}' if near else ''}"
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
    return next((each for each in command_line.overrides if each.lstrip("+~").partition("=")[0] == key), key)


def _unknown_key(override: str, key: str, command_line: CommandLine) -> str:
    near = command_line.nearest(key)
    value = override.partition("=")[2]
    parent, _, name = key.rpartition(".")
    section, _, last = (near or "").rpartition(".")
    is_typo = section == parent and difflib.get_close_matches(name, [last], cutoff=0.9)
    argument = None if is_typo else nearest_argument(command_line.default_at(parent), name)  # imports its target
    as_argument = f"+{parent}.{argument}={value}"
    setting = (
        _by_another_name(key, value, command_line)
        or (as_argument if argument == name else None)
        or _of_another_option(key, value, command_line)
        or (as_argument if argument and near in (None, parent) else None)
    )
    if setting:
        remedy = f"; write {setting}"
    elif near and "=" in override and not isinstance(command_line.default_at(near), dict):
        remedy = f"; write {near}={our_value(near, value)}"
    elif near and key.startswith(f"{near}."):
        below = command_line.default_at(near)
        names = [str(each) for each in below if each not in SPECIAL_KEYS] if isinstance(below, dict) else []
        remedy = f"; {near} has {', '.join(names)}" if names else f"; {near} has no keys below it"
    elif near:
        remedy = f"; the nearest is {near}"
    else:
        names = [str(each) for each in command_line.defaults if each not in SPECIAL_KEYS]
        remedy = f"; top-level keys are {', '.join(names)}"
    return f"{override}: there is no key {key!r}{remedy}"


def _by_another_name(key: str, value: str, command_line: CommandLine) -> str | None:
    """Return our override for a setting that is given by another tool's name."""
    known = paths(command_line.defaults)
    candidates = in_our_words(key, value)
    for ours, meant in candidates:
        if ours in known and isinstance(command_line.default_at(ours), list) and not meant.startswith("["):
            return shlex.quote(f"{ours}=[{list_element(meant)}]")
        if ours in known:
            return f"{ours}={meant}"
    found = (_of_another_option(ours, meant, command_line) for ours, meant in candidates)
    return next(filter(None, found), None)


def _of_another_option(key: str, value: str, command_line: CommandLine) -> str | None:
    """Return the override that sets a key together with the group choice that adds it."""
    option = command_line.option_with(key)
    return f"{option} {key}={value}" if option else None


def _bad_value(error: Any, command_line: CommandLine) -> str:
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

    key = getattr(error, "full_key", None) or ""
    reason = str(getattr(error, "msg", None) or error).partition("\n    full_key")[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key or reason} has no value and no default; give one: {key}=<value>"
    missing = re.search(r"Missing mandatory value: (\S+)", reason)
    if missing:  # found while resolving another key
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


def raised_by(error: BaseException) -> str:
    """Return the top-level package of the code that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] if trace else ""
