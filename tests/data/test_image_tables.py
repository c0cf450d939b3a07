"""The tables of a store: merged by size, mended after a kill, rewritten one after the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store import image_tables
from sd_lightning.data.store.files import hashes_of
from sd_lightning.data.store.image_tables import ImageTables, Moved
from sd_lightning.data.store.store import LatentStore
from sd_lightning.storage.locations import open_location
from small_store import recipe, update, write_picture, write_pictures

PER_FILE = 5
LIMITS = {"fan_in": 3, "level_rows": PER_FILE, "most_rows": 10 * PER_FILE}


class Killed(BaseException):
    pass


def images_of(number: int) -> np.ndarray:
    return hashes_of([f"{number}-{row}".encode() for row in range(PER_FILE)])


def store_in(folder: Path) -> LatentStore:
    return LatentStore(open_location(folder, key="store"), recipe())


class Tables(ImageTables):
    """Tables of latent files that are not there."""

    def _read_images(self, name: str) -> np.ndarray:
        others = {"again": images_of(0)[::-1], "file-a": images_of(0), "file-b": images_of(0)}
        others |= {"new-3": images_of(3)[[0, 2]], "new-5": images_of(5)[[4]], "new-2": images_of(2)[[1, 3]]}
        return others[name] if name in others else images_of(int(name.removeprefix("file-")))


def tables_of(folder: Path, **limits: int) -> ImageTables:
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return Tables(store_in(folder), scratch, **(LIMITS | limits))


def filled(folder: Path, count: int, **limits: int) -> ImageTables:
    """Tables of latent files 0, 1, …, added one by one."""
    tables = tables_of(folder, **limits)
    for number in range(count):
        tables.add([(f"file-{number}", images_of(number))], latents(count))
    return tables


def latents(*counts: int, without: tuple[int, ...] = ()) -> dict[str, int]:
    return {f"file-{number}": 100 for number in range(*counts) if number not in without}


def files(folder: Path, kind: str = "tables") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob(f"{kind}/*.safetensors"))}


def places(tables: ImageTables, number: int, there: dict[str, int]) -> Iterator[tuple[str, int] | None]:
    shards, where = tables.find(images_of(number), there)
    for shard, row in where.tolist():
        yield None if shard < 0 else (shards[shard][0], row)


@pytest.mark.parametrize("reopened", [False, True])
def test_tables_of_one_size_are_merged_and_all_images_found(tmp_path: Path, reopened: bool) -> None:
    tables = filled(tmp_path / "store", 40)
    if reopened:
        tables = tables_of(tmp_path / "store")
    # 40 files: four of nine, one of three, one; 27 would be more than `most_rows`.
    assert len(tables) == len(files(tmp_path / "store")) == 6
    for number in range(40):
        expected = [(f"file-{number}", row) for row in range(PER_FILE)]
        assert list(places(tables, number, latents(40))) == expected
    assert list(places(tables, 40, latents(41))) == [None] * PER_FILE
    assert not list((tmp_path / "scratch").iterdir())


def test_a_table_says_nothing_of_a_file_that_is_gone_and_another_may(tmp_path: Path) -> None:
    tables = filled(tmp_path / "store", 2, fan_in=9)
    there = latents(2, without=(0,)) | {"again": 100}
    assert list(places(tables, 0, there)) == [None] * PER_FILE
    tables.add([("again", images_of(0)[::-1])], there)
    for opened in (tables, tables_of(tmp_path / "store", fan_in=9)):  # their order is another one
        assert list(places(opened, 0, there)) == [("again", PER_FILE - 1 - row) for row in range(PER_FILE)]
    settled = tables_of(tmp_path / "store", fan_in=3)
    settled.settle(there)
    assert len(settled) == 1
    assert list(places(settled, 0, there))[0] == ("again", PER_FILE - 1)
    assert list(places(settled, 0, latents(2))) == [None] * PER_FILE, "it was dropped"


def test_of_two_files_with_an_image_the_smaller_name_counts(tmp_path: Path) -> None:
    there = {"file-a": 100, "file-b": 100}
    for number, names in enumerate((["file-a", "file-b"], ["file-b", "file-a"])):
        tables = tables_of(tmp_path / f"store-{number}", fan_in=9)
        for name in names:
            tables.add([(name, images_of(0))], there)
        assert list(places(tables, 0, there)) == [("file-a", row) for row in range(PER_FILE)]


def dying(store: Path, after: int) -> pytest.MonkeyPatch:
    """Within it, the process dies at its `after`-th change of tables."""
    kind, left = type(open_location(store, key="store")), [after]

    def before(change: Any) -> Any:
        def changed(self: Any, name: str, *rest: Any) -> Any:
            left[0] -= name.startswith("tables")
            if left[0] < 0:
                raise Killed
            return change(self, name, *rest)

        return changed

    patch = pytest.MonkeyPatch()
    patch.setattr(kind, "create", before(kind.create))
    patch.setattr(kind, "delete", before(kind.delete))
    return patch


@pytest.mark.parametrize("after", range(0, 26, 3))
def test_a_job_killed_while_it_merges_ends_with_the_same_tables(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_pictures(tmp_path / "photos", 60)
    for again in range(60, 75):  # pictures of several earlier tables
        write_picture(photos, f"{again:03}", colour=7 * (again - 60) % 60)
    monkeypatch.setattr(ImageTables.__init__, "__kwdefaults__", {**LIMITS, "most_rows": 1000})
    update(tmp_path / "undisturbed", ImageFolder(photos), portion=5)
    assert len(files(tmp_path / "undisturbed")) == 2, "9 + 3 portions"
    patch = dying(tmp_path / "store", after)
    with pytest.raises(Killed):
        update(tmp_path / "store", ImageFolder(photos), portion=5)
    patch.undo()
    ran = update(tmp_path / "store", ImageFolder(photos), portion=5)
    assert files(tmp_path / "store", "*") == files(tmp_path / "undisturbed", "*")
    assert ran.counts.added == 75


def test_only_tables_that_name_other_files_are_rewritten(tmp_path: Path) -> None:
    tables = filled(tmp_path / "store", 9, fan_in=99)
    before = files(tmp_path / "store")
    moved = {
        "file-3": Moved("new-3", 100, np.array([0, 2])),
        "file-5": Moved("new-5", 100, np.array([4])),
    }
    used = [f"file-{number}" for number in (0, 1, 2, 3, 4, 5, 8)]  # 6 and 7 are gone
    tables.rewrite(used, moved)
    assert len(files(tmp_path / "store").keys() & before.keys()) == 5
    assert len(tables) == len(files(tmp_path / "store")) == 7
    there = dict.fromkeys([*used, "new-3", "new-5"], 100)
    for opened in (tables, tables_of(tmp_path / "store")):
        assert list(places(opened, 3, there)) == [("new-3", 0), None, ("new-3", 1), None, None]
        assert list(places(opened, 5, there)) == [None, None, None, None, ("new-5", 0)]
        assert list(places(opened, 7, there | latents(9))) == [None] * PER_FILE
        assert list(places(opened, 8, there)) == [("file-8", row) for row in range(PER_FILE)]


def test_rows_of_one_table_stay_sorted_when_some_go(tmp_path: Path) -> None:
    tables = filled(tmp_path / "store", 9)
    assert len(tables) == 1
    tables.rewrite(latents(9, without=(4,)), {"file-2": Moved("new-2", 100, np.array([1, 3]))})
    (table,) = tables._tables.values()
    assert table.is_sound() and len(table) == 7 * PER_FILE + 2
    there = latents(9) | {"new-2": 100}
    assert list(places(tables, 2, there)) == [None, ("new-2", 0), None, ("new-2", 1), None]
    assert list(places(tables, 4, there)) == [None] * PER_FILE
    assert list(places(tables, 8, there)) == [("file-8", row) for row in range(PER_FILE)]


def test_a_table_without_rows_is_deleted(tmp_path: Path) -> None:
    tables = filled(tmp_path / "store", 2)
    tables.rewrite(latents(1), {})
    assert len(tables) == len(files(tmp_path / "store")) == 1


def test_a_day_after_the_other_leaves_few_tables(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for day in range(40):
        write_picture(photos, f"{day:03}", colour=day)
        update(tmp_path / "store", ImageFolder(photos))
    assert len(files(tmp_path / "store")) < image_tables.FAN_IN
    assert update(tmp_path / "store", ImageFolder(photos)).counts.kept == 40
