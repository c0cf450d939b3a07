"""The site of `make docs`, without building it: every guide has its place, and every public name its docstring."""

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

from places import REPO

PUBLIC = ("sd_lightning", "sd_lightning.callbacks", "sd_lightning.strategies", "sd_lightning.planner")
PUBLIC += ("sd_lightning.quantization", "sd_lightning.models.families")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook of mkdocs."""
    monkeypatch.syspath_prepend(REPO / "docs")
    return importlib.import_module("site_pages")


def test_every_page_has_a_place(pages: ModuleType) -> None:
    nav = re.findall(r"[\w/]+\.md", (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2])
    guides = [page.name for page in (REPO / "docs").glob("*.md")]
    assert sorted(nav) == sorted([*guides, *pages.OUTSIDE, *(f"api/{name}.md" for name in pages.API)])
    assert all((REPO / source).is_file() for source in pages.OUTSIDE.values())


def test_the_api_has_every_public_name(pages: ModuleType) -> None:
    shown = {name for _, names in pages.API.values() for name in names}
    objects = [pkgutil.resolve_name(name) for name in shown]
    for module in [each for each in objects if isinstance(each, ModuleType)]:
        objects += [getattr(module, name) for name in getattr(module, "__all__", vars(module))]
    for package in map(importlib.import_module, PUBLIC):
        missing = [name for name in package.__all__ if not any(getattr(package, name) is each for each in objects)]
        assert not missing, f"{package.__name__}: {missing}"


def test_links_of_the_repository_become_links_of_the_site(pages: ModuleType) -> None:
    text = "[a](docs/data.md#x) ![b](docs/images/digits.png) [c](LICENSE) [d](https://x.y) [e](#z) `f[g](h)`"
    assert pages.linked("overview.md", text) == {"LICENSE"}
    link = re.compile(r"\]\(([^)]+)\)")
    page = type("Page", (), {"file": type("File", (), {"src_uri": "overview.md"})})
    shown = pages.on_page_markdown(text, page=page, config=None, files=None)
    assert link.findall(shown) == ["data.md#x", "images/digits.png", "LICENSE", "https://x.y", "#z", "h"]
    page.file.src_uri = "modules.md"  # type: ignore[attr-defined]
    shown = pages.on_page_markdown("[a](../README.md) [b](../examples/quickstart.ipynb)", page=page, config=0, files=0)
    assert link.findall(shown) == ["overview.md", "examples/quickstart.ipynb"]
