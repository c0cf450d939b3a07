"""Forms of master weights: split ones train to the bit as float32 ones, rounded ones the same wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import small_training
from gemini_jobs import Blocks, Findings, Job, inputs, loss_of, run_ranks, train, weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini import masters as masters_file
from sd_lightning.gemini.placement import Kind, Tier, plan_static
from sd_lightning.gemini.rounding import join, round_stochastically, split
from sd_lightning.planner.footprint import Weight, Workload
from sd_lightning.state.shards import SavedParameter, tensor_of
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.gemini_footprint import footprint_of
from sd_lightning.strategies.processes.group import leave_process_group

OFFLOADED: dict[str, Any] = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "slow": OFFLOADED | {"gathered_budget": 16_000},
    "half": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    "mixed": {"offload_optim_frac": 0.7, "offload_param_frac": 0.3},
    "disk": OFFLOADED | {"disk_optim_frac": 0.5},
    "auto": {"placement": "auto", "memory_cap": "120KiB"},
}
FEATURES: dict[str, dict[str, Any]] = {
    "swap": {"act": "swap"},
    "sample": {"act": "sample"},
    "accumulate": {"accumulate": 3, "clip": 0.5},
    "two_optimizers": {"two_optimizers": True},
    "frozen": {"frozen": True, "two_groups": True},
    "sgd": {"optimizer": "SGD"},
    "own_class": {"optimizer": "NAdam"},
    "8bit": {"optimizer": "AdamW8bit"},
    "early": {"config": OFFLOADED | {"step_in_backward": True, "gradient_dtype": "bfloat16"}},
}


def job(name: str, master: str, config: dict[str, Any], **fields: Any) -> Job:
    return Job(name, dtype="bfloat16", **fields, config=config | {"master": master})


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def special_values() -> Tensor:
    """Every low half with some upper halves, and random bits, so also infinities, NaN, subnormals and both zeros."""
    uppers = [0, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF]
    uppers += [upper | 0x8000 for upper in uppers]
    lows = torch.arange(2**16, dtype=torch.int64)
    whole = torch.cat([lows + (upper << 16) for upper in uppers])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**32, (2**20 + 77,), generator=generator)
    return torch.cat([whole, random]).to(torch.int32).view(torch.float32)


def test_splitting_loses_no_bit_and_rounds_as_torch_does() -> None:
    values = special_values()
    upper, lower = torch.empty_like(values, dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    ties = split(values.clone(), upper, lower)
    joined = torch.empty_like(values)
    join(upper, lower, ties, joined)
    numbers = ~values.isnan()
    assert torch.equal(bits_of(joined)[numbers], bits_of(values)[numbers])
    assert bool(joined[~numbers].isnan().all()) and bool(upper[~numbers].isnan().all())
    expected = values.to(torch.bfloat16)
    assert torch.equal(upper.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
    rounded_down = (bits_of(values) & 0xFFFF == 0x8000) & (bits_of(values) & 0x10000 == 0)
    assert ties.tolist() == rounded_down.nonzero().flatten().tolist(), "only ties to a lower even value are listed"


def test_stochastic_rounding_is_unbiased_and_a_function_of_keys_and_index() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-9, -1.0 - 2**-10, 3.14159, -2.7e-39, 1e38, 0.1, -0.1]).repeat(32)
    neighbours = (bits_of(values) >> 16 << 16).view(torch.float32)
    draws = 4096
    mean = torch.zeros_like(values, dtype=torch.float64)
    out = torch.empty_like(values, dtype=torch.bfloat16)
    for draw in range(draws):
        round_stochastically(values.clone(), (draw * 7919 + 1, 2**31 - 1 - draw), 0, out)
        mean += out.double() / draws
        distance = out.view(torch.int16) - neighbours.bfloat16().view(torch.int16)
        assert bool(((distance == 0) | (distance == 1)).all()), "not one of the two neighbours"
    above = (bits_of(neighbours) + 0x10000).view(torch.float32)
    deviation = (above - neighbours).abs().double() / (4 * draws) ** 0.5  # the largest, of a fair coin
    assert bool(((mean - values.double()).abs() <= 5 * deviation).all())
    assert torch.equal(out[::8], values[::8].bfloat16()), "a value that bfloat16 has is changed"

    keys, generator = (123, 456), torch.Generator().manual_seed(1)
    many = torch.randn(10_001, generator=generator)
    whole, parts, other = (torch.empty_like(many, dtype=torch.bfloat16) for _ in range(3))
    round_stochastically(many.clone(), keys, 0, whole)
    for begin, end in ((0, 16), (16, 4096), (4096, 10_001)):
        round_stochastically(many[begin:end].clone(), keys, begin, parts[begin:end])
    assert torch.equal(whole, parts)
    round_stochastically(many.clone(), (124, 456), 0, other)
    differing = (whole != other).float().mean()
    assert 0.3 < differing < 0.37, "another key is another draw: 2 p (1 - p), averaged over p, is 1/3"


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800000, 0x80000000, 0])
def test_stochastic_rounding_keeps_what_is_not_a_number_and_the_sign_of_zero(bits: int) -> None:
    values = torch.full((64,), bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    out = torch.empty(64, dtype=torch.bfloat16)
    round_stochastically(values.clone(), (5, 6), 0, out)
    expected = values.bfloat16()
    assert torch.equal(out.isnan(), expected.isnan())
    if not expected.isnan().any():
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@lru_cache
def found(name: str, master: str, feature: str = "") -> Findings:
    fields = {"config": CONFIGS[name]} | FEATURES.get(feature, {}) if name else FEATURES[feature]
    return train(job(name, master, fields["config"], **{k: v for k, v in fields.items() if k != "config"}))


@pytest.mark.parametrize(
    ("name", "feature"),
    [(name, "") for name in CONFIGS]
    + [("half", f) for f in FEATURES if f != "early"]
    + [("disk", "swap"), ("", "early")],
)
def test_split_weights_train_to_the_bit_as_float32_ones(name: str, feature: str) -> None:
    split_, whole = found(name, "split", feature), found(name, "float32", feature)
    assert split_.losses == whole.losses and split_.digest == whole.digest
    assert split_.norms == whole.norms
    assert split_.notes.get("swapped_loss") == whole.notes.get("swapped_loss")


@pytest.mark.parametrize("name", CONFIGS)
def test_rounded_weights_train_the_same_on_every_tier(name: str) -> None:
    one, fast = found(name, "bfloat16"), train(job("fast", "bfloat16", {}))
    assert one.losses == fast.losses and one.digest == fast.digest
    assert all(weight.dtype == torch.bfloat16 for weight in one.weights.values())
    assert one.digest != train(job("seed", "bfloat16", {"rounding_seed": 1})).digest
    whole = found("slow", "float32")
    assert fast.losses[-1] < 0.9 * fast.losses[0] or whole.losses[-1] > 0.9 * whole.losses[0]


def test_rounded_weights_follow_float32_ones_where_rounding_to_the_nearest_stands_still() -> None:
    """Steps of a twentieth of the distance between two bfloat16 values."""
    torch.manual_seed(0)
    network = nn.Linear(64, 64, bias=False)
    nn.init.ones_(network.weight)
    engine = GeminiEngine({"": network}, GeminiConfig(compute_dtype=torch.bfloat16, master="bfloat16"))
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=2**-7 / 20, weight_decay=0.0))
    for _ in range(40):
        engine.backward(network(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum() * -1)
        optimizer.step()
    weight = weights_of(engine)["weight"].float()
    assert weight.mean() == pytest.approx(1 + 40 * 2**-7 / 20, abs=2**-7 / 20)
    assert set(weight.unique().tolist()) <= {1 + i * 2**-7 for i in range(12)}


@pytest.mark.parametrize("chunk_numel", [700, 5000])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_weight_is_rounded_alike_in_every_chunk_on_every_rank(chunk_numel: int, world_size: int) -> None:
    assert all(
        torch.equal(values, weights)
        for (name, values), weights in zip(_rounded(700, 2), _rounded_by_name(chunk_numel, world_size), strict=True)
    )


def _rounded_by_name(chunk_numel: int, world_size: int) -> Iterator[Tensor]:
    yield from dict(_rounded(chunk_numel, world_size)).values()


def _rounded(chunk_numel: int, world_size: int) -> list[tuple[str, Tensor]]:
    """Whole weights after all ranks have rounded the same values in step 5."""
    whole = {name: torch.zeros(p.numel(), dtype=torch.bfloat16) for name, p in Blocks().named_parameters()}
    config = GeminiConfig(chunk_numel=chunk_numel, compute_dtype=torch.bfloat16, master="bfloat16", rounding_seed=3)
    for rank in range(world_size):
        if dist.is_initialized():  # a training in this process, by another file's test
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            torch.manual_seed(0)
            engine = GeminiEngine({"": Blocks()}, config)
            for chunk in engine.chunks:
                with chunk.master.stepping(0, chunk.bounds.numel, step=5) as values:
                    for slot in chunk.layout.slots:
                        begin, end = chunk.bounds.owned(slot)
                        chunk.bounds.view_of(slot, values).copy_(torch.linspace(1, 2, slot.numel)[begin:end])
            for owned in engine.state.parameter_shards():
                whole[owned.name][owned.begin : owned.end] = tensor_of(owned.master)
        finally:
            dist.destroy_process_group()
    return sorted(whole.items())


@pytest.mark.parametrize("master", ["split", "bfloat16"])
@pytest.mark.parametrize("swapped", [False, True])
def test_moves_between_tiers_and_forms_change_no_bit(master: Any, swapped: bool) -> None:
    torch.manual_seed(0)
    network = Blocks(2)
    config = GeminiConfig(chunk_numel=1500, compute_dtype=torch.bfloat16, master=master, **OFFLOADED)
    engine = GeminiEngine({"": network}, config)
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-2))
    for step in range(2):
        engine.backward(loss_of(network, inputs(step, Job("moves")), torch.bfloat16))
        optimizer.step()
    trained, compute = weights_of(engine), [chunk.weights.shard.clone() for chunk in engine.chunks]
    if swapped:
        ones = {(s.name, s.begin): torch.ones(s.end - s.begin) for s in engine.state.parameter_shards()}
        engine.state.swap_in(ones)
        compute = [chunk.weights.shard.clone() for chunk in engine.chunks]
    for optim, param in ((0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0.5, 0.5), (0, 0), (1, 1)):
        engine.move(plan_static(engine.layouts, GeminiConfig(offload_optim_frac=optim, offload_param_frac=param)))
        assert all(torch.equal(weights_of(engine)[name], trained[name]) for name in trained)
        assert all(torch.equal(c.weights.shard, values) for c, values in zip(engine.chunks, compute, strict=True))
    if swapped:
        engine.state.swap_out()
        assert all(torch.equal(weights_of(engine)[name], trained[name]) for name in trained)
        rounded = [chunk.master.read().bfloat16() for chunk in engine.chunks]
        assert all(torch.equal(c.weights.shard, values) for c, values in zip(engine.chunks, rounded, strict=True))
    engine.close()
    assert not any(engine.ledger.current.values())


def _saved(engine: GeminiEngine) -> tuple[dict[str, SavedParameter], Any, dict[tuple[str, str], Tensor]]:
    shards = engine.state.parameter_shards()
    tensors = {
        (kind, shard.name): tensor_of(values).clone()
        for shard in shards
        for kind, values in {"master": shard.master, **shard.states}.items()
    }
    return {shard.name: shard.saved() for shard in shards}, engine.state.optimizer_groups(), tensors


@pytest.mark.parametrize(
    ("before", "after"),
    [("split", "split"), ("split", "float32"), ("float32", "split"), ("bfloat16", "bfloat16")],
)
def test_a_run_resumes_to_the_bit_under_another_form_and_placement(before: str, after: str) -> None:
    def training(master: str, config: dict[str, Any], saved: Any = None, steps: range = range(6)) -> Any:
        torch.manual_seed(0)
        network = Blocks(2)
        made = GeminiConfig(chunk_numel=1500, compute_dtype=torch.bfloat16, master=master, **config)  # type: ignore[arg-type]
        engine = GeminiEngine({"": network}, made)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-2))
        if saved is not None:
            parameters, groups, tensors = saved

            def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
                out.copy_(tensors[kind, name].reshape(-1)[begin:end])

            engine.state.load(parameters, groups, read)
        for step in steps:
            engine.backward(loss_of(network, inputs(step, Job("resume")), torch.bfloat16))
            optimizer.step()
        return _saved(engine)

    whole = training(before, OFFLOADED)[2]
    other = {} if after in ("float32", "bfloat16") else {"offload_optim_frac": 0.5, "offload_param_frac": 0.6}
    resumed = training(after, other, training(before, OFFLOADED, steps=range(3)), range(3, 6))[2]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_hooks_write_split_weights_as_float32_ones() -> None:
    def written(master: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network = Blocks(2)
        config = GeminiConfig(chunk_numel=1500, compute_dtype=torch.bfloat16, master=master, **OFFLOADED)
        engine = GeminiEngine({"": network}, config)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-2))
        for step in range(3):
            engine.backward(loss_of(network, inputs(step, Job("hooks")), torch.bfloat16))
            optimizer.step()
            with torch.no_grad():
                network.blocks[0].up.weight.mul_(1.01)
                network.gain.data.clamp_(max=1.001)
        return weights_of(engine)

    whole, split_ = written("float32"), written("split")
    assert all(torch.equal(whole[name], split_[name]) for name in whole)
    assert not torch.equal(whole["blocks.0.up.weight"], whole["blocks.0.up.weight"].bfloat16().float())


PER_WEIGHT = {"float32": 14, "split": 12, "bfloat16": 10}
"""Bytes at rest: compute weights 2, master weights 4, 2 or 0 beside them, and AdamW's moments 8."""


