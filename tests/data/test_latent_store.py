"""The latent store: what it holds is what encoding anew would give, whatever has changed, and whoever was killed."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store import job
from sd_lightning.data.store.files import StoreFile
from sd_lightning.data.store.index import ROW, HashTable, RowIndex, rows_of
from sd_lightning.data.store.job import rows_per_file
from sd_lightning.data.store.layout import LATENTS, LatentStore, Recipe, network_hash, path_of, recipes
from sd_lightning.data.store.texts import Tokenizing
from sd_lightning.data.store.upkeep import Pruning, broken_files
from sd_lightning.data.transform import place, to_model_range
from sd_lightning.storage import lease
from sd_lightning.storage.object_store import open_location
from small_store import (
    MeanEncoder,
    expected,
    held,
    reader,
    recipe,
    same,
    source_of,
    tokenize,
    update,
    write_picture,
    write_pictures,
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "photos", 23)


def files(store: Path) -> dict[str, bytes]:
    """All files of a store but the generations, which are numbered by job."""
    found = sorted(path for path in store.rglob("*") if path.is_file() and path.parent.name != "generations")
    return {str(path.relative_to(store)): path.read_bytes() for path in found}


def prune(store: Path, scratch: Path, *, dry_run: bool = False) -> Pruning:
    scratch.mkdir(exist_ok=True)
    pruning = Pruning(LatentStore(open_location(store, key="store"), recipe()), scratch)
    if not dry_run:
        pruning.run()
    return pruning


class TestContents:
    def test_holds_latents_captions_names_and_token_ids(self, photos, tmp_path):
        ran = update(tmp_path / "store", ImageFolder(photos))
        store = reader(tmp_path / "store")
        assert len(store) == 23 and ran.counts.encoded == 23
        assert same(held(store), expected(photos))
        ids = store.token_ids(np.array([22, 3, 3]), np.zeros(3, int))
        captions = [store.captions(i)[0] for i in (22, 3, 3)]
        assert torch.equal(ids["text_encoder"], tokenize(captions)["text_encoder"])

    def test_rows_come_in_any_order_and_again(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        store = reader(tmp_path / "store")
        everything = store.read_latents(np.arange(23))
        in_order, sizes = everything.latents, everything.sizes
        index = np.random.default_rng(0).integers(0, 23, 200)
        some = store.read_latents(index)
        assert torch.equal(some.latents, in_order[index]) and torch.equal(some.sizes, sizes[index])
        assert sizes.tolist() == [[8, 8, 0, 0]] * 23

    def test_identical_images_share_latents_but_not_captions(self, photos, tmp_path):
        write_picture(photos, "twin", colour=5, caption="another caption of the same picture")
        ran = update(tmp_path / "store", ImageFolder(photos), portion=7)
        store = reader(tmp_path / "store")
        assert ran.counts.encoded == 23 and len(store) == 24
        by_name = {Path(store.name(i)).stem: i for i in range(24)}
        assert store.image_hash(by_name["twin"]) == store.image_hash(by_name["005"])
        assert store.captions(by_name["twin"]) == ["another caption of the same picture"]
        assert store.captions(by_name["005"]) == ["picture 005"]

    def test_splits_share_files_and_are_apart(self, photos, tmp_path):
        other = write_pictures(tmp_path / "other", 3)  # the same pictures as the first three
        ran = update(tmp_path / "store", {"train": ImageFolder(photos), "val": ImageFolder(other)})
        assert ran.counts.encoded == 23
        assert same(held(reader(tmp_path / "store", "val")), expected(other))
        assert same(held(reader(tmp_path / "store")), expected(photos))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_stored_types(self, photos, tmp_path, dtype):
        of = recipe(dtype=dtype)
        update(tmp_path / "store", ImageFolder(photos), of=of)
        latents = reader(tmp_path / "store", of=of).read_latents(np.arange(23)).latents
        assert latents.dtype == getattr(torch, dtype)
        exact = np.stack([moments for moments, _ in expected(photos).values()])
        assert np.allclose(
            latents.float().numpy(), exact, atol={"float16": 2e-3, "bfloat16": 2e-2, "float32": 0}[dtype]
        )

    def test_variants_differ_and_depend_on_nothing_but_the_image(self, tmp_path):
        for folder, names in (("one", ("a", "b")), ("two", ("z", "b", "k"))):
            for name in names:
                path = write_picture(tmp_path / folder, name, colour=1)
                pixels = np.random.default_rng(ord(name)).integers(0, 255, (12, 20, 3), np.uint8)
                from PIL import Image

                Image.fromarray(pixels).save(path)
        of = recipe(variants=4, crop="random", flip=True)
        found = []
        for folder in ("one", "two"):
            update(tmp_path / f"store-{folder}", ImageFolder(tmp_path / folder), of=of, images_per_file=2)
            store = reader(tmp_path / f"store-{folder}", of=of)
            index = next(i for i in range(len(store)) if Path(store.name(i)).stem == "b")
            found.append(store.read_latents(np.full(4, index), np.arange(4)))
        assert torch.equal(found[0].latents, found[1].latents) and torch.equal(found[0].sizes, found[1].sizes)
        assert len({row.numpy().tobytes() for row in found[0].latents}) == 4

    def test_a_draw_is_half_the_bytes_and_always_the_same(self, photos, tmp_path):
        of = recipe(latents="draw")
        update(tmp_path / "store", ImageFolder(photos), of=of)
        latents = reader(tmp_path / "store", of=of).read_latents(np.arange(23)).latents
        moments = _moments(photos, tmp_path)
        assert latents.shape[1] * 2 == moments.shape[1]
        update(tmp_path / "again", ImageFolder(photos), of=of)
        assert torch.equal(latents, reader(tmp_path / "again", of=of).read_latents(np.arange(23)).latents)


def _moments(photos, tmp_path):
    update(tmp_path / "moments", ImageFolder(photos))
    return reader(tmp_path / "moments").read_latents(np.arange(23)).latents


class TestBuckets:
    SHAPES = ((16, 8), (8, 8), (8, 16))

    def test_images_get_the_nearest_shape_and_files_hold_one(self, tmp_path):
        from PIL import Image

        photos = tmp_path / "photos"
        sizes = [(8, 8), (9, 17), (30, 16), (16, 33), (64, 60), (20, 40), (8, 9)]
        for i, size in enumerate(sizes * 3):
            write_picture(photos, f"{i:02}", colour=i)
            pixels = np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(photos / f"{i:02}.png")
        of = recipe(shapes=self.SHAPES)
        update(tmp_path / "store", ImageFolder(photos), of=of, images_per_file=2, portion=8)
        store = reader(tmp_path / "store", of=of)
        source = source_of(store)
        assert sum(map(len, source.buckets)) == 21 and [b.shape for b in source.buckets] == [*self.SHAPES]
        for bucket in source.buckets:
            index = np.array(bucket.members)
            stored = store.read_latents(index)
            assert stored.latents.shape[1:] == (6, bucket.shape[0] // 4, bucket.shape[1] // 4)
            for i, latents, given in zip(index.tolist(), stored.latents, stored.sizes.tolist()):
                picture = Image.open(store.name(i))
                placed = place(picture, bucket.shape)
                pixels = to_model_range(torch.from_numpy(placed.pixels.copy())[None])
                assert torch.equal(MeanEncoder().encode_moments(pixels)[0], latents)
                assert given == [picture.height, picture.width, *placed.crop_top_left]
                ratios = [abs(np.log(picture.width / picture.height * h / w)) for h, w in self.SHAPES]
                assert self.SHAPES[int(np.argmin(ratios))] == bucket.shape
        with pytest.raises(AssertionError, match="several shapes"):
            store.read_latents(np.arange(21))

    def test_a_changed_shape_moves_the_sample_to_its_bucket_and_the_rest_stays(self, photos, tmp_path):
        from PIL import Image

        of = recipe(shapes=self.SHAPES)
        update(tmp_path / "store", ImageFolder(photos), of=of)
        Image.new("RGB", (32, 16), "red").save(photos / "004.png")
        ran = update(tmp_path / "store", ImageFolder(photos), of=of)
        assert ran.counts.encoded == 1 and ran.counts.kept == 22
        buckets = {b.shape: len(b) for b in source_of(reader(tmp_path / "store", of=of)).buckets}
        assert buckets == {(8, 8): 22, (8, 16): 1}


class TestNeverStale:
    """Each mutation, then one more job: the store holds what a new store would."""

    MUTATIONS = {
        "another picture of the same name": lambda f: write_picture(f, "003", colour=777),
        "one pixel": lambda f: _change_pixel(f / "004.png"),
        "another caption": lambda f: (f / "005.txt").write_text("something else"),
        "a second caption": lambda f: (f / "006.txt").write_text("one\ntwo"),
        "two pictures swapped": lambda f: _swap(f / "007.png", f / "008.png"),
        "two captions swapped": lambda f: _swap(f / "009.txt", f / "010.txt"),
        "a picture removed": lambda f: [(f / f"011.{suffix}").unlink() for suffix in ("png", "txt")],
        "pictures added in the middle": lambda f: [write_picture(f, f"0115{i}", colour=900 + i) for i in range(3)],
        "a picture renamed": lambda f: [os.rename(f / f"012.{s}", f / f"zzz.{s}") for s in ("png", "txt")],
        "another picture with the date and size of the old one": lambda f: _change_pixel(f / "013.png", keep_date=True),
    }

    @pytest.mark.parametrize("name", MUTATIONS)
    def test_after_a_mutation(self, name, photos, tmp_path):
        first = update(tmp_path / "store", ImageFolder(photos))
        self.MUTATIONS[name](photos)
        second = update(tmp_path / "store", ImageFolder(photos))
        assert same(held(reader(tmp_path / "store")), expected(photos))
        assert second.generation.number == first.generation.number + 1
        assert second.counts.encoded <= 3  # only what is new

    def test_all_of_them_one_after_the_other(self, photos, tmp_path):
        for mutate in self.MUTATIONS.values():
            update(tmp_path / "store", ImageFolder(photos))
            mutate(photos)
        update(tmp_path / "store", ImageFolder(photos))
        assert same(held(reader(tmp_path / "store")), expected(photos))

    def test_the_recipe_tells_other_latents_apart(self):
        changes = [
            {},
            {"vae": "1" * 32},
            {"resolution": 16},
            {"crop": "random"},
            {"shapes": ((8, 8), (8, 16))},
            {"flip": True},
            {"flip": True, "variants": 2},
            {"latents": "draw"},
            {"dtype": "float16"},
            {"compute_dtype": "bfloat16"},
            {"family": "Other"},
            {"interpolation": "bicubic"},
            {"code_version": 2},
        ]
        assert len({recipe(**change).fingerprint for change in changes}) == len(changes)
        assert Recipe.from_json(recipe().to_json(), where="here") == recipe()

    def test_the_hash_of_a_vae_sees_every_weight_and_setting(self):
        weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        one = network_hash(weights, {"x": 1, "_version": "1"})
        assert one == network_hash(dict(reversed(weights.items())), {"_version": "2", "x": 1})
        changed = {**weights, "b": torch.tensor([0.0, 0.0, 0.0, 1e-9])}
        others = [(changed, {"x": 1}), (weights, {"x": 2}), ({"a": weights["a"]}, {"x": 1})]
        assert len({one, *(network_hash(*each) for each in others)}) == 4

    def test_other_tokenizers_keep_the_latents(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        shout = Tokenizing(lambda texts: tokenize([text.upper() for text in texts]), "upper")
        ran = update(tmp_path / "store", ImageFolder(photos), tokenizing=shout)
        assert ran.counts.encoded == 0 and ran.counts.kept == 23
        ids = reader(tmp_path / "store").token_ids(np.array([2]), np.zeros(1, int))["text_encoder"]
        assert torch.equal(ids, tokenize(["PICTURE 002"])["text_encoder"])

    def test_nothing_changed_writes_nothing(self, photos, tmp_path):
        first = update(tmp_path / "store", ImageFolder(photos))
        before = files(tmp_path / "store")
        second = update(tmp_path / "store", ImageFolder(photos))
        assert second.generation == first.generation and not second.tasks and files(tmp_path / "store") == before

    def test_an_image_that_changes_while_it_is_encoded_is_refused(self, photos, tmp_path):
        class Changing(ImageFolder):
            def captions(self, index):  # called between the hash and the encoding
                if index == 4:
                    write_picture(photos, "004", colour=999)
                return super().captions(index)

        with pytest.raises(UsageError, match=r"004\.png has changed while it was encoded.*run precompute again"):
            update(tmp_path / "store", Changing(photos))


class TestSameKey:
    class Doubled(ImageFolder):
        """The sample of one index has the key of another."""

        twin, of = 20, 3

        def key(self, index):
            return super().key(self.of if index == self.twin else index)

    @pytest.mark.parametrize("portion", [100, 21])
    def test_in_a_portion_both_samples_are_named(self, photos, tmp_path, portion):
        with pytest.raises(UsageError, match=r"003\.png and .*020\.png have the same key.*list each file once"):
            update(tmp_path / "store", self.Doubled(photos), portion=portion)

    def test_in_two_portions_the_next_job_names_them(self, photos, tmp_path):
        update(tmp_path / "store", self.Doubled(photos), portion=10)
        before = files(tmp_path / "store")
        with pytest.raises(UsageError, match=r"0(03|20)\.png.*020\.png have the same key"):
            update(tmp_path / "store", self.Doubled(photos), portion=10)
        assert files(tmp_path / "store") == before
        update(tmp_path / "store", ImageFolder(photos), portion=10)
        assert same(held(reader(tmp_path / "store")), expected(photos))

    def test_a_second_sample_that_is_added_is_told_at_once(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos), portion=10)
        (photos / "020.txt").write_text("a new caption")
        with pytest.raises(UsageError, match=r"003\.png and .*020\.png have the same key"):
            update(tmp_path / "store", self.Doubled(photos), portion=10)

    def test_the_splits_may_have_the_same_keys(self, photos, tmp_path):
        for _ in range(2):
            ran = update(tmp_path / "store", {"train": ImageFolder(photos), "val": ImageFolder(photos)})
        assert ran.counts.kept == 46


class TestKilled:
    @pytest.mark.parametrize("after", range(11))
    def test_a_job_that_died_after_some_files_is_continued(self, after, photos, tmp_path, monkeypatch):
        update(tmp_path / "undisturbed", ImageFolder(photos))
        self._die_after(after, photos, tmp_path / "store", monkeypatch)
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert files(tmp_path / "store") == files(tmp_path / "undisturbed")
        assert ran.counts.encoded + ran.counts.found <= 23

    def test_what_a_killed_writer_left_is_deleted(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        left = tmp_path / "store" / recipe().fingerprint / "latents" / ".tmp-abc-1234.safetensors"
        left.write_bytes(b"half")
        update(tmp_path / "store", ImageFolder(photos))
        assert not left.exists()

    def test_no_file_that_exists_is_encoded_again(self, photos, tmp_path, monkeypatch):
        self._die_after(3, photos, tmp_path / "store", monkeypatch)
        there = len(list((tmp_path / "store").rglob("latents/*.safetensors")))
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert there and ran.counts.encoded <= 23 - 2 * there

    @staticmethod
    def _die_after(count, photos, store, monkeypatch):
        """A job whose process ends at its `count`-th file."""

        class Killed(BaseException):
            pass

        kind, left = type(open_location(store, key="store")), [count]
        create = kind.create

        def dying(self, name, data):
            if name.startswith(("latents", "samples", "generations")):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return create(self, name, data)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "create", dying)
            with pytest.raises(Killed):
                update(store, ImageFolder(photos))


class TestBadImages:
    def test_broken_images_are_named_and_the_rest_goes_on(self, photos, tmp_path):
        (photos / "002.png").write_bytes(b"no image")
        data = (photos / "009.png").read_bytes()
        (photos / "009.png").write_bytes(data[: len(data) // 2])
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert sorted(Path(name).name for name in ran.bad) == ["002.png", "009.png"]
        assert len(reader(tmp_path / "store")) == 21

    def test_a_mended_image_is_encoded(self, photos, tmp_path):
        (photos / "002.png").write_bytes(b"no image")
        update(tmp_path / "store", ImageFolder(photos))
        write_picture(photos, "002", colour=2)
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert ran.counts.encoded == 1 and not ran.bad
        assert same(held(reader(tmp_path / "store")), expected(photos))

    def test_too_many_end_the_job(self, photos, tmp_path):
        for i in range(5):
            (photos / f"00{i}.png").write_bytes(b"no image")
        with pytest.raises(UsageError, match=r"3 samples cannot be used.*max_bad_fraction=0.1"):
            update(tmp_path / "store", ImageFolder(photos), max_bad_fraction=0.1, portion=100)

    def test_no_usable_image_commits_nothing(self, tmp_path):
        photos = write_pictures(tmp_path / "photos", 3)
        for path in photos.glob("*.png"):
            path.write_bytes(b"no image")
        with pytest.raises(UsageError, match="none of the 3 images can be used.*mend them"):
            update(tmp_path / "store", ImageFolder(photos), max_bad_fraction=1.0)
        assert not list((tmp_path / "store").rglob("generations/*"))


class TestPrune:
    def test_a_dry_run_changes_nothing_and_tells_the_bytes_that_are_freed(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        for i in range(4, 20):
            (photos / f"{i:03}.png").unlink()
        update(tmp_path / "store", ImageFolder(photos))
        before = files(tmp_path / "store")
        told = prune(tmp_path / "store", tmp_path / "scratch", dry_run=True).unused.freed
        assert files(tmp_path / "store") == before and told > 0
        prune(tmp_path / "store", tmp_path / "scratch")
        freed = sum(map(len, before.values())) - sum(map(len, files(tmp_path / "store").values()))
        assert freed > 0.5 * told

    @pytest.mark.parametrize("gone", [range(4, 8), range(0, 23, 3), range(1, 22)], ids=["a file", "rows", "nearly all"])
    def test_what_is_left_is_read_as_before(self, photos, tmp_path, gone):
        update(tmp_path / "store", ImageFolder(photos))
        for i in gone:
            (photos / f"{i:03}.png").unlink()
        update(tmp_path / "store", ImageFolder(photos))
        prune(tmp_path / "store", tmp_path / "scratch")
        assert same(held(reader(tmp_path / "store")), expected(photos))
        assert not prune(tmp_path / "store", tmp_path / "scratch", dry_run=True).unused.files
        ran = update(tmp_path / "store", ImageFolder(photos))  # the files know all that is left
        assert not ran.tasks and ran.counts.kept == len(expected(photos))
        write_picture(photos, f"{next(iter(gone)):03}", colour=next(iter(gone)))
        assert update(tmp_path / "store", ImageFolder(photos)).counts.encoded == 1  # and none that is gone

    def test_without_a_generation_nothing_is_deleted(self, photos, tmp_path, monkeypatch):
        TestKilled._die_after(3, photos, tmp_path / "store", monkeypatch)
        before = files(tmp_path / "store")
        prune(tmp_path / "store", tmp_path / "scratch")
        assert files(tmp_path / "store") == before


class TestVerify:
    @pytest.mark.parametrize("kind", ["latents", "samples"])
    @pytest.mark.parametrize("how", ["truncated", "altered"])
    def test_a_broken_file_is_found_deleted_and_made_again(self, photos, tmp_path, kind, how):
        update(tmp_path / "store", ImageFolder(photos))
        path = sorted((tmp_path / "store").rglob(f"{kind}/*.safetensors"))[1]
        data = bytearray(path.read_bytes())
        if how == "altered":
            data[-20] ^= 1
        path.write_bytes(data[: -100 if how == "truncated" else None])
        store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
        (tmp_path / "scratch").mkdir()
        assert [name for name, _ in broken_files(store, tmp_path / "scratch")] == [f"{kind}/{path.name}"]
        path.unlink()
        update(tmp_path / "store", ImageFolder(photos))
        assert same(held(reader(tmp_path / "store")), expected(photos))
        assert not list(broken_files(store, tmp_path / "scratch"))

    def test_reading_a_truncated_file_names_it_and_the_remedy(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        path = next((tmp_path / "store").rglob("latents/*.safetensors"))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(UsageError, match=rf"{path.name} has .* bytes; expected .* truncated or replaced"):
            held(reader(tmp_path / "store"))

    def test_reading_a_store_that_was_pruned_meanwhile_says_so(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        store = reader(tmp_path / "store")
        shutil.rmtree(next((tmp_path / "store").rglob("latents")))
        with pytest.raises(UsageError, match="is not there; the store was pruned.*resume=auto"):
            store.read_latents(np.arange(3))


class TestTwoJobs:
    def test_a_living_job_keeps_others_out(self, photos, tmp_path):
        store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
        held_by = {"host": "another-machine", "pid": 1, "time": __import__("time").time()}
        store.folder.create("job.json", json.dumps(held_by).encode())
        with pytest.raises(UsageError, match="another precompute job .*another-machine.*wait for it"):
            update(tmp_path / "store", ImageFolder(photos))

    def test_a_dead_job_does_not(self, photos, tmp_path, monkeypatch):
        monkeypatch.setattr(lease, "BEAT", 0.05)  # two of them are waited for
        monkeypatch.setattr(lease, "LOOK", 0.02)
        store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
        store.folder.create("job.json", json.dumps({"host": "another-machine", "pid": 1, "time": 0}).encode())
        update(tmp_path / "store", ImageFolder(photos))
        assert not (tmp_path / "store" / recipe().fingerprint / "job.json").exists()

    def test_a_generation_is_committed_once(self, photos, tmp_path):
        ran = update(tmp_path / "store", ImageFolder(photos))
        store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
        with pytest.raises(UsageError, match="another precompute job has committed generation 1"):
            store.commit(ran.generation)


class TestHashTable:
    def test_finds_what_is_there_and_nothing_else(self, tmp_path):
        random = np.random.default_rng(0)
        hashes = random.integers(0, 256, (5000, 16), np.uint8)
        hashes[1000, :8] = hashes[1, :8]  # the same first half
        blocks = [rows_of(hashes[i : i + 500], i // 500, np.arange(500)) for i in range(0, 5000, 500)]
        table = HashTable(tmp_path / "table", blocks)
        assert len(table) == 5000 and (tmp_path / "table").stat().st_size == 5000 * ROW.itemsize
        file, row = table.find(hashes)
        assert (file * 500 + row == np.arange(5000)).all()
        assert (table.find(random.integers(0, 256, (5000, 16), np.uint8))[0] == -1).all()
        assert table.rows.dtype == ROW and (np.sort(table.rows) == table.rows).all()

    def test_of_equal_hashes_the_first_is_found(self, tmp_path):
        hashes = np.random.default_rng(0).integers(0, 256, (3, 16), np.uint8)
        blocks = [rows_of(hashes[order], file, np.array(order)) for file, order in enumerate([[2, 0], [1, 0, 2]])]
        file, row = HashTable(tmp_path / "table", blocks).find(hashes)
        assert file.tolist() == [0, 1, 0] and row.tolist() == [0, 1, 2]

    def test_an_empty_table(self, tmp_path):
        assert (HashTable(tmp_path / "table", []).find(np.zeros((3, 16), np.uint8))[0] == -1).all()


class TestRowIndex:
    def test_of_two_files_with_an_image_the_smaller_name_counts_and_few_tables_stay(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        folder = next((tmp_path / "store").rglob("latents"))
        smallest = min(folder.iterdir())
        shutil.copy(smallest, folder / f"{'0' * 32}.safetensors")
        store = LatentStore(open_location(tmp_path / "store", key="store"), recipe())
        images = RowIndex(store, store.present(LATENTS), tmp_path, used={smallest.stem})
        for number in range(20):  # portions of two images
            hashes = np.full((2, 16), number, np.uint8)
            hashes[1, 0] = 255
            images.add([(f"new-{number}", 100, hashes)])
        shards, where = images.find(np.full((3, 16), 7, np.uint8))
        assert shards == [("new-7", 100)] and where.tolist() == [[0, 0]] * 3
        assert images.find(np.full((1, 16), 99, np.uint8))[1].tolist() == [[-1, -1]]
        stored = StoreFile(open(smallest, "rb", buffering=0), name="").read("images").numpy()
        shards, where = images.find(stored)
        assert [name for name, _ in shards] == ["0" * 32] and where[:, 1].tolist() == list(range(len(stored)))
        assert images.is_left_over(shards[0]) and not images.is_left_over(("new-7", 100))
        assert len(list(tmp_path.glob("images-*"))) < 7

    def test_images_that_were_gone_and_come_back_are_not_encoded_again(self, photos, tmp_path):
        update(tmp_path / "store", ImageFolder(photos))
        for i in range(3, 9):
            (photos / f"{i:03}.png").unlink()
        update(tmp_path / "store", ImageFolder(photos))
        write_pictures(photos, 9)
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert (ran.counts.encoded, ran.counts.found, ran.counts.added) == (0, 4, 6), (
            "nothing else was in one of the files"
        )
        assert same(held(reader(tmp_path / "store")), expected(photos))

    def test_after_a_kill_images_are_found_although_the_data_changed(self, photos, tmp_path, monkeypatch):
        TestKilled._die_after(5, photos, tmp_path / "store", monkeypatch)
        there = len(list((tmp_path / "store").rglob("latents/*.safetensors")))
        write_picture(photos, "0", colour=999)  # the first one now: all later files begin elsewhere
        ran = update(tmp_path / "store", ImageFolder(photos))
        assert there and ran.counts.found >= 2 * there and ran.counts.encoded + ran.counts.found == 24
        assert same(held(reader(tmp_path / "store")), expected(photos))

    def test_after_a_kill_files_are_the_same_although_images_are_broken(self, photos, tmp_path, monkeypatch):
        (photos / "001.png").write_bytes(b"no image")
        update(tmp_path / "undisturbed", ImageFolder(photos))
        for count in (2, 4, 6):
            TestKilled._die_after(count, photos, tmp_path / "store", monkeypatch)
            assert list(update(tmp_path / "store", ImageFolder(photos)).bad) == [str(photos / "001.png")]
            assert files(tmp_path / "store") == files(tmp_path / "undisturbed")
            shutil.rmtree(tmp_path / "store")


def test_the_recipes_of_a_store_are_listed(photos, tmp_path):
    for of in (recipe(), recipe(dtype="float16")):
        update(tmp_path / "store", ImageFolder(photos), of=of)
    root = open_location(tmp_path / "store", key="store")
    assert {each.fingerprint for each in recipes(root)} == {recipe().fingerprint, recipe(dtype="float16").fingerprint}


def test_infinite_latents_are_refused_with_the_remedy(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(MeanEncoder, "encode_moments", lambda self, pixels: torch.full((len(pixels), 6, 2, 2), 1e6))
    with pytest.raises(UsageError, match="not finite in dtype=float16; write dtype=bfloat16"):
        update(tmp_path / "store", ImageFolder(photos), of=recipe(dtype="float16"))
    assert not list((tmp_path / "store").rglob(path_of(LATENTS, "*")))


def _change_pixel(path: Path, *, keep_date: bool = False) -> None:
    from PIL import Image

    status = path.stat()
    image = Image.open(path).convert("RGB")
    red, green, blue = image.getpixel((3, 4))
    image.putpixel((3, 4), (255 - red, green, blue))
    image.save(path, compress_level=0) if keep_date else image.save(path)
    if keep_date:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


@pytest.mark.parametrize(
    ("num_samples", "bytes_per_image", "expected"),
    [
        (20, 16_384, (64, 8192)),
        (10_000, 65_536, (192, 7812)),  # 53 latent files rather than 6
        (10**9, 16_384, (7812, 8192)),  # 128 MB
        (10**9, 262_144, (488, 1952)),  # 128 MB; a sample file has 512 MB
        (10**9, 2 * 10**9, (1, 4)),
    ],
)
def test_files_are_small_enough_for_all_workers_and_for_windows(
    num_samples: int, bytes_per_image: int, expected: tuple[int, int]
) -> None:
    assert rows_per_file(num_samples, bytes_per_image, 128) == expected


class TestLookingAhead:
    """Samples of the next portion are read and hashed while images of this one are encoded."""

    def test_the_next_portion_is_looked_at_meanwhile(self, photos, tmp_path):
        class Watched(ImageFolder):
            next_is_read, first_is_hashed, overlapped = threading.Event(), False, False

            def content(self, index):
                if index == 0:
                    if self.first_is_hashed:  # read again, to be encoded
                        self.overlapped = self.next_is_read.wait(10)
                    self.first_is_hashed = True
                elif index == 10:
                    self.next_is_read.set()
                return super().content(index)

        source = Watched(photos)
        update(tmp_path / "store", source, portion=10)
        assert source.overlapped
        update(tmp_path / "plain", ImageFolder(photos), portion=10)
        assert files(tmp_path / "store") == files(tmp_path / "plain")

    def test_a_failed_job_does_not_look_on(self, tmp_path, monkeypatch):
        class Failing(ImageFolder):
            seen: ClassVar[list[int]] = []

            def content(self, index):
                if index in self.seen:
                    raise UsageError("the disk is on fire")
                self.seen.append(index)
                if index >= 40:
                    time.sleep(0.05)
                return super().content(index)

        monkeypatch.setattr(job, "_READ_AT_ONCE", 1)
        with pytest.raises(UsageError, match="on fire"):
            update(tmp_path / "store", Failing(write_pictures(tmp_path / "photos", 80)), portion=40)
        assert len(Failing.seen) < 80
