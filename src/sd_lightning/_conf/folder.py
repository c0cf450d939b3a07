"""Location of the configuration files."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> str:
    """Return the absolute path of the configuration folder.

    The checkout's ``conf/`` if the package runs from a checkout (an editable install copies
    the YAML once and would not see later edits), else the one inside the package.
    """
    return str(_config_dir(Path(__file__).resolve().parents[1]))


def _config_dir(package: Path) -> Path:
    root = package.parents[1]
    in_checkout = package.parent.name == "src" and (root / "pyproject.toml").is_file() and (root / "conf").is_dir()
    return (root if in_checkout else package) / "conf"
