"""`cache_latents`: images are encoded once into files that the processes of a machine map, and that nobody leaves."""

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from ranks import run_jobs, run_jobs_of_all
from sd_lightning._errors import UsageError
from sd_lightning.data.latent_table import LatentTable, encode_source
from sd_lightning.data.source import BadSample
from sd_lightning.data.transform import ImageOptions, place, to_model_range
from square_data import Squares

IMAGES = ImageOptions(16, center_crop=True)
NUM, BROKEN = 100, [0, 33, 34, 99]


def pooled(pixels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(pixels, 4)


def table_of(squares: Any, encode: Any = pooled) -> LatentTable:
    encoder: Any = SimpleNamespace(encode_moments=encode)
    return encode_source(squares, encoder, IMAGES, device=torch.device("cpu"), num_threads=3)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_latents_sizes_and_substitutes_are_those_of_each_image(temporary: Path) -> None:
    squares = Squares(NUM, tuple(BROKEN))
    table = table_of(squares)
    used = table.usable(torch.arange(NUM))
    assert used == [1, *range(1, 33), 35, 35, *range(35, 99), 1], "the next good one"
    assert table.bad == [(index, "torn") for index in BROKEN]
    batch = table.batch(used, epoch=torch.zeros(NUM))
    placed = [place(squares.image(index), (16, 16)) for index in used]
    pixels = torch.cat([to_model_range(torch.from_numpy(each.pixels.copy())[None]) for each in placed])
    assert torch.equal(batch["latent_moments"], pooled(pixels))
    assert batch["original_size"].tolist() == [[20, 30]] * NUM and batch["original_size"].dtype == torch.int64
    assert batch["crop_top_left"].tolist() == [list(each.crop_top_left) for each in placed]


def test_an_image_is_read_once(temporary: Path) -> None:
    class Counted(Squares):
        read: list[int] = []

        def image(self, index: int) -> Image.Image:
            self.read.append(index)
            return super().image(index)

    table_of(Counted(NUM))
    assert sorted(Counted.read) == list(range(NUM))


def test_an_error_while_reading_and_an_empty_caption_make_a_bad_sample(temporary: Path) -> None:
    class Odd(Squares):
        def image(self, index: int) -> Image.Image:
            if index == 3:
                raise ZeroDivisionError("odd")
            return super().image(index)

        def captions(self, index: int) -> list[str]:
            if index == 5:
                raise BadSample("its caption is empty")
            return super().captions(index)

    assert table_of(Odd(8)).bad == [(3, "ZeroDivisionError: odd"), (5, "its caption is empty")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_files_are_deleted_but_mapped_and_go_to_spawned_workers(temporary: Path) -> None:
    table = table_of(Squares(NUM))
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(temporary) in line]
    assert len(maps) == len(table.files) == 4 and all(line.endswith(".safetensors (deleted)") for line in maps)
    assert not any(str(temporary) in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())
    assert not list(temporary.iterdir())
    copy = pickle.loads(pickle.dumps(table))
    ours, theirs = (each.batch([5, 70], epoch=torch.zeros(2))["latent_moments"] for each in (table, copy))
    assert torch.equal(ours, theirs)


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_infinite_latents_are_refused_with_the_remedy_and_nothing_is_left(temporary: Path) -> None:
    with pytest.raises(UsageError, match="not finite in dtype=float32; write module.encoder_dtype=float32"):
        table_of(Squares(NUM), lambda pixels: pooled(pixels) / 0)
    assert not list(temporary.iterdir())


def test_only_broken_images_are_refused_with_their_reasons(temporary: Path) -> None:
    with pytest.raises(UsageError, match=r"none of the 3 images can be read \(square-0: torn; square-1: torn; .*\)"):
        table_of(Squares(3, (0, 1, 2)))
    assert not list(temporary.iterdir())


def test_every_number_of_ranks_has_the_same_bits_and_divides_the_work(tmp_path: Path, temporary: Path) -> None:
    job = {"num": NUM, "broken": BROKEN, "folder": str(temporary)}
    one = run_jobs("latent_table_jobs", {"one": job}, tmp_path, world_size=1)["one"]
    assert one["encoded"] == NUM - len(BROKEN)
    jobs = {"shared": job, "apart": {**job, "apart": True}}
    three = run_jobs_of_all("latent_table_jobs", jobs, tmp_path, world_size=3)
    encoded = {name: [found[name].pop("encoded") for found in three] for name in jobs}
    del one["encoded"]
    assert [found["shared"] for found in three] == [found["apart"] for found in three] == [one] * 3
    assert sum(encoded["shared"]) == NUM - len(BROKEN) and min(encoded["shared"]) > 0
    assert encoded["apart"] == [NUM - len(BROKEN)] * 3, "each machine has its own copy"
    assert not list(temporary.iterdir())


def test_the_error_of_one_rank_ends_all_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    job = {"num": NUM, "broken": [], "folder": str(temporary), "fails": 1}
    jobs = {known: {**job, "known": known} for known in (True, False)}
    ranks = run_jobs_of_all("latent_table_jobs", jobs, tmp_path, world_size=2, timeout=120)
    told = "UsageError: rank 1: "
    assert [found[True]["error"] for found in ranks] == [f"{told}no memory left", "UsageError: no memory left"]
    assert [found[False]["error"] for found in ranks] == [
        f"{told}RuntimeError('no memory left')",
        "RuntimeError: no memory left",
    ]
    assert not list(temporary.iterdir())
