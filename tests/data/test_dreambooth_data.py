"""Photos of a subject and pictures of its class as one source: found, captioned, paired and weighed."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd_lightning import UsageError
from sd_lightning.apps import class_images
from sd_lightning.apps.class_images import missing_pictures
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.builders import dreambooth_data
from sd_lightning.data.latent_table import encode_source
from sd_lightning.data.order import BatchOrder, Bucket
from sd_lightning.data.sampler import GlobalBatchSampler
from sd_lightning.data.sources.dreambooth import (
    Picture,
    SubjectAndClass,
    check_readable,
    class_folder,
    find_class_pictures,
    find_photos,
)
from sd_lightning.data.transform import ImageOptions

SKS = "a photo of sks dog"
DOG = "a photo of a dog"


def save(path: Path, size: tuple[int, int] = (40, 30), grey: int = 128) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, grey, grey)).save(path)
    return path


def pictures(count: int, caption: str, kind: str) -> list[Picture]:
    return [Picture(f"{kind}-{i}", caption) for i in range(count)]


def test_a_folder_of_photos_works_as_it_is(tmp_path: Path) -> None:
    for name in ("a.JPG", "b.png", "c.webp"):
        save(tmp_path / name, (50, 20))
    (tmp_path / "notes.md").write_text("no photo")
    (tmp_path / ".hidden.png").write_bytes(b"")
    turned = Image.new("RGB", (60, 20))
    exif = turned.getexif()
    exif[0x0112] = 6  # stands on its side
    turned.save(tmp_path / "d.jpeg", exif=exif)
    source = dreambooth_data(str(tmp_path), SKS, batch_size=1, resolution=16).source_train
    names = {Path(source.name(i)).name for i in range(len(source))}
    assert names == {"a.JPG", "b.png", "c.webp", "d.jpeg"}
    assert {tuple(source.captions(i)) for i in range(len(source))} == {(SKS,)}
    sizes = {Path(source.name(i)).name: source.image(i).size for i in range(len(source))}
    assert sizes["d.jpeg"] == (20, 60) and sizes["a.JPG"] == (50, 20)


def test_one_of_kohyas_folders_captions_its_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "10_sks dog"
    for name in ("a", "b"):
        save(folder / f"{name}.png")
    (folder / "b.txt").write_text("sks dog on a beach")
    assert [photo.caption for photo in find_photos(folder, None)] == ["sks dog", "sks dog on a beach"]
    assert {photo.caption for photo in find_photos(folder, SKS)} == {SKS}
    monkeypatch.chdir(folder)
    assert [photo.caption for photo in find_photos(".", None)] == ["sks dog", "sks dog on a beach"]


def test_class_pictures_in_kohyas_folders_are_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path / "1_dog" / "a.png")
    with pytest.raises(UsageError, match="kohya's folder 1_dog; expected .*; write 'class_data_dir=.*/1_dog'"):
        missing_pictures(tmp_path, [DOG], 3, seed=0)
    assert len(missing_pictures(tmp_path / "1_dog", [DOG], 3, seed=0)) == 2


def test_kohyas_folders_repeat_and_caption_their_photos(tmp_path: Path) -> None:
    save(tmp_path / "3_sks dog" / "a.png")
    save(tmp_path / "3_sks dog" / "b.png")
    (tmp_path / "3_sks dog" / "b.txt").write_text("sks dog on a beach\n")
    save(tmp_path / "1_sks dog asleep" / "c.png")
    save(tmp_path / "0_left out" / "d.png")
    photos = find_photos(tmp_path, None)
    counts = Counter((Path(photo.path).name, photo.caption) for photo in photos)
    assert counts == {("a.png", "sks dog"): 3, ("b.png", "sks dog on a beach"): 3, ("c.png", "sks dog asleep"): 1}
    assert {photo.caption for photo in find_photos(tmp_path, SKS)} == {SKS}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_a_caption_is_utf8_or_refused(encoding: str, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("sks Tür", encoding=encoding)
    if encoding == "utf-8-sig":
        assert {photo.caption for photo in find_photos(tmp_path, None)} == {"sks Tür"}
        return
    with pytest.raises(UsageError, match="caption of .*a.png: the file .*a.txt is not UTF-8 text.*save it as UTF-8"):
        find_photos(tmp_path, None)


@pytest.mark.parametrize(
    ("names", "prompt", "words"),
    [
        ([], SKS, ["no photos", "at least 2", "add photos"]),
        (["a.png"], SKS, ["one photo", "a.png", "the model learns the photo", "add photos"]),
        (["a.png", "b.png"], None, ["without instance_prompt", "a.png has no caption", "write 'instance_prompt="]),
    ],
)
def test_too_few_or_uncaptioned_photos_are_refused(
    names: list[str], prompt: str | None, words: list[str], tmp_path: Path
) -> None:
    for name in names:
        save(tmp_path / name)
    with pytest.raises(UsageError) as refused:
        find_photos(tmp_path, prompt)
    message = str(refused.value)
    assert [word for word in words if word not in message] == []


def test_unreadable_photos_are_named(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        save(tmp_path / name)
    (tmp_path / "b.png").write_bytes(b"torn")
    with pytest.raises(UsageError, match="cannot read 1 of the 3 photos.*b.png.*not an image.*mend or remove"):
        check_readable(find_photos(tmp_path, SKS), resolution=16)
    Image.new("RGB", (30000, 2)).save(tmp_path / "b.png")
    with pytest.raises(UsageError, match="cannot read 1 of the 3 photos.*b.png: the image of 30000 x 2 pixels would"):
        check_readable(find_photos(tmp_path, SKS), resolution=256)


def test_an_epoch_pairs_every_photo_equally_often_with_class_pictures() -> None:
    source = SubjectAndClass(pictures(3, SKS, "photo"), pictures(8, DOG, "dog"))
    names = [source.name(i) for i in range(len(source))]
    assert [name.split("-")[0] for name in names] == ["photo", "dog"] * 9
    assert Counter(names[::2]) == {f"photo-{i}": 3 for i in range(3)}
    assert set(names[1::2]) == {f"dog-{i}" for i in range(8)}
    assert len(source.distinct) == 11
    batches = BatchOrder([Bucket((8, 8), range(18))], 2, seed=3, group_size=2)
    order = [key[1] for batch in GlobalBatchSampler(batches) for key in batch]
    assert sorted(order) == list(range(18)) and order != list(range(18))
    assert all(first + 1 == second and first % 2 == 0 for first, second in zip(order[::2], order[1::2]))


def test_without_class_pictures_few_photos_fill_an_epoch() -> None:
    source = SubjectAndClass(pictures(5, SKS, "photo"), min_samples=16)
    assert len(source) == 20 and source.loss_weights.tolist() == [1.0] * 20 and source.group_size == 1


def test_weighted_mean_is_instance_loss_plus_weighted_prior_loss() -> None:
    """As in diffusers' train_dreambooth.py: two means over halves of the batch, added with prior_loss_weight."""
    source = SubjectAndClass(pictures(4, SKS, "photo"), pictures(4, DOG, "dog"), prior_loss_weight=0.3)
    losses = torch.rand(8, generator=torch.Generator().manual_seed(0))
    expected = losses[::2].mean() + 0.3 * losses[1::2].mean()
    assert (losses * source.loss_weights).mean() == pytest.approx(float(expected), abs=1e-6)
    with pytest.raises(UsageError, match="prior_loss_weight=-1.*at least 0"):
        SubjectAndClass(pictures(2, SKS, "photo"), prior_loss_weight=-1)


