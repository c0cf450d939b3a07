"""`train output_dir=s3://…`: the run's folder is in the bucket, whatever ends the run."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from locations import opened
from ranks import run_program
from s3_server import S3Server
from sd_lightning import train
from sd_lightning.apps import hub
from sd_lightning.models import latent_diffusion
from sd_lightning.storage import object_store
from sd_lightning.storage.far_runs import working_folder
from sd_lightning.storage.lease import _MACHINE
from sd_lightning.storage.location import LocalFolder, Location
from sd_lightning.storage.uploads import whole_steps

URL = "s3://bucket/runs/a"
SMALL = (
    *("trainer.max_steps=4", "data.batch_size=4", "trainer.limit_val_batches=0", "trainer.log_every_n_steps=1"),
    *("callbacks.samples=null", "logger=csv", "callbacks.checkpoint.every_n_steps=1", f"output_dir={URL}"),
)
Call = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's copies of runs are."""
    monkeypatch.setenv("SD_LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(s3: S3Server) -> Location:
    return opened(URL, "output_dir")


def tree(location: Location) -> dict[str, bytes]:
    return {entry.name: location.read(entry.name) for entry in location.entries()}


def on_disk() -> dict[str, bytes]:
    """Return what the bucket is to hold of the folder on this machine."""
    elsewhere = ("pipeline/", "frozen/", "frozen-weights/")  # in the checkpoints
    files = tree(LocalFolder("", working_folder(URL), ""))
    return {name: data for name, data in files.items() if not name.startswith(elsewhere)}


def steps(location: Location) -> list[int]:
    return whole_steps(entry.name for entry in location.entries())


def assert_whole(files: Mapping[str, bytes]) -> None:
    """Check that every checkpoint with a manifest has all its files."""
    for name in files:
        if name.endswith("/manifest.json"):
            for file, entry in json.loads(files[name])["files"].items():
                assert hashlib.sha256(files[name.replace("manifest.json", file)]).hexdigest() == entry["sha256"]


def test_the_bucket_holds_the_run_under_its_url(bucket: Location, call_main: Call, cache: Path) -> None:
    code, out = call_main(train, *SMALL)
    assert code == 0, out
    files = tree(bucket)
    assert files == on_disk() and steps(bucket) == [2, 3, 4]
    assert {"config.yaml", "summary.json", "report.html"} <= files.keys()
    assert f"step 4 is in {URL}; a copy is in {working_folder(URL)}\n" in out
    config, summary = yaml.safe_load(files["config.yaml"]), json.loads(files["summary.json"])
    assert config["output_dir"] == config["callbacks"]["checkpoint"]["run_dir"] == URL
    assert (
        summary["checkpoint"] == f"{URL}/checkpoints/step-00000004"
        and summary["pipeline"] == f"{summary['checkpoint']}/pipeline"
    )
    assert not any(str(cache).encode() in files[name] for name in ("config.yaml", "summary.json", "report.html"))
    assert bucket.size(".lease.json") is None

    code, error = call_main(train, *SMALL)
    assert code == 2 and f"output_dir={URL} already holds a run; continue it with resume=auto" in error


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_and_goes_back(bucket: Location, call_main: Call) -> None:
    assert call_main(train, *SMALL)[0] == 0
    code, out = call_main(train, *SMALL, "resume=auto", "trainer.max_steps=5")
    assert code == 0, out
    assert tree(bucket) == on_disk() and steps(bucket) == [3, 4, 5]
    assert not any("set-aside" in name for name in tree(bucket))

    # A run at an earlier step: its later checkpoints are set aside.
    earlier = f"resume={working_folder(URL)}/checkpoints/step-00000003"
    code, out = call_main(train, *SMALL, earlier, "trainer.max_steps=4")
    assert code == 0, out
    assert steps(bucket) == [3, 4] and json.loads(bucket.read("summary.json"))["steps"] == 4
    aside = {name.split("/")[1].partition("-aside-")[2][9:] for name in tree(bucket) if "set-aside" in name}
    assert aside == {"step-00000004", "step-00000005", "summary.json", "report.html"}


def test_a_bucket_that_cannot_be_used_is_told_before_data_and_model(
    s3: S3Server, bucket: Location, call_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(latent_diffusion, "load_model", load_model)
    monkeypatch.setattr(object_store, "WAITS", (0.0,) * len(object_store.WAITS))

    def refusal(*words: str, options: tuple[str, ...] = ()) -> None:
        code, error = call_main(train, *SMALL, *options)
        assert code == 2 and error.count("\n") == 1 and all(word in error for word in words), error

    bucket.create("photos/cat.png", b"cat")
    refusal(
        f"output_dir={URL} holds what no run of sd_lightning wrote",
        "photos (1 files in all)",
        f"write output_dir={URL}/run",
    )
    bucket.delete("photos/cat.png")
    here = {"host": socket.gethostname(), "machine": _MACHINE, "pid": os.getppid()}
    here |= {"started": psutil.Process(os.getppid()).create_time(), "time": time.time() - 5, "token": "x"}
    bucket.create(".lease.json", json.dumps(here).encode())
    holder = f"another run (process {os.getppid()} of this machine)"
    refusal(f"output_dir={URL}: {holder} writes to it", "expected one run at a time; wait for it")
    bucket.delete(".lease.json")
    refusal("output_dir=s3://nowhere/a: cannot ", "the bucket does not exist", options=("output_dir=s3://nowhere/a",))
    refusal(
        "output_dir=s3://bucket: expected a folder in a bucket; write output_dir=s3://bucket/runs/a",
        options=("output_dir=s3://bucket",),
    )
    refusal("http://host/a: no place of a run", options=("output_dir=http://host/a",))
    for name in (".sd_lightning", "checkpoints/step-00000003/manifest.json"):
        bucket.create(name, b"{}")
    for resume in ("resume=null", "resume=runs/other", "resume=s3://bucket/runs/ab", "overwrite=true"):
        refusal(f"output_dir={URL} already holds a run; continue it with resume=auto", options=(resume,))
    s3.deny("AccessDenied")
    refusal(f"output_dir={URL}: cannot create {URL}/.probe: access is denied", "s3:PutObject")
    assert not working_folder(URL).exists()


@pytest.mark.slow
def test_a_run_goes_on_on_another_machine(
    bucket: Location, call_main: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_main(train, *SMALL)[0] == 0
    first = tree(bucket)
    monkeypatch.setenv("SD_LIGHTNING_CACHE", str(tmp_path / "another"))
    code, out = call_main(train, *SMALL, "resume=auto", "trainer.max_steps=6")
    assert code == 0, out
    files = tree(bucket)
    assert_whole(files)
    # What the rule keeps stays in the bucket, also if this machine never had it.
    assert steps(bucket) == [4, 5, 6] and files.items() >= on_disk().items()
    assert all(files[name] == data for name, data in first.items() if "checkpoints/step-00000004" in name)
    assert json.loads(files["summary.json"])["steps"] == 6 and not any("set-aside" in name for name in files)


@pytest.mark.slow
def test_two_processes_of_one_machine(bucket: Location) -> None:
    run_program("train", *SMALL, "strategy=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=2")
    assert tree(bucket) == on_disk() and steps(bucket) == [1, 2]


@pytest.mark.slow
def test_another_run_on_this_machine_is_set_aside(bucket: Location, call_main: Call, cache: Path) -> None:
    assert call_main(train, *SMALL, "trainer.max_steps=1")[0] == 0
    before = on_disk()
    for entry in bucket.entries():
        bucket.delete(entry.name)
    bucket.replace(".sd_lightning", bucket.read(".sd_lightning") + b" ")  # another run's
    code, out = call_main(train, *SMALL, "resume=auto", "trainer.max_steps=2")
    assert code == 0, out
    assert tree(bucket) == on_disk() and steps(bucket) == [1, 2]
    (aside,) = [folder for folder in working_folder(URL).parent.iterdir() if folder != working_folder(URL)]
    assert before.items() <= tree(LocalFolder("", aside, "")).items()


@pytest.mark.slow
def test_a_bucket_that_denies_half_way_costs_no_step(
    s3: S3Server, bucket: Location, call_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also told if the hub denies, too."""
    monkeypatch.setattr(hub, "check", lambda *_, **__: None)
    monkeypatch.setattr(hub, "push_run", lambda _: 1)
    s3.fail("PUT", "step-00000003/state", status="403 Forbidden", code="AccessDenied")
    s3.fail("PUT", "step-00000004/state", status="403 Forbidden", code="AccessDenied")
    code, error = call_main(train, *SMALL, "push_to_hub=me/a")
    assert code == 2
    last = error.splitlines()[-1]
    # Several files are on their way: a copy of one is denied, or a write.
    told = (
        f"error: output_dir={URL}: cannot {verb} {URL}/checkpoints/step-00000004/state" for verb in ("copy to", "write")
    )
    assert last.startswith(tuple(told))
    assert f"only in {working_folder(URL)}; then run the same command with resume=auto" in last
    s3.reset()
    code, out = call_main(train, *SMALL, "resume=auto")
    assert code == 0, out
    here = {name: data for name, data in on_disk().items() if "step-00000003" not in name}  # it was skipped
    assert steps(bucket) == [1, 2, 4] and here.items() <= tree(bucket).items()
    assert_whole(tree(bucket))


def started(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sd_lightning.train", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_sigterm_waits_for_the_upload_of_the_last_checkpoint(s3: S3Server, bucket: Location) -> None:
    run = started("trainer.max_steps=400", "callbacks.checkpoint.every_n_steps=3")
    while not steps(bucket):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)
    s3.fail("PUT", "/state/", delay=2.0)
    run.send_signal(signal.SIGTERM)
    out = run.communicate(timeout=120)[0]
    assert run.returncode == 75, out
    newest = steps(bucket)[-1]
    assert f"stopped by a signal at step {newest}; saved {URL}/checkpoints/step-{newest:08}; resume=auto" in out
    assert f"step {newest} is in {URL}; a copy is in" in out
    assert_whole(tree(bucket))


@pytest.mark.full("cluster")
def test_kills_at_any_moment_leave_whole_checkpoints(s3: S3Server, bucket: Location) -> None:
    s3.fail("PUT", "/state/", delay=0.3)
    last = 0
    for number, uploads in enumerate((1, 4, 9)):
        run = started("resume=auto", "trainer.max_steps=400", "callbacks.checkpoint.keep=2")
        s3.requests.clear()
        while s3.count("PUT", "/checkpoints/") < 10 * uploads:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert_whole(tree(bucket))
        assert bucket.size(".lease.json")
        assert steps(bucket)[-1:] >= [last] or number == 0
        last = (steps(bucket) or [0])[-1]
    code = subprocess.run(
        [sys.executable, "-m", "sd_lightning.train", *SMALL, "resume=auto", f"trainer.max_steps={last + 2}"],
        capture_output=True,
        text=True,
    )
    assert code.returncode == 0, code.stdout + code.stderr
    assert steps(bucket)[-1] == last + 2
    there = tuple(f"checkpoints/step-{step:08}/" for step in steps(bucket))  # others were skipped
    kept = {k: v for k, v in on_disk().items() if not k.startswith("checkpoints/") or k.startswith(there)}
    assert tree(bucket).items() >= kept.items()
