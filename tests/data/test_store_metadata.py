"""The metadata of a store as a Parquet table: written, changed, and read back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store.metadata import CaptionImport, Imported, export_table
from sd_lightning.data.store.store import LatentStore
from sd_lightning.data.store.tokenizing import Tokenizing
from sd_lightning.data.subset import SourceSubset
from sd_lightning.storage.locations import open_location
from small_store import reader, recipe, tokenize, update, write_picture, write_pictures


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = write_pictures(tmp_path / "photos", 23)
    (folder / "004.txt").write_text("one caption\nand another")
    return folder


def export(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    """Write `table.parquet` and return its rows."""
    (tmp_path / "scratch").mkdir(exist_ok=True)
    store = LatentStore(open_location(tmp_path / "store", key="store"), recipe(**changes))
    count = export_table(store, tmp_path / "table.parquet", tmp_path / "scratch")
    rows = pq.read_table(tmp_path / "table.parquet").to_pylist()
    assert len(rows) == count
    return rows


def bring(
    tmp_path: Path, rows: list[dict[str, Any]], *, tokenizers: str = "bytes", row_group_size: int = 4
) -> Imported:
    """Import rows."""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "new.parquet", row_group_size=row_group_size)
    (tmp_path / "scratch").mkdir(exist_ok=True)
    store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
    job = CaptionImport(store, tmp_path / "new.parquet", Tokenizing(tokenize, tokenizers), tmp_path / "scratch")
    job.run()
    for path in (tmp_path / "scratch").iterdir():
        path.unlink()
    return job.counts


def captions(tmp_path: Path, split: str = "train") -> dict[str, list[str]]:
    """Name -> captions, whose token ids are theirs."""
    store = reader(tmp_path / "store", split)
    for i in range(len(store)):
        for number, caption in enumerate(store.captions(i)):
            ids = store.token_ids(np.array([i]), np.array([number]))["text_encoder"]
            assert torch.equal(ids, tokenize([caption])["text_encoder"])
    return {Path(store.name(i)).stem: store.captions(i) for i in range(len(store))}


class TestExport:
    def test_a_row_tells_all_of_a_sample_but_its_latents(self, photos: Path, tmp_path: Path) -> None:
        other = write_pictures(tmp_path / "other", 3)
        update(tmp_path / "store", {"train": ImageFolder(photos), "val": ImageFolder(other)})
        rows = export(tmp_path)
        assert [row["split"] for row in rows] == ["train"] * 23 + ["val"] * 3
        for split in ("train", "val"):
            store = reader(tmp_path / "store", split)
            for i, row in enumerate(row for row in rows if row["split"] == split):
                assert row["name"] == store.name(i) and row["captions"] == store.captions(i)
                assert row["image"] == store.image_hash(i) and len(row["key"]) == 32
                file = next((tmp_path / "store").rglob(f"latents/{row['latent_file']}.safetensors"))
                assert file.exists() and row["row"] < 4
        assert len({(row["split"], row["key"]) for row in rows}) == 26

    def test_sizes_are_those_of_the_first_variant(self, tmp_path: Path) -> None:
        for i in range(5):
            path = write_picture(tmp_path / "photos", str(i), colour=i)
            Image.new("RGB", (20 + 7 * i, 12), (i, 0, 0)).save(path)
        of = {"variants": 3, "crop": "random"}
        update(tmp_path / "store", ImageFolder(tmp_path / "photos"), of=recipe(**of), images_per_file=2)
        rows, store = export(tmp_path, **of), reader(tmp_path / "store", of=recipe(**of))
        found = [[row[n] for n in ("original_height", "original_width", "crop_top", "crop_left")] for row in rows]
        assert found == store.latents(np.arange(5), 0).sizes.tolist()
        assert found != store.latents(np.arange(5), 1).sizes.tolist()

    def test_row_groups_are_sample_files(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        export(tmp_path)
        assert pq.ParquetFile(tmp_path / "table.parquet").num_row_groups == len(reader(tmp_path / "store").entries) > 1

    def test_a_store_without_samples_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="has no samples yet; run precompute"):
            export(tmp_path)
        assert not (tmp_path / "table.parquet").exists()


class TestImport:
    def test_what_was_exported_changes_nothing(self, photos: Path, tmp_path: Path) -> None:
        generation = update(tmp_path / "store", ImageFolder(photos)).generation
        counts = bring(tmp_path, export(tmp_path))
        assert counts == Imported(changed=0, same=23, absent=0)
        assert reader(tmp_path / "store").generation == generation

    @pytest.mark.parametrize("by", ["key", "image"])
    @pytest.mark.parametrize("row_group_size", [3, 100])
    def test_captions_are_replaced_by_those_of_the_table(
        self, by: str, row_group_size: int, photos: Path, tmp_path: Path
    ) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        latents = {path.name: path.read_bytes() for path in (tmp_path / "store").rglob("latents/*")}
        before = captions(tmp_path)
        rows = [
            {"split": "train", by: row[by], "captions": [f"new {Path(row['name']).stem}", "second"]}
            for row in export(tmp_path)
            if Path(row["name"]).stem in ("001", "004", "020")
        ]
        counts = bring(tmp_path, rows[::-1], row_group_size=row_group_size)
        assert counts == Imported(changed=3, same=0, absent=20)
        assert captions(tmp_path) == before | {name: [f"new {name}", "second"] for name in ("001", "004", "020")}
        assert latents == {path.name: path.read_bytes() for path in (tmp_path / "store").rglob("latents/*")}
        assert reader(tmp_path / "store").generation.number == 2

    def test_a_string_is_one_caption(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        rows = [{"split": "train", "key": row["key"], "captions": " hello "} for row in export(tmp_path)]
        assert bring(tmp_path, rows).changed == 23
        assert set(map(tuple, captions(tmp_path).values())) == {("hello",)}

    def test_splits_are_apart(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", {"train": ImageFolder(photos), "val": ImageFolder(photos)})
        rows = [{**row, "captions": ["held out"]} for row in export(tmp_path) if row["split"] == "val"]
        assert bring(tmp_path, rows) == Imported(changed=23, same=0, absent=23)
        assert set(map(tuple, captions(tmp_path, "val").values())) == {("held out",)}
        assert captions(tmp_path)["004"] == ["one caption", "and another"]

    def test_they_stay_although_the_tokenizers_change(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        bring(tmp_path, [{**row, "captions": ["imported"]} for row in export(tmp_path)])
        shout = Tokenizing(lambda texts: tokenize([text.upper() for text in texts]), "upper")
        assert update(tmp_path / "store", ImageFolder(photos), tokenizing=shout).counts.kept == 23
        store = reader(tmp_path / "store")
        assert all(store.captions(i) == ["imported"] for i in range(23))
        ids = store.token_ids(np.arange(23), np.zeros(23, int))["text_encoder"]
        assert torch.equal(ids, tokenize(["IMPORTED"] * 23)["text_encoder"])

    def test_they_stay_when_a_sample_changes_its_split(self, photos: Path, tmp_path: Path) -> None:
        source = ImageFolder(photos)
        halves = {"train": SourceSubset(source, range(3, 23)), "val": SourceSubset(source, range(3))}
        update(tmp_path / "store", halves)
        rows = [{**row, "captions": [f"imported {Path(row['name']).stem}"]} for row in export(tmp_path)]
        bring(tmp_path, rows)
        halves = {"train": SourceSubset(source, [0, *range(5, 23)]), "val": SourceSubset(source, [1, 2, 3, 4])}
        ran = update(tmp_path / "store", halves)
        assert (ran.counts.encoded, ran.counts.moved) == (0, 3)
        found = captions(tmp_path) | captions(tmp_path, "val")
        assert found == {f"{i:03}": [f"imported {i:03}"] for i in range(23)}
        update(tmp_path / "store", source)  # nothing is held out any more
        assert captions(tmp_path) == found

    def test_precompute_keeps_them_until_the_sample_changes(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        bring(tmp_path, [{**row, "captions": ["imported"]} for row in export(tmp_path)])
        (photos / "003.txt").write_text("a new caption in the data")
        write_picture(photos, "new", colour=900)
        (photos / "022.png").unlink()
        ran = update(tmp_path / "store", ImageFolder(photos))
        found = captions(tmp_path)
        assert (ran.counts.kept, ran.counts.added, ran.counts.removed) == (21, 2, 2)
        assert found.pop("003") == ["a new caption in the data"] and found.pop("new") == ["picture new"]
        assert len(found) == 21 and set(map(tuple, found.values())) == {("imported",)}

    def test_they_stay_when_latents_are_encoded_again(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        bring(tmp_path, [{**row, "captions": ["imported"]} for row in export(tmp_path)])
        next((tmp_path / "store").rglob("latents/*.safetensors")).unlink()  # as verify does with a damaged one
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert ran.counts.encoded > 0 and ran.counts.moved == 0
        assert set(map(tuple, captions(tmp_path).values())) == {("imported",)}

    Rows = list[dict[str, Any]]
    REFUSALS: dict[str, tuple[Callable[[Rows], Rows], str]] = {
        "no caption": (
            lambda rows: [*rows[:5], {**rows[5], "captions": [" "]}],
            "has no caption for key .*keep theirs",
        ),
        "null": (lambda rows: [{**rows[0], "captions": None}, *rows[1:]], "has no caption for key"),
        "unknown rows": (lambda rows: [*rows, {**rows[0], "key": "ab" * 16}], "1 of 24 rows of .* are of no sample"),
        "twice": (lambda rows: [*rows, rows[3]], "has two rows of one key"),
        "another split": (lambda rows: [*rows, {**rows[3], "split": "test"}], "has rows of other splits"),
        "no hash": (lambda rows: [{**rows[0], "key": "zebra"}], "has key='zebra'.*32 hexadecimal"),
        "no captions": (lambda rows: [{"split": "train", "key": row["key"]} for row in rows], "no column captions"),
        "no key": (lambda rows: [{"split": "train", "captions": "a"} for _ in rows], "no column key or image"),
    }

    def test_tables_that_do_not_fit_are_refused(self, photos: Path, tmp_path: Path) -> None:
        update(tmp_path / "store", ImageFolder(photos))
        rows = export(tmp_path)
        for change, words in self.REFUSALS.values():
            with pytest.raises(UsageError, match=words):
                bring(tmp_path, change(rows))
            for path in (tmp_path / "scratch").iterdir():
                path.unlink()
        with pytest.raises(UsageError, match="other tokenizers.*write the model="):
            bring(tmp_path, rows, tokenizers="others")
        (tmp_path / "new.parquet").write_bytes(b"no table")
        with pytest.raises(UsageError, match="cannot be read"):
            store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
            CaptionImport(store, tmp_path / "new.parquet", Tokenizing(tokenize, "bytes"), tmp_path / "scratch").run()
        assert reader(tmp_path / "store").generation.number == 1
