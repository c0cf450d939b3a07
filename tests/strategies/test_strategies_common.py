"""What every strategy must do alike, on two gloo processes; a new strategy joins by a line in strategy_table.py.

`make test-slow` holds the parity of all of them, and everything else under one strategy of each engine, in turn; the
rest is `make test-full PART=matrix`. A run trains what its tests name in ``needs``.
"""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparing import rms
from ranks import run_jobs
from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state
from sd_lightning.storage.tensor_store import ShardedTensors
from strategy_table import STRATEGIES
from suites import keep, wanted

EXACT_OPTIONS = ("ddp_static", "fsdp_grad_op", "gemini_kept")
ROUNDING_OPTIONS = ("ddp_bf16", "ddp_fp16", "fsdp_bf16")
OF_FOUR = ("hsdp", "zero2", "gemini")
"""What is trained on four processes, too; HSDP shards over two of them, twice."""
SOME = ("ddp", "fsdp", "zero3", "gemini")
"""One of each engine, for what depends on no more than that."""
STEPS = 8
VARIATIONS: dict[str, dict[str, Any]] = {
    "two_groups": {"module": {"text_encoder_lr": 1e-4}},
    "schedule": {"lr_scheduler": True},
    "recomputed": {"speed": {"gradient_checkpointing": True}},
    "kept": {"speed": {"gradient_checkpointing": 1.0}, "kept": ["inputs", "convolutions", "all"]},
    "small_set": {"train_only": "attn2.to_q"},
    "unused": {"unused": True},
    "inpainting": {"architecture": "tiny_inpainting"},
}
"""What must train as in one process, by name."""
VARIED = (
    *(("ddp", "unused"), ("ddp", "two_groups"), ("fsdp", "recomputed"), ("fsdp", "small_set"), ("fsdp", "schedule")),
    *(("zero3_default", "schedule"), ("zero3_default", "unused")),
    *((name, "kept") for name in ("zero3_default", "gemini_offload")),
    *(("gemini_offload", name) for name in ("two_groups", "recomputed", "small_set")),
    *((name, "inpainting") for name in ("fsdp", "zero3_default")),
)
"""Which of them stay in the slow suite: each under two engines."""
CHANGES = (
    *(("ddp", "sgd"), ("fsdp", "adamw"), ("zero1", "sgd"), ("gemini", "adam"), ("zero3", "sgd"), ("ddp", "adamw")),
    *(("fsdp_offload", "sgd"), ("zero2_offload", "adamw"), ("gemini_offload", "sgd"), ("zero3_offload", "adam")),
    ("gemini", "adamw"),
)
"""A run that goes on under another strategy and with another optimizer at each step after the third."""


class Trained(dict[str, dict[str, Any]]):
    """What runs found, by name; those of one engine are trained when the first of them is looked at.

    Args:
        cases: By world size and name; a name begins with the strategy, and ``after`` names a run that goes before.
        folder: Where they are trained.
    """

    def __init__(self, cases: dict[int, dict[str, dict[str, Any]]], folder: Path) -> None:
        super().__init__()
        self.cases, self.folder = cases, folder
        self.failed: dict[str, AssertionError] = {}

    def __missing__(self, name: str) -> dict[str, Any]:
        world = next(size for size, cases in self.cases.items() if name in cases)
        group = [other for other in self.cases[world] if _group(other) == _group(name)]
        if _group(name) in self.failed:
            raise self.failed[_group(name)]
        for before in {self.cases[world][each]["after"] for each in group if "after" in self.cases[world][each]}:
            assert self[before]
        common = {"do": "save", "strategy": "single", "devices": world, "save_at": 0, "steps": STEPS}
        jobs = {
            each: common | {"run_dir": str(self.folder / f"{world}-{each}")} | self.cases[world][each] for each in group
        }
        try:
            self.update(run_jobs("strategy_jobs", jobs, self.folder, world_size=world, timeout=1200))
        except AssertionError as error:
            self.failed[_group(name)] = error
            raise
        return self[name]


