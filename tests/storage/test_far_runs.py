"""Runs in a bucket: the newest whole checkpoint is found, and only what is needed of it is fetched, and checked."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from far_places import put
from locations import opened, refusal
from s3_server import S3Server
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage import checkpoint, far_runs, object_store, runs
from sd_lightning.storage.tensor_store import ShardedTensors, merge_index, write_shards

URL = "s3://bucket/runs/a"
SHAPES = {"master/w": (64, 1024), "exp_avg/w": (64, 1024), "master/bias": (7,)}
KINDS = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(far_runs.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "WAITS", (0.0,) * len(object_store.WAITS))
    monkeypatch.setattr(far_runs, "open_location", lambda url, *, key: opened(url, key))  # a client takes half a second
    far_runs.location_of.cache_clear()
    return tmp_path / "cache"


def values(name: str, step: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def save(run: Path, step: int, *, world_size: int = 1) -> Path:
    """Write a checkpoint of a run, as so many ranks do."""
    with checkpoint.saving(run, step) as tmp:
        (tmp / "state").mkdir()
        for rank in range(world_size):
            ranges = []
            for name, shape in SHAPES.items():
                numel = torch.Size(shape).numel()
                begin, end = (numel * each // world_size for each in (rank, rank + 1))
                ranges.append(TensorRange(name, shape, begin, end, values(name, step).reshape(-1)[begin:end]))
            write_shards(tmp / "state", rank, world_size, ranges)
        merge_index(tmp / "state", world_size)
        (tmp / "trainer.json").write_text(json.dumps({"step": step}))
        (tmp / "pipeline" / "unet").mkdir(parents=True)
        (tmp / "pipeline" / "model_index.json").write_text("{}")
        (tmp / "pipeline" / "unet" / "weights.safetensors").write_bytes(bytes([step]) * 5000)
    return checkpoint.checkpoint_path(run, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at steps 2 and 4, and its settings."""
    save(tmp_path / "run", 2)
    save(tmp_path / "run", 4)
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    return tmp_path / "run"


def files(copy: Path) -> set[str]:
    return {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}


def name_of(path: Path | None) -> str | None:
    return path and path.name


def test_the_newest_checkpoint_is_fetched_without_tensors_and_pipeline(s3: S3Server, run: Path) -> None:
    put(run, URL)
    copy = far_runs.fetch(URL, who="resume")
    assert copy == far_runs.working_folder(URL, "fetched") / "checkpoints" / "step-00000004"
    assert files(copy) == {"manifest.json", "trainer.json", "state/index.json"}
    assert (copy.parents[1] / "config.yaml").read_text() == "seed: 0\n"
    assert far_runs.name_of(copy) == f"{URL}/checkpoints/step-00000004" and far_runs.is_copy(copy)
    s3.reset()
    assert far_runs.fetch(f"{URL}/checkpoints/step-00000004/", who="resume") == copy
    assert not s3.count("GET", "trainer.json") and not s3.count("GET", ".safetensors"), "files are fetched once"


def test_the_pipeline_is_fetched_where_it_is_needed(s3: S3Server, run: Path) -> None:
    put(run, URL)
    with_pipeline = runs.find_pipeline(URL, who="run")
    assert files(with_pipeline) == {"model_index.json", "unet/weights.safetensors"}
    assert not (with_pipeline.parent / "state" / "shard-00000-of-00001.safetensors").exists()
    earlier = f"{URL}/checkpoints/step-00000002"
    assert runs.find_pipeline(earlier, who="run") == runs.find_pipeline(f"{earlier}/pipeline", who="model.pretrained")


def no_manifest(location: Any, name: str) -> None:
    location.delete(f"{name}/manifest.json")


def no_file(location: Any, name: str) -> None:
    location.delete(f"{name}/state/shard-00000-of-00001.safetensors")


def short_file(location: Any, name: str) -> None:
    location.replace(f"{name}/state/shard-00000-of-00001.safetensors", b"cut")


