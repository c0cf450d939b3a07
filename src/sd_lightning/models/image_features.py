"""Networks that turn pictures into features, for metrics of picture quality: FID's Inception, CLIP, DINOv2, …"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.inception import NUM_FEATURES, SIDE, read_inception

_NAMES = {"clip": "CLIP", "dinov2": "DINOv2", "siglip": "SigLIP"}
"""transformers' ``model_type`` -> name in the literature; others are named as in transformers."""


@dataclass(frozen=True)
class ImageFeatures:
    """A network that was read."""

    name: str
    """"CLIP", "DINOv2", …; "" for the Inception, whose distances are FID and KID themselves."""
    num_features: int
    network: nn.Module
    prepare: Callable[[Sequence[Image.Image]], Tensor]
    """Pictures -> the network's input (B, 3, H, W)."""
    embed: Callable[[Tensor], Tensor]
    tokenizer: Any = None
    """Of a network that also reads captions."""

    def metric(self, kind: str) -> str:
        """Return the name of a distance, "F" or "K", with these features: "FID", "FD-DINOv2" (arXiv 2306.04675)."""
        return f"{kind}D-{self.name}" if self.name else f"{kind}ID"

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the features (B, D) of pictures, float64 in host memory."""
        device = next(self.network.parameters()).device
        with torch.no_grad():
            return self.embed(self.prepare(images).to(device)).double().cpu()

    def caption_scores(self, features: Tensor, captions: Sequence[str]) -> Tensor:
        """Return 100 times the cosine (N,) between features and captions (arXiv 2104.08718, not times 2.5)."""
        network: Any = self.network
        embeds = {}
        for caption in dict.fromkeys(captions):
            texts = self.tokenizer([caption], truncation=True, return_tensors="pt").to(network.device)
            with torch.no_grad():
                out = network.get_text_features(texts.input_ids, texts.attention_mask)
            embeds[caption] = out.pooler_output[0].double().cpu()
        return 100 * torch.cosine_similarity(features, torch.stack([embeds[each] for each in captions]))


def read_image_features(source: str, *, device: torch.device) -> ImageFeatures:
    """Read a network from a folder or the hub by transformers, or the Inception from a file, and try it.

    Raises:
        UsageError: There is none, weights are missing, or it does not turn pictures into features.
    """
    if Path(source).is_file():
        inception = read_inception(Path(source)).to(device)
        return ImageFeatures("", NUM_FEATURES, inception, _clean, inception)
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        processor = AutoImageProcessor.from_pretrained(source)
        network, info = AutoModel.from_pretrained(source, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source) if hasattr(network, "get_text_features") else None
        encode = getattr(network.eval().requires_grad_(False).to(device), "get_image_features", network)
        kind = network.config.model_type
        features = ImageFeatures(
            _NAMES.get(kind, kind),
            0,
            network,
            lambda images: processor(images=list(images), return_tensors="pt")["pixel_values"],
            lambda pixels: encode(pixel_values=pixels).pooler_output,
            tokenizer,
        )
        tried = features.images([Image.new("RGB", (64, 48), "grey")])
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        raise _refusal(source, str(error).partition("\n")[0]) from error
    if info["missing_keys"]:
        raise _refusal(source, f"its files lack weights, such as {min(info['missing_keys'])}")
    return replace(features, num_features=tried.shape[-1])


def _refusal(source: str, why: str) -> UsageError:
    return UsageError(
        f"features={source} gives no features of pictures: {why}; expected a vision model that transformers reads, or "
        "a file of FID's Inception weights; write features=openai/clip-vit-base-patch32, or the folder of one"
    )


def _clean(images: Sequence[Image.Image]) -> Tensor:
    """Resize for the Inception as clean-fid does (arXiv 2104.11222): bicubic, antialiased, not rounded to 8 bits."""
    pixels = np.stack([np.asarray(image.convert("RGB"), np.float32) for image in images])
    planes = pixels.transpose(0, 3, 1, 2).reshape(-1, *pixels.shape[1:3])
    resized = [np.asarray(Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for each in planes]
    clipped = np.stack(resized).clip(0, 255).reshape(len(images), 3, SIDE, SIDE)
    return (torch.from_numpy(clipped) - 128) / 128
