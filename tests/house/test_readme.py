"""What the README, the pages beside it and the guides of docs/ say exists: commands, Python imports, names, links.

Of a command these are its make targets, entry points, overrides, extras, files and cases. A command that cannot be
checked here says why in a comment at its end: `… # needs: two GPUs`.
"""

import ast
import importlib
import importlib.util
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from places import REPO

PAGES = {
    str(page.relative_to(REPO)): page.read_text(encoding="utf-8")
    for page in [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").glob("*.md"))]
}
FENCE = re.compile(r"^ {0,3}```(?:bash|sh|shell)\s*$(.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^ {0,3}```(\w*)\s*$(.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
# Programs of others, which a page may call without a check.
FOREIGN = {"cd", "git", "source", "export", "ls", "open", "tensorboard", "jupyter", "deactivate"}
PROGRAMS = {f"sd_lightning.{file.stem}" for file in (REPO / "conf").glob("*.yaml")}


class Command(NamedTuple):
    """One command line of a page."""

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
            if flag in ("-m", "--module") and name.split(".")[0] == "sd_lightning":
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


def inline_code(markdown: str) -> list[str]:
    """What stands between single backticks, without what has a placeholder in it."""
    spans = re.findall(r"`([^`]+)`", ANY_FENCE.sub("", markdown))
    return [" ".join(span.split()) for span in spans if not re.search("[…<]", span)]


def inline_commands(markdown: str) -> list[Command]:
    """The commands in a text's sentences and tables."""
    texts = [text for text in inline_code(markdown) if re.match(r"(make|python|pip) \S", text)]
    return [Command(text, shlex.split(text), None) for text in texts]


COMMANDS = [command for page in PAGES.values() for command in commands(page) + inline_commands(page)]
CHECKED = list({command.text: command for command in COMMANDS if command.needs is None}.values())


def program(command: Command) -> str:
    return Path(command.words[0]).name


def overrides(command: Command) -> tuple[str, list[str]] | None:
    """(program, Hydra arguments) that a command ends up calling, if any."""
    if command.entry_point in PROGRAMS:
        return command.entry_point, command.words[command.words.index(command.entry_point) + 1 :]
    if program(command) == "make" and "train" in command.words:
        arguments = [word.removeprefix("ARGS=") for word in command.words if word.startswith("ARGS=")]
        return "sd_lightning.train", shlex.split(" ".join(arguments))
    return None


def text_of(command: Command) -> str:
    return command.text


def test_readme_shows_the_two_commands() -> None:
    texts = [command.text for command in commands(PAGES["README.md"])]
    assert "make train" in texts
    assert "make test" in texts


@pytest.mark.parametrize("command", [c for c in CHECKED if program(c) == "make"], ids=text_of)
def test_make_target_exists(command: Command) -> None:
    targets = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    rules = re.findall(r"^([a-z][a-z-]*)\s*:(?!=)", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert set(targets) <= set(rules)


@pytest.mark.parametrize("command", {str(overrides(c)): c for c in CHECKED if overrides(c)}.values(), ids=text_of)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_command_composes(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_point, arguments = overrides(command) or ("", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [entry_point, *arguments, "--cfg", "job"])
    try:
        runpy.run_module(entry_point, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "showing a configuration must not write files"


@pytest.mark.parametrize("entry_point", sorted(PROGRAMS))
def test_program_starts_as_a_process_of_its_own(
    entry_point: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_python("-m", entry_point, "--cfg", "job", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "showing a configuration must not write files"


@pytest.mark.parametrize(
    "command", [c for c in CHECKED if c.entry_point and c.entry_point not in PROGRAMS], ids=text_of
)
def test_other_entry_point_can_be_started(command: Command) -> None:
    assert command.entry_point is not None
    spec = importlib.util.find_spec(command.entry_point)
    assert spec is not None and spec.origin is not None
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text(encoding="utf-8")


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
    if command.entry_point or program(command) in FOREIGN | {"make", "pip", "pip3"} or "pip" in command.words:
        return
    assert program(command).startswith("python"), f"unknown program; say what it needs: {command.text}  # needs: …"
    if command.words[1:3] == ["-m", "pytest"] or command.words[1:3] == ["-m", "venv"]:
        return
    script = REPO / command.words[1]
    assert script.is_file(), f"{command.words[1]} does not exist"
    if script == REPO / "benchmarks" / "run.py":
        for case in (word for word in command.words[2:] if not word.startswith("-")):
            assert (REPO / "benchmarks" / "cases" / f"{case}.py").is_file()


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_import_what_exists(page: str) -> None:
    for block in (text for language, text in ANY_FENCE.findall(PAGES[page]) if language == "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES)
def test_names_and_paths_in_the_text_exist(page: str) -> None:
    text = " ".join(inline_code(PAGES[page]))
    for name in re.findall(r"(?<![\w/.-])sd_lightning(?:\.\w+)+", text):
        pkgutil.resolve_name(name)
    for path in re.findall(r"(?<![\w/.-])(?:src|tests|conf|benchmarks|examples|docs)/[\w./-]*", text):
        assert (REPO / path).exists(), f"{page} names {path}"


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", ANY_FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", ANY_FENCE.sub("", PAGES[page])):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (REPO / page).parent / path if path else REPO / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}"


def test_the_index_names_every_guide() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", PAGES["docs/README.md"]))
    assert {f"docs/{name}" for name in linked} | {"docs/README.md"} == {page for page in PAGES if "/" in page}


def test_the_readme_is_short_and_has_three_figures() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150
    figures = PAGES["README.md"].partition("<!-- headlines -->")[2].partition("<!-- /headlines -->")[0]
    assert len(re.findall(r"^- .*\*\*.+\*\*", figures, re.MULTILINE)) == 3


def test_reading_of_inline_commands() -> None:
    text = "`make test`, `python benchmarks/run.py\nimport_time`, not `pip install x…`, `make`.\n```\n`make no`\n```\n"
    assert [command.words for command in inline_commands(text)] == [
        ["make", "test"],
        ["python", "benchmarks/run.py", "import_time"],
    ]


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
deepspeed --hostfile=hosts --module sd_lightning.train seed=1
```
```python
make = 1
```
"""
    )
    assert [program(command) for command in found] == ["make", "python", "cd", "pip", "torchrun", "deepspeed"]
    assert [command.needs for command in found] == [None, "a GPU", None, None, None, None]
    assert overrides(found[0]) == ("sd_lightning.train", ["strategy=ddp", "trainer.devices=2"])
    assert overrides(found[1]) == ("sd_lightning.train", ["model=sd21", "data.train_data_dir=/my images"])
    assert overrides(found[2]) is None
    assert overrides(found[4]) == ("sd_lightning.train", ["data.seed=1"])
    assert overrides(found[5]) == ("sd_lightning.train", ["seed=1"])
