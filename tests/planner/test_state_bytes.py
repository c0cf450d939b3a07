"""Closed forms of model state, and the table of them in docs/strategies.md."""

import re

import pytest

from places import REPO
from sd_lightning._errors import UsageError
from sd_lightning.planner.state_bytes import FORMS, state_bytes

PAGE = (REPO / "docs" / "strategies.md").read_text(encoding="utf-8")
PARAMETERS = {"sd21": 865_910_724, "sdxl": 2_567_463_684}  # pinned by test_latent_diffusion
TABLE = PAGE[PAGE.index("| `strategy=` |") :].split("\n\n")[0]
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|", TABLE, re.MULTILINE)}


def test_one_process_keeps_what_adamw_needs_of_every_parameter() -> None:
    assert state_bytes("single", 100, 1).device == 100 * (4 + 4 + 8)


@pytest.mark.parametrize("name", FORMS)
def test_processes_divide_what_is_sharded_and_each_keep_what_is_whole(name: str) -> None:
    alone, eight = state_bytes(name, 1000, 1), state_bytes(name, 1000, 8)
    whole = FORMS[name].whole * 1000
    assert eight.device - whole == pytest.approx((alone.device - whole) / 8)
    assert eight.host == alone.host / 8
    assert alone.device + alone.host >= 16_000, "nothing of AdamW's state is lost by moving it"


@pytest.mark.parametrize("name", FORMS)
def test_the_guide_gives_the_closed_forms(name: str) -> None:
    for cell, parameters in zip(ROWS[name], PARAMETERS.values(), strict=True):
        forms = [state_bytes(name, parameters, world_size) for world_size in (1, 2, 8)]
        texts = [" + ".join(_gigabytes(form.device, "") + _gigabytes(form.host, " h")) for form in forms]
        assert cell.strip() == (texts[0] if len(set(texts)) == 1 else ", ".join(texts))


def _gigabytes(size: float, mark: str) -> list[str]:
    return [f"{size / 1e9:.1f}{mark}"] if size else []


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="state_bytes got strategy='zero9'; expected one of single, ddp, fsdp"):
        state_bytes("zero9", 1, 1)
