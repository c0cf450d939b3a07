"""SDLightningModule: in a plain trainer, against hand-written formulas, and the same on any number of processes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, DiffusionPipeline
from diffusers.training_utils import compute_snr
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import small_training
from ranks import run_program
from sd_lightning import LatentDiffusion, Objective, SamplingOptions, SDDataModule, SDLightningModule
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import PortableCheckpoint
from sd_lightning.diffusion.randomness import Purpose, normal, uniform
from sd_lightning.report import read_metrics
from sd_lightning.strategies.presets import PRESETS
from small_models import SMALL_SDXL, few_blocks

SEED = 3  # of small_training.module


def largest_difference(ours: list[Image.Image], theirs: list[Image.Image]) -> int:
    """The largest difference of two lists of pictures, in steps of 1/255."""
    pairs = zip(ours, theirs, strict=True)
    return max(int(np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def notebook() -> tuple[pl.Trainer, SDLightningModule, dict[str, Tensor]]:
    """The run of a notebook's first cells, and the weights before it."""
    module = SDLightningModule(LatentDiffusion.build("tiny"), train_text_encoder=True)
    before = small_training.weights(module)
    small = small_training.data()
    data = SDDataModule(small.source_train, small.source_val, batch_size=8, images=small.images)
    trainer = pl.Trainer(max_steps=7, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, data)
    return trainer, module, before


def test_plain_trainer_trains_and_validates(
    notebook: tuple[pl.Trainer, SDLightningModule, dict[str, Tensor]],
) -> None:
    trainer, module, before = notebook
    assert trainer.global_step == 7
    assert all(torch.isfinite(p).all() for p in module.parameters())
    unchanged = [name for name, value in small_training.weights(module).items() if torch.equal(value, before[name])]
    assert not unchanged
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics.keys() == {"train/loss", "train/lr", "val/loss", "val/caption_gap"}
    assert 0 < metrics["train/loss"] < 10 and 0 < metrics["val/loss"] < 10
    assert metrics["val/caption_gap"] != 0
    assert float(module.last_loss) == metrics["train/loss"]  # type: ignore[arg-type]


def test_module_samples_and_gives_its_pipeline_after_fit(
    notebook: tuple[pl.Trainer, SDLightningModule, dict[str, Tensor]],
) -> None:
    _, module, _ = notebook
    (picture,) = module.sample("a handwritten three", seed=4, num_inference_steps=2, guidance_scale=3)
    pipeline: Any = module.latent_diffusion.pipeline()
    theirs = pipeline(
        "a handwritten three", num_inference_steps=2, guidance_scale=3, generator=torch.Generator().manual_seed(4)
    ).images
    assert largest_difference([picture], theirs) <= 1


Formula = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""(latents, noise, uniform numbers in [0, 1)) -> noisy latents, timesteps, target, weight of each sample."""


class HandWritten(Callback):
    """Computes the loss of every batch as diffusers' train_text_to_image.py does, before the module does."""

    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self.expected: list[Tensor] = []
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        key = (SEED, batch["epoch"], batch["index"])
        noise, fractions = normal(*key, Purpose.NOISE, (4, 8, 8)), uniform(*key, Purpose.TIMESTEP)
        noisy, timesteps, target, weights = self.formula(batch["latents"], noise, fractions)
        hidden = pl_module.text_encoder(batch["input_ids"]["text_encoder"])[0]
        prediction = pl_module.unet(noisy, timesteps, hidden).sample
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        self.expected.append((losses * weights).mean())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(pl_module.last_loss)


