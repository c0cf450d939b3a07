"""Tars and Parquet files as data: what is usable is found, what is not is named, and both are read at random."""

import gzip
import os
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from archives import encoded, image_rows, picture, sample, write_parquet, write_tar
from sd_lightning._errors import UsageError
from sd_lightning.data.builders import parquet_data, webdataset_data
from sd_lightning.data.fingerprint import change, fingerprint
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.sources import parquet
from sd_lightning.data.sources.parquet import ParquetImages, read_footer
from sd_lightning.data.sources.webdataset import WebDatasetTars, expand_braces


def shown(source: Source, root: Path) -> dict[str, str]:
    return {name.replace(f"{root}/", ""): why.replace(f"{root}/", "") for name, why in source.dropped.items()}


def test_tars_are_read_at_random_in_a_stable_order(tmp_path: Path) -> None:
    for number in range(3):
        files: dict[str, bytes] = {}
        for value in range(5):
            files |= sample(f"./part/{value:03d}", 10 * number + value)
        write_tar(tmp_path / f"deep/{2 - number}.tar", files)
    write_tar(tmp_path / ".hidden.tar", sample("x", 1))
    source = pickle.loads(pickle.dumps(WebDatasetTars(tmp_path)))
    assert [source.key(index) for index in (0, 4, 14)] == [
        f"deep/{k}" for k in ("0.tar/part/000", "0.tar/part/004", "2.tar/part/004")
    ]
    assert source.name(14) == f"{tmp_path}/deep/2.tar/part/004.png"
    order = list(range(15))
    random.Random(0).shuffle(order)
    for index in order:
        value = 10 * (2 - index // 5) + index % 5
        assert source.image(index).tobytes() == picture(value).tobytes()
        assert (source.captions(index), source.content(index)) == ([f"no {value}"], encoded(value))
    assert len(source) == 15 and not source.dropped


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_other_headers_are_read(form: int, tmp_path: Path) -> None:
    key = "/".join(["long" * 20] * 2) + "/ünder"
    files = sample(key, 7, txt="seven") | {"folder.d/README": b"x", "__meta__": b"x"}
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        tar.addfile(folder := tarfile.TarInfo("long" * 20))
        folder.type = tarfile.DIRTYPE
        for name, data in files.items():
            (tmp_path / "file").write_bytes(data)
            tar.add(tmp_path / "file", name)
    source = WebDatasetTars(tmp_path / "a.tar")
    assert (source.key(0), source.captions(0), source.content(0)) == (f"a.tar/{key}", ["seven"], encoded(7))


def test_unusable_samples_of_tars_are_named_with_the_reason(tmp_path: Path) -> None:
    files = [*sample("good", 1).items(), *sample("twice", 2).items(), *sample("twice", 3).items()]
    files += [("alone.jpg", encoded(4, "JPEG")), ("text.txt", b"x"), ("void.png", b""), ("void.txt", b"x")]
    files += [("long.png", encoded(5)), ("long.txt", b"x" * 2**21), ("mute.gif", encoded(6, "GIF")), ("mute.txt", b"")]
    files += [("two.JPG", encoded(7, "JPEG")), ("two.png", encoded(8)), ("two.txt", b"x"), ("notes.md", b"x")]
    files += [("blank.png", encoded(9)), ("blank.txt", b" \n"), ("code.png", encoded(9)), ("code.txt", b"\xff\xfe")]
    write_tar(tmp_path / "a.tar", files)
    source = WebDatasetTars(tmp_path)
    assert [source.key(index).removeprefix("a.tar/") for index in range(len(source))] == [
        "good",
        "two",
        "blank",
        "code",
    ]
    assert source.content(1) == encoded(7, "JPEG"), "the first of two images"
    assert shown(source, tmp_path) == {
        "a.tar/twice": "the tar has two files twice.txt",
        "a.tar/alone": "it has no caption file alone.txt",
        "a.tar/text": "it has no image text.jpg, or of another kind",
        "a.tar/void": "its file void.png is empty",
        "a.tar/long": "the file long.txt is longer than captions are (1048576 bytes)",
        "a.tar/mute": "its file mute.txt is empty",
    }
    with pytest.raises(BadSample, match="the caption file .*a.tar/blank.txt is empty"):
        source.captions(2)
    with pytest.raises(BadSample, match="a.tar/code.txt is not UTF-8 text"):
        source.captions(3)


def test_images_with_two_dots_in_their_names_are_named(tmp_path: Path) -> None:
    files = {**sample("a", 1), "a.mask.png": encoded(2), "1.5_cat.png": encoded(3)}
    files |= {"1.5_cat.txt": b"a cat", "1.7_dog.png": encoded(4), "1.7_dog.txt": b"a dog"}
    source = WebDatasetTars(write_tar(tmp_path / "x.tar", files))
    assert len(source) == 1 and list(source.dropped) == [
        f"{tmp_path}/x.tar/1.5_cat.png",
        f"{tmp_path}/x.tar/1.7_dog.png",
    ]
    assert "has two dots, and the first one ends a sample's name" in source.dropped[f"{tmp_path}/x.tar/1.5_cat.png"]


def test_tars_cut_off_or_damaged_are_named_and_what_is_whole_is_used(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for value in range(4):
        files |= sample(f"{value}", value)
    whole = write_tar(tmp_path / "whole.tar", files).read_bytes()
    last = max(index for index in range(0, len(whole), 512) if whole[index : index + 5] == b"3.png")
    cuts = {"in_header": last + 100, "in_data": last + 600, "between": last, "no_end": last + 3 * 512 + 512}
    for name, cut in cuts.items():
        (tmp_path / f"{name}.tar").write_bytes(whole[:cut])
    (tmp_path / "garbage.tar").write_bytes(whole[:last] + b"\1" * 512 + whole[last + 512 :])
    (tmp_path / "nothing.tar").touch()
    source = WebDatasetTars(tmp_path)
    found = [source.key(index) for index in range(len(source))]
    for name in ("in_header", "in_data", "between", "garbage"):
        assert [key for key in found if key.startswith(name)] == [f"{name}.tar/{value}" for value in range(3)]
    reasons = shown(source, tmp_path)
    assert reasons.pop("nothing.tar") == "the tar is empty"
    assert reasons.pop("in_data.tar/3") == "it has no caption file 3.txt"
    assert reasons.pop("garbage.tar/3", "it has no image").startswith("it has no image")
    for name in ("in_header", "in_data", "between", "no_end", "garbage"):
        assert reasons.pop(f"{name}.tar").startswith("the tar is cut off or damaged at byte ")
    assert not [name for name in reasons if "whole" in name]


def test_a_tar_that_shrinks_or_goes_after_it_was_opened_makes_bad_samples(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", sample("0", 0) | sample("1", 1))
    source = WebDatasetTars(tmp_path)
    os.truncate(path, 2600)
    assert source.captions(0) == ["no 0"]
    for call in (source.image, source.content, source.size, source.captions):
        with pytest.raises(BadSample, match="a.tar has changed since it was opened: it ends within this file"):
            call(1)
    path.unlink()
    with pytest.raises(BadSample, match="cannot read the file .*a.tar .No such file"):
        source.content(0)


def test_captions_stand_under_a_key_of_json_files(tmp_path: Path) -> None:
    files = sample("0", 0, json={"caption": " one ", "url": "http://x"}, txt="other")
    files |= sample("1", 1, json={"caption": ["two", "zwei"]}) | sample("2", 2, json={"caption": 7})
    files |= sample("3", 3, json="[1]") | sample("4", 4, json="{") | sample("5", 5, txt="only")
    write_tar(tmp_path / "a.tar", files)
    source = WebDatasetTars(tmp_path, caption_key="caption")
    assert [source.captions(index) for index in range(2)] == [["one"], ["two", "zwei"]]
    for index, reason in {2: 'write "7", in quotes', 3: "its .json file is no JSON object", 4: "is no JSON"}.items():
        with pytest.raises(BadSample, match=reason):
            source.captions(index)
    assert shown(source, tmp_path) == {"a.tar/5": "it has no caption file 5.json"}
    assert [WebDatasetTars(tmp_path).captions(index) for index in range(2)] == [["other"], ["only"]]


def test_braces_name_several_tars() -> None:
    assert expand_braces("a/{08..10}.{x,y}") == [f"a/{n}.{end}" for n in ("08", "09", "10") for end in "xy"]
    assert (expand_braces("{9..11}"), expand_braces("a.tar")) == (["9", "10", "11"], ["a.tar"])


def test_a_pattern_opens_its_tars_in_order(tmp_path: Path) -> None:
    for number in range(9, 12):
        write_tar(tmp_path / f"{number:02d}.tar", sample("x", number))
    source = WebDatasetTars(f"{tmp_path}/{{10..11}}.tar")
    assert [source.key(index) for index in range(2)] == ["10.tar/x", "11.tar/x"]


def compressed(root: Path) -> None:
    write_tar(root / "a.tar", sample("0", 0))
    (root / "b.tar").write_bytes(gzip.compress((root / "a.tar").read_bytes()))


REFUSED_TARS: list[tuple[Callable[[Path], Any], str, dict[str, Any], str]] = [
    (lambda root: None, "", {}, "there is no file '.*data'; expected a folder of tars.*write data.train_data_dir="),
    (lambda root: root.mkdir(), "", {}, "holds no .tar file; expected tars of images"),
    (
        lambda root: write_tar(root / "a.tar.gz", sample("0", 0), "w:gz"),
        "",
        {},
        "a.tar.gz, compressed with gzip, .*tar -cf",
    ),
    (lambda root: write_tar(root / "a.tgz", sample("0", 0), "w:gz"), "", {}, "a.tgz, compressed with gzip.*tar -cf"),
    (compressed, "", {}, "b.tar, compressed with gzip, whose files cannot be read at random.*tar -cf"),
    (compressed, "/{a,c,d}.tar", {}, "no file '.*c.tar', nor 1 others of 3; expected"),
    (
        lambda root: write_tar(root / "a.tar", {"x/0.txt": b"x"}),
        "",
        {},
        "no usable .*1 unusable, the first is .*has no image",
    ),
    (
        lambda root: write_tar(root / "a.tar", {"README": b"x"}),
        "",
        {},
        "no usable captioned image .no images.; give tars",
    ),
    (
        lambda root: (root.mkdir(), (root / "a.tar").write_text("x" * 999)),
        "",
        {},
        "a.tar, which is no tar .*mend or remove",
    ),
    (lambda root: (root / "a.tar").mkdir(parents=True), "/{a,a}.tar", {}, "there is no file"),
    (
        lambda root: write_tar(root / "a.tar", sample("0", 0, json={"caption": "a", "url": "b", "n": 1})),
        *(
            "",
            {},
            "no caption file 0.txt.*, or write data.caption_key=<key> for captions in .json files$",
        ),
    ),
    (
        lambda root: write_tar(root / "a.tar", sample("0", 0, json={"caption": "a", "n": 1})),
        *(
            "",
            {"caption_key": "captions"},
            "data.caption_key=captions; .* text under caption; write data.caption_key=caption$",
        ),
    ),
]


@pytest.mark.parametrize(("prepare", "name", "options", "message"), REFUSED_TARS)
def test_unusable_tars_are_refused(
    prepare: Callable[[Path], Any], name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "data")
    with pytest.raises(UsageError, match=message):
        WebDatasetTars(f"{tmp_path / 'data'}{name}", **options)


def test_tars_that_may_not_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", sample("0", 0))

    def denied(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", denied)  # root may read every file
    with pytest.raises(UsageError, match="cannot read .*a.tar .Permission denied.; mend or remove it"):
        WebDatasetTars(tmp_path)


def test_changes_of_tars_are_counted(tmp_path: Path) -> None:
    files = {f"{value}": sample(f"{value}", value) for value in range(4)}

    def write(*keys: str) -> Source:
        write_tar(tmp_path / "a.tar", {name: data for key in keys for name, data in files[key].items()})
        return WebDatasetTars(tmp_path)

    saved = fingerprint(write("0", "1", "2"))
    assert change(saved, fingerprint(source := write("0", "1", "2")), source) is None
    source = write("3", "0", "1", "2")
    found = change(saved, fingerprint(source), source)
    assert found is not None and found.description == f"1 added ({tmp_path}/a.tar/3.png)"
    files["1"]["1.png"] = encoded(99)
    files["2"]["2.txt"] = b"another"
    found = change(saved, fingerprint(source := write("0", "1", "2")), source)
    assert found is not None
    assert found.description == f"1 replaced ({tmp_path}/a.tar/1.png), 1 with other captions ({tmp_path}/a.tar/2.png)"


def test_parquet_rows_are_read_at_random_across_files_and_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", image_rows(7), rows_per_group=3)
    write_parquet(tmp_path / "a/x.parquet", image_rows(4, 100), rows_per_group=2)
    write_parquet(tmp_path / "c.parquet", image_rows(0))
    (tmp_path / ".b.parquet").write_text("half-written")
    source = pickle.loads(pickle.dumps(ParquetImages(tmp_path)))
    values = [*range(100, 104), *range(7)]
    assert len(source) == len(values)
    order = list(range(11))
    random.Random(0).shuffle(order)
    for index in order:
        assert source.image(index).tobytes() == picture(values[index]).tobytes()
        assert (source.captions(index), source.content(index)) == ([f"no {values[index]}"], encoded(values[index]))
    assert (source.key(3), source.key(10), source.name(4)) == (
        "a/x.parquet/3",
        "b.parquet/6",
        f"{tmp_path}/b.parquet/0",
    )


class Contents(Dataset[bytes]):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> bytes:
        return self.source.content(index)


def test_forked_workers_read_what_this_process_has_read_before(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", image_rows(20))
    write_tar(
        tmp_path / "a.tar", {name: data for value in range(20) for name, data in sample(f"{value}", value).items()}
    )
    for source in (ParquetImages(tmp_path), WebDatasetTars(tmp_path)):
        here = [source.content(index) for index in range(20)]
        loader = DataLoader(Contents(source), batch_size=None, num_workers=2, timeout=60)
        assert list(loader) == here


def test_decoded_row_groups_are_kept_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", image_rows(20), rows_per_group=2)
    source = ParquetImages(tmp_path)
    one = sum(len(encoded(value)) for value in range(2))
    monkeypatch.setattr(parquet, "CACHE_BYTES", 4 * one)
    kept = source._groups._kept
    for index in range(20):
        source.content(index)
        assert sum(values.nbytes for values in kept.values()) <= 4 * one
    assert [group for _, group, _ in kept] == [7, 8, 9], "the last ones"
    reads = []
    monkeypatch.setattr(parquet, "pyarrow_parquet", lambda: reads.append(1))
    source.content(14)
    assert not reads, "kept"
    monkeypatch.undo()
    assert b"PNG" not in pickle.dumps(source), "nothing of it goes to workers"


def test_unusable_rows_are_bad_samples_with_the_reason(tmp_path: Path) -> None:
    columns = image_rows(6)
    columns["text"] = ["a", None, " ", "x", "b", "c"]
    columns["image"][3:] = [None, b"", b"torn"]
    write_parquet(tmp_path / "a.parquet", columns)
    write_parquet(tmp_path / "paths.parquet", {"image": ["a.png", "https://x/y.png", "gone.png"], "text": ["x"] * 3})
    (tmp_path / "a.png").write_bytes(encoded(1))
    source = ParquetImages(tmp_path)
    for index in (1, 2):
        with pytest.raises(BadSample, match="its caption is empty"):
            source.captions(index)
    reasons = {3: "it has no image", 4: "it has no image", 7: "its image is at https://x/y.png; download the images"}
    for index, reason in (reasons | {5: "cannot decode", 8: "cannot read the file .*gone.png"}).items():
        with pytest.raises(BadSample, match=reason):
            source.image(index)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(b"\1" * len(data))
    with pytest.raises(BadSample, match="cannot read row group 0 of .*a.parquet"):
        ParquetImages.content(pickle.loads(pickle.dumps(source)), 0)


REFUSED_PARQUET: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    (None, {}, "'.*data' does not exist; expected a folder of .parquet files"),
    ({}, {}, "has no rows; expected captioned images"),
    (
        image_rows(1),
        {"image_column": "images"},
        "data.image_column=images: .* has the columns image, text; write data.image_column=image$",
    ),
    (
        image_rows(1),
        {"caption_column": "txt"},
        "data.caption_column=txt: .* columns image, text; write data.caption_column=text$",
    ),
    (
        image_rows(1) | {"n": [1]},
        {"image_column": "n"},
        "image_column=n: .* is int64; expected encoded images, .*=image, or text$",
    ),
    (
        image_rows(1),
        {"caption_column": "image"},
        "caption_column=image: .* is binary; expected strings, .*caption_column=text$",
    ),
    (
        image_rows(1),
        {"image_column": "text"},
        "data.image_column=text: none of the first rows .*no 0 .No such file.*<another>",
    ),
    (
        {"image": ["s3://x/y.png"], "text": ["x"]},
        {},
        "its image is at s3://x/y.png; download the images, and write their paths",
    ),
    (image_rows(1), {"width_column": "w"}, "data.width_column=w and data.height_column=None; expected both or none"),
    (
        image_rows(1) | {"w": [10], "h": [12]},
        {"width_column": "w", "height_column": "h"},
        "row 0 of .* says 10 x 12, but its upright image has 12 x 10 pixels; leave both out",
    ),
    (
        image_rows(1) | {"w": ["12"], "h": [10]},
        {"width_column": "w", "height_column": "h"},
        "data.width_column=w: .* is string; expected whole numbers; write data.width_column=h$",
    ),
]


@pytest.mark.parametrize(("columns", "options", "message"), REFUSED_PARQUET)
def test_unusable_parquet_is_refused(
    columns: dict[str, Any] | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if columns is not None:
        import pyarrow

        empty = {
            name: pyarrow.array([], kind) for name, kind in (("image", pyarrow.binary()), ("text", pyarrow.string()))
        }
        write_parquet(tmp_path / "data/a.parquet", columns or empty)
    with pytest.raises(UsageError, match=message):
        ParquetImages(tmp_path / "data", **options)


def test_torn_files_and_large_row_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", image_rows(4), rows_per_group=4)
    monkeypatch.setattr(parquet, "MAX_GROUP_GIB", 1e-7)
    with pytest.raises(UsageError, match="row group 0 has 4 images of 0.0 GiB; expected at most .*row_group_size=100"):
        ParquetImages(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="ParquetImages cannot read .*a.parquet .*; mend or remove it"):
        ParquetImages(tmp_path)


def test_another_image_in_parquet_is_another_fingerprint(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns := image_rows(4))
    saved = fingerprint(ParquetImages(tmp_path))
    os.utime(tmp_path / "a.parquet", (0, 0))
    assert change(saved, fingerprint(source := ParquetImages(tmp_path)), source) is None, "only touched"
    columns["image"][2] = encoded(77)
    write_parquet(tmp_path / "a.parquet", columns)
    found = change(saved, fingerprint(source := ParquetImages(tmp_path)), source)
    assert found is not None and found.description == "another fingerprint of the data set, whose images may be others"


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_an_image_exchanged_for_one_of_the_same_size_is_another_fingerprint(tmp_path: Path, compression: str) -> None:
    random = np.random.default_rng(0)
    images = [encoded(0) + random.bytes(5000 + number) for number in range(40)]  # which ends behind its image
    options = {"rows_per_group": 7, "compression": compression, "write_statistics": False, "use_dictionary": False}
    captions = [f"caption {number}" for number in range(40)]
    for file in "ab":
        write_parquet(tmp_path / f"{file}.parquet", {"image": images, "text": captions}, **options)
    saved = fingerprint(ParquetImages(tmp_path))
    for number in range(40):
        others = [*images[:number], encoded(0) + random.bytes(5000 + number), *images[number + 1 :]]
        before = read_footer(f"{tmp_path}/b.parquet")[1]
        write_parquet(tmp_path / "b.parquet", {"image": others, "text": captions}, **options)
        assert read_footer(f"{tmp_path}/b.parquet")[1] == before
        assert fingerprint(ParquetImages(tmp_path))["own"] != saved["own"], number
        write_parquet(tmp_path / "b.parquet", {"image": images, "text": captions}, **options)
    source = ParquetImages(tmp_path)
    assert change(saved, fingerprint(source), source) is None


def test_another_file_that_parquet_names_is_a_replaced_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(1))
    write_parquet(tmp_path / "a.parquet", {"image": ["a.png"], "text": ["x"]})
    saved = fingerprint(ParquetImages(tmp_path))
    (tmp_path / "a.png").write_bytes(encoded(2))
    found = change(saved, fingerprint(source := ParquetImages(tmp_path)), source)
    assert found is not None and found.description == f"1 replaced ({tmp_path}/a.parquet/0)"


def test_builders_hold_out_or_open_validation_data(tmp_path: Path) -> None:
    for part, count in (("train", 40), ("val", 3)):
        files: dict[str, bytes] = {}
        for value in range(count):
            files |= sample(f"{value}", value, json={"words": f"no {value}"})
        write_tar(tmp_path / part / "a.tar", files)
        columns = image_rows(count)
        write_parquet(tmp_path / part / "a.parquet", {"photo": columns["image"], "words": columns["text"]})
    given: dict[Any, dict[str, Any]] = {
        webdataset_data: {"caption_key": "words"},
        parquet_data: {"image_column": "photo", "caption_column": "words"},
    }
    for build, own in given.items():
        options = own | {"resolution": 8, "num_workers": 0}
        train, val = str(tmp_path / "train"), str(tmp_path / "val")
        data = build(train, **options)
        assert (data.num_train_samples, len(data.source_val)) == (38, 2)
        data = build(train, val, **options)
        assert (data.num_train_samples, len(data.source_val)) == (40, 3)
        assert data.source_val.captions(2) == ["no 2"]
