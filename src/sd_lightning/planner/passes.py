"""The computations of a training run on the meta device: a training step, encoding, and drawing images."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sd_lightning.models.checkpointing import recompute_
from sd_lightning.models.encoder import images_per_call
from sd_lightning.models.families.base import Conditioning, map_conditioning
from sd_lightning.models.families.blocks import (
    blocks_of,
    enable_gradient_checkpointing,
    recomputable,
    repeated_blocks,
)
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.lora import freeze_unused
from sd_lightning.models.meta import meta_batch, meta_conditioning, meta_networks, unused_parameters
from sd_lightning.planner.footprint import Weight
from sd_lightning.planner.recording import PRIME, Recording, record
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.trace import Trace


@functools.lru_cache(maxsize=4)
def _inputs(model: LatentDiffusion, count: int, height: int, width: int) -> tuple[dict[str, Any], Conditioning]:
    """Return a batch and its conditioning in float32."""
    batch = meta_batch(model, count, height=height, width=width)
    return batch, meta_conditioning(model, batch, torch.float32)


def trained_networks(model: LatentDiffusion, run: TrainingRun, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return copies of the trained networks on the meta device, in execution order, with LoRA if it is configured."""
    names = [*(model.text_encoders if run.train_text_encoder else ()), model.family.denoiser]
    networks = meta_networks(model, names)
    for network in networks.values():
        network.requires_grad_(True).train()
    if run.lora is not None:
        with torch.device("meta"):
            run.lora.apply_(networks)
    if run.train_text_encoder:
        for name, unused in unused_parameters(model).items():
            freeze_unused(networks[name], unused)
    for network in networks.values():
        cast(network, dtype)
        if run.gradient_checkpointing:
            enable_gradient_checkpointing(network)
    recompute_(recomputable(networks), run.kept)
    return networks


def weights_of(networks: Mapping[str, nn.Module]) -> list[Weight]:
    """Return the parameters of trained networks, in their order."""
    found = []
    for prefix, network in networks.items():
        blocks = {id(p): name for name, block in repeated_blocks(network).items() for p in block.parameters()}
        for name, parameter in network.named_parameters():
            block = f"{prefix}.{blocks[id(parameter)]}" if id(parameter) in blocks else ""
            found.append(Weight(f"{prefix}.{name}", tuple(parameter.shape), parameter.requires_grad, block))
    return found


def training_pass(model: LatentDiffusion, run: TrainingRun, dtype: torch.dtype, autocast: torch.dtype | None) -> Trace:
    """Trace the forward and the backward pass of a step, from latents to gradients.

    Args:
        model: The model, possibly on the meta device; it is not changed.
        run: Settings of the run; its batch size is left open.
        dtype: Of the weights and the networks' inputs.
        autocast: Dtype of autocast around the forward pass.
    """
    networks = trained_networks(model, run, dtype)
    denoiser = networks[model.family.denoiser]
    encoders = {name: network for name, network in networks.items() if network is not denoiser}
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]

    batch, made = _inputs(model, PRIME, run.resolution, run.resolution)

    def step() -> torch.Tensor:
        latents, noise = torch.empty_like(batch["latents"]), torch.empty_like(batch["latents"])
        noisy, target = latents + noise, latents - noise
        del latents, noise
        conditioning = model.condition(encoders, batch) if encoders else map_conditioning(made, torch.empty_like)
        conditioning = map_conditioning(conditioning, lambda tensor: tensor.to(dtype))
        prediction = model.family.denoise(denoiser, noisy.to(dtype), batch["timesteps"], conditioning)
        return (prediction.float() - target).square().mean((1, 2, 3)).mean()

    followed = blocks_of(networks) | recomputable(networks)
    return Trace(record(step, blocks=followed, parameters=parameters, autocast=autocast, batch_size=PRIME))


def drawing_peak(
    model: LatentDiffusion, run: TrainingRun, count: int, dtype: torch.dtype, vae_dtype: torch.dtype
) -> int:
    """Return the bytes of activations while images are drawn: the denoiser with guidance, then the VAE.

    Args:
        model: The model; it is not changed.
        run: Size of the images, and whether the VAE decodes in tiles.
        count: Images at a time.
        dtype: Of the denoiser.
        vae_dtype: Of the VAE.
    """
    if count == 0:
        return 0
    family = model.family
    networks = meta_networks(model, [family.denoiser, "vae"])
    denoiser, vae = cast(networks[family.denoiser], dtype), cast(networks["vae"], vae_dtype)
    height, width = (size or model.resolution for size in run.drawn_size)
    inputs, conditioning = _inputs(model, 2 * count, height, width)

    def denoise() -> None:
        embeddings = map_conditioning(conditioning, lambda tensor: torch.empty_like(tensor, dtype=dtype))
        family.denoise(denoiser, inputs["latents"].to(dtype), inputs["timesteps"], embeddings)

    def decode() -> None:
        vae.decode(inputs["latents"][:count].to(vae_dtype))  # type: ignore[operator]

    with torch.no_grad(), family.decoding_in_tiles(vae, run.vae_tiling):
        return max(record(compute).peak() for compute in (denoise, decode))


def encoded_at_a_time(run: TrainingRun, batch_size: int) -> int:
    """Return the number of images that are encoded at a time, before training or in its steps."""
    if run.offload_encoders:
        return 1
    return min(run.num_images if run.cache_latents else batch_size, images_per_call(run.resolution, run.resolution))


def encoding_peak(model: LatentDiffusion, run: TrainingRun, count: int) -> int:
    """Return the bytes of activations while images are encoded, ``count`` at a time."""
    size, dtype = run.resolution, run.encoder_dtype
    vae = cast(meta_networks(model, ["vae"])["vae"], dtype)

    def encode() -> None:
        model.family.encode(vae, torch.empty(count, 3, size, size, dtype=dtype, device="meta"))

    with torch.no_grad():
        return record(encode).peak()


def encoding_recordings(model: LatentDiffusion, run: TrainingRun, count: int) -> list[Recording]:
    """Record what frozen encoders do for a batch: images unless latents are ready, captions unless they are trained.

    Args:
        model: The model; it is not changed.
        run: What is encoded in each step.
        count: Samples.
    """
    size, dtype = run.resolution, run.encoder_dtype
    found = []
    with torch.no_grad():
        if not run.cache_latents:
            vae = cast(meta_networks(model, ["vae"])["vae"], dtype)
            pixels = torch.empty(count, 3, size, size, dtype=dtype, device="meta")
            found.append(record(lambda: _nothing(model.family.encode(vae, pixels))))
        if not run.train_text_encoder:
            encoders = {n: cast(e, dtype) for n, e in meta_networks(model, tuple(model.text_encoders)).items()}
            batch = meta_batch(model, count, height=size, width=size)
            found.append(record(lambda: _nothing(model.condition(encoders, batch))))
    return found


def _nothing(_: object) -> None:
    """Drop a result."""


def cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Change the dtype of a network in place; diffusers' own method warns."""
    return nn.Module.to(network, dtype=dtype)
