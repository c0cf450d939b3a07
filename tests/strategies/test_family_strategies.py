"""Transformer families train alike under every strategy, on two gloo processes.

Captions of a batch, and so those of its ranks, have several lengths: Z-Image makes sequences of other lengths of them.
"""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comparing import rms
from ranks import run_jobs
from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state
from small_models import TINY_TRANSFORMERS
from strategy_table import STRATEGIES
from suites import keep, wanted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # parts of the full suite train for half an hour first

FAMILIES = TINY_TRANSFORMERS
CASES = [(family, name) for family in FAMILIES for name in STRATEGIES]
RELAYS = (
    ("fsdp", "zero3", "gemini"),
    ("zero2_offload", "gemini_offload", "ddp"),
    ("zero3_offload", "fsdp_offload", "zero1"),
    ("zero3_default", "gemini", "fsdp"),
)
"""Who goes on with whose checkpoint, two steps each, on two processes; one process begins and ends."""
STEPS = 2 * (len(RELAYS[0]) + 2)
VARIATIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"speed": {"gradient_checkpointing": True}},
    "kept": {"speed": {"gradient_checkpointing": 1.0}, "kept": ["inputs", "convolutions", "all"]},
    "two_passes": {"trainer": {"accumulate_grad_batches": 2}},
    "lora": {"lora": {"rank": 2, "alpha": 4}},
}
"""What trains as plain training does in one process, by name; adapters as adapters."""
VARIED = (
    *(("tiny_klein", "fsdp", "recomputed"), ("tiny_klein", "gemini_offload", "kept"), ("tiny_klein", "zero3", "lora")),
    *(("tiny_z_image", "zero3", "kept"), ("tiny_z_image", "gemini", "lora")),
    ("tiny_z_image", "gemini_offload", "two_passes"),
)
SWAPPED = [("tiny_klein", "gemini"), ("tiny_klein", "zero2"), ("tiny_z_image", "zero3"), ("tiny_z_image", "fsdp")]
RELAYED = [(family, RELAYS[number % len(RELAYS)]) for number, family in enumerate(FAMILIES)]
"""Each family once."""
BF16 = [("tiny_klein", "zero3"), ("tiny_z_image", "gemini")]