def ddpm(prediction_type: str, snr_gamma: float | None = None) -> Formula:
    config = LatentDiffusion.build("tiny", device="meta").scheduler_config
    betas = {k: config[k] for k in ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")}
    scheduler = DDPMScheduler(**betas, prediction_type=prediction_type)

    def formula(latents: Tensor, noise: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        timesteps = (fractions * 1000).long()
        targets = {"epsilon": noise, "sample": latents}
        target = targets.get(prediction_type, scheduler.get_velocity(latents, noise, timesteps))
        weights = torch.ones(len(latents))
        if snr_gamma is not None:
            snr = compute_snr(scheduler, timesteps)
            weights = snr.clamp(max=snr_gamma) / (snr if prediction_type == "epsilon" else snr + 1)
        return scheduler.add_noise(latents, noise, timesteps), timesteps, target, weights

    return formula


def flow(latents: Tensor, noise: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sigmas = fractions.view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * latents + sigmas * noise
    return noisy, (fractions * 1000).long(), noise - latents, torch.ones(len(latents))


@pytest.mark.parametrize(
    ("objective", "callback"),
    [
        (Objective(prediction_type="epsilon"), HandWritten(ddpm("epsilon"))),
        (Objective(prediction_type="epsilon", snr_gamma=5.0), HandWritten(ddpm("epsilon", 5.0))),
        (Objective(), HandWritten(ddpm("v_prediction"))),  # what the tiny model's own scheduler says
        (Objective(prediction_type="v_prediction", snr_gamma=5.0), HandWritten(ddpm("v_prediction", 5.0))),
        (Objective(prediction_type="sample"), HandWritten(ddpm("sample"))),
        (Objective(prediction_type="flow", weighting_scheme="none"), HandWritten(flow)),
    ],
    ids=["epsilon", "epsilon-snr", "auto", "v-snr", "sample", "flow"],
)
def test_loss_equals_the_formula_of_diffusers_on_the_same_noise(objective: Objective, callback: HandWritten) -> None:
    module = small_training.module(objective=objective)
    small_training.fit(module, small_training.data(cache_latents=False), 2, callback)
    assert len(callback.losses) == 2
    torch.testing.assert_close(torch.stack(callback.losses), torch.stack(callback.expected), rtol=2e-5, atol=0)


def test_caption_gap_is_the_loss_with_wrong_captions_minus_that_with_the_right_ones() -> None:
    gaps = []

    class Expect(Callback):
        def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
            key = (SEED, batch["epoch"], batch["index"])
            noise = normal(*key, Purpose.NOISE, (4, 8, 8))
            fractions = 0.5 + uniform(*key, Purpose.TIMESTEP) / 2  # the noisier half
            noisy, timesteps, target, _ = ddpm("v_prediction")(batch["latents"], noise, fractions)
            losses = [
                F.mse_loss(
                    pl_module.unet(noisy, timesteps, pl_module.text_encoder(ids["text_encoder"])[0]).sample, target
                )
                for ids in (batch["input_ids"], batch["wrong_input_ids"])
            ]
            gaps.append(losses[1] - losses[0])

    module = small_training.module()
    options = {"limit_val_batches": 2, "val_check_interval": 2}
    trainer = small_training.fit(module, small_training.data(), 2, Expect(), **options)
    assert len(gaps) == 2
    assert trainer.callback_metrics["val/caption_gap"].item() == pytest.approx(float(sum(gaps)) / 2, rel=0.02)


def test_caption_gap_of_a_model_that_ignores_its_prompt_is_zero() -> None:
    module = small_training.module()
    for name, parameter in module.unet.named_parameters():
        if "attn2.to_v" in name:
            torch.nn.init.zeros_(parameter)
    trainer = small_training.trainer_of(1, limit_val_batches=2)
    trainer.validate(module, small_training.data(), verbose=False)
    assert trainer.callback_metrics["val/caption_gap"].item() == 0
    assert trainer.callback_metrics["val/loss"].item() > 0


def test_what_an_engine_does_not_move_comes_to_the_device_beside_it() -> None:
    """FSDP2 with offloading and ZeRO-3 from files keep weights elsewhere and never call ``Module.to()``."""
    module = small_training.module(train_text_encoder=True)
    device = torch.device("meta")  # any other one than the CPU
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=device))  # type: ignore[assignment]
    module.on_fit_start()
    assert module.device == device == module.encoder.device
    assert {buffer.device for buffer in module.buffers()} == {device}
    assert module.schedule.alphas_cumprod.device == device
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_accumulation_that_changes_during_a_fit_is_refused() -> None:
    for schedule in ({0: 4}, {0: 1, 1: 2}):
        callback = GradientAccumulationScheduler(schedule)
        message = f"became {max(schedule.values())} during the fit, which began with 1: data.batch_size=8 is the global"
        with pytest.raises(UsageError, match=message):
            small_training.fit(small_training.module(), small_training.data(), 7, callback)


class _Monitor(Callback):
    """Reads a metric after every step, as ModelCheckpoint and EarlyStopping do."""

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append((float(trainer.callback_metrics.get("train/loss", 0)), float(pl_module.last_loss)))


@pytest.mark.parametrize(("monitor", "fresh"), [("train/loss", 4), ("val/loss", 1), (None, 1)])
def test_a_callback_that_monitors_the_training_loss_sees_that_of_its_step(monitor: str | None, fresh: int) -> None:
    callback = _Monitor(monitor)
    small_training.fit(small_training.module(), small_training.data(), 4, callback, log_every_n_steps=50)
    assert sum(seen == loss for seen, loss in callback.seen) == fresh


def test_text_encoder_has_its_own_learning_rate() -> None:
    module = small_training.module(text_encoder_lr=5e-6)
    small_training.fit(module, small_training.data(), 1)
    unet, text_encoder = module.trainer.optimizers[0].param_groups
    assert (unet["lr"], text_encoder["lr"]) == (2e-3, 5e-6)
    for group, network in ((unet, module.unet), (text_encoder, module.latent_diffusion.text_encoders["text_encoder"])):
        assert {id(p) for p in group["params"]} == {id(p) for p in network.parameters()}
    same = small_training.module()
    small_training.fit(same, small_training.data(), 1)
    assert [group["lr"] for group in same.trainer.optimizers[0].param_groups] == [2e-3, 2e-3]


def test_learning_rate_of_a_frozen_text_encoder_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="got text_encoder_lr=1e-06 but the text encoder is frozen; set train_text"):
        SDLightningModule(LatentDiffusion.build("tiny", device="meta"), text_encoder_lr=1e-6)


