"""Host memory of the slow tier is page-locked once, and unlocked on every way out, before it is freed."""

from __future__ import annotations

import gc
import logging
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini_jobs import Blocks, Job, _Fails, inputs, loss_of
from places import SUPPORT
from pretended_accelerator import Device, PageLocks, Race, Timeline, is_mapped, pretended_accelerator
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine, page_locked
from sd_lightning.gemini.page_locked import PageLocked
from sd_lightning.gemini.placement import Tier

OFFLOADED = GeminiConfig(chunk_numel=1500, offload_optim_frac=1.0, offload_param_frac=1.0, gathered_budget=16_000)


class Training:
    """A network in chunks that are offloaded."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Blocks(2)
        self.engine = GeminiEngine({"": self.network}, OFFLOADED)
        self.optimizer = self.engine.optimizer(torch.optim.AdamW(self.network.parameters()))

    def backward(self, index: int) -> None:
        loss_of(self.network, inputs(index, Job("locks")), torch.float32).backward()

    def step(self, index: int) -> None:
        self.backward(index)
        self.optimizer.step()


def _close(training: Training) -> None:
    training.engine.close()
    assert not any(training.engine.ledger.current.values())


def _restore(training: Training) -> None:
    expected = dict(training.engine.whole_weights())
    training.engine.restore()
    assert not any(training.engine.ledger.current.values())
    for name, parameter in training.network.named_parameters():
        assert torch.equal(parameter, expected[parameter]), name


def _restore_after_an_exception(training: Training) -> None:
    training.network.blocks[0].register_forward_hook(lambda _, __, output: _Fails.apply(output))
    with pytest.raises(ZeroDivisionError):
        training.backward(5)
    _restore(training)


def _lose(training: Training) -> None:
    training.backward(5)  # gradients are on their way


@pytest.mark.parametrize("end", [_close, _restore, _restore_after_an_exception, _lose])
def test_nothing_stays_locked_when_an_engine_ends(end: Callable[[Training], None]) -> None:
    with pretended_accelerator(with_network=True) as device:
        training = Training()
        for index in range(2):
            training.step(index)
        locks = device.page_locks
        assert sum(locks.sizes.values()) == training.engine.ledger.current[Tier.SLOW] > 0
        end(training)
        del training
        gc.collect()
        assert not locks.sizes


def test_memory_is_locked_in_the_first_steps_and_then_used_again() -> None:
    counts = []
    with pretended_accelerator(with_network=True) as device:
        training = Training()
        for index in range(5):
            training.step(index)
            counts.append(device.page_locks.num_locked)
        training.engine.close()
    assert 0 < counts[1] == counts[-1]


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9], ids=["weights", "states", "gradients"])
def test_the_message_about_a_limit_on_locked_memory_names_the_remedy(share: float) -> None:
    with pretended_accelerator(with_network=False) as device:
        training = Training()
        training.step(0)
        taken = training.engine.ledger.peak[Tier.SLOW]
        training.engine.close()
        device.page_locks.limit = share * taken
        with pytest.raises(UsageError, match=r"page-lock .* MiB .*out of memory.*lower offload_optim_frac.*ulimit -l"):
            Training().step(0)
        gc.collect()
        assert not device.page_locks.sizes


def test_the_pretended_device_sees_memory_that_is_unlocked_during_a_copy() -> None:
    with pretended_accelerator(with_network=False):
        training = Training()
        training.backward(0)
        accumulated, locks = training.engine.chunks[0].gradients.accumulated, training.engine.memory._page_locked
        assert accumulated is not None and locks is not None
        with pytest.raises(Race, match="host uses memory of the slow tier while to slow does"):
            locks.unlock(accumulated.tensor)


class Module(Device):
    """A device module alone: locks, and a stream that never ends its work."""

    def __init__(self) -> None:
        super().__init__()
        self.page_locks = PageLocks()
        self.endless = Timeline("endless", self.host)
        self.endless.query = lambda: False  # type: ignore[method-assign]

    def locked(self, *, streams: tuple[Any, ...] = ()) -> PageLocked:
        return PageLocked(self, torch.device("cpu"), streams)


def test_memory_is_freed_with_its_last_view_and_not_before_it_is_unlocked() -> None:
    module = Module()
    memory = module.locked().allocate(10_000)  # its owner is gone
    assert not module.page_locks.sizes and is_mapped(memory.data_ptr(), 10_000)
    owner = module.locked()
    view = owner.allocate(3 * 2**20).view(torch.float32)
    address = view.data_ptr()
    assert owner.nbytes == view.nbytes and not view.any()
    owner.unlock(view)
    assert owner.nbytes == 0 and is_mapped(address, view.nbytes)
    view.fill_(1.0)
    nbytes = view.nbytes
    del view
    assert not is_mapped(address, nbytes)


def test_memory_of_a_hanging_device_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_locked, "_LAST_COPIES_S", 0.05)
    monkeypatch.setattr(page_locked, "_left", [])
    module = Module()
    owner = module.locked(streams=(module.endless,))
    address = owner.allocate(5000).data_ptr()
    with caplog.at_level(logging.WARNING):
        del owner
    assert "leaves 0.0 MiB of host memory page-locked: its copies did not end" in caplog.text
    assert list(module.page_locks.sizes) == [address] and is_mapped(address, 5000)


def test_memory_that_cuda_does_not_unlock_is_not_freed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_locked, "_left", [])
    module = Module()
    monkeypatch.setattr(module.page_locks, "cudaHostUnregister", lambda address: 700)
    owner = module.locked()
    memory = owner.allocate(5000)
    address = memory.data_ptr()
    with caplog.at_level(logging.WARNING):
        owner.unlock(memory)
    del memory, owner
    assert "page-locked: CUDA error 700" in caplog.text and is_mapped(address, 5000)


AT_EXIT = """
import os
from pretended_accelerator import Device, PageLocks
import torch
from sd_lightning.gemini.page_locked import PageLocked

class Noted(PageLocks):
    def cudaHostUnregister(self, address):
        print("unlocked", super().cudaHostUnregister(address), flush=True)
        return 0

module = Device()
module.page_locks = Noted()
owner = PageLocked(module, torch.device("cpu"), [module.compute])
memory = owner.allocate(5000)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print("parent", flush=True)
"""


@pytest.mark.slow
def test_the_end_of_the_process_unlocks_and_that_of_a_forked_one_does_not(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python("-c", AT_EXIT, env={"PYTHONPATH": f"{SUPPORT.parents[1] / 'src'}:{SUPPORT}"}, check=True)
    assert done.stdout.split() == ["parent", "unlocked", "0"]
