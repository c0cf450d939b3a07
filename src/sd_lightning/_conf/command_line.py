"""Programs and their configuration files, the parsed command line, and the default configuration it starts from."""

from __future__ import annotations

import difflib
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from sd_lightning._conf.check import SPECIAL_KEYS, join
from sd_lightning._errors import UsageError

Task = Callable[[Any], int | None]


@dataclass(frozen=True)
class Program:
    """A program with a primary config in ``conf/``."""

    name: str
    """Name of its primary config and of its module: ``python -m sd_lightning.<name>``."""
    task: Task | str
    """Receives the configuration and returns the exit code (None is 0). A dotted name is imported when the
    configuration has been checked."""
    among: tuple[str, ...] = ()
    """Names of the programs that share ``conf/``."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Group of another program -> what to write instead."""
    reserved: Mapping[str, set[str]] = field(default_factory=dict)
    """Section -> arguments that the program passes itself; see :func:`sd_lightning._conf.check`."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Key -> type, for keys that no target's signature covers or that have a narrower type here."""
    words: str | None = None
    """Setting that takes the words of the command line without ``=``, and folders with it, as a list."""

    @property
    def actions(self) -> tuple[str, ...]:
        """Values of the setting ``action``, which may also be written as a word; empty if it has no such setting."""
        return get_args(self.hints.get("action"))


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
    unknown: tuple[str, ...] = ()
    """Arguments that are neither settings nor options of Hydra."""
    problem: str | None = None
    """Argparse's error, if any; the overrides are then empty."""

    @classmethod
    def parse(cls, config_name: str, arguments: Sequence[str]) -> CommandLine:
        """Read Hydra's options."""
        from hydra._internal.utils import get_args_parser

        parser = get_args_parser()
        parser.allow_abbrev = False  # or --experiment would be Hydra's --experimental-rerun
        parser.error = _refuse  # type: ignore[method-assign]
        try:
            options, unknown = parser.parse_known_args(list(arguments))
        except UsageError as error:
            return cls(config_name, (config_dir(),), (), problem=str(error))
        if unknown:
            problem = f"unrecognized arguments: {' '.join(unknown)}"
            return cls(config_name, (config_dir(),), (), unknown=tuple(unknown), problem=problem)
        folder = str(Path(options.config_path or config_dir()).absolute())
        more = (str(Path(options.config_dir).absolute()),) if options.config_dir else ()
        name = str(options.config_name or config_name).removesuffix(".yaml")
        asked = {key for key, value in vars(options).items() if value not in (None, False)}
        is_plain = asked <= {"overrides", "run"} and "hydra.mode=" not in " ".join(options.overrides)
        return cls(name, (folder, *more), tuple(options.overrides), is_plain)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """Composed configuration with the user's group choices, but without the user's values."""
        matches = (re.fullmatch(r"\+?([\w/]+)(@[\w.]+)?=([\w/-]+|\[[\w/, -]+\])", each) for each in self.overrides)
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

    def options_of(self, group: str) -> list[str]:
        """Return the names of a group's configs."""
        return sorted(file.stem for folder in self.folders for file in Path(folder, group).glob("*.yaml"))

    def option_with(self, key: str) -> str | None:
        """Return the group choice, such as ``trainable=lora``, that would add a key."""
        import yaml

        found = (path for folder in self.folders for path in Path(folder).glob("*/*.yaml"))
        # An option with the name of a program, such as data=dreambooth, is that program's.
        for path in sorted(found, key=lambda path: ((path.parent.parent / path.name).is_file(), path)):
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
        node, path = self.defaults, ""
        for part in key.split("."):
            names = [str(each) for each in node] if isinstance(node, dict) else []
            near = [part] if part in names else difflib.get_close_matches(part, names, n=1)
            if not near:
                break
            path = join(path, near[0])
            node = node[near[0]]
        else:
            return path
        return next(iter(difflib.get_close_matches(key, keys, n=1)), path or None)


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def given_keys() -> list[str]:
    """Return the dotted keys of this program's command line as written, without ``+``."""
    overrides = CommandLine.parse("", sys.argv[1:]).overrides
    return [each.lstrip("+").partition("=")[0] for each in overrides]


def with_words_as_settings(program: Program, arguments: Sequence[str]) -> list[str]:
    """Turn the words of a command line, which are no settings, options or their values, into settings.

    Args:
        program: For ``words="runs"``, ``["runs/a", "x=1"]`` becomes ``['runs=["runs/a"]', "x=1"]``; an action's name
            becomes ``action=<name>``.
        arguments: The command line.

    Returns:
        The command line for Hydra; as it was if it has no such words.
    """
    overrides = CommandLine.parse("", arguments).overrides
    actions = {each for each in overrides if each in program.actions}
    kept, place = [f"action={each}" if each in actions else each for each in arguments], 0
    words: list[str] = []
    for each in overrides if program.words else ():
        is_path = each.startswith(("/", "./", "../")) or (bool(each) and Path(each).is_dir())
        if is_path or not ("=" in each or re.fullmatch(r"~[\w.@]+", each)):
            place = place if words else kept.index(each)  # argparse wants all settings in one place
            words.append(each)
            kept.remove(each)
    return [*kept[:place], f"{program.words}=[{','.join(map(_quoted, words))}]", *kept[place:]] if words else kept


