"""The Gemini engine on one GPU: real streams, pinned memory and the allocator's own figures."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from one_rank import one_rank_group
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.rounding import round_stochastically

pytestmark = pytest.mark.gpu
WIDTH, DEPTH, BATCH, MIB = 512, 8, 256, 2**20
LIMIT = 0.02
"""Of the norm of gradients; theirs is larger."""
OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 4 * MIB}
HALF = OFFLOADED | {"compute_dtype": torch.bfloat16}
EARLY: dict[str, Any] = {"step_in_backward": True, "gradient_dtype": torch.bfloat16}
HOST_OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"master": "split"},
    "narrow": {"gradient_dtype": torch.bfloat16},
    "early": {"step_in_backward": True},
    "early, narrow, split": EARLY | {"master": "split"},
}
"""Those that change no bit."""
CAP = 40 * MIB
"""A little more than weights and states take."""


def network_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    return nn.Sequential(*blocks)


def train(
    settings: dict[str, Any] | None,
    *,
    steps: int = 8,
    quantised: bool = False,
    kind: Any = torch.optim.AdamW,
    accelerator: str = "cuda",
) -> tuple[list[float], Any, int]:
    """Return the losses, the engine (none: plain torch), and the most memory taken in the second half."""
    device = _device(accelerator)
    network, engine = network_of().to(device), None
    if settings is not None:
        network = network_of()
        config = GeminiConfig(chunk_numel=WIDTH * WIDTH + 4 * WIDTH, **settings)
        engine = GeminiEngine({"": network}, config, device=device)
    optimizer = _optimizer(network, quantised, kind)
    stepped = optimizer if engine is None else engine.optimizer(optimizer)
    if settings is not None and settings.get("step_in_backward") == "running_norm":
        stepped.early.max_norm = LIMIT
    losses = []
    for step in range(steps):
        if step == steps // 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = _loss(network, step, accelerator, None if settings is None else settings.get("compute_dtype"))
        (torch.Tensor.backward if engine is None else engine.backward)(loss)
        stepped.step()
        stepped.zero_grad()
        losses.append(float(loss.detach()))
    return losses, engine, torch.cuda.max_memory_allocated()


def _device(accelerator: str) -> torch.device:
    return torch.device("cpu") if accelerator == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _loss(network: nn.Module, step: int, accelerator: str, dtype: torch.dtype | None) -> torch.Tensor:
    size = 8 if accelerator == "cpu" else BATCH
    batch = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step)).to(_device(accelerator))
    return F.mse_loss(network(batch.to(dtype)).float(), batch.roll(1, 0))


def _optimizer(network: nn.Module, quantised: bool, kind: Any) -> torch.optim.Optimizer:
    if not quantised:
        return kind(network.parameters(), lr=1e-3)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(network.parameters(), lr=1e-3)


def automatic() -> tuple[dict[str, Any], int]:
    """Return settings with a cap, and the bytes below it that are not the engine's.

    Those are the workspaces of cuBLAS, which stay once a thread has computed: 32 MiB each on a Hopper GPU.
    """
    train(None)
    gc.collect()
    base = torch.cuda.memory_allocated()
    return {"placement": "auto", "memory_cap": f"{base + CAP}B"}, base


@pytest.mark.parametrize(
    "settings",
    [{}, OFFLOADED, {"offload_optim_frac": 1.0}, {"offload_param_frac": 1.0}],
    ids=["fast", "offloaded", "optimizer", "weights"],
)
def test_every_placement_trains_as_plain_torch(settings: dict[str, Any], gpu_accelerator: str) -> None:
    losses, engine, _ = train(settings, accelerator=gpu_accelerator)
    assert losses == pytest.approx(train(None, accelerator=gpu_accelerator)[0], rel=1e-4)
    assert losses[-1] < losses[0]
    engine.restore()


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["fast", "offloaded"])
@pytest.mark.parametrize("name", ["NAdam", "ASGD", "RMSprop", "Adagrad"])
def test_the_users_own_class_steps_chunks_on_both_tiers(
    name: str, settings: dict[str, Any], gpu_accelerator: str
) -> None:
    kind = getattr(torch.optim, name)
    losses, _, _ = train(settings, kind=kind, accelerator=gpu_accelerator)
    assert losses == pytest.approx(train(None, kind=kind, accelerator=gpu_accelerator)[0], rel=1e-4)


def test_offloaded_memory_is_page_locked_until_the_engine_closes() -> None:
    of_allocator = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")  # torch 2.11 has none
    settings = of_allocator()
    torch.cuda.init()  # there are no statistics before
    torch.empty(9 * MIB, dtype=torch.uint8, pin_memory=True)  # torch keeps it, with room for 16 MiB
    taken = torch.cuda.host_memory_stats()["allocated_bytes.allocated"]
    _, engine, _ = train(OFFLOADED)
    chunk = engine.chunks[0]
    kept = [chunk.master.read(), chunk.weights.shard, *(state.tensor for state in chunk.states.values())]
    assert all(tensor.is_pinned() for tensor in kept)
    assert engine.memory._page_locked.nbytes == engine.ledger.current["slow"] > 0
    engine.close()
    assert not any(tensor.is_pinned() for tensor in kept)
    assert not any(engine.ledger.current.values())
    assert torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - taken < MIB, "torch pins what is offloaded"
    assert of_allocator() == settings
    torch.empty(15 * MIB, dtype=torch.uint8, pin_memory=True).fill_(1)


def test_weights_that_are_cast_on_their_way_change_no_bit() -> None:
    half = {"compute_dtype": torch.bfloat16}
    losses, engine, _ = train(OFFLOADED | half)
    assert losses == train({"offload_param_frac": 1.0, "offload_optim_frac": 1.0} | half)[0]
    assert losses == pytest.approx(train(half)[0], rel=1e-2)
    assert engine.ledger.kind_peak["slow", "staged"] == 0, "offloaded weights are cast on the host"
    staged = train({"offload_optim_frac": 1.0} | half)[1].ledger.kind_peak["slow", "staged"]
    assert staged > 0


@pytest.mark.parametrize("settings", [{}, OFFLOADED, {"offload_optim_frac": 1.0}, {"shard_param_frac": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_collectives_of_nccl_change_no_bit(settings: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    """One rank with all collectives: nccl's stream beside the copies, and reduce-scatter in place."""
    given = settings | {"compute_dtype": dtype, "prefetch": 4}
    expected = train(given)[0]
    with one_rank_group(backend) as counts:
        losses, engine, _ = train(given)
        engine.close()
    assert losses == expected
    assert min(counts[name] for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")) >= 8


def test_an_automatic_placement_stays_under_its_cap() -> None:
    settings, base = automatic()
    losses, engine, peak = train(settings)
    assert losses == pytest.approx(train(None)[0], rel=1e-4)
    assert engine.num_moves >= 1 and 0 < engine.auto.non_model_bytes - base < CAP
    assert peak - base <= CAP
    assert any(place.optim_tier == "slow" for place in engine.plan.chunks), "nothing had to leave"


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["fast", "offloaded"])
def test_8_bit_states_train_as_with_bitsandbytes(settings: dict[str, Any]) -> None:
    assert train(settings, quantised=True)[0] == pytest.approx(train(None, quantised=True)[0], rel=2e-3)


