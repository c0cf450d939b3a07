"""What people and machines do to stores: random histories of changes, kills, prunings and damage by hand."""

import errno
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locations import refusal
from sd_lightning._errors import UsageError
from sd_lightning.apps.store_upkeep import verify
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store.files import BLANK, sealed
from sd_lightning.data.store.layout import LatentStore, recipes
from sd_lightning.data.store.upkeep import Pruning, broken_files
from sd_lightning.storage import location
from sd_lightning.storage.location import LocalFolder
from sd_lightning.storage.object_store import open_location
from small_store import Ran, expected, held, reader, recipe, same, update, write_picture, write_pictures
from suites import keep

SPLITS = ("train", "val")
read = LocalFolder.read


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_after(count: int) -> Iterator[None]:
    """End the process before it creates or deletes a file of the store for the ``count``-th time."""
    left = [count]

    def counted(call: Any) -> Any:
        def counting(self: LocalFolder, name: str, *data: Any) -> Any:
            if "job.json" not in name and not name.startswith("recipes"):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return call(self, name, *data)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "create", counted(LocalFolder.create))
        patch.setattr(LocalFolder, "delete", counted(LocalFolder.delete))
        with suppress(Killed):
            yield


def store_at(path: Path) -> LatentStore:
    return LatentStore(open_location(path, key="store"), recipe())


def prune(path: Path, *, dry_run: bool = False) -> Pruning:
    with tempfile.TemporaryDirectory() as scratch:
        pruning = Pruning(store_at(path), Path(scratch))
        if not dry_run:
            pruning.run()
        return pruning


