"""From token ids to the keyword arguments of the UNet: one function per family of models.

A batch holds ``input_ids`` (B, E, L) for E text encoders and, per image, ``original_size``, ``crop_top_left`` and
``target_size``, each (B, 2) as (height, width) in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def clip_conditioning(text_encoders: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Condition Stable Diffusion 1.x and 2.x: the last hidden state of one CLIP text encoder.

    Returns:
        ``encoder_hidden_states`` (B, L, D).
    """
    (text_encoder,) = text_encoders
    return {"encoder_hidden_states": text_encoder(batch["input_ids"][:, 0])[0]}


def sdxl_conditioning(text_encoders: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Condition SDXL: two text encoders, a pooled embedding and size micro-conditioning.

    SDXL, arXiv 2307.01952, section 2.2: the penultimate hidden states of both encoders are concatenated; the pooled
    output of the second and the six numbers (original size, crop corner, target size) go through the time embedding.

    Returns:
        ``encoder_hidden_states`` (B, L, D1 + D2) and ``added_cond_kwargs`` with ``text_embeds`` (B, P) and
        ``time_ids`` (B, 6).
    """
    hidden, pooled = [], None
    for text_encoder, input_ids in zip(text_encoders, batch["input_ids"].unbind(1), strict=True):
        output = text_encoder(input_ids, output_hidden_states=True)
        hidden.append(output.hidden_states[-2])
        pooled = output[0]
    time_ids = torch.cat([batch["original_size"], batch["crop_top_left"], batch["target_size"]], dim=1)
    return {
        "encoder_hidden_states": torch.cat(hidden, dim=-1),
        # float32 whatever the encoders compute in: bfloat16 does not know odd sizes above 256.
        "added_cond_kwargs": {"text_embeds": pooled, "time_ids": time_ids.float()},
    }


def join_conditioning(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the conditioning of several batches."""
    return {
        key: join_conditioning([part[key] for part in parts])
        if isinstance(value, Mapping)
        else torch.cat([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def map_conditioning(conditioning: Mapping[str, Any], fn: Any) -> dict[str, Any]:
    """Apply ``fn`` to every tensor of a (nested) conditioning dictionary."""
    return {k: map_conditioning(v, fn) if isinstance(v, Mapping) else fn(v) for k, v in conditioning.items()}
