"""Which of a table's cases the default suites keep, and what the chosen tests need to have trained."""

from collections.abc import Iterable
from typing import Any

import pytest


def keep(kept: Iterable[Any], cases: Iterable[Any], part: str = "matrix") -> list[Any]:
    """Return ``cases`` as parameters; all but the ``kept`` ones are tested in a part of the full suite."""
    kept = set(kept)
    every = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*values, marks=() if case in kept else pytest.mark.full(part)) for case, values in every]


def wanted(request: pytest.FixtureRequest) -> set[str]:
    """Return what the chosen tests of this file name in ``@pytest.mark.needs(…)``, filled with their parameters."""
    found = set()
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            found |= {name.format(**parameters) for mark in item.iter_markers("needs") for name in mark.args}
    return found
