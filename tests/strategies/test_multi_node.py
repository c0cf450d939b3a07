"""Two machines, each a network namespace with an address of its own, train one model.

Only their own virtual link is used; nothing leaves this machine.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launched_training import BIN, SMALL, TRAIN
from refusals import call
from suites import keep

STEPS = 2


@dataclass(frozen=True)
class Node:
    """A machine of the test."""

    namespace: str
    interface: str
    address: str

    def run(self, *command: str) -> list[str]:
        """Return the command line that runs a command there."""
        return ["ip", "netns", "exec", self.namespace, *command]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def remove(nodes: list[Node]) -> None:
    for node in nodes:  # the link goes with them
        subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Two network namespaces that reach each other, and nobody else."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (apt-get install iproute2)")
    name = f"sdl{os.getpid()}"  # an interface's name has at most 15 characters
    nodes = [Node(f"{name}{side}", f"{name}{side}", f"10.213.77.{i}") for i, side in ((1, "a"), (2, "b"))]
    try:
        for node in nodes:
            ip("netns", "add", node.namespace)
        ends = [("netns", node.namespace, "name", node.interface) for node in nodes]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node in nodes:
            ip("-n", node.namespace, "address", "add", f"{node.address}/30", "dev", node.interface)
            for interface in ("lo", node.interface):
                ip("-n", node.namespace, "link", "set", interface, "up")
        subprocess.run(nodes[0].run("true"), check=True, capture_output=True, text=True, timeout=20)
    except (subprocess.CalledProcessError, OSError) as error:
        remove(nodes)
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    yield nodes
    remove(nodes)


def train(nodes: list[Node], strategy: str, run_dir: Path) -> None:
    """Train by torchrun's c10d rendezvous, one process per machine; rank 0's machine is the host of the rendezvous."""
    processes, outputs = [], []
    for number, node in enumerate(nodes):
        outputs.append(run_dir.with_name(f"{run_dir.name}-{number}.log"))
        command = node.run(
            *(str(BIN / "torchrun"), f"--nnodes={len(nodes)}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *("--rdzv-id=test", f"--rdzv-endpoint={nodes[0].address}:29400", f"--rdzv-conf=is_host={int(number == 0)}"),
            *(f"--local-addr={node.address}", "-m", TRAIN, *SMALL, f"strategy={strategy}", f"output_dir={run_dir}"),
            *("trainer.devices=1", f"trainer.num_nodes={len(nodes)}", "++strategy.timeout_seconds=120"),
            *(f"trainer.max_steps={STEPS}", f"lr_scheduler.total_steps={STEPS}"),
        )
        environment = {"GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with outputs[-1].open("w") as output:
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
            )
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(f"--- machine {i}\n{path.read_text(errors='replace')[-3000:]}" for i, path in enumerate(outputs))
    assert codes == [0, 0], text
    assert "not watched" not in text
    assert "GLOBAL_RANK: 0, MEMBER: 1/2" in text and "GLOBAL_RANK: 1, MEMBER: 2/2" in text


@pytest.fixture(scope="module")
def single_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss of one process with the same batches."""
    run_dir = tmp_path_factory.mktemp("single") / "run"
    steps = (f"trainer.max_steps={STEPS}", f"lr_scheduler.total_steps={STEPS}")
    assert call(shlex.join(["train", *SMALL[1:], *steps, f"output_dir={run_dir}"])) == 0
    return final_loss(run_dir)


def final_loss(run_dir: Path) -> float:
    return float(json.loads((run_dir / "summary.json").read_text())["final_loss"])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("strategy", keep(["fsdp"], ["fsdp", "deepspeed_zero2"], "engines"))
def test_two_machines_train_what_one_process_trains(
    nodes: list[Node], strategy: str, single_loss: float, tmp_path: Path
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    train(nodes, strategy, tmp_path / "run")
    assert final_loss(tmp_path / "run") == pytest.approx(single_loss, abs=1e-6)
    shards = list((tmp_path / "run").glob(f"checkpoints/step-{STEPS:08d}/state/shard-*-of-00002.safetensors"))
    assert len(shards) == 2, "each machine has written its own part of the checkpoint"
