"""Pre-training in two phases: small pictures from random weights, then larger ones from the first phase's result."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composing import Compose
from sd_lightning import LatentDiffusion, precompute, train
from sd_lightning.models.latent_diffusion import load_model

Call = Callable[..., tuple[int, str]]
SHORT = ("trainer.max_steps=3", "trainer.limit_val_batches=0", "callbacks.samples=null", "logger=csv")
UNCHANGED = ("optimizer.lr=0", "trainer.max_steps=1")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    LatentDiffusion.build("tiny", seed=5).save_pretrained(folder)
    return folder


def weights(folder: str | Path) -> dict[str, dict[str, Tensor]]:
    model = LatentDiffusion.from_pretrained(folder)
    return {name: network.state_dict() for name, network in model.networks.items()}


def differing(ours: dict[str, dict[str, Tensor]], theirs: dict[str, dict[str, Tensor]]) -> set[str]:
    """Names of the networks that have other weights."""
    assert ours.keys() == theirs.keys()
    return {name for name in ours if any(not torch.equal(ours[name][key], theirs[name][key]) for key in ours[name])}


def run(call_main: Call, phase: str, *arguments: str) -> None:
    """Train one phase on its store: "16" or "32"."""
    code, out = call_main(train, f"experiment=tiny_pretrain_{phase}", f"data.store=latents-{phase}", *arguments)
    assert code == 0, out


@pytest.fixture
def stores(call_main: Call) -> None:
    """Stores of both phases, `latents-16` and `latents-32`, in the folder where the programs run."""
    for size in ("16", "32"):
        code, out = call_main(
            precompute, "data=digits", f"data.resolution={size}", f"store=latents-{size}", "workers=1"
        )
        assert code == 0, out


def sizes(run_dir: str) -> set[tuple[int, ...]]:
    """Shapes of the pictures that a run's data give."""
    from omegaconf import OmegaConf

    from sd_lightning import _conf

    cfg: Any = OmegaConf.load(f"{run_dir}/config.yaml")
    data = _conf.instantiate(cfg.data)
    return {(data.images.resolution, cfg.sampling.height, cfg.sampling.width)}


@pytest.mark.usefixtures("stores")
def test_the_second_phase_starts_where_the_first_has_ended(call_main: Call) -> None:
    run(call_main, "16", *SHORT)
    first = weights("runs/tiny-16/pipeline")
    assert differing(first, weights_of_start()) == {"unet"}, "text encoder and VAE stay frozen"
    run(call_main, "32", *SHORT, *UNCHANGED)
    assert not differing(first, weights("runs/tiny-32/pipeline"))
    assert (sizes("runs/tiny-16"), sizes("runs/tiny-32")) == ({(16, 16, 16)}, {(32, 32, 32)})
    run(call_main, "32", *SHORT, "name=trained", "callbacks.ema.update_after_step=1")
    assert differing(first, weights("runs/trained/pipeline")) == {"unet"}


def weights_of_start() -> dict[str, dict[str, Tensor]]:
    return {name: network.state_dict() for name, network in LatentDiffusion.build("tiny").networks.items()}


def test_a_fresh_denoiser_depends_on_the_seed_and_the_encoders_on_the_file(pretrained: Path) -> None:
    def load(seed: int, deferred: tuple[str, ...] = ()) -> LatentDiffusion:
        state = torch.random.get_rng_state()
        model = load_model(
            architecture="tiny", pretrained=str(pretrained), fresh_denoiser=True, seed=seed, deferred=deferred
        )
        assert torch.equal(torch.random.get_rng_state(), state), "the global generator is untouched"
        return model

    def states(model: LatentDiffusion) -> dict[str, dict[str, Tensor]]:
        return {name: network.state_dict() for name, network in model.networks.items()}

    file, one, deferred = weights(pretrained), load(1), load(1, ("denoiser", "text_encoder"))
    assert differing(states(one), file) == {"unet"}
    assert differing(states(one), states(load(2))) == {"unet"}
    assert one.components == load_model(architecture="tiny", pretrained=str(pretrained)).components
    assert deferred.deferred.keys() == {"text_encoder"}, "there is nothing to read for the denoiser"
    deferred.read_deferred("cpu")
    assert not differing(states(deferred), states(one))
    large = [key for key, value in file["unet"].items() if value.numel() > 1000]
    fresh, other = ([float(each["unet"][key].std()) for key in large] for each in (states(one), file))
    assert fresh == pytest.approx(other, rel=0.1), "initialised as a model that is built"


@pytest.mark.usefixtures("stores")
def test_a_run_from_a_fresh_denoiser_keeps_the_pretrained_encoders(call_main: Call, pretrained: Path) -> None:
    arguments = ("16", f"model.pretrained={pretrained}", "model.fresh_denoiser=true", "seed=7")
    run(call_main, *arguments, *SHORT, *UNCHANGED)
    expected = load_model(architecture="tiny", pretrained=str(pretrained), fresh_denoiser=True, seed=7)
    fresh = {name: network.state_dict() for name, network in expected.networks.items()}
    assert not differing(weights("runs/tiny-16/pipeline"), fresh)
    run(call_main, *arguments, *SHORT, "resume=auto")
    assert differing(weights("runs/tiny-16/pipeline"), fresh) == {"unet"}, "a resumed run goes on"


def test_the_figures_are_the_published_ones(compose: Compose) -> None:
    """Images per phase and images from which weights are averaged: README of mosaicml/diffusion and its blog post."""
    phases = [
        compose("train", f"experiment=sd2_pretrain_{size}", "data.store=x", *more)
        for size, more in (("256", ("model.pretrained=x",)), ("512", ()))
    ]
    images = [cfg.trainer.max_steps * cfg.data.batch_size for cfg in phases]
    assert images == [1_126_400_000, 1_740_800_000]
    averaged = phases[1].trainer.max_steps - phases[1].callbacks.ema.update_after_step
    steps = sum(cfg.trainer.max_steps for cfg in phases)
    assert phases[0].callbacks.ema is None and averaged / steps == pytest.approx(0.035, abs=0.001)
    assert [(cfg.model.fresh_denoiser, cfg.init_from, cfg.output_dir) for cfg in phases] == [
        (True, None, "runs/sd2-256"),
        (False, "runs/sd2-256", "runs/sd2-512"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("stores")
def test_the_second_phase_learns_faster_than_from_random_weights(call_main: Call) -> None:
    def loss(name: str) -> float:
        rows = list(csv.DictReader(next(Path("runs", name).rglob("metrics.csv")).open()))
        return [float(row["val/loss"]) for row in rows if row.get("val/loss")][-1]

    short = ("trainer.max_steps=30", "callbacks.samples=null", "logger=csv")
    run(call_main, "16", "callbacks.samples=null", "logger=csv")
    run(call_main, "32", *short)
    run(call_main, "32", *short, "init_from=null", "name=alone")
    assert loss("tiny-32") < 0.95 * loss("alone"), (loss("tiny-32"), loss("alone"))
