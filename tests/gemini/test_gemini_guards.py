"""What the Gemini engine refuses, and what parameters look like while their memory is elsewhere."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gemini_jobs import BATCH, Blocks, Job, _Fails, inputs, loss_of, weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.auto import AllocatorProbe, NetworkCall
from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.layout import place_others
from sd_lightning.gemini.memory import Memory, peak_allocated, spare_bytes
from sd_lightning.gemini.placement import Kind, Tier
from sd_lightning.models.families.blocks import execution_position, repeated_blocks
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.state.shards import SavedParameter
from sd_lightning.strategies.gemini import gemini

SLOW = {"offload_param_frac": 1.0, "chunk_numel": 1500}


def engine_of(network: nn.Module, **settings: Any) -> GeminiEngine:
    return GeminiEngine({"": network}, GeminiConfig(**settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_released_parameter_is_read_and_written_as_whole_float32_weights(dtype: torch.dtype) -> None:
    network, plain, batch = Blocks(), Blocks(), inputs(0, Job("read"))
    plain.load_state_dict(network.state_dict())
    engine = engine_of(network, compute_dtype=dtype, **SLOW)
    for each in (network, plain):
        assert float(each.blocks[0].up.weight.norm()) > 0  # in autograd's graph
        with torch.no_grad():
            each.gain[:5] += 1.0
        each.head.weight.data.clamp_(-0.01, 0.01)
        each.blocks[1].down.weight.data = torch.full_like(each.blocks[1].down.weight, 0.02)
        each.blocks[2].load_state_dict({name: -value for name, value in each.blocks[2].state_dict().items()})
    assert type(copy.deepcopy(network.gain)) is nn.Parameter
    with torch.no_grad():
        found, expected = (loss_of(each, batch, dtype) for each in (network, plain.to(dtype)))
    torch.testing.assert_close(found, expected)
    engine.release()
    assert torch.equal(network.gain.to(dtype), plain.gain) and network.gain.grad is None
    assert float(network.head.weight.detach().abs().max()) == pytest.approx(0.01)
    engine.close()
    with pytest.raises(UsageError, match=r"restore\(\) after close\(\), which frees the weights"):
        engine.restore()
    assert network.head.weight.isnan().all()


def test_a_write_inside_of_a_forward_is_refused_at_once() -> None:
    network, batch = Blocks(), inputs(0, Job("written"))
    engine = engine_of(network, **SLOW)
    calls: list[int] = []

    def write(module: nn.Module, *_: Any) -> None:
        if not calls:
            module.down.weight.data.mul_(2.0)  # type: ignore[operator,union-attr]
        calls.append(1)

    expected = network.blocks[1].down.weight.detach().clone()
    network.blocks[1].up.register_forward_hook(lambda *_: write(network.blocks[1]))
    with pytest.raises(UsageError, match=r"blocks.1.down.weight written inside of its network's forward.*in a hook"):
        loss_of(network, batch, torch.float32)
    assert len(calls) == 1
    engine.restore()
    engine.restore()  # changes nothing
    assert torch.equal(network.blocks[1].down.weight, expected)


def test_moving_a_network_to_its_device_gathers_nothing() -> None:
    """As drawing during training does, after a step, when gradients are freed."""
    network, batch = Blocks(), inputs(0, Job("moved"))
    engine = engine_of(network, **SLOW)
    optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    loss_of(network, batch, torch.float32).backward()
    optimizer.step()
    for move in (lambda: network.to("cpu"), network.cpu, lambda: network.to(torch.device("cpu"), non_blocking=True)):
        assert move() is network and not engine.access.is_open
    with pytest.raises(UsageError, match="gain.grad after SGD has stepped"):
        _ = network.gain.grad
    assert network.gain.cpu().shape == network.gain.shape and engine.access.is_open, "reading a weight gathers it"
    engine.restore()


def test_weights_of_other_shapes_are_refused_and_a_weight_that_needs_gradients_is_not_changed_in_place() -> None:
    network = Blocks()
    engine_of(network, **SLOW)
    with pytest.raises(UsageError, match=r"gain.data of shape \(3,\); expected \(24,\)"):
        network.gain.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        network.gain.add_(1.0)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch._foreach_mul_(list(network.head.parameters()), 2.0)
    nn.init.constant_(network.gain, 0.5)
    assert float(network.gain.detach().mean()) == 0.5


def test_restored_parameters_are_whole_float32_weights_without_an_engine() -> None:
    network = Blocks()
    expected = {name: p.detach().clone() for name, p in network.named_parameters()}
    engine = engine_of(network, compute_dtype=torch.bfloat16, **SLOW)
    loss_of(network, inputs(0, Job("restore")), torch.bfloat16)
    engine.restore()
    assert engine.is_closed
    for name, parameter in network.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected[name]), name
    plain = Blocks()
    plain.load_state_dict(network.state_dict())
    batch = inputs(0, Job("restore"))
    torch.testing.assert_close(loss_of(network, batch, torch.float32), loss_of(plain, batch, torch.float32))


@pytest.mark.parametrize("settings", [SLOW, {"placement": "auto", "memory_cap": "240KiB", "chunk_numel": 1500}])
def test_arrays_that_share_memory_with_parameters_do_no_harm(settings: dict[str, Any]) -> None:
    def losses(*, with_arrays: bool) -> list[float]:
        torch.manual_seed(0)
        network = Blocks()
        engine = engine_of(network, **settings)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))
        found, arrays = [], []  # a chunk whose memory an array shares cannot free it
        for step in range(6):
            if with_arrays:
                with torch.no_grad():
                    loss_of(network, inputs(step, Job("numpy")), torch.float32)
                arrays += [p.detach().numpy() for p in network.parameters()]
            loss = loss_of(network, inputs(step, Job("numpy")), torch.float32)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    assert losses(with_arrays=True) == losses(with_arrays=False)


def test_a_pipeline_is_saved_whole_from_released_weights(tmp_path: Path) -> None:
    model = LatentDiffusion.build("tiny", seed=0)
    expected = {name: p.detach().clone() for name, p in model.denoiser.named_parameters()}
    GeminiEngine({"unet": model.denoiser}, GeminiConfig(offload_param_frac=1.0))
    model.save_pretrained(tmp_path)
    again = LatentDiffusion.from_pretrained(tmp_path).denoiser
    assert all(torch.equal(p, expected[name]) for name, p in again.named_parameters())


def test_parameters_of_integers_come_to_the_accelerator() -> None:
    network = nn.Linear(2, 2)
    network.table = nn.Parameter(torch.arange(3), requires_grad=False)
    sent_to: Any = torch.int16  # there is one device here: a type stands for another
    place_others({"": network}, {network.weight, network.bias}, sent_to, None)
    assert network.table.dtype == sent_to and network.table.tolist() == [0, 1, 2]
    assert network.weight.dtype == torch.float32, "the chunk moves it"


def test_channels_last_weights_are_refused_by_name() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"got 0\.weight in the channels_last format.*channels_last=false"):
        engine_of(network)


def test_chunks_of_a_unet_are_packed_in_the_order_in_which_they_run() -> None:
    unet = LatentDiffusion.build("tiny", seed=0).denoiser

    def order(name: str) -> tuple[int, ...]:
        return execution_position(name.partition(".")[2])

    blocks = list(repeated_blocks(unet).values())
    config = GeminiConfig(offload_param_frac=1.0, chunk_numel=20_000)
    engine = GeminiEngine({"unet": unet}, config, blocks=blocks, order=order)
    seen: list[str] = []
    engine.runtime.observer = lambda phase, unit: seen.append(unit)
    with torch.no_grad():
        unet(torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 8, 64))
    assert seen == [unit.name for unit in engine.runtime.units]
    registered = GeminiEngine({"unet": LatentDiffusion.build("tiny", seed=0).denoiser}, config).runtime.units
    assert [unit.name for unit in registered] != [unit.name for unit in engine.runtime.units]


def test_sampling_does_not_make_training_forget_its_order() -> None:
    network = Blocks()
    engine = engine_of(network, **SLOW, prefetch=8, gathered_budget=60_000)
    misses = []
    for step in range(6):
        if step == 4:
            for _ in range(3):
                with torch.inference_mode():
                    network(torch.zeros(1, 2, 6))
        before = engine.runtime.statistics["misses"]
        loss_of(network, inputs(step, Job("order")), torch.float32).backward()
        misses.append(engine.runtime.statistics["misses"] - before)
    assert misses[0] > misses[1] == misses[2] == misses[3] == misses[5]
    assert misses[4] <= misses[3]


@pytest.mark.parametrize(
    ("reduce_once", "message"),
    [
        (False, "each micro-batch is reduced; with 0.1 MiB to spare"),
        (True, "of all micro-batches are reduced once"),
        ("auto", "there are no other ranks to reduce over"),
    ],
)
def test_the_engine_tells_once_how_gradients_accumulate(
    reduce_once: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    network = Blocks()
    engine = engine_of(network, reduce_once=reduce_once, chunk_numel=1500)
    with caplog.at_level(logging.INFO, "sd_lightning.gemini.gathering"):
        for step in range(3):
            with engine.no_sync():
                loss_of(network, inputs(step, Job("accumulate")), torch.float32).backward()
    assert caplog.text.count(message) == 1 and caplog.text.count("Gemini") == 1


def test_the_type_of_the_sums_is_given_by_name() -> None:
    assert gemini(reduce_dtype="bfloat16").config.reduce_dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r"got reduce_dtype=halff; expected float32, or bfloat16 or float16"):
        gemini(reduce_dtype="halff")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["once", 1, None])
def test_a_way_to_accumulate_that_is_not_known_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"got reduce_once=.*expected true, false or 'auto'"):
        GeminiConfig(reduce_once=value)


@pytest.mark.parametrize(
    ("spare", "num_reductions", "message"),
    [
        (10 * 2**20, [2, 1, 1], "micro-batches are reduced once, in float32: 0.1 MiB of the 10.0 MiB to spare"),
        (1, [2, 2, 2], "each micro-batch is reduced: whole gradients take 0.1 MiB, and 0.0 MiB are to spare"),
    ],
)
def test_what_the_first_step_leaves_decides_how_gradients_accumulate(
    spare: int,
    num_reductions: list[int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("sd_lightning.gemini.gathering.spare_bytes", lambda memory, world_size: spare)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(Collectives, "sum_with_order", lambda self, values: values)  # a fake group adds nothing up
    try:
        network = Blocks()
        engine = engine_of(network, reduce_once="auto", chunk_numel=1500)
        optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=1e-6))
        found = []
        with caplog.at_level(logging.INFO, "sd_lightning.gemini.gathering"):
            for step in range(3):
                before = engine.runtime.statistics["reductions"]
                with engine.no_sync():
                    loss_of(network, inputs(step, Job("accumulate")), torch.float32).backward()
                loss_of(network, inputs(step, Job("accumulate")), torch.float32).backward()
                optimizer.step()
                found.append((engine.runtime.statistics["reductions"] - before) // len(engine.chunks))
    finally:
        dist.destroy_process_group()
    assert found == num_reductions
    assert caplog.text.count(message) == 1 and caplog.text.count("Gemini") == 1


def test_what_an_accelerator_has_to_spare_is_nine_tenths_less_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (300, 9999), "memory_reserved": 700, "max_memory_allocated": 650}
    module = SimpleNamespace(**{name: lambda device, value=value: value for name, value in figures.items()})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    memory: Any = SimpleNamespace(on_accelerator=True, device=torch.device("cuda"))
    assert spare_bytes(memory, 1) == 250
    host = [spare_bytes(Memory(torch.device("cpu")), world_size) for world_size in (1, 2)]
    assert host[0] - host[1] == pytest.approx(0.45 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [(0.5, 500), (1, 1000), ("0.25", 250), (2**21, 2**21), ("2GiB", 2**31), ("1.5 KiB", 1536), ("7B", 7)],
)
def test_a_memory_cap_is_a_fraction_or_a_size(cap: Any, expected: int) -> None:
    assert GeminiConfig(placement="auto", memory_cap=cap).memory_cap_bytes(1000) == expected


@pytest.mark.parametrize("cap", [20, 1.5, 0, -1, "20GB", "much", "0GiB"])
def test_a_memory_cap_that_is_neither_is_refused(cap: Any) -> None:
    with pytest.raises(UsageError, match=r"memory_cap=.*expected a fraction of the device in \(0, 1\], or a size"):
        GeminiConfig(placement="auto", memory_cap=cap)


def test_a_cap_below_the_largest_unit_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"MiB too little with everything offloaded.*set memory_cap=\d+B or more"):
        engine_of(Blocks(), placement="auto", memory_cap="5KiB", chunk_numel=1500)


def test_activations_that_do_not_fit_are_named_with_a_cap_that_is_enough() -> None:
    def losses(cap: str) -> list[float]:
        torch.manual_seed(0)
        network = Blocks()
        engine = engine_of(network, placement="auto", memory_cap=cap, chunk_numel=1500)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))
        found = []
        for step in range(3):
            loss = loss_of(network, inputs(step, Job("fit")), torch.float32)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    with pytest.raises(UsageError, match="activations take") as caught:
        losses("100KiB")
    enough = int(str(caught.value).split("set memory_cap=")[1].split("B")[0])
    assert losses(f"{enough}B") == losses("0.9")


def test_only_calls_with_larger_inputs_are_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    network = Blocks()
    engine = engine_of(network, placement="auto", memory_cap="1MiB", chunk_numel=1500)
    engine.optimizer(torch.optim.SGD(network.parameters(), lr=1e-3))
    plans = []

    def train(batch: int, length: int) -> None:
        network(torch.randn(batch, length, 6)).square().mean().backward()
        plans.append((engine.num_moves, engine.plan.chunks[0].param_tier))

    with caplog.at_level(logging.INFO, "sd_lightning.gemini.auto"):
        for batch, length in [(4, 5), (4, 5), (2, 5), (4, 9), (4, 5), (4, 9), (2, 10), (2, 10)]:
            train(batch, length)
    slow, fast = Tier.SLOW, Tier.FAST
    assert plans == [(0, slow), (1, fast), (1, fast), (2, slow), (3, fast), (3, fast), (4, slow), (5, fast)]
    assert caplog.text.count("for chunks beside") == 1, "the same plan is told again"


def test_a_call_covers_those_with_inputs_that_are_larger_nowhere() -> None:
    call = NetworkCall("unet", True, True, ((4, 3, 8), (4,)))
    assert call.covers(call) and call.covers(call._replace(shapes=((2, 3, 8), (4,))))
    assert not call.covers(call._replace(shapes=((2, 3, 9), (4,))))
    assert not call.covers(call._replace(shapes=((4, 3, 8),)))
    assert not call.covers(call._replace(with_gradients=False))


def test_an_exception_in_a_network_leaves_measuring_as_it_was() -> None:
    network = Blocks()
    engine = engine_of(network, placement="auto", memory_cap="1MiB", chunk_numel=1500)
    handle = network.blocks[1].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        network(torch.zeros(4, 5, 6))
    handle.remove()
    network(torch.zeros(4, 5, 6)).square().mean().backward()
    network(torch.zeros(4, 5, 6))
    assert engine.num_moves == 1 and engine.auto is not None and engine.auto.non_model_bytes > 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks are left behind"


def test_an_exception_while_measuring_starts_the_measurement_again() -> None:
    network = Blocks()
    engine = engine_of(network, placement="auto", memory_cap="1MiB", chunk_numel=1500)
    assert engine.auto is not None
    loss_of(network, inputs(0, Job("abort")), torch.float32)
    engine.abort()
    loss_of(network, inputs(0, Job("abort")), torch.float32).backward()
    network(torch.zeros(1, 1, 6))
    once = engine.auto.non_model_bytes
    fresh = engine_of(other := Blocks(), placement="auto", memory_cap="1MiB", chunk_numel=1500)
    loss_of(other, inputs(0, Job("abort")), torch.float32).backward()
    other(torch.zeros(1, 1, 6))
    assert fresh.auto is not None and once == fresh.auto.non_model_bytes > BATCH * 5 * 24 * 4


class FakeAllocator:
    """Statistics of an accelerator's allocator, as torch's device modules give them."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.now

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak


