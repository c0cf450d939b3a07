"""Latent stores that a Ray cluster encodes."""

import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_encoders
import small_store
from places import SUPPORT
from ray_encoders import Accompanied, DeadAtFirst, Deadly, ElsewhereFolder, Failing, ProcessNoting
from sd_lightning import precompute
from sd_lightning._errors import UsageError
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store.encoding import EncodeTask, ShardEncoder
from sd_lightning.data.store.files import hashes_of
from sd_lightning.remote import precompute as ray_precompute
from sd_lightning.remote.launchers import Ray
from sd_lightning.remote.precompute import RayWorkers, reserve
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location
from small_store import MeanEncoder, recipe, write_photos, write_pictures

IMAGES_PER_FILE = 4


def shard_of(photos: Path, root: Location, encoder: Any) -> ShardEncoder:
    return ShardEncoder({"train": ImageFolder(photos)}, encoder, recipe(), root.child("r"), torch.device("cpu"))


def tasks_of(shard: ShardEncoder) -> list[EncodeTask]:
    source = shard.sources["train"]
    hashes = hashes_of([source.content(i) for i in range(len(source))])
    blocks = [np.arange(i, min(i + IMAGES_PER_FILE, len(source))) for i in range(0, len(source), IMAGES_PER_FILE)]
    return [EncodeTask("train", block, hashes[block], *shard.recipe.all_shapes) for block in blocks]


@contextmanager
def workers(shard: ShardEncoder, root: Location, **options: Any) -> Iterator[RayWorkers]:
    launcher = Ray(**{"cpus_per_worker": 0.5, "start_seconds": 200, **options})
    with closing(reserve(launcher, root)(shard, texts=None)) as started:
        yield started


