"""The tables of GPUs of 8 to 24 GB in docs/planner.md, and the preset that they are for."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from composing import Compose
from sd_lightning.apps.planning import run_of
from sd_lightning.apps.run_spec import RunSpec, target_of

REPO = Path(__file__).parents[2]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import consumer_cards

    yield consumer_cards
    del sys.modules["consumer_cards"]


def in_page() -> list[list[str]]:
    text = (REPO / "docs" / "planner.md").read_text(encoding="utf-8")
    table = text.partition("<!-- consumer cards -->\n")[2].partition("<!--")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_has_every_model_kind_and_card(cards: Any) -> None:
    expected = [[m, k, str(c)] for m in cards.MODELS for k in cards.KINDS for c in cards.CARDS]
    assert [row[:3] for row in in_page()] == expected
    for row in in_page():
        if not row[3].startswith("does not fit"):
            assert float(row[5]) < float(row[2]) and int(row[4]) in cards.BATCHES


@pytest.mark.parametrize(
    ("model", "kind", "card"),
    [
        ("klein_4b", "lora", 8),
        pytest.param("klein_4b", "full", 24, marks=pytest.mark.slow),
        pytest.param("klein_9b", "full", 16, marks=pytest.mark.slow),
        pytest.param("z_image", "lora", 12, marks=pytest.mark.slow),
    ],
)
def test_a_line_of_the_page_is_what_the_planner_finds(cards: Any, model: str, kind: str, card: int) -> None:
    assert cards.row(model, kind, card) in in_page()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_preset_trains_with_the_settings_of_the_table(
    cards: Any,
    kind: str,
    compose: Compose,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = ("model=klein_4b", f"trainable={kind}", "strategy=gemini_offload", f"data.store={tmp_path}")
    spec = RunSpec.of(compose("train", "experiment=consumer_gpu", *options, "data.batch_size=2"))
    run, planned = run_of(spec, cards._model("klein_4b"), 1), cards._searched("klein_4b", kind).run
    assert (run.resolution, run.precision, run.gradient_checkpointing) == (512, planned.precision, True)
    assert not run.averages and (run.lora is None) == (planned.lora is None)
    if run.lora is not None:
        assert (run.lora.rank, run.lora.target_modules) == (planned.lora.rank, planned.lora.target_modules)
    assert target_of(spec.optimizer) is planned.optimizer.func


def test_figures_wait_only_for_models_that_are_not_here(cards: Any) -> None:
    import published
    from sd_lightning.models.families import FAMILIES

    known = {name for family in FAMILIES.values() for name in family.architectures}
    models = {each.setup.model for each in published.PUBLISHED.values()}
    assert models - known == published.AWAITED
    waiting = [each for each in published.PUBLISHED.values() if published.missing(each)]
    assert waiting and all(re.match("the model|Adafactor's step|blocks", published.missing(each)) for each in waiting)
