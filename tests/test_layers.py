"""The layer rule of the design: imports point down only, and each layer stays free of what it must not know."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "sd_lightning"

# Dotted name inside the package -> layer; the longest matching prefix counts. A new file has to be placed here.
LAYERS: dict[str, int] = {
    "_errors": 0,
    "_imports": 0,
    "_launchers": 0,
    "_console": 0,
    "_conf": 0,
    "optimizer_change": 1,
    "randomness": 1,
    "gemini": 1,
    "lr_schedules": 1,
    "noise_schedule": 1,
    "objective": 1,
    "safetensors_file": 1,
    "scheduler_state": 1,
    "state_bytes": 1,
    "streamed_tensor": 1,
    "tensor_store": 1,
    "typed_json": 1,
    "architectures": 2,
    "assets": 2,
    "blocks": 2,
    "checkpoint": 2,
    "conditioning": 2,
    "deferred_weights": 2,
    "encoder": 2,
    "flops": 2,
    "generation": 2,
    "inference_memory": 2,
    "latent_diffusion": 2,
    "learned_token": 2,
    "lora": 2,
    "lora_file": 2,
    "memory_forecast": 2,
    "memory_trace": 2,
    "new_folder": 2,
    "pipeline_folder": 2,
    "quantization": 2,
    "report": 2,
    "run_folder": 2,
    "runs": 2,
    "sampling_schedulers": 2,
    "single_file": 2,
    "speed": 2,
    "state": 2,
    "trainer_state": 2,
    "class_images": 2,
    "data": 2,
    "data.datamodule": 3,
    "callbacks": 3,
    "module": 3,
    "precision": 3,
    "strategies": 3,
    "dreambooth": 4,
    "dreambooth_checks": 4,
    "export": 4,
    "generate": 4,
    "preflight": 4,
    "train": 4,
}

LIGHTNING = {"lightning", "pytorch_lightning"}
HYDRA = {"hydra", "omegaconf"}
# Hydra is the entry points' business, and `_conf` is where they keep it.
FORBIDDEN: dict[int, set[str]] = {
    0: LIGHTNING | {"torch", "diffusers", "transformers"},
    1: LIGHTNING | HYDRA | {"diffusers", "transformers", "accelerate"},
    2: LIGHTNING | HYDRA,
    3: HYDRA,
    4: set(),
}
# Slow to import, or an extra: loaded by the function that needs them. Hydra is light only for the entry points.
LAZY = {
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "diffusers",
    "matplotlib",
    "peft",
    "ray",
    "sklearn",
    "torchao",
    "transformers",
    "wandb",
}

FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """`data/datamodule.py` -> `data.datamodule`; `__init__.py` -> the folder, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name: str) -> int | None:
    """The layer of a dotted name, None for the package itself (its `__init__` only re-exports)."""
    while name:
        if name in LAYERS:
            return LAYERS[name]
        name = name.rpartition(".")[0]
    return None


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """Every imported module of a file as an absolute dotted name, with its line.

    `from sd_lightning import data` yields `sd_lightning.data`: the name may be a module. Imports for type checkers
    alone (`if TYPE_CHECKING:`) bind nothing at run time and are left out.
    """
    package = ["sd_lightning", *path.relative_to(PACKAGE).parts[:-1]]

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
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

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def inside(name: str) -> str | None:
    """`sd_lightning.data.samples` -> `data.samples`; None for modules of others."""
    head, _, rest = name.partition(".")
    return rest if head == "sd_lightning" else None


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_has_a_layer(path: Path) -> None:
    assert dotted(path) == "" or layer_of(dotted(path)) is not None, f"{name_of(path)}: give it a layer in LAYERS"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(dotted(path))
    if own is None:
        return
    for name, line in imports(path):
        target = inside(name)
        if not target:
            continue
        layer = layer_of(target)
        assert layer is None or layer <= own, f"{name_of(path)}:{line} (layer {own}) imports {name} (layer {layer})"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layer_imports_nothing_it_must_not_know(path: Path) -> None:
    own = layer_of(dotted(path))
    if own is None:
        return
    allowed = HYDRA if dotted(path).split(".")[0] == "_conf" else set()
    for name, line in imports(path):
        root = name.split(".")[0]
        assert root not in FORBIDDEN[own] - allowed, f"{name_of(path)}:{line} (layer {own}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    own = layer_of(dotted(path))
    lazy = LAZY | (HYDRA if own is None or own < 4 else set())
    for name, line in imports(path, top_level_only=True):
        assert name.split(".")[0] not in lazy, f"{name_of(path)}:{line}: import {name} inside the function using it"


def test_module_and_strategies_do_not_know_each_other() -> None:
    for path in FILES:
        own = dotted(path)
        for first, second in (("module", "strategies"), ("strategies", "module")):
            if own.split(".")[0] != first:
                continue
            for name, line in imports(path):
                assert (inside(name) or "").split(".")[0] != second, f"{name_of(path)}:{line} imports {name}"


def test_datamodule_is_the_only_part_of_data_that_knows_lightning() -> None:
    for path in (PACKAGE / "data").rglob("*.py"):
        if path.parent.name == "datamodule":
            continue
        assert not [name for name, _ in imports(path) if name.split(".")[0] in LIGHTNING], name_of(path)


def test_no_file_is_named_for_nothing() -> None:
    named = {part for path in FILES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not named & {"utils", "util", "core", "common", "helpers", "misc"}


def test_no_unpickling_anywhere() -> None:
    for path in FILES:
        for name, line in imports(path):
            assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle"}, f"{name_of(path)}:{line}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                assert safe, f"{name_of(path)}:{node.lineno}: torch.load unpickles; add weights_only=True"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from . import state", ["sd_lightning.data", "sd_lightning.data.state"]),
        (
            "from ..state import ParameterShard",
            ["sd_lightning.state.shards", "sd_lightning.state.shards.ParameterShard"],
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