def files(folder: Path) -> Mapping[str, bytes]:
    """The content of all files, but of lists that carry no latents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def _classes_of_tests_travel(ray: Any) -> Iterator[None]:
    """Their modules are not on the path of Ray's processes."""
    for module in (ray_encoders, small_store):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in (ray_encoders, small_store):
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def test_two_of_three_encoders_are_killed_and_the_bytes_are_those_of_this_process(
    ray: Any, tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    photos = write_pictures(tmp_path / "photos", 50)
    here, there = (open_location(tmp_path / name, key="store") for name in ("here", "there"))
    local = shard_of(photos, here, MeanEncoder())
    tasks = tasks_of(local)
    expected = {(each.name, each.size) for each in map(local, tasks)}
    shard, killed = shard_of(photos, there, Accompanied(notes)), []
    with workers(shard, there, num_workers=3) as runner, caplog.at_level(logging.WARNING):
        assert "launcher=ray: 3 workers of the cluster at" in capsys.readouterr().out
        encoded = []
        for each in runner(tasks):
            encoded.append((each.name, each.size))
            if not killed:
                killed = sorted(int(path.name) for path in notes.iterdir())[:2]
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
        assert not list(runner([]))
    assert len(killed) == 2 and len(list(notes.iterdir())) >= 3
    assert caplog.text.count("it is started again") == 2
    assert sorted(encoded) == sorted(expected), "each file once"
    there.clean()  # as the store's next job does: a killed process may have been writing a file
    assert files(tmp_path / "there") == files(tmp_path / "here"), "nothing else is left"


@pytest.mark.full("cluster")
@pytest.mark.parametrize(
    ("encoder", "reason", "processes"),
    [(Deadly, "ActorDiedError: ", 2), (Failing, "RuntimeError: no memory at all", 2)],
)
def test_an_encoder_that_keeps_dying_or_fails_is_named(
    ray: Any, tmp_path: Path, notes: Path, encoder: type[ProcessNoting], reason: str, processes: int
) -> None:
    root = open_location(tmp_path / "store", key="store")
    shard = shard_of(write_pictures(tmp_path / "photos", 4), root, encoder(notes))
    with workers(shard, root, num_workers=1, max_failures=1) as runner:
        message = (
            rf"launcher=ray: a worker on {socket.gethostname()} failed \({reason}.*\), 2 times without a file done; "
            r"expected at most launcher.max_failures=1; look at .*; nothing is lost: run precompute again"
        )
        with pytest.raises(UsageError, match=message) as raised:
            list(runner(tasks_of(shard)))
    assert "\n" not in str(raised.value) and len(list(notes.iterdir())) == processes
    assert not files(tmp_path / "store")


@pytest.mark.full("cluster")
def test_a_cluster_whose_cpus_others_hold_is_one_line(ray: Any, tmp_path: Path, notes: Path) -> None:
    holder = ray.remote(num_cpus=7.5)(type("Holder", (), {"hold": lambda self: True})).remote()
    assert ray.get(holder.hold.remote())
    root = open_location(tmp_path / "store", key="store")
    shard = shard_of(write_pictures(tmp_path / "photos", 4), root, ProcessNoting(notes))
    message = (
        r"1 of 1 workers have not started within launcher.start_seconds=15; expected free CPUs, one of them to dec"
    )
    with pytest.raises(UsageError, match=message), workers(shard, root, num_workers=1, start_seconds=15):
        pass
    assert list(notes.iterdir()), "the encoder has started"


@pytest.mark.full("cluster")
def test_a_node_leaves_and_another_encodes_its_file(
    ray: Any, tmp_path: Path, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no room for its encoder elsewhere, which waits for it for ever."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes = [cluster.add_node(num_cpus=1, labels={"role": "encoder"}) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(cluster.address, logging_level=logging.ERROR)
    here, there = (open_location(tmp_path / name, key="store") for name in ("here", "there"))
    photos = write_pictures(tmp_path / "photos", 80)
    local, shard = shard_of(photos, here, MeanEncoder()), shard_of(photos, there, ProcessNoting(notes))
    tasks = tasks_of(local)
    expected = sorted((each.name, each.size) for each in map(local, tasks))
    options = {"num_workers": 2, "cpus_per_worker": 1, "labels": {"role": "encoder"}, "start_seconds": 60}
    try:
        with workers(shard, there, **options) as runner, caplog.at_level(logging.WARNING):
            results = runner(tasks)
            encoded = [next(results)]
            cluster.remove_node(nodes[0], allow_graceful=False)
            encoded += results
        assert caplog.text.count("it is started again") == 1
        assert sorted((each.name, each.size) for each in encoded) == expected, "each file once"
        there.clean()  # as the store's next job does: a killed process may have been writing a file
        assert files(tmp_path / "there") == files(tmp_path / "here")
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_machine_that_cannot_encode_is_refused_in_one_line(
    ray: Any, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_location(tmp_path / "store", key="store")
    photos = write_pictures(tmp_path / "photos", 8)
    shard = shard_of(photos, root, ProcessNoting(notes))
    tasks = tasks_of(shard)
    elsewhere = ElsewhereFolder(str(tmp_path / "store"), tmp_path / "store", "store=store")
    with (
        pytest.raises(
            UsageError, match=r"the machine \S+ does not see the folder store=.*expected one that all machin"
        ),
        workers(shard, elsewhere, num_workers=1),
    ):
        pass
    (photos / "006.png").unlink()
    with workers(shard, root, num_workers=1) as runner:
        with pytest.raises(
            UsageError, match=r"precompute: \S+006.png was read before, and cannot be read on \S+ \("
        ) as raised:
            list(runner(tasks))
        assert "\n" not in str(raised.value)
    versions = ray_precompute.package_versions() | {"diffusers": "0.1"}
    monkeypatch.setattr(ray_precompute, "package_versions", lambda: versions)
    with (
        pytest.raises(
            UsageError, match=r"the machine \S+ has diffusers [\d.]+; expected 0.1, as where the program was"
        ),
        workers(shard, root, num_workers=1),
    ):
        pass
    assert not [name for name in files(tmp_path / "store") if ".tmp" in name]


@pytest.mark.full("cluster")
def test_a_worker_that_dies_while_it_starts_is_replaced_and_each_looks_for_the_store(
    ray: Any, tmp_path: Path, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = open_location(tmp_path / "store", key="store")
    shard = shard_of(write_pictures(tmp_path / "photos", 12), root, DeadAtFirst(notes))
    with caplog.at_level(logging.WARNING), workers(shard, root, num_workers=1) as runner:
        assert re.findall(r"a worker failed \(ActorDiedError: .*; it is started again", caplog.text)
        results = runner(tasks_of(shard))
        next(results)
        (mark,) = (tmp_path / "store").glob(".tmp-workers-*")
        mark.unlink()  # as on a machine that does not share the folder
        pid = max(notes.iterdir(), key=lambda note: note.stat().st_mtime_ns).name
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(UsageError, match=r"the machine \S+ does not see the folder store="):
            list(results)


def test_labels_that_no_machine_has_are_refused_at_once(ray: Any, tmp_path: Path, notes: Path) -> None:
    root = open_location(tmp_path / "store", key="store")
    shard = shard_of(write_pictures(tmp_path / "photos", 4), root, ProcessNoting(notes))
    message = r"launcher=ray with 1 workers asks for 0.5 CPU; .* 0 on 0 machine\(s\) with the label\(s\) {'gpu': '1'}"
    with pytest.raises(UsageError, match=message), workers(shard, root, num_workers=1, labels={"gpu": 1}):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["launcher.num_workers=99"],
            "with 99 workers, and a CPU that decodes, asks for 100 CPU; the Ray cluster has 8",
        ),
        (["launcher.num_workers=2", "launcher.gpus_per_worker=0.5"], "asks for 1 GPU; the Ray cluster has 0"),
        (["launcher.num_workers=[1,2]"], r"num_workers=\[1, 2\].*expected one number of workers"),
        (["launcher.gpus_per_worker=2"], "launcher.gpus_per_worker=2.* a GPU or a part of one each"),
        (["workers=2"], "precompute got workers=2 with launcher=ray; expected launcher.num_workers"),
        (["action=prune"], "precompute prune got launcher=ray; expected it only with encoding"),
        (["launcher.address=127.0.0.1:1"], None),
    ],
)
def test_what_is_refused_before_data_are_read(
    ray: Any, call_main: Callable[..., tuple[int, str]], arguments: list[str], message: str | None
) -> None:
    if message is None:
        ray.shutdown()
        message = "launcher=ray: no Ray cluster answers at 127.0.0.1:1"
    data = ["data=images", "data.train_data_dir=not-there", "store=store"]
    code, out = call_main(precompute, *data, "launcher=ray", *arguments)
    assert code == 2 and len(out.splitlines()) == 1 and re.search(message, out), out


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, precompute)