@pytest.mark.parametrize("architecture", ["tiny", SMALL_SDXL], ids=["sd", "sdxl"])
@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_every_trained_parameter_gets_a_gradient(architecture: Any, train_text_encoder: bool) -> None:
    module = SDLightningModule(LatentDiffusion.build(architecture), train_text_encoder=train_text_encoder)
    trainer = small_training.fit(module, small_training.data(), 1)
    optimizer = trainer.optimizers[0]
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(optimizer.state) == len(trained) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert all(optimizer.state[p]["exp_avg"].any() for p in trained)


@pytest.mark.holds("full")
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample", "flow"])
@pytest.mark.parametrize("architecture", ["tiny", SMALL_SDXL], ids=["sd", "sdxl"])
def test_each_objective_trains_and_its_export_samples_alike_in_plain_diffusers(
    architecture: Any, prediction_type: Any, tmp_path: Path
) -> None:
    module = SDLightningModule(LatentDiffusion.build(architecture), objective=Objective(prediction_type))
    before = small_training.weights(module)
    trainer = small_training.fit(module, small_training.data(), 1, limit_val_batches=1, val_check_interval=1)
    assert not small_training.same(small_training.weights(module), before)
    assert torch.isfinite(trainer.callback_metrics["val/caption_gap"])
    ours = module.sample(["a handwritten three", "two"], seed=8, num_inference_steps=3, guidance_scale=2)
    module.latent_diffusion.save_pretrained(tmp_path)
    pipeline: Any = DiffusionPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    expected = {"flow": "flow_prediction"}.get(prediction_type, prediction_type)
    assert pipeline.scheduler.config.prediction_type == expected
    theirs = pipeline(
        ["a handwritten three", "two"], num_inference_steps=3, guidance_scale=2,
        generator=[torch.Generator().manual_seed(seed) for seed in (8, 9)],
    ).images  # fmt: skip
    assert largest_difference(ours, theirs) <= 1
    assert largest_difference(ours[:1], ours[1:]) > 1


