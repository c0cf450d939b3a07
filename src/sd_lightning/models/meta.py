"""Networks and batches on the meta device: shapes, graphs and counts of operations without storage."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families.base import SIZES
from sd_lightning.models.families.conditioning import Conditioning, map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion


def meta_networks(model: LatentDiffusion, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return copies of the named networks on the meta device, without storage."""
    with torch.device("meta"):
        return {name: model.components[name].instantiate().eval() for name in names}


def meta_twin(model: LatentDiffusion) -> LatentDiffusion:
    """Return a copy of a model with networks on the meta device: it takes no time and no memory."""
    return type(model)(
        meta_networks(model, tuple(model.networks)),
        tokenizers=copy.deepcopy(model.tokenizers),
        components=copy.deepcopy(model.components),
        pipeline_class=model.pipeline_class,
    )


def meta_batch(
    model: LatentDiffusion, count: int, *, height: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """Return a batch on the meta device: ``latents``, ``timesteps`` and the inputs of `LatentDiffusion.condition`.

    Args:
        count: Number of samples.
        height: Image height in pixels; the model's own if not given.
        width: Image width, likewise.
    """
    shape = model.latent_space.shape(height or model.resolution, width or model.resolution)
    ids = model.tokenize([""])
    with torch.device("meta"):
        return {
            "latents": torch.empty(count, *shape),
            "image_channels": torch.empty(count, model.family.image_channels, *shape[1:]),
            "timesteps": torch.empty(count, dtype=torch.int64),
            "input_ids": {name: torch.empty(count, each.shape[1], dtype=torch.int64) for name, each in ids.items()},
            **{name: torch.empty(count, 2) for name in SIZES},
        }


def meta_conditioning(model: LatentDiffusion, batch: Mapping[str, Any], dtype: torch.dtype) -> Conditioning:
    """Return the conditioning of a batch on the meta device as frozen text encoders give it: without a graph."""
    with torch.no_grad():
        made = model.condition(meta_networks(model, tuple(model.text_encoders)), batch)
    return map_conditioning(made, lambda tensor: torch.empty_like(tensor, dtype=dtype))


def unused_parameters(model: LatentDiffusion) -> dict[str, list[str]]:
    """Return, per text encoder, the names of the parameters that the conditioning does not depend on.

    SDXL uses the penultimate hidden states, so the last layer of its first encoder is unused. Such parameters
    never get a gradient, and DistributedDataParallel would wait for it.
    """
    networks = meta_networks(model, tuple(model.text_encoders))
    sums: list[Tensor] = []
    map_conditioning(model.condition(networks, meta_batch(model, 1)), lambda tensor: sums.append(tensor.sum()))
    sum(sums, torch.zeros((), device="meta")).backward()
    return {
        name: [key for key, parameter in network.named_parameters() if parameter.grad is None]
        for name, network in networks.items()
    }


def training_flops_per_sample(model: LatentDiffusion, latents: Tensor, conditioning: Conditioning | None) -> int:
    """Return the floating-point operations of forward and backward for one sample.

    Backward counts as twice the forward. Recomputation by activation checkpointing does not count, as in the model
    FLOPs utilisation of PaLM (arXiv 2204.02311, appendix B). Nor do frozen encoders.

    Args:
        model: The model.
        latents: (B, C, h, w); only the shape is used.
        conditioning: Encoded captions; None if the text encoder is trained and must be counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def one(tensor: Tensor) -> Tensor:
        return torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    family = model.family
    encoders = list(model.text_encoders) if conditioning is None else []
    networks = meta_networks(model, [family.denoiser, *encoders])
    counter, of_frozen = FlopCounterMode(display=False), list[int]()
    for network in [networks[name] for name in encoders if name in family.frozen]:
        network.register_forward_pre_hook(lambda *_: of_frozen.append(-counter.get_total_flops()))
        network.register_forward_hook(lambda *_: of_frozen.append(counter.get_total_flops()))
    with torch.no_grad(), counter:
        if conditioning is None:
            height, width = (size * model.latent_space.stride for size in latents.shape[-2:])
            conditioning = model.condition(networks, meta_batch(model, 1, height=height, width=width))
        else:
            conditioning = map_conditioning(conditioning, one)
        family.denoise(networks[family.denoiser], one(latents).float(), torch.zeros(1, device="meta"), conditioning)
    return 3 * (counter.get_total_flops() - sum(of_frozen))
