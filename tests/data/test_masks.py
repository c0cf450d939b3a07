"""Masks of the loss: found beside images or in their transparency, and cut as the images are."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from glyph import write_photos
from sd_lightning import LatentDiffusion
from sd_lightning._errors import UsageError
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.builders import dreambooth_data, image_folder_data
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.sources.dreambooth import Subject, find_photos, ignored_photos, photos_of
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.masks import find_masks, masks_in
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.encoder import LatentEncoder
from square_data import Recorder, tokenize, trainer


def blocks(width: int, height: int, seed: int) -> Image.Image:
    """Draw white and black blocks of four pixels."""
    drawn = np.random.default_rng(seed).integers(0, 2, (height // 4, width // 4), dtype=np.uint8) * 255
    return Image.fromarray(drawn.repeat(4, 0).repeat(4, 1))


def paint(folder: Path, *, mask: str = "-mask", sizes: tuple[tuple[int, int], ...] = ((16, 16),) * 6) -> Path:
    """Write images that are equal to their masks, with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, size in enumerate(sizes):
        drawn = blocks(*size, seed=i)
        drawn.convert("RGB").save(folder / f"{i}.png")
        if mask:
            drawn.save(folder / f"{i}{mask}.png")
        (folder / f"{i}.txt").write_text(f"block {i}")
    return folder


def batch_of(data: SDDataModule) -> dict[str, Tensor]:
    module = Recorder()
    trainer(1).fit(module, data)
    return module.last


def folder_data(folder: Path, **options: Any) -> SDDataModule:
    defaults: dict[str, Any] = {"num_val_samples": 0, "batch_size": 4, "resolution": 16, "num_workers": 0}
    defaults |= {"masked_loss": "files", "proportion_empty_prompts": 0.0}
    return image_folder_data(str(folder), **defaults | options)


def test_masks_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for name in ("a.jpg", "b.png", "c.webp", "d.png", "e.png", "f.png", "sks-mask.png"):
        (tmp_path / name).touch()
    for name in ("a-mask.png", "b.mask.png", "c_mask.jpg", "d-masklabel.png", "masks/e.jpg", "masks/none.png"):
        (tmp_path / name).touch()
    found = {
        Path(image).name: str(Path(mask).relative_to(tmp_path))
        for image, mask in masks_in(str(tmp_path), [path.name for path in tmp_path.iterdir()]).items()
    }
    expected = {"a.jpg": "a-mask.png", "b.png": "b.mask.png", "c.webp": "c_mask.jpg", "d.png": "d-masklabel.png"}
    assert found == expected | {"e.png": "masks/e.jpg"}


@pytest.mark.parametrize("cropped", [False, True])
def test_a_mask_is_cropped_flipped_and_bucketed_as_its_image(tmp_path: Path, cropped: bool) -> None:
    buckets = {"enable_bucket": True, "min_bucket_reso": 8, "max_bucket_reso": 32, "bucket_reso_steps": 8}
    sizes = ((16, 16), (48, 16), (16, 40), (32, 16)) if cropped else ((32, 8), (8, 32), (16, 16), (32, 8))
    folder = paint(tmp_path / "blocks", sizes=sizes * 2)
    data = folder_data(folder, batch_size=8 if cropped else 2, random_flip=True, **({} if cropped else buckets))
    batch = batch_of(data)
    expected = avg_pool2d((batch["pixel_values"][:, :1] + 1) / 2, 8)
    torch.testing.assert_close(batch["loss_mask"], expected, atol=1e-6, rtol=0)
    assert batch["loss_mask"].dtype == torch.float32 and 0.2 < batch["loss_mask"].mean() < 0.8
    height, width = batch["target_size"][0].tolist()
    assert batch["loss_mask"].shape[1:] == (1, height // 8, width // 8)


def test_resizing_takes_the_mean_and_a_mask_may_be_smaller_than_its_image(tmp_path: Path) -> None:
    drawn = blocks(64, 32, seed=1)
    drawn.convert("RGB").resize((128, 64), Image.Resampling.NEAREST).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "masks").mkdir()
    drawn.save(tmp_path / "masks" / "a.png")
    source = ImageFolder(tmp_path, masked_loss="files")
    assert len(source) == 1 and source.has_mask(0)
    options = ImageOptions(16, center_crop=True, masked_loss="files")
    made = CaptionedImages(source, tokenize, options=options, seed=0, latent_stride=8)[(0, 0)]["loss_mask"]
    whole = torch.from_numpy(np.asarray(drawn, np.float32) / 255)[None, None]
    assert torch.allclose(made[0], avg_pool2d(whole[..., 16:48], 16)[0], atol=0.5 / 255)


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_what_is_outside_has_the_weight_that_is_asked_for(tmp_path: Path, weight: float) -> None:
    batch = batch_of(folder_data(paint(tmp_path / "p"), center_crop=True, unmasked_weight=weight))
    share = avg_pool2d((batch["pixel_values"][:, :1] + 1) / 2, 8)
    torch.testing.assert_close(batch["loss_mask"], weight + (1 - weight) * share, atol=1e-6, rtol=0)


