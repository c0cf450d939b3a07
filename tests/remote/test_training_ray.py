"""Training on Ray: what crosses to the workers, workers that die or are asked to leave, and what is refused."""

import os
import queue
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from locations import opened
from ranks import run_program
from ray_training import SMALL, Training, weights
from sd_lightning._errors import UsageError
from sd_lightning.apps import launching
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.remote import training
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage import checkpoint, far_runs

Start = Callable[..., Training]


@pytest.fixture
def start(ray_address: str, tmp_path: Path) -> Iterator[Start]:
    """Start a training with two workers, in `tmp_path/<name>`; it is ended after the test."""
    started: list[Training] = []

    def begin(name: str, *overrides: str, address: str | None = ray_address, **options: Any) -> Training:
        started.append(Training(address, tmp_path / name, *overrides, **options))
        return started[-1]

    yield begin
    for each in started:
        each.end()


WORKERS = "launcher.num_workers=2"


class TestWhatCrosses:
    def test_paths_are_absolute_and_names_stay(self, compose: Any, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir()
        spec = RunSpec(
            {
                "output_dir": "runs/a",
                "resume": "auto",
                "init_from": "base",
                "model": {"pretrained": "stabilityai/sd-turbo", "vae": "base"},
                "data": {"train_data_dir": "photos", "val_data_dir": "s3://bucket/val", "split": "base"},
                "callbacks": {"samples": {"run_dir": "runs/a"}, "own": [{"name": "runs/a/own.txt"}]},
            }
        ).with_absolute_paths()
        assert spec["output_dir"] == spec["callbacks.samples.run_dir"] == str(tmp_path / "runs/a")
        assert spec["init_from"] == spec["model.vae"] == str(tmp_path / "base")
        assert spec["data"] == {
            "train_data_dir": str(tmp_path / "photos"),
            "val_data_dir": "s3://bucket/val",
            "split": "base",
        }
        assert (spec["resume"], spec["model.pretrained"]) == ("auto", "stabilityai/sd-turbo")
        assert spec["callbacks.own"] == [{"name": str(tmp_path / "runs/a/own.txt")}]


class TestANewStart:
    """What a start begins from that is not the first."""

    @pytest.fixture
    def begun(self, tmp_path: Path) -> Callable[..., tuple[Callable[[], tuple[str | None, bool]], launching._Start]]:
        """Launch a run in `tmp_path`; return what a new start of it would resume, and whether it would overwrite."""

        def launch(**settings: Any) -> tuple[Callable[[], tuple[str | None, bool]], launching._Start]:
            settings = {"output_dir": str(tmp_path), "resume": None, "overwrite": False, "trainer": {}} | settings
            calls: list[RunSpec] = []
            spec = RunSpec(settings)
            before = {} if settings["resume"] == "auto" else launching._saved(spec)
            start = launching._Start(spec, lambda spec, asked: calls.append(spec) or 0, before)

            def again() -> tuple[str | None, bool]:
                start(devices=2, num_nodes=3, is_restart=True, asked=bool)
                assert calls[-1]["trainer"] == {"devices": 2, "num_nodes": 3}
                return calls[-1]["resume"], calls[-1]["overwrite"]

            start(devices=2, num_nodes=3, is_restart=False, asked=bool)
            assert (calls[0]["resume"], calls[0]["overwrite"]) == (settings["resume"], settings["overwrite"])
            return again, start

        return launch

    def test_resumes_what_there_is_of_this_run(self, begun: Any, tmp_path: Path) -> None:
        again, start = begun()
        assert again() == (None, False) and start.position() == "from the start"
        save(tmp_path, 8)
        assert again() == ("auto", False) and start.position() == "from step 8"
        again, start = begun(resume="auto")
        assert again() == ("auto", False) and start.position() == "from step 8"

    def test_deletes_the_old_run_until_there_is_something_new(self, begun: Any, tmp_path: Path) -> None:
        old, half = save(tmp_path, 4), save(tmp_path, 8)
        again, start = begun(overwrite=True)
        (half / "state").unlink()  # killed while it deletes
        os.utime(half)
        assert again() == (None, True) and start.position() == "from the start"
        (half / "manifest.json").unlink()
        assert again() == (None, True)
        save(tmp_path, 4)
        assert again() == ("auto", False) and start.position() == f"from step {checkpoint.step_of(old)}"

    def test_goes_back_to_the_earlier_step_until_there_is_something_new(self, begun: Any, tmp_path: Path) -> None:
        earlier, later = save(tmp_path, 4), save(tmp_path, 8)
        again, start = begun(resume=str(earlier))
        assert again() == (str(earlier), False) and start.position() == f"from {earlier}"
        later.rename(later.with_name("set-aside-step-00000008-1234"))
        assert again() == (str(earlier), False)
        new = save(tmp_path, 6)
        assert again() == (str(new), False) and start.position() == "from step 6"

    def test_knows_what_the_bucket_holds(self, begun: Any, s3: Any, monkeypatch: Any, tmp_path: Path) -> None:
        monkeypatch.setenv("SD_LIGHTNING_CACHE", str(tmp_path))
        url = "s3://bucket/runs/a"
        bucket, manifest = opened(url, "output_dir"), "checkpoints/step-{:08d}/manifest.json".format
        for step in (4, 8):
            bucket.replace(manifest(step), b"old")
        folder = str(far_runs.working_folder(url))
        going_back = begun(output_dir=folder, resume=f"{url}/checkpoints/step-00000004")
        deleting = begun(output_dir=folder, overwrite=True)
        assert going_back[0]() == (f"{url}/checkpoints/step-00000004", False)
        assert deleting[0]() == (None, True) and deleting[1].position() == "from the start"
        bucket.replace(manifest(6), b"new")  # while step 8 is not set aside yet
        assert going_back[0]() == (f"{url}/checkpoints/step-00000006", False)
        assert going_back[1].position() == "from step 6"
        bucket.delete(manifest(6))
        bucket.replace(manifest(8), b"new")
        assert deleting[0]() == ("auto", False) and deleting[1].position() == "from step 8"
        s3.deny("AccessDenied")
        assert deleting[1].position() == "from its newest checkpoint"


def save(run_dir: Path, step: int) -> Path:
    """Write a checkpoint that differs from all others."""
    with checkpoint.saving(run_dir, step) as folder:
        (folder / "state").write_bytes(os.urandom(8))
    return checkpoint.checkpoint_path(run_dir, step)


class Events(queue.Queue):
    """Ray's queue, in this process."""

    size = queue.Queue.qsize

    def get_nowait_batch(self, number: int) -> list[Any]:
        return [self.get_nowait() for _ in range(number)]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Ray's `fit` is `fit.wait`: it ends when its controller, "controller", is killed."""
    import ray

    ended = threading.Event()
    monkeypatch.setattr(ray, "kill", lambda actor: ended.set() if actor == "controller" else None)
    return ended


class TestTheEndIsOneLine:
    @pytest.mark.parametrize(
        ("kind", "line"),
        [
            ("lost", r"Ray failed \(ObjectLostError: .*12ab.*\)"),
            ("controller", r"Ray failed \(RuntimeError: a b\)"),
            ("workers", r"rank 1 died; that was more than launcher.max_failures=3"),
        ],
    )
    def test_after_an_error(self, kind: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
        from ray.exceptions import ObjectLostError
        from ray.train import ControllerError, WorkerGroupError

        error = {
            "lost": ObjectLostError("12ab", None, "there"),
            "controller": ControllerError(RuntimeError("a\nb")),
            "workers": WorkerGroupError("trace", {1: ValueError("x")}),
        }[kind]
        events = Events()
        events.put(("cause", "rank 1 died"))
        code = training._follow(lambda: raising(error), events, Events(), Ray(), lambda: "from step 4")
        assert code == 1
        (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
        assert re.fullmatch(f"launcher=ray: {line}; resume=auto goes on from step 4", record.getMessage())

    def test_workers_that_get_no_place(self, fit: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
        begin, events = time.monotonic(), Events()
        late = threading.Timer(1.5, events.put, [("controller", "controller")])  # it starts, when time is up
        late.start()
        events.put(("start", (0, 2)))
        events.put(("cause", "rank 1 died"))
        options = Ray(num_workers=2, start_seconds=0.5)
        assert training._follow(lambda: fit.wait(60), events, Events(), options, lambda: "from step 4") == 1
        assert fit.is_set() and 1.5 < time.monotonic() - begin < 30
        assert (
            "rank 1 died; launcher.num_workers=2 got no place within launcher.start_seconds=0.5; ray status shows what "
            "there is; resume=auto goes on from step 4" in caplog.text
        )

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("has_run", [False, True])
    def test_a_signal_while_workers_wait_for_a_place(self, has_run: bool, number: int, fit: threading.Event) -> None:
        events = Events()
        events.put(("controller", "controller"))
        for event in [("start", (0, 2)), ("failure", "rank 1 died")] if has_run else []:
            events.put(event)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
        timer.start()
        begin = time.monotonic()
        code = training._follow(lambda: fit.wait(60), events, Events(), Ray(num_workers=2), lambda: "from step 4")
        assert code == 75 and fit.is_set() and time.monotonic() - begin < 30


@pytest.mark.parametrize(("kind", "line"), [("cause", "the number of workers changes"), ("failure", "rank 1 died")])
def test_workers_that_end_for_a_change_of_their_number_are_not_told_to_have_died(
    kind: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    for event in (("start", (0, 1)), ("cause", "rank 1 died"), (kind, "rank 1 died"), ("start", (1, 2))):
        events.put(event)
    events.put(("code", 0))
    assert training._follow(lambda: None, events, Events(), Ray(num_workers=(1, 2)), lambda: "from step 4") == 0
    assert f"{line}; the run goes on from step 4 with 2 workers" in caplog.text


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("sizes", "place"), [({2}, "2 4 0 2 1 2"), ({2, 3}, "2 4 0 1 2 4")], ids=["equal machines", "unequal machines"]
)
def test_a_worker_is_a_rank_as_under_torchrun(monkeypatch: pytest.MonkeyPatch, sizes: set[int], place: str) -> None:
    import ray.train

    numbers = {"world_rank": 2, "world_size": 4, "local_rank": 0, "local_world_size": 2, "node_rank": 1}
    context = type("Context", (), {f"get_{name}": lambda self, n=n: n for name, n in numbers.items()})
    monkeypatch.setattr(ray.train, "get_context", context)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: None if sizes == {2} else Gpus())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", environment := {"CUDA_VISIBLE_DEVICES": "0,1"})
    training._become_rank("192.0.2.1", 4242, 1, sizes)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    assert " ".join(environment[name] for name in names.split()) == place
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("192.0.2.1", "4242")
    assert environment["CUDA_VISIBLE_DEVICES"] == ("0,1" if sizes == {2} else "1")
    assert environment["TORCHELASTIC_RUN_ID"] and environment["TORCHELASTIC_RESTART_COUNT"] == "1"


class Gpus:
    """What Ray says of a worker that has the second GPU of its machine."""

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        return {"GPU": ["1"]}


class TestRefusals:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ([], r"launcher.num_workers=2: strategy=single is one process.*strategy=ddp"),
            (
                ["strategy=ddp", "trainer.devices=3"],
                r"launcher.num_workers=2 is the number of processes.*leave trainer.devices=3 out",
            ),
            (["strategy=ddp", "data.batch_size=1"], r"data.batch_size=1 .*2 process"),
            (
                ["strategy=ddp", "launcher.num_workers=[2,12]", "data.batch_size=8"],
                r"launcher.num_workers=\[2, 12\]: data.batch_size=8 .*write data.batch_size=12 or more",
            ),
        ],
    )
    def test_of_numbers(self, compose: Any, overrides: list[str], message: str) -> None:
        spec = RunSpec.of(compose("train", "launcher=ray", WORKERS, *overrides))
        assert isinstance(spec.launcher, Ray)
        with pytest.raises(UsageError, match=message):
            launching.launch(spec, spec.launcher, print)

    @pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
    def test_of_a_launcher_in_a_launcher(self, compose: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        spec = RunSpec.of(compose("train", "launcher=ray", WORKERS, "strategy=ddp"))
        monkeypatch.setenv(variable, "2")
        assert isinstance(spec.launcher, Ray)
        with pytest.raises(UsageError, match=r"another launcher has started 2 processes.*without torchrun.*--ntasks=1"):
            launching.launch(spec, spec.launcher, print)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["launcher.gpus_per_worker=1"], r"asks for 2 GPU; the Ray cluster has 0.*launcher.num_workers"),
            (["launcher.gpus_per_worker=0.5"], r"launcher.gpus_per_worker=0.5: a process trains on one GPU"),
            (["launcher.num_workers=9"], r"asks for 9 CPU; the Ray cluster has 8"),
            (["launcher.labels={role: trainer}"], r"asks for 2 CPU; .* has 0 on 0 machine.*'role': 'trainer'"),
        ],
    )
    def test_of_the_cluster(self, compose: Any, ray: Any, overrides: list[str], message: str) -> None:
        spec = RunSpec.of(compose("train", "launcher=ray", WORKERS, "strategy=ddp", *overrides))
        assert isinstance(spec.launcher, Ray)
        with pytest.raises(UsageError, match=message):
            launching.launch(spec, spec.launcher, print)
        assert not Path(spec["output_dir"]).exists()


