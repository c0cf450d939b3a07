"""The page and the picture of a comparison: they show what the JSON file holds, and need nothing from outside."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from made_runs import config, facts, make_run
from sd_lightning.apps.compare import comparison
from sd_lightning.apps.compared_run import read_runs
from sd_lightning.report.compare import columns, grouped, write_compare_page, write_compare_picture
from sd_lightning.report.drawing import light_colours


def compared(*folders: Path, price: float | None = None) -> dict[str, Any]:
    made = comparison(read_runs([str(folder) for folder in folders]), price=price)
    return dict(json.loads(json.dumps(made)))  # as from a file


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Three runs on GPUs: one device, two, and one of before with another batch."""
    one = make_run(tmp_path / "one", config=config(), summary=facts())
    two = make_run(
        tmp_path / "two",
        rates=(20, 140, 150, 160, 170),
        peak=1.0,
        config=config("ddp", devices=2),
        summary=facts(),
    )
    old = make_run(tmp_path / "old", config=config(batch_size=32), summary={})
    return compared(one, two, old)


def page_of(data: dict[str, Any], folder: Path) -> str:
    return write_compare_page(folder / "compare.html", data).read_text(encoding="utf-8")


def titles(page: str) -> list[str]:
    return re.findall(r"<h[23]>(.*?)</h[23]>", page)


def test_the_page_leads_with_the_best_and_shows_every_chart(data: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(data, tmp_path)
    text = html.unescape(page)
    assert "<h1>3 runs: tiny; digits; 32 x 32 pixels; different batch sizes: 32, 64; " in page
    assert '<p class="value">1.55 x</p><p>images per second: two against one</p>' in text
    assert '<p class="value">0.50 x</p><p>peak memory: two against one</p>' in text
    assert re.search(r'<p class="value">\$ 2\.24</p><p>for a million images: one</p>', text)
    assert titles(page) == [
        *("Settings that differ", "Speed", "Throughput", "Throughput by step", "Scaling", "Scaling", "Memory"),
        *("Peak memory", "Cost", "Cost", "Loss", "Loss by step, smoothed", "Loss by images seen, smoothed"),
        *("All numbers", "Where the numbers are from"),
    ]
    assert "ddp, 64 in all <b>1.55 x on 2 (78 %)</b>" in text


def test_the_page_holds_all_numbers_and_says_where_they_are_from(data: dict[str, Any], tmp_path: Path) -> None:
    page = html.unescape(page_of(data, tmp_path))
    cells = columns(data["runs"])
    for name, column in cells.items():
        same = len(set(column)) == 1
        assert f"{name} {column[0]}" in page if same else all(f"<td>{cell}</td>" in page for cell in column)
    assert "<td>strategy</td><td>single</td><td>ddp</td><td>single</td>" in page
    assert "<td>two</td><td>measured: NVIDIA L4, 2 devices, 2026-11-25, torch 2.9.0</td>" in page
    assert "<td>old</td><td>measured: hardware not recorded, 1 device, date not recorded</td>" in page
    assert "<td>price</td><td>$ 0.805 per hour and device: AWS" in page


def test_nothing_is_loaded_from_outside_and_colours_are_the_pages(data: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(data, tmp_path)
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r"""(?:src|href)=["']?(?!data:|#)""", page.replace("xlink:href", "xlink"))
    drawn = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawn) == 2 * 7 and not any(re.search(r"#[0-9a-f]{6}\b", each) for each in drawn)
    assert page_of(data, tmp_path) == page, "written again it is the same"


def test_a_chart_without_values_is_left_out(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, rates=(), config=config(), summary=facts("a CPU")) for name in "ab"]
    data = compared(*runs)
    assert titles(page_of(data, tmp_path))[:-2] == ["Speed", "Throughput", "Memory", "Peak memory"]
    write_compare_picture(tmp_path / "compare.png", data)
    silent = make_run(tmp_path / "silent", rates=(), config=config(), summary=None)
    page = page_of(compared(*runs, silent), tmp_path)
    assert "silent: no metrics were logged" in page and "1 run has no such value." in page


def test_the_same_batch_needs_no_second_picture_of_the_loss(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, config=config(), summary=facts()) for name in ("a", "b")]
    page = page_of(compared(*runs), tmp_path)
    assert "Loss by step, smoothed" in page and "Loss by images seen, smoothed" not in page
    assert "1.00 x</p><p>images per second: a, the baseline, is the fastest" in page


def test_more_runs_than_colours_are_told_apart_by_dashes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{i:02}", rates=(1, 2), config=config(), summary=facts()) for i in range(27)]
    page = page_of(compared(*runs[:9]), tmp_path)
    assert "Colours repeat after 8 runs, with other dashes." in page
    assert "run08 (dashed) <b>" in page and "run07 <b>" in page and "stroke-dasharray" in page
    page = page_of(compared(*runs), tmp_path)
    assert "run23 (dotted) <b>" in page and "run24 <b>" not in page and "3 more runs are in the table only." in page
    write_compare_picture(tmp_path / "compare.png", compared(*runs[:9]))


def test_texts_of_runs_are_escaped_and_long_names_cut(tmp_path: Path) -> None:
    evil = make_run(tmp_path / "<b>&x", config=config(model={"architecture": "<i>"}), summary=facts("<u>"))
    long = make_run(tmp_path / ("long" * 20), config=config(), summary=facts())
    page = page_of(compared(evil, long), tmp_path)
    assert not re.search("<[biu]>(?!\\d)", page) and "&lt;b&gt;&amp;x" in page
    assert f"{'long' * 3}…" in page


def test_settings_of_many_runs_are_grouped_by_value(tmp_path: Path) -> None:
    assert grouped(["1", None, "1"], ["a", "b", "c"]) == ["1 (a, c)", "- (b)"]
    assert grouped(["x"] * 5 + ["y"], [*"abcdef"]) == ["x (5 runs)", "y (f)"]
    runs = [make_run(tmp_path / f"r{i}", config=config(batch_size=8 + i % 2), summary=facts()) for i in range(8)]
    page = page_of(compared(*runs), tmp_path)
    assert "<td>data.batch_size</td><td>8 (r0, r2, r4, r6) · 9 (r1, r3, r5, r7)</td>" in page
    assert "Colours repeat" not in page


def test_the_picture_has_four_panels_in_the_colours_of_the_runs(data: dict[str, Any], tmp_path: Path) -> None:
    path = write_compare_picture(tmp_path / "compare.png", data)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    light = light_colours()
    half = pixels.shape[1] // 2
    for side in (pixels[:, :half], pixels[:, half:]):
        found = {"#{:02x}{:02x}{:02x}".format(*colour) for colour in np.unique(side.reshape(-1, 3), axis=0).tolist()}
        assert {light[f"--area-{number}"] for number in (1, 3, 5)} - {light["--area-5"]} <= found
    assert pixels.shape[1] == 160 * 11.2