def weights_of(engine: Any) -> list[torch.Tensor]:
    return [whole.cpu() for _, whole in engine.whole_weights()]


@pytest.mark.parametrize("settings", HOST_OPTIONS.values(), ids=list(HOST_OPTIONS))
def test_options_for_host_memory_change_no_bit(settings: dict[str, Any], gpu_accelerator: str) -> None:
    expected, plain, _ = train(HALF, accelerator=gpu_accelerator)
    losses, engine, _ = train(HALF | settings, accelerator=gpu_accelerator)
    assert losses == expected
    assert all(torch.equal(ours, its) for ours, its in zip(weights_of(engine), weights_of(plain), strict=True))


def test_random_rounding_draws_the_same_numbers_on_a_gpu(gpu_accelerator: str) -> None:
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
    out = [
        torch.empty(values.shape, dtype=torch.bfloat16, device=device) for device in ("cpu", _device(gpu_accelerator))
    ]
    for each in out:
        round_stochastically(values.clone().to(each.device), (123, 456), 0, each)
    assert torch.equal(out[0], out[1].cpu()) and not torch.equal(out[0], values.bfloat16())


@pytest.mark.parametrize("place", [HALF, {"compute_dtype": torch.bfloat16}], ids=["offloaded", "fast"])
def test_rounded_weights_train_nearly_as_float32_ones_and_twice_alike(
    place: dict[str, Any], gpu_accelerator: str
) -> None:
    rounded = [train(place | {"master": "bfloat16"}, accelerator=gpu_accelerator) for _ in range(2)]
    assert rounded[0][0] == rounded[1][0] == pytest.approx(train(place, accelerator=gpu_accelerator)[0], rel=2e-2)
    assert all(torch.equal(*pair) for pair in zip(weights_of(rounded[0][1]), weights_of(rounded[1][1]), strict=True))
    other = train(place | {"master": "bfloat16", "rounding_seed": 1}, accelerator=gpu_accelerator)[1]
    assert not torch.equal(weights_of(rounded[0][1])[1], weights_of(other)[1])


def test_the_running_norm_begins_with_that_of_all_gradients(gpu_accelerator: str) -> None:
    """It clips each chunk by the norm so far, and the ones after the first step at least by that of the first."""
    _, engine, _ = train(HALF | {"step_in_backward": "running_norm"}, steps=1, accelerator=gpu_accelerator)
    network = network_of().to(_device(gpu_accelerator)).bfloat16()
    _loss(network, 0, gpu_accelerator, torch.bfloat16).backward()
    norm = torch.stack([p.grad.float().square().sum() for p in network.parameters()]).sum().sqrt()
    assert engine.optimizers[0].early.last_norm == pytest.approx(float(norm), rel=2e-2)
    assert float(norm) > LIMIT


@pytest.mark.parametrize(
    ("settings", "quantised"),
    [({"master": "split"}, False), (EARLY, False), (EARLY | {"master": "bfloat16"}, True)],
    ids=["split", "early", "all"],
)
def test_the_ledger_counts_the_pages_that_are_locked(settings: dict[str, Any], quantised: bool) -> None:
    _, engine, _ = train(HALF | settings, steps=3, quantised=quantised)
    locked = list(engine.memory._page_locked._locked.values())
    assert all(memory.is_pinned() and memory.nbytes % mmap.PAGESIZE == 0 for memory in locked)
    ties = sum(each.nbytes for chunk in engine.chunks for each in chunk.master._ties.values())  # not copied: not locked
    assert sum(memory.nbytes for memory in locked) + ties == engine.ledger.current["slow"] > 0
    engine.close()
    assert not any(memory.is_pinned() for memory in locked) and not any(engine.ledger.current.values())


def test_all_options_train_nearly_as_none(gpu_accelerator: str) -> None:
    losses, engine, _ = train(HALF | EARLY | {"master": "bfloat16"}, quantised=True, accelerator=gpu_accelerator)
    plain_losses, plain, _ = train(HALF, accelerator=gpu_accelerator)
    assert losses == pytest.approx(plain_losses, rel=3e-2) and losses[-1] < losses[0]
    assert engine.ledger.peak["slow"] < 0.6 * plain.ledger.peak["slow"]
