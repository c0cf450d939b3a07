"""The HTML of pages: the frame with style and title in one file that opens anywhere, sections, cards, tables, tiles."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template

from sd_lightning.storage import atomic


def style() -> str:
    """Return the style sheet of pages."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def write_document(path: Path, title: str, kind: str, body: str) -> Path:
    """Write a page that needs no network and no JavaScript; an earlier one is replaced atomically.

    Args:
        path: The file.
        title: Heading, as text.
        kind: What the page is, for the title of the window: "training report".
        body: HTML below the heading.
    """
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    atomic.write_whole(path, template.substitute(title=html.escape(title), kind=kind, body=body))
    return path


def section(title: str, content: str) -> str:
    """Return a section of the page, as HTML."""
    return f"<section><h2>{html.escape(title)}</h2>\n{content}\n</section>\n"


def card(
    title: str, note: str, *, keys: Sequence[tuple[str, str, str]] = (), picture: str = "", wide: bool = False
) -> str:
    """Return a figure of the page: a heading with the key of its colours, a picture, and a note below it.

    Args:
        title: Heading.
        note: The note, as HTML.
        keys: CSS variable, label and value of each colour.
        picture: The picture, as SVG.
        wide: Whether it spans the page's whole width.
    """
    legend = "".join(
        f'<span class="key" style="--key: var({ink})">{html.escape(label)} <b>{html.escape(value)}</b></span>'
        for ink, label, value in keys
    )
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h3>{html.escape(title)}</h3>'
        f'<p class="keys">{legend}</p></figcaption>{picture}<p class="note">{note}</p></figure>'
    )


def charts(*cards: str) -> str:
    """Return cards as a grid, as HTML."""
    return f'<div class="charts">{"".join(cards)}</div>'


def rows(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML.

    Args:
        head: Titles of the columns, as text.
        lines: Cells of each line, as text.
    """
    cells = "".join(f"<th scope=col>{html.escape(each)}</th>" for each in head)
    # On a phone each line is a block, and these stand beside its cells.
    titles = "; ".join(f"--h{place}: {_css_text(each)}" for place, each in enumerate(head, 1))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    table = f'<table class="plain" style="{html.escape(titles)}"><tr>{cells}</tr>{body}</table>'
    return f'<div class="card scroll">{table}</div>'


def _css_text(text: str) -> str:
    escaped = text.replace("\\", "\\5c ").replace("'", "\\27 ")
    return f"'{escaped}'"


def tiles(shown: Sequence[tuple[str, str]]) -> str:
    """Return values with their labels, which may have several lines, as large tiles, as HTML; "" if there are none."""
    each = (
        f'<div class="card tile"><p class="value">{html.escape(value)}</p>'
        f"<p>{'<br>'.join(map(html.escape, label.splitlines()))}</p></div>"
        for value, label in shown
    )
    return f'<div class="tiles">{"".join(each)}</div>' if shown else ""
