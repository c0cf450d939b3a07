"""Files of a location appear whole or not at all, wherever the location is, and every failure says what to do."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from locations import LARGE, PART, SMALL, no_waits, opened, refusal
from sd_lightning.storage import location
from sd_lightning.storage.location import Entry, Location
from sd_lightning.storage.object_store import open_location


@pytest.fixture(autouse=True)
def small_parts_and_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    no_waits(monkeypatch)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return opened("s3://bucket/store/", "store")
    return open_location(f"{tmp_path}/new/store/", key="store")


def test_files_are_written_read_listed_and_deleted(place: Location, tmp_path: Path) -> None:
    assert place.entries() == [] and place.entries("a/") == []
    assert place.size("a/x") is None
    place.delete("a/x")
    with pytest.raises(FileNotFoundError):
        place.read("a/x")
    with pytest.raises(FileNotFoundError):
        place.fetch("a/x", tmp_path / "copy")
    (tmp_path / "source").write_bytes(LARGE)
    assert place.create("a/x", SMALL)
    assert place.create("a/b/y", tmp_path / "source")
    assert place.child("a").create("empty", b"")
    assert not place.create("a/x", LARGE)
    place.replace("manifest", b"1")
    place.replace("manifest", b"22")
    place.replace(".hidden", b"1")
    place.replace("a/.tmp/z", b"1")
    expected = [Entry("a/b/y", len(LARGE)), Entry("a/empty", 0), Entry("a/x", 5), Entry("manifest", 2)]
    assert place.entries() == expected
    assert place.entries("a/") == place.entries("a") == expected[:3]
    assert place.entries("a/e") == expected[1:2]
    assert place.child("a").entries("b/") == [Entry("b/y", len(LARGE))]
    assert place.size("a/b/y") == len(LARGE) and place.size("a") != 5
    assert (place.read("a/x"), place.read("a/empty"), place.read("manifest")) == (SMALL, b"", b"22")
    assert place.read("a/b/y", 10) == LARGE[10:]
    assert place.read("a/b/y", 10, 2500) == LARGE[10:2500]
    assert place.read("a/b/y", 7, 7) == b""
    place.fetch("a/b/y", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == LARGE
    place.delete("a/x")
    assert place.entries("a/x") == [] and place.size("a/x") is None
    assert place.create("a/x", LARGE) and place.read("a/x") == LARGE


def test_local_paths_are_known_only_of_local_folders(place: Location) -> None:
    place.create("a/x", SMALL)
    path = place.child("a").path("x")
    assert path is None if place.url.startswith("s3:") else path is not None and path.read_bytes() == SMALL


def test_the_url_has_no_slash_at_its_end(place: Location) -> None:
    assert place.url.endswith("/store") and place.child("a").url.endswith("/store/a")


def test_a_file_that_ends_early_is_refused(place: Location) -> None:
    place.create("a", SMALL)
    refusal(lambda: place.read("a", 2, 9), "store=", "/a ends after 5 bytes; expected at least 9", "truncated")
    refusal(lambda: place.read("a", 7, 9), "store=", "/a ends after ", "expected at least 9", "truncated")


@pytest.mark.parametrize("kind", ["small", "large", "large file"])
def test_of_writers_that_race_one_wins_with_its_whole_file(place: Location, kind: str, tmp_path: Path) -> None:
    def content(writer: int) -> bytes:
        return bytes([writer]) * (50 if kind == "small" else 5 * PART + writer)

    def write(round: int, writer: int) -> None:
        data: bytes | Path = content(writer)
        if kind == "large file":
            data = tmp_path / f"{round}-{writer}"
            data.write_bytes(content(writer))
        barrier.wait()
        created[round][writer] = place.create(f"r{round}", data)

    rounds, writers = 3, 4
    barrier = threading.Barrier(writers)
    created: list[dict[int, bool]] = [{} for _ in range(rounds)]
    for round in range(rounds):
        threads = [threading.Thread(target=write, args=(round, writer)) for writer in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [writer for writer, won in created[round].items() if won]
        assert len(created[round]) == writers and len(winners) == 1
        assert place.read(f"r{round}") == content(winners[0])
    assert len(place.entries()) == rounds


KILLED = """
import os, sys, time
from pathlib import Path
from sd_lightning.storage import object_store
from sd_lightning.storage.object_store import open_location
object_store.PART_BYTES = 1000
place = open_location(sys.argv[1], key="store")
def wait(*_, **__):
    print("here", flush=True)
    time.sleep(60)
os.link = wait
if sys.argv[1].startswith("s3"):
    place.connection.file_system.client.complete_multipart_upload = wait
place.create("a/x", bytes(5000))
"""


def test_a_killed_writer_leaves_nothing_visible(place: Location) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, place.url], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert place.entries() == [] and place.size("a/x") is None
    assert place.create("a/x", SMALL) and place.read("a/x") == SMALL


FORKED = """
import os, pickle, sys
from sd_lightning.storage.object_store import open_location
place, size = open_location(sys.argv[1], key="store"), int(sys.argv[2])
place.create("a", b"small")  # the parent's connection is open
process = os.fork()
if process == 0:
    status = 1
    try:
        copy = pickle.loads(pickle.dumps(place))
        status = int([place.read("a"), copy.read("a"), place.create("b", bytes(size))] != [b"small", b"small", True])
    finally:
        os._exit(status)
sys.exit(os.waitpid(process, 0)[1])
"""


def test_locations_go_through_pickle_and_fork(place: Location) -> None:
    """In a process of their own: one that has run other tests has threads that a fork does not copy."""
    assert pickle.loads(pickle.dumps(place.child("b"))).url == place.url + "/b"
    subprocess.run([sys.executable, "-c", FORKED, place.url, str(len(LARGE))], check=True, timeout=100)
    assert place.read("b") == bytes(len(LARGE))


def test_check_writable_leaves_nothing_to_see(place: Location) -> None:
    place.check_writable()
    place.check_writable()
    assert place.entries() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("method", ["create", "replace"])
def test_a_full_disk_is_explained_and_nothing_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    def full(path: Path, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data[:2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", full)
    place = open_location(tmp_path, key="store")
    refusal(lambda: getattr(place, method)("a", SMALL), f"store={tmp_path}: cannot write", "/a: the ", "; free space")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    place = open_location(tmp_path, key="store")
    refusal(place.check_writable, f"store={tmp_path}: the file system", "no hard links", "choose another folder")
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_got_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert open_location(tmp_path, key="store").create("a", SMALL)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def denied(path: Path, data: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_bytes", denied)
    place = open_location(tmp_path, key="store")
    refusal(place.check_writable, f"store={tmp_path}: cannot write", os.strerror(number), "change its permissions")


def test_files_in_the_way_of_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refusal(lambda: open_location(tmp_path / "file", key="store"), f"store={tmp_path}/file is a file", "choose another")
    place = open_location(tmp_path, key="store")
    refusal(lambda: place.create("file/x", SMALL), "store=", "cannot write", "/file/x", "choose another")
    refusal(lambda: open_location("", key="store"), "store is empty", "expected a folder")


def test_folders_that_cannot_be_listed_are_not_taken_for_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(location.os, "scandir", denied)
    refusal(open_location(tmp_path, key="store").entries, "store=", "cannot list", "Permission denied")


def test_a_disk_is_not_filled_by_copies_of_files_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_location(tmp_path / "store", key="store")
    (tmp_path / "source").write_bytes(LARGE)
    assert place.create("a", tmp_path / "source")
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("copied"))
    assert not place.create("a", tmp_path / "source")
