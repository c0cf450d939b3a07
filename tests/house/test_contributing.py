"""The how-tos of CONTRIBUTING.md, followed: their code is written into files, and run."""

import importlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from places import REPO
from sd_lightning import LatentDiffusion, SDDataModule, SDLightningModule
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models import families

TEXT = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOW_TOS = ("Add a strategy", "Add a family of models", "Add a source of data")
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "accelerator": "cpu", "max_steps": 1}


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def block(heading: str, language: str) -> str:
    """The one block of a language in a how-to."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL)
    return code


def write(heading: str, folder: Path) -> None:
    """Write the files of a how-to under the names that it gives them; the YAML into the folder `mine`."""
    module = re.search(r"Write `(\w+\.py)`", section(heading))
    config = re.search(r"write `(\w+/\w+\.yaml)` into\s+`conf/`", section(heading))
    assert module and config
    (folder / module[1]).write_text(block(heading, "python"))
    path = folder / "mine" / config[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block(heading, "yaml"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the how-tos, from which their modules can be imported."""
    for heading in ("Add a strategy", "Add a source of data"):
        write(heading, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def as_before() -> Iterator[None]:
    """Forget what a how-to registers."""
    names, known = set(StrategyRegistry), dict(families.FAMILIES)
    yield
    for name in set(StrategyRegistry) - names:
        StrategyRegistry.remove(name)
    families.FAMILIES.clear()
    families.FAMILIES.update(known)


def train(model: str, data: SDDataModule, **options: Any) -> SDLightningModule:
    module = SDLightningModule(LatentDiffusion.build(model))
    trainer = pl.Trainer(**QUIET | options)
    trainer.fit(module, data)
    assert trainer.global_step == 1
    return module


@pytest.mark.parametrize("heading", HOW_TOS)
def test_a_how_to_takes_ten_lines(heading: str) -> None:
    for code in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL):
        assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 10


def test_a_strategy_and_a_source_of_data_train_a_step(folder: Path, as_before: None) -> None:
    source = importlib.import_module("my_source").Greys()
    own = importlib.import_module("my_strategy").Alone
    data = SDDataModule(source, batch_size=8, images=ImageOptions(32, center_crop=True))
    module = train("tiny", data, strategy="alone")
    assert isinstance(module.trainer.strategy, own)
    assert {tuple(image.size) for image in map(source.image, range(len(source)))} == {(32, 32)}


def test_both_are_chosen_on_the_command_line(
    folder: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = ["--config-dir", "mine", "strategy=alone", "data=greys", "trainer.max_steps=1", "output_dir=run"]
    run_python("-m", "sd_lightning.train", *words, cwd=folder, check=True)
    assert (folder / "run" / "summary.json").is_file()
    written = (folder / "run" / "config.yaml").read_text()
    assert "my_strategy.Alone" in written and "my_source.Greys" in written


def test_a_family_is_built_trains_and_samples(as_before: None, folder: Path) -> None:
    exec(block("Add a family of models", "python"), {"__name__": "my_family"})
    data = SDDataModule(importlib.import_module("my_source").Greys(), batch_size=8, images=ImageOptions(32))
    module = train("pag_tiny", data)
    (image,) = module.sample(["a grey"], num_inference_steps=2)
    assert image.size == (32, 32) and type(module.latent_diffusion.pipeline()).__name__ == "StableDiffusionPAGPipeline"