@pytest.mark.full("cluster")
def test_two_workers_train_as_two_processes_do(start: Start, tmp_path: Path) -> None:
    ray_run = start("ray", WORKERS, "strategy=ddp", "resume=auto", "+callbacks.fork._target_=ray_training.ForkedWriter")
    assert ray_run.wait() == 0, ray_run.output()
    local = start("local", "strategy=ddp", "trainer.devices=2", address=None)
    assert local.wait() == 0, local.output()
    assert weights(tmp_path / "ray") == weights(tmp_path / "local")
    shown = ray_run.output()
    assert shown.count("step 8/8 |") == shown.count("steps              8 in") == 1, shown  # each line once
    assert shown.count("written by a forked process\n") == shown.count("a line without an end") == 1, shown
    assert not list((tmp_path / "ray").glob(".tmp*"))


@pytest.mark.slow
def test_a_worker_that_dies_costs_the_steps_since_the_checkpoint(start: Start, tmp_path: Path) -> None:
    killed = start("killed", WORKERS, "strategy=gemini", steps=10)
    killed.wait_for("step 5/10 |")
    killed.worker(1).kill()
    assert killed.wait() == 0, killed.output()
    lines = [line for line in killed.output().splitlines() if "the run goes on from step" in line]
    assert len(lines) == 1 and "rank 1" in lines[0] and "died" in lines[0], killed.output()
    length = ("trainer.max_steps=10", "lr_scheduler.total_steps=10", f"output_dir={tmp_path / 'local'}")
    run_program("train", *SMALL, *length, "strategy=gemini", "trainer.devices=2")
    assert weights(tmp_path / "killed") == weights(tmp_path / "local")


