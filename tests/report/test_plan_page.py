"""The page of plans: it shows what the JSON file holds, and needs nothing from outside."""

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composing import compose
from sd_lightning import _conf
from sd_lightning.apps import plan
from sd_lightning.planner import alternatives
from sd_lightning.planner.devices import load_device
from sd_lightning.report import write_report
from sd_lightning.report.plan import write_plan_page

TINY = ("model=tiny", "optimizer.fused=false", "gpus=2", "price=0.5", "data.batch_size=64", "images=1e9")


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., str]]:
    """(file, *options) -> its text; other GPUs are two kinds, alone and eight of them."""

    def made(file: Path, *options: str) -> str:
        plan.run(compose(patch, "plan", *TINY, *options, f"output={file}"))
        return file.read_text(encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        few = {name: load_device(name) for name in ("t4", "h100")}
        patch.setattr(alternatives, "tables", lambda: few)
        patch.setattr(alternatives, "_COUNTS", (1, 8))
        yield made


@pytest.fixture(scope="module")
def data(make: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return json.loads(make(tmp_path_factory.mktemp("plans") / "plan.json", "gpu=t4", "compare=true"))


def test_the_page_shows_every_plan_of_the_file(make: Callable[..., str], tmp_path: Path, data: Any) -> None:
    page = html.unescape(make(tmp_path / "plan.html", "gpu=t4", "compare=true"))
    assert len(data["plans"]) > 10 and len(data["considered"]) >= len(data["plans"])
    for each in data["plans"]:
        row = f"<td>{each['name']}</td><td>{each['micro_batch']} x {each['accumulate']}</td>"
        assert row in page and f"<td>{each['device_peak'] / 1e9:.1f}</td>" in page
    best = data["plans"][0]
    assert data["command"] in page and data["command"].endswith(" ".join(best["options"]))
    assert data["timeline"]["peak"][1:] in page and f"$ {best['dollars_per_million']:,.2f}" in page
    assert f"{1e9 / best['images_per_second'] / 86400:,.1f} days" in page
    for each in data["gpus"]:
        assert f"<td>{each['count']} x {each['gpu']}</td><td>{each['name']}</td>" in page
    titles = re.findall(r"<h[23]>(.*?)</h[23]>", page)
    assert titles == [
        f"The fastest plan: {best['name']}",
        *("Memory, predicted", "Memory by strategy, predicted", "Memory of a step, predicted", "Time, predicted"),
        *("Time by strategy, predicted", "Speed against memory, predicted", "All strategies, predicted"),
        *("Other GPUs, predicted", "Where the numbers are from"),
    ]
    labels = re.findall(r'<p class="value">.*?</p><p>(.*?)</p>', page)
    assert len(labels) == 5 and all("predicted" in label for label in labels), "no figure of a tile is measured"
    given = data["timeline"]["kinds"]
    always = {"encoders": ("encoders",), "optimizer": ("optimizer states",), "EMA": ("EMA",)}
    (named,) = re.findall(r'<span class="key" style="--key: var\(--area-1\)">([^<]*allowance) <b>', page)
    for name, kinds in always.items():
        assert (name in named) == any(any(given.get(kind, ())) for kind in kinds), "named is what is there"
    assert "assumed, from the data sheet" in page and "<td>price</td><td>given</td>" in page


def test_a_strategy_of_ones_own_has_its_points_and_a_key(tmp_path: Path, data: Any) -> None:
    own = [{**each, "name": "alone"} for each in data["considered"][:5]]
    ours = [{**own[0], "name": "ddp"}]
    for considered, families in ((own, ["others"]), (own + ours, ["single and ddp", "others"])):
        page = write_plan_page(tmp_path / "plan.html", {**data, "considered": considered}).read_text(encoding="utf-8")
        card = page[page.index("<h3>Speed against memory") :]
        assert re.findall('class="key".*?>(.*?) <b>', card[: card.index("</figure>")]) == families
        assert "var(--area-8)" in card[: card.index("</figure>")]


def test_gpus_without_a_price_are_sorted_by_speed(tmp_path: Path, data: Any) -> None:
    gpus = [{**each, "dollars_per_million": None} for each in data["gpus"]]
    gpus.append({**gpus[0], "gpu": "the cheap one", "dollars_per_million": 3.0})
    page = write_plan_page(tmp_path / "plan.html", {**data, "gpus": gpus}).read_text(encoding="utf-8")
    fastest = sorted(gpus[:-1], key=lambda each: -each["images_per_second"])
    places = [page.index(f"<td>{each['count']} x {each['gpu']}</td>") for each in (gpus[-1], *fastest)]
    assert places == sorted(places)


def test_ways_to_encode_are_a_table(make: Callable[..., str], tmp_path: Path) -> None:
    page = html.unescape(make(tmp_path / "plan.html", "gpu=t4", "strategy=ddp", "encoders=[l4,rtx-4090]"))
    table = page[page.index("Encoders on other GPUs, predicted") :]
    names = ["the trainers, in their steps", "NVIDIA L4", "NVIDIA GeForce RTX 4090"]
    assert re.findall(r"<tr><td>(.*?)</td>", table)[:3] == names
    assert "a forecast, not measured on a GPU" in table


def test_other_gpus_have_their_fastest_plans(data: Any) -> None:
    speed = {(each["gpu"], each["count"]): each["images_per_second"] for each in data["gpus"]}
    assert all(speed["NVIDIA H100 80GB HBM3", count] > speed["Tesla T4", count] for count in (1, 8))
    assert len(speed) == 4 and speed["Tesla T4", 8] > speed["Tesla T4", 1]


def test_nothing_is_loaded_from_outside(make: Callable[..., str], tmp_path: Path) -> None:
    page = make(tmp_path / "plan.html", "gpu=t4")
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r"""(?:src|href)=["']?(?!data:|#)""", re.sub(r'xlink:href="#', 'x="#', page))


def test_a_page_without_a_plan_says_so_and_shows_what_lacks(make: Callable[..., str], tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    table = Path(_conf.config_dir(), "devices", "t4.yaml").read_text()
    small.write_text(table.replace("memory_gib: 16", "memory_gib: 0.5"))
    page = make(tmp_path / "plan.html", f"gpu={small}")
    assert "Nothing fits." in page and page.count("<td>does not fit</td>") > 10
    assert "smallest GPU that trains this: " in page and "The fastest plan" not in page


def test_a_report_shows_the_plan_of_its_run(tmp_path: Path, data: Any) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(data))
    measured = {
        "memory_gb": {"predicted": 1.5, "measured": None},
        "step_seconds": {"predicted": 0.25, "measured": 0.5},
    }
    page = write_report(tmp_path, {"plan": measured}, {}, "").read_text()
    assert "<h2>Plan</h2>" in page and "<td>memory</td><td>1.5 GB</td><td>not measured</td>" in page
    assert "<td>a step</td><td>0.25 s</td><td>0.5 s</td>" in page
    chart = page[page.index("Memory by strategy") : page.index("Time by strategy")]
    assert data["plans"][3]["name"] in chart and data["plans"][4]["name"] not in chart, "the plan and three rivals"
    (tmp_path / "plan.json").unlink()
    assert "<h2>Plan</h2>" not in write_report(tmp_path, {}, {}, "").read_text()
