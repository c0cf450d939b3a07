"""Location of the configuration files."""

from __future__ import annotations

from pathlib import Path


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
