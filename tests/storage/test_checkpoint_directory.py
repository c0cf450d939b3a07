"""A checkpoint directory is complete or absent, and a damaged one is found out."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint import restore
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.atomic import check_free_space, hard_link_tree
from sd_lightning.storage.checkpoint import (
    all_checkpoints,
    checkpoint_path,
    clean,
    newest_valid,
    prune,
    saving,
    step_of,
    verify,
)
from sd_lightning.storage.runs import RunFolder


def save(run_dir: Path, step: int, content: str = "weights") -> Path:
    with saving(run_dir, step) as tmp:
        (tmp / "state").mkdir()
        (tmp / "state" / "shard.bin").write_text(f"{content} of {step}")
        (tmp / "trainer.json").write_text("{}")
    return checkpoint_path(run_dir, step)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_saved_checkpoint_is_intact_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = save(tmp_path, 240)
    assert path == tmp_path / "checkpoints" / "step-00000240"
    assert names(tmp_path) == ["step-00000240"]
    assert verify(path) == []
    assert newest_valid(tmp_path) == path
    assert step_of(path) == 240
    assert sorted(json.loads((path / "manifest.json").read_text())["files"]) == ["state/shard.bin", "trainer.json"]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert all_checkpoints(tmp_path / "absent") == []
    assert newest_valid(tmp_path / "absent") is None
    clean(tmp_path / "absent")
    with pytest.raises(UsageError, match="pipeline is not a checkpoint; expected a folder named like step-00000240"):
        step_of(tmp_path / "pipeline")


def test_checkpoints_are_ordered_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (123_456_789, 5, 99_999_999):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [5, 99_999_999, 123_456_789]


DAMAGES = {
    "truncated": lambda path: os.truncate(path / "state" / "shard.bin", 3),
    "altered": lambda path: (path / "state" / "shard.bin").write_text("Weights of 2"),
    "missing": lambda path: (path / "trainer.json").unlink(),
    "a folder": lambda path: ((path / "trainer.json").unlink(), (path / "trainer.json").mkdir()),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 30),
    "altered manifest": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace("trainer.json", "state/../trainer.json")
    ),
}
REASONS = {
    "truncated": "state/shard.bin has 3 bytes instead of 12",
    "altered": "state/shard.bin was altered",
    "missing": "trainer.json is missing",
    "a folder": "trainer.json",
    "no manifest": "manifest.json is missing",
    "half a manifest": "manifest.json cannot be read",
    "altered manifest": "its own checksum differs",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    DAMAGES[damage](bad)
    problems = verify(bad)
    assert len(problems) == 1
    assert REASONS[damage] in problems[0]
    with caplog.at_level(logging.WARNING):
        assert newest_valid(tmp_path) == good
    (record,) = caplog.records
    assert f"Checkpoint {bad} is not used: {problems[0]}" in record.message


def test_every_single_altered_bit_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    shard = path / "state" / "shard.bin"
    content = shard.read_bytes()
    for bit in range(len(content) * 8):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(altered)
        assert verify(path) == ["state/shard.bin was altered (its SHA-256 differs)"]
    assert verify(path, hash_up_to=0) == []


def hashed_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record by name which files are read and hashed."""
    read: list[str] = []
    file_digest = checkpoint.hashlib.file_digest
    monkeypatch.setattr(
        checkpoint.hashlib,
        "file_digest",
        lambda file, name: read.append(Path(file.name).name) or file_digest(file, name),
    )
    return read


def test_only_the_first_process_hashes_large_files_unless_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 5)
    paths = [save(tmp_path, step) for step in (1, 2)]
    read = hashed_files(monkeypatch)
    assert runs.find_checkpoint("auto", tmp_path) == paths[1]
    assert read == ["shard.bin", "trainer.json"]
    for given in ("auto", str(tmp_path), str(paths[1])):
        read.clear()
        assert runs.find_checkpoint(given, tmp_path, thorough=False) == paths[1]
        assert read == ["trainer.json"]
    (tmp_path / "summary.json").write_text('{"steps": 2}')  # the processes may leave before they hear of each other
    read.clear()
    assert runs.find_checkpoint("auto", tmp_path, thorough=False) == paths[1]
    assert "shard.bin" in read
    (tmp_path / "summary.json").unlink()
    DAMAGES["altered"](paths[1])
    assert runs.find_checkpoint("auto", tmp_path, thorough=False) == paths[1]
    assert runs.find_checkpoint("auto", tmp_path) == paths[0]
    DAMAGES["truncated"](paths[1])
    assert runs.find_checkpoint("auto", tmp_path, thorough=False) == paths[0]
    (paths[0] / "trainer.json").write_text("[]")
    assert runs.find_checkpoint("auto", tmp_path, thorough=False) is None


