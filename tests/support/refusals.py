"""Programs called in this process, and what a mistake on their command lines must end in."""

import importlib
import shlex
import shutil
import sys
from pathlib import Path
from stat import S_ISDIR
from types import ModuleType
from typing import Any

import pytest

from sd_lightning import _conf


def call(command: str) -> Any:
    """Run an entry point in this process; return its exit code, or the exception that escaped from it."""
    program, *arguments = shlex.split(command)
    module: ModuleType = importlib.import_module(f"sd_lightning.{program}")
    before, sys.argv = sys.argv, [f"{program}.py", *arguments]
    try:
        _conf.main(module.PROGRAM)
        return 0
    except SystemExit as end:
        return end.code
    except Exception as error:
        return error
    finally:
        sys.argv = before


def remove_new(before: dict[str, tuple[int, int]], root: Path) -> None:
    for name in contents(root).keys() - before.keys():
        shutil.rmtree(name, ignore_errors=True) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Names of everything below a folder; of files also size and time of change."""
    stats = {str(path): path.lstat() for path in sorted(root.rglob("*"))}
    return {k: (-1, 0) if S_ISDIR(stat.st_mode) else (stat.st_size, stat.st_mtime_ns) for k, stat in stats.items()}


def refuse(command: str, words: tuple[str, ...], root: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command, assert that it ends as a mistake of the user should, and return the message."""
    before = contents(root)
    capfd.readouterr()
    code = call(command)
    out, err = capfd.readouterr()
    after = contents(root)
    remove_new(before, root)  # or one failure would make others
    assert code == 2, code
    assert not out
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    position = 0
    for word in words:
        found = err.find(word, position)
        assert found >= 0, f"no {word!r} after column {position} in: {err}"
        position = found + 1
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, "a refused command must not touch the disk"
    return err
