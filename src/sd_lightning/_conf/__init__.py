"""The command line and its configuration: the only package that calls Hydra for the programs.

Importing this package is cheap; Hydra and OmegaConf load when a function runs.
"""

from __future__ import annotations

from sd_lightning._conf.check import check
from sd_lightning._conf.cli import main, overridden_keys
from sd_lightning._conf.command_line import Program, config_dir
from sd_lightning._conf.instantiate import Builder, builder, instantiate, section

__all__ = [
    "Builder",
    "Program",
    "builder",
    "check",
    "config_dir",
    "instantiate",
    "main",
    "overridden_keys",
    "section",
]
