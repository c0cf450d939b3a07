"""Latent stores in an object store: what they hold is what a local one holds, whatever fails on the way."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from locations import opened, refusal
from s3_server import Fault, S3Server
from sd_lightning._errors import UsageError
from sd_lightning.data.builders import latents_data
from sd_lightning.data.loading import LookAhead
from sd_lightning.data.sources import latents as latents_source
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.latents import choose_recipe
from sd_lightning.data.store import reader as reader_module
from sd_lightning.data.store.layout import LatentStore
from sd_lightning.data.store.upkeep import Pruning, broken_files
from sd_lightning.storage import lease, object_store
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.location import Location
from small_store import (
    Ran,
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
from square_data import Recorder, trainer

SLOW_DOWN = {"status": "503 Slow Down", "code": "SlowDown"}
EXPIRED = {"status": "400 Bad Request", "code": "ExpiredToken"}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "WAITS", (0.0,) * len(object_store.WAITS))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "photos", 23)


@pytest.fixture
def far(s3: S3Server) -> Location:
    return opened("s3://bucket/store", "store")


def contents(root: Location) -> dict[str, bytes]:
    return {entry.name: root.read(entry.name) for entry in root.entries()}


def cached(tmp_path: Path, root: Location, split: str = "train") -> Any:
    return reader(root, split, cache=FileCache(tmp_path / "cache", 10**9))


def latents_of(root: Location) -> LatentStore:
    return LatentStore(root, recipe())


class TestJob:
    def test_it_writes_what_it_writes_locally_and_later_only_what_is_new(self, far, photos, tmp_path):
        update(tmp_path / "near", ImageFolder(photos))
        update(far, ImageFolder(photos))
        near = opened(str(tmp_path / "near"), "store")
        assert contents(far) == contents(near)
        assert same(held(cached(tmp_path, far)), expected(photos))
        assert choose_recipe(far, recipe=None, resolution=None) == recipe()
        write_picture(photos, "new", colour=999)
        (photos / "003.png").unlink()
        ran = update(far, ImageFolder(photos))
        assert ran.counts.encoded == 1 and ran.counts.kept == 22 and ran.counts.removed == 1
        assert same(held(cached(tmp_path, far)), expected(photos))

    def test_prune_and_verify(self, far, photos, tmp_path):
        update(far, ImageFolder(photos))
        for i in range(0, 23, 3):
            (photos / f"{i:03}.png").unlink()
        update(far, ImageFolder(photos))
        scratch = iter(range(100))

        def folder() -> Path:
            path = tmp_path / f"scratch-{next(scratch)}"
            path.mkdir()
            return path

        before = contents(far)
        told = Pruning(latents_of(far), folder())
        assert told.unused.freed > 0 and contents(far) == before
        told.run()
        assert sum(map(len, contents(far).values())) < sum(map(len, before.values()))
        assert same(held(cached(tmp_path, far)), expected(photos))
        assert not list(broken_files(latents_of(far), folder()))
        broken = next(entry.name for entry in far.entries() if "/latents/" in entry.name)
        data = bytearray(far.read(broken))
        data[-5] ^= 1
        far.replace(broken, bytes(data))
        assert [broken.endswith(path) for path, _ in broken_files(latents_of(far), folder())] == [True]

    @pytest.mark.parametrize(
        "faults",
        [
            [("PUT", "", SLOW_DOWN), ("GET", "", SLOW_DOWN), ("HEAD", "", SLOW_DOWN)],
            [("PUT", "", {"lost": True}), ("GET", "", {"cut": 20})],
            [("PUT", "generations", {"lost": True}), ("PUT", "", {"delay": 0.1}), ("GET", "", {"delay": 0.1})],
            [("POST", "", {"lost": True}), ("PUT", "partNumber", {"cut": 0}), ("GET", "safetensors", {"cut": 400})],
        ],
        ids=["503", "killed connections", "slow", "parts"],
    )
    def test_after_faults_nothing_is_lost_or_twice(self, s3, far, photos, tmp_path, monkeypatch, faults):
        update(tmp_path / "near", ImageFolder(photos))
        if faults[0][0] == "POST":
            monkeypatch.setattr(object_store, "PART_BYTES", 300)
        for method, part, fault in faults:
            s3.fail(method, part, times=2, **fault)
        ran = update(far, ImageFolder(photos))
        assert ran.counts.encoded == 23
        assert same(held(cached(tmp_path, far)), expected(photos))
        assert all(fault.seen for fault in s3.faults)
        assert contents(far) == contents(opened(str(tmp_path / "near"), "store"))

    def test_a_credential_that_expires_in_the_middle(self, s3, far, photos, monkeypatch, tmp_path):
        written = [0]

        def later(request: Any) -> bool:
            written[0] += request.method == "PUT" and "/latents/" in request.path
            return written[0] > 3

        s3.faults.append(Fault(later, **EXPIRED))
        refusal(
            lambda: update(far, ImageFolder(photos)),
            *("store=s3://bucket/store", "cannot create", "credentials have expired", "run the same command again"),
        )
        s3.reset()
        there = {entry.name for entry in far.entries() if "/latents/" in entry.name}
        assert len(there) == 3
        ran = update(far, ImageFolder(photos))
        assert ran.counts.encoded == 23 - 10  # those three files held a portion
        assert same(held(cached(tmp_path, far)), expected(photos))


class TestTwoJobs:
    def test_of_two_that_race_for_a_generation_one_wins(self, far, photos, tmp_path, monkeypatch):
        monkeypatch.setattr(LatentStore, "locked", lambda self: nullcontext())
        both, commit = threading.Barrier(2), LatentStore.commit

        def together(self: LatentStore, generation: Any) -> None:
            both.wait(20)
            commit(self, generation)

        monkeypatch.setattr(LatentStore, "commit", together)
        results: list[Ran | UsageError] = []

        def run() -> None:
            try:
                results.append(update(far, ImageFolder(photos)))
            except UsageError as error:
                results.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (winner,) = (each for each in results if isinstance(each, Ran))
        (loser,) = (each for each in results if isinstance(each, UsageError))
        assert "another precompute job has committed generation 1" in str(loser) and winner.generation.number == 1
        assert same(held(cached(tmp_path, far)), expected(photos))

    def test_a_living_job_keeps_others_out_and_a_dead_one_does_not(self, far, photos, monkeypatch):
        folder = latents_of(far).folder
        monkeypatch.setattr(lease, "BEAT", 0.05)
        with latents_of(far).locked():
            first = json.loads(folder.read("job.json"))
            time.sleep(0.5)
            held = json.loads(folder.read("job.json"))
            assert held["time"] > first["time"]
        assert folder.size("job.json") is None
        held |= {"host": "elsewhere", "machine": "other"}
        folder.create("job.json", json.dumps(held).encode())
        refusal(lambda: update(far, ImageFolder(photos)), "another precompute job", "elsewhere", "job.json")
        monkeypatch.setattr(lease, "LOOK", 0.05)
        folder.replace("job.json", json.dumps({**held, "time": time.time() - 700}).encode())
        update(far, ImageFolder(photos))
        assert folder.size("job.json") is None

    def test_a_sign_of_life_that_fails_does_not_end_them(self, s3, far, monkeypatch, caplog):
        monkeypatch.setattr(lease, "BEAT", 0.02)
        folder = latents_of(far).folder
        with latents_of(far).locked():
            begin = json.loads(folder.read("job.json"))["time"]
            fault = s3.fail("PUT", "job.json", times=2, **EXPIRED)
            until = time.monotonic() + 10
            while json.loads(folder.read("job.json"))["time"] == begin and time.monotonic() < until:
                time.sleep(0.02)
            assert fault.seen == 2 and json.loads(folder.read("job.json"))["time"] > begin
        assert "credentials have expired" in caplog.text


WINDOW, PER_FILE, NUM, BATCH = 5, 4, 160, 4


@pytest.fixture(scope="module")
def near_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local store of 40 sample files with a latent file each."""
    folder = tmp_path_factory.mktemp("near")
    photos = write_pictures(folder / "photos", NUM)
    sizes = {"images_per_file": PER_FILE, "samples_per_file": PER_FILE}
    update(folder / "store", ImageFolder(photos), **sizes, portion=1000)
    assert len(list((folder / "store").rglob("samples/*"))) == NUM // PER_FILE
    return folder / "store"