def test_the_allocators_peak_without_chunks_is_what_activations_take(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, memory = FakeAllocator(), Memory(torch.device("cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    probe = AllocatorProbe(memory)
    allocator.take(70)  # an encoder beside the engine
    probe.begin()
    memory.ledger.add(Tier.FAST, Kind.GATHERED, 1000)
    allocator.take(1000)
    probe.note()
    allocator.take(30)
    allocator.take(-20)
    probe.note()
    assert probe.end() == 100
    assert allocator.peak == 1080 < peak_allocated(memory.device) == 1100, "others' peak is lost"


def test_paged_8_bit_states_are_refused() -> None:
    from bitsandbytes.optim import AdamW8bit

    network = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r"AdamW8bit with is_paged=True.*offload_optim_frac"):
        engine_of(network).optimizer(AdamW8bit(network.parameters(), is_paged=True))


@pytest.mark.parametrize("least", [1, 4096])
def test_8_bit_states_are_saved_as_values_and_quantised_again_when_loaded(least: int) -> None:
    from bitsandbytes.optim import AdamW8bit

    def trained(steps: int) -> GeminiEngine:
        torch.manual_seed(0)
        network = Blocks()
        engine = engine_of(network, chunk_numel=1500, offload_optim_frac=0.5)
        optimizer = engine.optimizer(AdamW8bit(network.parameters(), lr=1e-3, min_8bit_size=least))
        for step in range(steps):
            loss_of(network, inputs(step, Job("8bit")), torch.float32).backward()
            optimizer.step()
        return engine

    def states(engine: GeminiEngine) -> dict[str, torch.Tensor]:
        values = {
            f"{kind}/{owned.name}": s for owned in engine.state.parameter_shards() for kind, s in owned.states.items()
        }
        values |= {f"master/{owned.name}": owned.master for owned in engine.state.parameter_shards()}
        return {key: (s if isinstance(s, torch.Tensor) else s()).clone() for key, s in values.items()}

    saved = states(trained(3))
    fresh = trained(0)

    def read(kind: str, name: str, out: torch.Tensor, begin: int, end: int) -> None:
        out.copy_(saved[f"{kind}/{name}"][begin:end])

    records = {
        name: SavedParameter(tuple(p.shape), dict.fromkeys(("state1", "state2"), tuple(p.shape)), {"step": 3})
        for name, p in fresh.trained.items()
    }
    fresh.state.load(records, fresh.state.optimizer_groups(), read)
    loaded = states(fresh)
    assert loaded.keys() == saved.keys() and len(saved) == 3 * len(fresh.trained)
    assert {owned.scalars["step"] for owned in fresh.state.parameter_shards()} == {3}
    for key, values in saved.items():
        assert values.dtype == torch.float32 and values.abs().max() > 0
        exact = least == 4096 or key.startswith("master")
        bound = 0.0 if exact else 0.02 * float(values.abs().max())
        assert float((loaded[key] - values).abs().max()) <= bound, key


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"offload_dir=.*file/below, which cannot be written to"):
        engine_of(Blocks(), offload_optim_frac=1.0, disk_optim_frac=1.0, offload_dir=tmp_path / "file" / "below")


def test_a_full_disk_is_refused_instead_of_killing_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UsageError, match=r"has no room for \d+ bytes more.*smaller disk_optim_frac"):
        engine_of(Blocks(), offload_optim_frac=1.0, disk_optim_frac=1.0, offload_dir=tmp_path)


