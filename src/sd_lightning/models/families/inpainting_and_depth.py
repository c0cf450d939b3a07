"""Stable Diffusion whose UNet also takes what is made of an image: inpainting, and depth.

Both came with Stable Diffusion 2.0. The UNet's first convolution has more channels, in the order of diffusers'
pipelines: noisy latents, then :attr:`Family.image_channels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Component, Part
from sd_lightning.models.families.base import Layout
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import Encode, Normal, vae_factor
from sd_lightning.models.families.stable_diffusion import StableDiffusion

WHOLE = 0.25
"""Share of the training images that are masked as a whole, as for a picture from its caption alone."""


def random_masks(uniform: Normal, height: int, width: int) -> Tensor:
    """Draw masks of two rectangles each, or of all, in the manner of LaMa's boxes (Suvorov et al., 2109.07161, 3.3).

    Args:
        uniform: Draws numbers in [0, 1).
        height: Of the images, in pixels.
        width: Likewise.

    Returns:
        float32 (B, 1, height, width): 1 where the image is hidden.
    """
    numbers = uniform((9,))
    sides, places = numbers[:, 1:].view(-1, 2, 2, 2, 1).unbind(1)  # of each rectangle, along each axis
    sides = torch.where(numbers[:, :1, None, None] < WHOLE, 2.0, sides)
    rows, columns = (
        ((torch.arange(size, device=numbers.device) + 0.5) / size - places[:, :, axis]).abs() < sides[:, :, axis] / 2
        for axis, size in enumerate((height, width))
    )
    return (rows.unsqueeze(3) & columns.unsqueeze(2)).any(dim=1, keepdim=True).float()


def _blank(pipeline: Any, options: Mapping[str, Any], color: str) -> Image.Image:
    """Return a picture of one colour, in the size of what is drawn."""
    own = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    return Image.new("RGB", (options["width"] or own, options["height"] or own), color)


class _WithImageChannels(StableDiffusion):
    """Base of inpainting and depth: what is made of images goes beside noisy latents, (B, C + N, h, w).

    Pictures to begin with are given to the pipeline once per prompt: each then has its own noise in being encoded.
    """

    def conditioning(self, embeddings: Mapping[str, Any], batch: Mapping[str, Any]) -> Conditioning:
        return {**embeddings, "image_channels": batch["image_channels"]}

    def denoise(self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Any) -> Tensor:
        others = dict(conditioning)
        inputs = torch.cat([noisy_latents, others.pop("image_channels").to(noisy_latents.dtype)], dim=1)
        return super().denoise(denoiser, inputs, timesteps, others)


class Inpainting(_WithImageChannels):
    """Inpainting: what a mask hides of an image is painted."""

    pipeline_class = "StableDiffusionInpaintPipeline"
    image_channels = 5
    drawn_from = ("image", "mask")

    def image_inputs(self, pixels: Tensor, parts: Mapping[str, Any], latents: Encode, uniform: Normal) -> Tensor:
        """Return a random mask in the size of latents, and the latents of the image, grey where it is hidden."""
        mask = random_masks(uniform, *pixels.shape[-2:])
        seen = latents(pixels * (mask < 0.5))
        return torch.cat([F.interpolate(mask, size=seen.shape[-2:]), seen], dim=1)

    def draw(self, pipeline: Any, prompts: Sequence[str], **options: Any) -> list[Image.Image]:
        """Generate one image per prompt; without ``image`` and ``mask``, all is hidden."""
        white = _blank(pipeline, options, "white")
        image, mask = ([options.pop(name, white)] * len(prompts) for name in self.drawn_from)
        return super().draw(pipeline, prompts, image=image, mask_image=mask, **options)


class DepthToImage(_WithImageChannels):
    """Depth: images have the depth of others, as a frozen DPT estimates it (Ranftl et al. 2021, 2103.13413).

    The large ``initializer_range`` of ``tiny_depth`` is for its random weights: with DPT's own, 0.02, they give next to
    no depth, and with 0.5 more than float16 holds.
    """

    pipeline_class = "StableDiffusionDepth2ImgPipeline"
    _DPT = Part("transformers", ("DPTForDepthEstimation",))
    _PROCESSOR = Part("transformers", ("DPTImageProcessor", "DPTFeatureExtractor"))
    parts = {**StableDiffusion.parts, "depth_estimator": _DPT, "feature_extractor": _PROCESSOR}
    absent = ()  # type: ignore[assignment]
    pipeline_options = {}
    image_channels = 1
    drawn_from = ("image",)

    def processors(self, components: Mapping[str, Component]) -> dict[str, Any]:
        side = components["depth_estimator"].config.get("image_size", 384)  # the default of DPT
        processor = Component("transformers", "DPTImageProcessor").load_class()
        return {"feature_extractor": processor(size={"height": side, "width": side})}

    def image_inputs(self, pixels: Tensor, parts: Mapping[str, Any], latents: Encode, uniform: Normal) -> Tensor:
        """Return the inverse depth of images in the size of latents, from -1 to 1 in each, as the pipeline does."""
        estimator, images = parts["depth_estimator"], ((pixels.float() + 1) * 127.5).round().to(torch.uint8)
        if pixels.is_meta:  # shapes alone, which the processor of pictures cannot make
            features = images.new_empty(len(images), 3, *dict(parts["feature_extractor"].size).values())
        else:
            features = parts["feature_extractor"](images=list(images.cpu()), return_tensors="pt").pixel_values
        depth = estimator(features.to(estimator.device, estimator.dtype)).predicted_depth.float().unsqueeze(1)
        size = [side // vae_factor(parts["vae"].config) for side in pixels.shape[-2:]]
        depth = F.interpolate(depth, size=size, mode="bicubic", align_corners=False)
        low, high = depth.amin((1, 2, 3), keepdim=True), depth.amax((1, 2, 3), keepdim=True)
        return 2.0 * (depth - low) / (high - low).clamp(min=1e-12) - 1.0  # where all is alike, no NaN

    def draw(self, pipeline: Any, prompts: Sequence[str], **options: Any) -> list[Image.Image]:
        """Generate one image per prompt; without ``image``, on even ground, whose inverse depth is linear in height.

        The pipeline's own ``strength``, 0.8, would leave nothing of a single step.
        """
        grey = _blank(pipeline, options, "gray")
        if "image" not in options:
            ground = torch.linspace(0.0, 1.0, grey.height)[:, None].expand(len(prompts), -1, grey.width)
            options |= {"depth_map": ground, "strength": 1.0}
        options.setdefault("strength", max(0.8, 1 / options["num_inference_steps"]))
        image = [options.pop("image", grey)] * len(prompts)  # its size is that of what is drawn
        return super().draw(pipeline, prompts, image=image, **options)

    def single_file_layout(self, components: Mapping[str, Component]) -> Layout | None:
        return None  # the original file also holds the depth estimator
