"""What every source of captioned images promises: keys, contents and sizes that agree with its images."""

import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from archives import ORIENTATION, encoded, image_rows, sample, write_parquet, write_tar
from sd_lightning.data.source import BadSample, Source, SourceSubset
from sd_lightning.data.sources import image_files
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.sources.dreambooth import Picture, Pictures, SubjectAndClass
from sd_lightning.data.sources.huggingface import HuggingFaceImages
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.parquet import ParquetImages
from sd_lightning.data.sources.webdataset import WebDatasetTars
from sd_lightning.data.transform import check_size
from square_data import Squares

SIDEWAYS = encoded(200, "JPEG", orientation=6)


def folder(root: Path, more: bool) -> Source:
    files = {"b/x.png": encoded(1), "c.jpg": SIDEWAYS} | ({"a.png": encoded(3)} if more else {})
    for name, data in files.items():  # listed as a.png, c.jpg, b/x.png
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
        (root / name).with_suffix(".txt").write_text("words")
    return ImageFolder(root)


def metadata(root: Path, more: bool) -> Source:
    folder(root, more)
    names = ["a.png"] * more + ["c.jpg", "b/x.png", "c.jpg"]
    lines = (json.dumps({"file_name": name, "text": f"line {i}"}) for i, name in enumerate(names))
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return ImageFolder(root)


def pictures(root: Path, more: bool) -> Pictures:
    paths = sorted(str(folder(root, more)._paths[i]) for i in range(2 + more))  # type: ignore[attr-defined]
    return Pictures([Picture(path, "words") for path in paths])


def subject_and_class(root: Path, more: bool) -> Source:
    photos, others = pictures(root / "photos", more).pictures, pictures(root / "others", False).pictures
    return SubjectAndClass(photos, others, min_samples=9)


def saved(root: Path, more: bool) -> Source:
    datasets = pytest.importorskip("datasets")
    root.mkdir(exist_ok=True)
    (root / "c.jpg").write_bytes(SIDEWAYS)
    images = [{"bytes": encoded(1), "path": "x.png"}, {"bytes": None, "path": str(root / "c.jpg")}]
    images += [{"bytes": encoded(3), "path": None}] * more
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"image": images, "text": ["words"] * len(images)}, features=features)
    table.save_to_disk(root / f"saved-{more}")
    return HuggingFaceImages(root / f"saved-{more}")


def tars(root: Path, more: bool) -> Source:
    files = sample("0/first", 3) if more else {}
    files |= sample("1", 1) | {"2.seg.png": b"", "2.jpg": SIDEWAYS, "2.txt": b"words"}
    write_tar(root / "b.tar", files)
    write_tar(root / "c/d.tar", sample("1", 4))
    if more:
        write_tar(root / "a.tar", sample("1", 5))
    return WebDatasetTars(root)


def json_tars(root: Path, more: bool) -> Source:
    files = sample("0", 3, json={"caption": "x"}) if more else {}
    write_tar(root / "b.tar", files | sample("1", 1, json={"caption": ["one", "eins"]}))
    return WebDatasetTars(root / "b.tar", caption_key="caption")


def parquet(root: Path, more: bool) -> Source:
    columns = image_rows(7 + more)
    columns["image"][3] = SIDEWAYS
    write_parquet(root / "b.parquet", columns)
    write_parquet(root / "c/d.parquet", image_rows(2, 20))
    if more:
        write_parquet(root / "a.parquet", image_rows(4, 40))
    return ParquetImages(root)


def parquet_paths(root: Path, more: bool) -> Source:
    folder(root, more)
    names = ["b/x.png", str((root / "c.jpg").absolute()), *(["a.png"] * more)]
    write_parquet(root / "x.parquet", {"image": names, "text": ["words"] * len(names)})
    return ParquetImages(root / "x.parquet")


def parquet_structs(root: Path, more: bool) -> Source:
    folder(root, more)
    values = [{"bytes": encoded(1), "path": "gone.png"}, {"bytes": None, "path": "c.jpg"}]
    values += [{"bytes": encoded(9), "path": None}] * more
    sizes = {"width": [12, 10, 12][: len(values)], "height": [10, 12, 10][: len(values)]}
    write_parquet(root / "x.parquet", {"image": values, "text": [["a", "b"]] * len(values)} | sizes)
    return ParquetImages(root, width_column="width", height_column="height")


def subset(root: Path, more: bool) -> Source:
    return SourceSubset(folder(root, more), range(2 + more))


SOURCES: list[Callable[[Path, bool], Source]] = [
    *(folder, metadata, pictures, subject_and_class, saved, tars, json_tars),
    *(parquet, parquet_paths, parquet_structs, subset),
    lambda root, more: Digits("val"),
    lambda root, more: Squares(4 + more),  # type: ignore[arg-type]
]
NAMES = [make.__name__ for make in SOURCES[:-2]] + ["digits", "undeclared"]


