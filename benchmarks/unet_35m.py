"""The model of the benchmarks on several processes: a UNet of 34.7 million parameters, its batches and its loss."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hand_written import Batch, Recipe
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.models.families import Component, architecture

BATCH_SIZE = 2  # per rank
LATENTS = (4, 16, 16)
LR, CLIP = 1e-4, 1.0
UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": [128, 256, 384],
    "norm_num_groups": 32,
    "cross_attention_dim": 128,
    "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
}


def build() -> LatentDiffusion:
    """Build the model: a UNet of 34.7 million parameters and the tiny frozen encoders, always the same weights."""
    tiny = architecture("tiny")
    text = tiny.networks["text_encoder"]
    networks = {
        **tiny.networks,
        "unet": Component("diffusers", "UNet2DConditionModel", UNET),
        "text_encoder": replace(text, config={**text.config, "hidden_size": UNET["cross_attention_dim"]}),
    }
    return LatentDiffusion.build(replace(tiny, networks=networks), seed=0)


def make_batches(
    count: int, rank: int, world_size: int, *, batch_size: int = BATCH_SIZE, latents: tuple[int, ...] = LATENTS
) -> list[Batch]:
    """Make this rank's batches: other latents and captions on every rank."""
    generator = torch.Generator().manual_seed(rank)
    channels, *size = latents
    length = int(architecture("tiny").max_length)
    return [
        {
            "latent_moments": torch.randn((batch_size, 2 * channels, *size), generator=generator),
            "input_ids": {"text_encoder": torch.randint(0, 500, (batch_size, length), generator=generator)},
            "epoch": torch.zeros(batch_size, dtype=torch.int64),
            "index": torch.arange(batch_size) + (number * world_size + rank) * batch_size,
        }
        for number in range(count)
    ]


def recipe() -> Recipe:
    """Return the loss that a loop by hand computes: encoding and noise are the same functions on both sides."""
    module = SDLightningModule(build())
    encoder, objective, schedule = module.encoder, module.objective, module.schedule

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        batch = encoder(batch, seed=0)
        noisy = objective.prepare(
            batch["latents"], seed=0, epoch=batch["epoch"], index=batch["index"], schedule=schedule
        )
        prediction = network(noisy.noisy_latents, noisy.timesteps, **batch["conditioning"]).sample
        return F.mse_loss(prediction, noisy.target)

    del module.unet
    return Recipe(loss, LR, CLIP)
