"""Networks that turn pictures into features, for metrics of picture quality: FID's Inception, CLIP, DINOv2, …"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning._imports import require

INCEPTION = "inception"
"""Name of FID's Inception, of which torch-fidelity downloads the weights."""
_NAMES = {"clip": "CLIP", "dinov2": "DINOv2", "siglip": "SigLIP"}
"""transformers' ``model_type`` -> name in the literature; others are named as in transformers."""


@dataclass(frozen=True)
class ImageFeatures:
    """A network that was read."""

    name: str
    """"CLIP", "DINOv2", …; "" for FID's Inception, whose distances are FID and KID themselves."""
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
            # As SigLIP was trained; CLIP does not look at what comes after the end.
            texts = self.tokenizer([caption], truncation=True, padding="max_length", return_tensors="pt")
            with torch.no_grad():
                out = network.get_text_features(**texts.to(network.device))
            embeds[caption] = out.pooler_output[0].double().cpu()
        return 100 * torch.cosine_similarity(features, torch.stack([embeds[each] for each in captions]))


def read_image_features(source: str, *, device: torch.device) -> ImageFeatures:
    """Read a network from a folder or the hub by transformers, or FID's Inception by torchmetrics, and try it.

    Args:
        source: A folder, a hub id, a file of Inception weights, or ``INCEPTION``, for which they are downloaded.
        device: Where it computes.

    Raises:
        UsageError: There is none, weights are missing, or it does not turn pictures into features.
    """
    is_inception = Path(source).is_file() or (source == INCEPTION and not Path(source).exists())
    if is_inception:
        require("torch_fidelity", extra="fid", who=f"features={source}")
    try:
        features = (_read_inception if is_inception else _read_pretrained)(source, device)
        tried = features.images([Image.new("RGB", (64, 48), "grey")])
        if features.tokenizer is not None:
            features.caption_scores(tried, ["a caption that is cut " * 100])
    except Exception as error:  # a damaged file raises one of many
        hub = "" if Path(source).exists() else ", which is no folder, nor within reach on the hub (HF_HUB_OFFLINE?),"
        raise UsageError(
            f"features={source}{hub} gives no features of pictures: {shorten(str(error), 120)}; expected a vision "
            "model that transformers reads, as openai/clip-vit-base-patch32 is, or a file of FID's Inception weights; "
            "give the folder of one, or that file"
        ) from error
    return replace(features, num_features=tried.shape[-1])


def _read_pretrained(source: str, device: torch.device) -> ImageFeatures:
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")  # the same without torchvision and with it
    network, info = AutoModel.from_pretrained(source, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"its files lack weights, such as {min(info['missing_keys'])}")
    tokenizer = AutoTokenizer.from_pretrained(source) if hasattr(network, "get_text_features") else None
    encode = getattr(network.eval().requires_grad_(False).to(device), "get_image_features", network)
    kind = network.config.model_type
    return ImageFeatures(
        _NAMES.get(kind, kind),
        0,
        network,
        lambda images: processor(images=list(images), return_tensors="pt")["pixel_values"],
        lambda pixels: encode(pixel_values=pixels).pooler_output,
        tokenizer,
    )


def _read_inception(source: str, device: torch.device) -> ImageFeatures:
    """Read the Inception that torchmetrics' FID has, which resizes by itself: bilinear, with antialiasing."""
    from torchmetrics.image.fid import NoTrainInceptionV3

    file = None if source == INCEPTION else source
    if file is not None:
        torch.load(file, map_location="cpu", weights_only=True)  # refuses code, which torch-fidelity would run
    network = NoTrainInceptionV3("inception-v3-compat", ["2048"], file).to(device)

    def pixels(images: Sequence[Image.Image]) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(image.convert("RGB")) for image in images])).permute(0, 3, 1, 2)

    return ImageFeatures("", 0, network, pixels, network)
