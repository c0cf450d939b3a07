"""docs/families.md says what the tests hold."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from families_table import Collector, held_rows
from places import REPO


@pytest.mark.slow
def test_the_page_of_families_is_what_the_tests_say() -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "families_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, f"write it with: python benchmarks/families_table.py\n{done.stdout}{done.stderr}"


def test_a_cell_needs_a_family_and_a_known_capability() -> None:
    def item(*capabilities: str, marks: tuple[str, ...] = (), params: Any = None, **of: str) -> Any:
        holds: Any = pytest.mark.holds(*capabilities, **of).mark
        return SimpleNamespace(
            nodeid="a test",
            callspec=SimpleNamespace(params=params or {}),
            get_closest_marker=lambda name: name in marks,
            iter_markers=lambda _: [holds],
        )

    collector = Collector()
    collector.pytest_itemcollected(item("LoRA", marks=("full",), of="tiny_klein"))
    collector.pytest_itemcollected(item("LoRA", "int8", marks=("slow",), params={"family": "tiny_klein"}))
    collector.pytest_itemcollected(item("strategies", params={"family": "tiny_klein", "name": "fsdp"}))
    collector.pytest_itemcollected(
        item("strategies", marks=("full",), params={"family": "tiny_klein", "names": ("fsdp", "gemini")})
    )
    row = next(row for row in held_rows(collector.held) if "tiny_klein" in row[0])
    assert row[1:] == ["–", "`test-slow`", "–", "`test-slow`", "–", "–", "`test`: fsdp; `test-full`: fsdp, gemini"]
    for wrong in (item("LoRA"), item("lora", of="tiny"), item("LoRA", params={"family": "unknown"})):
        with pytest.raises(ValueError, match="expected known capabilities, and an architecture"):
            collector.pytest_itemcollected(wrong)