class Rank:
    """A strategy of two ranks."""

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        return decision


def test_the_other_processes_take_the_checkpoint_that_the_first_has_verified_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [save(tmp_path, step) for step in (1, 2)]

    def agreed(of_rank_zero: object, resume: Path | None) -> Path | None:
        monkeypatch.setattr(restore, "on_rank_zero", lambda work: of_rank_zero)
        return restore.agree_on_checkpoint(SimpleNamespace(strategy=Rank(), global_rank=1), resume)  # type: ignore[arg-type]

    digests = [checkpoint.manifest_digest(path) for path in paths]
    assert agreed((paths[0], digests[0]), paths[1]) == paths[0]
    assert agreed((None, None), paths[1]) is None
    with pytest.raises(UsageError, match=f"resume={paths[0]}: rank 1 on .* sees another checkpoint there than rank 0"):
        agreed((paths[0], digests[1]), paths[0])


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 1, "other weights")
    assert (path / "state" / "shard.bin").read_text() == "other weights of 1"
    assert verify(path) == []
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt(), OSError(errno.EIO, "broken disk")])
def test_an_error_while_saving_leaves_nothing_and_is_passed_on(tmp_path: Path, error: BaseException) -> None:
    good = save(tmp_path, 1)
    with pytest.raises(type(error)) as raised, saving(tmp_path, 2) as tmp:
        (tmp / "half").write_text("half")
        raise error
    assert raised.value is error
    assert names(tmp_path) == ["step-00000001"]
    assert newest_valid(tmp_path) == good


def test_a_failed_rename_keeps_the_checkpoint_that_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-"):
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken disk"):
        save(tmp_path, 1, "other weights")
    assert (checkpoint_path(tmp_path, 1) / "state" / "shard.bin").read_text() == "weights of 1"
    assert names(tmp_path) == ["step-00000001"]


def test_known_checksums_are_taken_and_the_rest_is_read_once_per_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = hashed_files(monkeypatch)
    frozen = tmp_path / "vae"
    frozen.mkdir()
    (frozen / "weights").write_text("frozen")
    known: dict[str, str] = {}
    with saving(tmp_path, 1, known=known) as tmp:
        (tmp / "big").write_text("big")
        known["big"] = "b4c2b1a2f4e9a8f43b7d4a0f3f4f0a7a" * 2
        hard_link_tree(frozen, tmp / "vae")
        hard_link_tree(frozen, tmp / "again")
    assert read == ["weights"]
    path = checkpoint_path(tmp_path, 1)
    assert verify(path) == ["big was altered (its SHA-256 differs)"]  # the given checksum is what counts
    read.clear()
    with saving(tmp_path, 2) as tmp:
        hard_link_tree(path / "vae", tmp / "vae")
    assert read == []  # taken over from the checkpoint that links the same file
    assert verify(checkpoint_path(tmp_path, 2)) == []
    with pytest.raises(ValueError, match="has no file 'absent'"), saving(tmp_path, 3, known={"absent": ""}):
        pass


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    assert prune(tmp_path, 5) == []
    assert prune(tmp_path, 2) == paths[:2]
    assert all_checkpoints(tmp_path) == paths[2:]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_prune_never_deletes_the_newest_valid_checkpoint(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        DAMAGES["altered"](path)
    assert prune(tmp_path, 1) == [paths[0], paths[2]]
    assert newest_valid(tmp_path) == paths[1]


def test_prune_does_not_read_a_trusted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path, step) for step in (1, 2)]
    monkeypatch.setattr(checkpoint, "verify", lambda *_, **__: pytest.fail("read the checkpoint again"))
    assert prune(tmp_path, 1, trusted=paths[1]) == paths[:1]


def test_prune_keeps_what_was_just_saved_though_later_steps_lie_there(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 7, 8, 9, 10)]
    assert prune(tmp_path, 2, trusted=paths[1]) == [paths[0], paths[2]]
    assert all_checkpoints(tmp_path) == [paths[1], *paths[3:]]


def test_checkpoints_that_are_set_aside_are_found_by_nothing_and_deleted_by_nothing(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (2, 4, 6)]
    moved = checkpoint.set_aside(tmp_path, 2)
    assert [path.name[:23] for path in moved] == ["set-aside-step-00000004", "set-aside-step-00000006"]
    clean(tmp_path)
    assert prune(tmp_path, 1) == [] and all_checkpoints(tmp_path) == paths[:1] and newest_valid(tmp_path) == paths[0]
    assert not any(verify(path) for path in moved)


