"""The command line and its configuration: the only package that calls Hydra for the programs.

Importing this package is cheap; Hydra and OmegaConf load when a function runs.
"""

from __future__ import annotations

from sd_lightning._conf.check import check
from sd_lightning._conf.cli import main, overridden_keys
from sd_lightning._conf.folder import config_dir
from sd_lightning._conf.instantiate import instantiate
from sd_lightning._conf.programs import Program
from sd_lightning._conf.targets import current_name

__all__ = ["Program", "check", "config_dir", "current_name", "instantiate", "main", "overridden_keys"]
