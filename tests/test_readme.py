"""Every shell command of the README exists: its make targets, entry points, overrides, extras, files and cases.

A command that cannot be checked here says why in a comment at its end: `… # needs: two GPUs`.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^ {0,3}```(?:bash|sh|shell)\s*$(.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
# Programs of others, which the README may call without a check.
FOREIGN = {"cd", "git", "source", "export", "ls", "open", "tensorboard", "jupyter", "deactivate"}


class Command(NamedTuple):
    """One command line of the README."""

    text: str
    """The command without its comment, continuation lines joined."""
    words: list[str]
    """Its words as the shell splits them, without leading `NAME=value` assignments."""
    needs: str | None
    """What follows `# needs:`, None if the command has to work here."""

    @property
    def entry_point(self) -> str | None:
        """`sd_lightning.train` for `python -m sd_lightning.train …`, under any launcher."""
        for flag, name in zip(self.words, self.words[1:], strict=False):
            if flag == "-m" and name.split(".")[0] == "sd_lightning":
                return name
        return None


def commands(markdown: str) -> list[Command]:
    """The commands of all shell blocks of a Markdown text, in order."""
    found = []
    for block in FENCE.findall(markdown):
        for line in block.replace("\\\n", " ").splitlines():
            code, _, comment = line.partition(" #") if not line.lstrip().startswith("#") else ("", "", "")
            for part in re.split(r"\s(?:&&|\|\||;)\s", code):
                words = shlex.split(part.strip().removeprefix("$ "))
                while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
                    words.pop(0)
                if words:
                    needs = re.match(r"\s*needs:\s*(.+)", comment)
                    found.append(Command(part.strip(), words, needs.group(1).strip() if needs else None))
    return found


README = commands((REPO / "README.md").read_text(encoding="utf-8"))
CHECKED = [command for command in README if command.needs is None]


def program(command: Command) -> str:
    return Path(command.words[0]).name


def overrides(command: Command) -> tuple[str, list[str]] | None:
    """(entry point, Hydra arguments) that a command ends up calling, if any."""
    if command.entry_point:
        return command.entry_point, command.words[command.words.index(command.entry_point) + 1 :]
    if program(command) == "make" and "train" in command.words:
        arguments = [word.removeprefix("ARGS=") for word in command.words if word.startswith("ARGS=")]
        return "sd_lightning.train", shlex.split(" ".join(arguments))
    return None


def text_of(command: Command) -> str:
    return command.text


def test_readme_shows_the_two_commands() -> None:
    texts = [command.text for command in CHECKED]
    assert "make train" in texts
    assert "make test" in texts


@pytest.mark.parametrize("command", [c for c in CHECKED if program(c) == "make"], ids=text_of)
def test_make_target_exists(command: Command) -> None:
    targets = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    rules = re.findall(r"^([a-z][a-z-]*)\s*:(?!=)", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert set(targets) <= set(rules)


@pytest.mark.parametrize("command", [c for c in CHECKED if overrides(c)], ids=text_of)
def test_command_composes(
    command: Command, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    entry_point, arguments = overrides(command) or ("", [])
    done = run_python("-m", entry_point, *arguments, "--cfg", "job", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "showing a configuration must not write files"


@pytest.mark.parametrize(
    "command", [c for c in CHECKED if program(c) in {"pip", "pip3"} or "pip" in c.words], ids=text_of
)
def test_pip_command_names_what_exists(command: Command) -> None:
    extras = set(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = re.findall(r"(?m)(?:^\.|sd[-_]lightning)\[([\w,-]+)\]", "\n".join(command.words))
    assert {extra for group in named for extra in group.split(",")} <= extras
    for flag, value in zip(command.words, command.words[1:], strict=False):
        assert flag not in {"-c", "-r", "--constraint", "--requirement"} or (REPO / value).is_file()


@pytest.mark.parametrize("command", CHECKED, ids=text_of)
def test_command_is_one_that_somebody_checks(command: Command) -> None:
    if overrides(command) or program(command) in FOREIGN | {"make", "pip", "pip3"} or "pip" in command.words:
        return
    assert program(command).startswith("python"), f"unknown program; say what it needs: {command.text}  # needs: …"
    if command.words[1:3] == ["-m", "pytest"] or command.words[1:3] == ["-m", "venv"]:
        return
    script = REPO / command.words[1]
    assert script.is_file(), f"{command.words[1]} does not exist"
    if script == REPO / "benchmarks" / "run.py":
        for case in (word for word in command.words[2:] if not word.startswith("-")):
            assert (REPO / "benchmarks" / "cases" / f"{case}.py").is_file()


def test_reading_of_shell_blocks() -> None:
    found = commands(
        """
text `make nothing`
```bash
# a comment
make train ARGS="strategy=ddp trainer.devices=2"   # about two minutes
HYDRA_FULL_ERROR=1 .venv/bin/python -m sd_lightning.train \\
    model=sd21 'data.train_data_dir=/my images'  # needs: a GPU
cd x && pip install '.[all]'
torchrun --nproc-per-node 2 -m sd_lightning.train data.seed=1
```
```python
make = 1
```
"""
    )
    assert [program(command) for command in found] == ["make", "python", "cd", "pip", "torchrun"]
    assert [command.needs for command in found] == [None, "a GPU", None, None, None]
    assert overrides(found[0]) == ("sd_lightning.train", ["strategy=ddp", "trainer.devices=2"])
    assert overrides(found[1]) == ("sd_lightning.train", ["model=sd21", "data.train_data_dir=/my images"])
    assert overrides(found[2]) is None
    assert overrides(found[4]) == ("sd_lightning.train", ["data.seed=1"])