def pipeline_of(folder: Path, step: int) -> None:
    (folder / "pipeline").mkdir()
    (folder / "pipeline/model_index.json").write_text(str(step))


def test_the_pipeline_of_a_run_is_that_of_its_newest_weights(tmp_path: Path) -> None:
    for step in (4, 6):
        with saving(tmp_path, step) as tmp:
            pipeline_of(tmp, step)
    pipeline_of(tmp_path, 4)
    (tmp_path / "summary.json").write_text('{"steps": 6}')
    assert runs.find_pipeline(tmp_path, who="run") == tmp_path / "pipeline"
    (tmp_path / "summary.json").write_text('{"steps": 4}')  # trained on and stopped
    assert runs.find_pipeline(tmp_path, who="run") == checkpoint_path(tmp_path, 6) / "pipeline"
    (checkpoint_path(tmp_path, 6) / "pipeline/model_index.json").write_text("damaged")
    assert runs.find_pipeline(tmp_path, who="run") == tmp_path / "pipeline"


def test_a_run_that_goes_back_sets_its_results_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (4, 6):
        with saving(tmp_path, step) as tmp:
            pipeline_of(tmp, step)
    pipeline_of(tmp_path, 6)
    (tmp_path / "summary.json").write_text('{"steps": 6}')
    runs.go_back(tmp_path, 6)
    assert not caplog.records and (tmp_path / "pipeline").exists()
    runs.go_back(tmp_path, 4)
    (record,) = caplog.records
    assert "goes on from step 4; what is of later steps is set aside: set-aside-step-00000006-" in record.message
    assert runs.find_pipeline(tmp_path, who="run") == checkpoint_path(tmp_path, 4) / "pipeline"
    assert not runs.is_finished(tmp_path, 6), "the results that were there are of another future"


_LOCKING = """
import sys, time
from pathlib import Path
from sd_lightning.storage.runs import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_directory_belongs_to_one_process_until_that_ends_even_by_sigkill(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _LOCKING, str(tmp_path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"locked\n"
            with pytest.raises(UsageError, match=rf"a run is at work in it \(process {other.pid} on .*choose another"):
                RunFolder(tmp_path).lock()
        finally:
            other.kill()
    folder, again = RunFolder(tmp_path), RunFolder(tmp_path)
    folder.lock()
    for each in (folder, again):  # as for two fits in a notebook
        each.lock()
    again.unlock()  # it is not the one that holds it
    assert os.listdir(tmp_path) == [".lock"]
    folder.unlock()
    assert os.listdir(tmp_path) == []
    again.lock()
    again.unlock()


def test_clean_removes_leftovers_and_puts_back_what_was_being_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path.with_name(".tmp-step-00000002-00ff00ff") / "state").mkdir(parents=True)
    path.rename(path.with_name(".old-step-00000001-abcd"))
    (path.with_name(".trash-step-00000000-abcd") / "state").mkdir(parents=True)
    clean(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    assert newest_valid(tmp_path) == path


def test_hard_links_share_bytes_and_follow_symbolic_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "vae").mkdir(parents=True)
    (tmp_path / "blob").write_text("blob")
    (source / "vae" / "weights").symlink_to(tmp_path / "blob")
    (source / "config.json").write_text("{}")
    hard_link_tree(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "vae" / "weights").samefile(tmp_path / "blob")
    assert not (tmp_path / "copy" / "vae" / "weights").is_symlink()
    assert (tmp_path / "copy" / "config.json").samefile(source / "config.json")
    with pytest.raises(UsageError, match="hard_link_tree got .*absent, which is not a folder"):
        hard_link_tree(tmp_path / "absent", tmp_path / "other")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_are_copied_where_links_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    hard_link_tree(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    assert not (tmp_path / "copy" / "config.json").samefile(tmp_path / "source" / "config.json")


def test_free_space_is_checked_before_the_folder_exists(tmp_path: Path) -> None:
    check_free_space(tmp_path / "runs" / "new", 1, "CheckpointCallback")
    with pytest.raises(UsageError, match=r"CheckpointCallback needs 10000000.00 GB .* GB free; free space, keep fewer"):
        check_free_space(tmp_path / "runs" / "new", 10**16, "CheckpointCallback")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_names_the_last_good_checkpoint(tmp_path: Path, number: int) -> None:
    def fail() -> None:
        with saving(tmp_path, 3) as tmp:
            (tmp / "half").write_text("half")
            raise OSError(number, os.strerror(number))

    with pytest.raises(UsageError, match="step 3 .* failed: .* There is no earlier checkpoint; free space"):
        fail()
    good = save(tmp_path, 1)
    os.truncate(save(tmp_path, 2) / "trainer.json", 0)
    with pytest.raises(UsageError, match=f"The last good checkpoint is {good}; free space .* resume=auto"):
        fail()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


DISK_LIMIT_SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from sd_lightning._errors import UsageError
from sd_lightning.storage.checkpoint import saving, newest_valid, checkpoint_path
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage.tensor_store import write_shards

run = Path(sys.argv[1])

def ours(tmp, tensor):
    write_shards(tmp, 0, 1, [TensorRange("x", tuple(tensor.shape), 0, tensor.numel(), tensor)])

def library(tmp, tensor):
    save_file({"x": tensor}, tmp / "x.safetensors")

with saving(run, 1) as tmp:
    ours(tmp, torch.zeros(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
for write in (ours, library):
    try:
        with saving(run, 2) as tmp:
            write(tmp, torch.zeros(2**20))
    except UsageError as error:
        print(error)
assert newest_valid(run) == checkpoint_path(run, 1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no RLIMIT_FSIZE")
def test_a_file_size_limit_while_tensors_are_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DISK_LIMIT_SCRIPT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "Saving the checkpoint of step 2" in line
        assert "the file is larger than the limit allows" in line
        assert f"The last good checkpoint is {checkpoint_path(tmp_path, 1)}" in line
    assert names(tmp_path) == ["step-00000001"]


# Runs one save in a child that dies, as by SIGKILL, at the k-th touch of the file system, for every k.
DIE_SCRIPT = """
import os, shutil, sys
from pathlib import Path
from sd_lightning.storage import checkpoint, runs

