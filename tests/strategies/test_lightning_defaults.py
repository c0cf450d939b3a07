"""What people write with plain Lightning works under every strategy: its defaults, its callbacks, any module."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn

import lightning_jobs as jobs
from lightning_jobs import Shape
from ranks import run_jobs
from sd_lightning import UsageError
from sd_lightning.strategies import restoring
from sd_lightning.strategies.processes.group import leave_process_group
from strategy_table import strategy_of
from suites import keep, wanted

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "gemini", "gemini_offload")
SHARDING = ("fsdp", "zero2", "zero3", "gemini", "gemini_offload")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
MODULES = {"dict": PRECISIONS, "tuple": ("32-true",), "bert": ("bf16-mixed",), "gpt2": ("32-true", "bf16-true")}
KEPT = ("ddp", "fsdp", "zero3", "gemini")
"""One of each engine; the others are in the matrix."""
TRAINED = [f"{name}:{kind}" for name in STRATEGIES for kind in MODULES]
KEPT_TRAINED = ("gemini:bert", "zero3:gpt2", "fsdp:tuple", *(f"{n}:dict" for n in KEPT))


def test_lightnings_defaults_and_callbacks_train_two_epochs_and_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    found = jobs.defaults(partial(strategy_of, "gemini"), tmp_path, enable_model_summary=False)
    leave_process_group()
    assert found["steps"] == jobs.STEPS and found["parts"] == found["whole"]
    assert found["rates"] == ["lr-AdamW/pg1", "lr-AdamW/pg2"]
    # What Gemini writes is what torch's own optimizer reads.
    other = jobs.load(partial(strategy_of, "single"), Path(found["first"]), enable_model_summary=False)
    assert other["losses"] == pytest.approx(found["whole"][5:], abs=1e-6)


def test_fit_goes_on_from_the_runs_own_folder_and_refuses_it_without(tmp_path: Path) -> None:
    losses = jobs.own_folder(partial(strategy_of, "single"), tmp_path)["losses"]
    assert len(losses) == 5 and len(set(losses)) == 5
    saving = jobs.PortableCheckpoint(tmp_path, every_n_steps=0)
    again = jobs.trainer("auto", tmp_path, jobs.Losses(), saving, max_steps=2, logger=False)
    with pytest.raises(UsageError, match="already holds a run; continue it with resume="):
        again.fit(jobs.module(), jobs.small.data())


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(1e-3), WeightAveraging(), EMAWeightAveraging()])
@pytest.mark.parametrize("name", SHARDING)
def test_averages_of_lightning_are_refused_before_anything_starts(name: str, callback: Any, tmp_path: Path) -> None:
    trainer = jobs.trainer(strategy_of(name), tmp_path, jobs.Losses(), callback, logger=False)
    with pytest.raises(
        UsageError, match=f"{type(callback).__name__}, which averages .*take sd_lightning.callbacks.EMA"
    ):
        trainer.fit(jobs.Boring())
    assert not torch.distributed.is_initialized()


ENGINES = ("ddp", "fsdp", "zero2", "zero3", "gemini", "gemini_offload")
SEQUENCES = ["+".join(ENGINES[(i + step) % 6] for step in (0, 1, 3)) for i in range(6)]
"""Each strategy once first, once second and once third."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train everything that the chosen tests look at, in one set of processes."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("defaults")
    cases: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        cases[f"{name}:defaults"] = {"do": "defaults", "strategy": name, "folder": str(folder / name)}
        cases[f"{name}:own"] = {"do": "own_folder", "strategy": name, "folder": str(folder / f"{name}-own")}
        for kind, precisions in MODULES.items():
            job = {"do": "anything", "strategy": name, "name": kind, "precisions": precisions}
            cases[f"{name}:{kind}"] = job | {"folder": str(folder)}
    for names in (*SEQUENCES, "ddp+ddp+ddp"):
        cases[names] = {"do": "fits", "strategies": names.split("+"), "folder": str(folder)}
    for written, read in (("ddp", "gemini_offload"), ("gemini_offload", "ddp")):
        path = str(folder / written / "parts" / "epoch=0-step=5.ckpt")
        cases[f"{written}->{read}"] = {"do": "load_file", "strategy": read, "path": path}
    needed = wanted(request)
    assert needed <= cases.keys(), needed - cases.keys()
    cases = {name: case for name, case in cases.items() if name in needed}
    of_two = {name: job | {"devices": 2} for name, job in cases.items()}
    return run_jobs("strategy_jobs", of_two, folder, world_size=2, timeout=1500)