def check_words(program: Program, overrides: Sequence[str]) -> None:
    """Check the words of a command line, and that a setting that they may stand for is given once.

    Raises:
        UsageError: A word is nearly the name of an action, or a setting is given twice.
    """
    for word in (each for each in overrides if each.isalpha()):
        near = difflib.get_close_matches(word, program.actions, n=1)
        if near:
            raise UsageError(
                f"{program.name} got {word!r}; expected an action ({', '.join(program.actions)}) or settings as "
                f"key=value; write {program.name} {near[0]}"
            )
    for key in (program.words, "action"):
        if sum(each.startswith(f"{key}=") for each in overrides) > 1:
            raise UsageError(f"{program.name} got {key}= twice, as words or as settings; write it once")


def _quoted(text: str) -> str:
    """Quote a text for Hydra's grammar, in which a backslash is one but before a quote, and for OmegaConf's."""
    text = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)  # no interpolation
    text = re.sub(r'(\\*)("|$)', lambda each: 2 * each[1] + ("\\" if each[2] else "") + each[2], text)
    return f'"{text}"'


def paths(node: Any, path: str = "") -> list[str]:
    """Return the dotted keys of all sections and values of a tree."""
    if not isinstance(node, dict):
        return [path]
    items = [(key, value) for key, value in node.items() if key not in SPECIAL_KEYS]
    below = [each for key, value in items for each in paths(value, join(path, str(key)))]
    return [path, *below] if path else below


def groups_of(config_name: str, folder: str | Path) -> dict[str, str | None]:
    """Return the config groups in a primary config's defaults list, with its own choices."""
    import yaml

    path = Path(folder, f"{config_name}.yaml")
    if not path.is_file():
        return {}
    defaults = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
    chosen = {str(name): option for entry in defaults if isinstance(entry, dict) for name, option in entry.items()}
    return {name: option for name, option in chosen.items() if not name.startswith("override ")}


def owner_of(experiment: Path, folder: str, programs: tuple[str, ...]) -> str | None:
    """Return the program that an experiment is for; None if it may be for any.

    The command in the file's comment names it, or the prefix of a file in ``folder`` (``dreambooth_8gb``).
    """
    text = experiment.read_text(encoding="utf-8")
    command = re.search(rf"^#.*python -m sd_lightning\.(\w+) experiment={experiment.stem}\b", text, re.MULTILINE)
    prefix = experiment.stem.partition("_")[0] if experiment.is_relative_to(folder) else None
    return next((name for name in (command and command[1], prefix) if name in programs), None)


def help_of(program: Program, folder: str) -> str:
    """Return the text of ``--help``: a program's groups with their options, its own settings with their comments."""
    lines = []
    for group, chosen in groups_of(program.name, folder).items():
        files = sorted(Path(folder, group).glob("*.yaml"))
        if group == "experiment":
            files = [file for file in files if owner_of(file, folder, program.among) in (None, program.name)]
        options = f"{group} [{chosen or 'none'}]: {', '.join(file.stem for file in files)}"
        lines += textwrap.wrap(options, 116, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if lines:
        lines.insert(0, "Groups, written group=option; the default is in brackets:")
    text = Path(folder, f"{program.name}.yaml").read_text(encoding="utf-8")
    own = re.split(r"^(?=hydra:)", re.split(r"^(?=\w)(?!defaults)", text, maxsplit=1, flags=re.M)[1], flags=re.M)[0]
    own = re.sub(r"^ *_target_:.*\n", "", own, flags=re.M).strip()
    lines += ["", "Settings of its own, written key=value:", textwrap.indent(own, "  "), ""]
    lines += ["--cfg job shows all settings as the command line sets them; --hydra-help shows other options."]
    return "\n".join(lines).strip().replace("$", "$$")  # Hydra substitutes $NAME


def config_dir() -> str:
    """Return the absolute path of the configuration folder.

    The checkout's ``conf/`` if the package runs from a checkout (an editable install copies
    the YAML once and would not see later edits), else the one inside the package.

    Whoever composes these files asks for their folder first, so this registers the resolver that they use.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("dtype_of", dtype_of, replace=True)
    return str(_config_dir(Path(__file__).resolve().parents[1]))


def dtype_of(precision: object) -> str:
    """Return the dtype that a ``trainer.precision`` computes in; settings may name it as ``${dtype_of:…}``."""
    bits, _, _ = str(precision).partition("-")
    return {"bf16": "bfloat16", "16": "float16"}.get(bits, "float32")


def _config_dir(package: Path) -> Path:
    root = package.parents[1]
    in_checkout = package.parent.name == "src" and (root / "pyproject.toml").is_file() and (root / "conf").is_dir()
    return (root if in_checkout else package) / "conf"
