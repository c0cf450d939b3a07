"""Image folders and Hugging Face datasets: what is usable is found, what is not is named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.samples import _suggested_prompts
from sd_lightning.data.datamodule import huggingface_data, image_folder_data
from sd_lightning.data.images import HuggingFaceImages, ImageFolder
from sd_lightning.data.source import BadSample


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
        trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(source_val=held_out, source_train=train))
        assert _suggested_prompts(trainer, 2) == prompts


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "there is no folder .*; expected a folder of images. Write data.train_data_dir"),
        (lambda folder: folder.mkdir(), "no usable captioned image .it is empty.; expected images"),
        (lambda folder: paint(folder / "a.png"), "1 unusable, the first is .*a.png: it has no caption file a.txt"),
        (
            lambda folder: metadata(folder, {"file_name": "a.png", "caption": "x", "author": "y"}),
            "line 1 has no 'text'; it has file_name, caption, author. Write data.caption_column=",
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
    assert len(image_folder_data(str(tmp_path), num_workers=0, max_bad_fraction=0.5).bad_samples) == 1


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
        ({"image_column": "photo", "caption_column": "txt"}, "data.caption_column=txt: .* columns photo, words"),
        ({"split": "dev"}, "data.split=dev: .* has the splits train, test; write data.split="),
        ({"dataset": "/no/such/dataset"}, "data.dataset_name=/no/such/dataset: cannot load its split 'train'"),
        ({"image_column": "words", "caption_column": "words"}, "data.image_column=words: .* is not images"),
    ],
)
def test_wrong_dataset_names_are_refused_with_the_right_ones(saved: Path, options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HuggingFaceImages(options.pop("dataset", saved), **options)


@pytest.mark.parametrize("name", ["digits", "images", "huggingface"])
def test_yaml_keys_are_the_builders_arguments_with_their_defaults(name: str, repo: Path) -> None:
    import inspect

    from omegaconf import OmegaConf

    import sd_lightning.data.datamodule as built

    node = OmegaConf.to_container(OmegaConf.load(repo / "conf/data" / f"{name}.yaml"))
    parameters = inspect.signature(getattr(built, node.pop("_target_").rpartition(".")[2])).parameters
    empty = inspect.Parameter.empty
    assert node == {key: "???" if p.default is empty else p.default for key, p in parameters.items()}