@pytest.mark.slow
@pytest.mark.needs("ddp:defaults", "{name}:defaults", "{name}:own")
@pytest.mark.parametrize("name", keep(KEPT, STRATEGIES))
def test_two_processes_do_with_lightnings_defaults_what_one_does(results: dict[str, Any], name: str) -> None:
    ours = results[f"{name}:defaults"]
    assert ours["steps"] == jobs.STEPS and ours["parts"] == ours["whole"]
    assert ours["whole"] == pytest.approx(results["ddp:defaults"]["whole"], abs=1e-6)
    assert ours["rates"] == ["lr-AdamW/pg1", "lr-AdamW/pg2"]
    assert results[f"{name}:own"]["losses"] == pytest.approx(ours["whole"][:5], abs=1e-6)


@pytest.mark.slow
@pytest.mark.needs("{pair}", "ddp:defaults", "gemini_offload:defaults")
@pytest.mark.parametrize("pair", ["ddp->gemini_offload", "gemini_offload->ddp"])
def test_a_file_of_lightning_goes_on_under_the_other_engine(results: dict[str, Any], pair: str) -> None:
    assert results[pair]["losses"] == pytest.approx(results["ddp:defaults"]["whole"][5:], abs=1e-6)


@pytest.mark.slow
@pytest.mark.needs("{case}", *(f"ddp:{kind}" for kind in MODULES))
@pytest.mark.parametrize("case", keep(KEPT_TRAINED, TRAINED))
def test_any_module_trains_in_every_precision_as_under_ddp(results: dict[str, Any], case: str) -> None:
    kind = case.partition(":")[2]
    for precision in MODULES[kind]:
        ours, theirs = results[case][precision], results[f"ddp:{kind}"][precision]
        tolerance: dict[str, float] = {"abs": 1e-5} if precision == "32-true" else {"rel": 3e-2}
        assert ours["losses"] == pytest.approx(theirs["losses"], **tolerance)
        assert ours["tested"] == pytest.approx(theirs["tested"], **tolerance)
        assert len(set(ours["losses"])) == len(ours["losses"]), "every step is of another batch, and trained"


def test_a_module_may_say_what_its_networks_and_blocks_are() -> None:
    from sd_lightning.strategies.networks import blocks_of, sharded_networks, trained_networks

    class Telling(jobs.Boring):
        def trained_networks(self) -> dict[str, nn.Module]:
            return {"inner": self.inner}

        def repeated_blocks(self) -> dict[str, nn.Module]:
            return {"inner.0": self.inner[0]}

    silent, telling = jobs.Boring(), Telling()
    assert list(trained_networks(silent)) == ["inner", "layers.0", "layers.1", "layers.2", "heads.main"]
    assert blocks_of(telling, trained_networks(telling)) == [telling.inner[0]]
    assert list(sharded_networks(telling, "FSDPStrategy")) == ["inner"], "others may be there, and stay as they are"
    listed = jobs.Boring()
    listed.gains = nn.ParameterList([torch.ones(2)])
    with pytest.raises(UsageError, match="Boring.gains.0 to train, a parameter of no network"):
        sharded_networks(listed, "FSDPStrategy")
    with pytest.raises(UsageError, match="no parameters to train"):
        sharded_networks(pl.LightningModule(), "FSDPStrategy")
    bert = jobs.Language("bert")
    assert len(blocks_of(bert, trained_networks(bert))) >= 2, "the layers, which transformers declares"