def test_states_on_disk_stay_live_though_their_files_have_no_names(tmp_path: Path) -> None:
    network = Blocks()
    engine = engine_of(network, offload_optim_frac=1.0, disk_optim_frac=1.0, offload_dir=tmp_path, chunk_numel=1500)
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))
    assert list(tmp_path.iterdir()) == [] and engine.ledger.current[Tier.DISK] > 0
    masters = [owned.master for owned in engine.state.parameter_shards()]
    before = [master.clone() for master in masters]
    loss_of(network, inputs(0, Job("disk")), torch.float32).backward()
    optimizer.step()
    assert not any(torch.equal(master, old) for master, old in zip(masters, before, strict=True))


def test_a_rank_that_owns_only_padding_keeps_nothing_on_disk(tmp_path: Path) -> None:
    memory = Memory(torch.device("cpu"), tmp_path)
    empty = memory.allocate(Tier.DISK, Kind.OPTIMIZER, 0, torch.uint8, zero=True)
    assert empty.nbytes == memory.ledger.current[Tier.DISK] == 0
    memory.free(empty)


@pytest.mark.parametrize("overflows", [False, True])
def test_several_optimizers_divide_by_the_scale_of_their_backward_pass(overflows: bool) -> None:
    def trained(growth_interval: int) -> tuple[GeminiEngine, list[torch.Tensor]]:
        torch.manual_seed(0)
        network = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
        engine = engine_of(network, compute_dtype=torch.float16, chunk_numel=64)
        assert engine.loss_scale is not None
        engine.loss_scale.growth_interval = growth_interval
        engine.loss_scale.load_state_dict({"value": 64.0, "good_steps": 0, "skipped": 0})
        optimizers = [engine.optimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in network.values()]
        x = torch.ones(2, 4, dtype=torch.float16)
        factor = torch.tensor([65504.0 if overflows else 1.0, 1.0], dtype=torch.float16)
        engine.backward(network["a"](x * factor[0]).mean() + network["b"](x).mean() + network["c"](x).mean())
        for optimizer in optimizers:
            optimizer.step()
        engine.restore()
        return engine, [parameter.detach().clone() for parameter in network.parameters()]

    engine, weights = trained(growth_interval=1)
    _, expected = trained(growth_interval=1000)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert engine.loss_scale is not None
    state = engine.loss_scale.state_dict()
    assert state["value"] == (32.0 if overflows else 128.0) and state["skipped"] == overflows


