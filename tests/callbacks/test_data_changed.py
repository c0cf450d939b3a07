"""Resuming over data that have changed: what is noticed, said, refused and accepted."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import small_training as small
from sd_lightning import SDDataModule, UsageError
from sd_lightning.callbacks import PortableCheckpoint
from sd_lightning.data import fingerprint as fingerprints
from sd_lightning.data.builders import dreambooth_data, image_folder_data
from sd_lightning.data.fingerprint import Change, change, fingerprint
from sd_lightning.data.source import Source, SourceSubset
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.sources.huggingface import HuggingFaceImages
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.storage import typed_json
from sd_lightning.storage.checkpoint import checkpoint_path

NUM = 9


def _picture(path: Path, seed: int) -> None:
    """Write an image whose file is as large as that of any other."""
    Image.new("RGB", (32, 32), (seed * 20 % 256, 255 - seed * 20 % 256, 7)).save(path)


def _folder(root: Path, count: int = NUM) -> Path:
    root.mkdir()
    for number in range(count):
        _picture(root / f"{number}.bmp", number)
        (root / f"{number}.txt").write_text(f"picture {number}")
    return root


def _add(folder: Path) -> None:
    _picture(folder / "4b.bmp", 50)
    (folder / "4b.txt").write_text("new")


def _remove(folder: Path) -> None:
    (folder / "4.bmp").unlink()


def _rename(folder: Path) -> None:
    (folder / "4.bmp").rename(folder / "4x.bmp")
    (folder / "4.txt").rename(folder / "4x.txt")


def _replace(folder: Path) -> None:
    before = (folder / "4.bmp").stat()
    _picture(folder / "4.bmp", 90)
    os.utime(folder / "4.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "4.bmp").stat().st_size == before.st_size


def _recaption(folder: Path) -> None:
    (folder / "4.txt").write_text("another thing")


def _touch(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


CHANGES: dict[str, tuple[Callable[[Path], None], str | None, bool, bool]] = {
    "added": (_add, "1 added ({0}/4b.bmp)", True, True),
    "removed": (_remove, "1 removed", True, True),
    "renamed": (_rename, "1 removed, 1 added ({0}/4x.bmp)", True, False),
    "replaced": (_replace, "1 replaced ({0}/4.bmp)", False, False),
    "captions": (_recaption, "1 with other captions ({0}/4.bmp)", False, False),
    "touched": (_touch, None, False, False),
}
"""What is done to a folder, what is told of it, whether positions hold other samples, and another number of them."""


def _found(before: dict[str, Any], source: Source) -> Change | None:
    return change(typed_json.loads(typed_json.dumps(before)), fingerprint(source), source)


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_become_of_a_folder_is_told(tmp_path: Path, name: str) -> None:
    act, told, moves, reorders = CHANGES[name]
    folder = _folder(tmp_path / "photos")
    before = fingerprint(ImageFolder(folder))
    act(folder)
    expected = None if told is None else Change(told.format(folder), moves, reorders)
    assert _found(before, ImageFolder(folder)) == expected


def test_a_folder_that_is_copied_elsewhere_is_the_same(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "photos")
    before = fingerprint(ImageFolder(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert _found(before, ImageFolder(tmp_path / "copy")) is None


def test_other_samples_held_out_are_other_samples_to_train_on(tmp_path: Path) -> None:
    source = ImageFolder(_folder(tmp_path / "photos"))
    before = fingerprint(SourceSubset(source, [0, 1, 2]))
    found = _found(before, SourceSubset(source, [0, 1, 3]))
    assert found == Change(f"1 removed, 1 added ({tmp_path}/photos/3.bmp)", True, False)
    assert _found(before, SourceSubset(source, [1, 0, 2])) == Change("other samples, or another order", True, False)


def test_samples_that_change_between_training_and_validation_are_told(tmp_path: Path) -> None:
    source = ImageFolder(_folder(tmp_path / "photos"))

    def of(held: list[int]) -> dict[str, Any]:
        train = SourceSubset(source, [i for i in range(NUM) if i not in held])
        return fingerprint(train, held_out=SourceSubset(source, held))

    found = change(typed_json.loads(typed_json.dumps(of([1, 2, 3]))), of([2, 5]), source)
    assert found is not None and found.mixes
    now = "1 samples that are held out now were trained on, 2 samples that are trained on now were held out"
    assert now in found.description
    assert change(of([1]), of([1]), source) is None


def test_captions_in_one_file_are_looked_at_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "photos", 3)
    lines = [f'{{"file_name": "{n}.bmp", "text": "picture {n}"}}' for n in range(3)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    before = fingerprint(ImageFolder(folder))
    (folder / "metadata.jsonl").write_text("\n".join(lines).replace("picture 2", "picture two"))
    assert _found(before, ImageFolder(folder)) == Change(f"1 with other captions ({folder}/2.bmp)", False, False)


def test_of_many_files_none_is_opened_and_their_dates_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "THOROUGH", 3)
    folder = _folder(tmp_path / "photos")
    source = ImageFolder(folder)
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", lambda *args, **kwargs: pytest.fail("opened"))
        before = fingerprint(source)
    assert _found(before, source) is None
    _picture(folder / "4.bmp", 90)
    (folder / "5.txt").write_text("something longer than before")
    told = f"1 replaced ({folder}/4.bmp), 1 with other captions ({folder}/5.bmp)"
    assert _found(before, source) == Change(told, False, False)
    for number in range(3, NUM):
        (folder / f"{number}.bmp").unlink()
    assert _found(before, ImageFolder(folder)) == Change("6 removed", True, True)  # looked at more closely now


def test_of_very_many_samples_no_more_than_digests_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "COUNTED", 3)
    folder = _folder(tmp_path / "photos")
    before = fingerprint(ImageFolder(folder))
    assert before["samples"] is None
    _recaption(folder)
    assert _found(before, ImageFolder(folder)) == Change("other captions", False, False)
    _add(folder)
    assert _found(before, ImageFolder(folder)) == Change("10 samples instead of 9", True, True)


def test_photos_of_a_subject_and_pictures_of_its_class_are_looked_at(tmp_path: Path) -> None:
    photos, pictures = _folder(tmp_path / "photos", 3), _folder(tmp_path / "class", 4)

    def source(prompt: str = "sks") -> Any:
        options: dict[str, Any] = {"class_data_dir": str(pictures), "class_prompts": ["a dog"]}
        return dreambooth_data(str(photos), prompt, resolution=32, **options).source_train

    before = fingerprint(source())
    _touch(photos)
    assert _found(before, source()) is None
    found = _found(before, source("zwx"))
    assert found is not None and found.description.startswith("3 with other captions") and not found.moves
    _picture(pictures / "1.bmp", 77)
    found = _found(before, source())
    assert found is not None and found.description == f"1 replaced ({pictures}/1.bmp)" and not found.moves
    _add(photos)
    found = _found(before, source())
    assert found is not None and f"1 added ({photos}/4b.bmp)" in found.description and found.moves


def test_a_data_set_of_hugging_face_brings_its_own_fingerprint(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def saved(name: str, seeds: range, text: str = "a") -> HuggingFaceImages:
        images = [Image.new("RGB", (8, 8), (seed, 0, 0)) for seed in seeds]
        table = datasets.Dataset.from_dict({"image": images, "text": [f"{text} {i}" for i in range(len(images))]})
        table.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / name))
        return HuggingFaceImages(tmp_path / name)

    before = fingerprint(saved("one", range(4)))
    assert _found(before, HuggingFaceImages(tmp_path / "one")) is None
    replaced = _found(before, saved("two", range(20, 24)))
    told = "another fingerprint of the data set, whose images may be others"
    assert replaced == Change(told, False, False)
    captioned = _found(before, saved("three", range(4), "b"))
    assert captioned is not None and captioned.description.startswith("4 with other captions (") and not captioned.moves
    added = _found(before, saved("four", range(5)))
    assert added is not None and added.description.startswith("1 added (") and added.moves and added.reorders


def test_digits_and_sources_of_ones_own_are_compared_by_what_they_tell() -> None:
    digits = Digits("train")
    assert _found(fingerprint(digits), Digits("train")) is None
    assert _found(fingerprint(digits), Digits("val")) is not None

    class Own(Source):
        def __init__(self, caption: str) -> None:
            self.caption = caption

        def __len__(self) -> int:
            return 2

        def image(self, index: int) -> Image.Image:
            raise AssertionError("decoded")

        def captions(self, index: int) -> list[str]:
            return [self.caption]

        def name(self, index: int) -> str:
            return f"own {index}"

    found = _found(fingerprint(Own("a")), Own("b"))
    assert found == Change("2 with other captions (own 0, own 1)", False, False)


def _data(folder: Path, **options: Any) -> SDDataModule:
    given: dict[str, Any] = {"batch_size": 2, "resolution": 32, "center_crop": True, "num_workers": 0}
    return image_folder_data(str(folder), num_val_samples=0, **given | options)


def _fit(run: Path, folder: Path, max_steps: int, resume: Path | None = None, **options: Any) -> SDDataModule:
    data = _data(folder, **options)
    saving = PortableCheckpoint(run, every_n_steps=1, keep=20, resume=resume)
    small.fit(small.module(train_text_encoder=False), data, max_steps, saving)
    return data


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, and a run over one epoch of them: four steps."""
    root = tmp_path_factory.mktemp("started")
    _fit(root / "run", _folder(root / "photos"), 4)
    return root