PROMPTS = [f"a handwritten {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]


@pytest.fixture(scope="module")
def sampler() -> SDLightningModule:
    """A model that has learnt a little, so that its pictures are not saturated noise."""
    module = small_training.module()
    small_training.fit(module, small_training.data(), 20)
    return module


def test_pictures_do_not_depend_on_the_batch_they_are_drawn_in(sampler: SDLightningModule) -> None:
    drawn = {n: sampler.sample(PROMPTS, seed=1, num_inference_steps=3, batch_size=n) for n in (1, 3, 8)}
    assert all(isinstance(image, Image.Image) and image.size == (32, 32) for image in drawn[8])
    for n in (3, 8):
        assert largest_difference(drawn[1], drawn[n]) <= 1
    assert largest_difference(drawn[1][:1], drawn[1][1:2]) > 1


def test_sampling_is_a_function_of_prompt_and_seed(sampler: SDLightningModule) -> None:
    def sample(prompts: str | list[str], **options: Any) -> list[Image.Image]:
        return sampler.sample(prompts, num_inference_steps=3, **options)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(PROMPTS[:3], seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert largest_difference(sample(PROMPTS[:3], seed=5), first) == 0
    assert largest_difference(sample(PROMPTS[1], seed=6), first[1:2]) <= 1  # seeds count up
    assert largest_difference(sample(PROMPTS[:3], seed=6), first) > 1
    assert sample([]) == []


def test_sampling_leaves_the_module_as_it_was(sampler: SDLightningModule) -> None:
    before = {name: (p.dtype, p.requires_grad) for name, p in sampler.named_parameters()}
    modes = {name: network.training for name, network in sampler.latent_diffusion.networks.items()}
    sampler.sample("a handwritten one", num_inference_steps=1)
    assert {name: (p.dtype, p.requires_grad) for name, p in sampler.named_parameters()} == before
    assert {name: network.training for name, network in sampler.latent_diffusion.networks.items()} == modes
    assert modes["unet"] and not modes["vae"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "sample got steps; expected only num_inference_steps, guidance_scale, scheduler, batch_size"),
        ({"options": SamplingOptions(), "batch_size": 2}, "sample got both options= and batch_size; give one"),
        ({"num_inference_steps": 0}, "sampling got num_inference_steps=0; expected at least 1"),
        ({"guidance_scale": -1}, "sampling got guidance_scale=-1; expected at least 0"),
        ({"scheduler": "heunn"}, "scheduler=heunn: diffusers has no such scheduler; expected ddim"),
    ],
)
def test_sampling_mistakes_are_told(sampler: SDLightningModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        sampler.sample("a handwritten one", **options)
    assert message in str(error.value)


QUICK = [
    "data.batch_size=16", "data.cache_latents=false", "trainer.max_steps=4", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1", "trainer.val_check_interval=4", "trainer.limit_val_batches=1.0",
    "data.val_batch_size=180", "sampling.num_inference_steps=1", "callbacks.samples.columns=2",
    "callbacks.samples.every_n_steps=0", "callbacks.samples.accuracy_samples=0", "logger=csv",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param("sd", ["trainer.devices=2"], id="sd", marks=pytest.mark.full("engines")),
        pytest.param("sdxl", ["trainer.devices=2", "trainer.accumulate_grad_batches=2"], id="sdxl-accumulate"),
    ],
)
def test_ddp_on_two_processes_learns_what_one_process_learns(
    family: str, split: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*QUICK]
    if family == "sdxl":
        LatentDiffusion.build(SMALL_SDXL).save_pretrained(tmp_path / "sdxl")
        arguments += [f"model.pretrained={tmp_path / 'sdxl'}", "model.architecture=sdxl"]  # the rest as for tiny
    states, metrics = [], []
    for world_size, name, options in ((1, "one", []), (2, "two", ["strategy=ddp", *split])):
        run_dir = tmp_path / name
        run_program("train", f"output_dir={run_dir}", *arguments, *options, world_size=world_size)
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["steps"] == 4
        states.append(small_training.stored(Path(summary["checkpoint"])))
        metrics.append({k: [value for _, value in v] for k, v in read_metrics(run_dir / "logs").items()})
    one, two = metrics
    assert len(one["train/loss"]) == 4
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)
    for name in ("val/loss", "val/caption_gap"):
        assert two[name][-1] == pytest.approx(one[name][-1], abs=2e-6), name
    assert states[0].keys() == states[1].keys()
    assert any(key.startswith("ema/text_encoder.") for key in states[0])
    # Sums in another order; Adam amplifies them where a gradient is almost zero, so the maximum says little.
    for kind, bound in (("master/", 5e-7), ("ema/", 5e-7), ("exp_avg/", 5e-7)):
        differences = torch.cat([(states[0][k] - states[1][k]).flatten() for k in states[0] if k.startswith(kind)])
        assert differences.square().mean().sqrt() <= bound, kind


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning.pytorch as pl, sd_lightning",
        "import sd_lightning, lightning.pytorch as pl",
        pytest.param(
            "from sd_lightning import SDLightningModule; import lightning.pytorch as pl", marks=pytest.mark.slow
        ),
    ],
)
def test_our_strategies_have_names_beside_lightnings(imports: str, run_python: Callable[..., Any]) -> None:
    build = "trainer = pl.Trainer(strategy='gemini', accelerator='cpu', devices=1, logger=False)"
    show = "from lightning.pytorch.strategies import StrategyRegistry as r"
    told = "print(json.dumps([type(trainer.strategy).__name__, *r]))"
    done = run_python("-c", f"import json; {imports}; {build}; {show}; {told}", check=True)
    chosen, *names = json.loads(done.stdout.splitlines()[-1])
    assert chosen == "GeminiStrategy"
    assert set(names) >= {
        "ddp",
        "fsdp",
        "deepspeed",
        *(each.registered_as for each in PRESETS.values() if each.registered_as),
    }


