"""A bounded cache fetches each file once per machine, forgets the least recently used, and survives kills."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from s3_server import S3Server
from sd_lightning import UsageError
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.location import LocalFolder, Location
from sd_lightning.storage.object_store import open_location

SIZE = 1000


class Remote(LocalFolder):
    """A local folder that says nothing of its paths, as an object store; fetches are counted in a file."""

    def path(self, name: str) -> None:  # type: ignore[override]
        return None

    def fetch(self, name: str, path: Path) -> None:
        super().fetch(name, path)
        with open(self.folder / ".fetched", "a") as file:
            file.write(f"{name}\n")

    def fetched(self) -> list[str]:
        return (self.folder / ".fetched").read_text().split()


@pytest.fixture
def store(tmp_path: Path) -> Remote:
    store = Remote("remote", tmp_path / "store", "store=remote")
    for name in "abcde":
        store.create(f"shards/{name}", content(name))
    return store


def content(name: str) -> bytes:
    return name.encode() * SIZE


def read(cache: FileCache, store: Location, name: str) -> bytes:
    with cache.open(store, f"shards/{name}", SIZE) as file:
        return file.read()


def held(cache: FileCache) -> int:
    """Return the bytes of everything in the folder, hidden or not."""
    return sum(path.stat().st_size for path in cache.folder.glob("*"))


def names_of(store: Remote, cache: FileCache) -> str:
    """Return which files are cached, by looking into them."""
    return "".join(sorted(path.read_bytes()[:1].decode() for path in cache.folder.glob("[!.]*")))


def test_the_least_recently_used_file_goes_first(store: Remote, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", 3 * SIZE)
    for name in "abcab":
        assert read(cache, store, name) == content(name)
    assert store.fetched() == ["shards/a", "shards/b", "shards/c"]
    assert read(cache, store, "d") == content("d")
    assert names_of(store, cache) == "abd"
    cache.fetch(store, "shards/a", SIZE)  # a use too
    cache.fetch(store, "shards/e", SIZE)
    assert names_of(store, cache) == "ade"
    assert held(cache) == 3 * SIZE


def test_an_open_file_stays_readable_when_it_is_evicted(store: Remote, tmp_path: Path) -> None:
    cache, other = (FileCache(tmp_path / "cache", SIZE) for _ in range(2))
    file = cache.open(store, "shards/a", SIZE)
    assert file.read(10) == content("a")[:10]
    assert read(other, store, "b") == content("b")
    assert names_of(store, cache) == "b"
    assert file.read() == content("a")[10:]
    assert type(file).__name__ == "FileIO"  # unbuffered


def test_files_of_two_locations_with_one_name_are_two(store: Remote, tmp_path: Path) -> None:
    other = Remote("other", tmp_path / "other", "store=other")
    other.create("shards/a", content("x"))
    cache = FileCache(tmp_path / "cache", 3 * SIZE)
    assert read(cache, store, "a") + read(cache, other, "a") == content("a") + content("x")


def test_local_files_are_opened_in_place(tmp_path: Path) -> None:
    place = open_location(tmp_path / "store", key="store")
    place.create("shards/a", content("a"))
    cache = FileCache(tmp_path / "cache", 1)
    cache.fetch(place, "shards/a", SIZE)
    assert read(cache, place, "a") == content("a")
    assert not cache.folder.exists()


def test_a_file_larger_than_the_cache_is_refused(store: Remote, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", SIZE - 1, key="data.cache_gb")
    with pytest.raises(UsageError, match=r"^data\.cache_gb=9\.99e-07: remote/shards/a has 1e-06 GB; expected .* set "):
        cache.open(store, "shards/a", SIZE)


@pytest.mark.parametrize("remote", [True, False])
def test_a_file_of_another_size_is_refused_and_not_kept(store: Remote, tmp_path: Path, remote: bool) -> None:
    place = store if remote else LocalFolder(store.url, store.folder, store.who)
    cache = FileCache(tmp_path / "cache", 3 * SIZE)
    with pytest.raises(UsageError, match=f"remote/shards/a has {SIZE} bytes; expected {SIZE + 1}: it was truncated"):
        cache.open(place, "shards/a", SIZE + 1)
    with pytest.raises(FileNotFoundError):
        cache.open(place, "shards/absent", SIZE)
    assert held(cache) == 0
    assert read(cache, place, "a") == content("a")


def test_threads_that_ask_at_once_fetch_once(store: Remote, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", 5 * SIZE)
    barrier, got = threading.Barrier(8), []

    def ask(name: str) -> None:
        barrier.wait()
        got.append(read(cache, store, name) == content(name))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "aaaabbbb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 8 and sorted(store.fetched()) == ["shards/a", "shards/b"]


READER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_file_cache import *
store = Remote("remote", Path(sys.argv[2], "store"), "store=remote")
cache = FileCache(Path(sys.argv[2], "cache"), int(sys.argv[3]) * SIZE)
rng = random.Random(int(sys.argv[4]))
print("here", flush=True)
sys.stdin.readline()
for _ in range(60):
    name = rng.choice("abcde")
    assert read(cache, store, name) == content(name)
    total = sum(path.stat().st_size for path in cache.folder.glob("[!.]*") if path.exists())
    assert total <= cache.max_bytes, total
"""


def start(tmp_path: Path, program: str, *arguments: Any) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path), *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    return process


@pytest.mark.parametrize(("room", "fetches"), [(5, 5), (1, None)], ids=["all fit", "one fits"])
def test_processes_share_a_cache_and_its_bound(store: Remote, tmp_path: Path, room: int, fetches: int | None) -> None:
    processes = [start(tmp_path, READER, room, seed) for seed in range(3)]
    ended = [process.communicate(b"go\n", timeout=60) and process.returncode for process in processes]
    assert ended == [0, 0, 0]
    assert fetches is None or len(store.fetched()) == fetches
    assert held(FileCache(tmp_path / "cache", SIZE)) == room * SIZE


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_file_cache import *
class Slow(Remote):
    def fetch(self, name, path):
        path.with_name(f".tmp-{path.name[1:]}-0").write_bytes(b"half")
        print("here", flush=True)
        time.sleep(60)
store = Slow("remote", Path(sys.argv[2], "store"), "store=remote")
FileCache(Path(sys.argv[2], "cache"), 2 * SIZE).open(store, "shards/a", SIZE)
"""


def test_room_reserved_for_a_fetch_counts_until_its_process_is_killed(store: Remote, tmp_path: Path) -> None:
    process = start(tmp_path, KILLED)
    cache = FileCache(tmp_path / "cache", 2 * SIZE)
    for name in "bc":
        assert read(cache, store, name) == content(name)
    assert names_of(store, cache) == "c"  # half of the room is the other's
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert read(cache, store, "d") == content("d")
    assert names_of(store, cache) == "cd" and held(cache) == 2 * SIZE
    assert read(cache, store, "a") == content("a")


def test_an_epoch_from_an_object_store_takes_its_bytes_once(s3: S3Server, tmp_path: Path) -> None:
    store = open_location("s3://bucket/store", key="store")
    for name in "abcde":
        store.create(f"shards/{name}", content(name))
    cache = FileCache(tmp_path / "cache", 5 * SIZE)
    for name in "abcdeedcba":
        assert read(cache, store, name) == content(name)
    assert s3.body_bytes == 5 * SIZE
