"""Object stores: what fails in passing is tried again, and what does not pass is explained at once."""

import errno
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from locations import LARGE, SMALL, no_waits, opened, refusal
from s3_server import S3Server
from sd_lightning.storage import object_store, providers
from sd_lightning.storage.location import Entry, Location
from sd_lightning.storage.object_store import open_location


@pytest.fixture(autouse=True)
def small_parts_and_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    no_waits(monkeypatch)


@pytest.fixture
def store(s3: S3Server) -> Location:
    return opened("s3://bucket/store", "data.store")


def test_large_files_go_in_parts_that_only_the_last_request_joins(s3: S3Server, store: Location) -> None:
    store.create("a", LARGE)
    assert s3.count("PUT", "partNumber=") == 6 and s3.count("POST", "uploadId=") == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"status": "503 Slow Down", "code": "SlowDown"},
        {"status": "500 Internal Server Error", "code": "InternalError"},
        {"cut": 3},
        {"cut": 0},
        {"lost": True},
    ],
    ids=lambda fault: fault.get("code", str(fault)),
)
def test_failed_reads_are_repeated(s3: S3Server, store: Location, fault: dict[str, Any], tmp_path: Path) -> None:
    store.create("a", LARGE)
    for method, call, expected in (
        ("GET", lambda: store.read("a"), LARGE),
        ("GET", lambda: store.read("a", 100, 900), LARGE[100:900]),
        ("GET", store.entries, [Entry("a", len(LARGE))]),
        ("GET", lambda: store.fetch("a", tmp_path / "copy"), None),
        ("HEAD", lambda: store.size("a"), len(LARGE)),
    ):
        injected = s3.fail(method, times=2, **fault)
        assert call() == expected
        assert injected.seen == 2 or (method == "HEAD" and "cut" in fault)  # its answer has no body
    assert (tmp_path / "copy").read_bytes() == LARGE


@pytest.mark.parametrize(
    "fault", [{"status": "503 Slow Down", "code": "SlowDown"}, {"lost": True}, {"cut": 5}], ids=str
)
def test_a_writer_whose_answers_get_lost_knows_that_it_won(
    s3: S3Server, store: Location, fault: dict[str, Any]
) -> None:
    for number, (method, part, data) in enumerate(
        [("PUT", "", SMALL), ("PUT", "partNumber=2", LARGE), ("POST", "uploads", LARGE), ("POST", "uploadId=", LARGE)]
    ):
        injected = s3.fail(method, part, times=2, **fault)
        assert store.create(f"{number}", data)
        assert injected.seen == 2
        assert not store.create(f"{number}", b"other")
        assert store.read(f"{number}") == data


def test_a_writer_that_lost_knows_it_although_it_may_not_abandon_its_parts(s3: S3Server, store: Location) -> None:
    store.create("a", LARGE)
    s3.fail("DELETE", "uploadId=", status="403 Forbidden", code="AccessDenied")
    assert not store.create("a", LARGE)


def test_writers_that_collide_at_the_same_moment_try_again(s3: S3Server, store: Location) -> None:
    s3.fail("PUT", "/a", times=1, status="409 Conflict", code="ConditionalRequestConflict")
    assert store.create("a", SMALL)


def test_a_slow_answer_is_waited_for(s3: S3Server, store: Location) -> None:
    store.create("a", SMALL)
    s3.fail("GET", delay=0.5, times=1)
    assert store.read("a") == SMALL
    assert s3.count("GET") == 1


def test_tries_are_bounded_and_warned_of_after_the_second(
    s3: S3Server, store: Location, caplog: pytest.LogCaptureFixture
) -> None:
    store.create("a", SMALL)
    fault = s3.fail("GET", status="503 Slow Down", code="SlowDown")
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        refusal(lambda: store.read("a"), "data.store=s3://bucket/store: cannot read s3://bucket/store/a: tried 6 times")
    assert fault.seen == 6
    assert len([record for record in caplog.records if "trying again" in record.message]) == 3