def assert_as_one_strategy(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare fits under several strategies with as many under one."""
    assert ours["differences"] == ours["unchanged"] == ours["no_gradient"] == []
    for mine, reference in zip(ours["losses"], theirs["losses"]):
        assert mine == pytest.approx(reference, abs=1e-5)
    for mine, reference in zip(ours["averages"], theirs["averages"]):
        assert mine == pytest.approx(reference, abs=1e-4)
    assert ours["tested"] == pytest.approx(theirs["tested"][: len(ours["tested"])], abs=1e-5)


@pytest.mark.slow
@pytest.mark.needs("{names}", "ddp+ddp+ddp")
@pytest.mark.parametrize("names", keep(SEQUENCES[::3], SEQUENCES))
def test_one_module_is_fitted_under_one_strategy_after_the_other(results: dict[str, Any], names: str) -> None:
    assert_as_one_strategy(results[names], results["ddp+ddp+ddp"])


@pytest.mark.full("matrix")
def test_every_pair_of_strategies_fits_one_module(tmp_path: Path) -> None:
    pairs = [(a, b) for a in ENGINES for b in ENGINES]
    cases = {pair: {"do": "fits", "strategies": pair, "folder": str(tmp_path), "devices": 2} for pair in pairs}
    found = run_jobs("strategy_jobs", cases, tmp_path, world_size=2, timeout=1500)
    for pair in pairs:
        assert_as_one_strategy(found[pair], found["ddp", "ddp"])


def test_after_gemini_lightnings_own_strategy_trains_every_weight(tmp_path: Path) -> None:
    ours, theirs = (
        jobs.fits([strategy_of(name), "auto"], tmp_path, devices=1) for name in ("gemini_offload", "single")
    )
    leave_process_group()
    assert_as_one_strategy(ours, theirs)


def test_after_fit_the_trainer_saves_weights_and_says_that_states_are_gone(tmp_path: Path) -> None:
    module = jobs.Boring()
    trainer = jobs.trainer(strategy_of("gemini"), tmp_path, jobs.Losses(), max_steps=1, logger=False)
    trainer.fit(module)
    with pytest.raises(UsageError, match="has freed the optimizer's states; let ModelCheckpoint .*weights_only=True"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    leave_process_group()
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert jobs.small.same(saved, dict(module.state_dict()))


def test_a_module_that_host_memory_cannot_hold_stays_in_parts_and_says_so_in_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = restoring.free_host_bytes
    monkeypatch.setattr(restoring, "free_host_bytes", lambda: 1000)
    module, losses = jobs.Boring(), jobs.Losses()
    options: dict[str, Any] = {"max_steps": 2, "logger": False, "enable_checkpointing": False}
    options["use_distributed_sampler"] = False
    figures = r"GiB of host memory for whole weights, and 9.31e-07 GiB are free here; go on with the same strategy"
    try:
        jobs.trainer(strategy_of("gemini_offload"), tmp_path, losses, **options).fit(module)
        assert re.search(figures, caplog.text)
        for other in ("auto", strategy_of("ddp"), strategy_of("fsdp")):
            with pytest.raises(UsageError, match=f"Boring is in the parts of GeminiStrategy: .*{figures}"):
                jobs.trainer(other, tmp_path, losses, **options).fit(module)
        jobs.trainer(strategy_of("gemini_offload"), tmp_path, losses, **options).fit(module)
        monkeypatch.setattr(restoring, "free_host_bytes", free)
        jobs.trainer(strategy_of("fsdp"), tmp_path, losses, **options).fit(module)
        assert Shape(jobs.Boring()).differences(module) == []
        plain, reference = jobs.Losses(), jobs.Boring()
        for _ in range(3):
            jobs.trainer("auto", tmp_path, plain, **options).fit(reference)
        assert losses.values == pytest.approx(plain.values, abs=1e-6)
    finally:
        leave_process_group()