def broken(path: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        return [name for name, _ in broken_files(store_at(path), Path(scratch))]


class History:
    """A store and its data set, of two splits, that random things happen to."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root, self.store, self.count = root, root / "store", 0
        for split, count in (("train", self.random.choice([1, 2, 9, 15])), ("val", self.random.choice([0, 1, 4]))):
            (root / split).mkdir()
            for _ in range(count):
                self.add(split)

    def pictures(self, split: str) -> list[Path]:
        return sorted((self.root / split).glob("*.png"))

    def new(self, split: str) -> Path:
        self.count += 1
        return self.root / split / f"{self.random.choice(['a', 'm', 'z', 'ü漢'])}{self.count:04}.png"

    def add(self, split: str) -> None:
        write_picture(self.root / split, self.new(split).stem, colour=self.random.randrange(40))

    def remove(self, path: Path) -> None:
        path.unlink()
        path.with_suffix(".txt").unlink()

    def copy(self, path: Path, split: str) -> Path:
        other = self.new(split)
        shutil.copy(path, other)
        shutil.copy(path.with_suffix(".txt"), other.with_suffix(".txt"))
        return other

    def mutate(self) -> None:
        """Change the data set."""
        choose, split = self.random.choice, self.random.choice(["train", "train", "val"])
        pictures = self.pictures(split)
        if not pictures or self.random.random() < 0.3:
            for _ in range(self.random.choice([1, 1, 12])):
                self.add(split)
            return
        path, other = choose(pictures), choose(pictures)
        what = choose(["remove", "clear", "change", "caption", "rename", "copy", "copy", "break", "swap"])
        if what == "remove":
            for each in self.random.sample(pictures, self.random.randrange(1, min(6, len(pictures)) + 1)):
                self.remove(each)
        elif what == "clear" and split == "val":
            for each in pictures:
                self.remove(each)
        elif what == "change":
            write_picture(path.parent, path.stem, colour=self.random.randrange(60))
        elif what == "caption":
            path.with_suffix(".txt").write_text(choose(["x", "a\nb", "ünï 漢字", "y" * 300]))
        elif what == "rename":
            self.copy(path, split)
            self.remove(path)
        elif what == "copy":
            self.copy(path, choose(SPLITS))
        elif what == "break":
            path.write_bytes(b"broken %d" % self.random.randrange(5))
        elif what == "swap":
            data = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)

    def is_broken(self, path: Path) -> bool:
        return path.read_bytes().startswith(b"broken")

    def update(self) -> Ran:
        if all(map(self.is_broken, self.pictures("train"))):
            self.add("train")
        sources = {split: ImageFolder(self.root / split) for split in SPLITS if self.pictures(split)}
        sizes = {"images_per_file": self.random.choice([2, 3, 4]), "portion": self.random.choice([3, 7, 10, 100])}
        sizes["samples_per_file"] = 4
        return update(self.store, sources, max_bad_fraction=1.0, **sizes)

    def holds(self) -> dict[str, Any]:
        return {split: held(reader(self.store, split)) for split in SPLITS}

    def check(self) -> None:
        """Compare with a store made now, and with what was written."""
        for split, found in self.holds().items():
            good = self.root / "good"
            shutil.rmtree(good, ignore_errors=True)
            good.mkdir()
            for path in self.pictures(split):
                if not self.is_broken(path):
                    for each in (path, path.with_suffix(".txt")):
                        shutil.copy(each, good)
            wanted = expected(good) if any(good.iterdir()) else {}
            wanted = {str(self.root / split / Path(name).name): each for name, each in wanted.items()}
            assert same(found, wanted)
        assert not broken(self.store)

    def unchanged(self, before: dict[str, Any]) -> None:
        after = self.holds()
        assert all(same(before[split], after[split]) for split in SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep(range(4), range(40), "kills"))
def test_after_any_history_a_store_holds_what_a_new_one_would(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path, seed)
    history.update()
    choose = history.random
    for _ in range(12):
        for _ in range(choose.randrange(1, 6)):
            history.mutate()
        if choose.random() < 0.45:
            before = history.holds()
            with killed_after(choose.randrange(12)):
                history.update()
                before = history.holds()
            history.unchanged(before)
        if choose.random() < 0.25:
            choose.choice(sorted(history.store.rglob("*/*.safetensors"))).unlink()
        history.update()
        history.check()
        if choose.random() < 0.6:
            before = history.holds()
            with killed_after(choose.randrange(15)):
                prune(history.store)
            history.unchanged(before)
            prune(history.store)
            history.check()
            left = prune(history.store, dry_run=True).unused
            assert not left.files and not left.partly
            assert not history.update().counts.encoded
            history.check()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "photos", 9)


def test_a_pruning_after_a_killed_one_keeps_what_is_used(photos: Path, tmp_path: Path) -> None:
    """What the first wrote and nobody refers to yet, the second refers to."""
    update(tmp_path / "store", ImageFolder(photos))
    for i in (0, 1, 5):
        (photos / f"{i:03}.png").unlink()
    update(tmp_path / "store", ImageFolder(photos))
    for count in range(12):
        with killed_after(count):
            prune(tmp_path / "store")
        assert same(held(reader(tmp_path / "store")), expected(photos)), count
    assert not prune(tmp_path / "store", dry_run=True).unused.files


@pytest.mark.parametrize("kind", ["latents", "samples"])
@pytest.mark.parametrize("how", ["truncated", "empty", "garbage"])
def test_a_damaged_file_is_never_taken_for_whole(kind: str, how: str, photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    path = next((tmp_path / "store").rglob(f"{kind}/*.safetensors"))
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-30], "empty": b"", "garbage": bytes(reversed(data))}[how])
    (photos / "000.txt").write_text("another caption")
    message = refusal(lambda: update(tmp_path / "store", ImageFolder(photos)), "truncated or altered", "verify")
    assert path.name.partition(".")[0] in message
    assert broken(tmp_path / "store") == [f"{kind}/{path.name}"]
    path.unlink()
    update(tmp_path / "store", ImageFolder(photos))
    assert same(held(reader(tmp_path / "store")), expected(photos)) and not broken(tmp_path / "store")


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def column_of(path: Path, column: str) -> tuple[int, int]:
    """Where a column of a safetensors file begins and ends."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:begin])[column]["data_offsets"]
    return begin + first, begin + last


def test_verify_finds_a_flipped_bit_anywhere(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", {"train": ImageFolder(photos), "val": ImageFolder(photos)})
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"latents", "samples", "generations", "recipes"}
    assert verify(str(tmp_path / "store"), dry_run=True) == 0
    for path in files:
        data = path.read_bytes()
        for position in range(0, len(data), -(-len(data) // 40)):
            flip(path, position, position % 8)
            try:
                found = verify(str(tmp_path / "store"), dry_run=True) == 1
            except UsageError as error:
                found = path.name in str(error)
            assert found, (path, position)
            path.write_bytes(data)


def test_a_latent_file_with_altered_hashes_gives_no_image_the_latents_of_another(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    for path in (tmp_path / "store").rglob("latents/*.safetensors"):
        for position in range(*column_of(path, "images"), 16):
            flip(path, position)
    for i in range(9):
        (photos / f"{i:03}.txt").write_text(f"another caption {i}")
    assert update(tmp_path / "store", ImageFolder(photos), images_per_file=3).counts.encoded == 9
    assert same(held(reader(tmp_path / "store")), expected(photos))


@pytest.mark.parametrize("column", ["latents", "sizes", "checks"])
def test_altered_latents_are_not_trained_on(column: str, photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    path = max((tmp_path / "store").rglob("latents/*.safetensors"))
    begin, end = column_of(path, column)
    flip(path, (begin + end) // 2, 6)
    store = reader(tmp_path / "store")
    message = refusal(lambda: store.read_latents(np.arange(9)), "not those that were written", "verify store=")
    assert path.name in message
    path.unlink()
    update(tmp_path / "store", ImageFolder(photos))
    assert same(held(reader(tmp_path / "store")), expected(photos))


@pytest.mark.parametrize("column", ["captions", "place", "images", "input_ids.text_encoder"])
def test_an_altered_sample_file_is_neither_read_nor_copied(column: str, photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    path = next((tmp_path / "store").rglob("samples/*.safetensors"))
    flip(path, column_of(path, column)[0])
    refusal(lambda: reader(tmp_path / "store").captions(0), path.name, "not those that were written")
    refusal(lambda: reader(tmp_path / "store").read_latents(np.arange(2)), path.name, "not those that were written")
    (photos / "000.txt").write_text("another caption")
    refusal(lambda: update(tmp_path / "store", ImageFolder(photos)), path.name, "not those that were written")


def test_prune_does_not_copy_altered_latents(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    for i in (0, 1):
        (photos / f"{i:03}.png").unlink()
    update(tmp_path / "store", ImageFolder(photos))
    for path in (tmp_path / "store").rglob("latents/*.safetensors"):
        flip(path, column_of(path, "latents")[1] - 1)
    refusal(lambda: prune(tmp_path / "store"), "truncated or altered", "verify")


def resealed(content: dict[str, Any]) -> bytes:
    """A list as somebody writes it who knows of seals."""
    return sealed(json.dumps(content | {"seal": BLANK}, sort_keys=True).encode())


def test_a_broken_list_of_samples_is_named_with_the_remedy(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    path = next((tmp_path / "store").rglob("generations/*.json"))
    broken_lists = ("", "[]", "null", '{"format": 2}', "[" * 200_000)
    for text in (path.read_text()[:40], resealed({"format": 2, "number": "x"}).decode(), *broken_lists):
        path.write_text(text)
        refusal(lambda: reader(tmp_path / "store"), str(path), "put back a copy", "precompute verify")
        assert verify(str(tmp_path / "store"), dry_run=False) == 1
        assert path.exists()  # no other list tells the held-out images
    path.unlink()
    assert update(tmp_path / "store", ImageFolder(photos)).counts.encoded == 0


def test_verify_deletes_only_an_altered_list_with_another_to_use(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    (photos / "000.txt").write_text("another caption")
    update(tmp_path / "store", ImageFolder(photos))
    older, newer = sorted((tmp_path / "store").rglob("generations/*.json"))
    whole = newer.read_bytes()

    def denied(self: LocalFolder, name: str, *span: int) -> bytes:
        if name.startswith("generations"):
            raise UsageError(f"{name}: permission denied")
        return read(self, name, *span)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "read", denied)
        with pytest.raises(UsageError, match="permission denied"):
            broken(tmp_path / "store")
    newer.write_bytes(resealed(json.loads(whole) | {"format": 3}))
    with pytest.raises(UsageError, match="format 3.*another version"):
        verify(str(tmp_path / "store"), dry_run=False)
    newer.write_bytes(resealed(json.loads(whole) | {"splits": {"../out": []}}))
    assert older.exists() and newer.exists()
    assert verify(str(tmp_path / "store"), dry_run=False) == 1
    assert older.exists() and not newer.exists()


def test_a_list_that_leads_out_of_the_store_is_refused(photos: Path, tmp_path: Path) -> None:
    """Nothing outside is read, and nothing deleted."""
    update(tmp_path / "store", ImageFolder(photos))
    path = next((tmp_path / "store").rglob("generations/*.json"))
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(next((tmp_path / "store").rglob("samples/*.safetensors")).read_bytes())
    content = json.loads(path.read_text())
    content["splits"]["train"][0] |= {"name": "../../../outside", "size": outside.stat().st_size}
    path.write_bytes(resealed(content))
    refusal(lambda: held(reader(tmp_path / "store")), "'../../../outside'", "without folders")
    refusal(lambda: prune(tmp_path / "store"), "'../../../outside'", "without folders")
    assert outside.exists()


def test_files_of_others_do_not_matter(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    others = [folder / "notes.txt" for folder in (tmp_path / "store").rglob("*") if folder.is_dir()]
    for path in others:
        path.write_text("mine")
    assert update(tmp_path / "store", ImageFolder(photos)).counts.kept == 9
    prune(tmp_path / "store")
    assert recipes(open_location(tmp_path / "store", key="store")) == [recipe()]
    assert all(path.exists() for path in others) and same(held(reader(tmp_path / "store")), expected(photos))


@pytest.mark.parametrize("text", ["", "garbage", "[]", "null", '{"pid": "x"}', '{"time": null, "pid": 1, "host": 3}'])
def test_a_lock_that_nobody_wrote_locks_nobody_out(text: str, photos: Path, tmp_path: Path) -> None:
    store_at(tmp_path / "store").folder.create("job.json", text.encode())
    update(tmp_path / "store", ImageFolder(photos))
    assert same(held(reader(tmp_path / "store")), expected(photos))


@pytest.mark.parametrize("kind", ["job.json", "recipes", "latents", "samples", "generations"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    kind: str, nth: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(tmp_path / "undisturbed", ImageFolder(photos), portion=4)
    write: Callable[..., None] = location._write
    count = [0]

    def full(path: Path, data: bytes | Path) -> None:
        count[0] += kind in path.parts or f".tmp-{kind.partition('.')[0]}" in path.name
        if count[0] >= nth:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(location, "_write", full)
        if count_of(kind) >= nth:
            refusal(lambda: update(tmp_path / "store", ImageFolder(photos), portion=4), "disk is full", "free space")
            assert not list((tmp_path / "store").rglob("*tmp*")) and not list((tmp_path / "store").rglob("job.json"))
    update(tmp_path / "store", ImageFolder(photos), portion=4)
    assert contents(tmp_path / "store") == contents(tmp_path / "undisturbed")


def count_of(kind: str) -> int:
    """How many files of a kind a job writes in these tests, at least."""
    return 1 if kind in ("job.json", "recipes", "generations") else 2


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_of_temporary_files_is_told(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("sd_lightning.data.store.index.rows_of", full)
        refusal(lambda: update(tmp_path / "store", ImageFolder(photos)), "disk is full", "TMPDIR")
    update(tmp_path / "store", ImageFolder(photos))
    assert same(held(reader(tmp_path / "store")), expected(photos))


def test_a_portion_without_a_usable_image_and_captions_that_are_empty(tmp_path: Path) -> None:
    photos = write_pictures(tmp_path / "photos", 30)
    for i in range(10, 20):
        data = (photos / f"{i:03}.png").read_bytes()
        (photos / f"{i:03}.png").write_bytes(data[: len(data) // 2] + bytes([i]))
    (photos / "025.txt").write_text("")
    ran = update(tmp_path / "store", ImageFolder(photos), portion=10)
    assert ran.counts.added == 19 and len(ran.bad) == 10
    again = update(tmp_path / "store", ImageFolder(photos), portion=10)
    assert again.counts.kept == 19 and not again.counts.encoded
    assert np.isfinite(reader(tmp_path / "store").read_latents(np.arange(19)).latents).all()


def test_a_read_only_folder_is_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, data: bytes | Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(location, "_write", denied)  # root may write anywhere
    refusal(lambda: update(tmp_path / "store", ImageFolder(photos)), "cannot write", "change its permissions")