def altered_file(location: Any, name: str) -> None:
    data = location.read(f"{name}/trainer.json")
    location.replace(f"{name}/trainer.json", data.replace(b"4", b"5"))


def cut_manifest(location: Any, name: str) -> None:
    location.replace(f"{name}/manifest.json", location.read(f"{name}/manifest.json")[:-20])


def altered_manifest(location: Any, name: str) -> None:
    manifest = json.loads(location.read(f"{name}/manifest.json"))
    manifest["files"]["trainer.json"]["sha256"] = "0" * 64
    location.replace(f"{name}/manifest.json", json.dumps(manifest).encode())


def listing(name: str) -> Callable[[Any, str], None]:
    """A manifest that lists a file with such a name, which is there."""

    def attack(location: Any, checkpoint_name: str) -> None:
        manifest = json.loads(location.read(f"{checkpoint_name}/manifest.json"))
        manifest["files"][name] = {"size": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
        manifest["sha256"] = checkpoint._manifest_digest(manifest["files"])
        location.replace(f"{checkpoint_name}/manifest.json", json.dumps(manifest).encode())
        client, key = location.connection.file_system.client, f"runs/a/{checkpoint_name}/{name}"
        client.put_object(Bucket="bucket", Key=key, Body=b"evil")

    return attack


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(no_manifest, "manifest.json is missing", id="half uploaded"),
        pytest.param(no_file, "state/shard-00000-of-00001.safetensors is missing", id="no file"),
        pytest.param(short_file, "has 3 bytes instead of", id="short file"),
        pytest.param(altered_file, "trainer.json was altered (its SHA-256 differs)", id="altered file"),
        pytest.param(cut_manifest, "manifest.json cannot be read", id="cut manifest"),
        pytest.param(altered_manifest, "its own checksum differs", id="altered manifest"),
        pytest.param(listing("../../../../escaped"), "../../../../escaped is missing", id="upwards"),
        pytest.param(listing("/tmp/escaped-from-a-bucket"), "/tmp/escaped-from-a-bucket is missing", id="absolute"),
        pytest.param(listing("state/nul\0"), "is missing", id="zero byte"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_skipped(
    s3: S3Server,
    run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Any, str], None],
    problem: str,
) -> None:
    put(run, URL)
    damage(opened(URL, "test"), "checkpoints/step-00000004")
    assert name_of(far_runs.fetch(URL, who="resume")) == "step-00000002"
    assert f"{URL}/checkpoints/step-00000004 is not used: " in caplog.text and problem in caplog.text
    assert not list(tmp_path.rglob("escaped*")) and not Path("/tmp/escaped-from-a-bucket").exists()
    whole = f"resume={URL}/checkpoints/step-00000004: there is no whole checkpoint"
    refusal(lambda: far_runs.fetch(f"{URL}/checkpoints/step-00000004", who="resume"), whole, "correct the URL")


@pytest.mark.parametrize(
    ("here", "there", "winner"),
    [
        pytest.param((), (2, 4), "bucket", id="an empty folder"),
        pytest.param((2,), (2, 4), "bucket", id="an older folder"),
        pytest.param((2, 4), (2, 4), "folder", id="the same"),
        pytest.param((2, 4), (2,), "folder", id="not all uploaded"),
        pytest.param((4,), (), "folder", id="nothing uploaded"),
        pytest.param((), (), None, id="nothing"),
    ],
)
def test_resume_auto_takes_the_newer_of_bucket_and_folder(
    s3: S3Server,
    tmp_path: Path,
    here: tuple[int, ...],
    there: tuple[int, ...],
    winner: str | None,
) -> None:
    folder = far_runs.working_folder(URL)
    for step in here:
        save(folder, step)
    for step in there:
        save(tmp_path / "other", step)
    put(tmp_path / "other", URL)
    best = runs.find_checkpoint("auto", folder)
    if winner is None:
        assert best is None
        return
    assert best is not None and best.name == "step-00000004" and far_runs.is_copy(best) == (winner == "bucket")
    assert runs.holds(folder, best), "it is the run's own"
    assert not runs.holds(far_runs.working_folder("s3://bucket/runs/b"), best)


