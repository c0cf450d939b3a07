"""Every launcher trains alike, and a run of several processes ends as one, with the reason named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from launched_training import BIN, TRAIN, Launched, losses
from places import SUPPORT
from sd_lightning._errors import UsageError
from sd_lightning._launchers import check_started_processes, is_first_process
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.processes import group
from sd_lightning.strategies.processes.rank_health import (
    Link,
    RankHealth,
    behind,
    failure_of,
    hung,
    main_thread_position,
    silent,
    unfinished_collective,
)
from sd_lightning.strategies.processes.watchdog import Hub, Spoke, start_watchdog
from suites import keep, wanted

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "GROUP_RANK")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment of which no launcher knows."""
    for name in list(os.environ):
        if name in LAUNCHED or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),  # Lightning's launcher
        ({"NODE_RANK": "1"}, False),  # Lightning's launcher on a second machine
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, True),  # torchrun, accelerate, deepspeed
        ({"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "4"}, False),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, False),
        # One torchrun per SLURM task: the rendezvous may number the machines the other way round.
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
    ],
)
def test_one_process_prepares_the_output_folder(
    environment: pytest.MonkeyPatch, variables: dict[str, str], first: bool
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert is_first_process() is first


@pytest.mark.parametrize(
    ("variables", "devices", "num_nodes", "message"),
    [
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            *(1, 1),
            r"the launcher started 4 process.* ask for 1; write trainer.devices=2 trainer.num_nodes=2 and a strategy",
        ),
        (
            {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"},
            *(2, 1),
            r"SLURM started 4 process.* ask for 2; .*num_nodes=2.*srun with --ntasks-per-node=2 --nodes=1",
        ),
        ({"SLURM_NTASKS": "4"}, 2, 2, r"--ntasks-per-node=<n> instead of --ntasks=4"),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}, 1, 1, None),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 2, 1, None),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2, 2, None),
        ({}, 8, 4, None),
    ],
)
def test_a_number_of_processes_that_nobody_started_is_refused(
    environment: pytest.MonkeyPatch, variables: dict[str, str], devices: int, num_nodes: int, message: str | None
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    if message is None:
        check_started_processes(devices, num_nodes)
    else:
        with pytest.raises(UsageError, match=message):
            check_started_processes(devices, num_nodes)


def test_deepspeeds_launcher_numbers_the_machines(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        environment.setenv(name, value)
    environment.setenv("NODE_RANK", "")  # restored afterwards
    environment.delenv("NODE_RANK")
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=FSDPStrategy(), accelerator="cpu", devices=4, num_nodes=2, **options)
    assert trainer.global_rank == 5


def test_a_rank_refuses_another_runs_folder_without_waiting_for_rank_0(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", TRAIN, "strategy=fsdp", "trainer.devices=2", f"output_dir={tmp_path / 'run'}"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: output_dir=.*already holds a run; .*\n", done.stderr), done.stderr


class Joining(FSDPStrategy):
    """One rank of two that joins nobody."""

    global_rank, world_size = 1, 2


DUPLICATE = """NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (dist.DistBackendError(DUPLICATE), r"^rank 1 could not connect to the other processes: Duplicate GPU detected"),
        (
            dist.DistStoreError("Timed out after 9 seconds"),
            r"^rank 1 waited 1800 s at .* for all 2 processes \(Timed out",
        ),
        (dist.DistNetworkError("port: 1, code: -98, name: EADDRINUSE"), r"^rank 1 cannot listen at .* has that port"),
    ],
)
def test_a_backend_that_fails_is_not_told_as_a_missing_rank(error: Exception, message: str) -> None:
    with pytest.raises(UsageError, match=message), Joining().joining():
        raise error


def ranks(*collectives: int, heard: float = 100.0, advanced: float = 80.0) -> list[RankHealth]:
    return [
        RankHealth(rank, f"process {rank}", heard, {"0/cpu": count}, advanced, position=f"place_{rank} (x.py:1)")
        for rank, count in enumerate(collectives)
    ]


def test_silence_is_named_after_the_limit() -> None:
    health = ranks(5, 5, 5)
    health[2].heard_at = 88.0
    assert silent(health, 100.0, limit=15.0) is None
    cause = silent(health, 100.0, limit=10.0)
    assert cause is not None and cause.ranks == (2,) and cause.frozen
    assert cause.text == "rank 2 (process 2) has been silent for 12 s: stopped, frozen or cut off"
    health[2].left = True
    assert silent(health, 100.0, limit=10.0) is None


def test_the_rank_that_lacks_a_collective_keeps_the_others_waiting() -> None:
    cause = behind(ranks(8, 7, 8), 100.0, limit=15.0)
    assert cause is not None and cause.ranks == (1,)
    assert "rank 1 (process 1, in place_1 (x.py:1)) has kept the others waiting for 20 s" in cause.text


def test_nobody_is_behind_while_anybody_moves_or_all_are_alike() -> None:
    moving = ranks(8, 7)
    moving[0].advanced_at = 95.0
    assert behind(moving, 100.0, limit=15.0) is None
    assert behind(ranks(8, 8), 100.0, limit=15.0) is None, "a long computation of all ranks is no deadlock"


def test_a_collective_that_all_ranks_wait_in_is_named_within_the_watchdogs_time() -> None:
    health = ranks(8, 8)
    assert hung(health, 100.0, limit=15.0) is None, "a long computation of all ranks is no deadlock"
    health[0].hear(100.0, {"0/cpu": 8}, "place_0", "nccl:all_reduce [[4]] in group default_pg")
    assert hung(health, 100.0, limit=15.0) is None, "rank 1 still computes"
    health[1].hear(100.0, {"0/cpu": 8}, "place_1", "nccl:all_reduce [[4]] in group default_pg")
    assert hung(health, 100.0, limit=25.0) is None
    cause = hung(health, 100.0, limit=15.0)
    assert cause is not None and cause.ranks == (0, 1)
    told = "all ranks have waited inside a collective of nccl:all_reduce [[4]] in group default_pg for 20 s"
    assert cause.text.startswith(told + " (rank 0 in place_0, rank 1 in place_1)")
    health[1].hear(100.0, {"0/cpu": 9}, "place_1", "")
    assert hung(health, 100.0, limit=15.0) is None


@pytest.mark.gpu
def test_nccl_names_a_collective_until_it_is_done() -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        values = torch.ones(4, device="cuda")
        dist.all_reduce(values)  # NCCL connects, which may take longer than the kernel that sleeps
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000_000)  # seconds, in which the collective waits for its turn
        dist.all_reduce(values, async_op=True)
        assert "nccl:all_reduce [[4]] in group" in unfinished_collective()
        torch.cuda.synchronize()
        time.sleep(2.0)  # NCCL's own thread looks now and then
        assert unfinished_collective() == ""
    finally:
        dist.destroy_process_group()


def test_ranks_of_different_groups_are_not_compared() -> None:
    health = ranks(8, 8)
    health[0].collectives = {"0/cpu": 8, "shard_a/cpu": 40}
    health[1].collectives = {"0/cpu": 8, "shard_b/cpu": 12}
    assert behind(health, 100.0, limit=15.0) is None


@pytest.mark.parametrize(
    ("error", "in_collective"),
    [
        (ValueError("bad data"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:22147"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0."), True),
        (dist.DistBackendError("anything"), True),
    ],
)
def test_exceptions_that_another_rank_may_have_caused_are_known(error: Exception, in_collective: bool) -> None:
    failure = failure_of(error)
    assert failure.in_collective is in_collective
    assert failure.text.startswith(type(error).__name__) and "\n" not in failure.text


def test_a_position_names_the_innermost_function_and_the_code_that_called_it() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.2), found.append(main_thread_position())))
    thread.start()
    thread.join()
    here = r"test_a_position_\w+ \(strategies/test_launchers.py:\d+\)"
    assert re.fullmatch(rf"\w+ \(python3\.\d+/threading.py:\d+\) called from {here}", found[0]), found[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    hub = Hub(2, timeout_seconds=20.0, host="127.0.0.1")
    yield hub
    hub.stop()


def spoke_of(hub: Hub, token: str) -> Spoke:
    connection = socket.create_connection(("127.0.0.1", hub.port))
    published = {"token": token, "process": "process 0", "place": "", "pid": 0}
    return Spoke(1, timeout_seconds=20.0, connection=connection, hub=published)


def test_a_watchdog_that_has_told_of_an_exception_is_followed_by_another(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(group, "start_watchdog", lambda *_, **__: started.append(1) or hub)
    monkeypatch.setattr(group.distributed_c10d, "_get_default_store", dist.HashStore)
    hub.start()
    watch = group.ProcessWatch()
    monkeypatch.setattr(watch, "_group", object())  # another than the one that is there now
    for _ in range(2):
        watch.begin(0, 2, 20.0)
    assert len(started) == 1
    hub.failure = failure_of(ValueError("bad data"))  # and the thread still runs
    hub.stop()
    watch.begin(0, 2, 20.0)
    assert len(started) == 2


def test_a_rank_that_does_not_come_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    hub = start_watchdog(0, 2, dist.HashStore(), timeout_seconds=0.4)
    assert hub is not None and "1 ranks are not watched: they cannot reach rank 0 at 127.0.0.1:" in caplog.text
    hub.stop()


def test_only_ranks_that_know_the_token_are_heard(hub: Hub) -> None:
    strangers = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b'{"kind": "hello", "token": "guess", "rank": 1, "process": "", "place": "", "pid": 1}\n')
    assert hub.gather(0.5) == 0
    for stranger in strangers:
        stranger.close()


def test_ranks_that_part_leave_no_alarm(hub: Hub) -> None:
    spoke = spoke_of(hub, hub.token)
    assert hub.gather(5.0) == 1
    hub.start()
    spoke.start()
    time.sleep(0.2)
    hub.stop()
    spoke.join(5.0)
    assert not spoke.is_alive() and hub.cause is None and spoke.cause is None


def test_a_message_arrives_whole_however_it_is_cut() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    messages: list[Any] = []
    for part in (b'{"kind": "be', b'at"}\n{"kind": "bye"}\n{"ki'):
        theirs.sendall(part)
        arrived, closed = link.receive()
        messages += arrived
        assert not closed
    assert [message["kind"] for message in messages] == ["beat", "bye"]
    theirs.close()
    assert link.receive() == ([], True)
    ours.close()


def test_a_full_buffer_drops_whole_messages() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Link(ours), Link(theirs)
        found: list[int] = []
        for number in range(3000):
            sender.send(kind="beat", number=number, filling="x" * 1000)
            if number % 1000 == 999:  # until here the buffer has been full for long
                messages, closed = receiver.receive()
                assert not closed
                found += [message["number"] for message in messages]
        assert found == sorted(found) and found[-1] > 1000 and len(found) < 3000


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all of them: each deletes what the one before has left, while its other rank starts."""
    return tmp_path_factory.mktemp("launchers") / "run"


@pytest.fixture(scope="module")
def expected(run_dir: Path) -> list[str]:
    """The losses of the run that Lightning itself has started."""
    return train_by("lightning", run_dir)


def train_by(launcher: str, run_dir: Path) -> list[str]:
    run = Launched(launcher, run_dir, "overwrite=true")
    try:
        codes = run.wait()
        assert set(codes) == {0}, f"{codes}\n{run.output()[-6000:]}"
        assert not run.processes(), "nobody is left behind"
    finally:
        run.end()
    assert not re.search(r"\b(Error|error|Traceback|not watched)\b", run.output()), run.output()
    return losses(run_dir)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("launcher", keep(["slurm"], ["torchrun", "accelerate", "deepspeed", "slurm"], "engines"))
def test_every_launcher_trains_alike(launcher: str, run_dir: Path, expected: list[str]) -> None:
    assert len(expected) == 3
    if not (BIN / launcher).exists() and launcher != "slurm":
        pytest.skip(f"{launcher} is not installed")
    assert train_by(launcher, run_dir) == expected


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("launcher", "fault", "reason"),
    [
        ("lightning", signal.SIGKILL, r"^error: rank 1 died \(process \d+ on .*\); rank 0 ends the run"),
        pytest.param(
            "torchrun",
            signal.SIGSTOP,
            r"^error: rank 1 \(process \d+ on .*\) has been silent .*; rank 0 ends the run",
            marks=pytest.mark.full("kills"),
        ),
    ],
)
def test_a_launcher_fails_when_a_rank_does(launcher: str, fault: signal.Signals, reason: str, tmp_path: Path) -> None:
    run = Launched(launcher, tmp_path / "run", "strategy.timeout_seconds=20", steps=10_000)
    try:
        run.wait_for("step ")
        run.rank(1).send_signal(fault)
        begun = time.monotonic()
        codes = run.wait(60)
        seconds = time.monotonic() - begun
        assert codes != [0]
        assert re.search(reason, run.output(), re.MULTILINE), run.output()[-4000:]
        assert seconds < (18 if fault == signal.SIGKILL else 40), f"it took {seconds:.0f} s"
        assert not run.processes(), "nobody is left behind"
    finally:
        run.end()


