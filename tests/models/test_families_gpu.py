"""The transformer families on a GPU: encoded, denoised and decoded as on the CPU, in float32 and in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sd_lightning import LatentDiffusion
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.models.tf32 import products_of
from small_models import TINY_TRANSFORMERS

pytestmark = [pytest.mark.gpu]
CAPTIONS = ["a three", "a very long caption of one handwritten seven, tilted to the left"]


@pytest.mark.parametrize("architecture", TINY_TRANSFORMERS)
def test_a_gpu_computes_what_the_cpu_computes(architecture: str, gpu_accelerator: str) -> None:
    def predicted(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        model = LatentDiffusion.build(architecture)
        size = model.resolution
        encoder = LatentEncoder(model).to(torch.device(device))
        pixels = torch.linspace(-1, 1, 2 * 3 * size * size).view(2, 3, size, size)
        batch = {"pixel_values": pixels, "input_ids": model.tokenize(CAPTIONS)}
        batch |= {"epoch": torch.zeros(2, dtype=torch.int64), "index": torch.arange(2)}
        ready = encoder(map_conditioning(batch, lambda each: each.to(device)), seed=1)  # type: ignore[arg-type]
        denoiser = model.denoiser.to(device, dtype)
        conditioning = map_conditioning(ready["conditioning"], lambda each: each.to(dtype))
        latents = ready["latents"].to(dtype)
        timesteps = torch.tensor([10.0, 900.0], device=device)
        with torch.no_grad(), products_of(torch.float32):
            made = model.family.denoise(denoiser, latents, timesteps, conditioning)
            images = model.family.decode(model.vae, model.latent_space.decodable(latents.float()))
        return made.float().cpu(), ready["latents"].cpu(), images.cpu()

    expected = predicted("cpu", torch.float32)
    for ours, theirs in zip(predicted(gpu_accelerator, torch.float32), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    half = predicted(gpu_accelerator, torch.bfloat16)[0]
    assert (half - expected[0]).norm() < 0.05 * expected[0].norm()
