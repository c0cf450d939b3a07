"""A folder of pictures of several aspect ratios is trained on in buckets, by the program and under every engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import small_training
from ranks import run_jobs
from sd_lightning import precompute, train
from sd_lightning.data.builders import image_folder_data
from sd_lightning.storage.checkpoint import all_checkpoints
from shaped_data import IN_BUCKETS, TINY, paint

BUCKETS = " ".join(f"data.{name}={str(value).lower()}" for name, value in TINY.items())
COMMAND = (
    "data=images data.train_data_dir=pictures data.num_val_samples=5 data.resolution=32 data.batch_size=4 "
    f"data.num_workers=0 callbacks.samples=null logger=csv lr_scheduler=none trainer.log_every_n_steps=1 {BUCKETS}"
)
VALIDATING = {"limit_val_batches": 1.0}


@pytest.mark.holds("buckets", of="tiny")
def test_the_program_trains_validates_and_resumes_in_buckets_and_refuses_others(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paint(tmp_path / "pictures")
    every = "trainer.val_check_interval=5 trainer.check_val_every_n_epoch=null"
    assert call_main(train, *COMMAND.split(), *every.split(), "output_dir=run", "trainer.max_steps=5")[0] == 0
    told = [record.getMessage() for record in caplog.records if "aspect-ratio" in record.getMessage()]
    assert "data: reading the sizes of 22 images for aspect-ratio buckets" in told
    assert any("22 images, 7 batches of 4 in an epoch; incomplete batches lose 0 images" in line for line in told), told
    code, out = call_main(
        *(train, *COMMAND.split(), *every.split(), "output_dir=run", "trainer.max_steps=10", "resume=auto"),
        "data.min_bucket_reso=16",
    )
    assert code == 2
    assert "data.min_bucket_reso=16" in out and "instead of aspect-ratio buckets with" in out
    resumed = [*COMMAND.split(), *every.split(), "output_dir=run", "trainer.max_steps=10", "resume=auto"]
    assert call_main(train, *resumed)[0] == 0
    straight = [*COMMAND.split(), *every.split(), "output_dir=whole", "trainer.max_steps=10"]
    assert call_main(train, *straight)[0] == 0
    one, other = (small_training.stored(all_checkpoints(tmp_path / name)[-1]) for name in ("whole", "run"))
    assert small_training.same(one, other)


def test_the_program_trains_on_a_store_in_the_buckets_of_its_images(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paint(tmp_path / "pictures")
    images = f"data=images data.train_data_dir=pictures data.num_val_samples=5 data.resolution=32 {BUCKETS}"
    assert call_main(precompute, *images.split(), "store=latents", "workers=1")[0] == 0
    stored = "data=latents data.store=latents data.batch_size=4 data.num_workers=0 callbacks.samples=null logger=csv"
    assert call_main(train, *stored.split(), "output_dir=run", "trainer.max_steps=7")[0] == 0
    told = [record.getMessage() for record in caplog.records if "aspect-ratio" in record.getMessage()]
    assert any("22 images, 7 batches of 4 in an epoch; incomplete batches lose 0 images" in line for line in told), told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("data.max_image_pixels=1024", "none of the 22 images fits a bucket (pictures/"),
        (
            "data.drop_last=true data.batch_size=20",
            "is larger than the largest of 4 aspect-ratio buckets of",
        ),
        ("data.min_bucket_reso=64", "expected 1 to data.resolution=32, the side of the square bucket; write data.min_"),
        (
            "data.cache_latents=true data.center_crop=true",
            "write data.cache_latents=false, or data.enable_bucket=false",
        ),
    ],
)
def test_buckets_that_cannot_be_filled_are_refused(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, changes: str, told: str
) -> None:
    paint(tmp_path / "pictures")
    code, error = call_main(train, *COMMAND.split(), *changes.split(), "output_dir=run", "trainer.max_steps=1")
    assert code == 2 and told in error.splitlines()[-1]
    assert not list((tmp_path / "run").glob("checkpoints/*"))


class Losses(Callback):
    """The loss of each optimizer step, and the shapes of the latents."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.shapes: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shapes.add(tuple(batch["latents"].shape[-2:]))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.values.append(float(pl_module.last_loss))


def options_of(folder: Path) -> dict[str, Any]:
    """Options of `image_folder_data`: eight batches in an epoch, of four, two or one picture."""
    return {
        "train_data_dir": str(folder),
        "val_data_dir": str(folder),
        "batch_size": 4,
        "val_batch_size": 2,
        "resolution": 32,
        "num_workers": 0,
        **TINY,
    }


def test_an_incomplete_batch_in_parts_trains_like_a_whole_one(tmp_path: Path) -> None:
    """Also where it has fewer samples than parts."""
    folder, seen, weights = paint(tmp_path / "pictures"), [], []
    for accumulate in (1, 3):
        told, module = Losses(), small_training.module(optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2))
        small_training.fit(module, image_folder_data(**options_of(folder)), 9, told, accumulate_grad_batches=accumulate)
        seen.append(told)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    one, parts = seen
    assert one.shapes == parts.shapes == {(side // 4, other // 4) for side, other in IN_BUCKETS}
    assert len(one.values) == 9 and parts.values == pytest.approx(one.values, abs=1e-6)
    assert (weights[0] - weights[1]).abs().max() < 1e-6


@pytest.mark.slow
def test_three_processes_train_in_buckets_as_one_does_under_each_engine(tmp_path: Path) -> None:
    images = options_of(paint(tmp_path / "pictures"))

    def job(strategy: str, devices: int) -> dict[str, Any]:
        run_dir = str(tmp_path / f"{strategy}-{devices}")
        common = {"do": "save", "strategy": strategy, "devices": devices, "run_dir": run_dir}
        # Validation of all pictures, in batches of which some give a rank no picture.
        return {**common, "steps": 10, "save_at": 10, "images": images, "evaluate": True, "trainer": VALIDATING}

    one = run_jobs("strategy_jobs", {"one": job("single", 1)}, tmp_path, world_size=1)["one"]
    expected = small_training.stored(Path(one["checkpoint"]))
    jobs = {name: job(name, 3) for name in ("ddp", "fsdp", "gemini", "zero2", "zero3")}
    for name, three in run_jobs("strategy_jobs", jobs, tmp_path, world_size=3).items():
        assert len(one["losses"]) == 10 and three["losses"] == pytest.approx(one["losses"], abs=5e-6), name
        assert three["validate"] == pytest.approx(one["validate"], abs=5e-6), name
        ours = small_training.stored(Path(three["checkpoint"]))
        differences = torch.cat([(ours[k] - expected[k]).flatten() for k in expected if k.startswith("master/")])
        assert differences.square().mean().sqrt() <= 1e-6, name