def test_a_name_gives_our_strategy_and_lightnings_own_stay_its() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from sd_lightning.strategies.ddp import DDPStrategy
    from sd_lightning.strategies.fsdp import FSDPStrategy

    offloaded = StrategyRegistry.get("sd_fsdp_offload")
    assert isinstance(offloaded, FSDPStrategy) and offloaded.config.cpu_offload
    assert isinstance(StrategyRegistry.get("sd_ddp"), DDPStrategy)
    assert not isinstance(StrategyRegistry.get("ddp"), DDPStrategy)


def test_encoders_are_cast_before_the_trained_weights_take_memory_and_saved_as_they_were(tmp_path: Path) -> None:
    class Noting(SDLightningModule):
        def configure_optimizers(self) -> Any:  # in the strategy's setup
            self.dtypes = {p.dtype for network in self.encoder.networks for p in network.parameters()}
            return super().configure_optimizers()

    model = few_blocks(seed=1)
    before = {name: weight.clone() for name, weight in model.vae.state_dict().items()}
    noting = Noting(model, optimizer=small_training.adamw, encoder_dtype="bfloat16")
    checkpoint = PortableCheckpoint(tmp_path, every_n_steps=0)
    small_training.fit(noting, small_training.data(), 1, checkpoint)
    assert noting.dtypes == {torch.bfloat16}
    assert checkpoint.last_saved is not None
    saved = load_file(checkpoint.last_saved / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == before.keys() and all(torch.equal(saved[name], before[name]) for name in before)


def test_encoders_that_nothing_needs_are_freed_and_say_so_when_they_are_used() -> None:
    module = small_training.module(train_text_encoder=False)
    module.encoder.is_idle = True
    module.encoder.to(torch.device("cpu"))
    assert all(p.is_meta for network in module.encoder.networks for p in network.parameters())
    buffers = [buffer for network in module.encoder.networks for buffer in network.buffers()]
    assert buffers and not any(buffer.is_meta for buffer in buffers), "which may normalise latents"
    assert not any(p.is_meta for p in module.denoiser.parameters())
    with pytest.raises(UsageError, match="the frozen encoders were left out.*keep callbacks.samples"):
        module.encoder.encode_moments(torch.zeros(1, 3, 32, 32))
    with pytest.raises(UsageError, match="load the model again"):
        module.sample("a three")