def test_a_damaged_folder_leaves_it_to_the_bucket(s3: S3Server, run: Path) -> None:
    put(run, URL)
    folder = far_runs.working_folder(URL)
    shutil.copytree(run, folder)
    shard = folder / "checkpoints" / "step-00000004" / "state" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    best = runs.find_checkpoint("auto", folder)
    assert best is not None and best.name == "step-00000004" and far_runs.is_copy(best)


def test_copies_follow_the_bucket(s3: S3Server, run: Path, tmp_path: Path) -> None:
    put(run, URL)
    copy = far_runs.fetch(URL, who="resume", pipeline=True)
    far_runs.fetch(f"{URL}/checkpoints/step-00000002", who="resume")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    again = save(run, 4)
    (again / "trainer.json").write_text(json.dumps({"step": "4, trained anew"}))
    (again / "manifest.json").unlink()
    checkpoint._write_manifest(again, {})
    for name in opened(URL, "test").entries("checkpoints/step-00000002/"):
        opened(URL, "test").delete(name.name)
    opened(URL, "test").delete("config.yaml")
    put(again, f"{URL}/checkpoints/step-00000004")
    assert far_runs.fetch(URL, who="resume") == copy
    assert "trained anew" in (copy / "trainer.json").read_text() and not (copy / "pipeline").exists()
    assert not (copy.parents[1] / "config.yaml").exists()


@pytest.mark.parametrize(("saved_by", "read_by"), [(1, 1), (2, 2), (1, 2), (2, 1), (3, 2)])
def test_a_rank_fetches_its_part_of_the_tensors(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: int, read_by: int
) -> None:
    monkeypatch.setattr("sd_lightning.storage.ranged_file.GAP_BYTES", 256)
    put(save(tmp_path / "run", 4, world_size=saved_by).parents[1], URL)
    for rank in range(read_by):
        shutil.rmtree(far_runs.working_folder(URL, "fetched"), ignore_errors=True)  # each rank on a machine of its own
        copy = far_runs.fetch(URL, who="resume")
        s3.reset()
        wanted = {
            name: [torch.Size(shape).numel() * r // read_by for r in (rank, rank + 1)] for name, shape in SHAPES.items()
        }
        with ShardedTensors(copy / "state") as store:
            store.fetch([(name, begin, end) for name, (begin, end) in wanted.items()])
            requests = s3.count("GET", ".safetensors")
            for name, (begin, end) in wanted.items():
                out = torch.empty(end - begin)
                store.read_into(name, out, begin, end)
                assert torch.equal(out, values(name, 4).reshape(-1)[begin:end])
        assert s3.count("GET", ".safetensors") == requests <= 5 * saved_by, "all in a few requests"
        assert KINDS / read_by <= s3.body_bytes < KINDS / read_by + 2000 * saved_by


def test_tensors_are_fetched_as_they_are_read(s3: S3Server, run: Path) -> None:
    put(run, URL)
    copy = far_runs.fetch(URL, who="run")
    s3.reset()
    with ShardedTensors(copy / "state") as store:
        out = torch.empty(3, 1024)
        store.read_into("exp_avg/w", out, 5 * 1024, 8 * 1024)
        assert torch.equal(out, values("exp_avg/w", 4)[5:8])
        streamed = torch.cat([block.clone().reshape(-1) for block in store.streamed("master/w").slices()])
        assert torch.equal(streamed, values("master/w", 4).reshape(-1))
    assert not list(copy.rglob("*.safetensors")) and s3.body_bytes < KINDS
    assert len(list((copy / "state").iterdir())) == 1, "what was fetched in ranges is gone"


def test_files_that_are_fetched_whole_are_hashed_and_shared(s3: S3Server, run: Path) -> None:
    put(run, URL)
    copy, everything = far_runs.fetch(URL, who="resume"), [(n, 0, torch.Size(s).numel()) for n, s in SHAPES.items()]
    for _ in range(2):  # processes of one machine
        with ShardedTensors(copy / "state") as store:
            store.fetch(everything)
    assert s3.body_bytes < 2 * KINDS and (copy / "state" / "shard-00000-of-00001.safetensors").is_file()
    name = "checkpoints/step-00000004/state/shard-00000-of-00001.safetensors"
    (copy / "state" / "shard-00000-of-00001.safetensors").unlink()
    data = opened(URL, "test").read(name)
    opened(URL, "test").replace(name, data[:-1] + bytes([data[-1] ^ 1]))
    with ShardedTensors(copy / "state") as store:
        refusal(
            lambda: store.fetch(everything), f"{URL}/checkpoints/step-00000004 is damaged", "was altered (its SHA-256"
        )
    opened(URL, "test").replace(name, b"\x10" + data[1:])
    with ShardedTensors(copy / "state") as store:
        refusal(lambda: store.fetch(everything[:1]), "Tensor 'master/w' cannot be read", "use another checkpoint")
    opened(URL, "test").delete(name)
    with ShardedTensors(copy / "state") as store:
        refusal(lambda: store.read_into("master/w", torch.empty(64, 1024)), "Tensor 'master/w'", "no such file")


def test_a_local_store_asks_no_bucket(run: Path) -> None:
    with ShardedTensors(run / "checkpoints" / "step-00000004" / "state") as store:
        store.fetch([("no such tensor", 0, 1)])


def test_records_are_fetched_without_weights(s3: S3Server, run: Path, tmp_path: Path) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "metrics.csv").write_text("step\n1\n")
    put(run, URL)
    far_runs.fetch_records(URL, tmp_path / "records", runs.is_record, who="runs")
    assert files(tmp_path / "records") == {"config.yaml", "logs/metrics.csv"}


