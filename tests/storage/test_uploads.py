"""A run's folder in a bucket: what it holds whenever uploads end, fail or are too slow."""

import hashlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from locations import no_waits, opened, refusal
from s3_server import Fault, Request, S3Server
from sd_lightning._errors import UsageError
from sd_lightning.apps.bucket import in_bucket
from sd_lightning.storage import checkpoint, lease, providers, runs, uploads
from sd_lightning.storage.lease import Lease
from sd_lightning.storage.location import LocalFolder, Location
from sd_lightning.storage.uploads import RunUploads, whole_steps

URL = "s3://bucket/runs/a"
DENIED = {"status": "403 Forbidden", "code": "AccessDenied"}


@pytest.fixture(autouse=True)
def small_parts_and_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    no_waits(monkeypatch)


@pytest.fixture
def bucket(s3: S3Server) -> Location:
    return opened(URL, "output_dir")


class Run:
    """A run's folder, and what uploads it."""

    def __init__(self, folder: Path, bucket: Location, *, keep: int = 3, step: int | None = None) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(exist_ok=True)
        runs.mark(folder)
        (folder / "frozen/vae").mkdir(parents=True, exist_ok=True)
        (folder / "frozen/vae/model.safetensors").write_bytes(b"frozen" * 500)
        self.lease = Lease(bucket, ".lease.json", f"output_dir={URL}", "run")
        bucket.replace(self.lease.name, self.lease._sign())
        self.uploads = RunUploads(bucket, folder, self.lease)
        here = [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(folder)]
        self.uploads.open(keep=keep, step=max([0, *here]) if step is None else step)

    def save(self, step: int, *, before: Path | None = None) -> Path:
        """Save a checkpoint with a file of its own, a large one, and one that all link."""
        with checkpoint.saving(self.folder, step) as tmp:
            (tmp / "state").mkdir()
            (tmp / "trainer.json").write_text(json.dumps({"step": step}))
            (tmp / "state/rank-0.safetensors").write_bytes(os.urandom(2500))
            (tmp / "pipeline/vae").mkdir(parents=True)
            (tmp / "pipeline/model_index.json").write_text(json.dumps({"vae": step}))
            os.link(self.folder / "frozen/vae/model.safetensors", tmp / "pipeline/vae/model.safetensors")
        saved = checkpoint.checkpoint_path(self.folder, step)
        checkpoint.prune(self.folder, self.keep, trusted=saved, also={self.uploads.busy, before})
        (self.folder / "logs").mkdir(exist_ok=True)
        with (self.folder / "logs/metrics.csv").open("a") as file:
            file.write(f"{step},0.5\n")
        self.uploads.publish(saved, before)
        return saved

    def end(self) -> None:
        """Write the results, and wait for the uploads."""
        self.uploads.begin()
        saved = checkpoint.all_checkpoints(self.folder)[-1]
        runs.publish_pipeline(self.folder, saved)
        (self.folder / "summary.json").write_text(json.dumps({"steps": checkpoint.step_of(saved)}))
        (self.folder / "report.html").write_text(f"report of {saved.name}")
        self.uploads.finish()


def tree(location: Location) -> dict[str, bytes]:
    return {entry.name: location.read(entry.name) for entry in location.entries()}


def steps(location: Location) -> list[int]:
    return whole_steps(entry.name for entry in location.entries())


def on_disk(folder: Path) -> dict[str, bytes]:
    """Return what the bucket is to hold of a folder."""
    elsewhere = ("pipeline/", "frozen/")  # in the checkpoints
    files = {name: data for name, data in tree(LocalFolder("", folder, "")).items() if not name.startswith(elsewhere)}
    return {name: data for name, data in files.items() if "set-aside" not in name}


def assert_consistent(files: dict[str, bytes]) -> None:
    """Check that each checkpoint with a manifest is whole, and that a summary comes after the report."""
    for name in files:
        if name.endswith("/manifest.json"):
            for file, entry in json.loads(files[name])["files"].items():
                data = files[name.replace("manifest.json", file)]
                assert hashlib.sha256(data).hexdigest() == entry["sha256"], file
    if "summary.json" in files:
        assert "report.html" in files