@pytest.fixture
def photos(started: Path) -> Any:
    """The photos of the run, which are as they were afterwards."""
    shutil.copytree(started / "photos", started / "kept")
    yield started / "photos"
    shutil.rmtree(started / "photos")
    (started / "kept").rename(started / "photos")


def test_an_epoch_that_holds_other_samples_by_now_is_refused_unless_it_is_accepted(
    started: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _add(photos)
    resume = checkpoint_path(started / "run", 2)
    told = f"1 added ({photos}/4b.bmp)"
    with pytest.raises(UsageError) as caught:
        _fit(tmp_path / "refused", photos, 3, resume)
    assert str(caught.value) == (
        f"resume={resume}: the training set has changed in the middle of epoch 0, whose rest it is to give: {told}; "
        "bring it back as it was, or write data.changed=accept: a new epoch begins, without the rest of epoch 0"
    )
    with pytest.raises(UsageError, match="data.changed=accept"):
        PortableCheckpoint(tmp_path / "early", resume=resume).check_data(_data(photos))
    with caplog.at_level(logging.WARNING, logger="sd_lightning"):
        _fit(tmp_path / "accepted", photos, 3, resume, changed="accept")
    assert f"resume={resume}: the training set has changed since: {told}" in caplog.messages
    position = small.trainer_state(checkpoint_path(tmp_path / "accepted", 3))["position"]
    assert (position["epoch"], position["steps_in_epoch"], position["optimizer_steps"]) == (1, 1, 3)


def test_between_epochs_and_where_samples_stay_what_they_are_changes_are_only_said(
    started: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _recaption(photos)
    _replace(photos)
    _fit(tmp_path / "amid", photos, 3, checkpoint_path(started / "run", 2))
    _add(photos)
    _fit(tmp_path / "between", photos, 5, checkpoint_path(started / "run", 4))
    said = [m.partition("since: ")[2] for m in caplog.messages if "has changed since" in m]
    assert said == [
        f"1 replaced ({photos}/4.bmp), 1 with other captions ({photos}/4.bmp)",
        f"1 added ({photos}/4b.bmp), 1 replaced ({photos}/4.bmp), 1 with other captions ({photos}/4.bmp)",
    ]


def test_a_checkpoint_that_tells_nothing_of_its_data_is_resumed_with_one_line(
    started: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sd_lightning.callbacks.checkpoint import trainer_state

    def without_data(path: Path) -> dict[str, Any]:
        return read(path) | {"data": None}

    read = trainer_state.read_trainer_state
    monkeypatch.setattr(trainer_state, "read_trainer_state", without_data)
    resume = checkpoint_path(started / "run", 2)
    _fit(tmp_path / "run", started / "photos", 3, resume)
    assert [m for m in caplog.messages if str(resume) in m and "data" in m] == [
        f"resume={resume}: it does not say what data it was trained on; they are taken as they are"
    ]
    small.assert_bitwise_equal(checkpoint_path(tmp_path / "run", 3), checkpoint_path(started / "run", 3))


def test_bad_samples_of_earlier_starts_count_until_they_are_mended(tmp_path: Path) -> None:
    folder, run = _folder(tmp_path / "photos"), tmp_path / "run"
    for number in range(2):
        (folder / f"{number}.bmp").write_bytes(b"broken")
    first = _fit(run, folder, 4, max_bad_fraction=0.3)
    names = {f"{folder}/{number}.bmp" for number in range(2)}
    assert first.bad.found.keys() == names
    resume = checkpoint_path(run, 4)
    assert small.trainer_state(resume)["bad_samples"] == first.bad.found
    again = _data(folder, max_bad_fraction=0.3)
    assert again.bad.still_bad(first.bad.found) == first.bad.found
    with pytest.raises(UsageError, match="2 samples cannot be used, more than data.max_bad_fraction=0.2 allows"):
        _fit(run, folder, 5, resume, max_bad_fraction=0.2)
    _picture(folder / "0.bmp", 0)
    second = _data(folder, max_bad_fraction=0.2)
    assert second.bad.still_bad(first.bad.found).keys() == {f"{folder}/1.bmp"}
    (folder / "1.bmp").unlink()
    assert _data(folder).bad.still_bad(first.bad.found) == {}


def test_the_setting_takes_two_values(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data.changed=yes: expected refuse or accept; write data.changed=refuse"):
        _data(_folder(tmp_path / "photos", 3), changed="yes")
