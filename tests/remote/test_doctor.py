"""The doctor: what it prints of a machine, what it says to change, and how it ends."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sd_lightning.remote.doctor as diagnosis
from launched_training import BIN
from sd_lightning import doctor
from sd_lightning.remote import machine
from sd_lightning.remote.doctor import Rank, Trial, changes_for, transport
from sd_lightning.remote.machine import Change, Machine, examine, nccl_interface

SECTIONS = ["versions", "GPU", "network", "shared folder", "limits"]
FAST = ("message_mb=1", "timeout_seconds=60")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> str:
    """An interface that other machines reach, and which gloo is told to use."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return "lo"


def node(name: str, **versions: str) -> Rank:
    """A machine that is well, as a node of a cluster tells it."""
    texts = {"python": "3.11.7", "torch": "2.13.0", "sd-lightning": "0.1.0", "diffusers": "0.42.1"} | versions
    driver = texts.pop("driver", "580.1")
    sections = {"versions": texts, "GPU": {"driver": driver}, "network": {}, "shared folder": {}, "limits": {}}
    return Rank(name, Machine(name, sections), link="NCCL by IB", gb_per_s=20.0, clock=100.0)


def test_two_processes_measure_and_every_section_is_printed(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, card: str
) -> None:
    code, text = call_main(doctor, f"output_dir={tmp_path / 'new' / 'runs'}", "num_processes=2", *FAST)
    assert code == 0
    titles = re.findall(r"^[a-zA-Z2].*$", text, re.MULTILINE)
    assert titles == [*SECTIONS, "2 processes on 1 machine(s)", "Nothing to change"]
    assert re.search(r"^  link +gloo by TCP$", text, re.MULTILINE)
    speed = re.search(r"^  all-reduce +1 MB: ([\d.e+]+) GB/s, ([\d.e+]+) GB/s on the bus$", text, re.MULTILINE)
    assert speed and float(speed[1]) == float(speed[2]) > 0, "with two processes 2 (n - 1) / n is 1"
    assert re.search(r"^  clocks +0\.\d+ s apart", text, re.MULTILINE)
    assert re.search(r"^  hard links +work$", text, re.MULTILINE)
    assert re.search(r"^  shared folder +seen by all$", text, re.MULTILINE)
    assert re.search(r"^  write, fsync, rename +\d+ MB/s; [\d.]+ ms for a small file$", text, re.MULTILINE)
    assert not list(tmp_path.iterdir()), "nothing is left in the shared folder"


