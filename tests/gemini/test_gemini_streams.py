"""Nothing races beside the computation: the engine on a pretended accelerator that checks the order of all accesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini_jobs import Blocks, Job, _Fails, inputs, loss_of
from pretended_accelerator import Device, Race, pretended_accelerator
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini import chunk as chunk_file
from sd_lightning.gemini.page_locked import whole_pages
from sd_lightning.gemini.placement import Kind, Tier, plan_static
from sd_lightning.state.shards import tensor_of

SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {},
    "all_slow": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 16_000},
    "optimizer_slow": {"offload_optim_frac": 1.0},
    "optimizer_slow_whole": {"offload_optim_frac": 0.6, "shard_param_frac": 0.0},
    "weights_slow": {"offload_param_frac": 1.0, "prefetch": 8},
    "half_slow": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "gathered_budget": 20_000},
    "split": {"offload_optim_frac": 0.8, "offload_param_frac": 0.6, "gathered_budget": 16_000, "master": "split"},
    "rounded": {"offload_optim_frac": 0.7, "offload_param_frac": 0.4, "master": "bfloat16"},
}


EARLY: dict[str, Any] = {"step_in_backward": True}
NARROW: dict[str, Any] = {"offload_optim_frac": 1.0, "gradient_dtype": torch.bfloat16}


def train(name: str, act: str, *, with_network: bool, **options: Any) -> Device:
    """Train a few steps, in float32 or bfloat16, with something else between them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if with_network or "master" in SETTINGS[name] else torch.float32
    network, job = Blocks(3 if act == "fail" else 2), Job("streams")
    with pretended_accelerator(with_network=with_network) as device:
        settings = SETTINGS[name] | options
        config = GeminiConfig(chunk_numel=1500, compute_dtype=dtype, **settings)
        made = GeminiEngine({"": network}, config)
        parameters = list(network.parameters())
        parts = [parameters[::2], parameters[1::2]] if act == "two optimizers" else [parameters]
        optimizers = [made.optimizer(torch.optim.AdamW(part, lr=1e-2)) for part in parts]

        def backward(index: int) -> None:
            loss_of(network, inputs(index, job), dtype).backward()

        for step in range(3):
            if step == 0 and not config.step_in_backward:
                with made.no_sync():
                    backward(10)
            backward(step)
            for optimizer in optimizers:
                if step == 1 and not config.step_in_backward:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            _act(made, act, step, backward)
        dict(made.whole_weights())
        kept = sum(whole_pages(nbytes) * len(buffers) for nbytes, buffers in made.memory._pinned.items())
        assert made.ledger.by_kind[Tier.SLOW, Kind.KEPT] == kept
        locked = sum(device.page_locks.sizes.values())
        assert locked == made.ledger.current[Tier.SLOW], "not all slow memory is page-locked, or more"
        made.close()
        assert not device.page_locks.sizes and not any(made.ledger.current.values())
    return device


def _act(made: GeminiEngine, act: str, step: int, backward: Callable[[int], None]) -> None:
    if act == "move":
        optim, param = [(0, 0), (1, 0), (1, 1)][step]
        made.move(plan_static(made.layouts, GeminiConfig(offload_optim_frac=optim, offload_param_frac=param)))
    if act == "swap":
        with torch.no_grad() if step else torch.inference_mode():  # as Lightning validates on accelerators
            made.state.swap_in({(s.name, s.begin): torch.zeros(s.end - s.begin) for s in made.state.parameter_shards()})
            made.networks[""](inputs(0, Job("streams"))[0].to(made.config.compute_dtype))
            assert all(float(tensor_of(shard.master).abs().sum()) >= 0 for shard in made.state.parameter_shards())
            made.state.swap_out()
    if act == "load":
        made.state.load({}, None, _read_zeros)
    if act == "fail":
        handle = made.networks[""].blocks[0].register_forward_hook(lambda _, __, output: _Fails.apply(output))
        with pytest.raises(ZeroDivisionError):
            backward(20)
        handle.remove()
    if act in ("drop", "two optimizers"):
        backward(20)
        made.optimizers[0].zero_grad()