@pytest.fixture
def stored(near_store: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that training reads, of that store in the bucket."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    monkeypatch.setattr(latents_source, "_WINDOW", WINDOW)
    backend, total = s3_backends[DEFAULT_ACCOUNT_ID]["aws"], 0
    for path in near_store.rglob("*.*"):
        backend.put_object("bucket", f"store/{path.relative_to(near_store).as_posix()}", path.read_bytes())
        total += path.stat().st_size if path.parent.name in ("latents", "samples") else 0
    return total


class Watching(pl.Callback):
    """Notes the bytes served in each epoch, and the most that the cache held."""

    def __init__(self, server: S3Server, cache: Path) -> None:
        self.server, self.cache = server, cache
        self.epochs: list[int] = []
        self.most = self.most_deleted = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.server.body_bytes = 0

    def on_train_batch_end(self, *_: Any) -> None:
        sizes = []
        for entry in os.scandir(self.cache):
            if not entry.name.startswith((".fetching", ".lock")):
                with suppress(FileNotFoundError):
                    sizes.append(entry.stat().st_size)
        self.most = max(self.most, sum(sizes))
        self.most_deleted = max(self.most_deleted, deleted_but_open(self.cache))

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs.append(self.server.body_bytes)


def deleted_but_open(folder: Path) -> int:
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
                status = os.fstat(int(fd))
                total += status.st_size if status.st_nlink == 0 else 0
        except OSError:
            pass
    return total


def data_of(store: str | Path, cache: Path, max_bytes: float, *, num_workers: int = 0) -> Any:
    options = {"batch_size": BATCH, "num_workers": num_workers, "proportion_empty_prompts": 0.3}
    return latents_data(str(store), cache_dir=str(cache), cache_gb=max_bytes / 1e9, **options)


def recorder() -> Recorder:
    made = Recorder()
    made.latent_diffusion.tokenize = tokenize
    return made


class TestReading:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_an_epoch_is_served_once_and_holds_what_a_local_store_gives(
        self, s3, stored, near_store, tmp_path, num_workers, monkeypatch
    ):
        monkeypatch.setattr(reader_module, "_SAMPLE_FILES", WINDOW)
        steps, cache = 2 * NUM // BATCH, 3 * WINDOW * stored // (NUM // PER_FILE)
        near, far = recorder(), recorder()
        trainer(steps).fit(near, data_of(near_store, tmp_path / "unused", 1e9))
        watching = Watching(s3, tmp_path / "cache")
        data = data_of("s3://bucket/store", tmp_path / "cache", cache, num_workers=num_workers)
        trainer(steps, callbacks=[watching]).fit(far, data)
        assert far.steps == near.steps
        assert sorted(index for step in far.steps[: steps // 2] for _, index, _ in step) == list(range(NUM))
        assert max(watching.epochs) <= 1.05 * stored and len(watching.epochs) == 2
        assert 0 < watching.most <= cache
        assert watching.most_deleted <= cache / 3  # readers close what is evicted when they open the next file

    def test_files_are_fetched_before_they_are_read(self, s3, stored, tmp_path):
        data, module = data_of("s3://bucket/store", tmp_path / "cache", 1e9), recorder()

        class Waiting(pl.Callback):
            waited = False

            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                if trainer.global_step == 2:
                    self.waited = settled(lambda: s3.count("GET"))
                    assert s3.count("GET", "/latents/") >= NUM // PER_FILE  # more where a request was repeated
                    self.requests = s3.count("GET")
                elif trainer.global_step == 5:
                    assert self.requests == s3.count("GET"), "a batch fetched its own files"
                    trainer.should_stop = True

        waiting = Waiting()
        assert data.source_train.fetched_ahead == int(0.75 * WINDOW * PER_FILE)
        data.source_train.fetched_ahead = NUM
        trainer(5, callbacks=[waiting]).fit(module, data)
        assert waiting.waited

    def test_faults_while_reading(self, s3, stored, near_store, tmp_path):
        near, far = recorder(), recorder()
        trainer(20).fit(near, data_of(near_store, tmp_path / "unused", 1e9))
        data = data_of("s3://bucket/store", tmp_path / "cache", 1e9)
        # One request may get all of them but the delays, and is tried six times.
        for times, fault in ((2, SLOW_DOWN), (2, {"cut": 300}), (1, {"lost": True}), (4, {"delay": 0.2})):
            s3.fail("GET", times=times, **fault)
        trainer(20).fit(far, data)
        assert far.steps == near.steps and all(fault.seen == fault.times for fault in s3.faults)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_file_that_is_denied_ends_the_run_with_its_name(self, s3, stored, tmp_path, num_workers):
        data = data_of("s3://bucket/store", tmp_path / "cache", 1e9, num_workers=num_workers)
        name = data.source_train.entries[17].name
        s3.fail("GET", name, status="403 Forbidden", code="AccessDenied")
        s3.fail("HEAD", name, status="403 Forbidden", code="AccessDenied")
        with pytest.raises(Exception, match=rf"cannot .*{name}.*access is denied"):
            trainer(100).fit(recorder(), data)

    def test_token_ids_of_more_files_than_may_be_open(self, near_store, monkeypatch):
        index = np.random.default_rng(0).permutation(NUM)
        whole = reader(near_store)
        wanted, ids = whole.read_latents(index), whole.token_ids(index, np.zeros(NUM, int))
        for name, limit in (("_MOST_OPEN", 3), ("_MOST_HANDLES", 7)):
            with monkeypatch.context() as patch:
                patch.setattr(reader_module, name, limit)
                few = reader(near_store)
                found = few.read_latents(index)
                assert torch.equal(found.latents, wanted.latents) and torch.equal(found.sizes, wanted.sizes)
                assert torch.equal(few.token_ids(index, np.zeros(NUM, int))["text_encoder"], ids["text_encoder"])
                assert few.num_captions(index) == [1] * NUM
                assert len(few._files._open) <= limit + 1

    def test_a_cache_smaller_than_a_file_is_refused_at_the_start(self, stored, tmp_path):
        refusal(lambda: data_of("s3://bucket/store", tmp_path / "cache", 1000), "data.cache_gb=1e-06", "at least one")

    def test_a_cache_smaller_than_two_windows_is_told(self, stored, tmp_path, caplog):
        window = WINDOW * stored // (NUM // PER_FILE)
        for times, words in ((1.5, "holds 1.5 times the 5 files"), (0.5, "holds 0.5 times the 5 files")):
            caplog.clear()
            data = data_of("s3://bucket/store", tmp_path / "cache", times * window)
            assert data.source_train.fetched_ahead == int(max(times - 1, 0) * WINDOW * PER_FILE)
            assert words in caplog.text and "data.cache_gb" in caplog.text
        caplog.clear()
        data = data_of("s3://bucket/store", tmp_path / "cache", 2.1 * window)
        assert data.source_train.fetched_ahead and not caplog.text

    def test_text_embeddings_count_where_the_cache_is_compared_with_a_window(self, stored, tmp_path, caplog):
        window = WINDOW * stored // (NUM // PER_FILE)
        data = data_of("s3://bucket/store", tmp_path / "cache", 3 * window)
        per_file = stored // (NUM // PER_FILE)
        data.source_train._texts = SimpleNamespace(bytes_of_file=lambda number: per_file)
        assert data.source_train.fetched_ahead == int(0.5 * WINDOW * PER_FILE)
        assert "holds 1.5 times the 5 files" in caplog.text

    def test_buckets_share_the_window(self, tmp_path, monkeypatch):
        """Their batches take turns, so that the files of all windows have to be on this machine at the same time."""
        monkeypatch.setattr(latents_source, "_WINDOW", 10)
        photos = write_pictures(tmp_path / "photos", 60)
        for i in range(12):
            Image.new("RGB", (16, 8), (i, 0, 0)).save(photos / f"{i:03}.png")
        of = recipe(shapes=((8, 8), (8, 16)))
        update(tmp_path / "store", ImageFolder(photos), of=of, images_per_file=2, samples_per_file=2, portion=1000)
        store = reader(tmp_path / "store", of=of)
        windows = {b.shape: b.locality.window for b in source_of(store).buckets}
        assert windows == {(8, 8): 8, (8, 16): 2}


def settled(count: Callable[[], int]) -> bool:
    """Wait until a count stays the same for a moment."""
    for _ in range(100):
        before = count()
        time.sleep(0.3)
        if count() == before:
            return True
    return False


class TestLookAhead:
    @staticmethod
    def _running(fetch: Callable[[int], None]) -> Any:
        ahead = LookAhead(lambda samples: samples.tolist(), fetch, num_batches=2)
        return ahead.running(lambda number: np.array([number]), 0, 10)

    def test_it_is_some_batches_ahead_and_never_more(self):
        fetched: list[int] = []
        with self._running(fetched.append) as move:
            for number in range(8):
                move(number)
                assert settled_to(lambda: sorted(fetched), list(range(number + 3)))
                time.sleep(0.02)
                assert sorted(fetched) == list(range(number + 3))
        assert all(not thread.name.startswith("look-ahead") or settled_to(thread.is_alive, False) for thread in alive())

    def test_an_error_is_told_and_the_next_files_are_fetched(self, caplog):
        fetched: list[int] = []

        def fetch(number: int) -> None:
            if number == 1:
                raise UsageError("the store is away")
            fetched.append(number)

        with self._running(fetch) as move:
            for number in range(10):
                move(number)
                time.sleep(0.01)
            assert settled_to(lambda: sorted(fetched), [0, *range(2, 10)])
        assert caplog.text.count("the store is away") == 1

    def test_the_end_does_not_wait_for_a_fetch(self):
        hanging = threading.Event()
        with self._running(lambda number: bool(hanging.wait(20))):
            begin = time.monotonic()
        assert time.monotonic() - begin < 5
        hanging.set()


def alive() -> Iterator[threading.Thread]:
    return iter(threading.enumerate())


def settled_to(value: Callable[[], Any], wanted: Any) -> bool:
    until = time.monotonic() + 10
    while value() != wanted and time.monotonic() < until:
        time.sleep(0.002)
    return value() == wanted