class Trained(dict[str, dict[str, Any]]):
    """What runs found, by name; all of a family are trained when the first of them is looked at.

    Args:
        jobs: By world size and name, which begins with the family. The worlds come one after another.
        folder: Where they are trained.
    """

    def __init__(self, jobs: dict[int, dict[str, dict[str, Any]]], folder: Path) -> None:
        super().__init__()
        self.jobs, self.folder, self.failed = jobs, folder, dict[str, AssertionError]()

    def __missing__(self, name: str) -> dict[str, Any]:
        family = name.partition(":")[0]
        if family in self.failed:
            raise self.failed[family]
        try:
            for world, jobs in self.jobs.items():
                chosen = {each: job for each, job in jobs.items() if each.startswith(f"{family}:")}
                if chosen:
                    self.update(run_jobs("strategy_jobs", chosen, self.folder, world_size=world or 1, timeout=2000))
        except AssertionError as error:
            self.failed[family] = error
            raise
        return self[name]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Everything that the chosen tests look at: on one process, on two, and what one goes on with."""
    pytest.importorskip("deepspeed")
    folder, needed = tmp_path_factory.mktemp("families"), wanted(request)
    jobs: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}, 0: {}}
    for family in FAMILIES:
        jobs[1][f"{family}:whole"] = {"steps": STEPS}
        jobs[1][f"{family}:lora"] = {"steps": 4} | VARIATIONS["lora"]
        for names in RELAYS:
            resume, run_dir = None, folder / f"{family}-relay-{names[0]}"
            for number, name in enumerate(("single", *names, "single")):
                world = {0: 1, len(names) + 1: 0}.get(number, 2)
                steps = 2 * number + 2
                leg = {"strategy": name, "steps": steps, "resume": resume, "run_dir": str(run_dir)}
                jobs[world][f"{family}:relay {names[0]}:{number}"] = leg
                resume = str(run_dir / "checkpoints" / f"step-{steps:08d}")
        for name in STRATEGIES:
            jobs[2] |= {f"{family}:{name}:{key}": {"strategy": name, "steps": 4} | o for key, o in VARIATIONS.items()}
            jobs[2][f"{family}:{name}:bf16"] = {"strategy": name, "steps": 4, "precision": "bf16-true"}
            swaps = {"sampled": {"sample_every": 2, "trainer": VALIDATING}, "plain": {}}
            jobs[2] |= {f"{family}:{name}:{key}": {"strategy": name, "steps": 4} | o for key, o in swaps.items()}
    chosen = {
        world: {
            name: {"do": "save", "strategy": "single", "devices": world or 1, "save_at": 0}
            | {"family": name.partition(":")[0], "run_dir": str(folder / name.replace(":", "-"))}
            | job
            for name, job in named.items()
            if name in needed
        }
        for world, named in jobs.items()
    }
    return Trained(chosen, folder)


VALIDATING = {"limit_val_batches": 1, "val_check_interval": 2}
_LEGS = [f"{{family}}:relay {{names[0]}}:{number}" for number in range(len(RELAYS[0]) + 2)]


@pytest.mark.needs("{family}:whole", *_LEGS)
@pytest.mark.holds("strategies")
@pytest.mark.parametrize(("family", "names"), keep(RELAYED, itertools.product(FAMILIES, RELAYS)))
def test_a_run_goes_from_one_strategy_to_the_next_as_if_one_process_trained(
    results: dict[str, dict[str, Any]], family: str, names: tuple[str, ...]
) -> None:
    legs = [results[name.format(family=family, names=names)] for name in _LEGS]
    whole = results[f"{family}:whole"]
    for number, name in enumerate(("single", *names, "single")):
        expected = whole["losses"][2 * number : 2 * number + 2]
        assert legs[number]["losses"] == pytest.approx(expected, abs=2e-6), name
    for kind in ("master", "exp_avg", "ema"):
        assert 0 < rms(legs[-1]["checkpoint"], whole["checkpoint"], kind) <= 1e-6, kind
    ours, theirs = (read_trainer_state(Path(found["checkpoint"])) for found in (legs[-1], whole))
    assert {float(entry["scalars"]["step"]) for entry in ours["parameters"].values()} == {STEPS}
    assert ours["callbacks"] == theirs["callbacks"], "the average has counted other updates"


@pytest.mark.needs("{family}:{name}:sampled", "{family}:{name}:plain", "{family}:whole")
@pytest.mark.holds("strategies")
@pytest.mark.parametrize(("family", "name"), keep(SWAPPED, CASES))
def test_drawing_and_validating_with_the_average_change_no_bit_of_the_training(
    results: dict[str, dict[str, Any]], family: str, name: str
) -> None:
    sampled, plain = (results[f"{family}:{name}:{key}"] for key in ("sampled", "plain"))
    assert plain["losses"] == pytest.approx(results[f"{family}:whole"]["losses"][:4], abs=1e-6)
    assert sampled["losses"] == plain["losses"]
    assert (
        rms(sampled["checkpoint"], plain["checkpoint"]) == rms(sampled["checkpoint"], plain["checkpoint"], "ema") == 0
    )
    assert "val/caption_gap" in sampled["metrics"]


@pytest.mark.holds("strategies")
@pytest.mark.needs("{family}:{name}:{variation}", "{family}:whole", "{family}:lora")
@pytest.mark.parametrize(
    ("family", "name", "variation"),
    keep(VARIED, [(*case, variation) for case in CASES for variation in VARIATIONS], "engines"),
)
def test_variations_of_training_are_those_of_one_process(
    results: dict[str, dict[str, Any]], family: str, name: str, variation: str
) -> None:
    whole = results[f"{family}:{'lora' if variation == 'lora' else 'whole'}"]["losses"][:4]
    ours = results[f"{family}:{name}:{variation}"]["losses"]
    passes = VARIATIONS[variation].get("trainer", {}).get("accumulate_grad_batches", 1)
    assert ours[passes - 1 :: passes] == pytest.approx(whole, abs=2e-6), "the mean over a step's passes"


@pytest.mark.needs("{family}:{name}:bf16", "{family}:whole")
@pytest.mark.parametrize(("family", "name"), keep(BF16, CASES, "engines"))
def test_bfloat16_stays_near_float32(results: dict[str, dict[str, Any]], family: str, name: str) -> None:
    ours, whole = results[f"{family}:{name}:bf16"]["losses"], results[f"{family}:whole"]["losses"][:4]
    assert ours == pytest.approx(whole, rel=2e-2)
    assert ours != whole


_LOADS = """
import sys
from diffusers import DiffusionPipeline
for folder in sys.argv[1:]:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(prompt="a handwritten four", num_inference_steps=2, height=32, width=32).images
    assert images[0].size == (32, 32), folder
assert "sd_lightning" not in sys.modules
"""


@pytest.mark.needs(*(f"{family}:{name}:sampled" for family, name in SWAPPED))
def test_plain_diffusers_draws_with_the_exported_pipelines(results: dict[str, dict[str, Any]]) -> None:
    runs = [results[f"{family}:{name}:sampled"] for family, name in SWAPPED]
    folders = [str(Path(run["checkpoint"]) / "pipeline") for run in runs]
    done = subprocess.run([sys.executable, "-c", _LOADS, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