CASES = {
    "fsdp:kill:1": r"rank 1 died",
    "fsdp:kill:0": r"rank 0 died",
    "fsdp:stop:0": r"rank 0 \(process \d+ on .*\) has been silent for \d+ s",
    "fsdp:raise:0+1": None,
    "fsdp:raise:1": r"rank 1 raised ValueError: the data went bad",
    "ddp:stop:1": r"rank 1 \(process \d+ on .*\) has been silent for \d+ s",
    "ddp:raise:0": r"rank 0 raised ValueError: the data went bad",
    "gemini:raise:1": r"rank 1 raised ValueError: the data went bad",
    "deepspeed_zero1:raise:1": r"rank 1 raised ValueError: the data went bad",
    "deepspeed_zero2:raise:1": r"rank 1 raised ValueError: the data went bad",
    "deepspeed_zero3:raise:1": r"rank 1 raised ValueError: the data went bad",
    "deepspeed_zero2:hang:1": r"rank 1 \(.*in wait_for_nothing \(.*dying_ranks.py:\d+\)\) has kept the others waiting",
    "deepspeed_zero2:kill:1": r"rank 1 died",
    "ddp:lost:0+1": r"all ranks have waited inside a collective of gloo:broadcast .* called from await_the_other \(",
    "deepspeed_zero2:none:0": None,
}
FEW_CASES = ("fsdp:kill:1", "fsdp:raise:0+1", "ddp:stop:1", "gemini:raise:1", "deepspeed_zero3:raise:1")
FEW_CASES += ("deepspeed_zero2:hang:1", "ddp:lost:0+1", "deepspeed_zero2:none:0")
"""Every fault and every engine."""


