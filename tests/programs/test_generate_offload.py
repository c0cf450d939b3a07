"""`python -m sd_lightning.generate offload=blocks …`: the same pictures, what it takes, and one line per mistake."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning import LatentDiffusion, generate
from sd_lightning.apps import generate as app
from sd_lightning.planner.calibration import hardware

QUICK = ["prompts=[three, one, two]", "num_inference_steps=2", "batch_size=2", "vae_tiling=true"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    LatentDiffusion.build("tiny_flux", seed=2).save_pretrained(folder)
    return folder


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


def test_pictures_are_the_same_and_what_it_takes_is_said_before(
    call_main: Any, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_main(generate, f"model.pretrained={pipeline}", "quantization=int8", "save_to=small")[0] == 0
    assert call_main(generate, "model.pretrained=small", "output_dir=plain", *QUICK)[0] == 0
    speeds = replace(hardware("rtx-4090")[1], to_device=1e6)
    for known, time in (
        (None, r"[\d.]+ MB cross to it in each step"),
        (speeds, r"predicted [\d.]+ s a step \(weights cross to it: [\d.]+ s\)"),
    ):
        monkeypatch.setattr(app, "_speeds", lambda _, known=known: known)
        code, out = call_main(generate, "model.pretrained=small", "output_dir=ours", "offload=blocks", *QUICK)
        assert code == 0
        said, last = out.splitlines()
        mb = r"([\d.]+) MB"
        found = re.fullmatch(rf"weights {mb} in host memory, computed peak on the device {mb}, {time}", said)
        assert found is not None, said
        assert float(found[1]) > 0
        assert last == "3 pictures in ours/, all in ours/grid.png"
    ours, plain = pictures(tmp_path / "ours"), pictures(tmp_path / "plain")
    assert ours.keys() == plain.keys() and all((ours[name] == plain[name]).all() for name in ours)


def test_without_int8_it_draws_the_same(call_main: Any, pipeline: Path, tmp_path: Path) -> None:
    for name, offload in (("plain", []), ("ours", ["offload=blocks"])):
        code, out = call_main(generate, f"model.pretrained={pipeline}", f"output_dir={name}", *offload, *QUICK)
        assert code == 0, out
    ours, plain = pictures(tmp_path / "ours"), pictures(tmp_path / "plain")
    assert len(ours) == 4 and all((ours[name] == plain[name]).all() for name in ours)


def test_an_unknown_value_is_refused(call_main: Any, pipeline: Path) -> None:
    code, out = call_main(generate, f"model.pretrained={pipeline}", "offload=layers", *QUICK)
    assert code and "offload=layers: expected one of blocks or null; write offload=blocks" in out, out


def test_what_has_no_use_or_no_place_is_refused_before_the_model_is_read(call_main: Any, pipeline: Path) -> None:
    given = (f"model.pretrained={pipeline}", "offload=blocks")
    code, out = call_main(generate, *given, "quantization=int8", "save_to=small")
    assert code and "got offload=blocks and no prompts to draw; leave it out" in out, out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "find_device", lambda _, **__: torch.device("mps"))
        patch.setattr(app, "load_model", lambda *_: pytest.fail("the model was read"))
        code, out = call_main(generate, *given, *QUICK)
    assert code and "offload=blocks device=mps; expected cuda or cpu" in out, out
