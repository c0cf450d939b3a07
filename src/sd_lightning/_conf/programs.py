"""The programs that share ``conf/``: whose groups and experiments are whose, and what ``--help`` says of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sd_lightning._errors import UsageError

PROGRAMS = ("train", "dreambooth", "generate", "export")
_INSTEAD = {
    ("generate", "model"): "write run=runs/<name>, or model.pretrained=<hub id or folder>",
    ("export", "model"): "write run=runs/<name>",
}
"""By program and group: what takes the group's place there."""


def groups_of(config_name: str, folder: Path) -> dict[str, str | None]:
    """Return the config groups that a primary config has a choice of, with its own choices."""
    import yaml

    path = folder / f"{config_name}.yaml"
    if not path.is_file():
        return {}
    defaults = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
    chosen = {str(name): option for entry in defaults if isinstance(entry, dict) for name, option in entry.items()}
    return {name: option for name, option in chosen.items() if not name.startswith("override ")}


def program_of(experiment: Path, folder: str) -> str | None:
    """Return the program that an experiment is for; None if it may be for any.

    It stands in the command of the file's comment, or in its name, if it is one of ``folder`` (``dreambooth_8gb``).
    """
    text = experiment.read_text(encoding="utf-8")
    command = re.search(rf"^#.*python -m sd_lightning\.(\w+) experiment={experiment.stem}\b", text, re.MULTILINE)
    if command and command[1] in PROGRAMS:
        return command[1]
    prefix = experiment.stem.partition("_")[0]
    return prefix if prefix in PROGRAMS and experiment.is_relative_to(folder) else None


def check_choices(overrides: Sequence[str], program: str, folders: Sequence[str], more_groups: set[str]) -> None:
    """Refuse groups and experiments of another program, which Hydra would take, or refuse without naming it.

    Args:
        overrides: As the user wrote them.
        program: The program that runs.
        folders: Config folders; the first one has the primary configs of all programs.
        more_groups: Groups that are allowed besides the program's own.

    Raises:
        UsageError: Naming the program that takes the choice.
    """
    groups = {name: groups_of(name, Path(folders[0])) for name in PROGRAMS}
    for override in overrides:
        group, _, value = override.lstrip("+").partition("=")
        owners = [name for name in PROGRAMS if group in groups[name]]
        if owners and program not in owners and group not in more_groups:
            plain = f"python -m sd_lightning.{owners[0]} {group}={value}"
            remedy = _INSTEAD.get((program, group), f"leave it out, or write {plain}")
            raise UsageError(
                f"{override}: {program} has no group {group!r}, which is of {' and '.join(owners)}; {remedy}"
            )
        if group != "experiment":
            continue
        for name in value.split(","):
            files = [file for folder in folders if (file := Path(folder, group, f"{name}.yaml")).is_file()]
            owner = program_of(files[-1], folders[0]) if files else None
            if owner not in (None, program):
                raise UsageError(
                    f"{override}: {name} is an experiment of {owner}, not of {program}; write python -m "
                    f"sd_lightning.{owner} experiment={name}"
                )


def help_of(program: str, folder: str) -> str:
    """Return what ``--help`` lists: a program's groups with their options, its own settings with their comments."""
    lines = ["Groups, written group=option; the default is in brackets:"]
    for group, chosen in groups_of(program, Path(folder)).items():
        files = sorted(Path(folder, group).glob("*.yaml"))
        if group == "experiment":
            files = [file for file in files if program_of(file, folder) in (None, program)]
        options = f"{group} [{chosen or 'none'}]: {', '.join(file.stem for file in files)}"
        lines += textwrap.wrap(options, 116, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    lines = lines if len(lines) > 1 else []
    text = Path(folder, f"{program}.yaml").read_text(encoding="utf-8")
    own = re.split(r"^(?=hydra:)", re.split(r"^(?=\w)(?!defaults)", text, maxsplit=1, flags=re.M)[1], flags=re.M)[0]
    own = re.sub(r"^ *_target_:.*\n", "", own, flags=re.M).strip()
    lines += ["", "Settings of its own, written key=value:", textwrap.indent(own, "  ")]
    lines += [
        "",
        "--cfg job shows all settings as the command line sets them; --hydra-help shows other options.",
    ]
    return "\n".join(lines).strip().replace("$", "$$")  # Hydra puts its own texts in the places of $NAME