def test_waits_grow_and_end_within_a_minute(s3: S3Server, store: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    waited: list[float] = []
    monkeypatch.setattr(object_store.time, "sleep", waited.append)
    monkeypatch.setattr(object_store.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(providers.S3, "is_transient", lambda *_: True)
    refusal(lambda: store.connection.call("read a", lambda: 1 / 0), "cannot read a: tried 6 times")  # type: ignore[attr-defined]
    assert waited == sorted(waited) and waited[0] < 1 and 30 < sum(waited) <= 61


def test_listings_are_never_stale(s3: S3Server, store: Location) -> None:
    other = open_location("s3://bucket/store", key="store")
    for number in range(3):
        other.create(f"a/{number}", SMALL)
        assert len(store.entries()) == len(store.entries("a/")) == number + 1
        assert store.size(f"a/{number + 1}") is None


def test_long_listings_are_complete(s3: S3Server, store: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    client = store.connection.file_system.client  # type: ignore[attr-defined]
    paginator = client.get_paginator("list_objects_v2")
    paginate = paginator.paginate
    paginator.paginate = lambda **options: paginate(**options, MaxKeys=2)
    monkeypatch.setattr(client, "get_paginator", lambda _: paginator)
    for number in range(5):
        store.create(f"a{number}", SMALL)
    assert [entry.name for entry in store.entries()] == [f"a{number}" for number in range(5)]
    assert s3.count("GET", "continuation-token") == 2


def test_a_fetch_takes_the_bytes_of_the_file_once(s3: S3Server, store: Location, tmp_path: Path) -> None:
    store.create("a", LARGE)
    store.fetch("a", tmp_path / "copy")
    assert s3.body_bytes == len(LARGE) and s3.count("GET") == 6


def every_call(store: Location, tmp_path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "read", lambda: store.read("a")
    yield "range", lambda: store.read("a", 1, 3)
    yield "size", lambda: store.size("a")
    yield "entries", store.entries
    yield "small", lambda: store.create("new", SMALL)
    yield "large", lambda: store.create("new", LARGE)
    yield "replace", lambda: store.replace("a", SMALL)
    yield "delete", lambda: store.delete("a")
    yield "fetch", lambda: store.fetch("a", tmp_path / "copy")
    yield "check", store.check_writable


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("AccessDenied", "403 Forbidden", ("access is denied", "AccessDenied", "s3:GetObject", "AWS_PROFILE")),
        ("ExpiredToken", "400 Bad Request", ("credentials have expired", "ExpiredToken", "aws sso login")),
        ("InvalidAccessKeyId", "403 Forbidden", ("credentials are not valid", "AWS_ACCESS_KEY_ID")),
        ("NoSuchBucket", "404 Not Found", ("bucket does not exist", "create it")),
        ("InvalidRequest", "400 Bad Request", ("the store refuses", "AWS_ENDPOINT_URL")),
    ],
)
def test_refusals_of_the_store_are_explained_at_once(
    s3: S3Server, store: Location, tmp_path: Path, code: str, status: str, words: tuple[str, ...]
) -> None:
    store.create("a", LARGE)  # in the middle of a run
    s3.deny(code, status)
    for name, call in every_call(store, tmp_path):
        before = len(s3.requests)
        message = refusal(call, "data.store=s3://bucket/store: cannot ", "s3://bucket/store", *words)
        assert len(s3.requests) - before <= 3, (name, message)
    assert not (tmp_path / "copy").exists()


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server, tmp_path: Path) -> None:
    store = open_location("s3://missing/store", key="store")
    for _, call in every_call(store, tmp_path):
        refusal(call, "store=s3://missing/store: cannot ", "bucket", "create it, or correct the URL")
    refusal(lambda: open_location("s3://", key="store"), "store=s3:// names no bucket", "s3://bucket/folder")


def test_missing_credentials_are_explained(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_location("s3://bucket/store", key="store")
    for call in (store.entries, store.check_writable):
        refusal(call, "store=s3://bucket/store: cannot ", "found no credentials", "AWS_PROFILE")


def test_an_endpoint_that_cannot_be_reached_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = open_location("s3://bucket/store", key="store")
    refusal(store.entries, "store=s3://bucket/store: cannot list", "http://127.0.0.1:9", "check the network")


def test_a_store_that_overwrites_is_refused(s3: S3Server, store: Location) -> None:
    s3.ignores_conditions = True
    refusal(store.check_writable, "data.store=s3://bucket/store: the store overwrites", "If-None-Match")


def test_a_store_that_overwrites_only_in_parts_is_refused(
    s3: S3Server, store: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = s3._answer

    def forgetful(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "POST":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return answer(environ, start_response)

    monkeypatch.setattr(s3, "_answer", forgetful)
    refusal(store.check_writable, "data.store=s3://bucket/store: the store overwrites", "CompleteMultipartUpload")


def test_a_full_disk_during_a_fetch_is_explained(
    s3: S3Server, store: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("a", LARGE)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sd_lightning.storage.atomic.sync", full)
    refusal(lambda: store.fetch("a", tmp_path / "copy"), "cannot copy a", "the disk is full", "free space")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("url", "package"), [("s3://b/c", "boto3"), ("gs://b/c", "gcsfs")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    extra = url[:2]
    refusal(lambda: open_location(url, key="store"), f"store={url}:", package, f"pip install 'sd-lightning[{extra}]'")


@pytest.mark.parametrize("url", ["memory://a", "http://host/a", "ftp://host/a", "S3x://a"])
def test_protocols_that_cannot_create_if_absent_are_refused(url: str) -> None:
    refusal(lambda: open_location(url, key="data.store"), f"data.store={url}:", "cannot create", "s3://, gs://, hf://")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    """`hf://datasets/me/latents/store`, of which the Hub is a local folder."""
    import huggingface_hub
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda **_: DirFileSystem(str(tmp_path), LocalFileSystem()))
    (tmp_path / "datasets/me/latents/store/a").mkdir(parents=True)
    (tmp_path / "datasets/me/latents/store/a/x").write_bytes(LARGE)
    return open_location("hf://datasets/me/latents/store", key="data.store")


def test_the_hub_is_read_only(hub: Location, tmp_path: Path) -> None:
    assert hub.entries() == [Entry("a/x", len(LARGE))]
    assert hub.read("a/x", 3, 9) == LARGE[3:9] and hub.read("a/x") == LARGE
    assert hub.size("a/x") == len(LARGE) and hub.size("a/y") is None
    hub.fetch("a/x", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == LARGE
    with pytest.raises(FileNotFoundError):
        hub.read("a/y")
    for call in (
        lambda: hub.create("b", SMALL),
        lambda: hub.replace("b", SMALL),
        lambda: hub.delete("a/x"),
        hub.check_writable,
    ):
        refusal(call, "data.store=hf://datasets/me/latents/store: hf:// is read only", "local folder, s3:// or gs://")
    assert hub.entries() == [Entry("a/x", len(LARGE))]


def test_an_offline_hub_is_explained_at_once() -> None:
    place = open_location("hf://datasets/me/latents", key="store")
    refusal(lambda: place.read("a"), "store=hf://datasets/me/latents: cannot read", "check the URL", "HF_HUB_OFFLINE")


def test_a_repository_without_access_is_explained(hub: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError

    def find(*_: Any, **__: Any) -> None:
        answer = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
        raise FileNotFoundError("no repository") from RepositoryNotFoundError("404", response=answer)

    monkeypatch.setattr(hub.connection.file_system, "find", find, raising=False)  # type: ignore[attr-defined]
    refusal(hub.entries, "data.store=hf://datasets/me/latents/store: cannot list", "no access", "hf auth login")


def test_google_storage_creates_only_if_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in of gcsfs's signatures: `mode="create"` is what makes it send ifGenerationMatch=0."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Storage(MemoryFileSystem):
        store: dict[str, Any] = {}
        pseudo_dirs = [""]
        written: dict[str, dict[str, str]] = {}

        def __init__(self, **_: Any) -> None:
            super().__init__()

        async def _pipe_file(self, path: str, data: bytes, metadata: Any = None, mode: str = "overwrite") -> None:
            raise AssertionError("only its signature is looked at")

        def pipe_file(self, path: str, data: bytes, mode: str = "overwrite", metadata: Any = None, **_: Any) -> None:
            super().pipe_file(path, data, mode=mode)
            self.written[path] = metadata

        def put_file(self, source: str, path: str, **options: Any) -> None:  # type: ignore[override]
            self.pipe_file(path, Path(source).read_bytes(), **options)

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            return super().info(path) | {"metadata": self.written.get(path, {})}

        def find(self, path: str, **options: Any) -> Any:
            return {name.lstrip("/"): info for name, info in super().find(path, **options).items()}

    module = type(sys)("gcsfs")
    module.GCSFileSystem = Storage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gcsfs", module)
    place = open_location("gs://bucket/store", key="store")
    place.check_writable()
    (tmp_path / "file").write_bytes(LARGE)
    assert place.create("a", tmp_path / "file") and not place.create("a", SMALL)
    assert place.read("a") == LARGE and place.entries() == [Entry("a", len(LARGE))]
    place.delete("a")
    place.delete("a")
    assert place.create("a", SMALL) and place.read("a", 1, 3) == SMALL[1:3]