@pytest.mark.parametrize("url", ["s3://bucket/../a", "s3://bucket//a", "s3://bucket/./a", "gs://"])
def test_urls_lead_to_no_other_folder(url: str) -> None:
    refusal(lambda: far_runs.working_folder(url, "fetched"), url, "without empty names, . and ..")


def test_what_a_url_is_not(s3: S3Server, run: Path, cache: Path) -> None:
    for folder in (Path("runs/a"), cache, cache / "runs" / "s3", cache / "latents" / "s3" / "b", run):
        assert far_runs.url_of(folder) is None
    assert not any(map(far_runs.is_url, (Path("runs/a"), "runs/a", "ftp://host/runs", "sd/model", "s3:", None)))
    refusal(lambda: far_runs.fetch(URL, who="run"), f"run={URL}: there is no whole checkpoint", "correct the URL")
    (run / "pipeline").mkdir()
    (run / "pipeline" / "model_index.json").write_text("{}")
    put(run / "pipeline", "s3://bucket/exported")
    refusal(
        lambda: far_runs.fetch("s3://bucket/exported", who="run"), "s3://bucket/exported", "copy other folders here"
    )
    refusal(
        lambda: far_runs.fetch_records("s3://bucket/none", cache, runs.is_record, who="runs"),
        "runs=s3://bucket/none",
        "nothing at",
    )
    refusal(
        lambda: far_runs.fetch("s3://none/a", who="run"), "run=s3://none/a", "the bucket does not exist", "create it"
    )
    s3.deny("AccessDenied")
    refusal(lambda: far_runs.fetch(URL, who="run"), f"run={URL}", "access is denied", "grant them")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    refusal(lambda: far_runs.fetch("s3://bucket/b", who="run"), "run=s3://bucket/b", "boto3", "sd-lightning[s3]")