def test_repeated_photos_are_encoded_once_and_a_broken_class_picture_is_replaced(tmp_path: Path) -> None:
    for i in range(2):
        save(tmp_path / "photos" / f"{i}.png", (16, 16), grey=100 * i)
    for i in range(3):
        save(tmp_path / "dogs" / f"{i}.png", (16, 16), grey=50 + i)
    (tmp_path / "dogs" / "1.png").write_bytes(b"torn")
    found = find_class_pictures(tmp_path / "dogs", [DOG], 3)
    source = SubjectAndClass(find_photos(tmp_path / "photos", SKS), found, prior_loss_weight=0.5)
    encoded: list[int] = []

    def moments(pixels: torch.Tensor) -> torch.Tensor:
        encoded.append(len(pixels))
        return pixels[:, :, :1, :1].repeat(1, 2, 1, 1)

    encoder: Any = SimpleNamespace(encode_moments=moments)
    table = encode_source(source, encoder, ImageOptions(16, True), device=torch.device("cpu"))
    assert sum(encoded) == 4, "two photos and the two readable pictures, once each"
    assert [source.name(i).rpartition("/")[2] for i, _ in table.bad] == ["1.png"]
    samples = CaptionedImages(
        source, lambda c: torch.zeros(len(c), 1, 1), options=ImageOptions(16, True), seed=0, latents=table
    )
    batch = samples.__getitems__([(0, i) for i in range(8)])
    greys = ((batch["latent_moments"][:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert greys == [0, 50, 100, 0, 0, 52, 100, 50], "the broken one's place is taken by the next sample"
    assert batch["captions"][3] == SKS and batch["captions"][1] == DOG
    assert batch["loss_weight"].tolist() == [2, 1, 2, 2, 2, 1, 2, 1], "weighed as what it is"


def test_class_images_are_divided_among_prompts_and_topped_up(tmp_path: Path) -> None:
    prompts = ["a dog", "a dog", "a dog!"]
    missing = missing_pictures(tmp_path, prompts, 7, seed=10)
    folders = {prompt: class_folder(tmp_path, prompt, prompts) for prompt in prompts}
    assert folders["a dog"] != folders["a dog!"]
    assert Counter(each.prompt for each in missing) == {"a dog": 5, "a dog!": 2}, "seven, and twice as many but for one"
    assert [each.seed for each in missing if each.prompt == "a dog!"] == [10, 11]
    save(folders["a dog"] / "class-00001.png")
    save(folders["a dog"] / "mine.png")
    more = [each for each in missing_pictures(tmp_path, prompts, 7, seed=10) if each.prompt == "a dog"]
    assert [each.path.name for each in more] == [f"class-0000{i}.png" for i in (0, 2, 3)]
    assert [each.seed for each in more] == [10, 12, 13], "the picture of a name does not depend on the others"


def test_other_seeds_top_up_with_pictures_that_are_not_there(tmp_path: Path) -> None:
    for each in missing_pictures(tmp_path, [DOG], 3, seed=10):
        settings = {"model": "base", "prompt": DOG, "seed": each.seed}
        class_images._write(Image.new("RGB", (8, 8)), each, settings, "class_data_dir")
    more = missing_pictures(tmp_path, [DOG], 6, seed=8)
    assert [each.path.name for each in more] == [f"class-0000{i}.png" for i in (3, 4, 5)]
    assert [each.seed for each in more] == [13, 14, 15], "11 and 12 would be those of class-00001 and class-00002"


def test_a_prompt_that_another_program_has_written_into_a_picture_is_not_taken_for_ours(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("prompt", '{"3": {"class_type": "KSampler"}}')  # ComfyUI
    for i in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"ComfyUI_0000{i}_.png", pnginfo=info)
    assert missing_pictures(tmp_path, [DOG], 4, seed=0) == []


def test_class_pictures_of_several_prompts_are_shown_equally_often(tmp_path: Path) -> None:
    prompts = ["a dog", "a cat"]
    for prompt in prompts:
        for i in range(4):
            save(class_folder(tmp_path, prompt, prompts) / f"class-0000{i}.png")
    found = find_class_pictures(tmp_path, prompts, 8)
    source = SubjectAndClass(pictures(12, SKS, "photo"), found)
    assert Counter(source.captions(i)[0] for i in range(1, len(source), 2)) == {"a dog": 6, "a cat": 6}


def test_pictures_of_ones_own_are_used_as_they_are_for_a_single_prompt(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / f"{i}.png")
    found = find_class_pictures(tmp_path, [DOG], 3)
    assert [(Path(each.path).name, each.caption) for each in found] == [(f"{i}.png", DOG) for i in range(3)]
    with pytest.raises(UsageError, match="2 class prompts; expected pictures in a folder per prompt.*move them"):
        find_class_pictures(tmp_path, [DOG, "a dog outdoors"], 3)


def test_other_processes_wait_until_all_class_images_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        save(class_folder(tmp_path, DOG, [DOG]) / f"class-0000{len(waited) - 1}.png")

    monkeypatch.setattr(class_images.time, "sleep", sleep)
    class_images.wait_for(tmp_path, [DOG], 3)
    assert len(waited) == 3


def test_other_processes_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 400 * seconds
        if now[0] == 1200:
            save(class_folder(tmp_path, DOG, [DOG]) / "class-00000.png")

    monkeypatch.setattr(class_images.time, "sleep", sleep)
    monkeypatch.setattr(class_images.time, "monotonic", lambda: now[0])
    with pytest.raises(UsageError, match="2 class images are missing .*rank 0.*has added none for 1800 s; see what"):
        class_images.wait_for(tmp_path, [DOG], 3)
    assert now[0] == 1200 + 2000, "a picture starts the time again"