@pytest.mark.parametrize("master", PER_WEIGHT)
def test_bytes_at_rest_and_in_a_step_equal_the_closed_form(master: Any) -> None:
    torch.manual_seed(0)
    network = Blocks()
    config = GeminiConfig(chunk_numel=1500, compute_dtype=torch.bfloat16, master=master, **OFFLOADED)
    engine = GeminiEngine({"": network}, config)
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-2))
    numel = sum(layout.numel for layout in engine.layouts)
    largest, ties = max(layout.numel for layout in engine.layouts), 0
    for step in range(3):
        engine.backward(loss_of(network, inputs(step, Job("bytes")), torch.bfloat16))
        assert engine.ledger.current[Tier.SLOW] == (PER_WEIGHT[master] + 4) * numel + ties
        optimizer.step()
        ties = sum(ties.nbytes for chunk in engine.chunks for ties in chunk.master._ties.values())
        assert engine.ledger.current[Tier.SLOW] == PER_WEIGHT[master] * numel + ties
    scratch = 4 * largest * (master != "float32")
    assert engine.ledger.kind_peak[Tier.SLOW, Kind.SCRATCH] == scratch
    assert 0 <= engine.ledger.peak[Tier.SLOW] - (PER_WEIGHT[master] + 4) * numel - scratch <= 4 * 10, "a few ties"