def test_cached_latents_have_the_masks_of_their_images_and_read_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = paint(tmp_path / "p", sizes=((24, 16),) * 6)
    images = batch_of(folder_data(folder, center_crop=True))
    data = folder_data(folder, center_crop=True, cache_latents=True)
    reads: list[int] = []
    mask = ImageFolder.mask
    monkeypatch.setattr(ImageFolder, "mask", lambda self, index: reads.append(index) or mask(self, index))
    module = Recorder()
    trainer(6).fit(module, data)
    assert len(reads) == 12, "once when the images are encoded, once when they are first seen"
    latents = batch_of(data)
    assert images["index"].tolist() == latents["index"].tolist()
    assert torch.equal(images["loss_mask"], latents["loss_mask"])


def test_images_without_a_mask_count_as_a_whole_and_their_number_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = paint(tmp_path / "p")
    (folder / "2-mask.png").unlink()
    with caplog.at_level(logging.INFO, "sd_lightning"):
        batch = batch_of(folder_data(folder, batch_size=6, center_crop=True))
    assert "data: 5 of 6 images have a mask; of others everything counts" in caplog.messages
    whole = batch["loss_mask"].flatten(1).min(1).values == 1
    assert batch["index"][whole].tolist() == [2]


@pytest.mark.parametrize("cache_latents", [False, True])
def test_masks_that_cannot_be_used_make_bad_samples(tmp_path: Path, cache_latents: bool) -> None:
    folder = paint(tmp_path / "p")
    (folder / "0-mask.png").write_bytes(b"torn")
    Image.new("L", (16, 16)).save(folder / "1-mask.png")
    Image.new("L", (32, 16), 255).save(folder / "2-mask.png")
    Image.new("L", (16, 16), 1).save(folder / "3-mask.png")
    options: dict[str, Any] = {"center_crop": True, "cache_latents": cache_latents, "max_bad_fraction": 1.0}
    data = folder_data(folder, batch_size=6, **options)
    batch = batch_of(data)
    found = {Path(name).name: reason for name, reason in data.bad.found.items()}
    assert found.keys() == {"0.png", "1.png", "2.png", "3.png"}
    assert "values up to 1: nothing counts; expected 255" in found["3.png"]
    assert "cannot decode" in found["0.png"] and "nothing counts" in found["1.png"]
    assert "32 x 16, has another shape than 16 x 16" in found["2.png"]
    assert torch.isfinite(batch["loss_mask"]).all()


@pytest.mark.parametrize("cache_latents", [False, True])
def test_a_centre_crop_without_anything_of_the_mask_makes_a_bad_sample(tmp_path: Path, cache_latents: bool) -> None:
    folder = paint(tmp_path / "p", sizes=((16, 16), (48, 16)))
    aside = Image.new("L", (48, 16))
    aside.paste(255, (0, 0, 8, 16))
    aside.save(folder / "1-mask.png")
    data = folder_data(folder, batch_size=2, center_crop=True, cache_latents=cache_latents, max_bad_fraction=1.0)
    assert batch_of(data)["loss_mask"].flatten(1).amax(1).min() > 0
    (reason,) = data.bad.found.values()
    assert "nothing of what its mask has counts in the crop of 16 x 16" in reason and "enable_bucket=true" in reason


def test_a_random_crop_has_part_of_the_mask(tmp_path: Path) -> None:
    drawn = Image.new("L", (160, 16))
    drawn.paste(255, (136, 0, 144, 16))
    drawn.save(tmp_path / "a-mask.png")
    drawn.convert("RGB").save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    options = ImageOptions(16, random_flip=True, masked_loss="files")
    source = ImageFolder(tmp_path, masked_loss="files")
    samples = CaptionedImages(source, tokenize, options=options, seed=0, latent_stride=8)
    for batch in (samples[(epoch, 0)] for epoch in range(40)):
        assert batch["loss_mask"].max() > 0.1
        expected = avg_pool2d((batch["pixel_values"][:, :1] + 1) / 2, 8)
        torch.testing.assert_close(batch["loss_mask"], expected, atol=1e-6, rtol=0)