RELATIVE = [
    "data=images",
    "data.train_data_dir=photos",
    "data.resolution=32",
    "data.center_crop=true",
    "shard_mb=0.005",
]
"""Of photos below the folder of the driver, in files of four."""


@pytest.mark.slow
def test_a_cluster_makes_the_store_that_this_machine_makes(ray: Any, cli: Any, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    (tmp_path / "photos" / "07.png").write_bytes(b"no picture")
    command = [*RELATIVE, "data.max_bad_fraction=0.2", "text=true"]
    code, here = cli(*command, "store=here", "workers=1")
    assert code == 0, here
    for workers in (1, 3):
        code, out = cli(*command, f"store=by-{workers}", "launcher=ray", f"launcher.num_workers={workers}")
        assert code == 0, out
        some = "1 worker of" if workers == 1 else f"{workers} workers of"
        assert f"launcher=ray: {some} the cluster at" in out and "1 bad" in out and "texts: " in out
        assert files(tmp_path / f"by-{workers}") == files(tmp_path / "here")
    code, out = cli(*command, "store=by-3", "launcher=ray")
    assert code == 0 and "19 kept, 0 added" in out, out


@pytest.mark.full("cluster")
def test_a_job_whose_driver_was_killed_goes_on(ray: Any, ray_address: str, cli: Any, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 400)
    assert cli(*RELATIVE, "store=here", "workers=1")[0] == 0
    command = [*RELATIVE, "store=there", "launcher=ray", "launcher.num_workers=2"]
    arguments = [sys.executable, "-m", "sd_lightning.precompute", *command, f"launcher.address={ray_address}"]
    driver = subprocess.Popen(arguments, cwd=tmp_path)
    while len(list((tmp_path / "there").rglob("latents/*.safetensors"))) < 10:
        assert driver.poll() is None
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    left = len(list((tmp_path / "there").rglob("latents/*.safetensors")))
    assert not list((tmp_path / "there").rglob("generations/*"))
    time.sleep(3)  # workers of the killed driver end
    code, out = cli(*command)
    assert code == 0 and " found that an earlier job had encoded" in out, out
    assert 10 <= left < len(list((tmp_path / "here").rglob("latents/*.safetensors")))
    kept = {name: data for name, data in files(tmp_path / "there").items() if ".tmp-workers" not in name}
    assert kept == files(tmp_path / "here")


@pytest.mark.full("cluster")
def test_workers_share_gpus(tmp_path: Path, run_python: Any) -> None:
    """On a cluster that says it has two GPUs; nothing is computed on them."""
    done = run_python(SUPPORT / "ray_gpus.py", tmp_path, env={"PYTHONPATH": f"{SUPPORT}:{os.environ['PYTHONPATH']}"})
    assert done.returncode == 0, done.stderr
    assert sorted(path.read_text() for path in (tmp_path / "notes").iterdir()) == ["0", "0", "1", "1"]


@pytest.mark.full("cluster")
def test_a_store_in_a_bucket(ray: Any, ray_address: str, s3: Any, tmp_path: Path, notes: Path) -> None:
    ray.shutdown()
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    ray.init(ray_address, runtime_env={"env_vars": settings}, logging_level=logging.ERROR)
    photos = write_pictures(tmp_path / "photos", 20)
    here, there = open_location(tmp_path / "here", key="store"), open_location("s3://bucket/far", key="store")
    local, far = shard_of(photos, here, MeanEncoder()), shard_of(photos, there, ProcessNoting(notes))
    tasks = tasks_of(local)
    with workers(far, there, num_workers=2) as runner:
        encoded = list(runner(tasks))
    assert {each.name for each in encoded} == {local(task).name for task in tasks}
    assert all(there.read(name) == data for name, data in files(tmp_path / "here").items())
    s3.deny("AccessDenied").matches = lambda request: request.method != "PUT"  # the driver leaves its mark
    with (
        pytest.raises(UsageError, match=r"launcher=ray: the machine \S+ cannot use the store: store=s3://bucket/far"),
        workers(far, there, num_workers=1),
    ):
        pass