def _group(name: str) -> str:
    """Return the engine: "zero" of "zero2_offload:parity"."""
    return re.split("[^a-z]", name)[0] if ":" in name else ""


def _changing(world: int, first: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs of the run of ``CHANGES``, which begins with a checkpoint of another."""
    jobs, resume = {}, str(folder / f"{world}-{first}" / "checkpoints" / "step-00000003")
    run_dir = folder / f"{world}-changed"
    for step, (strategy, optimizer) in enumerate(CHANGES, 4):
        job = {"strategy": strategy if world > 1 else "single", "optimizer": optimizer, "steps": step, "after": first}
        jobs[f"changed_{world}:{step}"] = job | {"resume": resume, "run_dir": str(run_dir)}
        resume = str(run_dir / "checkpoints" / f"step-{step:08d}")
    return jobs


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Everything that the chosen tests look at, trained one engine after another."""
    pytest.importorskip("deepspeed")
    needed = wanted(request)
    folder = tmp_path_factory.mktemp("strategies")
    accumulate = {"accumulate_grad_batches": 2}
    evaluated = {"steps": 3, "evaluate": True, "trainer": {"limit_val_batches": 1.0}}
    frozen_text = {"module": {"train_text_encoder": False}, "steps": 4}
    single = {
        "whole": {},
        "two_halves": {"trainer": accumulate},
        "clipped": {"trainer": {"gradient_clip_val": 0.05}, "steps": 4},
        "twenty": {"steps": 20},
        "frozen_text": frozen_text,
        "three": {"steps": 3},
        **_changing(1, "three", folder),
        "evaluated": evaluated,
        **{name: options | {"steps": 4} for name, options in VARIATIONS.items()},
    }
    double: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        every = {
            "parity": {},
            "twenty": {"steps": 20},
            "sampled": {"sample_every": 3, "trainer": _VALIDATING},
            "clipped": {"trainer": {"gradient_clip_val": 0.05, **accumulate}, "steps": 4},
            "frozen_text": frozen_text,
            "bf16": {"precision": "bf16-mixed", "steps": 4},
            "bf16_true": {"precision": "bf16-true", "steps": 4},
            "evaluated": evaluated,
            "stopped": {"stop_at": 3},
            "resumed": {"ckpt_path": str(folder / f"2-{name}:stopped")},
            **{key: {"steps": 4} | options for key, options in VARIATIONS.items()},
        }
        if name in SOME:
            every |= {
                "signalled": {"signal_at": 3},
                "bad_loss": {"steps": 4, "save_at": 1, "bad_at": 2},
                "ema_on_host": {"ema_offload": True},
            }
        double |= {f"{name}:{key}": {"strategy": name} | case for key, case in every.items()}
    double["ddp:unused"]["strategy"] = "ddp_unused"
    double |= _changing(2, "ddp:stopped", folder)
    double["gemini_auto:sampled"] = double["gemini:sampled"] | {"strategy": "gemini_auto"}
    double |= {f"{name}:option": {"strategy": name, "steps": 4} for name in (*EXACT_OPTIONS, *ROUNDING_OPTIONS)}
    stopped_of_four = str(folder / "4-four:hsdp_stopped")
    double["after_four:ddp"] = {
        "strategy": "ddp",
        "ckpt_path": stopped_of_four,
        "after": "four:hsdp_stopped",
    }
    four = {f"four:{name}": {"strategy": name} for name in OF_FOUR}
    four |= {
        "four:hsdp_stopped": {"strategy": "hsdp", "stop_at": 3},
        "four:hsdp_resumed": {"strategy": "hsdp", "ckpt_path": stopped_of_four},
    }
    every_case = {1: single, 2: double, 4: four}
    assert needed <= {name for cases in every_case.values() for name in cases}
    chosen = {world: {n: case for n, case in cases.items() if n in needed} for world, cases in every_case.items()}
    return Trained(chosen, folder)


_VALIDATING = {"limit_val_batches": 1, "val_check_interval": 4}


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.holds("strategies", of="tiny")
@pytest.mark.needs("whole", "two_halves", "{name}:parity")
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_and_weights_are_those_of_one_process(results: Trained, name: str) -> None:
    whole, ours = results["whole"], results[f"{name}:parity"]
    assert ours["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    for kind in ("master", "ema"):
        # Sums in another order: Adam makes steps of it where a gradient is almost zero, in a few weights of a million.
        for found in (ours, results["two_halves"]):
            assert 0 < rms(whole["checkpoint"], found["checkpoint"], kind) < 1e-7


@pytest.mark.needs("whole", "twenty", "{name}:twenty")
@pytest.mark.parametrize("name", keep(["gemini"], STRATEGIES))
def test_the_average_of_twenty_steps_is_that_of_one_process(results: Trained, name: str) -> None:
    assert rms(results["twenty"]["checkpoint"], results[f"{name}:twenty"]["checkpoint"], "ema") <= 1e-6
    assert rms(results["twenty"]["checkpoint"], results["whole"]["checkpoint"], "ema") > 1e-4


@pytest.mark.needs("whole", "{name}:option")
@pytest.mark.parametrize("name", EXACT_OPTIONS)
def test_options_that_only_save_time_or_memory_change_nothing(results: Trained, name: str) -> None:
    assert results[f"{name}:option"]["losses"] == pytest.approx(results["whole"]["losses"][:4], abs=1e-6)


@pytest.mark.needs("whole", "ddp:parity", "{name}:option")
@pytest.mark.parametrize("name", ROUNDING_OPTIONS)
def test_options_that_round_stay_near(results: Trained, name: str) -> None:
    losses = results[f"{name}:option"]["losses"]
    assert losses == pytest.approx(results["whole"]["losses"][:4], rel=2e-2)
    assert losses != results["ddp:parity"]["losses"][:4]


@pytest.mark.needs("{name}:sampled", "{name}:parity")
@pytest.mark.parametrize("name", keep(SOME, STRATEGIES))
def test_drawing_and_validating_with_the_average_leaves_training_bit_equal(results: Trained, name: str) -> None:
    sampled, plain = results[f"{name}:sampled"], results[f"{name}:parity"]
    assert sampled["losses"] == plain["losses"]
    assert rms(sampled["checkpoint"], plain["checkpoint"]) == 0
    assert rms(sampled["checkpoint"], plain["checkpoint"], "ema") == 0
    assert "val/caption_gap" in sampled["metrics"]


@pytest.mark.needs("whole", "clipped", "{name}:clipped")
@pytest.mark.parametrize("name", keep(["fsdp", "zero2_offload", "gemini"], STRATEGIES))
def test_clipping_over_accumulated_batches_is_that_of_one_process(results: Trained, name: str) -> None:
    clipped, ours = results["clipped"], results[f"{name}:clipped"]
    assert (
        rms(clipped["checkpoint"], ours["checkpoint"])
        < 1e-7
        < rms(clipped["checkpoint"], results["whole"]["checkpoint"])
    )


@pytest.mark.needs("frozen_text", "{name}:frozen_text")
@pytest.mark.parametrize("name", keep(["zero2", "gemini_offload"], STRATEGIES))
def test_a_frozen_text_encoder_trains_alike(results: Trained, name: str) -> None:
    assert results[f"{name}:frozen_text"]["losses"] == pytest.approx(results["frozen_text"]["losses"], abs=1e-6)


@pytest.mark.needs("whole", "{name}:{precision}")
@pytest.mark.parametrize(
    ("name", "precision"),
    keep(
        [("fsdp_offload", "bf16"), ("zero1", "bf16_true"), ("gemini", "bf16"), ("gemini", "bf16_true")],
        itertools.product(STRATEGIES, ("bf16", "bf16_true")),
    ),
)
def test_bfloat16_stays_near_float32(results: Trained, name: str, precision: str) -> None:
    ours, whole = results[f"{name}:{precision}"]["losses"], results["whole"]["losses"][:4]
    assert ours == pytest.approx(whole, rel=2e-2)
    assert ours != whole


@pytest.mark.needs("whole", "{variation}", "{name}:{variation}")
@pytest.mark.parametrize(("name", "variation"), keep(VARIED, itertools.product(STRATEGIES, VARIATIONS)))
def test_every_variation_of_training_is_that_of_one_process(results: Trained, name: str, variation: str) -> None:
    whole, ours = results[variation], results[f"{name}:{variation}"]
    assert ours["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    assert rms(whole["checkpoint"], ours["checkpoint"]) < 1e-7
    if variation not in ("recomputed", "kept", "unused", "inpainting"):
        assert rms(whole["checkpoint"], results["whole"]["checkpoint"]) > 1e-7, "the variation has an effect"


@pytest.mark.needs("evaluated", "{name}:evaluated")
@pytest.mark.parametrize("name", keep(["ddp", "fsdp", "zero3_offload", "gemini"], STRATEGIES))
def test_validating_and_testing_after_fit_see_the_average_of_one_process(results: Trained, name: str) -> None:
    whole, ours = results["evaluated"], results[f"{name}:evaluated"]
    assert ours["validate"] == pytest.approx(whole["validate"], abs=1e-5)
    assert ours["test"] == pytest.approx(whole["test"], abs=1e-5)
    assert ours["test"]["test/loss"] == ours["validate"]["val/loss"]


@pytest.mark.needs("{name}:stopped", "{name}:resumed", "{name}:parity")
@pytest.mark.parametrize("name", keep(SOME, STRATEGIES))
def test_a_stopped_run_ends_on_all_ranks_and_goes_on_by_ckpt_path(results: Trained, name: str) -> None:
    stopped, resumed, plain = (results[f"{name}:{job}"] for job in ("stopped", "resumed", "parity"))
    assert stopped["checkpoint"].endswith("step-00000003")
    assert stopped["losses"] + resumed["losses"] == plain["losses"]
    assert rms(resumed["checkpoint"], plain["checkpoint"]) == 0
    assert rms(resumed["checkpoint"], plain["checkpoint"], "ema") == 0


@pytest.mark.needs("{name}:signalled", "{name}:parity")
@pytest.mark.parametrize("name", keep(["fsdp", "gemini"], SOME))
def test_a_signal_to_one_rank_stops_all_at_the_same_step(results: Trained, name: str) -> None:
    signalled, plain = results[f"{name}:signalled"], results[f"{name}:parity"]
    assert signalled["checkpoint"].endswith("step-00000004"), "one step late, so that nobody waits for a device"
    assert signalled["losses"] == plain["losses"][:4]


@pytest.mark.needs("{name}:bad_loss")
@pytest.mark.parametrize("name", keep(["fsdp", "zero3", "gemini"], SOME))
def test_no_rank_saves_while_the_loss_of_one_is_not_finite(results: Trained, name: str) -> None:
    last = Path(results[f"{name}:bad_loss"]["checkpoint"])
    assert sorted(path.name for path in last.parent.iterdir()) == [f"step-{step:08d}" for step in (1, 3, 4)]
    assert math.isfinite(rms(str(last), str(last.with_name("step-00000001"))))


@pytest.mark.needs("three", "ddp:stopped", *_changing(1, "three", Path()), *_changing(2, "ddp:stopped", Path()))
def test_another_optimizer_goes_on_alike_under_every_strategy(results: Trained) -> None:
    for step, change in enumerate(CHANGES, 4):
        ours, theirs = results[f"changed_2:{step}"], results[f"changed_1:{step}"]
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-5), change
    with ShardedTensors(Path(ours["checkpoint"]) / "state") as store:
        assert {key.partition("/")[0] for key in store.keys()} == {"master", "exp_avg", "exp_avg_sq", "ema"}
    saved = read_trainer_state(Path(ours["checkpoint"]))
    assert saved["optimizers"] == ["torch.AdamW"]
    # The last change but one started anew, the last one has kept Adam's moments.
    assert {float(entry["scalars"]["step"]) for entry in saved["parameters"].values()} == {2.0}


@pytest.mark.needs("{name}:ema_on_host", "{name}:parity")
@pytest.mark.parametrize("name", keep(["fsdp", "gemini"], SOME))
def test_an_average_in_host_memory_is_the_same(results: Trained, name: str) -> None:
    on_host, plain = results[f"{name}:ema_on_host"], results[f"{name}:parity"]
    assert on_host["losses"] == plain["losses"]
    assert rms(on_host["checkpoint"], plain["checkpoint"], "ema") == 0


@pytest.mark.needs("whole", "four:{name}")
@pytest.mark.parametrize("name", keep(["hsdp"], OF_FOUR))
def test_four_processes_train_as_one(results: Trained, name: str) -> None:
    assert results[f"four:{name}"]["losses"] == pytest.approx(results["whole"]["losses"], abs=1e-6)


@pytest.mark.needs("four:hsdp", "four:hsdp_stopped", "four:hsdp_resumed")
def test_replicas_of_shards_go_on_where_they_were_stopped(results: Trained) -> None:
    plain, stopped, resumed = (results[f"four:{job}"] for job in ("hsdp", "hsdp_stopped", "hsdp_resumed"))
    assert stopped["losses"] + resumed["losses"] == plain["losses"]
    for kind in ("master", "exp_avg", "exp_avg_sq", "ema"):
        assert rms(resumed["checkpoint"], plain["checkpoint"], kind) == 0


@pytest.mark.needs("whole", "four:hsdp_stopped", "after_four:ddp")
def test_two_processes_go_on_from_a_checkpoint_of_four(results: Trained) -> None:
    ours = results["four:hsdp_stopped"]["losses"] + results["after_four:ddp"]["losses"]
    assert ours == pytest.approx(results["whole"]["losses"], abs=1e-6)


@pytest.fixture(scope="module")
def drawn(results: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain diffusers draws with each strategy's pipeline, in a process that does not know of us."""
    trained = {"whole": results["whole"]} | {
        n: results[f"{n}:parity"] for n in STRATEGIES if f"{n}:parity" in results.cases[2]
    }
    pipelines = {name: f"{found['checkpoint']}/pipeline" for name, found in trained.items()}
    file = tmp_path_factory.mktemp("drawn") / "pixels.npz"
    subprocess.run([sys.executable, "-c", _DRAW, json.dumps(pipelines), str(file)], check=True, timeout=300)
    return dict(np.load(file))


_DRAW = """
import json, sys
import numpy as np, torch
from diffusers import DiffusionPipeline
pixels = {}
for name, folder in json.loads(sys.argv[1]).items():
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    drawn = pipeline("a handwritten four", num_inference_steps=4, guidance_scale=3.0, generator=noise, output_type="np")
    pixels[name] = drawn.images
assert "sd_lightning" not in sys.modules
np.savez(sys.argv[2], **pixels)
"""


@pytest.mark.needs("whole", "{name}:parity")
@pytest.mark.parametrize("name", STRATEGIES)
def test_plain_diffusers_draws_the_same_picture_with_every_strategys_pipeline(drawn: dict[str, Any], name: str) -> None:
    assert drawn[name].shape == (1, 32, 32, 3) and drawn[name].std() > 0.01
    assert np.abs(drawn[name] - drawn["whole"]).max() < 1 / 255


@pytest.mark.needs("gemini_auto:sampled", "gemini:sampled")
def test_gemini_places_chunks_by_itself_without_changing_a_bit(results: Trained) -> None:
    automatic, fixed = results["gemini_auto:sampled"], results["gemini:sampled"]
    assert automatic["losses"] == fixed["losses"]
    assert rms(automatic["checkpoint"], fixed["checkpoint"]) == 0
    assert rms(automatic["checkpoint"], fixed["checkpoint"], "ema") == 0
