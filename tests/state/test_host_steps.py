"""Steps on the host use this process's share of the cores, and no bit depends on their number."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from gemini_jobs import Blocks, Job, inputs, loss_of
from sd_lightning.gemini import GeminiConfig, GeminiEngine, gradients
from sd_lightning.state import host
from sd_lightning.state.averaging import Averaging
from sd_lightning.state.host import host_step, num_threads, step_on_host, usable_cores
from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy
from sd_lightning.strategies.fsdp import FSDPStrategy

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
NAMES = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMP_NUM_THREADS")

Launch = Callable[..., None]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """Pretend that a launcher started this process on a machine of 6 cores."""

    def start(threads: int, quota: str = "max 100000", **variables: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        monkeypatch.setattr(host, "_CPU_MAX", tmp_path / "cpu.max")
        monkeypatch.setattr(host, "_CPU_QUOTA", tmp_path / "cpu.cfs_quota_us")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
        monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: count.__setitem__(0, threads))
        count[0] = threads

    count = [1]
    return start


@pytest.mark.parametrize(
    ("threads", "variables", "expected"),
    [
        (1, TORCHRUN, 3),
        (1, TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, 1),
        (2, TORCHRUN | {"OMP_NUM_THREADS": "2"}, 2),  # the user's choice
        (5, TORCHRUN, 5),  # chosen with torch.set_num_threads
        (1, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 1),  # chosen: nobody else sets it
        (6, {"LOCAL_SIZE": "3"}, 2),  # the deepspeed launcher sets none, and all processes step at once
        (6, {}, 6),
        (4, {}, 4),
    ],
)
def test_processes_share_the_cores_unless_the_user_has_chosen(
    launch: Launch, threads: int, variables: dict[str, str], expected: int
) -> None:
    launch(threads, **variables)
    assert num_threads() == expected
    with host_step():
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 6), ("400000 100000", 4), ("50000 100000", 1)])
def test_a_control_group_may_allow_less_than_all_cores(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    launch(1, quota)
    assert usable_cores() == cores
    for name in ("quota", "period"):  # as version 1 writes it
        (tmp_path / f"cpu.cfs_{name}_us").write_text(quota.replace("max", "-1").split()[name == "period"])
    monkeypatch.setattr(host, "_CPU_MAX", tmp_path / "none")
    assert usable_cores() == cores


@pytest.mark.parametrize("quota", ["", "max", "0 0", "100000 0", "many 100000", "1e5 100000", "100000", "1 2 3"])
def test_a_quota_that_says_nothing_stops_no_step(launch: Launch, monkeypatch: pytest.MonkeyPatch, quota: str) -> None:
    launch(1, quota, **TORCHRUN)
    assert num_threads() == 3
    for given in ("0", "-2", "two"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
        assert num_threads() == 6

    def refused(_: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", refused)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_threads() == 5
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_threads() == 5


def test_a_step_reads_no_file_of_the_machine_again(launch: Launch, tmp_path: Path) -> None:
    launch(1, "400000 100000", **TORCHRUN)
    assert num_threads() == 2
    (tmp_path / "cpu.max").unlink()
    assert num_threads() == 2


def test_threads_are_given_back_after_an_exception(launch: Launch) -> None:
    launch(1, **TORCHRUN)
    with pytest.raises(ZeroDivisionError), host_step():
        assert 1 / (torch.get_num_threads() - 3)
    assert torch.get_num_threads() == 1


class Watched(torch.optim.SGD):
    """Notes how many threads its update has, and fails if it is told to."""

    threads = 0
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.threads = torch.get_num_threads()
        if self.fails:
            raise ZeroDivisionError
        return loss


def watched() -> Watched:
    return Watched([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_a_step_on_the_host_has_more_threads_than_its_closure(launch: Launch) -> None:
    launch(1, **TORCHRUN)
    optimizer = watched()
    step_on_host(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which replaces ``step``
    optimizer.step()
    assert (optimizer.threads, torch.get_num_threads()) == (3, 1)
    for given in ({"closure": torch.get_num_threads}, {}):
        assert optimizer.step(*([] if given else [torch.get_num_threads]), **given) == 1
        assert (optimizer.threads, torch.get_num_threads()) == (3, 1)
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert torch.get_num_threads() == 1


def test_gemini_steps_and_adds_gradients_up_with_more_threads(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(1, **TORCHRUN)
    network = Blocks(1)
    engine = GeminiEngine({"": network}, GeminiConfig(offload_optim_frac=1.0))
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters()))
    found: dict[str, set[int]] = {"update": set(), "norm": set(), "backward": set(), "landed": set()}
    apply, squares = optimizer.stepper.update.apply, optimizer._agreement._squares

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found[name].add(torch.get_num_threads())
            return function(*args)

        return call

    monkeypatch.setattr(optimizer.stepper.update, "apply", noted("update", apply))
    monkeypatch.setattr(optimizer._agreement, "_squares", noted("norm", squares))
    network.gain.register_hook(noted("backward", lambda gradient: None))

    @contextmanager
    def landing() -> Iterator[None]:
        with host_step():
            found["landed"].add(torch.get_num_threads())
            yield

    monkeypatch.setattr(gradients, "host_step", landing)
    for micro in range(2):
        loss_of(network, inputs(micro, Job("threads")), torch.float32).backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    assert found == {"update": {3}, "norm": {1}, "backward": {1}, "landed": {3}}


@pytest.mark.parametrize("offload", [True, False])
def test_fsdp_and_deepspeed_step_offloaded_states_with_more_threads(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    launch(1, **TORCHRUN)
    expected = 3 if offload else 1
    optimizer = watched()
    fsdp: Any = FSDPStrategy(cpu_offload=offload)
    fsdp._parallel_devices = [torch.device("cpu")]
    monkeypatch.setattr(FSDPStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(
        ModelParallelStrategy, "setup_optimizers", lambda self, _: setattr(self, "optimizers", [optimizer])
    )
    fsdp.setup_optimizers(None)
    optimizer.step()
    assert optimizer.threads == expected

    inner = watched()
    deepspeed: Any = DeepSpeedStrategy(stage=2, offload_optimizer="cpu" if offload else None, cpu_adam=False)
    monkeypatch.setattr(DeepSpeedStrategy, "deepspeed_engine", SimpleNamespace(step=inner.step))
    deepspeed.engine_step()
    assert inner.threads == expected and torch.get_num_threads() == 1


@pytest.mark.parametrize(("device", "threads"), [("cpu", 3), ("meta", 1)])
def test_an_average_that_the_host_computes_moves_with_more_threads(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, device: str, threads: int
) -> None:
    launch(1, **TORCHRUN)
    found: list[int] = []
    lerp = torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: (found.append(torch.get_num_threads()), lerp(*args)))
    averaging, average = Averaging(), torch.zeros(3, device=device)
    averaging.follow([average], [torch.ones(3, device=device)])
    averaging.update(0.5)
    assert found == [threads] and (device == "meta" or average.tolist() == [0.5] * 3)


def _adamw(weights: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(weights)
    parameter.grad = other
    torch.optim.AdamW([parameter], lr=1e-2, fused=True).step()
    return parameter.detach()


@pytest.mark.parametrize("update", [_adamw, lambda one, other: one.lerp_(other, 0.1)], ids=["adamw", "average"])
def test_no_bit_of_an_update_depends_on_the_number_of_threads(
    update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            pair = [torch.randn(100_003, generator=generator) for _ in range(2)]
            results.append(update(*pair))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, results[0]) for each in results)
