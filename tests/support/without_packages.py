"""A plugin of pytest's: some packages are not there, as on a machine that was lent. ``-p without_packages``"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MISSING = ("hypothesis", "pyarrow", "bitsandbytes", "moto", "nbformat")
"""Of all that `tests/` imports, what collecting tests for a GPU does not need."""


class Finder(PathFinder):
    """Finds all other packages."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in MISSING else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