@pytest.mark.full("cluster")
def test_a_run_in_a_bucket_survives_its_worker(
    start: Start, tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LIGHTNING_CACHE", str(tmp_path))
    url = "s3://bucket/runs/a"  # a cluster of its own, whose workers are allowed to use the bucket
    run = start("a", "launcher=ray", WORKERS, "strategy=ddp", f"output_dir={url}", "resume=auto", address=None)
    run.output_dir = far_runs.working_folder(url)
    run.wait_for("step 5/8 |")
    run.worker(1).kill()
    assert run.wait() == 0, run.output()
    lines = re.findall(r"rank 1 .*died.*the run goes on from step \d with 2 workers", run.output())
    assert len(lines) == 1, run.output()
    local = start("local", "strategy=ddp", "trainer.devices=2", address=None)
    assert local.wait() == 0, local.output()
    monkeypatch.setenv("SD_LIGHTNING_CACHE", str(tmp_path / "elsewhere"))
    far = far_runs.fetch(url, who="the test", pipeline=True)
    fetched = {path.name: path.read_bytes() for path in (far / "pipeline" / "unet").glob("*.safetensors")}
    assert far.name == "step-00000008" and fetched == weights(tmp_path / "local")


@pytest.mark.full("cluster")
def test_workers_that_are_asked_to_leave_save_first(start: Start) -> None:
    run = start("asked", WORKERS, "strategy=ddp", "launcher.max_failures=0", steps=400)
    run.wait_for("step 4/400 |")
    run.worker(1).terminate()
    run.wait_for("got SIGTERM, saved and left; the run goes on from step ")
    shown = run.output()
    left = max(int(step) for step in re.findall(r"step (\d+)/400", shown))
    assert f"goes on from step {left} with 2 workers" in shown, shown
    run.wait_for(f"step {left + 2}/400 |")
    run.program.send_signal(signal.SIGINT)
    assert run.wait() == 75, run.output()
    stopped = re.findall(r"stopped by a signal at step (\d+); saved", run.output())
    assert stopped[0] == str(left) and int(stopped[1]) > left, run.output()


@pytest.mark.full("cluster")
def test_what_is_wrong_is_not_tried_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    wrong = start("wrong", WORKERS, "strategy=ddp", "data=images", f"data.train_data_dir={tmp_path / 'photos'}")
    blind = start("blind", WORKERS, "strategy=ddp")  # a folder that the workers do not see
    blind.wait_for("2 worker(s) have started")
    (probe,) = (tmp_path / "blind").glob(".tmp-*")
    shutil.rmtree(probe)
    assert blind.wait() == 2, blind.output()
    assert re.search(rf"error: launcher=ray: \S+ cannot see {tmp_path}/blind; expected", blind.output())
    assert wrong.wait() == 2, wrong.output()
    assert re.search(r"^error: ImageFolder: .*photos' holds no usable", wrong.output(), re.MULTILINE), wrong.output()
    shown = wrong.output() + blind.output()
    assert "goes on" not in shown and "Traceback" not in shown and shown.count("cannot see") == 1, shown


@pytest.mark.full("cluster")
def test_a_full_cluster_is_waited_for_and_named(ray: Any, start: Start) -> None:
    from ray.util.queue import Queue

    holder = Queue(actor_options={"num_cpus": 7})
    assert holder.empty()
    run = start("full", WORKERS, "strategy=ddp", "launcher.start_seconds=3")
    assert run.wait() == 1, run.output()
    holder.shutdown(force=True)
    line = r"^ERROR: launcher=ray: launcher.num_workers=2 got no place within launcher.start_seconds=3; ray status.*"
    assert re.search(line, run.output(), re.MULTILINE) and "Traceback" not in run.output(), run.output()
    assert not list(run.output_dir.glob(".tmp*"))


@pytest.mark.full("cluster")
def test_too_many_deaths_end_the_run_with_what_died_and_where_it_goes_on(start: Start) -> None:
    run = start("dead", WORKERS, "strategy=ddp", "launcher.max_failures=0", steps=400)
    run.wait_for("step 4/400 |")
    run.worker(0).kill()
    assert run.wait() == 1, run.output()
    line = r"^ERROR: launcher=ray: rank 0 .*died.*max_failures=0; resume=auto goes on from step 3$"
    assert re.search(line, run.output(), re.MULTILINE), run.output()


@pytest.mark.full("cluster")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "gemini"])
def test_five_deaths_leave_no_trace_in_the_weights(start: Start, tmp_path: Path, strategy: str) -> None:
    steps, chance = 40, random.Random(strategy)
    killed = start("killed", WORKERS, f"strategy={strategy}", "launcher.max_failures=5", steps=steps)
    for number in range(5):
        step = chance.randint(number * 7 + 2, number * 7 + 8)
        killed.wait_for(f"step {step}/{steps} |")
        killed.worker(1).kill()
        until = time.monotonic() + 120
        while killed.output().count("the run goes on from") <= number:
            assert time.monotonic() < until and killed.program.poll() is None, killed.output()[-4000:]
            time.sleep(0.1)
    assert killed.wait() == 0, killed.output()[-4000:]
    assert killed.output().count("rank 1") >= 5
    local = start("local", f"strategy={strategy}", "trainer.devices=2", address=None, steps=steps)
    assert local.wait() == 0, local.output()
    assert weights(tmp_path / "killed") == weights(tmp_path / "local")