def test_validation_images_need_no_masks_and_held_out_ones_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = paint(tmp_path / "p"), paint(tmp_path / "val", mask="")
    for masked_loss in ("files", "alpha"):
        if masked_loss == "alpha":
            for i in range(6):
                Image.open(folder / f"{i}.png").convert("RGBA").save(folder / f"{i}.png")
            drawn = Image.new("RGBA", (16, 16))
            drawn.paste((9, 9, 9, 255), (0, 0, 8, 8))
            drawn.save(folder / "0.png")
        data = image_folder_data(str(folder), str(plain), masked_loss=masked_loss, resolution=16, num_workers=0)
        source = data.source_train
        assert sum(map(source.has_mask, range(len(source)))) == (6 if masked_loss == "files" else 1)
    with caplog.at_level(logging.INFO, "sd_lightning"):
        batch_of(folder_data(folder, num_val_samples=2, center_crop=True, batch_size=2))
    assert "data: 4 of 4 images have a mask; of others everything counts" in caplog.messages


def test_of_many_images_some_are_looked_at_for_transparency(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{i}.png") for i in range(201)]
    Image.new("RGBA", (4, 4)).save(names[2])
    assert list(find_masks(names, "alpha")) == names
    Image.new("RGBA", (4, 4), "white").save(names[2])
    assert not find_masks(names, "alpha")


@pytest.mark.parametrize("setting", [{"shuffle_tags": True}, {"unmasked_weight": 0.5}, {"masked_loss": "alpha"}])
def test_other_settings_of_captions_and_masks_are_told_when_a_run_resumes(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    folder = paint(tmp_path / "p")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"block, {i}")
        image = Image.open(folder / f"{i}.png").convert("RGBA")
        image.putalpha(blocks(16, 16, seed=i))
        image.save(folder / f"{i}.png")
    before = folder_data(folder).fingerprint()
    change = folder_data(folder, **setting).change_since(before)
    ((name, value),) = setting.items()
    assert change is not None and f"data.{name}={value} instead of " in change.description
    assert not change.moves and not change.reorders
    assert folder_data(folder).change_since({k: v for k, v in before.items() if k != "settings"}) is None


def test_validation_has_no_masks_so_that_runs_are_comparable(tmp_path: Path) -> None:
    data = folder_data(paint(tmp_path / "p"), num_val_samples=2)
    module = Recorder()
    trainer(1, limit_val_batches=1).fit(module, data)
    assert "loss_mask" in module.last
    assert module.val_batches and all("loss_mask" not in batch for batch in module.val_batches)


def test_transparency_is_a_mask_and_a_class_has_none(tmp_path: Path) -> None:
    for part in ("photos", "dogs"):
        (tmp_path / part).mkdir()
        for i in range(2):
            image = Image.new("RGBA", (16, 16), (9, 9, 9, 255))
            image.putalpha(blocks(16, 16, seed=i))
            image.save(tmp_path / part / f"{i}.png")
    prior = {"class_data_dir": str(tmp_path / "dogs"), "class_prompts": ["a dog"], "num_class_images": 2}
    options: dict[str, Any] = {"resolution": 16, "num_workers": 0, "cache_latents": False, "masked_loss": "alpha"}
    data = dreambooth_data(str(tmp_path / "photos"), "sks", batch_size=4, **options, **prior)
    samples = CaptionedImages(data.source_train, tokenize, options=data.images, seed=0, latent_stride=8)
    batch = samples.__getitems__([(0, i) for i in range(4)])
    for i in range(4):
        alpha = torch.from_numpy(np.asarray(blocks(16, 16, seed=i // 2), np.float32))[None] / 255
        expected = torch.ones(1, 2, 2) if i % 2 else avg_pool2d(alpha, 8)
        torch.testing.assert_close(batch["loss_mask"][i], expected, atol=1e-6, rtol=0)


def test_masks_are_no_photos_and_are_named_where_they_are_not_asked_for(tmp_path: Path) -> None:
    paint(tmp_path / "photos", sizes=((16, 16),) * 2)
    photos = find_photos(tmp_path / "photos", "sks dog")
    assert [Path(photo.path).name for photo in photos] == ["0.png", "1.png"] and photos[0].mask is None
    assert "2 file(s)" in str(ignored := ignored_photos(tmp_path / "photos"))
    assert str(ignored).endswith("with names of masks: write data.masked_loss=files")
    assert ignored_photos(tmp_path / "photos", masked_loss="files") is None
    write_photos(tmp_path / "others", 2)
    subjects = [Subject(str(tmp_path / name), "sks dog") for name in ("photos", "others")]
    masked, others = photos_of(subjects, masked_loss="files").values()
    assert all(photo.mask is None for photo in others)
    assert [Path(str(photo.mask)).name for photo in masked] == ["0-mask.png", "1-mask.png"]


def test_another_mask_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = paint(tmp_path / "p")
    before = folder_data(folder).fingerprint()
    assert folder_data(folder).change_since(before) is None
    shutil.copy(folder / "1-mask.png", folder / "2-mask.png")
    change = folder_data(folder).change_since(before)
    assert change is not None and "1 replaced" in change.description and "2.png" in change.description


def test_masks_of_the_folder_that_one_is_in_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paint(tmp_path / "p"))
    (photos,) = photos_of([Subject(".", "sks dog")], masked_loss="files").values()
    assert [photo.mask for photo in photos] == [f"{i}-mask.png" for i in range(6)]
    Path("metadata.jsonl").write_text('{"file_name": "2.png", "text": "x"}\n')
    assert ImageFolder(".", masked_loss="files").mask(0) is not None


@pytest.mark.parametrize("kind", ["upright", "turned", "alpha"])
def test_a_mask_is_turned_upright_as_its_image_is(tmp_path: Path, kind: str) -> None:
    drawn, exif = blocks(16, 32, seed=3), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = drawn.transpose(Image.Transpose.ROTATE_90)
    image = turned.convert("RGB")
    if kind == "alpha":
        image.putalpha(turned)
    elif kind == "turned":
        turned.save(tmp_path / "a-mask.png", exif=exif)
    else:
        drawn.save(tmp_path / "a-mask.png")
    image.save(tmp_path / "a.png", exif=exif)
    (tmp_path / "a.txt").write_text("x")
    mask = ImageFolder(tmp_path, masked_loss="alpha" if kind == "alpha" else "files").mask(0)
    assert mask is not None and np.array_equal(np.asarray(mask), np.asarray(drawn))


def test_masks_in_kohyas_folders_are_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paint(tmp_path / "3_sks dog", sizes=((16, 16),) * 2)
    for path in (tmp_path / "3_sks dog").glob("*.txt"):
        path.unlink()
    source = ImageFolder(tmp_path, folder_repeats=True)
    assert [Path(source.name(i)).name for i in range(len(source))] == ["0.png"] * 3 + ["1.png"] * 3
    assert not source.dropped, "masks are no training images that cannot be read"
    (told,) = caplog.messages
    assert told.startswith("data: 2 images named like masks are left out, such as ")
    assert told.endswith("0-mask.png; if it is a mask, write data.masked_loss=files")
    assert not ImageFolder(tmp_path, folder_repeats=True, masked_loss="files").dropped and len(caplog.messages) == 1


@pytest.mark.parametrize("name", ["tiny", "tiny_klein", "tiny_qwen_image_21"])
def test_weights_have_the_places_of_the_denoisers_latents(tmp_path: Path, name: str) -> None:
    model = LatentDiffusion.build(name, seed=0)
    options = ImageOptions(64, center_crop=True, masked_loss="files")
    source = ImageFolder(paint(tmp_path / "p"), masked_loss="files")
    samples = CaptionedImages(source, model.tokenize, options=options, seed=0, latent_stride=model.latent_space.stride)
    batch = LatentEncoder(model)(samples.__getitems__([(0, 0), (0, 1)]), seed=0)
    assert batch["loss_mask"].shape == (2, 1, *batch["latents"].shape[-2:])


def test_no_masks_and_settings_without_effect_are_refused(tmp_path: Path) -> None:
    folder = paint(tmp_path / "p", mask="")
    with pytest.raises(UsageError, match="no image to train on has a mask.*photo-mask.png beside"):
        folder_data(folder)
    with pytest.raises(UsageError, match="no image to train on is transparent anywhere; save them as PNG"):
        folder_data(folder, masked_loss="alpha")
    with pytest.raises(UsageError, match="data.unmasked_weight=0.1 with data.masked_loss=none: expected"):
        ImageOptions(16, unmasked_weight=0.1)
    with pytest.raises(UsageError, match="data.masked_loss=files: no image"):
        options = ImageOptions(16, masked_loss="files")
        SDDataModule(ImageFolder(folder), batch_size=2, images=options, loader=LoaderOptions(0))
