"""Steps in the backward pass, and bfloat16 gradients on the host: the same bits with fewer bytes, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_training
from gemini_jobs import PLACEMENTS, Findings, Job, run_ranks, train, weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine, GeminiOptimizer
from sd_lightning.planner.footprint import Weight, Workload
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.gemini_footprint import footprint_of
from sd_lightning.strategies.processes.group import leave_process_group

EARLY, NARROW = {"step_in_backward": True}, {"gradient_dtype": "bfloat16"}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointed": {"checkpointed": True},
    "unused": {"unused": "everywhere"},
    "own class": {"optimizer": "NAdam"},
    "8 bits": {"optimizer": "AdamW8bit", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("place", ["sharded", "optimizer_offloaded", "all_offloaded", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_the_backward_pass_changes_no_bit(kind: str, place: str) -> None:
    job = {"steps": 4, **KINDS[kind]}
    later = train(Job("later", config=PLACEMENTS[place], **job))
    early = train(Job("early", config=PLACEMENTS[place] | EARLY, **job))
    assert early.losses == later.losses and early.digest == later.digest
    assert early.notes["kinds"] == later.notes["kinds"], "nothing is left at rest"


@pytest.mark.parametrize("fields", [{}, {"clip": 0.05}, {"accumulate": 3, "clip": 0.05}, {"optimizer": "AdamW8bit"}])
@pytest.mark.parametrize("place", ["half_offloaded", "all_offloaded", "disk", "auto_some"])
def test_narrow_gradients_of_one_rank_change_no_bit(fields: dict[str, Any], place: str) -> None:
    job = {"steps": 4, "dtype": "bfloat16", **fields}
    wide = train(Job("wide", config=PLACEMENTS[place], **job))
    narrow = train(Job("narrow", config=PLACEMENTS[place] | NARROW, **job))
    assert narrow.losses == wide.losses and narrow.digest == wide.digest
    assert narrow.norms == wide.norms


TWO_RANKS = {
    job.name: job
    for place in ("sharded", "all_offloaded", "kept_gathered")
    for kind in ({}, {"unused": "one_rank"})
    for options in ({}, EARLY)
    for job in [
        Job(
            f"{place}/{kind.get('unused', 'plain')}/{'early' if options else 'later'}",
            config=PLACEMENTS[place] | options,
            dtype="bfloat16",
            steps=4,
            **kind,
        )
    ]
} | {
    "narrow": Job("narrow", config=PLACEMENTS["all_offloaded"] | NARROW | EARLY, dtype="bfloat16", steps=4),
    "clipped": Job(
        "clipped", config=PLACEMENTS["all_offloaded"] | {"step_in_backward": "running_norm"}, clip=0.05, steps=4
    ),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Findings]]:
    return run_ranks(2, list(TWO_RANKS.values()), tmp_path_factory.mktemp("early"))


@pytest.mark.parametrize("name", [name.removesuffix("/early") for name in TWO_RANKS if name.endswith("/early")])
def test_two_ranks_step_in_the_backward_pass_as_after_it(two_ranks: list[dict[str, Findings]], name: str) -> None:
    for rank in two_ranks:
        early, later = rank[f"{name}/early"], rank[f"{name}/later"]
        assert early.losses == later.losses and early.digest == later.digest
    assert two_ranks[0][f"{name}/early"].digest == two_ranks[1][f"{name}/early"].digest


def test_sums_over_ranks_are_rounded_in_narrow_gradients(two_ranks: list[dict[str, Findings]]) -> None:
    narrow, wide = two_ranks[0]["narrow"], two_ranks[0]["all_offloaded/plain/later"]
    assert narrow.digest == two_ranks[1]["narrow"].digest != wide.digest
    assert narrow.losses == pytest.approx(wide.losses, rel=1e-2)


def test_ranks_clip_by_one_running_norm(two_ranks: list[dict[str, Findings]]) -> None:
    one, other = (rank["clipped"] for rank in two_ranks)
    assert one.norms == other.norms and min(one.norms) > 0.05 and one.digest == other.digest
    alone = train(TWO_RANKS["clipped"])
    assert one.norms == pytest.approx(alone.norms, rel=1e-3)


WIDTH, COUNT = 64, 12


def layers(config: dict[str, Any]) -> tuple[GeminiEngine, GeminiOptimizer]:
    """Return an engine of equal layers, each a chunk of its own, and its optimizer."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    settings: dict[str, Any] = {"chunk_numel": WIDTH**2, "compute_dtype": torch.bfloat16, **config}
    engine = GeminiEngine({"": network}, GeminiConfig(**settings))
    return engine, engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))


