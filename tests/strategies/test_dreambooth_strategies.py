"""DreamBooth, of all weights and of adapters, trains alike under every strategy, and goes on under another one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glyph import glyphs, write_photos
from ranks import run_jobs
from sd_lightning.data.sources.dreambooth import class_folder
from sd_lightning.models.lora import WEIGHTS_NAME
from suites import keep, wanted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STRATEGIES = ("ddp", "fsdp", "zero2", "gemini")
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 2, "alpha": 4}},
    "merged": {"lora": {"rank": 2, "alpha": 4, "merge": True}},
    "texts": {"lora": {"rank": 2, "alpha": 4, "target_modules": []}},
    "loha": {"lora": {"type": "loha", "rank": 2, "alpha": 4}},
    "lokr": {"lora": {"type": "lokr", "rank": 2, "alpha": 4, "merge": True}},
    "token": {"token": "S*"},
    "preserved": {
        "lora": {"rank": 2, "alpha": 4},
        "preservation": {"prompts": ["a handwritten six", ""], "weight": 100.0},
    },
}
FIRST = ("fsdp:token", "fsdp:full", "fsdp:merged", "zero2:merged", "zero2:lora")
FIRST += ("fsdp:texts", "gemini:texts", "gemini:full", "gemini:lora", "gemini:token")
FIRST += ("fsdp:preserved", "gemini:preserved", "fsdp:loha")
PROMPTS = ["a handwritten digit", "a handwritten two"]
RESUMED = {"zero2": "gemini", "gemini": "fsdp", "fsdp": "zero2", "ddp": "gemini"}
"""Who goes on with whose adapters."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train everything that the chosen tests look at, in one set of processes per world size."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("dreambooth")
    write_photos(folder / "photos")
    for prompt, seed in zip(PROMPTS, (5, 6)):
        pictures = class_folder(folder / "pictures", prompt, PROMPTS)
        pictures.mkdir(parents=True)
        for i, image in enumerate(glyphs(3, seed=seed)):
            image.save(pictures / f"{i}.png")
    data = {
        "instance_data_dir": str(folder / "photos"),
        "instance_prompt": "a handwritten S* digit",
        "class_data_dir": str(folder / "pictures"),
        "class_prompts": PROMPTS,
        "num_class_images": 6,
        "prior_loss_weight": 0.5,
        "batch_size": 4,
        "resolution": 32,
    }
    found: dict[str, dict[str, Any]] = {}
    for world, names in ((1, ("single",)), (2, STRATEGIES)):
        jobs: dict[str, dict[str, Any]] = {
            f"{name}:{kind}": {"strategy": name, "steps": 3} | options
            for kind, options in KINDS.items()
            for name in names
        }
        if world == 2:
            jobs |= {
                f"{name}:resumed": {"strategy": other, "steps": 6, "resume": _checkpoint(folder, f"{name}:lora", 3)}
                | KINDS["lora"]
                for name, other in RESUMED.items()
            }
        else:
            jobs["single:resumed"] = {"strategy": "single", "steps": 6} | KINDS["lora"]
        jobs = {name: job for name, job in jobs.items() if name in wanted(request)}
        common = {"do": "save", "devices": world, "save_at": 0, "dreambooth": data}
        full = {name: common | {"run_dir": str(folder / name)} | job for name, job in jobs.items()}
        found |= run_jobs("strategy_jobs", full, folder, world_size=world, timeout=900)
    return found


def _checkpoint(folder: Path, name: str, step: int) -> str:
    return str(folder / name / "checkpoints" / f"step-{step:08d}")


def exported(results: dict[str, dict[str, Any]], name: str, file: str) -> dict[str, torch.Tensor]:
    return load_file(Path(results[name]["checkpoint"]) / "pipeline" / file)


@pytest.mark.needs(*(f"single:{kind}" for kind in KINDS), "{case}")
@pytest.mark.parametrize("case", keep(FIRST, [f"{name}:{kind}" for name in STRATEGIES for kind in KINDS]))
def test_losses_and_exported_weights_are_those_of_one_process(results: dict[str, dict[str, Any]], case: str) -> None:
    name, kind = case.split(":")
    ours, single = results[f"{name}:{kind}"], results[f"single:{kind}"]
    assert ours["losses"] == pytest.approx(single["losses"], abs=1e-6)
    has_adapters = kind not in ("full", "merged", "token", "lokr")
    file = WEIGHTS_NAME if has_adapters else "unet/diffusion_pytorch_model.safetensors"
    mine, theirs = exported(results, f"{name}:{kind}", file), exported(results, f"single:{kind}", file)
    assert mine.keys() == theirs.keys()
    assert (Path(ours["checkpoint"]) / "pipeline" / WEIGHTS_NAME).exists() == has_adapters
    assert kind != "texts" or all(key.startswith("text_encoder.") for key in mine)
    # Adam turns rounding where a gradient is almost zero into steps of up to the learning rate, 3e-4.
    errors = torch.cat([(mine[key] - theirs[key]).flatten() for key in mine])
    assert errors.square().mean().sqrt() < 2e-6 and errors.abs().max() < 1e-3


@pytest.mark.needs("single:lora", "single:token", "{name}:token")
@pytest.mark.parametrize("name", keep(["fsdp", "gemini"], STRATEGIES))
def test_a_learned_word_is_that_of_one_process_and_no_other_word_changes(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    key = "text_model.embeddings.token_embedding.weight"
    mine, theirs = (exported(results, f"{n}:token", "text_encoder/model.safetensors")[key] for n in (name, "single"))
    before = exported(results, "single:lora", "text_encoder/model.safetensors")[key]
    assert torch.equal(mine[:-1], before) and not torch.equal(mine[-1], before.mean(0))
    assert torch.allclose(mine[-1], theirs[-1], atol=1e-5)


@pytest.mark.needs("single:resumed", "single:lora", "{name}:lora", "{name}:resumed")
@pytest.mark.parametrize("name", keep(["zero2", "gemini"], STRATEGIES))
def test_adapters_saved_under_one_strategy_go_on_under_another(results: dict[str, dict[str, Any]], name: str) -> None:
    whole, first, rest = results["single:resumed"], results[f"{name}:lora"], results[f"{name}:resumed"]
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    base = "unet/diffusion_pytorch_model.safetensors"
    mine, theirs = exported(results, f"{name}:resumed", base), exported(results, "single:lora", base)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs), "what is not trained is not changed"
