"""Image folders and Hugging Face datasets: what is usable is found, what is not is named."""

import json
import os
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.samples import _suggested_prompts
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.builders import huggingface_data, image_folder_data
from sd_lightning.data.latent_table import encode_source
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.sources.huggingface import HuggingFaceImages
from sd_lightning.data.sources.image_files import decode, read_size
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.transform import ImageOptions


def paint(path: Path, value: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (value, 0, 0)).save(path)


def metadata(folder: Path, *rows: object) -> None:
    folder.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def test_metadata_gives_captions_and_names_what_is_unusable(tmp_path: Path) -> None:
    for name in ("a.png", "sub/b.jpg", "c.png", "d.png"):
        paint(tmp_path / name)
    (tmp_path / "zero.png").touch()
    metadata(
        tmp_path,
        {"file_name": "a.png", "text": " one "},
        {"file_name": "sub/b.jpg", "text": ["two", "", "zwei"]},
        "",
        {"file_name": "c.png", "text": "  "},
        {"file_name": "missing.png", "text": "three"},
        {"file_name": "zero.png", "text": "four"},
        {"file_name": "d.png"},
        {"text": "five"},
        "not json",
    )
    folder = ImageFolder(tmp_path)
    assert [folder.captions(i) for i in range(len(folder))] == [["one"], ["two", "zwei"]]
    assert [Path(folder.name(i)).name for i in range(2)] == ["a.png", "b.jpg"]
    assert folder.image(1).size == (12, 10)
    shown = {Path(name).name: reason.replace(str(tmp_path), "") for name, reason in folder.dropped.items()}
    assert shown == {
        "c.png": "its caption is empty",
        "missing.png": "there is no file /missing.png",
        "zero.png": "the file /zero.png is empty",
        "d.png": "its caption is empty",
        "metadata.jsonl:8": "no file_name",
        "metadata.jsonl:9": "not a JSON object: 'not json'",
    }