def loss_of(engine: GeminiEngine, *, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, WIDTH, generator=generator).to(engine.layouts[0].dtype)
    return engine.networks[""](x).float().square().sum() * factor


@pytest.mark.parametrize(
    ("options", "chunks", "width"),
    [({}, COUNT, 4), (EARLY, 6, 4), ({"gradient_dtype": torch.bfloat16}, COUNT, 2)]
    + [({"gradient_dtype": torch.bfloat16, **EARLY}, 6, 2)],
)
def test_the_ledger_and_the_planner_count_gradients_on_the_host_alike(
    options: dict[str, Any], chunks: int, width: int
) -> None:
    config = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "chunk_numel": WIDTH**2, **options}
    engine, optimizer = layers(config)
    engine.backward(loss_of(engine))
    optimizer.step()
    gradients = chunks * WIDTH**2 * width
    scratch = 4 * WIDTH**2 * (width == 2)
    assert engine.ledger.kind_peak["slow", "accumulated"] == gradients  # type: ignore[index]
    assert engine.ledger.kind_peak["slow", "scratch"] == scratch  # type: ignore[index]
    assert engine.ledger.current["slow"] == COUNT * WIDTH**2 * (2 + 4 + 8)  # type: ignore[index]
    workload = Workload(
        [Weight(f"net.{i}.weight", (WIDTH, WIDTH), True, f"net.{i}") for i in range(COUNT)],
        "bf16-mixed",
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    found = footprint_of(GeminiConfig(**config), workload, lambda name: (int(name.split(".")[1]),))
    assert found is not None
    counted = {each.kind: each.nbytes for each in found.host}
    assert counted["gradients"] == gradients and counted.get("scratch of the step", 0) == scratch


def test_one_chunk_of_gradients_is_left_on_the_accelerator() -> None:
    engine, optimizer = layers({"compute_dtype": torch.float32, "shard_param_frac": 0.0, **EARLY})
    engine.backward(loss_of(engine))
    optimizer.step()
    assert engine.ledger.kind_peak["fast", "accumulated"] == 4 * WIDTH**2  # type: ignore[index]


def test_a_running_norm_is_the_global_norm_if_all_is_one_chunk() -> None:
    """And without a larger step before; the second step's gradients are smaller, so the first one's norm counts."""
    limit, factors = 1e-3, (1.0, 0.05, 2.0)

    def trained(mode: Any) -> tuple[list[Tensor], list[float]]:
        engine, optimizer = layers({"chunk_numel": 2**16, "compute_dtype": torch.float32, "step_in_backward": mode})
        optimizer.param_groups[0].update(lr=1e-2)
        optimizer.early.max_norm = limit if mode else None
        norms: list[float] = []
        for factor in factors:
            engine.backward(loss_of(engine, factor=factor))
            norm = float(optimizer.clip_grad_norm_(limit) if mode else optimizer.grad_norm())
            if not mode:
                most = max([norm, *norms[-1:]])
                optimizer._clip = torch.tensor(min(limit / (most + 1e-6), 1.0), dtype=torch.float64)
            norms.append(norm)
            optimizer.step()
        return list(weights_of(engine).values()), norms

    (ours, our_norms), (expected, norms) = trained("running_norm"), trained(False)
    assert our_norms == pytest.approx(norms, rel=1e-5) and norms[1] < norms[0] and min(norms) > limit
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(ours, expected, strict=True))


def test_no_chunk_moves_further_than_the_limit_in_a_first_step_that_is_far_too_large() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    engine = GeminiEngine({"": network}, GeminiConfig(chunk_numel=WIDTH**2, step_in_backward="running_norm"))
    optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=1.0))
    optimizer.early.max_norm = 0.1
    engine.backward(network(torch.randn(4, WIDTH)).square().sum() * 1e6)
    assert float(optimizer.clip_grad_norm_(0.1)) > 100
    optimizer.step()
    moves = [float((now - old).norm()) for now, old in zip(weights_of(engine).values(), before, strict=True)]
    assert max(moves) <= 0.1 * (1 + 1e-3)
    assert 0.1 < math.hypot(*moves) < 0.1 * math.sqrt(COUNT), "the global norm would have given at most the limit"


def test_a_loss_that_is_not_finite_leaves_everything_as_it_is() -> None:
    engine, optimizer = layers(EARLY)
    before = weights_of(engine)
    engine.backward(loss_of(engine, factor=math.nan))
    optimizer.step()
    assert all(torch.equal(old, now) for old, now in zip(before.values(), weights_of(engine).values(), strict=True))
    engine.backward(loss_of(engine))
    optimizer.step()
    assert not torch.equal(before["0.weight"], weights_of(engine)["0.weight"])