@pytest.fixture(scope="module")
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How the processes of each chosen case ended."""
    pytest.importorskip("deepspeed")
    results = tmp_path_factory.mktemp("faults") / "results.json"
    cases = [case for case in CASES if case in wanted(request)]
    command = [sys.executable, str(SUPPORT / "dying_ranks.py"), str(results), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.needs("{case}")
@pytest.mark.parametrize("case", keep(FEW_CASES, CASES, "kills"))
def test_a_fault_ends_the_run_on_every_rank_and_is_named(case: str, faults: dict[str, Any]) -> None:
    found, reason = faults[case], CASES[case]
    _, fault, culprits = case.split(":")
    outputs = "\n".join(found["outputs"])
    for rank, code in enumerate(found["codes"]):
        is_culprit = str(rank) in culprits
        if fault == "none":
            assert code == 0, outputs
        elif is_culprit and fault in ("kill", "stop"):
            assert code == -signal.SIGKILL, "a stopped process is ended from outside"
        else:
            assert code == 1, outputs
        if reason is not None and (fault == "lost" or not is_culprit):
            line = rf"^error: {reason}.*; rank {rank} ends the run, continue from the last checkpoint$"
            assert re.search(line, found["outputs"][rank], re.MULTILINE), found["outputs"][rank]
        if is_culprit and fault == "raise":
            assert "ValueError: the data went bad" in found["outputs"][rank], "its own stack trace is its last word"
        if is_culprit and fault == "hang":
            assert "in wait_for_nothing" in found["outputs"][rank].partition("Current thread")[2], "where it hangs"
    if reason is None:
        assert "ends the run" not in outputs
    else:
        # Silence takes eight of the ten seconds; the rest is the interpreter's own end on a busy machine.
        assert found["seconds"] < (20 if fault in ("stop", "hang", "lost") else 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "runs"),
    [
        (("ddp", "fsdp", "zero3", "gemini"), 1),
        pytest.param(
            ("ddp", "fsdp", "zero1", "zero2", "zero3", "gemini"),
            50,
            marks=[pytest.mark.full("exits"), pytest.mark.alone, pytest.mark.timeout(3600)],
        ),
    ],
    ids=["once", "fifty times"],
)
def test_processes_end_cleanly_again_and_again(strategies: tuple[str, ...], runs: int) -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, str(SUPPORT / "clean_exits.py"), "--runs", str(runs), *strategies]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exits = {strategy: found["exits"] for strategy, found in json.loads(done.stdout.splitlines()[-1]).items()}
    assert exits == dict.fromkeys(strategies, {"[0, 0]": runs}), done.stderr
