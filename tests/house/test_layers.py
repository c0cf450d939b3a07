"""The rule of the house: imports between rooms point down, and each room stays free of what it must not know."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import PACKAGE

ORDER = (
    ("_errors",),
    ("_imports", "_launchers", "_console"),
    ("_conf",),
    ("state",),
    ("storage", "diffusion", "gemini"),
    ("report", "quantization"),
    ("models",),
    ("data",),
    ("planner",),
    ("strategies",),
    ("training",),
    ("callbacks",),
    ("remote",),
    ("apps",),
    ("train", "generate", "evaluate", "export", "precompute", "plan", "compare", "doctor"),
    ("dreambooth",),
    ("ui",),
)
"""Rooms (folders, and files in the root) from the lowest up. Those of one row do not know each other."""
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

LIGHTNING = {"lightning", "pytorch_lightning"}
HYDRA = {"hydra", "omegaconf"}
MODELS = {"diffusers", "transformers", "accelerate"}
MAY_KNOW = {
    "data": LIGHTNING,
    "models": MODELS,
    "training": LIGHTNING | MODELS,
    "planner": MODELS,
    "strategies": LIGHTNING | MODELS,
    "callbacks": LIGHTNING | MODELS,
    "remote": LIGHTNING,
    "_conf": HYDRA,
    "apps": LIGHTNING | HYDRA | MODELS,
    "train": HYDRA,
    "dreambooth": HYDRA,
    "generate": HYDRA,
    "evaluate": HYDRA,
    "export": HYDRA,
    "precompute": HYDRA,
    "plan": HYDRA,
    "compare": HYDRA,
    "doctor": HYDRA,
    "ui": HYDRA | MODELS,
}
"""Which of these libraries a room may import; others none."""
WITHOUT_TORCH = {"_errors", "_imports", "_launchers", "_console", "_conf"}
# Slow to import, or an extra: loaded by the function that needs them. Hydra is light only for the entry points.
LAZY = {
    "bitsandbytes",
    "boto3",
    "botocore",
    "datasets",
    "deepspeed",
    "diffusers",
    "fsspec",
    "gcsfs",
    "matplotlib",
    "moto",
    "peft",
    "pyarrow",
    "ray",
    "sklearn",
    "transformers",
    "wandb",
}

FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """`data/datamodule.py` -> `data.datamodule`; `__init__.py` -> the folder, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    return name.partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, top_level_only: bool = False, type_checking: bool = False) -> Iterator[tuple[str, int]]:
    """Every imported module of a file as an absolute dotted name, with its line.

    `from sd_lightning import data` yields `sd_lightning.data`: the name may be a module. Imports for type checkers
    alone (`if TYPE_CHECKING:`) bind nothing at run time and are left out unless asked for.
    """
    package = ["sd_lightning", *path.relative_to(PACKAGE).parts[:-1]]

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child) and not type_checking:
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield module, child.lineno
                if module.split(".")[0] == "sd_lightning":
                    yield from ((f"{module}.{alias.name}", child.lineno) for alias in child.names)
            if not (top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
                yield from walk(child)

    yield from walk(parse(path))


def inside(name: str) -> str | None:
    """`sd_lightning.data.batch` -> `data.batch`; None for modules of others."""
    head, _, rest = name.partition(".")
    return rest if head == "sd_lightning" else None


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_room_has_its_place() -> None:
    assert {room_of(dotted(path)) for path in FILES} - {""} == LEVEL.keys()


def test_imports_point_down() -> None:
    def upward(path: Path, name: str) -> bool:
        own, room = dotted(path), room_of(inside(name) or "")
        if own == "" or room not in LEVEL or room == room_of(own):  # the package itself only re-exports
            return False
        return LEVEL[room] >= LEVEL[room_of(own)]

    assert not [
        f"{name_of(path)}:{line} imports {name}, which is not below it"
        for path in FILES
        for name, line in imports(path, type_checking=True)
        if upward(path, name)
    ]


def test_files_do_not_import_each_other_in_a_circle() -> None:
    files = {dotted(path): path for path in FILES}

    def below(path: Path) -> set[str]:
        """Return the files that a file imports; `from sd_lightning.data import batch` imports `data.batch` alone."""
        found = {(inside(name), line) for name, line in imports(path, type_checking=True) if inside(name) in files}
        folders = {(str(name).rpartition(".")[0], line) for name, line in found}
        return {str(name) for name, _ in found - folders}

    graph = {name: below(path) - {name} for name, path in files.items() if name}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, with the files


def test_a_room_imports_nothing_that_it_must_not_know() -> None:
    def forbidden(room: str) -> set[str]:
        libraries = (LIGHTNING | HYDRA | MODELS) - MAY_KNOW.get(room, set())
        return libraries | {"torch"} if room in WITHOUT_TORCH else libraries

    assert not [
        f"{name_of(path)}:{line} imports {name}"
        for path in FILES
        for name, line in imports(path)
        if (room := room_of(dotted(path))) and name.split(".")[0] in forbidden(room)
    ]


def test_remote_alone_knows_ray() -> None:
    assert {room_of(dotted(path)) for path in FILES for name, _ in imports(path) if name.split(".")[0] == "ray"} == {
        "remote"
    }


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    def lazy(path: Path) -> set[str]:
        return LAZY if HYDRA & MAY_KNOW.get(room_of(dotted(path)), set()) else LAZY | HYDRA

    assert not [
        f"{name_of(path)}:{line}: import {name} inside the function using it"
        for path in FILES
        for name, line in imports(path, top_level_only=True)
        if name.split(".")[0] in lazy(path)
    ]


def test_datamodule_is_the_only_part_of_data_that_knows_lightning() -> None:
    for path in (PACKAGE / "data").rglob("*.py"):
        if path.name == "datamodule.py":
            continue
        assert not [name for name, _ in imports(path) if name.split(".")[0] in LIGHTNING], name_of(path)


def test_no_file_is_named_for_nothing() -> None:
    named = {part for path in FILES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not named & {"utils", "util", "core", "common", "helpers", "misc"}


def test_no_unpickling_anywhere() -> None:
    for path in FILES:
        for name, line in imports(path):
            assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle"}, f"{name_of(path)}:{line}"
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                assert safe, f"{name_of(path)}:{node.lineno}: torch.load unpickles; add weights_only=True"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from . import state", ["sd_lightning.data", "sd_lightning.data.state"]),
        (
            "from ..state import ParameterShard",
            ["sd_lightning.state", "sd_lightning.state.ParameterShard"],
        ),
        ("import lightning.pytorch as pl", ["lightning.pytorch"]),
        ("def f():\n    import hydra", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lightning", ["typing"]),
        ("try:\n    import ray\nexcept ImportError:\n    pass", ["ray"]),
    ],
)
def test_the_import_reader_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: list[str]
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "probe.py"
    path.write_text(source)
    assert [name for name, _ in imports(path, top_level_only=True)] == expected
