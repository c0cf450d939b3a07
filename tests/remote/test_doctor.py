"""The doctor: what it prints of a machine, what it says to change, and how it ends."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sd_lightning.remote.doctor as diagnosis
from launched_training import BIN
from sd_lightning import _conf, doctor
from sd_lightning.remote import machine
from sd_lightning.remote.doctor import Rank, changes_for, transports
from sd_lightning.remote.machine import Change, Fact, examine

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Calls the program with arguments; returns its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
        code = 0
        try:
            _conf.main(doctor.PROGRAM)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, "".join(capsys.readouterr())

    return call


def node(name: str, **versions: str) -> Rank:
    """A machine that is well, as a node of a cluster tells it."""
    texts = {"python": "3.11.7", "torch": "2.13.0", "sd-lightning": "0.1.0", "lightning": "2.6.6"} | versions
    facts: list[Fact] = [("versions", *each) for each in texts.items()]
    facts.append(("network", "fabric", "none"))
    return Rank(name, facts, ["gloo by TCP", "NCCL NET/IB"], gb_per_s=20.0, clock=100.0)


def rows(facts: list[Fact], section: str) -> dict[str, str]:
    return {fact[1]: fact[2] for fact in facts if not isinstance(fact, Change) and fact[0] == section}


def changes(facts: list[Fact]) -> list[Change]:
    return [fact for fact in facts if isinstance(fact, Change)]


def test_two_processes_measure_and_every_section_is_printed(ask: Ask, tmp_path: Path) -> None:
    code, text = ask(f"output_dir={tmp_path / 'new' / 'runs'}")
    assert code == 0, text
    titles = re.findall(r"^[a-zA-Z2].*$", text, re.MULTILINE)
    sections = ["versions", "GPU", "network", "memory", "shared folder"]
    assert titles == [*sections, "2 processes on 1 machine", "Nothing to change"]
    assert re.search(r"^  links +gloo by TCP$", text, re.MULTILINE)
    speed = re.search(r"^  all-reduce +64 MB: ([\d.e+]+) GB/s, ([\d.e+]+) GB/s on the bus$", text, re.MULTILINE)
    assert speed and float(speed[1]) == float(speed[2]) > 0, "with two processes 2 (n - 1) / n is 1"
    assert re.search(r"^  clocks +0\.\d+ s apart", text, re.MULTILINE)
    assert re.search(r"^  output_dir +seen by all machines$", text, re.MULTILINE)
    assert not list(tmp_path.iterdir()), "nothing is left in the shared folder"


@pytest.mark.slow
def test_what_gloo_does_not_take_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib9")
    code, text = ask()
    assert code == 1
    assert f"\n  1. let the processes of {socket.gethostname()} meet the others (a run would stop)\n" in text, text
    assert re.search(r"^     why: .*Unable to find address for: ib9$", text, re.MULTILINE)
    assert "processes on" not in text, "none has measured"


def test_a_list_of_interfaces_is_taken_and_a_folder_that_cannot_be_written_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    code, text = ask("output_dir=/proc/runs")
    assert code == 1
    assert f"\n  1. let {socket.gethostname()} write to output_dir (a run would stop)\n" in text, text
    assert "\n     why: [Errno 2] No such file or directory: '/proc/" in text
    assert "2 processes on 1 machine" in text and "\n  2." not in text


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_NVIDIA_SMI", ("no-such-program",))
    facts = list(examine())
    assert rows(facts, "GPU") == {"used": "none: runs use the CPU"}
    assert not changes(facts)


def test_a_gpu_that_torch_cannot_use_stops_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034 MiB, 535.10'\necho 'NVIDIA L4, 23034 MiB, 535.10'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    facts = list(examine())
    assert rows(facts, "GPU")["nvidia-smi"] == "2 × NVIDIA L4, 23034 MiB, 535.10"
    (change,) = changes(facts)
    assert change.stops and "fits the driver" in change.what


def test_a_machine_with_ipv6_alone_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = type("Card", (), {"address": "2001:db8::7", "family": socket.AF_INET6})
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [], "eth0": [card]})
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("2001:db8::7", 0, 0, 0))])
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "six")
    network = rows(list(examine()), "network")
    assert network["host name"] == "six resolves to 2001:db8::7 of eth0" and network["eth0"] == "2001:db8::7"


def test_devices_of_a_fabric_are_counted_by_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    for name in ("rdmap0", "rdmap1"):
        (tmp_path / "infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    monkeypatch.setattr(machine, "FABRIC", tmp_path / "infiniband")
    assert rows(list(examine()), "network")["fabric"] == "2 × efa"


def test_little_shared_memory_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READY_BYTES", 2**50)
    (change,) = changes(list(examine()))
    assert change.command == "docker run --shm-size=2097152g" and not change.stops


@pytest.mark.slow
def test_a_bucket_is_tried(s3: Any, ask: Ask) -> None:
    pytest.importorskip("boto3")
    code, text = ask("output_dir=s3://bucket/runs")
    assert code == 0 and re.search(r"^  output_dir +seen by all machines$", text, re.MULTILINE), text
    assert s3.count("PUT") and s3.count("DELETE"), "it was written, and nothing is left"


def test_alike_machines_need_no_change() -> None:
    assert changes_for([node("a"), node("b"), node("c")]) == []


@pytest.mark.parametrize(("label", "stops"), [("torch", True), ("sd-lightning", True), ("lightning", False)])
def test_versions_that_differ_are_named_with_their_machines(label: str, stops: bool) -> None:
    (change,) = changes_for([node("a"), node("b", **{label: "9.9"}), node("c")])
    assert change.what == f"use one {label} on all machines" and change.stops is stops
    assert re.fullmatch(r"[\d.]+ \(a, c\); 9\.9 \(b\)", change.why)


def test_builds_of_one_version_may_differ() -> None:
    assert changes_for([node("a", torch="2.13.0+cu128"), node("b", torch="2.13.0+cpu"), node("c")]) == []


def test_a_clock_that_differs_is_named() -> None:
    ahead = node("b")
    ahead.clock = 147.25
    (change,) = changes_for([node("a"), ahead])
    assert change == Change("set the clocks", "b is 47.2 s ahead of a", "chronyc makestep", stops=True)


def test_a_machine_that_does_not_answer_is_named_once() -> None:
    """And nothing is said of its versions."""
    (change,) = changes_for([node("a"), Rank("c", failure="Connection timed out"), Rank("c", failure="Broken pipe")])
    assert change.stops and change.what == "let the processes of c meet the others" and change.why == "Broken pipe"


def test_sockets_beside_a_fabric_are_named() -> None:
    one, other = node("a"), node("b")
    for each in (one, other):
        each.facts[-1] = ("network", "fabric", "8 × efa")
    assert not changes_for([one, other]), "NCCL does not use sockets"
    other.links = ["gloo by TCP", "NCCL NET/Socket"]
    (change,) = changes_for([one, other])
    assert change.what == "let NCCL use the fabric" and "8 × efa" in change.why and not change.stops


def test_the_transport_is_read_from_the_log_of_nccl() -> None:
    log = """