run, step, num_dead = Path(sys.argv[1]), int(sys.argv[2]), 0

def save(content):
    with checkpoint.saving(run, step) as tmp:
        (tmp / "pipeline").mkdir()
        (tmp / "pipeline" / "weights").write_text(content)
    checkpoint.prune(run, 1, trusted=checkpoint.checkpoint_path(run, step))

def dying(function, countdown):
    def wrapped(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] < 0:
            os._exit(9)
        return function(*args, **kwargs)
    return wrapped

with checkpoint.saving(run, 1) as tmp:
    (tmp / "weights").write_text("first")
while True:
    child = os.fork()
    if child == 0:
        countdown = [num_dead]
        for module, name in [(Path, "mkdir"), (Path, "rename"), (os, "open"), (os, "fsync"), (os, "unlink"),
                             (os, "rmdir"), (Path, "write_text")]:
            setattr(module, name, dying(getattr(module, name), countdown))
        save(f"number {num_dead}")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path = checkpoint.newest_valid(run)
    assert path is not None, num_dead
    checkpoint.clean(run)
    assert checkpoint.newest_valid(run) == path
    left = {p.name for p in (run / "checkpoints").iterdir()}
    assert path.name in left and left <= {"step-00000001", f"step-{step:08d}"}, left
    assert not any(checkpoint.verify(run / "checkpoints" / name) for name in left), (num_dead, left)
    if status == 0:
        break
    num_dead += 1
print(num_dead)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "next step"])
def test_death_at_any_point_of_a_save_leaves_a_valid_checkpoint(tmp_path: Path, step: int) -> None:
    command = [sys.executable, "-c", DIE_SCRIPT, str(tmp_path), str(step)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10  # it did die at many points


KILL_SCRIPT = """
import itertools, sys
from pathlib import Path
from sd_lightning.storage import checkpoint, runs

run = Path(sys.argv[1])
checkpoint.clean(run)
newest = checkpoint.newest_valid(run)
for step in itertools.count(checkpoint.step_of(newest) if newest else 1):
    with checkpoint.saving(run, step) as tmp:
        for i in range(5):
            (tmp / f"file-{i}").write_bytes(bytes([step % 256]) * 300_000)
    checkpoint.prune(run, 2, trusted=checkpoint.checkpoint_path(run, step))
    print(step, flush=True)
"""


def test_sigkill_at_random_moments_never_loses_a_committed_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", KILL_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        seen = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.2))
        child.kill()
        seen = max([seen, *map(int, child.stdout.read().split())])
        assert child.wait() == -signal.SIGKILL
        newest = newest_valid(tmp_path)
        assert newest is not None
        assert step_of(newest) >= seen
        assert len(all_checkpoints(tmp_path)) <= 3
    clean(tmp_path)
    assert all(name.startswith("step-") for name in names(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