@pytest.mark.full("cluster")
def test_a_node_that_leaves_is_replaced(start: Start, tmp_path: Path, cluster: Any) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    run = start("node", WORKERS, "strategy=fsdp", address=cluster.address, steps=20)
    run.wait_for("step 5/20 |")
    of_rank_1 = run.worker(1).parent()  # its raylet
    (lost,) = [n for n in nodes if of_rank_1 is not None and n.all_processes["raylet"][0].process.pid == of_rank_1.pid]
    cluster.remove_node(lost, allow_graceful=False)
    assert run.wait() == 0, run.output()[-4000:]
    assert run.output().count("the run goes on from step") == 1, run.output()
    local = start("local", "strategy=fsdp", "trainer.devices=2", address=None, steps=20)
    assert local.wait() == 0, local.output()
    assert weights(tmp_path / "node") == weights(tmp_path / "local")


@pytest.mark.full("cluster")
def test_a_node_that_will_be_taken_away_is_left_in_time(start: Start, cluster: Any) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    run = start("drained", WORKERS, "strategy=ddp", "launcher.max_failures=0", address=cluster.address, steps=400)
    run.wait_for("step 5/400 |")
    of_rank_1 = run.worker(1).parent()
    (lost,) = [n for n in nodes if of_rank_1 is not None and n.all_processes["raylet"][0].process.pid == of_rank_1.pid]
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 240) * 1000)
    GcsClient(address=cluster.address).drain_node(lost.node_id, reason, "taken away", deadline)
    run.wait_for("loses its machine, saved and left; the run goes on from step ")
    left = max(int(step) for step in re.findall(r"step (\d+)/400", run.output()))
    assert f"goes on from step {left} with 2 workers" in run.output(), run.output()
    run.wait_for(f"step {left + 1}/400 |")
    run.program.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.output()


@pytest.mark.full("cluster")
def test_a_run_grows_with_the_cluster(start: Start, tmp_path: Path, cluster: Any) -> None:
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run = start("elastic", "launcher.num_workers=[1,2]", "strategy=ddp", address=cluster.address, steps=4000)
    run.wait_for("step 4/4000 |")
    cluster.add_node(num_cpus=1)
    run.wait_for("the number of workers changes; the run goes on from step ")
    left = max(int(step) for step in re.findall(r"step (\d+)/4000", run.output()))
    saved = max(int(step) for step in re.findall(r"saved \S+/step-(\d+)", run.output()))
    (begins,) = re.findall(r"goes on from step (\d+) with 2 workers", run.output())
    assert saved <= int(begins) <= left < saved + 6, run.output()[-4000:]
    run.wait_for(f"step {left + 1}/4000 |")
    run.program.send_signal(signal.SIGINT)
    assert run.wait() == 75, run.output()[-4000:]