a:12:34 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
a:12:34 [0] NCCL INFO Using network AWS Libfabric
a:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
a:12:34 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
a:12:34 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
a:12:34 [0] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/3(1)/GDRDMA
"""
    assert transports(log) == ["NCCL eth0", "NCCL AWS Libfabric", "NCCL P2P/CUMEM", "NCCL NET/AWS Libfabric/GDRDMA"]
    assert transports("") == []


def test_no_cluster_at_the_address(ask: Ask) -> None:
    code, text = ask("launcher=ray", "launcher.address=127.0.0.1:1")
    assert code == 2 and text.startswith("error: launcher=ray: no Ray cluster answers at 127.0.0.1:1")


@pytest.mark.full("cluster")
def test_ray_with_one_node(ray: Any, ray_address: str, ask: Ask, tmp_path: Path) -> None:
    code, text = ask("launcher=ray", f"launcher.address={ray_address}", f"output_dir={tmp_path}")
    assert "2 processes on 1 machine" in text and re.search(r"^  all-reduce +64 MB: ", text, re.MULTILINE), text
    assert code == 0
    assert not list(tmp_path.iterdir())
    code, text = ask("launcher=ray", f"launcher.address={ray_address}", "+launcher.labels.kind=moon")
    assert code == 2 and "no node of the Ray cluster has them" in text


@pytest.mark.full("cluster")
def test_nodes_with_gpus_measure_and_the_head_does_not(cluster: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """On nodes that say that they have GPUs; nothing is computed on them."""
    monkeypatch.setattr(diagnosis, "_SECONDS", 20.0)
    monkeypatch.setattr(diagnosis, "_ANSWER_SECONDS", 40.0)
    import ray

    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1)
    cluster.wait_for_nodes()
    try:
        code, text = ask("launcher=ray", f"launcher.address={cluster.address}")
        assert code == 0 and "2 processes on 1 machine" in text, text
        holder = ray.remote(num_gpus=1)(type("Holder", (), {"hold": lambda self: True})).remote()
        assert ray.get(holder.hold.remote())
        code, text = ask("launcher=ray", f"launcher.address={cluster.address}")
        assert code == 1 and "ray status shows what holds GPUs" in text, text
    finally:
        ray.shutdown()


@pytest.mark.full("cluster")
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_processes_of_a_launcher_are_used(launcher: str, tmp_path: Path) -> None:
    program = ["-m", "sd_lightning.doctor", f"output_dir={tmp_path}"]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
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
    assert text.count("Nothing to change") == 1 and "2 processes on 1 machine" in text
