"""The package as users get it: what it depends on, what a wheel holds, and that it runs away from the checkout."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from places import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = (
    "deepspeed",
    "ray",
    "wandb",
    "datasets",
    "boto3",
    "gcsfs",
    "prodigyopt",
    "schedulefree",
    "ipykernel",
    "nbclient",
    "nbformat",
    "torch_fidelity",
    "fastapi",
    "python_multipart",
    "uvicorn",
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.match(r"[\w.-]+", requirement).group()) for requirement in requirements}  # type: ignore[union-attr]


def pins() -> dict[str, str]:
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_version_and_license_are_told_once() -> None:
    import sd_lightning

    assert sd_lightning.__version__ == importlib.metadata.version("sd-lightning")
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert (REPO / "LICENSE").read_text().lstrip().startswith("Apache License\n")
    assert (REPO / "src/sd_lightning/py.typed").is_file()


def test_constraints_are_exact_and_fit_every_platform() -> None:
    assert pins()["torch"] == "2.13.0"
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}: no local suffix, no range"
        assert not name.startswith(("nvidia-", "cuda-", "triton")), f"{name}: torch chooses its own CUDA packages"


def test_constraints_cover_every_requirement() -> None:
    wanted = names(PROJECT["dependencies"])
    for requirements in PROJECT["optional-dependencies"].values():
        wanted |= names(requirements)
    assert wanted - {canonical(PROJECT["name"])} <= pins().keys()


def test_requirements_have_lower_bounds_only() -> None:
    every = [*PROJECT["dependencies"], *(r for group in PROJECT["optional-dependencies"].values() for r in group)]
    for requirement in every:
        if canonical(requirement).startswith(canonical(PROJECT["name"])):
            continue
        assert re.fullmatch(r"[\w.-]+(\[[\w,]+\])?>=[\d.]+", requirement.split(";")[0].strip()), requirement


def test_every_imported_package_is_a_requirement() -> None:
    required = names(PROJECT["dependencies"])
    for requirements in PROJECT["optional-dependencies"].values():
        required |= names(requirements)
    owners = importlib.metadata.packages_distributions()
    imported: dict[str, str] = {}
    for path in (REPO / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            imported |= {module.split(".")[0]: f"{path.name}:{node.lineno}" for module in modules}
    for module, where in imported.items():
        if module in sys.stdlib_module_names or module in ("sd_lightning", "colossalai"):
            continue  # the latter only without its dependencies: docs/colossalai.md
        assert names(owners.get(module, [module])) & required, f"{where} imports {module}, which nothing installs"


def checkout_copy(target: Path) -> Path:
    """What git would clone, as far as building is concerned: builds leave the real checkout alone."""
    for folder in ("src", "conf"):
        shutil.copytree(REPO / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(REPO / file, target)
    return target


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> str:
    """Run a command without this checkout on its path; its stdout, or a failure that shows both streams."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, target: Path, *, editable: bool) -> Path:
    """A new virtual environment with `target` installed; returns its python.

    It sees the packages of the tested environment through a .pth (nothing is downloaded again; a path that comes
    from a .pth does not have its own .pth files read, so an editable install there stays invisible), except the
    extras: the core has to work without them.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    tested = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    hide = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"
    (site / "tested.pth").write_text("\n".join([*sorted(tested), hide, ""]))
    flags = ["--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", "-q"]
    run(python, "-m", "pip", "install", *flags, *(["-e"] if editable else []), target, cwd=folder)
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    source = checkout_copy(tmp_path_factory.mktemp("source"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel in it."""
    return environment(tmp_path_factory.mktemp("wheel_env") / "venv", wheel, editable=False)


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(python, checkout) of an environment with an editable install of a copied checkout."""
    checkout = checkout_copy(tmp_path_factory.mktemp("checkout"))
    return environment(tmp_path_factory.mktemp("editable_env") / "venv", checkout, editable=True), checkout


CONFIG_DIR = "from sd_lightning._conf import config_dir; print(config_dir())"


def job(python: Path, *arguments: str, cwd: Path) -> str:
    return run(python, "-m", "sd_lightning.train", *arguments, "--cfg", "job", cwd=cwd)


@pytest.mark.slow
def test_wheel_holds_code_configs_and_assets_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    source = {p.relative_to(REPO / "src").as_posix() for p in (REPO / "src/sd_lightning").rglob("*") if p.is_file()}
    configs = {f"sd_lightning/{p.relative_to(REPO).as_posix()}" for p in (REPO / "conf").rglob("*.yaml")}
    assert files == {name for name in source if "__pycache__" not in name} | configs
    # The largest is the tiny VAE, of 266 kB.
    assert max(info.file_size for info in zipfile.ZipFile(wheel).infolist()) < 300_000
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata
    assert re.search(r"Requires-Dist: deepspeed.*extra == 'deepspeed'", metadata)


@pytest.mark.full("platform")
def test_wheel_runs_from_another_folder(
    installed: Path, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder = Path(run(installed, "-c", CONFIG_DIR, cwd=tmp_path).strip())
    assert folder.is_absolute()
    assert folder.is_relative_to(installed.parent.parent), "not the checkout's conf/"
    checkout = run_python("-m", "sd_lightning.train", "--cfg", "job", cwd=tmp_path, check=True)
    assert job(installed, cwd=tmp_path) == checkout.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wheel_trains_without_the_extras(installed: Path, tmp_path: Path) -> None:
    run(installed, "-m", "sd_lightning.train", "trainer.max_steps=2", "output_dir=run", cwd=tmp_path, timeout=280)
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.full("platform")
def test_wheel_reads_the_users_own_configs(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine/data").mkdir(parents=True)
    (tmp_path / "mine/data/small.yaml").write_text("defaults: [digits, _self_]\nbatch_size: 24\n")
    text = job(installed, "--config-dir", "mine", "data=small", cwd=tmp_path)
    assert re.search(r"^  batch_size: 24$", text, re.MULTILINE)


@pytest.mark.full("platform")
def test_editable_install_sees_edits_of_the_checkouts_configs(editable: tuple[Path, Path], tmp_path: Path) -> None:
    python, checkout = editable
    assert run(python, "-c", CONFIG_DIR, cwd=tmp_path).strip() == str(checkout / "conf")
    (checkout / "conf/data/edited.yaml").write_text("defaults: [digits, _self_]\nbatch_size: 40\n")
    assert re.search(r"^  batch_size: 40$", job(python, "data=edited", cwd=tmp_path), re.MULTILINE)