@pytest.mark.parametrize("make", SOURCES, ids=NAMES)
def test_keys_contents_and_sizes_agree_with_the_images(make: Callable[[Path, bool], Source], tmp_path: Path) -> None:
    source = make(tmp_path / "data", False)
    for here in (source, pickle.loads(pickle.dumps(source))):
        for index in range(min(len(here), 12)):
            image, content = here.image(index), here.content(index)
            assert isinstance(content, bytes) and content == source.content(index)
            decoded = here.decode(content)
            assert (decoded.mode, decoded.size, decoded.tobytes()) == (image.mode, image.size, image.tobytes())
            assert here.size(index) == image.size[::-1]
            assert source.captions(index) == here.captions(index) and here.name(index)
    distinct = source.distinct
    before = [distinct.key(index) for index in range(len(distinct))]
    assert len(set(before)) == len(before), "unique"
    assert all(str(tmp_path) not in key for key in before), "independent of where the data lie"
    contents = {distinct.key(index): distinct.content(index) for index in range(len(distinct))}
    grown = make(tmp_path / "data", True).distinct
    after = {grown.key(index): grown.content(index) for index in range(len(grown))}
    assert len(after) == len(grown) and contents.items() <= after.items(), "stable when samples are added"


def test_raw_contents_of_another_shape_are_others() -> None:
    class Blank(Squares):
        def image(self, index: int) -> Image.Image:
            return Image.new("RGB", [(4, 6), (6, 4), (2, 12)][index])

    source = Blank(3)
    assert len({source.content(index) for index in range(3)}) == 3


def late(png: bytes, kind: bytes, body: bytes) -> bytes:
    """Add a chunk behind the pixels of a PNG."""
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return png[:-12] + chunk + png[-12:]


def turned() -> dict[str, bytes]:
    """Pictures of all formats, upright and not, with the orientation in all places that PIL knows."""
    found = {
        f"{kind} {orientation}": encoded(50, kind, orientation=orientation)
        for kind in ("JPEG", "PNG", "WEBP", "TIFF")
        for orientation in (None, 1, 3, 5, 6, 8)
    }
    found |= {kind: encoded(50, kind) for kind in ("GIF", "BMP")}
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="8"/></x:xmpmeta>'
    found["eXIf behind the pixels"] = late(encoded(50), b"eXIf", exif.tobytes()[6:])
    found["text behind the pixels"] = late(encoded(50), b"tEXt", b"date\0today")
    found["XMP behind the pixels"] = late(encoded(50), b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    for kind in ("JPEG", "TIFF", "WEBP"):
        file = io.BytesIO()
        image = Image.new("RGB", (12, 10))
        image.save(file, kind, **({"xmp": xmp} if kind != "TIFF" else {"tiffinfo": {700: xmp}}))
        found[f"{kind} XMP"] = file.getvalue()
    return found


@pytest.mark.parametrize(("name", "data"), turned().items(), ids=turned().keys())
def test_size_from_the_header_is_that_of_the_upright_image(name: str, data: bytes) -> None:
    image = image_files.decode(io.BytesIO(data))
    assert image_files.read_size(io.BytesIO(data)) == image.size[::-1]
    if name.endswith(("6", "8", "XMP", "eXIf behind the pixels", "XMP behind the pixels")):
        assert image.size == (10, 12), "or the case proves nothing"


def test_size_is_read_without_the_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("decoded")

    for kind in ("PNG", "JPEG", "WEBP"):
        file = io.BytesIO(encoded(1, kind, size=(300, 200)))
        image = Image.open(file)
        monkeypatch.setattr(type(image), "load", refuse)
        assert image_files.read_size(file) == (200, 300)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_sizes_and_contents_of_unusable_images_are_bad_samples(tmp_path: Path) -> None:
    source = folder(tmp_path, True)
    (tmp_path / "a.png").unlink()
    (tmp_path / "b/x.png").write_text("<html>404</html>")
    for call in (source.image, source.content, source.size):
        with pytest.raises(BadSample, match="cannot read the file .*a.png .No such file"):
            call(0)
    for call in (source.image, source.size, lambda index: source.decode(source.content(index))):
        with pytest.raises(BadSample, match="cannot decode the image: not an image"):
            call(2)
    small: Any = ImageFolder(tmp_path, max_image_pixels=119)
    for call in (small.image, small.size, lambda index: small.decode(small.content(index))):
        with pytest.raises(BadSample, match="more than data.max_image_pixels=119 allows"):
            call(0)
    with pytest.raises(BadSample):
        check_size((0, 3), 9)
