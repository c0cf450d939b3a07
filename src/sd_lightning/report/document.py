"""The frame of every page: style, title and body in one file that opens anywhere."""

from __future__ import annotations

import html
from pathlib import Path
from string import Template

from sd_lightning.storage import atomic


def write_document(path: Path, title: str, kind: str, body: str) -> Path:
    """Write a page that needs no network and no JavaScript; an earlier one is replaced atomically.

    Args:
        path: The file.
        title: Heading, as text.
        kind: What the page is, for the title of the window: "training report".
        body: HTML below the heading.
    """
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    with atomic.new_file(path) as unfinished:
        unfinished.write_text(template.substitute(title=html.escape(title), kind=kind, body=body), encoding="utf-8")
    return path


def section(title: str, content: str) -> str:
    """Return a section of the page, as HTML."""
    return f"<section><h2>{html.escape(title)}</h2>\n{content}\n</section>\n"