def test_a_machine_without_a_gpu_says_so(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_NVIDIA_SMI", ("no-such-program",))
    found = examine(None, 2, seconds=30)
    assert found.sections["GPU"] == {"used": "none: runs use the CPU"}
    assert not found.changes


def test_a_gpu_that_torch_cannot_use_stops_a_run(card: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '535.10, NVIDIA L4, 23034 MiB, 8.9'\necho '535.10, NVIDIA L4, 23034 MiB, 8.9'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    found = examine(None, 2, seconds=30)
    assert found.sections["GPU"]["driver"] == "535.10"
    assert found.sections["GPU"]["GPU 1"] == "NVIDIA L4, 23034 MiB, 8.9"
    (change,) = found.changes
    assert change.stops and "fits the driver" in change.what


def test_a_folder_that_cannot_be_written_stops_a_run_and_is_named(
    call_main: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str], card: str, monkeypatch: Any
) -> None:
    def alone(trial: Trial, processes: int) -> list[Rank]:
        return [Rank("here", examine(trial.output_dir, processes, seconds=30))]

    monkeypatch.setattr(diagnosis, "on_machine", alone)
    with pytest.MonkeyPatch.context() as context, pytest.raises(SystemExit) as end:
        context.setattr(sys, "argv", ["doctor.py", "output_dir=/proc/runs"])
        doctor.main()
    assert end.value.code == 1
    text = capsys.readouterr().out
    assert re.search(r"^  failed +.*/proc/", text, re.MULTILINE)
    name = re.escape(socket.gethostname())
    assert re.search(rf"^  1\. mend the shared folder of {name} \(a run would stop\)$", text, re.MULTILINE)
    assert "\n     output_dir=<a folder that every machine may write to>" in text
    assert call_main(doctor, "output_dir=/tmp")[0] == 0


def test_a_bucket_is_tried(s3: Any, card: str) -> None:
    pytest.importorskip("boto3")
    assert not examine("s3://bucket/runs", 1, seconds=30).changes
    assert s3.count("PUT") and s3.count("DELETE"), "it was written, and nothing is left"
    (change,) = examine("s3://nobody/runs", 1, seconds=30).changes
    assert change.stops and change.why.startswith("output_dir=s3://nobody/runs")


def test_a_part_that_hangs_is_given_up(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: time.sleep(20))
    begin = time.monotonic()
    found = examine(None, 1, seconds=0.5)
    assert time.monotonic() - begin < 10
    assert found.sections["network"] == {"failed": "no answer in 0.5 s"}
    assert [change.what for change in found.changes] == [f"mend the network of {found.name}"]


def test_names_that_resolve_to_the_loopback_and_interfaces_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "interfaces", lambda: {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"})
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    found = examine(None, 1, seconds=30)
    assert found.sections["network"]["NCCL uses"] == "eth0" and found.sections["network"]["GLOO uses"] == "lo"
    (change,) = found.changes
    assert change.command == "export GLOO_SOCKET_IFNAME=eth0" and "127.0.1.1" in change.why and not change.stops
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    (change,) = examine(None, 1, seconds=30).changes
    assert change.stops and "has no interface ib9; those with an address are lo, docker0, eth0" in change.why


@pytest.mark.parametrize(
    ("cards", "chosen"),
    [("lo docker0 eth0 ib0", "ib0"), ("lo docker0 eth0", "eth0"), ("lo docker0", "docker0"), ("lo", "lo")],
)
def test_nccl_takes_infiniband_then_any_then_dockers_then_the_loopback(cards: str, chosen: str) -> None:
    assert nccl_interface(dict.fromkeys(cards.split(), "10.0.0.1")) == chosen


def test_small_limits_are_named_with_the_command(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READY_BYTES", 2**50)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (1024, 4096))
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    commands = [change.command for change in examine(None, 8, seconds=30).changes]
    assert [command.partition("=")[0] for command in commands] == [
        "docker run --shm-size",
        "ulimit -n 65536",
        "export OMP_NUM_THREADS",
    ]


def test_alike_machines_need_no_change() -> None:
    assert changes_for([node("a"), node("b"), node("c")]) == []


@pytest.mark.parametrize(
    ("label", "stops"), [("torch", True), ("sd-lightning", True), ("diffusers", False), ("driver", False)]
)
def test_versions_and_drivers_that_differ_are_named_with_their_machines(label: str, stops: bool) -> None:
    (change,) = changes_for([node("a"), node("b", **{label: "9.9"}), node("c")])
    assert change.what == f"use one {label} on all machines" and change.stops is stops
    assert re.fullmatch(r"[\d.]+ \(a, c\); 9\.9 \(b\)", change.why)


def test_a_machine_without_gpus_beside_others_has_no_driver_to_differ() -> None:
    head = node("head")
    assert head.machine is not None
    head.machine.sections["GPU"] = {"used": "none: runs use the CPU"}
    assert changes_for([head, node("a"), node("b")]) == []


def test_a_clock_that_differs_is_named() -> None:
    ahead = node("b")
    ahead.clock = 147.25
    (change,) = changes_for([node("a"), ahead])
    assert change == Change("set the clocks", "b is 47.2 s ahead of a", "chronyc makestep", stops=True)


def test_a_folder_that_is_not_shared_and_a_machine_that_does_not_answer_are_named() -> None:
    apart, lost = node("b"), Rank("c", failure="Connection timed out")
    apart.unseen = ("a",)
    unseen, failed = changes_for([node("a"), apart, lost])
    assert unseen.stops and unseen.why == "b does not see in output_dir what a wrote there"
    assert failed.stops and failed.what == "let the processes of c meet the others"
    assert failed.why == "Connection timed out"


def test_sockets_beside_a_fabric_are_named() -> None:
    one, other = node("a"), node("b")
    assert one.machine is not None
    one.machine.sections["network"]["fabric mlx5_0"] = "mlx5_core, 400 Gb/sec (4X NDR)"
    one.link = "NCCL by Socket"
    (change,) = changes_for([one, other])
    assert change.what == "let NCCL use the fabric" and not change.stops


def test_the_transport_is_read_from_the_log_of_nccl() -> None:
    log = """
a:12:34 [0] NCCL INFO Using network AWS Libfabric
a:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
a:12:34 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
a:12:34 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""
    assert transport(log) == "AWS Libfabric, P2P/CUMEM, NET/AWS"


@pytest.mark.parametrize("setting", ["num_processes=0", "message_mb=-1", "timeout_seconds=0"])
def test_impossible_settings(call_main: Callable[..., tuple[int, str]], setting: str) -> None:
    code, text = call_main(doctor, setting)
    name, _, value = setting.partition("=")
    assert code == 2
    assert re.match(rf"error: doctor got {name}={value}(\.0)?; expected a number above 0; leave {name} out", text)


def test_no_cluster_at_the_address(call_main: Callable[..., tuple[int, str]]) -> None:
    code, text = call_main(doctor, "launcher=ray", "launcher.address=127.0.0.1:1")
    assert code == 2 and text.startswith("error: launcher=ray: no Ray cluster answers at 127.0.0.1:1")


@pytest.mark.slow
def test_ray_with_one_node(
    ray: Any, ray_address: str, call_main: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, text = call_main(doctor, "launcher=ray", f"launcher.address={ray_address}", f"output_dir={tmp_path}", *FAST)
    assert "2 processes on 1 machine(s)" in text and re.search(r"^  all-reduce +1 MB: ", text, re.MULTILINE), text
    assert code == 0
    assert not list(tmp_path.iterdir())
    code, text = call_main(doctor, "launcher=ray", f"launcher.address={ray_address}", "+launcher.labels.kind=moon")
    assert code == 2 and "no node of the Ray cluster has them" in text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_processes_of_a_launcher_are_used(launcher: str, tmp_path: Path) -> None:
    program = ["-m", "sd_lightning.doctor", f"output_dir={tmp_path}", *FAST]
    settings = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if launcher == "torchrun":
        commands = [[str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", *program]]
        tasks: list[dict[str, str]] = [{}]
    else:
        commands = [[sys.executable, *program]] * 2
        tasks = [
            {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
            | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "doctor", "SLURM_NODELIST": "127.0.0.1"}
            for i in range(2)
        ]
    started = [
        subprocess.Popen(command, env=settings | task, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, task in zip(commands, tasks, strict=True)
    ]
    said = [process.communicate(timeout=200) for process in started]
    text = "".join(output for output, _ in said)
    assert [process.returncode for process in started] == [0] * len(started), said
    assert text.count("Nothing to change") == 1 and "2 processes on 1 machine(s)" in text
