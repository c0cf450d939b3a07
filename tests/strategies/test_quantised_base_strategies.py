"""Adapters on a quantised base train alike under every strategy, which leaves the base as it is, on two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import run_jobs
from sd_lightning import LatentDiffusion
from sd_lightning.models.lora import WEIGHTS_NAME
from small_models import few_blocks, for_ragged_captions
from strategy_table import STRATEGIES
from suites import keep, wanted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BASES: dict[str, dict[str, Any]] = {
    "int8": {"base": "int8", "use_dora": True},
    "nf4": {"base": "nf4"},
    "dora": {"use_dora": True},
    "nf4_dora_merged": {"base": "nf4", "use_dora": True, "merge": True},
}
FAMILIES = {"unet": lambda: few_blocks(seed=1), "tiny_klein": lambda: for_ragged_captions("tiny_klein", seed=1)}
CASES = [(family, name, base) for family in FAMILIES for name in STRATEGIES for base in BASES]
FIRST = [
    *(("unet", "fsdp", "dora"), ("unet", "gemini_offload", "dora")),
    *(("unet", "ddp", "int8"), ("unet", "fsdp", "nf4_dora_merged"), ("unet", "gemini_offload", "nf4")),
    *(("tiny_klein", "zero3", "nf4_dora_merged"), ("tiny_klein", "zero1", "nf4"), ("tiny_klein", "gemini", "int8")),
    ("tiny_klein", "fsdp_offload", "int8"),
]
BF16 = [
    ("unet", "gemini", "nf4"),
    ("tiny_klein", "fsdp", "int8"),
    ("tiny_klein", "zero3", "nf4"),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the chosen tests look at, and the folders of the pipelines."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("bases")
    found: dict[str, dict[str, Any]] = {}
    for family, build in FAMILIES.items():
        build().save_pretrained(folder / family)
        found[family] = {"folder": folder / family}
    for world, names in ((1, ("single",)), (2, STRATEGIES)):
        jobs = {}
        for family in FAMILIES:
            for name in names:
                for base, lora in BASES.items():
                    job = {"lora": {"rank": 2, "alpha": 4} | lora, "strategy": name, "steps": 3}
                    jobs[f"{family}:{name}:{base}"] = job
                    jobs[f"{family}:{name}:{base}:bf16"] = job | {"precision": "bf16-true"}
                    jobs[f"{family}:{name}:{base}:on"] = job | {
                        "steps": 5, "resume": str(folder / f"{family}-single-{base}" / "checkpoints/step-00000003")
                    }  # fmt: skip
                jobs[f"{family}:{name}:whole"] = job | {"steps": 5, "lora": {"rank": 2, "alpha": 4, "base": "nf4"}}
        common = {"do": "save", "devices": world, "save_at": 0, "sample_every": 2}
        full = {
            key: common | {"run_dir": str(folder / key.replace(":", "-"))} | job
            | {"pretrained": str(folder / key.partition(":")[0])}
            for key, job in jobs.items()
            if key in wanted(request)
        }  # fmt: skip
        found |= run_jobs("strategy_jobs", full, folder, world_size=world, timeout=1500)
    return found


@pytest.mark.needs("{family}:single:{base}", "{family}:{name}:{base}")
@pytest.mark.parametrize(("family", "name", "base"), keep(FIRST, CASES))
def test_losses_and_files_are_those_of_one_process(
    results: dict[str, dict[str, Any]], family: str, name: str, base: str
) -> None:
    single, ours = results[f"{family}:single:{base}"], results[f"{family}:{name}:{base}"]
    assert ours["losses"] == pytest.approx(single["losses"], abs=2e-6)
    assert single["losses"][0] != single["losses"][-1]
    before = LatentDiffusion.from_pretrained(results[family]["folder"]).denoiser.state_dict()
    pipeline = Path(ours["checkpoint"]) / "pipeline"
    file = pipeline / ("unet" if family == "unet" else "transformer") / "diffusion_pytorch_model.safetensors"
    written = load_file(file)
    assert written.keys() == before.keys(), "the file is whole, and nothing in it is quantised"
    changed = [key for key in before if not torch.equal(written[key], before[key])]
    assert bool(changed) == ("merged" in base), "the original weights, with adapters only where they are merged"
    if "merged" in base:
        theirs = load_file(Path(single["checkpoint"]) / file.relative_to(Path(ours["checkpoint"])))
        assert all((written[key] - theirs[key]).abs().max() < 1e-3 for key in theirs)
    else:
        mine, theirs = (load_file(Path(each["checkpoint"]) / "pipeline" / WEIGHTS_NAME) for each in (ours, single))
        assert mine.keys() == theirs.keys()
        errors = torch.cat([(mine[key] - theirs[key]).flatten() for key in mine])
        assert errors.square().mean().sqrt() < 2e-6 and errors.abs().max() < 1e-3


@pytest.mark.needs("{family}:single:{base}:bf16", "{family}:{name}:{base}:bf16")
@pytest.mark.parametrize(("family", "name", "base"), BF16)
def test_half_precision_trains_on_it(results: dict[str, dict[str, Any]], family: str, name: str, base: str) -> None:
    single, ours = results[f"{family}:single:{base}:bf16"], results[f"{family}:{name}:{base}:bf16"]
    assert ours["losses"] == pytest.approx(single["losses"], rel=2e-2)


@pytest.mark.needs("unet:single:nf4", "unet:single:whole", "unet:{name}:nf4:on")
@pytest.mark.parametrize("name", keep(["zero3"], STRATEGIES))
def test_a_run_goes_on_under_another_strategy(results: dict[str, dict[str, Any]], name: str) -> None:
    first, rest = results["unet:single:nf4"], results[f"unet:{name}:nf4:on"]
    assert first["losses"] + rest["losses"] == pytest.approx(results["unet:single:whole"]["losses"], abs=2e-6)
