"""Engines wait for the gradients that they know of: every trained parameter has one, whatever a rank's batch is."""

import pytest
import torch

from sd_lightning import LatentDiffusion


@pytest.mark.parametrize("name", ["tiny_klein", "tiny_z_image"])
def test_every_parameter_of_the_denoiser_has_a_gradient_with_padding_and_without(name: str) -> None:
    model = LatentDiffusion.build(name, seed=3)
    family, length = model.family, 32  # Z-Image fills captions and images up to multiples of 32 tokens
    text_encoder = model.text_encoders["text_encoder"]
    for lengths, side in (((32, 32), 64), ((32, 7), 64), ((7, 7), 64), ((32, 32), 32), ((9, 20), 32)):
        ids = torch.randint(3, 90, (2, length))
        mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        with torch.no_grad():
            known = family.embed({"text_encoder": text_encoder}, {"text_encoder": ids, "text_encoder_mask": mask})
        model.denoiser.zero_grad(set_to_none=True)
        latents = torch.randn(2, *model.latent_space.shape(side, side))
        family.denoise(model.denoiser, latents, torch.tensor([100.0, 900.0]), known).square().mean().backward()
        without = [key for key, parameter in model.denoiser.named_parameters() if parameter.grad is None]
        assert without == [], (lengths, side)
