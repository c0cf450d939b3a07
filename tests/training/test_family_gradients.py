"""What engines count on, whatever the captions of a rank's batch: gradients of every parameter, and one output.

DeepSpeed's ZeRO-3 records the modules of a backward pass by the outputs of each. If ranks have different numbers of
them, they gather different weights at the same time.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sd_lightning import LatentDiffusion


@pytest.mark.parametrize("name", ["tiny_klein", "tiny_z_image", "tiny_sd3", "tiny_flux"])
def test_the_denoiser_has_one_output_and_gradients_of_every_parameter_with_padding_and_without(name: str) -> None:
    model = LatentDiffusion.build(name, seed=3)
    family, length = model.family, 48  # Z-Image fills captions and images up to multiples of 32 tokens
    outputs: list[int] = []
    model.denoiser.register_forward_hook(lambda _, __, output: outputs.append(len(tree_leaves(output))))
    for lengths, side in (((32, 32), 64), ((33, 7), 64), ((7, 7), 64), ((32, 32), 32), ((9, 20), 32)):
        mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        ids = {name: each.repeat(2, 1) for name, each in model.tokenize(["a digit"]).items()}
        if family.has_attention_masks:
            ids = {"text_encoder": torch.randint(3, 90, (2, length)), "text_encoder_mask": mask}
        with torch.no_grad():
            known = family.embed(model.text_encoders, ids)
        model.denoiser.zero_grad(set_to_none=True)
        latents = torch.randn(2, *model.latent_space.shape(side, side))
        family.denoise(model.denoiser, latents, torch.tensor([100.0, 900.0]), known).square().mean().backward()
        without = [key for key, parameter in model.denoiser.named_parameters() if parameter.grad is None]
        assert without == [] and outputs.pop() == 1, (lengths, side)