def loss_of_large_gradients(network: nn.Module) -> torch.Tensor:
    return (network(torch.ones(1, 4)) * 1e30).sum()  # their squares overflow


def test_clipping_an_infinite_norm_does_what_torch_does() -> None:
    weights = []
    for ours in (True, False):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4))
        inner = torch.optim.SGD(network.parameters(), lr=0.1)
        if ours:
            engine = engine_of(network, chunk_numel=64)
            optimizer = engine.optimizer(inner)
            loss_of_large_gradients(network).backward()
            assert torch.isinf(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
            engine.restore()
        else:
            loss_of_large_gradients(network).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            inner.step()
        weights.append([p.detach().clone() for p in network.parameters()])
    for mine, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("how", ["an exception in the next backward pass", "abort()"])
def test_the_norm_and_the_clipping_of_a_step_that_failed_are_forgotten(how: str) -> None:
    def trained(*, fails: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        network = Blocks()
        engine = engine_of(network, chunk_numel=1500)
        optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        if fails:
            loss_of(network, inputs(7, Job("abort")), torch.float32).backward()
            optimizer.clip_grad_norm_(1e-3)
            if how == "abort()":
                engine.abort()
            else:
                handle = network.blocks[0].register_forward_hook(lambda module, args, output: _Fails.apply(output))
                with pytest.raises(ZeroDivisionError):
                    loss_of(network, inputs(8, Job("abort")), torch.float32).backward()
                handle.remove()
        loss_of(network, inputs(0, Job("abort")), torch.float32).backward()
        optimizer.step()
        return weights_of(engine)

    plain, aborted = trained(fails=False), trained(fails=True)
    assert all(torch.equal(plain[name], weight) for name, weight in aborted.items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_a_norm_is_one_transfer_from_the_accelerator_or_none(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None with torch's kernels that take the factor of clipping from the device."""
    network, transfers = Blocks(), []
    engine = engine_of(network, chunk_numel=1500)
    optimizer = engine.optimizer(kind(network.parameters(), lr=0.1))
    loss_of(network, inputs(0, Job("norm")), torch.float32).backward()
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: transfers.append(self.numel()) or to_host(self))
    optimizer.clip_grad_norm_(1.0)
    ranges = sum(1 for _ in optimizer.stepper.gradients())
    assert transfers == ([] if kind is torch.optim.SGD else [ranges]), "one number from each range"


def test_norms_that_are_watched_between_micro_batches_change_nothing() -> None:
    def trained(*, watches: bool) -> tuple[float, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        network = Blocks()
        engine = engine_of(network, chunk_numel=1500)
        optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        for index in range(2):
            network.with_extra = index == 1  # some parameters get their first gradients in the second micro-batch
            loss_of(network, inputs(index, Job("watch")), torch.float32).backward()
            if watches:
                optimizer.grad_norm()
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        return norm, weights_of(engine)

    (norm, plain), (watched_norm, watched) = trained(watches=False), trained(watches=True)
    assert watched_norm == norm > 1
    assert all(torch.equal(plain[name], weight) for name, weight in watched.items())


def test_a_write_into_the_part_of_another_rank_counts_on_this_rank_too() -> None:
    """Otherwise the ranks would stop comparing at different writes, and one would wait for the others."""
    network = Blocks()
    access = engine_of(network, **SLOW).access
    peers = SimpleNamespace(world_size=2, agree=lambda _: True, all_reduce=lambda values, op: torch.ones_like(values))
    access._chunked = SimpleNamespace(collectives=peers)  # type: ignore[assignment]
    for _ in range(20):
        access._compare([0], {0: torch.zeros(4)}, written=[])
    assert access._num_written == 16
