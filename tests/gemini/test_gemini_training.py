"""The Gemini engine trains as plain torch does, wherever its chunks live."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_jobs import (
    BUDGETED,
    OPTIMIZERS,
    PLACEMENTS,
    STEPS,
    Findings,
    Job,
    build,
    distance,
    inputs,
    loss_of,
    run_ranks,
    train,
)
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.layout import align

slow = pytest.mark.slow

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "accumulate": {"accumulate": 3, "clip": 0.05},
    "sgd": {"optimizer": "SGD"},
    "adam": {"optimizer": "Adam"},
    "frozen": {"frozen": True},
    "unused_everywhere": {"unused": "everywhere"},
    "two_groups": {"two_groups": True},
    "two_optimizers": {"two_optimizers": True, "clip": 0.05},
    "two_networks": {"network": "pair"},
    "low_rank": {"network": "lora", "optimizer": "SGD", "steps": 20},
    "longer_inputs": {"act": "longer"},
    "outputs_of_others": {"network": "direct"},
}
AUTO = PLACEMENTS["auto_some"]
ROOM = {"placement": "auto", "memory_cap": "1MiB", "reduce_once": "auto"}
TWINS = {"chunk_numel": 64, "prefetch": 0}
"""One layer in each chunk, gathered when it is called."""
SKIPS = ["branch", "no_grad", "detached", "held", "dropped"]
ON_TWO_RANKS = ("RMSprop", "NAdam", "Adagrad", "ASGD")
SKIPPED_IN: dict[str, dict[str, Any]] = {
    "sharded": {},
    "budgeted": BUDGETED,
    "kept_gathered": {"shard_param_frac": 0.0},
}


def jobs_of_ranks() -> list[Job]:
    """Everything that two ranks train."""
    jobs = [Job(f"place/{name}", config=config) for name, config in PLACEMENTS.items()]
    jobs += [Job(f"feature/{name}", config=BUDGETED, **fields) for name, fields in FEATURES.items()]
    jobs += [
        Job("ddp", engine="ddp"),
        Job("ddp/unused_one_rank", engine="ddp", unused="one_rank"),
        Job("feature/unused_one_rank", config=BUDGETED, unused="one_rank"),
        Job("unused_one_rank/kept_gathered", config={"shard_param_frac": 0.0}, unused="one_rank"),
        *(Job(f"ddp/{how}", engine="ddp", skips=how) for how in SKIPS),
        *(Job(f"{how}/{place}", config=config, skips=how) for how in SKIPS for place, config in SKIPPED_IN.items()),
        Job("act/drop", config=BUDGETED, unused="one_rank", act="drop"),
        Job("penalised", config={"shard_param_frac": 0.0}, penalised=True),
        Job("outputs_of_others/one_layer_each", network="direct", config={"chunk_numel": 64}),
        Job("feature/checkpointed", config=BUDGETED, checkpointed=True),
        Job("checkpointed/all_offloaded", config=PLACEMENTS["all_offloaded"], checkpointed=True),
        Job("feature/compiled", config=BUDGETED, compiled="block"),
        Job("feature/reduce_once", config={"reduce_once": True}, accumulate=3, clip=0.05),
        Job(
            "reduce_once/kept_gathered", config={"reduce_once": True, "shard_param_frac": 0.0}, accumulate=3, clip=0.05
        ),
        Job(
            "reduce_once/all_offloaded",
            config=PLACEMENTS["all_offloaded"] | {"reduce_once": True},
            accumulate=3,
            clip=0.05,
        ),
        Job("chunks/one", config={"chunk_numel": 100_000}),
        Job("chunks/searched", config={"chunk_numel": None} | BUDGETED),
        Job("chunks/tiny", config={"chunk_numel": 256} | BUDGETED),
        Job("act/sample", config=BUDGETED, act="sample"),
        Job("act/sample_kept_gathered", config={"shard_param_frac": 0.0}, act="sample"),
        Job("act/swap", config=BUDGETED, act="swap"),
        Job("act/swap_kept_gathered", config={"shard_param_frac": 0.0}, act="swap"),
        Job("act/raise", config=BUDGETED, act="raise"),
        Job("act/raise_kept_gathered", config={"shard_param_frac": 0.0}, act="accumulate_then_raise"),
        Job("act/refit", config=BUDGETED, act="refit"),
        Job("act/refit_kept_gathered", config={"shard_param_frac": 0.0}, act="refit"),
        Job("act/reorder", network="twins", config=TWINS, act="reorder", steps=6),
        Job("twins", network="twins", config=TWINS, steps=6),
        Job("meta", config=BUDGETED, meta=True),
        Job("auto/sample", config=AUTO, act="sample"),
        Job("auto/swap", config=AUTO, act="swap"),
        Job("auto/raise", config=AUTO, act="accumulate_then_raise"),
        Job("auto/refit", config=AUTO, act="refit"),
        Job("auto/longer_inputs", config=AUTO | {"memory_cap": "290KiB"}, act="longer"),
        Job("auto/checkpointed", config=AUTO, checkpointed=True),
        Job("auto/two_networks", config=AUTO, network="pair"),
        Job("auto/accumulate", config=AUTO, accumulate=3, clip=0.05),
        Job("auto/reduce_once", config=AUTO | {"reduce_once": True}, accumulate=3, clip=0.05),
        Job("auto/reduce_if_no_room", config=AUTO | {"reduce_once": "auto"}, accumulate=3, clip=0.05),
        Job("auto/reduce_if_room", config=ROOM, accumulate=3, clip=0.05),
        Job("auto/reduce_until_longer", config=ROOM, accumulate=5, act="longer"),
        Job("reduce_once/measured", config={"reduce_once": "auto"}, accumulate=3, clip=0.05),
        Job("auto/two_optimizers", config=AUTO, two_optimizers=True, clip=0.05),
        Job("auto/bf16", config=AUTO, dtype="bfloat16"),
        Job("auto/meta", config=AUTO, meta=True),
        Job("8bit/fast", optimizer="AdamW8bit"),
        Job("8bit/offloaded", optimizer="AdamW8bit", config=PLACEMENTS["all_offloaded"]),
        Job("8bit/disk", optimizer="AdamW8bit", config=PLACEMENTS["disk"]),
        Job("8bit/auto", optimizer="AdamW8bit", config=AUTO | {"memory_cap": "130KiB"}),
        *(Job(f"own/{name}", config=BUDGETED, optimizer=name, settings=OPTIMIZERS[name]) for name in ON_TWO_RANKS),
        Job("float64", config=BUDGETED, dtype="float64", clip=0.05),
        Job("float64/own", config=BUDGETED, dtype="float64", clip=0.05, optimizer="RMSprop"),
        Job("native/plain", config=BUDGETED, native=True),
        Job("native/reduce_once", config={"reduce_once": True}, native=True, accumulate=3, clip=0.05),
        Job("auto/native", config=AUTO, native=True, dtype="bfloat16"),
        Job("native/bf16", config=PLACEMENTS["all_offloaded"], native=True, dtype="bfloat16"),
        Job("native/bf16_whole", config={"shard_param_frac": 0.0}, native=True, dtype="bfloat16"),
        Job("native/bf16_narrow", config={"reduce_dtype": "bfloat16"}, native=True, dtype="bfloat16"),
        Job("bf16/narrow", config={"reduce_dtype": "bfloat16"}, dtype="bfloat16"),
        Job("bf16/fast", dtype="bfloat16"),
        Job("bf16/slow", dtype="bfloat16", config=PLACEMENTS["all_offloaded"]),
        Job("bf16/slow_clip", dtype="bfloat16", config=PLACEMENTS["all_offloaded"], clip=1e-3, optimizer="SGD"),
        Job("bf16/slow_sgd", dtype="bfloat16", config=PLACEMENTS["all_offloaded"], optimizer="SGD"),
        Job("bf16/swap", dtype="bfloat16", config=BUDGETED, act="swap"),
        Job("fp16/overflow", dtype="float16", config=BUDGETED, loss_factor=64.0, steps=20),
        Job("fp16/overflow_on_one", dtype="float16", config=BUDGETED, loss_factor=64.0, factor_rank=0, steps=20),
    ]
    return jobs


JOBS = {job.name: job for job in jobs_of_ranks()}
QUICK = (
    "place/sharded",
    "place/all_offloaded",
    "place/auto_some",
    "place/disk",
    "ddp",
    "feature/plain",
    "feature/clip",
)
"""What two ranks train in the default suite."""


def quickly(group: str, names: Iterable[str]) -> list[Any]:
    """Return names as parameters; those whose job is not quick are slow."""
    return [pytest.param(n, marks=() if f"{group}/{n}".lstrip("/") in QUICK else slow) for n in names]


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Findings]]:
    """What both ranks found, by job; of the quick jobs alone where no slow test of this file is chosen."""
    here = [item for item in request.session.items if item.path == request.path]
    jobs = [job for job in JOBS.values() if job.name in QUICK or any(item.get_closest_marker("slow") for item in here)]
    return run_ranks(2, jobs, tmp_path_factory.mktemp("gemini"))


@lru_cache
def reference(split: int, frozen_fields: tuple[tuple[str, Any], ...]) -> Findings:
    """One process with the whole batch, in so many passes."""
    return train(Job("reference", engine="torch", split=split, **dict(frozen_fields)))


def assert_as_plain_torch(found: Findings, fields: dict[str, Any], *, against: Findings | None = None) -> None:
    """Within three times of what another order of summation does to plain torch; one pair of runs says little of it."""
    settings = tuple(sorted(fields.items()))
    whole, halves = reference(1, settings), reference(2, settings)
    floor_loss, floor_rms = distance(whole, halves)
    loss, rms = distance(found, whole if against is None else against)
    size = max(1.0, *whole.losses)  # of this network about 10, where float32 has steps of 1e-6
    assert loss <= 1e-6 * size, (loss, floor_loss, size)
    assert rms <= max(3 * floor_rms, 5e-7), (rms, floor_rms)
    assert found.losses[-1] < 0.98 * found.losses[0]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_one_rank_trains_as_plain_torch_and_placement_changes_no_bit(name: str) -> None:
    found = train(Job(name, config=PLACEMENTS[name]))
    assert found.digest == alone().digest
    assert_as_plain_torch(found, {})


@lru_cache
def alone() -> Findings:
    """One rank, everything on the fast tier."""
    return train(Job("alone"))


@pytest.mark.parametrize("name", FEATURES)
def test_one_rank_trains_as_plain_torch_with_every_feature(name: str) -> None:
    found = train(Job(name, config=BUDGETED, **FEATURES[name]))
    assert_as_plain_torch(found, FEATURES[name])
    expected = reference(1, tuple(sorted(FEATURES[name].items())))
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert not expected.norms or min(expected.norms) > 0.05, "nothing is clipped"


def test_one_rank_on_the_fast_tier_copies_nothing() -> None:
    found = train(Job("alias", steps=3, config={"shard_param_frac": 1.0}))
    statistics = found.notes["statistics"]
    assert statistics["misses"] == 0 and statistics["gathered_bytes"] == 0
    assert not [key for key in statistics if key.startswith("moved_bytes")]
    assert found.notes["kinds"] == {
        "fast/weights": 4 * found.notes["numel"],
        "fast/optimizer": 8 * found.notes["numel"],
    }


@pytest.mark.parametrize(
    "config", [{}, BUDGETED, {"placement": "auto", "memory_cap": "200KiB"}], ids=["fast", "budgeted", "auto"]
)
def test_one_rank_with_8_bit_states_is_closer_to_exact_states_than_bitsandbytes(config: dict[str, Any]) -> None:
    found, expected = train(Job("8bit", optimizer="AdamW8bit", config=config)), quantised()
    assert found.digest == train(Job("8bit", optimizer="AdamW8bit", config={"shard_param_frac": 0.0})).digest
    exact = reference(1, ())
    (losses, rms), (_, other_rms) = distance(found, exact), distance(expected, exact)
    assert losses <= 1e-3 * max(expected.losses) and 0 < rms <= other_rms, (losses, rms, other_rms)
    numels = [weight.numel() for weight in expected.weights.values()]
    # Codes and a float32 scale per 256 of them, or float32 moments of the smallest; parts end at multiples of 16 bytes.
    parts = [align(n) + align(4 * math.ceil(n / 256)) if n >= 30 else align(4 * n) for n in numels]
    kinds, numel = found.notes["kinds"], found.notes["numel"]
    states = sum(n for kind, n in kinds.items() if kind.endswith("optimizer"))
    assert states == 2 * sum(parts) or config, "weights and optimizer together: no master weights of its own"
    assert 2 * sum(parts) <= states <= 2 * sum(parts) + 4 * numel


@lru_cache
def quantised() -> Findings:
    return train(Job("8bit", engine="torch", optimizer="AdamW8bit"))


@pytest.mark.parametrize("name", quickly("place", PLACEMENTS))
def test_placement_budget_and_prefetch_change_no_bit(two_ranks: list[dict[str, Findings]], name: str) -> None:
    found, plain = two_ranks[0][f"place/{name}"], two_ranks[0]["place/sharded"]
    assert found.losses == plain.losses
    assert found.digest == plain.digest


@pytest.mark.parametrize("name", quickly("", ["ddp", "chunks/one", "chunks/searched", "chunks/tiny", "meta"]))
def test_chunk_plans_and_ddp_equal_one_process(two_ranks: list[dict[str, Findings]], name: str) -> None:
    assert_as_plain_torch(two_ranks[0][name], {})


@pytest.mark.parametrize("name", quickly("feature", FEATURES))
def test_features_equal_one_process(two_ranks: list[dict[str, Findings]], name: str) -> None:
    assert_as_plain_torch(two_ranks[0][f"feature/{name}"], FEATURES[name])


def test_gradient_norms_equal_those_of_one_process(two_ranks: list[dict[str, Findings]]) -> None:
    expected = reference(1, tuple(sorted(FEATURES["clip"].items())))
    assert two_ranks[0]["feature/clip"].norms == pytest.approx(expected.norms, rel=1e-5)


@slow
@pytest.mark.parametrize("name", ["feature/unused_one_rank", "unused_one_rank/kept_gathered"])
def test_a_parameter_used_on_one_rank_only_trains_as_under_ddp(two_ranks: list[dict[str, Findings]], name: str) -> None:
    found, expected = two_ranks[0][name], two_ranks[0]["ddp/unused_one_rank"]
    loss, rms = distance(found, expected)
    assert loss <= 1e-6 and rms <= 1e-6
    moved = distance(found, two_ranks[0]["place/sharded"])[1]
    assert moved > 1e-3, "the branch makes no difference"


@slow
@pytest.mark.parametrize("how", SKIPS)
def test_blocks_that_go_backward_on_some_ranks_only_train_as_under_ddp(
    two_ranks: list[dict[str, Findings]], how: str
) -> None:
    expected = two_ranks[0][f"ddp/{how}"]
    for place in SKIPPED_IN:
        found = two_ranks[0][f"{how}/{place}"]
        loss, rms = distance(found, expected)
        assert loss <= 1e-6 * max(1.0, *expected.losses) and rms <= 1e-6, place
        assert found.digest == two_ranks[1][f"{how}/{place}"].digest
        assert found.notes["statistics"]["schedules"] == STEPS / 2, "two steps of four differ between ranks"


@slow
def test_gradients_that_are_dropped_leave_nothing_behind_on_any_rank(two_ranks: list[dict[str, Findings]]) -> None:
    """Before some steps a micro-batch is dropped, in which only one rank used some parameters."""
    found, expected = two_ranks[0]["act/drop"], two_ranks[0]["feature/unused_one_rank"]
    assert found.losses == expected.losses and found.digest == expected.digest


@slow
def test_a_term_outside_of_forward_that_one_rank_has_counts(two_ranks: list[dict[str, Findings]]) -> None:
    assert_as_plain_torch(two_ranks[0]["penalised"], {"penalised": True})
    assert distance(two_ranks[0]["penalised"], two_ranks[0]["place/sharded"])[1] > 1e-4, "it makes no difference"


@slow
def test_a_unit_that_returns_what_another_returned_is_not_done_before_it(two_ranks: list[dict[str, Findings]]) -> None:
    assert_as_plain_torch(two_ranks[0]["outputs_of_others/one_layer_each"], {"network": "direct"})


@slow
def test_an_unused_parameter_is_left_alone(two_ranks: list[dict[str, Findings]]) -> None:
    initial = train(Job("initial", engine="torch", steps=0)).weights
    found = two_ranks[0]["feature/unused_everywhere"].weights
    unused = [name for name in initial if ".extra." in name]
    assert unused and all(torch.equal(found[name], initial[name]) for name in unused)
    assert not torch.equal(found["gain"], initial["gain"])


@slow
@pytest.mark.parametrize("name", ["feature/checkpointed", "checkpointed/all_offloaded", "feature/compiled"])
def test_recomputed_and_compiled_blocks_train_the_same(two_ranks: list[dict[str, Findings]], name: str) -> None:
    assert_as_plain_torch(two_ranks[0][name], {})


@slow
@pytest.mark.parametrize("name", ["feature/reduce_once", "reduce_once/kept_gathered", "reduce_once/all_offloaded"])
def test_gradients_kept_whole_are_reduced_once(two_ranks: list[dict[str, Findings]], name: str) -> None:
    assert_as_plain_torch(two_ranks[0][name], FEATURES["accumulate"])
    once = two_ranks[0][name].notes["statistics"]["reductions"]
    thrice = two_ranks[0]["feature/accumulate"].notes["statistics"]["reductions"]
    assert once * 3 == thrice
    assert two_ranks[0][name].digest == two_ranks[0]["feature/reduce_once"].digest


@slow
@pytest.mark.parametrize("name", ["auto/reduce_if_room", "reduce_once/measured"])
def test_gradients_are_reduced_once_from_the_step_on_that_knows_they_fit(
    two_ranks: list[dict[str, Findings]], name: str
) -> None:
    assert_as_plain_torch(two_ranks[0][name], FEATURES["accumulate"])
    assert two_ranks[0][name].digest == two_ranks[0]["auto/reduce_if_room"].digest
    once = two_ranks[0]["feature/reduce_once"].notes["statistics"]["reductions"]
    # The first step reduces three micro-batches.
    assert two_ranks[0][name].notes["statistics"]["reductions"] * STEPS == once * (3 + STEPS - 1)
    assert two_ranks[0][name].digest != two_ranks[0]["feature/accumulate"].digest, (
        "both orders of summation give the same: reduce_once=auto can be the default"
    )


@slow
def test_a_larger_call_reduces_at_once_what_was_kept(two_ranks: list[dict[str, Findings]]) -> None:
    found = two_ranks[0]["auto/reduce_until_longer"]
    assert_as_plain_torch(found, {"accumulate": 5, "act": "longer"})
    once = two_ranks[0]["feature/reduce_once"].notes["statistics"]["reductions"]
    # In the second step, the fourth of five is longer: three are reduced together, and the others by themselves, also
    # the fifth, before which the plan for longer inputs has room again.
    assert found.notes["statistics"]["reductions"] * STEPS == once * (5 + 3 + STEPS - 2)


@slow
@pytest.mark.parametrize("name", ["sample", "sample_kept_gathered", "swap", "swap_kept_gathered"])
def test_sampling_and_other_weights_between_steps_change_no_bit(
    two_ranks: list[dict[str, Findings]], name: str
) -> None:
    found, plain = two_ranks[0][f"act/{name}"], two_ranks[0]["place/sharded"]
    assert found.losses == plain.losses
    assert found.digest == plain.digest


@slow
@pytest.mark.parametrize("name", ["swap", "swap_kept_gathered"])
def test_swapped_weights_are_the_ones_computed_with(two_ranks: list[dict[str, Findings]], name: str) -> None:
    constant = build(Job("constant"))
    with torch.no_grad():
        for parameter in constant.parameters():
            parameter.fill_(0.01)
        expected = loss_of(constant, inputs(7, Job("constant")), torch.float32)
    assert two_ranks[0][f"act/{name}"].notes["swapped_loss"] == pytest.approx(float(expected), abs=1e-6)


@slow
@pytest.mark.parametrize("name", ["act/raise", "act/raise_kept_gathered"])
def test_an_exception_in_backward_leaves_no_trace(two_ranks: list[dict[str, Findings]], name: str) -> None:
    found, plain = two_ranks[0][name], two_ranks[0]["place/sharded"]
    assert found.notes["failed"] == STEPS // 4
    assert found.losses == plain.losses
    assert found.digest == plain.digest


@slow
@pytest.mark.parametrize("name", ["act/refit", "act/refit_kept_gathered", "auto/refit"])
def test_a_fit_after_an_exception_begins_with_new_optimizers(two_ranks: list[dict[str, Findings]], name: str) -> None:
    assert two_ranks[0][name].notes["failed"] == STEPS // 4
    assert_as_plain_torch(two_ranks[0][name], {"act": "refit"})
    assert two_ranks[0][name].digest == two_ranks[0]["act/refit"].digest != two_ranks[0]["place/sharded"].digest


@slow
def test_ranks_that_call_blocks_in_different_orders_step_nothing(two_ranks: list[dict[str, Findings]]) -> None:
    for rank in two_ranks:
        assert "the ranks called the blocks of a network in different orders" in rank["act/reorder"].notes["refused"]
        assert rank["act/reorder"].losses == rank["twins"].losses
        assert rank["act/reorder"].digest == rank["twins"].digest


@slow
@pytest.mark.parametrize(
    ("name", "static"),
    [
        ("sample", "place/sharded"),
        ("swap", "place/sharded"),
        ("raise", "place/sharded"),
        ("meta", "place/sharded"),
        ("checkpointed", "feature/checkpointed"),
        ("longer_inputs", "feature/longer_inputs"),
        ("two_networks", "feature/two_networks"),
        ("accumulate", "feature/accumulate"),
        ("reduce_once", "feature/reduce_once"),
        ("reduce_if_no_room", "feature/accumulate"),
        ("two_optimizers", "feature/two_optimizers"),
        ("bf16", "bf16/fast"),
    ],
)
def test_an_automatic_placement_changes_no_bit(two_ranks: list[dict[str, Findings]], name: str, static: str) -> None:
    found, expected = two_ranks[0][f"auto/{name}"], two_ranks[0][static]
    assert found.losses == expected.losses
    assert found.digest == expected.digest


@slow
def test_an_automatic_placement_stays_under_its_cap_and_is_agreed(two_ranks: list[dict[str, Findings]]) -> None:
    names = [name for name in two_ranks[0] if name.startswith(("auto/", "place/auto"))]
    for name in names:
        plans = [rank[name].notes["plan"] for rank in two_ranks]
        assert plans[0]["peak"] + plans[0]["non_model"] <= plans[0]["cap"], name
        for key in ("cap", "non_model", "budget", "slow_optimizers", "slow_weights", "moves"):
            assert plans[0][key] == plans[1][key], (name, key)
    assert len(names) > 12


@slow
def test_more_memory_keeps_more_on_the_fast_tier(two_ranks: list[dict[str, Findings]]) -> None:
    every, some, least = (two_ranks[0][f"place/auto_{name}"].notes["plan"] for name in ("all", "some", "least"))
    assert every["slow_optimizers"] == 0 < some["slow_optimizers"] < least["slow_optimizers"]
    assert every["moves"] == some["moves"] == least["moves"] == 1, "moved again though nothing changed"


@slow
def test_larger_inputs_and_sampling_are_measured_and_planned_for(two_ranks: list[dict[str, Findings]]) -> None:
    plan = two_ranks[0]["auto/longer_inputs"].notes["plan"]
    # 9 instead of 5 tokens: to the slow tier for the measurement, and back.
    assert plan["moves"] == 3
    assert plan["non_model"] == pytest.approx(
        two_ranks[0]["place/auto_some"].notes["plan"]["non_model"] * 9 / 5, rel=0.1
    )
    assert two_ranks[0]["auto/sample"].notes["plan"]["moves"] == 3


@slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_the_users_own_class_steps_ranges_as_it_steps_parameters(
    two_ranks: list[dict[str, Findings]], name: str
) -> None:
    assert_as_plain_torch(two_ranks[0][f"own/{name}"], {"optimizer": name, "settings": OPTIMIZERS[name]})


@slow
@pytest.mark.parametrize(("name", "optimizer"), [("float64", "AdamW"), ("float64/own", "RMSprop")])
def test_float64_is_reduced_clipped_and_stepped_in_float64(
    two_ranks: list[dict[str, Findings]], name: str, optimizer: str
) -> None:
    fields = {"dtype": "float64", "clip": 0.05, "optimizer": optimizer}
    expected = reference(1, tuple(sorted(fields.items())))
    assert distance(expected, reference(1, (("clip", 0.05), ("optimizer", optimizer))))[1] > 1e-9
    assert distance(two_ranks[0][name], expected)[1] < 1e-14
    assert two_ranks[0][name].norms == pytest.approx(expected.norms, rel=1e-13)


@slow
@pytest.mark.parametrize(
    ("name", "exchanged"),
    [
        ("native/plain", "place/sharded"),
        ("native/reduce_once", "feature/reduce_once"),
        ("native/bf16", "bf16/fast"),
        ("native/bf16_whole", "bf16/fast"),
        ("auto/native", "bf16/fast"),
    ],
)
def test_collectives_of_the_backend_give_the_same_bits(
    two_ranks: list[dict[str, Findings]], name: str, exchanged: str
) -> None:
    found, expected = two_ranks[0][name], two_ranks[0][exchanged]
    assert found.losses == expected.losses and found.digest == expected.digest


@slow
def test_half_precision_gradients_are_summed_in_float32_unless_asked_otherwise(
    two_ranks: list[dict[str, Findings]],
) -> None:
    wide, narrow, exchanged = (
        two_ranks[0][name] for name in ("native/bf16_whole", "native/bf16_narrow", "bf16/narrow")
    )
    assert narrow.digest == exchanged.digest != wide.digest == two_ranks[0]["bf16/fast"].digest
    sent = [found.notes["statistics"]["reduced_bytes"] for found in (wide, narrow, two_ranks[0]["bf16/fast"])]
    # nccl sums in the type that it sends; shards that are exchanged are widened by the rank that sums them.
    assert sent[0] == 2 * sent[1] == 2 * sent[2] > 0


@slow
def test_half_precision_trains_and_placement_changes_no_bit(two_ranks: list[dict[str, Findings]]) -> None:
    fast, slow = two_ranks[0]["bf16/fast"], two_ranks[0]["bf16/slow"]
    assert fast.losses == slow.losses and fast.digest == slow.digest
    single = two_ranks[0]["place/sharded"]
    assert fast.losses == pytest.approx(single.losses, rel=0.02)
    assert fast.digest != single.digest
    assert all(weight.dtype == torch.float32 for weight in fast.weights.values())


@slow
def test_half_precision_on_the_slow_tier_clips(two_ranks: list[dict[str, Findings]]) -> None:
    clipped, free = two_ranks[0]["bf16/slow_clip"], two_ranks[0]["bf16/slow_sgd"]
    expected = reference(1, (("clip", 1e-3), ("optimizer", "SGD")))
    assert min(clipped.norms) > 0.1
    assert distance(clipped, expected)[1] < 0.02 * distance(free, expected)[1]


@slow
@pytest.mark.parametrize("name", ["fp16/overflow", "fp16/overflow_on_one"])
def test_float16_overflow_skips_the_step_on_all_ranks(two_ranks: list[dict[str, Findings]], name: str) -> None:
    one, other = (rank[name] for rank in two_ranks)
    assert one.notes["skipped"] == other.notes["skipped"] > 0
    assert one.digest == other.digest
    assert all(torch.isfinite(weight).all() for weight in one.weights.values())
    assert one.losses[-1] < one.losses[0]


@slow
@pytest.mark.parametrize("name", ["offloaded", "disk", "auto"])
def test_8_bit_states_train_the_same_on_every_tier(two_ranks: list[dict[str, Findings]], name: str) -> None:
    fast, moved = two_ranks[0]["8bit/fast"], two_ranks[0][f"8bit/{name}"]
    assert moved.losses == fast.losses and moved.digest == fast.digest
    # Blocks begin at each rank's part of a parameter: other blocks than one process has, and nearly the same numbers.
    assert fast.losses == pytest.approx(quantised().losses, rel=1e-2)
    exact = two_ranks[0]["place/sharded"]
    assert 0 < distance(fast, exact)[1] <= distance(quantised(), exact)[1]
    assert name != "auto" or moved.notes["plan"]["slow_optimizers"] > 0


@slow
def test_bytes_at_rest_equal_the_closed_form(two_ranks: list[dict[str, Findings]]) -> None:
    def expected(name: str, fast: float, slow: float, disk: float = 0) -> None:
        notes = two_ranks[0][name].notes
        numel = notes["numel"]
        factors = {"fast": fast, "slow": slow, "disk": disk}
        forms = {tier: int(factor * numel) for tier, factor in factors.items() if factor}
        assert notes["at_rest"] == forms, name

    # Bytes per parameter and rank: fp32 weights 4, AdamW's moments 8, halved by two ranks.
    expected("place/sharded", 12 / 2, 0)
    expected("place/kept_gathered", 4 + 8 / 2, 0)
    expected("place/optimizer_offloaded", 4, 12 / 2)
    expected("place/all_offloaded", 0, 12 / 2)
    expected("place/parameters_offloaded", 12 / 2, 4 / 2)
    expected("place/disk_all", 4, 0, 12 / 2)
    expected("bf16/fast", 14 / 2, 0)
    expected("bf16/slow", 0, 14 / 2)


@slow
def test_temporary_memory_stays_within_the_budget_and_the_largest_unit(two_ranks: list[dict[str, Findings]]) -> None:
    checked = 0
    for name, found in two_ranks[0].items():
        budget = JOBS[name].config.get("gathered_budget")
        if budget is not None:
            assert found.notes["gathered_peak"] <= budget + found.notes["largest_unit"], name
            checked += 1
    assert checked > 10
    unlimited = two_ranks[0]["place/sharded"].notes["gathered_peak"]
    assert two_ranks[0]["place/small_budget"].notes["gathered_peak"] < unlimited


@slow
def test_collectives_are_the_same_in_order_and_size_on_every_rank(two_ranks: list[dict[str, Findings]]) -> None:
    for name, found in two_ranks[0].items():
        assert found.notes.get("sequence") == two_ranks[1][name].notes.get("sequence"), name


@slow
def test_bytes_on_the_wire_equal_the_closed_form(two_ranks: list[dict[str, Findings]]) -> None:
    notes = two_ranks[0]["place/kept_gathered"].notes
    steps, numel = JOBS["place/kept_gathered"].steps, notes["numel"]
    # Each step reduces every gradient and gathers every weight once; the first gather is that of the initial weights.
    assert notes["statistics"]["reduced_bytes"] == steps * numel * 4 / 2
    assert notes["statistics"]["gathered_bytes"] == (steps + 1) * numel * 4 / 2


@slow
def test_prefetch_turns_misses_into_hits(two_ranks: list[dict[str, Findings]]) -> None:
    ahead = two_ranks[0]["place/far_prefetch"].notes["statistics"]
    behind = two_ranks[0]["place/no_budget_no_prefetch"].notes["statistics"]
    assert ahead["misses"] < 0.3 * behind["misses"]
    assert behind.get("prefetches", 0) == 0 < ahead["prefetches"]


@slow
def test_offloading_moves_gradients_down_and_weights_up(two_ranks: list[dict[str, Findings]]) -> None:
    notes = two_ranks[0]["place/optimizer_offloaded"].notes
    per_step = JOBS["place/optimizer_offloaded"].steps * notes["numel"] * 4 / 2
    assert notes["statistics"]["moved_bytes/fast_to_slow"] == per_step
    assert notes["statistics"]["moved_bytes/slow_to_fast"] == per_step


@slow
def test_states_on_disk_are_read_and_written_once_per_step(two_ranks: list[dict[str, Findings]]) -> None:
    job, notes = JOBS["place/disk_all"], two_ranks[0]["place/disk_all"].notes
    per_step = job.steps * notes["numel"] * 12 / 2
    assert notes["statistics"]["moved_bytes/disk_to_slow"] == per_step
    assert notes["statistics"]["moved_bytes/slow_to_disk"] == per_step
    assert notes["files"] == [], "files with names are left behind by a killed process"
    half, numel = two_ranks[0]["place/disk"].notes["at_rest"], notes["numel"]
    on_disk = half["disk"] * 2 // 12
    assert 0.5 <= on_disk / numel < 0.7
    # Host memory keeps all compute weights, and the moments of what is not on disk: its weights are the compute ones.
    assert half["slow"] == (4 * numel + 8 * (numel - on_disk)) // 2


@slow
def test_a_rank_reads_only_what_it_owns_of_networks_on_the_meta_device(two_ranks: list[dict[str, Findings]]) -> None:
    read = [sum(rank["meta"].notes["read"]) for rank in two_ranks]
    buffers, numel = 4, sum(w.numel() for w in two_ranks[0]["meta"].weights.values())
    assert sum(read) == numel + 2 * buffers
    assert max(read) < 0.7 * numel


@pytest.mark.full("engines")
def test_four_ranks_equal_one_process(tmp_path: Path) -> None:
    names = [name for name in JOBS if name.startswith("place/")]
    names += ["feature/accumulate", "feature/frozen", "feature/unused_one_rank", "act/raise", "act/swap"]
    names += ["fp16/overflow", "chunks/tiny", "auto/longer_inputs", "feature/longer_inputs", "auto/refit", "act/refit"]
    ranks = run_ranks(4, [JOBS[name] for name in names], tmp_path)
    plain = ranks[0]["place/sharded"]
    assert_as_plain_torch(plain, {})
    assert_as_plain_torch(ranks[0]["chunks/tiny"], {})
    for name in [*(name for name in names if name.startswith("place/")), "act/raise", "act/swap"]:
        assert ranks[0][name].digest == plain.digest, name
    for name in ("longer_inputs", "refit"):
        static = "feature/longer_inputs" if name == "longer_inputs" else "act/refit"
        assert ranks[0][f"auto/{name}"].digest == ranks[0][static].digest, name
    assert_as_plain_torch(ranks[0]["feature/accumulate"], FEATURES["accumulate"])
    assert_as_plain_torch(ranks[0]["feature/frozen"], FEATURES["frozen"])
    for name in names:
        assert len({rank[name].notes["sequence"] for rank in ranks}) == 1, name
        assert len({rank[name].digest for rank in ranks}) == 1, name


@slow
def test_a_diffusers_unet_equals_one_process(tmp_path: Path) -> None:
    config = {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "gathered_budget": 1_500_000}
    jobs = [
        Job("sharded", network="unet"),
        Job("kept_gathered", network="unet", config={"shard_param_frac": 0.0}),
        Job("offloaded", network="unet", config=config),
        Job("checkpointed", network="unet", config=config, checkpointed=True),
        Job("clip", network="unet", config=config, clip=0.05),
    ]
    ranks = run_ranks(2, jobs, tmp_path, timeout=600)
    assert ranks[0]["kept_gathered"].digest == ranks[0]["offloaded"].digest == ranks[0]["sharded"].digest
    for name in ("sharded", "checkpointed"):
        assert_as_plain_torch(ranks[0][name], {"network": "unet"})
    assert_as_plain_torch(ranks[0]["clip"], {"network": "unet", "clip": 0.05})
    offloaded = ranks[0]["offloaded"].notes
    assert offloaded["gathered_peak"] <= config["gathered_budget"] + offloaded["largest_unit"]


def test_the_engine_goes_with_its_network() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = GeminiEngine({"": network}, GeminiConfig())
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters()))
    network(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    chunks = [weakref.ref(chunk) for chunk in engine.chunks]
    del network, engine, optimizer
    gc.collect()
    assert chunks and all(chunk() is None for chunk in chunks)
