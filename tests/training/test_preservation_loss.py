"""The loss that holds predictions for other captions to those without adapters."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import small_training
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.data.preservation import Preservation
from sd_lightning.diffusion.randomness import Purpose, normal, uniform
from sd_lightning.models.lora import Lora
from sd_lightning.models.without_adapters import without_adapters
from small_models import few_blocks
from strategy_table import strategy_of

SEED = 3  # of small_training.module
BLANK = Preservation(prompts=[""], weight=0.5)


def module_of(**options: Any) -> Any:
    given: dict[str, Any] = {"lora": Lora(rank=2), "preservation": BLANK, "train_text_encoder": False}
    return small_training.module(**given | options)


def trained(module: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


@torch.no_grad()
def move_adapters_(module: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    for _, parameter in trained(module):
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def batch_of(module: Any, count: int = 3, **entries: Any) -> dict[str, Any]:
    tokenize = module.latent_diffusion.tokenize
    batch: dict[str, Any] = {
        "latents": torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        "epoch": torch.zeros(count, dtype=torch.int64),
        "index": torch.arange(count),
        "input_ids": tokenize([f"a handwritten sks {i}" for i in range(count)]),
        "preserved_input_ids": tokenize([f"a handwritten {i}" for i in range(count)]),
    }
    return module.encoder(batch | entries, seed=SEED)


@pytest.mark.parametrize(
    "options", [{}, {"train_text_encoder": True}, {"lora": Lora(rank=2, base="int8", use_dora=True)}]
)
def test_the_loss_is_that_of_two_passes_against_a_model_without_adapters(options: dict[str, Any]) -> None:
    module, plain = module_of(**options), few_blocks(seed=1)
    if module.lora.base is not None:
        module.latent_diffusion.read_base()
        module.lora.quantize_base_(plain.denoiser)
    plain.denoiser.train()
    move_adapters_(module)
    weight = torch.tensor([0.5, 1.0, 2.0])
    batch = batch_of(module, loss_weight=weight)
    key = (SEED, batch["epoch"], batch["index"])
    noise, fractions = normal(*key, Purpose.NOISE, (4, 8, 8)), uniform(*key, Purpose.TIMESTEP)
    timesteps = (fractions * 1000).long()
    tables = module.schedule.sqrt_alphas_cumprod, module.schedule.sqrt_one_minus_alphas_cumprod
    alpha, sigma = (each[timesteps].view(-1, 1, 1, 1) for each in tables)
    noisy, velocity = alpha * batch["latents"] + sigma * noise, alpha * noise - sigma * batch["latents"]

    def predicted(unet: Any, text_encoder: Any, ids: Any) -> Tensor:
        result: Tensor = unet(noisy, timesteps, text_encoder(ids["text_encoder"])[0]).sample
        return result

    networks = module.latent_diffusion.networks
    own, kept = (
        predicted(networks["unet"], networks["text_encoder"], batch[name])
        for name in ("input_ids", "preserved_input_ids")
    )
    with torch.no_grad():
        target = predicted(plain.networks["unet"], plain.networks["text_encoder"], batch["preserved_input_ids"])
    distance = ((kept - target).square().mean((1, 2, 3)) * weight).mean()
    expected = ((own - velocity).square().mean((1, 2, 3)) * weight).mean() + 0.5 * distance
    loss = module.training_loss(batch)
    assert distance > 1e-3
    assert torch.allclose(loss, expected, rtol=1e-5) and torch.allclose(module._preserved, distance, rtol=1e-4)
    names, parameters = zip(*trained(module))
    ours, theirs = (torch.autograd.grad(each, parameters, allow_unused=True) for each in (loss, expected))
    for name, mine, other in zip(names, ours, theirs, strict=True):
        assert mine is not None and other is not None, name
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_is_lost_before_the_adapters_have_learned_and_masks_are_for_the_photos_alone() -> None:
    module = module_of()
    batch = batch_of(module, loss_mask=torch.zeros(3, 1, 8, 8))
    assert module.training_loss(batch) < 1e-10, "but for rounding in a larger batch"
    move_adapters_(module)
    assert module.training_loss(batch) > 1e-4


def test_without_adapters_a_network_computes_what_it_did_and_stays_as_it_was() -> None:
    module, plain = module_of(train_text_encoder=True), few_blocks(seed=1)
    move_adapters_(module)
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    ids = module.latent_diffusion.tokenize(["a handwritten three"])
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([500])

    @torch.no_grad()
    def computed(model: LatentDiffusion) -> Tensor:
        result: Tensor = model.denoiser(*inputs, **model.condition(model.text_encoders, {"input_ids": ids})).sample
        return result

    expected = computed(plain)
    with pytest.raises(RuntimeError), without_adapters(module.trained_networks().values()):
        assert torch.equal(computed(module.latent_diffusion), expected)
        raise RuntimeError("the context ends, whatever happens")
    assert not torch.allclose(computed(module.latent_diffusion), expected)
    assert before == {name: parameter.requires_grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_run_stays_nearer_to_the_base_and_logs_how_near(strategy: str) -> None:
    found = {}
    for weight in (1e-6, 100.0):
        module = module_of(preservation=Preservation(prompts=[""], weight=weight))
        options = {"strategy": strategy_of(strategy), "accumulate_grad_batches": 2, "log_every_n_steps": 1}
        trainer = small_training.fit(module, small_training.data(), 5, **options)
        found[weight] = float(trainer.callback_metrics["train/preservation_loss"])
        assert found[weight] == float(module.last_preservation_loss)
        assert float(trainer.callback_metrics["train/loss"]) == float(module.last_loss)
    assert 0 < found[100.0] < 0.5 * found[1e-6]


def test_it_needs_adapters_and_costs_more_operations() -> None:
    with pytest.raises(UsageError, match="preservation needs adapters, .* write trainable=lora"):
        module_of(lora=None)
    batch = batch_of(module_of())
    kept, plain = (module_of(preservation=each).flops_per_sample(batch) for each in (BLANK, None))
    assert 3 * kept == 7 * plain
