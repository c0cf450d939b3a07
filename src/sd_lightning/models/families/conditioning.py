"""What a denoiser is trained with: batches, and the conditioning of encoded captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

Conditioning = dict[str, Any]
"""Encoded captions, the denoiser's input: tensors whose first dimension is the batch, possibly in nested dicts."""


class Batch(TypedDict, total=False):
    """Samples on their way to the loss; frozen encoders replace pixels and captions. Every tensor begins with (B,)."""

    epoch: Tensor
    """(B,) int64."""
    index: Tensor
    """(B,) int64, global sample index."""
    pixel_values: Tensor
    """(B, 3, H, W) in [-1, 1]."""
    latent_moments: Tensor
    """(B, *encoded_shape) of the :class:`LatentSpace`, from which latents are sampled."""
    latents: Tensor
    """(B, C, h, w), scaled to about unit variance."""
    input_ids: dict[str, Tensor]
    """Token ids (B, L) by text encoder, and masks; see :meth:`Family.tokenize`."""
    text_embeddings: Conditioning
    """Encoded captions, without what depends on the image."""
    image_channels: Tensor
    """(B, :attr:`Family.image_channels`, h, w)."""
    conditioning: Conditioning
    original_size: Tensor
    crop_top_left: Tensor
    target_size: Tensor
    wrong_input_ids: dict[str, Tensor]
    """``input_ids`` of other samples' captions, in validation."""
    wrong_text_embeddings: Conditioning
    wrong_conditioning: Conditioning
    preserved_input_ids: dict[str, Tensor]
    """``input_ids`` of captions whose predictions stay as they were, in training with a ``Preservation``."""
    preserved_text_embeddings: Conditioning
    preserved_conditioning: Conditioning
    loss_weight: Tensor
    """(B,), in training."""
    loss_mask: Tensor
    """(B, 1, h, w), in training with masks: the weights of the latents in a sample's loss."""
    sample_weight: Tensor
    """(B,), in validation: 0 for samples that fill up a batch."""


def join_conditioning(parts: Sequence[Mapping[str, Any]]) -> Conditioning:
    """Concatenate the conditioning of several batches."""
    return {
        key: join_conditioning([part[key] for part in parts])
        if isinstance(value, Mapping)
        else torch.cat([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def map_conditioning(conditioning: Mapping[str, Any], fn: Callable[[Tensor], Any]) -> Conditioning:
    """Apply ``fn`` to every tensor of a (nested) conditioning dictionary, or of a batch; keep other values."""
    return {
        k: map_conditioning(v, fn) if isinstance(v, Mapping) else fn(v) if isinstance(v, Tensor) else v
        for k, v in conditioning.items()
    }


def flat_conditioning(conditioning: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a (nested) conditioning dictionary by dotted names: "added_cond_kwargs.text_embeds"."""
    flat: dict[str, Tensor] = {}
    for key, value in conditioning.items():
        inner = {"": value} if isinstance(value, Tensor) else flat_conditioning(value)
        flat |= {f"{key}.{name}".rstrip("."): tensor for name, tensor in inner.items()}
    return flat


def nested_conditioning(flat: Mapping[str, Tensor]) -> Conditioning:
    """Return what :func:`flat_conditioning` was given."""
    nested: Conditioning = {}
    for name, tensor in flat.items():
        *parents, key = name.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[key] = tensor
    return nested
