"""Description of a program for the command line, and its groups and experiments in ``conf/``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

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
    given: Mapping[str, set[str]] = field(default_factory=dict)
    """Section -> arguments that the program passes itself; see :func:`sd_lightning._conf.check`."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Key -> type, for keys that no target's signature covers or that have a narrower type here."""
    words: str | None = None
    """Setting that takes the words of the command line without ``=``, and folders with it, as a list."""

    @property
    def actions(self) -> tuple[str, ...]:
        """Values of the setting ``action``, which may also be written as a word; empty if it has no such setting."""
        return get_args(self.hints.get("action"))


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
