"""What the page predicts of a run before it starts."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from composing import Compose
from glyph import write_photos
from hub_server import TOKEN, hub_server
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.apps import planning
from sd_lightning.planner.calibration import hardware
from sd_lightning.ui import check


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A run of the tiny model on three photos."""
    LatentDiffusion.build("tiny").save_pretrained(tmp_path / "base")
    photos = write_photos(tmp_path / "photos", 3)
    places = [f"instance_data_dir={photos}", f"init_from={tmp_path}/base", f"output_dir={tmp_path}/run"]
    return ["experiment=dreambooth_tiny", "instance_prompt=a sks digit", "max_train_steps=100", *places]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_memory_time_and_dollars_are_predicted(
    settings: list[str], compose: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "hardware_here", lambda: hardware("l4"))
    assert check.run(compose("dreambooth", *settings)) == 0
    found = told(capsys)
    assert 0.1 < found["device_gb"] < 3 and 1 < found["host_gb"] < 5
    assert 0.01 < found["seconds"] < 100
    assert found["dollars"] == pytest.approx(found["seconds"] / 3600 * hardware("l4")[0].price_per_hour)
    assert found["notes"] == ["without the time to draw pictures of the class, once"]


def test_what_is_not_known_or_wrong_is_said(
    settings: list[str], compose: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> None:
        raise UsageError("no table; run plan calibrate")

    monkeypatch.setattr(planning, "hardware_here", unknown)
    check.run(compose("dreambooth", *settings, "with_prior_preservation=false"))
    found = told(capsys)
    assert found["notes"] == ["time: no table; run plan calibrate"] and found["device_gb"] > 0
    with pytest.raises(UsageError, match="max_train_steps=0"):
        check.run(compose("dreambooth", *settings[:-3], *settings[-3:], "max_train_steps=0"))
    assert not Path(settings[-1].partition("=")[2]).exists(), "a check writes nothing"


def test_a_name_that_the_hub_has_is_said_before_the_start(
    settings: list[str], compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.repos["me/other"] = {"README.md": b""}
        with pytest.raises(UsageError, match="push_to_hub=me/other: that repository exists, and is not of this run"):
            check.run(compose("dreambooth", *settings, "push_to_hub=me/other"))