def _read_zeros(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
    out.zero_()


@pytest.mark.parametrize("act", ["", "move", "swap", "load", "fail", "drop", "two optimizers"])
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_races_beside_the_computation(name: str, act: str) -> None:
    for with_network in (False, True):
        clock = train(name, act, with_network=with_network).compute.clock
        assert ("to slow" in clock) == (name != "fast" or act == "move"), "nothing was offloaded"


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_races_when_the_backward_pass_steps(name: str) -> None:
    for with_network in (False, True):
        train(name, "swap", with_network=with_network, **EARLY)


@pytest.mark.parametrize("options", [NARROW, NARROW | EARLY], ids=["later", "early"])
@pytest.mark.parametrize("name", ["all_slow", "optimizer_slow"])
def test_nothing_races_with_narrow_gradients_on_the_host(name: str, options: dict[str, Any]) -> None:
    train(name, "load", with_network=True, **options)


def test_copies_in_both_directions_go_on_beside_the_computation() -> None:
    ahead: dict[str, list[int]] = {"to fast": [], "to slow": []}
    with pretended_accelerator(with_network=True) as device:
        network = Blocks()
        config = GeminiConfig(chunk_numel=1500, offload_optim_frac=1.0, offload_param_frac=1.0)
        made = GeminiEngine({"": network}, config)
        optimizer = made.optimizer(torch.optim.AdamW(network.parameters()))

        def observe(phase: str, unit: str) -> None:
            for stream in (made.memory._to_fast, made.memory._to_slow):
                ahead[stream.name].append(stream.clock[stream.name] - device.compute.clock[stream.name])

        for step in range(3):
            made.runtime.observer = observe if step == 2 else None  # the order is known
            loss_of(network, inputs(step, Job("streams")), torch.float32).backward()
            optimizer.step()
    assert sum(count > 0 for count in ahead["to fast"]) >= 4, "weights that come later are waited for"
    assert sum(count > 0 for count in ahead["to slow"]) >= 3, "gradients that leave are waited for"


def test_the_host_waits_for_nothing_that_has_just_been_sent() -> None:
    """Neither for gradients that are added to those of a micro-batch before, nor for all to step the first."""
    with pretended_accelerator(with_network=True) as device:
        network = Blocks()
        made = GeminiEngine({"": network}, GeminiConfig(chunk_numel=1500, offload_optim_frac=1.0))
        optimizer = made.optimizer(torch.optim.AdamW(network.parameters()))
        under_way: list[int] = []
        apply = optimizer.stepper.update.apply

        def watched(*args: Any) -> Any:
            stream = made.memory._to_slow
            under_way.append(stream.clock[stream.name] - device.host.clock[stream.name])
            return apply(*args)

        optimizer.stepper.update.apply = watched  # type: ignore[method-assign]
        for micro in range(3):
            with made.no_sync():
                loss_of(network, inputs(micro, Job("streams")), torch.float32).backward()
        in_backward, num_chunks = list(device.waits), len(made.chunks)
        optimizer.step()
    assert num_chunks > 6
    assert len(in_backward) >= num_chunks, "nothing was added up on the host"
    assert all(later >= 4 for _, later in in_backward), "gradients were waited for as soon as they were sent"
    assert under_way[0] > 0 == under_way[-1], "all gradients were waited for before the first was stepped"


def test_host_memory_is_used_again_only_after_copies_to_it() -> None:
    with pretended_accelerator(with_network=False):
        memory = chunk_file.Memory(torch.device("cpu"))
        target, source = (memory.allocate(tier, Kind.WEIGHTS, 8, torch.float32) for tier in (Tier.SLOW, Tier.FAST))
        with memory.copying(Tier.SLOW):
            memory.copy(target.tensor, source.tensor, Tier.FAST, Tier.SLOW)
        with pytest.raises(Race, match="host uses memory of the slow tier while to slow does"):
            target.tensor.zero_()
        other = memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.float32)
        addresses = [buffer.tensor.data_ptr() for buffer in (target, other)]
        memory.free(target)
        fresh = memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.float32, zero=True)
        assert fresh.tensor.data_ptr() not in addresses, "waits though there is other memory"
        memory.free(other)
        assert memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.int32, zero=True).tensor.data_ptr() == addresses[0]
