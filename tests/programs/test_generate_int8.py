"""`python -m sd_lightning.generate quantization=int8 …`: pictures, figures, saved weights, and one line per mistake."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning import LatentDiffusion, generate
from sd_lightning.quantization.layers import int8_layers

QUICK = ["prompts=[three]", "num_inference_steps=2", "guidance_scale=3"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    LatentDiffusion.build("tiny", seed=2).save_pretrained(folder)
    return folder


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, generate)


def picture(folder: Path) -> np.ndarray:
    return np.asarray(Image.open(folder / "three-seed-0.png"), dtype=int)


def test_pictures_hardly_differ_and_memory_is_printed(cli: Any, pipeline: Path, tmp_path: Path) -> None:
    cli(f"model.pretrained={pipeline}", "output_dir=plain", *QUICK)
    code, out = cli(f"model.pretrained={pipeline}", "quantization=int8", "output_dir=int8", *QUICK)
    assert code == 0
    difference = np.abs(picture(tmp_path / "int8") - picture(tmp_path / "plain"))
    assert 0 < difference.mean() < 2
    weights, peak, last = out.splitlines()
    of = r"([\d.]+) MB in int8, ([\d.]+) MB in fp16, ([\d.]+) MB in fp32"
    found = re.fullmatch(f"weights {of}", weights)
    assert found is not None, weights
    int8, half, full = map(float, found.groups())
    assert full == pytest.approx(2 * half, rel=0.01) and full / int8 > 3
    found = re.fullmatch(f"computed peak, 1 picture of 32x32 at a time: {of}", peak)
    assert found is not None, peak
    assert float(found[1]) > int8
    assert last == "1 picture in int8/, all in int8/grid.png"


def test_saved_model_draws_the_same_without_being_asked(cli: Any, pipeline: Path, tmp_path: Path) -> None:
    code, out = cli(f"model.pretrained={pipeline}", "quantization=int8", "save_to=small")
    assert (code, out) == (0, f"{pipeline} in int8 -> small\n")
    assert not (tmp_path / "generated").exists(), "there were no prompts"
    for name, source, more in (("first", pipeline, ["quantization=int8"]), ("again", "small", [])):
        assert cli(f"model.pretrained={source}", f"output_dir={name}", *more, *QUICK)[0] == 0
    assert (picture(tmp_path / "first") == picture(tmp_path / "again")).all()
    size = {
        folder: sum(f.stat().st_size for f in folder.rglob("*.safetensors")) for folder in (pipeline, Path("small"))
    }
    assert size[Path("small")] < size[pipeline] / 3


def test_settings_reach_the_model(cli: Any, pipeline: Path, tmp_path: Path) -> None:
    settings = ["quantization.linear=bitsandbytes", "quantization.exclude=[vae]", "quantization.dtype=bfloat16"]
    assert cli(f"model.pretrained={pipeline}", "quantization=int8", "save_to=small", *settings)[0] == 0
    model = LatentDiffusion.from_pretrained(tmp_path / "small")
    assert model.denoiser.int8_config.linear == "bitsandbytes"
    assert not list(int8_layers(model.vae)) and list(int8_layers(model.denoiser))
    assert {next(network.parameters()).dtype for network in model.networks.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "small/unet/config.json").read_text())["quantization_config"]["exclude"] == ["vae"]


def test_tiles_change_a_large_picture_a_little_and_not_a_small_one(cli: Any, pipeline: Path, tmp_path: Path) -> None:
    for side, name in ((32, "small"), (64, "large")):
        for tiling in ("false", "true"):
            arguments = [f"height={side}", f"width={side}", f"vae_tiling={tiling}", f"output_dir={name}-{tiling}"]
            assert cli(f"model.pretrained={pipeline}", "quantization=int8", *arguments, *QUICK)[0] == 0
    assert (picture(tmp_path / "small-true") == picture(tmp_path / "small-false")).all()
    difference = np.abs(picture(tmp_path / "large-true") - picture(tmp_path / "large-false"))
    assert 0 < difference.mean() < 30


def test_a_full_disk_leaves_nothing(cli: Any, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sd_lightning.models.loading.write_tensors", full)
    code, err = cli(f"model.pretrained={pipeline}", "quantization=int8", "save_to=new/small")
    assert code == 2
    assert "error: save_to=new/small cannot be written" in err and "No space left" in err and "free space" in err
    assert list(tmp_path.iterdir()) == []


MISTAKES = [
    (["save_to=small"], "got save_to=small without quantization; add quantization=int8"),
    (["quantization=int8", "save_to=taken"], "save_to=taken is not empty; choose another save_to=<folder>"),
    (["quantization=int8"], "generate got no prompts"),
    (["quantization=int4", "prompts=[a]"], "quantization=int4"),
    (["quantization=int8", "quantization.linear=fp4", "prompts=[a]"], "expected one of bitsandbytes, weight_"),
    (["quantization=int8", "quantization.layers=[]", "prompts=[a]"], "expected a list of linear, conv2d, embedding"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_mistake_is_one_line_and_writes_nothing(
    arguments: list[str], message: str, cli: Any, pipeline: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    code, err = cli(f"model.pretrained={pipeline}", *arguments)
    assert code == 2
    assert err.startswith("error: ") and message in err
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["taken", "taken/notes.txt"]


def test_an_int8_folder_with_other_settings_is_refused(cli: Any, pipeline: Path) -> None:
    assert cli(f"model.pretrained={pipeline}", "quantization=int8", "save_to=small")[0] == 0
    code, err = cli("model.pretrained=small", "quantization=int8", "quantization.exclude=[vae]", *QUICK)
    assert code == 2
    assert "in int8 already" in err and "load the original weights" in err
    assert cli("model.pretrained=small", "quantization=int8", "quantization.linear=bitsandbytes", *QUICK)[0] == 0
