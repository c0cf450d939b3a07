"""Steps in the backward pass, and bfloat16 gradients on the host: the same bits with fewer bytes, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import small_training
from gemini_jobs import PLACEMENTS, Findings, Job, run_ranks, train, weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine, GeminiOptimizer
from sd_lightning.planner.footprint import Weight, Workload
from sd_lightning.state.shards import SavedParameter
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
    with pytest.raises(UsageError, match="asked to drop gradients.*call zero_grad.. before the backward pass"):
        optimizer.zero_grad()
    weight = next(engine.networks[""].parameters())
    for touch in (lambda: weight.grad, engine.networks[""].zero_grad, lambda: setattr(weight, "grad", None)):
        with pytest.raises(UsageError, match=r"0.weight.grad after AdamW has stepped.* leave step_in_backward out"):
            touch()
    with pytest.raises(UsageError, match="by a second backward pass before the optimizer's step"):
        engine.backward(loss_of(engine))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "betas"])
def test_a_setting_that_changes_after_the_backward_pass_is_refused(
    stepped: tuple[GeminiEngine, GeminiOptimizer], name: str
) -> None:
    group = stepped[1].param_groups[0]
    group[name] = (0.5, 0.5) if name == "betas" else 5.0
    with pytest.raises(UsageError, match=f"other values of {name} in parameter groups after the backward pass"):
        stepped[1].step()


def test_a_learning_rate_in_a_tensor_is_watched() -> None:
    engine, optimizer = layers(EARLY)
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(1e-3)
    for _ in range(2):
        engine.backward(loss_of(engine))
        optimizer.step()
        rate.mul_(0.5)
    engine.backward(loss_of(engine))
    rate.mul_(0.5)
    with pytest.raises(UsageError, match="other values of lr in parameter groups"):
        optimizer.step()


def test_weights_are_not_saved_between_the_backward_pass_and_the_step(
    stepped: tuple[GeminiEngine, GeminiOptimizer],
) -> None:
    engine, optimizer = stepped
    for save in (engine.state.parameter_shards, lambda: next(engine.whole_weights()), engine.restore):
        with pytest.raises(UsageError, match="and before the optimizer's step; save after it"):
            save()
    optimizer.step()
    assert len(engine.state.parameter_shards()) == COUNT


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_of_inputs_step_nothing(when: str) -> None:
    """Guidance by gradients, or a validation that computes some, beside the pass that trains."""

    def trained(mode: bool) -> dict[str, Tensor]:
        engine, optimizer = layers({"compute_dtype": torch.float32, "step_in_backward": mode})
        for _ in range(2):
            y = torch.ones(4, WIDTH, requires_grad=True)
            if when == "before":
                torch.autograd.grad(engine.networks[""](y).sum(), y)
            engine.backward(loss_of(engine))
            optimizer.step()
            if when == "after":
                torch.autograd.grad(engine.networks[""](y).sum(), y)
                optimizer.zero_grad()
                engine.abort()
                assert len(engine.state.parameter_shards()) == COUNT
        return weights_of(engine)

    early, later = trained(True), trained(False)
    assert all(torch.equal(early[name], later[name]) for name in later)


def test_gradients_that_come_too_late_to_be_clipped_are_refused() -> None:
    config = {"compute_dtype": torch.float32, "shard_param_frac": 0.0, "step_in_backward": "running_norm"}
    engine, optimizer = layers(config)
    with pytest.raises(UsageError, match=r"max_norm=None; set engine.optimizers\[0\].early.max_norm"):
        engine.backward(loss_of(engine))
    engine.abort()
    optimizer.early.max_norm = 1.0
    first, *others = engine.networks[""].children()
    hidden = nn.Sequential(*others)(torch.ones(4, WIDTH))
    engine.backward(nn.functional.linear(hidden, first.weight).sum())
    with pytest.raises(UsageError, match="gradient of 0.weight from outside of its block's forward.*running_norm"):
        optimizer.step()


def test_a_penalty_on_weights_is_taken_after_the_call() -> None:
    config = {"compute_dtype": torch.float32, "shard_param_frac": 0.0}

    def trained(mode: bool) -> dict[str, Tensor]:
        engine, optimizer = layers({**config, "step_in_backward": mode})
        loss = loss_of(engine)
        engine.backward(loss + engine.networks[""][3].weight.square().sum())
        optimizer.step()
        return weights_of(engine)

    early, later = trained(True), trained(False)
    assert all(torch.equal(early[name], later[name]) for name in later)
    engine, _ = layers({**config, **EARLY})
    penalty = engine.networks[""][3].weight.square().sum()
    with pytest.raises(UsageError, match="a penalty on weights that is taken before .* penalties after the call"):
        engine.backward(loss_of(engine) + penalty)


def test_micro_batches_and_a_second_optimizer_are_refused() -> None:
    engine, _ = layers(EARLY)
    with pytest.raises(UsageError, match="several micro-batches with step_in_backward"):
        engine.no_sync()
    with pytest.raises(UsageError, match="a second optimizer .SGD. with step_in_backward"):
        engine.optimizer(torch.optim.SGD(engine.networks[""].parameters(), lr=1.0))


def fail_after_some_steps(engine: GeminiEngine) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = engine.networks[""][2].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss_of(engine))
    handle.remove()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_pass_that_fails_after_some_steps_cannot_be_gone_on_from(
    is_aborted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, optimizer = layers(EARLY)
    fail_after_some_steps(engine)
    if is_aborted:
        engine.abort()
        assert "resume from the last checkpoint" in caplog.text
    states = engine.state.parameter_shards, lambda: next(engine.whole_weights()), engine.restore
    for go_on in (optimizer.step, *states, lambda: engine.backward(loss_of(engine))):
        with pytest.raises(UsageError, match="has stepped weights in a backward pass that failed.*resume"):
            go_on()


def test_a_pass_that_fails_before_any_step_is_gone_on_from() -> None:
    engine, optimizer = layers({**EARLY, "offload_optim_frac": 1.0})
    network, before = engine.networks[""], weights_of(engine)
    handle = network[COUNT - 3].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss_of(engine))
    handle.remove()
    engine.abort()
    assert all(torch.equal(old, now) for old, now in zip(before.values(), weights_of(engine).values(), strict=True))
    engine.backward(loss_of(engine))
    optimizer.step()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_checkpoint_mends_what_a_failed_pass_has_left(is_new: bool) -> None:
    engine, optimizer = layers({**EARLY, "offload_optim_frac": 1.0, "gradient_dtype": torch.bfloat16})
    before, at_rest = weights_of(engine), engine.ledger.current["slow"]  # type: ignore[index]
    fail_after_some_steps(engine)
    if is_new:  # as a second fit does
        engine.drop_optimizers()
        optimizer = engine.optimizer(torch.optim.AdamW(engine.networks[""].parameters(), lr=1e-3))
        assert len(engine.state.parameter_shards()) == COUNT, "states that are to be loaded are listed"
        with pytest.raises(UsageError, match="resume from the last checkpoint"):
            engine.backward(loss_of(engine))

    def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
        out.copy_(before[name].reshape(-1)[begin:end])

    saved = {name: SavedParameter((WIDTH, WIDTH), {}, {}) for name in before}
    engine.state.load(saved, engine.state.optimizer_groups(), read)
    engine.abort()
    assert engine.ledger.current["slow"] == at_rest  # type: ignore[index]
    engine.backward(loss_of(engine))
    optimizer.step()
    expected, theirs = layers({**EARLY, "offload_optim_frac": 1.0})
    expected.backward(loss_of(expected))
    theirs.step()
    assert all(torch.equal(now, weights_of(expected)[name]) for name, now in weights_of(engine).items())


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
        (
            True,
            {"gradient_clip_val": None, "callbacks": GradientAccumulationScheduler({1: 2})},
            "the callback GradientAccumulationScheduler; a step has one backward pass",
        ),
    ],
)
def test_trainers_that_need_gradients_after_the_pass_are_refused(
    mode: Any, options: dict[str, Any], message: str
) -> None:
    callbacks = [options["callbacks"]] if "callbacks" in options else []
    rest = {name: value for name, value in options.items() if name != "callbacks"}
    strategy = GeminiStrategy(step_in_backward=mode)
    with pytest.raises(UsageError, match=message):
        small_training.fit(small_training.module(), small_training.data(), 1, *callbacks, strategy=strategy, **rest)
    leave_process_group()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class Layers(pl.LightningModule):
    """Layers that are chunks of their own; the backward pass of one step fails in the first of them."""

    def __init__(self, *, failing: int = -1, is_automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Blocks()
        self.failing, self.automatic_optimization = failing, is_automatic

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.failing:
            self.failing = -1
            handle = self.net.blocks[0].register_full_backward_hook(lambda *_: (handle.remove(), 1 / 0))
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_layers(module: Layers, *callbacks: pl.Callback, mode: Any = True, **options: Any) -> None:
    strategy = GeminiStrategy(step_in_backward=mode, chunk_numel=WIDTH**2)
    trainer = small_training.trainer_of(4, *callbacks, strategy=strategy, gradient_clip_val=None)
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(4, WIDTH, generator=generator)  # the same in each step: Lightning resumes with the first one
    data = DataLoader(TensorDataset(batch.repeat(4, 1)), batch_size=4)
    trainer.fit(module, data, **options)


def test_running_norm_under_manual_optimization_is_refused() -> None:
    with pytest.raises(UsageError, match="manual optimization, for which Lightning takes no trainer.gradient_clip_val"):
        fit_layers(Layers(is_automatic=False), mode="running_norm")
    leave_process_group()


def test_weights_of_a_failed_pass_are_neither_saved_nor_trained_until_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    module, whole = Layers(failing=2), Layers()
    fit_layers(whole)
    with pytest.raises(UsageError, match="resume from the last checkpoint"):
        fit_layers(Layers(failing=1), OnExceptionCheckpoint(tmp_path / "torn"))
    assert not list(tmp_path.rglob("*.ckpt"))
    leave_process_group()
    with pytest.raises(ZeroDivisionError):
        fit_layers(module, ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1))
    with pytest.raises(UsageError, match="resume from the last checkpoint"):
        fit_layers(module)
    (last,) = tmp_path.glob("*step=2.ckpt")
    fit_layers(module, ckpt_path=last)
    for ours, expected in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


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