@pytest.fixture
def stepped() -> tuple[GeminiEngine, GeminiOptimizer]:
    """An engine whose backward pass has stepped, before its optimizer steps."""
    engine, optimizer = layers(EARLY)
    engine.backward(loss_of(engine))
    return engine, optimizer


def test_what_needs_gradients_after_they_are_freed_is_refused(stepped: tuple[GeminiEngine, GeminiOptimizer]) -> None:
    engine, optimizer = stepped
    for ask in (optimizer.grad_norm, lambda: optimizer.clip_grad_norm_(1.0), lambda: optimizer.clip_grad_value_(1.0)):
        with pytest.raises(UsageError, match="after the backward pass, which has stepped.*gradient_clip_val=null"):
            ask()
    with pytest.raises(UsageError, match="asked to drop gradients"):
        optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"\.grad after AdamW has stepped, which frees the gradients; leave step_in"):
        _ = next(engine.networks[""].parameters()).grad
    with pytest.raises(UsageError, match="by a second backward pass before the optimizer's step"):
        engine.backward(loss_of(engine))


def test_a_learning_rate_that_changes_after_the_backward_pass_is_refused(
    stepped: tuple[GeminiEngine, GeminiOptimizer],
) -> None:
    stepped[1].param_groups[0]["lr"] = 5.0
    with pytest.raises(UsageError, match=r"learning rates \[5.0\] after the backward pass has stepped with \[0.001\]"):
        stepped[1].step()


def test_micro_batches_and_a_second_optimizer_are_refused() -> None:
    engine, _ = layers(EARLY)
    with pytest.raises(UsageError, match="several micro-batches with step_in_backward"):
        engine.no_sync()
    with pytest.raises(UsageError, match="a second optimizer .SGD. with step_in_backward"):
        engine.optimizer(torch.optim.SGD(engine.networks[""].parameters(), lr=1.0))


def test_a_pass_that_fails_after_some_steps_cannot_be_gone_on_from() -> None:
    engine, optimizer = layers(EARLY)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = engine.networks[""][2].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss_of(engine))
    handle.remove()
    engine.abort()
    for go_on in (optimizer.step, engine.state.parameter_shards):
        with pytest.raises(UsageError, match="has stepped some weights in a backward pass that was aborted.*resume"):
            go_on()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**EARLY, "placement": "auto", "memory_cap": 0.5}, "plans with the gradients of all chunks"),
        ({**EARLY, "reduce_once": True}, "a step has one backward pass"),
        ({**EARLY, "compute_dtype": torch.float16}, "only the end of the pass shows whether its gradients overflow"),
        ({"step_in_backward": "norm"}, "expected true, false or 'running_norm'"),
        ({"gradient_dtype": torch.bfloat16}, "no gradient goes to the host; set offload_optim_frac"),
        ({"gradient_dtype": torch.float16}, "expected float32, or bfloat16"),
        (
            {"gradient_dtype": torch.bfloat16, "offload_optim_frac": 1.0, "compute_dtype": torch.float32},
            "computed more exactly: leave gradient_dtype out",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GeminiConfig(**settings)


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (True, {}, "gradient_clip_val=1.0; the global norm is known after the pass.*running_norm"),
        (True, {"gradient_clip_val": None, "accumulate_grad_batches": 2}, "write trainer.accumulate_grad_batches=1"),
        ("running_norm", {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm=value"),
        ("running_norm", {"gradient_clip_val": None}, "no trainer.gradient_clip_val; give one"),
    ],
)
def test_trainers_that_need_gradients_after_the_pass_are_refused(
    mode: Any, options: dict[str, Any], message: str
) -> None:
    strategy = GeminiStrategy(step_in_backward=mode)
    with pytest.raises(UsageError, match=message):
        small_training.fit(small_training.module(), small_training.data(), 1, strategy=strategy, **options)
    leave_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_run_that_is_resumed_with_and_without_early_steps_trains_the_same_bits(
    tmp_path: Path, clip: float | None
) -> None:
    """Clipped, both legs have the running norm: the checkpoint keeps that of the step before."""
    mode = True if clip is None else "running_norm"

    def leg(folder: str, steps: int, resume: Path | None = None, **settings: Any) -> Path:
        strategy = GeminiStrategy(offload_optim_frac=1.0, **settings)
        saved = small_training.train(
            tmp_path / folder, steps, resume=resume, strategy=strategy, precision="bf16-mixed", gradient_clip_val=clip
        )
        leave_process_group()
        return saved

    early: dict[str, Any] = {"step_in_backward": mode, "gradient_dtype": torch.bfloat16}
    whole = leg("whole", 4, **(early if clip else {}))
    first = leg("first", 2, step_in_backward=mode)
    small_training.assert_bitwise_equal(leg("relay", 4, first, **early), whole)
