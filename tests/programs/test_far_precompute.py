"""`precompute` into an object store and `train` from it, and what they say of a bucket that cannot be used."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3_server import S3Server
from sd_lightning import precompute, train
from sd_lightning.models import latent_diffusion
from sd_lightning.storage import object_store
from small_store import write_photos

SMALL = ["trainer.max_steps=4", "trainer.log_every_n_steps=1", "callbacks.samples=null", "logger=csv"]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Arguments for a folder of 20 pictures."""
    folder = write_photos(tmp_path / "photos")
    return ["data=images", f"data.train_data_dir={folder}", "data.resolution=32", "data.center_crop=true"]


@pytest.fixture
def cli(call_main: Call) -> Call:
    return functools.partial(call_main, precompute)


def losses(run: Path) -> list[str]:
    with open(next(run.rglob("metrics.csv"))) as file:
        return [row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")]


def test_training_from_an_object_store_is_training_from_a_folder(
    s3: S3Server, cli: Call, call_main: Call, photos: list[str], tmp_path: Path
) -> None:
    for store in ("near", "s3://bucket/latents"):
        code, out = cli(*photos, f"store={store}", "workers=2", "shard_mb=0.002")
        assert code == 0, out
        assert "20 images encoded" in out and f"data=latents data.store={store}" in out
    again = cli(*photos, "store=s3://bucket/latents", "workers=2", "shard_mb=0.002")[1]
    assert "20 kept, 0 added, 0 removed" in again and "0 images encoded" in again
    for store, workers in (("near", 0), ("s3://bucket/latents", 0), ("s3://bucket/latents", 2)):
        run = f"runs/{store[:2]}-{workers}"
        data = ["data=latents", f"data.store={store}", f"data.num_workers={workers}", "data.batch_size=4"]
        code, out = call_main(train, *data, *SMALL, f"data.cache_dir={tmp_path}/cache", f"output_dir={run}")
        assert code == 0, out
    near = losses(tmp_path / "runs/ne-0")
    assert len(near) == 4 and near == losses(tmp_path / "runs/s3-0") == losses(tmp_path / "runs/s3-2")
    assert cli("prune", "store=s3://bucket/latents", "dry_run=false")[0] == 0
    assert cli("verify", "store=s3://bucket/latents")[1].endswith("all files are what was written\n")


def test_a_bucket_that_cannot_be_used_is_told_before_the_model_is_loaded(
    s3: S3Server, cli: Call, call_main: Call, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(latent_diffusion, "load_model", load_model)
    monkeypatch.setattr(object_store, "WAITS", (0.0,) * len(object_store.WAITS))

    def refusals(url: str) -> list[str]:
        found = [
            cli(*photos, f"store={url}"),
            cli("prune", f"store={url}"),
            cli("verify", f"store={url}"),
            call_main(train, "data=latents", f"data.store={url}", *SMALL),
        ]
        assert all(code == 2 and error.count("\n") == 1 for code, error in found), found
        return [error for _, error in found]

    for error in refusals("s3://nowhere/latents"):
        assert "store=s3://nowhere/latents: cannot " in error and "the bucket does not exist" in error
    for error in refusals("s3://bucket/latents")[1:]:
        assert "store=s3://bucket/latents" in error and "there is no latent store" in error
    denied = s3.deny("AccessDenied")
    for error in refusals("s3://bucket/latents"):
        assert "store=s3://bucket/latents: cannot " in error and "access is denied" in error
    s3.faults.remove(denied)
    s3.deny("ExpiredToken", "400 Bad Request")
    for error in refusals("s3://bucket/latents"):
        assert "the credentials have expired" in error
