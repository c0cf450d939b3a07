"""The parsed command line, and the default configuration that it starts from."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sd_lightning._conf.check import SPECIAL_KEYS
from sd_lightning._conf.folder import config_dir
from sd_lightning._conf.programs import Program, groups_of
from sd_lightning._errors import UsageError


@dataclass(frozen=True)
class CommandLine:
    """Parsed command line of a program."""

    config_name: str
    """The primary config."""
    folders: tuple[str, ...]
    """Config folders: the primary one and, if given, the user's ``--config-dir``."""
    overrides: tuple[str, ...]
    is_plain: bool = False
    """Whether it asks for one run with the package's configs, and for no other feature of Hydra."""
    problem: str | None = None
    """Argparse's error, if any; the other attributes are then those of an empty command line."""

    @classmethod
    def parse(cls, config_name: str, arguments: Sequence[str]) -> CommandLine:
        """Read Hydra's options."""
        from hydra._internal.utils import get_args_parser

        parser = get_args_parser()
        parser.allow_abbrev = False  # or --experiment would be Hydra's --experimental-rerun
        parser.error = _refuse  # type: ignore[method-assign]
        try:
            options = parser.parse_args(list(arguments))
        except UsageError as error:
            return cls(config_name, (config_dir(),), (), problem=str(error))
        folder = str(Path(options.config_path or config_dir()).absolute())
        more = (str(Path(options.config_dir).absolute()),) if options.config_dir else ()
        name = str(options.config_name or config_name).removesuffix(".yaml")
        asked = {key for key, value in vars(options).items() if value not in (None, False)}
        is_plain = asked <= {"overrides", "run"} and "hydra.mode=" not in " ".join(options.overrides)
        return cls(name, (folder, *more), tuple(options.overrides), is_plain)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """Composed configuration with the user's group choices, but without the user's values."""
        matches = (re.fullmatch(r"\+?([\w/]+)(@[\w.]+)?=[\w/-]+", each) for each in self.overrides)
        choices = [chosen[0] for chosen in matches if chosen and self.is_group(chosen[1])]
        for overrides in (choices, []) if choices else ([],):
            try:
                return self.compose(overrides)
            except Exception:  # only needed for a message about another error
                continue
        return {}

    def is_group(self, name: str) -> bool:
        """Return whether a config group of that name exists."""
        return any(Path(folder, name).is_dir() for folder in self.folders)

    def option_with(self, key: str) -> str | None:
        """Return the group choice, such as ``trainable=lora``, that would add a key."""
        import yaml

        for path in sorted(path for folder in self.folders for path in Path(folder).glob("*/*.yaml")):
            text, group = path.read_text(encoding="utf-8"), path.parent.name
            is_named = key == group or key.rpartition(".")[2] in text  # a text search is faster than parsing
            if group == "experiment" or group not in self.groups or not is_named:
                continue
            node = yaml.safe_load(text)
            if key in paths(node if text.startswith("# @package _global_") else {group: node}):
                return f"{group}={path.stem}"
        return None

    @functools.cached_property
    def groups(self) -> set[str]:
        """Config groups in the primary config's defaults list."""
        return {group for folder in self.folders for group in groups_of(self.config_name, folder)}

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

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the configuration with these overrides, interpolations not resolved."""
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
        keys = paths(self.defaults)
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


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def given_keys() -> list[str]:
    """Return the dotted keys of this program's command line as written, without ``+``."""
    overrides = CommandLine.parse("", sys.argv[1:]).overrides
    return [each.lstrip("+").partition("=")[0] for each in overrides]


def with_words(arguments: Sequence[str], setting: str) -> list[str]:
    """Turn the words of a command line that are no settings, options or their values into one setting, a list.

    Args:
        arguments: The command line.
        setting: The setting's name: ``["runs/a", "x=1"]`` becomes ``["x=1", 'runs=["runs/a"]']``.

    Returns:
        The command line for Hydra; as it was if it has no such words.
    """
    kept, place = list(arguments), 0
    words: list[str] = []
    for each in CommandLine.parse("", arguments).overrides:
        is_path = each.startswith(("/", "./", "../")) or (bool(each) and Path(each).is_dir())
        if is_path or not ("=" in each or re.fullmatch(r"~[\w.@]+", each)):
            place = place if words else kept.index(each)  # argparse wants all settings in one place
            words.append(each)
            kept.remove(each)
    return [*kept[:place], f"{setting}=[{','.join(map(_quoted, words))}]", *kept[place:]] if words else kept


def with_action(arguments: Sequence[str], actions: Collection[str]) -> list[str]:
    """Turn words of a command line that name an action into the setting ``action``, wherever they stand."""
    words = {each for each in CommandLine.parse("", arguments).overrides if each in actions}
    return [f"action={each}" if each in words else each for each in arguments]


def check_action(program: Program, overrides: Sequence[str]) -> None:
    """Check the words of a program that has actions.

    Raises:
        UsageError: A word is nearly the name of an action, or there are two actions.
    """
    for word in (each for each in overrides if each.isalpha()):
        nearest = difflib.get_close_matches(word, program.actions, 1)
        if nearest:
            raise UsageError(
                f"{program.name} got {word!r}; expected an action ({', '.join(program.actions)}), or settings as "
                f"key=value; write {program.name} {nearest[0]}"
            )
    chosen = [each.partition("=")[2] for each in overrides if each.startswith("action=")]
    if program.actions and len(chosen) > 1:
        raise UsageError(f"{program.name} got the actions {' and '.join(chosen)}; expected one; leave the others out")


def _quoted(text: str) -> str:
    """Quote a text for Hydra's grammar, in which a backslash is one but before a quote, and for OmegaConf's."""
    text = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)  # no interpolation
    text = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ("\\" if found[2] else "") + found[2], text)
    return f'"{text}"'


def paths(node: Any, path: str = "") -> list[str]:
    """Return the dotted keys of all sections and values of a tree."""
    if not isinstance(node, dict):
        return [path]
    items = [(key, value) for key, value in node.items() if key not in SPECIAL_KEYS]
    below = [found for key, value in items for found in paths(value, f"{path}.{key}" if path else str(key))]
    return [path, *below] if path else below
