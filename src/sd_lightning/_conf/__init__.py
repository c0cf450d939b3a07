"""The command line and its configuration: the one place that talks to Hydra on behalf of tasks.

Importing this package is cheap; Hydra and OmegaConf load when a function runs.
"""

from __future__ import annotations

from sd_lightning._conf.check import check
from sd_lightning._conf.cli import main, overridden_keys
from sd_lightning._conf.folder import config_dir
from sd_lightning._conf.instantiate import instantiate

__all__ = ["check", "config_dir", "instantiate", "main", "overridden_keys"]
