"""Write the tables of docs/families.md: what tests hold of each family, and the facts of each model.

    python benchmarks/families_table.py            writes them
    python benchmarks/families_table.py --check    ends with 1 if the page has others

A test that holds a capability of a family has the mark `holds(*capabilities, of=architecture)`. Without `of`, the
family is that of the architecture among the test's parameters. The mark "strategies" is for tests whose parameter
`name` is a strategy, or `names` are some. Tests are collected, not run.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
sys.path[:0] = [str(REPO / "src"), str(HERE)]

PAGE = REPO / "docs" / "families.md"
CAPABILITIES = ("full", "LoRA", "DreamBooth", "int8", "buckets", "stores")
SUITES = ("test", "test-slow", "test-full")
Held = dict[str, dict[str, int]]
"""Pipeline class -> capability, or name of a strategy -> index of the first suite that holds it."""


class Collector:
    """A plugin of pytest that notes which families' capabilities tests hold."""

    def __init__(self) -> None:
        self.held: Held = defaultdict(dict)

    def pytest_itemcollected(self, item: Any) -> None:
        suite = 2 if item.get_closest_marker("full") else 1 if item.get_closest_marker("slow") else 0
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("holds"):
            unknown = {*mark.args} - {*CAPABILITIES, "strategies"}
            classes = _classes([mark.kwargs["of"]] if "of" in mark.kwargs else params.values())
            if unknown or not classes:
                raise ValueError(f"{item.nodeid}: {mark}; expected known capabilities, and an architecture")
            for pipeline_class in classes:
                for capability in mark.args:
                    names = [capability]
                    if capability == "strategies":
                        names = params["names"] if "names" in params else [params["name"]]
                    known = self.held[pipeline_class]
                    for name in names:
                        known[name] = min(known.get(name, suite), suite)


def _classes(values: Any) -> set[str]:
    """Return the pipeline classes of the architectures among some values."""
    from sd_lightning.models.families import FAMILIES, Architecture

    named = {name: key for key, family in FAMILIES.items() for name in family.architectures}
    found = {each.pipeline_class for each in values if isinstance(each, Architecture)}
    return found | {named[each] for each in values if isinstance(each, str) and each in named}


def held() -> Held:
    """Return what the tests hold.

    Raises:
        SystemExit: They cannot be collected.
    """
    import pytest

    collector, told = Collector(), io.StringIO()
    files = [str(path) for path in sorted((REPO / "tests").rglob("test_*.py")) if "mark.holds(" in path.read_text()]
    with contextlib.redirect_stdout(told):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(told.getvalue())
    return collector.held


def held_rows(found: Held) -> Iterator[list[str]]:
    """Return a row for each family."""
    sys.path.insert(0, str(REPO / "tests" / "support"))
    from sd_lightning.models.families import FAMILIES
    from strategy_table import STRATEGIES

    for pipeline_class, family in FAMILIES.items():
        known = found.get(pipeline_class, {})
        cells = [f"`{SUITES[known[name]]}`" if name in known else "–" for name in CAPABILITIES]
        suites = {suite: [n for n in STRATEGIES if known.get(n, 3) <= number] for number, suite in enumerate(SUITES)}
        strategies: dict[tuple[str, ...], str] = {}
        for suite, names in suites.items():
            strategies.setdefault(tuple(names), suite)
        texts = [
            f"`{suite}`: {'all' if len(names) == len(STRATEGIES) else ', '.join(names)}"
            for names, suite in strategies.items()
            if names
        ]
        yield [", ".join(f"`{n}`" for n in family.architectures), *cells, "; ".join(texts) or "–"]


def fact_rows() -> Iterator[list[str]]:
    """Return a row for each model that has published weights."""
    import torch

    from sd_lightning.models.families import FAMILIES

    for family in FAMILIES.values():
        for name, each in family.architectures.items():
            if each.is_tiny:
                continue
            with torch.device("meta"):
                parameters = sum(p.numel() for p in each.networks[family.denoiser].instantiate().parameters())
            told = (REPO / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8")
            repository = re.search(r"model\.pretrained=(\w[\w.-]*/[\w.-]*\w)", told)
            guidance = (
                "cond + s·(cond − uncond), s > 0" if family.no_guidance == 0 else "uncond + s·(cond − uncond), s > 1"
            )
            if family.embeds_guidance(each.networks[family.denoiser].config):
                guidance = "s is an input of the denoiser"
            trained = [f"`{network}`" for network in family.trainable if network != family.denoiser]
            lengths = each.max_length if isinstance(each.max_length, int) else max(each.max_length.values())
            yield [
                f"`{name}`",
                f"{parameters / 1e9:.3f}",
                each.licence,
                f"`{repository[1]}`" if repository else "–",
                guidance,
                f"{lengths} tokens, {'padding left out' if family.masks_padding else 'padding read'}",
                ", ".join(trained) if family.frozen and trained else "all" if trained else "none",
            ]


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def page() -> str:
    """Return the page with today's tables."""
    from report import with_tables

    facts = ["model", "denoiser, 10⁹", "licence", "repository", "guidance s", "captions", "text encoders trained"]
    found = {
        "held": _table(["models", *CAPABILITIES, "strategies"], held_rows(held())),
        "facts": _table(facts, fact_rows()),
    }
    return with_tables(PAGE.read_text(encoding="utf-8"), found, who=PAGE.name)


def main() -> int:
    """The command line; returns the exit code."""
    text = page()
    if sys.argv[1:] == ["--check"]:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
