"""What engines count on, whatever the captions of a rank's batch: gradients of every parameter, and one output.

DeepSpeed's ZeRO-3 records the modules of a backward pass by the outputs of each. If ranks have different numbers of
them, they gather different weights at the same time.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sd_lightning import LatentDiffusion
from sd_lightning.models.lora import freeze_unused


@pytest.mark.parametrize("name", ["tiny_klein", "tiny_z_image", "tiny_qwen_image", "tiny_qwen_image_21"])
def test_the_denoiser_has_one_output_and_gradients_of_every_parameter_with_padding_and_without(name: str) -> None:
    model = LatentDiffusion.build(name, seed=3)
    family, length = model.family, 48  # Z-Image fills captions and images up to multiples of 32 tokens
    outputs: list[int] = []
    model.denoiser.register_forward_hook(lambda _, __, output: outputs.append(len(tree_leaves(output))))
    freeze_unused(model.denoiser, family.unused_parameters(model.denoiser))
    text_encoder = model.text_encoders["text_encoder"]
    before = model.tokenize([""])["text_encoder"].shape[1] - model.tokenize([""])["text_encoder_mask"].shape[1]
    for lengths, side in (((32, 32), 64), ((33, 7), 64), ((7, 7), 64), ((32, 32), 32), ((9, 20), 32)):
        ids = torch.randint(3, 90, (2, before + length))
        mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        with torch.no_grad():
            known = family.embed({"text_encoder": text_encoder}, {"text_encoder": ids, "text_encoder_mask": mask})
        model.denoiser.zero_grad(set_to_none=True)
        latents = torch.randn(2, *model.latent_space.shape(side, side))
        family.denoise(model.denoiser, latents, torch.tensor([100.0, 900.0]), known).square().mean().backward()
        trained = {key: each for key, each in model.denoiser.named_parameters() if each.requires_grad}
        without = [key for key, parameter in trained.items() if parameter.grad is None]
        assert without == [] and outputs.pop() == 1, (lengths, side)


def test_frozen_layers_of_the_last_block_change_no_prediction() -> None:
    model = LatentDiffusion.build("tiny_qwen_image", seed=3)
    known = model.condition(model.text_encoders, {"input_ids": model.tokenize(["a handwritten three"])})
    latents, time = torch.randn(1, *model.latent_space.shape(32, 32)), torch.tensor([500.0])
    model.family.denoise(model.denoiser, latents, time, known).square().mean().backward()
    without = {key for key, each in model.denoiser.named_parameters() if each.grad is None or not each.grad.any()}
    freeze_unused(model.denoiser, model.family.unused_parameters(model.denoiser))
    assert without == {key for key, each in model.denoiser.named_parameters() if not each.requires_grad}