def test_ties_are_counted_and_stepped_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as of a float16 file: one in sixteen lies in the middle between two bfloat16 values, and rounds down."""
    monkeypatch.setattr(masters_file, "_PIECE", 256)

    def trained(master: Any) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half().float()
        config = GeminiConfig(chunk_numel=5000, compute_dtype=torch.bfloat16, master=master, **OFFLOADED)
        engine = GeminiEngine({"": network}, config)
        extra = engine.ledger.current[Tier.SLOW] - (4 if master == "split" else 6) * sum(
            a.numel for a in engine.layouts
        )
        before = weights_of(engine)
        assert all(torch.equal(before[name], p.float()) for name, p in _half_network().named_parameters())
        optimizer = engine.optimizer(torch.optim.AdamW(list(network.parameters())[:3], lr=1e-2))
        for _ in range(2):
            engine.backward(network(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum())
            optimizer.step()
        return weights_of(engine), extra

    (split_, ties), (whole, none) = trained("split"), trained("float32")
    assert all(torch.equal(whole[name], split_[name]) for name in whole)
    count = sum(p.numel() for p in _half_network().parameters())
    assert none == 0 and ties % 4 == 0 and 0.03 < ties / 4 / count < 0.1


def _half_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"master": "bf16"}, "expected one of float32, split, bfloat16"),
        ({"master": "split"}, "expected both above 0"),
        ({"master": "split", "offload_optim_frac": 1.0}, "expected both above 0"),
        ({"rounding_seed": 1}, "only master=bfloat16 rounds stochastically"),
        ({"master": "bfloat16", "rounding_seed": -1}, "expected 0 <= seed"),
    ],
)
def test_settings_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GeminiConfig(**fields)


@pytest.mark.parametrize("master", ["split", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_another_compute_type_is_refused_with_the_remedy(master: Any, dtype: torch.dtype | None) -> None:
    config = GeminiConfig(master=master, compute_dtype=dtype, **OFFLOADED)
    given = "float16" if dtype == torch.float16 else "float32"
    with pytest.raises(UsageError, match=f"computed with in {given}; expected bfloat16.*precision=bf16-mixed"):
        GeminiEngine({"": Blocks(1)}, config)


def test_an_optimizer_that_saves_no_number_of_steps_is_refused_for_rounded_weights() -> None:
    network = Blocks(1)
    engine = GeminiEngine({"": network}, GeminiConfig(compute_dtype=torch.bfloat16, master="bfloat16"))
    with pytest.raises(UsageError, match="SGD, which keeps no number of steps.*master=split"):
        engine.optimizer(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Findings]]:
    configs: dict[str, dict[str, Any]] = {
        "slow": OFFLOADED | {"gathered_budget": 16_000},
        "half": {"offload_optim_frac": 0.6, "offload_param_frac": 0.4},
    }
    jobs = [
        job(f"{name}/{master}", master, config, act="swap", unused="one_rank", steps=8)
        for name, config in configs.items()
        for master in PER_WEIGHT
    ]
    jobs.append(job("whole/bfloat16", "bfloat16", {"shard_param_frac": 0.0}, act="swap", unused="one_rank", steps=8))
    return run_ranks(2, jobs, tmp_path_factory.mktemp("masters"))


def test_two_ranks_train_split_weights_as_float32_ones(two_ranks: list[dict[str, Findings]]) -> None:
    for rank in two_ranks:
        digests = {rank[f"{name}/{master}"].digest for name in ("slow", "half") for master in ("float32", "split")}
        assert len(digests) == 1
        assert rank["slow/split"].losses == rank["slow/float32"].losses
        notes = rank["slow/split"].notes
        ties, rest = divmod(notes["at_rest"]["slow"] - 12 * notes["numel"] // 2, 4)
        assert 0 <= ties < 10 and not rest and len(notes["at_rest"]) == 1


def test_two_ranks_round_alike_on_every_tier(two_ranks: list[dict[str, Findings]]) -> None:
    digests = {rank[f"{name}/bfloat16"].digest for rank in two_ranks for name in ("slow", "half", "whole")}
    assert len(digests) == 1
    assert two_ranks[0]["slow/bfloat16"].notes["at_rest"] == {
        "slow": 10 * two_ranks[0]["slow/bfloat16"].notes["numel"] // 2
    }


@pytest.mark.parametrize(
    ("master", "tiers"),
    [
        (master, tiers)
        for master in PER_WEIGHT
        for tiers in [(1.0, 1.0), (1.0, 0.5), (0.5, 0.25), (0.0, 0.0)]
        if master != "split" or min(tiers)  # refused: nothing would be split
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_the_planner_counts_what_the_engine_takes(master: Any, tiers: tuple[float, float], early: bool) -> None:
    size, count = 64, 4
    optim, param = tiers
    narrow = torch.bfloat16 if optim else torch.float32
    config = GeminiConfig(
        chunk_numel=size * size,
        compute_dtype=torch.bfloat16,
        master=master,
        offload_optim_frac=optim,
        offload_param_frac=param,
        gradient_dtype=narrow,
        step_in_backward=early,
    )
    network = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))
    engine = GeminiEngine({"net": network}, config)
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))
    for _ in range(2):
        engine.backward(network(torch.ones(2, size, dtype=torch.bfloat16)).float().square().mean())
        optimizer.step()
    workload = Workload(
        [Weight(f"net.{i}.weight", (size, size), True, f"net.{i}") for i in range(count)],
        "bf16-mixed",
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    found = footprint_of(config, workload, lambda name: (int(name.split(".")[1]),))
    assert found is not None and found.master_dtype == (torch.bfloat16 if master == "bfloat16" else torch.float32)
    ties = sum(ties.nbytes for chunk in engine.chunks for ties in chunk.master._ties.values())
    for tier, holdings in ((Tier.FAST, found.device), (Tier.SLOW, found.host)):
        counted = {each.kind: each.nbytes for each in holdings}
        kinds = engine.ledger.by_kind
        owned = counted.get("master weights", 0) + counted.get("optimizer states", 0)
        assert owned == kinds[tier, Kind.OPTIMIZER] - ties * (tier is Tier.SLOW)
        assert counted.get("weights", 0) == kinds[tier, Kind.WEIGHTS]
        assert counted.get("scratch of the step", 0) == engine.ledger.kind_peak[tier, Kind.SCRATCH]
        if tier is Tier.SLOW:
            shards = engine.state.parameter_shards()
            engine.state.swap_in({shard.key: torch.zeros(shard.end - shard.begin) for shard in shards})
            assert counted.get("swapped weights", 0) == kinds[tier, Kind.SWAPPED]


def test_average_and_checkpoints_of_split_weights_are_those_of_float32_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under Lightning, and a run of each form goes on with the other; rounded weights resume to the bit, too.

    With another seed, or another form, they go on as well, and that is told.
    """

    def run(name: str, master: Any, steps: int, resume: Path | None = None, **settings: Any) -> Path:
        strategy = GeminiStrategy(master=master, **OFFLOADED, **settings)
        options = {"strategy": strategy, "precision": "bf16-mixed", "resume": resume, "train_text_encoder": False}
        try:
            return small_training.train(tmp_path / name, steps, save=(2,), **options)
        finally:
            leave_process_group()

    whole, split_ = run("whole", "float32", 4), run("split", "split", 4)
    small_training.assert_bitwise_equal(whole, split_)
    half = next(split_.parent.glob("*2"))
    small_training.assert_bitwise_equal(whole, run("resumed", "float32", 4, resume=half))
    rounded = run("rounded", "bfloat16", 4)
    masters = {k: t for k, t in small_training.stored(rounded).items() if k.startswith("master/")}
    assert masters and all(tensor.dtype == torch.bfloat16 for tensor in masters.values())
    half = next(rounded.parent.glob("*2"))
    small_training.assert_bitwise_equal(rounded, run("resumed_rounded", "bfloat16", 4, resume=half))
    assert "not the same bits" not in caplog.text
    reseeded = run("reseeded", "bfloat16", 3, resume=half, rounding_seed=7)
    assert "bfloat16 rounding_seed=0, and this run has master=bfloat16 rounding_seed=7: not the same" in caplog.text
    again = run("again", "bfloat16", 3, resume=half)
    before, after = small_training.stored(again), small_training.stored(reseeded)
    assert any(not torch.equal(before[key], after[key]) for key in masters)
    run("widened", "float32", 3, resume=half)
    assert "rounding_seed=0, and this run has no rounded weights: not the same bits" in caplog.text
    run("narrowed", "bfloat16", 3, resume=next(split_.parent.glob("*2")))
    assert "trained with no rounded weights, and this run has master=bfloat16 rounding_seed=0" in caplog.text
