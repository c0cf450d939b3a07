"""The main job learns what its captions ask for: read by a classifier that was fitted on other, real digits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd_lightning.data.sources.digits import DigitClassifier

pytestmark = pytest.mark.slow


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_the_classifier_reads_real_digits_that_it_was_not_fitted_on() -> None:
    assert DigitClassifier().real_accuracy >= 0.97


def test_default_run_draws_what_is_asked_for(trained_run: Path) -> None:
    summary = summary_of(trained_run)
    assert summary["prompted_accuracy"] >= 0.95
    assert summary["prompted_accuracy_samples"] >= 400
    assert summary["caption_gap"] >= 0.1
    assert summary["bad_samples"] == 0
    assert {"steps", "train_seconds", "images_per_second", "final_loss", "checkpoint", "pipeline"} <= summary.keys()


@pytest.mark.full("quality")
@pytest.mark.parametrize(
    "overrides", [["seed=1"], ["model=tiny_frozen", "seed=2"]], ids=["seed 1", "frozen text encoder"]
)
def test_another_seed_and_a_frozen_text_encoder_do_as_well(
    overrides: list[str], tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    options = [f"output_dir={tmp_path / 'run'}", "callbacks.samples.every_n_steps=0", *overrides]
    run_python("-m", "sd_lightning.train", *options, timeout=900, check=True)
    assert summary_of(tmp_path / "run")["prompted_accuracy"] >= 0.95


@pytest.mark.full("quality")
def test_gemini_with_everything_offloaded_does_as_well_as_one_process_without(
    trained_run: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    options = [f"output_dir={tmp_path / 'run'}", "callbacks.samples.every_n_steps=0"]
    gemini = ["strategy=gemini_offload", "strategy.gathered_budget=1000000"]  # a third of the weights
    run_python("-m", "sd_lightning.train", *options, *gemini, timeout=900, check=True)
    ours, single = (summary_of(run)["prompted_accuracy"] for run in (tmp_path / "run", trained_run))
    assert abs(ours - single) <= 0.02


def test_the_exported_pipeline_draws_digits_in_plain_diffusers(
    trained_run: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    """In a process in which sd_lightning cannot be imported; the classifier reads the files afterwards."""
    program = """
import sys
sys.modules["sd_lightning"] = None
from diffusers import DiffusionPipeline
words = "zero one two three four five six seven eight nine".split()
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
images = pipeline([f"a handwritten {w}" for w in words] * 5, num_inference_steps=12, guidance_scale=3.0).images
for i, image in enumerate(images):
    image.save(f"{sys.argv[2]}/{i:02d}.png")
"""
    run_python("-c", program, trained_run / "pipeline", tmp_path, timeout=300, check=True)
    from PIL import Image

    images = [Image.open(path) for path in sorted(tmp_path.glob("*.png"))]
    assert len(images) == 50
    assert DigitClassifier().accuracy(images, [i % 10 for i in range(50)]) >= 0.9