def test_the_bucket_holds_the_folder_byte_for_byte(
    bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    copy = providers.S3Files.cp_file
    monkeypatch.setattr(
        providers.S3Files, "cp_file", lambda self, *names: copies.append(names[1]) or copy(self, *names)
    )
    run = Run(tmp_path / "run", bucket)
    run.uploads.begin()
    for step in range(1, 6):
        run.save(step)
        wait_for(lambda: step in steps(bucket))  # noqa: B023
    run.end()
    assert tree(bucket) == on_disk(tmp_path / "run")
    assert bucket.read(".sd_lightning") == (tmp_path / "run/.sd_lightning").read_bytes()
    assert steps(bucket) == [3, 4, 5]
    # The frozen file came once; what is linked in later checkpoints was copied by the store.
    assert sum("vae/model.safetensors" in name for name in copies) == 4


def wait_for(holds: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def dying_after(s3: S3Server, requests: int) -> Fault:
    """Let requests that change the bucket fail after a number of them."""
    numbers = itertools.count()

    def matches(request: Request) -> bool:
        return request.method in ("PUT", "POST", "DELETE") and next(numbers) >= requests

    fault = Fault(matches, **DENIED)
    s3.faults.append(fault)
    return fault


def history(folder: Path, bucket: Location) -> Iterator[None]:
    """Change the folder and the bucket in every way; yield where both are the same."""
    run = Run(folder, bucket, keep=2)
    for step in (1, 2, 3, 4):
        run.save(step)
        run.uploads._sync()
    run.end()
    yield
    run = Run(folder, bucket, keep=2)  # trained on
    run.save(5)
    run.uploads._sync()
    run.end()
    yield
    run = Run(folder, bucket, keep=2, step=4)  # resumed at an earlier step
    runs.go_back(folder, 4)
    run.save(6)
    run.end()
    yield


@pytest.mark.parametrize("every", [31, pytest.param(3, marks=pytest.mark.full("kills"))])
def test_whatever_request_is_the_last_what_counts_as_whole_is_whole(
    every: int, s3: S3Server, bucket: Location, tmp_path: Path
) -> None:
    for _ in history(tmp_path / "whole", bucket):
        files = tree(bucket)
        assert_consistent(files)
        assert {name: data for name, data in files.items() if "set-aside" not in name} == on_disk(tmp_path / "whole")
    total = s3.count("PUT") + s3.count("POST") + s3.count("DELETE")
    assert total > 60
    for number in range(1, total, every):
        for entry in bucket.entries():
            bucket.delete(entry.name)
        fault = dying_after(s3, number)
        with suppress(UsageError):
            for _ in history(tmp_path / f"{number}", bucket):
                pass
        assert fault.seen
        s3.faults.clear()
        assert_consistent(tree(bucket))


def test_a_run_that_ends_in_the_middle_goes_on_where_it_was(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", bucket)
    run.save(1)
    run.uploads._sync()
    run.save(2)
    dying_after(s3, 6)  # of 10
    with pytest.raises(UsageError):
        run.uploads._sync()
    s3.faults.clear()
    assert steps(bucket) == [1] and any("step-00000002" in name for name in tree(bucket))
    again = Run(tmp_path / "run", bucket)
    s3.requests.clear()
    again.end()
    assert tree(bucket) == on_disk(tmp_path / "run")
    assert not s3.count("PUT", "step-00000001")  # what is whole there is not uploaded again


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_step_that_lacks_a_file_is_not_whole_and_is_repaired(bucket: Location, tmp_path: Path, damage: str) -> None:
    run = Run(tmp_path / "run", bucket)
    for step in (1, 2):
        run.save(step)
        run.uploads._sync()
    for step in (1, 2):
        name = f"checkpoints/step-0000000{step}/state/rank-0.safetensors"
        bucket.delete(name) if damage == "missing" else bucket.replace(name, b"short")
    again = Run(tmp_path / "run", bucket)
    assert again.uploads.state() == f"no step is in {URL} yet"
    again.uploads._sync()
    assert again.uploads.state() == f"step 2 is in {URL}"
    files = on_disk(again.folder)
    assert {name: data for name, data in tree(bucket).items() if "step-00000002" in name} == {
        name: data for name, data in files.items() if "step-00000002" in name
    }
    # A run that goes back sets aside what there is of a later step, and goes on.
    bucket.delete("checkpoints/step-00000002/state/rank-0.safetensors")
    back = Run(tmp_path / "run", bucket, step=1)
    runs.go_back(back.folder, 1)
    back.save(3)
    back.end()
    assert steps(bucket)[-1] == 3 and any("-step-00000002/trainer.json" in name for name in tree(bucket))


def test_what_is_later_stays_until_the_run_goes_on(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", bucket)
    for step in (1, 2):
        run.save(step)
        run.uploads._sync()
    run.end()
    before = tree(bucket)
    back = Run(tmp_path / "run", bucket, step=1)
    back.uploads.finish()  # the checkpoint could not be restored
    assert tree(bucket) == before
    runs.go_back(back.folder, 1)
    fault = s3.fail("PUT", "set-aside", times=1, **DENIED)
    with pytest.raises(UsageError):
        back.uploads._sync()
    assert fault.seen and before.items() <= tree(bucket).items()
    back.uploads._sync()
    aside = {name.split("/")[1].partition("-aside-")[2][9:] for name in tree(bucket) if "set-aside" in name}
    assert aside == {"step-00000002", "summary.json", "report.html"} and steps(bucket) == [1]
    assert not {"summary.json", "report.html"} & tree(bucket).keys()


def test_after_a_file_that_fails_no_other_is_tried(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", bucket)
    fault = s3.fail("PUT", "file-", **DENIED)
    for number in range(60):
        (run.folder / f"samples/file-{number}.png").parent.mkdir(exist_ok=True)
        (run.folder / f"samples/file-{number}.png").write_bytes(b"x")
    with pytest.raises(UsageError):
        run.uploads._sync()
    assert 1 <= fault.seen <= 16


def test_a_machine_that_comes_back_uploads_nothing_old(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    def saved_on(machine: str, *steps_: int) -> None:
        run = Run(tmp_path / machine, bucket, step=steps_[0] - 1)
        for step in steps_:
            run.save(step)
            run.uploads._sync()
        run.uploads.begin()
        run.uploads.finish()

    saved_on("a", 1, 2, 3)
    saved_on("b", 4, 5, 6)
    s3.requests.clear()
    saved_on("a", 7)
    assert steps(bucket) == [5, 6, 7] and not s3.count("PUT", "step-00000003")
    assert_consistent(tree(bucket))


def test_the_newest_checkpoint_comes_next_and_those_in_between_are_skipped(
    s3: S3Server, bucket: Location, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", bucket, keep=1)
    gate = threading.Event()
    slow = s3.fail("PUT", "step-00000001/state", gate=gate)
    run.uploads.begin()
    run.save(1)
    wait_for(lambda: bool(slow.seen))
    assert run.uploads.state() == f"no step is in {URL} yet; step 1 is being uploaded"
    begin = time.monotonic()
    for step in (2, 3, 4):
        run.save(step)
        # What is being uploaded stays on disk.
        assert [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(run.folder)] == [1, step]
    assert time.monotonic() - begin < 50, "it was not waited for"
    gate.set()
    wait_for(lambda: steps(bucket) == [1, 4])  # 1 is on disk until the next is saved
    assert not s3.count("PUT", "step-00000002") and not s3.count("PUT", "step-00000003")
    run.save(5)
    run.end()
    assert on_disk(run.folder).items() <= tree(bucket).items()
    assert steps(bucket) == [4, 5], "two stay in the bucket, though one on disk"


def test_a_checkpoint_that_is_replaced_during_its_upload_is_uploaded_anew(
    s3: S3Server, bucket: Location, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", bucket)
    slow = s3.fail("PUT", "step-00000001/state", delay=0.5, times=1)
    run.uploads.begin()
    run.save(1)
    wait_for(lambda: bool(slow.seen))
    run.save(1)
    run.end()
    assert tree(bucket) == on_disk(run.folder)
    assert_consistent(tree(bucket))


def test_a_bucket_that_denies_half_way_costs_nothing_on_disk(
    s3: S3Server, bucket: Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run", bucket)
    run.uploads.begin()
    run.save(1)
    wait_for(lambda: steps(bucket) == [1])
    s3.fail("PUT", "step-00000002/state", **DENIED)
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        run.save(2)
        wait_for(lambda: "keeps the rest" in caplog.text)
        run.uploads._wake.set()
        time.sleep(0.2)
    warning = next(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    assert f"output_dir={URL}: cannot write {URL}/checkpoints/step-00000002/state" in warning
    assert "access is denied" in warning and f"step 1 is in {URL}; the run goes on" in warning
    words = ("access is denied", "grant them", f"step 1 is in {URL}; what is newer is only in {run.folder}; then")
    refusal(run.end, *words, "resume=auto")
    assert {"checkpoints/step-00000002/manifest.json", "summary.json"} <= on_disk(run.folder).keys()
    assert steps(bucket) == [1]
    s3.faults.clear()
    Run(run.folder, bucket).end()
    assert tree(bucket) == on_disk(run.folder)


def test_a_lease_is_taken_over_when_its_job_is_dead(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT", 0.05)
    monkeypatch.setattr(lease, "LOOK", 0.02)
    started = psutil.Process(os.getppid()).create_time()

    def lease_of_run() -> Lease:
        return Lease(bucket, ".lease.json", f"output_dir={URL}", "run", silence=150)

    here, now = {"host": socket.gethostname(), "machine": lease._MACHINE}, time.time()
    parent = {"pid": os.getppid(), "started": started}
    for held, holder in (
        ({"host": "gpu-7", "machine": "other", "pid": 1, "time": now - 20}, "process 1 of gpu-7"),
        (here | parent | {"time": now - 20}, f"process {os.getppid()} of this machine"),
        # A container of the same name, which this process does not see into.
        (
            here | {"machine": "other", "pid": os.getpid(), "started": 0, "time": now - 20},
            f"process {os.getpid()} of {here['host']})",
        ),
    ):
        bucket.replace(".lease.json", json.dumps(held | {"token": "x"}).encode())
        words = (
            f"output_dir={URL}: another run ({holder.rstrip(')')}) writes to it, last sign of life 2",
            "wait",
            ".lease.json",
        )
        refusal(lease_of_run().held().__enter__, *words, "silent for 150 s")
        assert json.loads(bucket.read(".lease.json"))["token"] == "x"
    for held in (
        {"host": "gpu-7", "machine": "other", "pid": 1, "time": now - 151},
        here | {"pid": 2**22 + 1, "started": started, "time": now},  # no system has such a process
        here | parent | {"started": started - 3600, "time": now},  # another process with its number
        here | {"pid": os.getpid(), "time": now},
    ):
        bucket.replace(".lease.json", json.dumps(held | {"token": "x"}).encode())
        with lease_of_run().held():
            signs = [json.loads(bucket.read(".lease.json"))]
            wait_for(lambda: json.loads(bucket.read(".lease.json"))["time"] > signs[0]["time"])  # noqa: B023
        assert bucket.size(".lease.json") is None


def test_a_run_waits_until_another_machine_is_silent(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOOK", 0.05)
    held = {"host": "gpu-7", "pid": 12, "time": time.time() + 3600, "token": "x"}  # by a clock that is an hour ahead
    bucket.replace(".lease.json", json.dumps(held).encode())
    begin = time.monotonic()
    with Lease(bucket, ".lease.json", f"output_dir={URL}", "run", silence=0.5, waits=True).held():
        assert 0.5 <= time.monotonic() - begin < 5 and json.loads(bucket.read(".lease.json"))["host"] != "gpu-7"
    bucket.replace(".lease.json", json.dumps(held).encode())
    monkeypatch.setattr(
        lease.time, "sleep", lambda _: bucket.replace(".lease.json", json.dumps(held | {"time": time.time()}).encode())
    )
    for age in (0, 3600):  # by a clock that is an hour behind, too
        bucket.replace(".lease.json", json.dumps(held | {"time": time.time() - age - 1}).encode())
        hurried = Lease(bucket, ".lease.json", f"output_dir={URL}", "run", silence=150, waits=age == 0)
        refusal(hurried.held().__enter__, f"output_dir={URL}: another run (process 12 of gpu-7)", "wait for it")
    living = Lease(bucket, ".lease.json", f"output_dir={URL}", "run", silence=150, waits=True)
    refusal(living.held().__enter__, f"output_dir={URL}: another run (process 12 of gpu-7)", "0 s ago", "wait for it")


def test_a_run_that_lost_its_lease_writes_no_more(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", bucket)
    run.save(1)
    with run.lease.held():
        run.uploads._sync()
        other = {"host": "gpu-7", "pid": 12, "time": time.time(), "token": "x"}
        bucket.replace(".lease.json", json.dumps(other).encode())
        run.save(2)
        s3.requests.clear()
        refusal(run.end, "another run (process 12 of gpu-7) has taken", "end one of the two", str(run.folder))
        assert not s3.count("PUT") and steps(bucket) == [1]
    assert json.loads(bucket.read(".lease.json"))["token"] == "x"


def test_the_last_checkpoint_before_bad_losses_is_uploaded_too(s3: S3Server, bucket: Location, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", bucket, keep=1)
    slow = s3.fail("PUT", "step-00000001/state", delay=0.5)
    run.uploads.begin()
    run.save(1)
    wait_for(lambda: bool(slow.seen))
    before = run.save(2)
    run.save(3, before=before)
    run.save(4, before=before)
    run.end()
    assert steps(bucket) == [1, 2, 4] and on_disk(run.folder).items() <= tree(bucket).items()


def test_a_file_that_is_lost_is_told_and_not_looked_for_again_and_again(
    s3: S3Server, bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "PATIENCE", 0.1)
    run = Run(tmp_path / "run", bucket)
    saved = run.save(1)
    (saved / "state/rank-0.safetensors").unlink()
    run.uploads.begin()
    wait_for(lambda: "keeps the rest" in caplog.text)
    s3.requests.clear()
    time.sleep(1.0)
    assert not s3.requests, "it waits for the next checkpoint"
    assert "rank-0.safetensors" in caplog.text and f"no step is in {URL} yet; the run goes on" in caplog.text
    refusal(run.end, "rank-0.safetensors", f"no step is in {URL} yet; what is newer is only in {run.folder}")
    assert steps(bucket) == []


def test_a_run_that_is_not_in_the_bucket_is_told_and_errors_name_its_url(
    bucket: Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs.mark(folder)
    with checkpoint.saving(folder, 1) as tmp:
        (tmp / "state").write_bytes(b"x")

    class Spec(dict):
        url, output_dir = URL, folder

    def refused(_: RunUploads | None) -> int:
        raise UsageError(f"output_dir={folder}: a run is at work in it; choose another")

    with pytest.raises(UsageError) as caught:
        in_bucket(Spec(resume="auto"), refused)  # type: ignore[arg-type]
    assert str(caught.value) == f"output_dir={URL}: a run is at work in it; choose another (on this machine: {folder})"
    assert f"{URL} is not in the bucket; the run goes on with the copy in {folder}" in caplog.text
    caplog.clear()
    bucket.create(runs.MARK, (folder / runs.MARK).read_bytes())
    assert in_bucket(Spec(resume="auto"), lambda _: 0) == 0 and not caplog.text  # type: ignore[arg-type]


def test_ctrl_c_in_the_middle_of_an_upload_ends_at_once(
    s3: S3Server, bucket: Location, tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    """The lease is given back, what is in the bucket is whole, and so is what is on this machine."""
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    gate = threading.Event()
    s3.fail("PUT", "step-00000002/state", gate=gate)
    begin = time.monotonic()
    run = run_python(program, str(tmp_path / "run"))
    gate.set()
    assert time.monotonic() - begin < 80 and run.returncode == 130 and run.stderr == "", run.stderr
    assert bucket.size(".lease.json") is None and steps(bucket) == [1]
    assert_consistent(tree(bucket))
    assert [checkpoint.verify(path) for path in checkpoint.all_checkpoints(tmp_path / "run")] == [[], []]


INTERRUPTED = f"""
import os, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from sd_lightning.apps.bucket import in_bucket
from sd_lightning.storage import checkpoint, runs

folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background


def save(step):
    with checkpoint.saving(folder, step) as tmp:
        (tmp / "state").mkdir()
        for rank in range(40):
            (tmp / f"state/rank-{{rank}}.safetensors").write_bytes(os.urandom(99))
    return checkpoint.checkpoint_path(folder, step)


def run(uploads):
    folder.mkdir()
    runs.mark(folder)
    uploads.open(keep=3)
    uploads.begin()
    uploads.publish(save(1))
    while "step 1 is in" not in uploads.state():
        time.sleep(0.01)
    uploads.publish(save(2))
    while uploads.busy is None:
        time.sleep(0.01)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return 0  # what waits for the upload is interrupted


spec = {{"trainer.num_nodes": 1, "resume": None}}
spec = type("Spec", (dict,), {{"url": {URL!r}, "output_dir": folder}})(spec)
try:
    in_bucket(spec, run)
except KeyboardInterrupt:
    sys.exit(130)
"""
