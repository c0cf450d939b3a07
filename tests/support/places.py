"""Folders of the checkout that the tests belong to."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "src" / "sd_lightning"
CONF = REPO / "conf"
SUPPORT = REPO / "tests" / "support"
"""Modules of tests that tests import; in processes of their own it has to be put on ``sys.path``."""