def test_sidecars_are_found_recursively_in_a_stable_order(tmp_path: Path) -> None:
    for name in ("b/2.JPG", "a/1.png", "3.webp", "b/lonely.png", "b/blank.png", "b/void.png"):
        paint(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(f"caption of {name}\nsecond line\n", encoding="utf-8")
    (tmp_path / "b/lonely.txt").unlink()
    (tmp_path / "b/void.txt").write_text("")
    (tmp_path / "b/blank.txt").write_text(" \n")
    (tmp_path / "notes.md").write_text("not an image")
    folder = ImageFolder(tmp_path)
    names = [str(Path(folder.name(i)).relative_to(tmp_path)) for i in range(len(folder))]
    assert names == ["3.webp", "a/1.png", "b/2.JPG", "b/blank.png"]
    assert folder.captions(1) == ["caption of a/1.png", "second line"]
    with pytest.raises(BadSample, match="blank.txt is empty"):
        folder.captions(3)
    assert {Path(name).name for name in folder.dropped} == {"lonely.png", "void.png"}
    assert "it has no caption file lonely.txt" in folder.dropped.values()


def test_captions_stand_in_a_csv_file_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / f"{name}.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,"one, and more"\nb.png,\n', encoding="utf-8-sig")
    folder = ImageFolder(tmp_path)
    assert [folder.captions(i) for i in range(len(folder))] == [["one, and more"]]
    assert folder.dropped == {str(tmp_path / "b.png"): "its caption is empty"}
    with pytest.raises(UsageError, match="data.caption_column=caption, which is no key of line 2 of .*metadata.csv"):
        ImageFolder(tmp_path, caption_column="caption")
    (tmp_path / "metadata.csv").write_text("camera,date\nx,y\n")  # a table of another program
    with pytest.raises(UsageError, match="no caption file a.txt"):
        ImageFolder(tmp_path)
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\na.png,\xff\n")
    with pytest.raises(UsageError, match="metadata.csv.*UTF-8"):
        ImageFolder(tmp_path)


def test_caption_files_may_have_another_ending(tmp_path: Path) -> None:
    for number in range(3):
        paint(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.caption").write_text(f"caption {number}")
    with pytest.raises(UsageError, match="for 0.caption write data.caption_extension=.caption"):
        ImageFolder(tmp_path)
    for extension in (".caption", "caption"):
        folder = ImageFolder(tmp_path, caption_extension=extension)
        assert [folder.captions(i) for i in range(len(folder))] == [[f"caption {i}"] for i in range(3)]


def test_images_in_folders_with_a_number_count_as_often_if_asked_for(tmp_path: Path) -> None:
    for name in ("3_sks dog/a", "3_sks dog/b", "2020_holidays/c", "0_left out/d"):
        paint(tmp_path / f"{name}.png")
    (tmp_path / "3_sks dog/b.txt").write_text("a dog in the snow")
    with pytest.raises(UsageError, match="no usable.*data.folder_repeats=true"):
        ImageFolder(tmp_path / "2020_holidays")
    (tmp_path / "2020_holidays/c.txt").write_text("a beach")
    assert len(ImageFolder(tmp_path)) == 2
    (tmp_path / "2020_holidays").rename(tmp_path / "holidays")
    folder = ImageFolder(tmp_path, folder_repeats=True)
    found = [(folder.key(i), folder.captions(i)[0]) for i in range(len(folder))]
    again = [("a", "sks dog")] * 3 + [("b", "a dog in the snow")] * 3
    names = [f"3_sks dog/{name}.png{count}" for name in "ab" for count in ("", "#2", "#3")]
    assert found == [*zip(names, [caption for _, caption in again]), ("holidays/c.png", "a beach")]


def test_images_of_other_kinds_with_captions_are_named(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "b.heic").write_bytes(b"photo")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    assert ImageFolder(tmp_path).dropped == {
        str(tmp_path / "b.heic"): "it is of a kind that cannot be read; convert it to JPEG"
    }


def test_a_link_to_a_folder_above_multiplies_nothing(tmp_path: Path) -> None:
    for name in ("a", "more/b"):
        paint(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "more")
    folder = ImageFolder(tmp_path)
    assert [folder.key(i) for i in range(len(folder))] == ["a.png", "more/b.png"]


def test_metadata_may_not_name_images_outside_of_the_folder(tmp_path: Path) -> None:
    paint(tmp_path / "outside.png")
    paint(tmp_path / "folder/inside.png")
    inside = {"file_name": "more/../inside.png", "text": "one"}
    (tmp_path / "folder/more").mkdir()
    for name in ("../outside.png", str(tmp_path / "outside.png"), "more/../../outside.png"):
        metadata(tmp_path / "folder", inside, {"file_name": name, "text": "two"})
        with pytest.raises(UsageError, match="line 2 of .*outside of the folder.*data.allow_outside=true"):
            ImageFolder(tmp_path / "folder")
        assert len(ImageFolder(tmp_path / "folder", allow_outside=True)) == 2
    metadata(tmp_path / "folder", {"file_name": str(tmp_path / "folder/inside.png"), "text": "two"})
    assert len(ImageFolder(tmp_path / "folder")) == 1


def test_images_that_metadata_does_not_name_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.png", "b.png", "sub/c.avif"):
        paint(tmp_path / name)
    metadata(tmp_path, {"file_name": "a.png", "text": "one"})
    assert len(ImageFolder(tmp_path)) == 1
    assert f"2 images in {tmp_path} are left out" in caplog.text and f"the first: {tmp_path}/b.png" in caplog.text
    caplog.clear()
    metadata(tmp_path, *({"file_name": name, "text": "one"} for name in ("a.png", "b.png", "sub/c.avif")))
    folder = ImageFolder(tmp_path)
    assert not caplog.text and folder.image(2).size == (12, 10)


def test_broken_images_are_bad_samples_with_a_reason(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for suffix in ("png", "jpg", "webp", "gif", "bmp", "tif"):
        path = tmp_path / f"x.{suffix}"
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "page.png").write_text("<html>404</html>")
    metadata(tmp_path, *({"file_name": path.name, "text": "x"} for path in sorted(tmp_path.glob("*.*"))))
    folder = ImageFolder(tmp_path)
    for index in range(len(folder)):
        with pytest.raises(BadSample, match="cannot decode the image: .+"):
            folder.image(index)
    assert len(folder) == 7


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let this process allocate so much more and no more."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def png_of_size(path: Path, width: int, height: int) -> None:
    """Write a PNG whose header promises so many pixels; those of one row follow."""
    chunks = {b"IHDR": struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(b"\0" * 100)}
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in {**chunks, b"IEND": b""}.items():
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    path.write_bytes(data)


def ids(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), 1, 1, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("resolution", [256, 1024])
def test_images_too_large_or_too_long_are_bad_samples_before_memory_is_taken(tmp_path: Path, resolution: int) -> None:
    paint(tmp_path / "good.png")
    Image.new("RGB", (30000, 2)).save(tmp_path / "long.png")
    Image.new("L", (2, 30000)).save(tmp_path / "tall.gif")
    for name, size in {"large": (15_000, 10_000), "bomb": (60_000, 60_000), "zero": (0, 7)}.items():
        png_of_size(tmp_path / f"{name}.png", *size)
    names = sorted(path.name for path in tmp_path.iterdir())
    metadata(tmp_path, *({"file_name": name, "text": "x"} for name in names))
    folder = ImageFolder(tmp_path)
    samples = CaptionedImages(folder, ids, options=ImageOptions(resolution), seed=0)
    keys = range(len(folder))
    with memory_limit(500_000_000):
        batch = samples.__getitems__([(0, index) for index in keys])
        encoder: Any = SimpleNamespace(encode_moments=lambda pixels: pixels[:, :, :1, :1])
        blocks = encode_source(folder, encoder, ImageOptions(resolution), device=torch.device("cpu"))
    assert batch["pixel_values"].shape == (6, 3, resolution, resolution)
    assert sorted(batch["bad"]) == blocks.bad
    reasons = {Path(folder.name(index)).name: reason for index, reason in blocks.bad}
    limit = "more than data.max_image_pixels=128000000 allows"
    square = f"{resolution} x {resolution}"
    size = f"{15000 * resolution} x {resolution} to cover {square}"
    write = f"write data.max_image_pixels={15000 * resolution**2}"
    assert reasons.pop("zero.png").startswith("cannot decode the image: ")
    assert reasons == {
        "long.png": f"the image of 30000 x 2 pixels would become {size}, {limit}; crop it, or {write}",
        "tall.gif": f"the image of 2 x 30000 pixels would become {resolution} x {15000 * resolution} to "
        f"cover {square}, {limit}; crop it, or {write}",
        "large.png": f"the image has 15000 x 10000 pixels, {limit}; make it smaller, or write "
        "data.max_image_pixels=150000000",
        "bomb.png": f"the image has 3600000000 pixels, {limit}; make it smaller",
    }


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_limit_of_pixels_is_a_setting(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")  # 12 x 10
    Image.new("RGB", (64, 8)).save(tmp_path / "b.png")
    metadata(tmp_path, *({"file_name": f"{name}.png", "text": "x"} for name in "ab"))
    options: dict[str, Any] = {"resolution": 8, "num_workers": 0, "num_val_samples": 0}
    for limit, used in ((512, 2), (511, 1), (119, 0)):
        data = image_folder_data(str(tmp_path), max_image_pixels=limit, **options)
        samples = CaptionedImages(data.source_train, ids, options=data.images, seed=0)
        assert 2 - len(samples[0, 0]["bad"]) - len(samples[0, 1]["bad"]) + (used == 0) * 2 == used
    with pytest.raises(UsageError, match="max_image_pixels=63: expected at least the 64 pixels .*=128000000"):
        image_folder_data(str(tmp_path), max_image_pixels=63, **options)


def test_whatever_a_source_raises_or_returns_is_a_bad_sample_with_its_reason() -> None:
    class Strange(Source):
        def __len__(self) -> int:
            return 4

        def image(self, index: int) -> Image.Image:
            if index == 1:
                raise KeyError("gone")
            return Image.new(*[("RGB", (9, 9)), ("RGB", (9, 9)), ("L", (9, 9)), ("RGB", (0, 9))][index])

        def captions(self, index: int) -> list[str]:
            return ["x"]

        def name(self, index: int) -> str:
            return str(index)

    samples = CaptionedImages(Strange(), ids, options=ImageOptions(8), seed=0)
    assert dict(samples.__getitems__([(0, i) for i in range(4)])["bad"]) == {
        1: "KeyError: 'gone'",
        2: "ValueError: the image's mode is L; expected RGB",
        3: "the image has no pixels (0 x 9)",
    }


def test_first_picture_of_several_and_every_mode_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "green")]
    for name in ("a.gif", "b.webp", "c.tif", "d.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
    frames[0].convert("CMYK").save(tmp_path / "e.jpg", quality=100)
    Image.fromarray(np.full((9, 9), 65535, np.uint16)).save(tmp_path / "f.png")
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.new("RGB", (9, 5), "red").save(tmp_path / "g.jpg", exif=exif)
    for path in sorted(tmp_path.iterdir()):
        image = decode(str(path))
        red, green, blue = image.getpixel((4, 4))
        assert (image.mode, image.size) == ("RGB", (5, 9) if path.name == "g.jpg" else (9, 9))
        assert red > 250 and ((green, blue) == (255, 255) if path.name == "f.png" else max(green, blue) < 10), path


def test_caption_files_and_lines_longer_than_captions_are_dropped_unread(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("x")
    os.truncate(tmp_path / "b.txt", 2 * 2**30)  # takes no space
    with memory_limit(300_000_000):
        folder = ImageFolder(tmp_path)
        os.truncate(tmp_path / "a.txt", 2 * 2**30)  # afterwards, too
        with pytest.raises(BadSample, match=r"a.txt is longer than captions are \(1048576 bytes\)"):
            folder.captions(0)
    too_long = f"the file {tmp_path / 'b.txt'} is longer than captions are (1048576 bytes)"
    assert folder.dropped == {str(tmp_path / "b.png"): too_long}


def test_broken_lines_of_metadata_are_dropped_one_by_one(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    rows = [{"file_name": "a.png", "text": "one"}, {"file_name": "a.png", "text": "x" * 2**21}, "[" * 100_000]
    rows += [{"file_name": "nul\0.png", "text": "x"}, {"file_name": "pipe.png", "text": "x"}, "9" * 10_000]
    no_text = {"n": 7, "l": [1.5], "o": {"en": "x"}, "t": True}
    rows += [{"file_name": name, "text": value} for name, value in no_text.items()]
    metadata(tmp_path, *rows, {"file_name": "a.png", "text": "two"})
    folder = ImageFolder(tmp_path)
    assert [folder.captions(index) for index in range(len(folder))] == [["one"], ["two"]]
    root = f"{tmp_path}/"
    assert {name.replace(root, ""): reason.replace(root, "") for name, reason in folder.dropped.items()} == {
        "metadata.jsonl:2": "longer than captions are (1048576 bytes)",
        "metadata.jsonl:3": f"not a JSON object: {'[' * 60!r}",
        "nul\0.png": "there is no file nul\0.png",
        "pipe.png": "pipe.png is not a file",
        "metadata.jsonl:6": f"not a JSON object: {'9' * 60!r}",
        "n": 'its caption 7 is no text; write "7", in quotes',
        "l": 'its caption 1.5 is no text; write "1.5", in quotes',
        "o": """its caption {"en": "x"} is no text; write one string, or a list of strings""",
        "t": 'its caption true is no text; write "true", in quotes',
    }


def test_a_number_as_caption_is_named_and_in_quotes_it_is_one(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    metadata(tmp_path, {"file_name": "a.png", "text": 7})
    with pytest.raises(UsageError, match='a.png: its caption 7 is no text; write "7", in quotes') as refused:
        ImageFolder(tmp_path)
    quoted = str(refused.value).partition("write ")[2].partition(",")[0]
    metadata(tmp_path, f'{{"file_name": "a.png", "text": {quoted}}}')
    assert ImageFolder(tmp_path).captions(0) == ["7"]


def test_floating_point_pixels_are_a_bad_sample(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "depth.tiff")
    metadata(tmp_path, {"file_name": "depth.tiff", "text": "x"})
    with pytest.raises(BadSample, match="cannot decode the image: its pixels are floating-point.*8 or 16 bits"):
        ImageFolder(tmp_path).image(0)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_captions_are_utf8_with_or_without_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    paint(tmp_path / "beside" / "a.png")
    (tmp_path / "beside" / "a.txt").write_text("grün\n", encoding=encoding)
    paint(tmp_path / "listed" / "a.png")
    (tmp_path / "listed" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "grün"}', encoding=encoding)
    beside = ImageFolder(tmp_path / "beside")
    if encoding.startswith("utf-8"):
        assert beside.captions(0) == ImageFolder(tmp_path / "listed").captions(0) == ["grün"]
        return
    with pytest.raises(BadSample, match="a.txt is not UTF-8 text .*; save it as UTF-8"):
        beside.captions(0)
    with pytest.raises(UsageError, match="metadata.jsonl is not UTF-8 text .*; save it as UTF-8"):
        ImageFolder(tmp_path / "listed")


def test_pictures_are_drawn_of_captions_that_can_be_read(tmp_path: Path) -> None:
    captions = {"val/a": "\n", "val/b": "two", "blank/a": "\n", "train/a": "one"}
    for name, caption in captions.items():
        paint(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption)
    val, blank, train = (ImageFolder(tmp_path / part) for part in ("val", "blank", "train"))
    for held_out, prompts in ((val, ["two"]), (blank, ["one"]), (None, ["one"])):
        trainer: Any = SimpleNamespace(
            datamodule=SimpleNamespace(source_val=held_out, source_train=train, images=ImageOptions())
        )
        assert _suggested_prompts(trainer, 2) == prompts


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "there is no folder .*; expected a folder of images. Write data.train_data_dir"),
        (lambda folder: folder.mkdir(), "no usable captioned image .no images.; give a folder of images"),
        (lambda folder: paint(folder / "a.png"), "1 unusable, the first is .*a.png: it has no caption file a.txt"),
        (
            lambda folder: metadata(folder, {"file_name": "a.png", "caption": "x", "author": "y"}),
            "caption_column=text, which is no key of line 1 .*, which has file_name, caption, author; "
            "write data.caption_column=caption",
        ),
    ],
)
def test_unusable_folder_is_refused(tmp_path: Path, prepare, message: str) -> None:
    prepare(tmp_path / "images")
    with pytest.raises(UsageError, match=message):
        ImageFolder(tmp_path / "images")


def test_image_folder_builder_holds_out_or_opens_a_validation_folder(tmp_path: Path) -> None:
    for part, count in (("train", 40), ("val", 3)):
        for i in range(count):
            paint(tmp_path / part / f"{i}.png", i)
        metadata(tmp_path / part, *({"file_name": f"{i}.png", "caption": f"no {i}"} for i in range(count)))
    options = {"caption_column": "caption", "resolution": 8, "num_workers": 0}
    data = image_folder_data(str(tmp_path / "train"), **options)
    assert (data.num_train_samples, len(data.source_val)) == (38, 2)
    data = image_folder_data(str(tmp_path / "train"), str(tmp_path / "val"), **options)
    assert (data.num_train_samples, len(data.source_val)) == (40, 3)
    data = image_folder_data(str(tmp_path / "train"), num_val_samples=0, **options)
    assert (data.num_train_samples, data.source_val) == (40, None)


def test_missing_images_beyond_the_limit_stop_before_training(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    metadata(tmp_path, {"file_name": "a.png", "text": "x"}, {"file_name": "b.png", "text": "x"})
    with pytest.raises(UsageError, match=r"1 samples cannot be used, .*allows \(0\): .*b.png .there is no file"):
        image_folder_data(str(tmp_path), num_workers=0)
    assert len(image_folder_data(str(tmp_path), num_workers=0, max_bad_fraction=0.5).bad.found) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset on disk with two splits; in `train` row 1 has no caption, row 2 a torn image, row 3 none."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    paint(folder / "a.png")
    good = (folder / "a.png").read_bytes()
    images = [{"bytes": b, "path": None} for b in (good, good, good[:40])] + [None, {"bytes": good, "path": None}]
    captions = [["one", "eins"], [" "], ["three"], ["four"], ["five"]]
    features = datasets.Features({"photo": datasets.Image(), "words": datasets.List(datasets.Value("string"))})
    train = datasets.Dataset.from_dict({"photo": images, "words": captions}, features=features)
    datasets.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(folder / "saved")
    return folder / "saved"


def test_saved_dataset_is_read_and_its_bad_rows_are_named(saved: Path) -> None:
    source = HuggingFaceImages(saved, image_column="photo", caption_column="words")
    assert [source.captions(i) for i in range(len(source))] == [["one", "eins"], ["three"], ["four"], ["five"]]
    assert source.dropped == {f"{saved}/train/1": "its caption is empty"}
    assert source.image(0).getpixel((0, 0)) == (100, 0, 0) == source.image(3).getpixel((0, 0))
    assert source.name(1) == f"{saved}/train/2"
    with pytest.raises(BadSample, match="cannot decode"):
        source.image(1)
    with pytest.raises(BadSample, match="it has no image"):
        source.image(2)


def test_dataset_builder_opens_a_validation_split(saved: Path) -> None:
    columns = {"image_column": "photo", "caption_column": "words"}
    data = huggingface_data(str(saved), val_split="test", max_bad_fraction=0.5, num_workers=0, **columns)
    assert (data.num_train_samples, len(data.source_val)) == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_column": "image"}, "data.image_column=image: .* has the columns photo, words; write"),
        ({"image_column": "photo", "caption_column": "txt"}, "caption_column=txt: .* columns photo, words"),
        ({"image_column": "photos", "caption_column": "words"}, "write data.image_column=photo$"),
        ({"split": "dev"}, "data.split=dev: .* has the splits train, test; write data.split=train"),
        ({"dataset": "/no/such/dataset"}, "data.dataset_name=/no/such/dataset: cannot load its split 'train'"),
        ({"image_column": "words", "caption_column": "words"}, "image_column=words: .* not images.*_column=photo$"),
        ({"image_column": "photo", "caption_column": "photo"}, "caption_column=photo: .* not text.*_column=words$"),
    ],
)
def test_wrong_dataset_names_are_refused_with_the_right_ones(saved: Path, options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HuggingFaceImages(options.pop("dataset", saved), **options)


def test_a_column_of_numbers_or_of_words_that_name_no_file_is_refused_before_the_fit(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paint(tmp_path / "a.png")
    columns = {"path": [str(tmp_path / "a.png")] * 2, "text": ["a dog", "a cat"], "label": [3, 4]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    source = HuggingFaceImages(tmp_path / "saved", image_column="path")
    assert source.image(0).size == (12, 10), "paths are images"
    for given, message in (
        ({"image_column": "path", "caption_column": "label"}, "label: .*not text .*caption_column=path, or text$"),
        ({"image_column": "text"}, "image_column=text: .* is not images .*it has none; choose another dataset"),
    ):
        with pytest.raises(UsageError, match=message):
            HuggingFaceImages(tmp_path / "saved", **given)


@pytest.mark.parametrize("name", ["digits", "images", "webdataset", "parquet", "huggingface", "dreambooth"])
def test_yaml_keys_are_the_builders_arguments_with_their_defaults(name: str, repo: Path) -> None:
    import inspect

    from omegaconf import OmegaConf

    import sd_lightning.data.builders as built

    node = OmegaConf.to_container(OmegaConf.load(repo / "conf/data" / f"{name}.yaml"))
    parameters = inspect.signature(getattr(built, node.pop("_target_").rpartition(".")[2])).parameters
    empty = inspect.Parameter.empty
    defaults = {key: "???" if p.default is empty else p.default for key, p in parameters.items()}
    assert defaults.pop("loaders", None) is None  # an object, which the program hands in
    assert node == defaults


def test_a_larger_limit_than_pils_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("L", (300, 250)).save(tmp_path / "image.png")
    for max_pixels, is_small in ((10_000, False), (75_000, True), (10_000, False)):
        with open(tmp_path / "image.png", "rb") as file:
            if is_small:
                assert read_size(file, max_pixels=max_pixels) == (250, 300)
            else:
                with pytest.raises(BadSample, match="more than data.max_image_pixels=10000 allows; make it smaller"):
                    read_size(file, max_pixels=max_pixels)
