"""What pages share: bars, tables, tiles, and charts as PNG."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from sd_lightning.report.compare import columns
from sd_lightning.report.document import rows, tiles
from sd_lightning.report.drawing import (
    AREAS,
    INKS,
    LINES,
    Panel,
    bar_height,
    is_narrow,
    light_colours,
    number,
    render_panels,
    render_svg,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def two_bars(axes: "Axes") -> None:
    stacked(axes, ["first", "second"], [[1, 2], [3, 1500]], list(AREAS.values()))


def all_kinds(axes: "Axes") -> None:
    axes.plot([0, 1], [0, 1], color=LINES["--line-1"], linewidth=9)
    axes.scatter([0.5], [0.2], color=LINES["--line-2"], s=400, linewidths=0)
    axes.stackplot([0, 1], [0.1, 0.1], colors=[AREAS["--area-8"]], linewidth=0)
    axes.text(0.2, 0.8, "█", color=INKS["--ink"], fontsize=30)


def colours_of(path: Path) -> set[str]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    found, counts = np.unique(pixels, axis=0, return_counts=True)
    return {"#{:02x}{:02x}{:02x}".format(*colour) for colour, count in zip(found.tolist(), counts) if count > 50}


def test_bars_stand_from_the_top_with_their_sums() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    stacked(axes, ["first", "second"], [[1, 2], [3, 1500]], ["red", "blue"])
    lengths = [(bar.get_x(), bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert lengths == [(0, 1), (0, 3), (1, 2), (3, 1500)], "the second parts begin where the first end"
    assert [text.get_text() for text in axes.texts] == ["3", "1,503"]
    assert axes.yaxis_inverted() and [text.get_text() for text in axes.get_yticklabels()] == ["first", "second"]
    assert bar_height([1, 2, 3]) > bar_height([1])


def test_on_a_phone_names_and_values_stand_above_their_bars_and_nothing_is_cut() -> None:
    found = {}

    def draw(axes: "Axes") -> None:
        stacked(axes, ["a long name of a strategy", "b"], [[1.0], [2.0]], ["red"])
        axes.figure.canvas.draw()
        narrow = is_narrow(axes)
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.x0 >= -1 and box.x1 <= axes.figure.bbox.x1 + 1 for box in boxes)
        found[narrow] = [text.get_text() for text in axes.texts]

    svg = render_svg("bars", draw, wide=True, height=bar_height([1, 2]))
    assert found == {False: ["1", "2"], True: ["1", "a long name of a strategy", "2", "b"]}
    assert re.findall('class="(.*?)" role', svg) == ["at-wide", "at-narrow"]


def test_a_folded_table_has_its_heads_beside_the_cells() -> None:
    table = rows(("it's", 'a "b"'), [("1", "2")])
    assert """style="--h1: &#x27;it\\27 s&#x27;; --h2: &#x27;a &quot;b&quot;&#x27;\"""" in table
    style = Path(render_svg.__code__.co_filename).with_name("page.html").read_text()
    widest = max(len(columns([])), 9)
    assert all(f"content: var(--h{place})" in style for place in range(2, widest + 1))


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (12.345, "12.3"), (0.00123, "0.00123"), (0, "0")])
def test_numbers_have_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


def test_tables_and_tiles_escape_what_they_are_given() -> None:
    table = rows(("<a>", "b"), [("1 < 2", "&")])
    assert "&lt;a&gt;</th>" in table and "<td>1 &lt; 2</td><td>&amp;</td>" in table
    tile = tiles([("<b>", "c & d\n<i>")])
    assert "&lt;b&gt;" in tile and "c &amp; d<br>&lt;i&gt;" in tile


def test_a_png_has_the_colours_of_the_light_page_and_no_placeholders(tmp_path: Path) -> None:
    light = light_colours()
    assert set(light) >= {*INKS, *LINES, *AREAS} and light["--line-1"] in Path(
        render_svg.__code__.co_filename
    ).with_name("page.html").read_text(encoding="utf-8")
    drawn = colours_of(render_panels(tmp_path / "chart.png", "title", [Panel("", all_kinds)], columns=1, size=(9, 3)))
    assert {light[name] for name in ("--card", "--line-1", "--line-2", "--area-8", "--ink")} <= drawn
    assert not drawn & {*INKS.values(), *LINES.values(), *AREAS.values()}
    assert list(tmp_path.iterdir()) == [tmp_path / "chart.png"]


def test_a_title_is_at_the_top_left_and_a_key_names_the_colours(tmp_path: Path) -> None:
    keys = [("--line-3", "only in the key", "")]
    panels = [Panel("", two_bars, keys)]
    path = render_panels(tmp_path / "chart.png", "TITLE", panels, columns=1, size=(10.4, 3.4))
    pixels = np.asarray(Image.open(path).convert("L"))
    assert (pixels[: pixels.shape[0] // 6, : pixels.shape[1] // 8] < 100).any()
    assert not (pixels[: pixels.shape[0] // 12, pixels.shape[1] // 2 :] < 250).any()
    assert light_colours()["--line-3"] in colours_of(path)


def test_panels_stand_in_rows_and_the_svg_keeps_variables(tmp_path: Path) -> None:
    panels = [Panel("bars", two_bars), Panel("kinds", all_kinds), Panel("again", all_kinds)]
    with Image.open(render_panels(tmp_path / "four.png", "all", panels, columns=2, size=(4, 2))) as image:
        assert image.format == "PNG" and image.size == (160 * 8, 160 * 4.3), "its title stands above them"
        pixels = np.asarray(image.convert("L"))
    assert (pixels[-300:, -600:] == 255).all(), "three panels leave the last place empty"
    svg = render_svg("kinds", all_kinds, wide=True)
    assert "var(--line-1)" in svg and light_colours()["--line-1"] not in svg, "a PNG before leaves no trace"
