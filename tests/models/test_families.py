"""The seam of families: one that the package does not know trains, is saved, goes on, samples and is exported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.callbacks import EMA
from sd_lightning.models import families
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.models.meta import meta_batch
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from small_training import Saving, adamw, data, fit, weights
from toy_family import Toy, ToyFamily, ToyPipeline


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the toy family for a test."""
    families.register(ToyFamily())
    yield
    del families.FAMILIES[ToyFamily.pipeline_class]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.values.append(float(pl_module.last_loss))


def train(
    run: Path, steps: int, *, resume: Path | None = None, strategy: Any = "auto"
) -> tuple[Any, list[float], Path]:
    module = SDLightningModule(LatentDiffusion.build("toy", seed=1), train_text_encoder=True, optimizer=adamw, seed=3)
    losses, saving = Losses(), Saving(run, (3,), resume=resume)
    fit(module, data(), steps, EMA(0.9), saving, losses, strategy=strategy)
    leave_process_group()
    assert saving.last_saved is not None
    return module, losses.values, saving.last_saved


def test_a_family_outside_the_package_does_all_that_ours_do(tmp_path: Path) -> None:
    module, losses, last = train(tmp_path / "run", 6)
    assert isinstance(module.transformer, Toy) and len(repeated_blocks(module.transformer)) == 2
    assert module.objective.prediction_type == "flow" and module.schedule.shift == 3.0
    assert sum(losses[3:]) < sum(losses[:3])

    half = tmp_path / "run" / "checkpoints" / "step-00000003"
    again, continued, _ = train(tmp_path / "again", 6, resume=half, strategy=GeminiStrategy())
    torch.testing.assert_close(torch.tensor(continued), torch.tensor(losses[3:]), rtol=1e-4, atol=1e-5)
    for name, weight in weights(module).items():
        torch.testing.assert_close(again.get_parameter(name), weight, rtol=1e-3, atol=1e-4)

    pipeline: Any = ToyPipeline.from_pretrained(last / "pipeline")
    ours = LatentDiffusion.from_pretrained(last / "pipeline")
    assert ours.pipeline().components.keys() == pipeline.components.keys()
    prompts = ["a handwritten three", "the digit seven"]
    drawn = SDLightningModule(ours).sample(prompts, seed=5, num_inference_steps=3)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    theirs = pipeline(prompts, generator=generators, num_inference_steps=3).images
    assert [list(image.getdata()) for image in drawn] == [list(image.getdata()) for image in theirs]


def test_its_sizes_are_known_without_weights() -> None:
    model = LatentDiffusion.build("toy", device="meta")
    batch = meta_batch(model, 2)
    assert batch["latents"].shape == (2, 4, 8, 8)
    assert {name: ids.shape[1] for name, ids in batch["input_ids"].items()} == {"text_encoder": 8, "text_encoder_2": 12}
    assert SDLightningModule(LatentDiffusion.build("toy")).flops_per_sample({"latents": batch["latents"]}) > 0
