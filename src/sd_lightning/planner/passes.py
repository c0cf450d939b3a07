"""The computations of training and inference on the meta device: a training step, encoding, and drawing images."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.checkpointing import recompute_
from sd_lightning.models.families.blocks import blocks_of, enable_gradient_checkpointing, recomputable, repeated_blocks
from sd_lightning.models.families.conditioning import Conditioning, flat_conditioning, map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.lora import freeze_unused
from sd_lightning.models.meta import meta_batch, meta_conditioning, meta_networks, unused_parameters
from sd_lightning.models.without_adapters import without_adapters
from sd_lightning.planner.footprint import Weight
from sd_lightning.planner.recording import PRIME, record
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.trace import Trace, rounded
from sd_lightning.quantization.layers import Int8Linear, int8_layers, to_int8
from sd_lightning.quantization.tensor_parallel import division_of


@functools.lru_cache(maxsize=4)
def _inputs(model: LatentDiffusion, count: int, height: int, width: int) -> tuple[dict[str, Any], Conditioning]:
    """Return a batch and its conditioning in float32."""
    batch = meta_batch(model, count, height=height, width=width)
    return batch, meta_conditioning(model, batch, torch.float32)


def trained_networks(model: LatentDiffusion, run: TrainingRun, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return copies of the trained networks on the meta device, in execution order, with LoRA if it is configured."""
    trained = model.family.trainable if run.train_text_encoder else (model.family.denoiser,)
    networks = meta_networks(model, trained)
    for network in networks.values():
        network.requires_grad_(True).train()
    denoiser = networks[model.family.denoiser]
    if run.lora is not None:
        with torch.device("meta"):
            run.lora.quantize_base_(denoiser)
            run.lora.of_family(model.family).apply_(networks)
    freeze_unused(denoiser, model.family.unused_parameters(denoiser))
    if run.train_text_encoder:
        for name, unused in unused_parameters(model).items():
            if name in networks:
                freeze_unused(networks[name], unused)
    for network in networks.values():
        cast(network, dtype)
        if run.gradient_checkpointing:
            enable_gradient_checkpointing(network)
    recompute_(recomputable(networks), run.kept)
    return networks


def weights_of(networks: Mapping[str, nn.Module]) -> list[Weight]:
    """Return the parameters of trained networks, in their order."""
    weights = []
    for prefix, network in networks.items():
        blocks = {id(p): name for name, block in repeated_blocks(network).items() for p in block.parameters()}
        for name, parameter in network.named_parameters():
            block = f"{prefix}.{blocks[id(parameter)]}" if id(parameter) in blocks else ""
            weights.append(Weight(f"{prefix}.{name}", tuple(parameter.shape), parameter.requires_grad, block))
    return weights


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
    if encoders:
        frozen = meta_networks(model, [name for name in model.family.frozen if name in model.networks])
        encoders |= {name: cast(network, run.encoder_dtype).requires_grad_(False) for name, network in frozen.items()}
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]

    batch, made = _inputs(model, PRIME, run.resolution, run.resolution)
    in_batch: list[Conditioning] = []  # in float32, as long as the step lasts

    def predicted(noisy: Tensor, count: int) -> Tensor:
        """Return predictions for as many captions as noisy latents, in ``count`` batches."""
        parts = [batch, *in_batch[:1]]
        if count > 1:
            parts = [map_conditioning(each, lambda tensor: torch.cat([tensor] * count)) for each in parts]
        conditioning = model.condition(encoders, parts[0]) if encoders else parts[1]
        conditioning = map_conditioning(conditioning, lambda tensor: tensor.to(dtype))
        return model.family.denoise(denoiser, noisy.to(dtype), parts[0]["timesteps"], conditioning)

    def step() -> Tensor:
        latents, noise = torch.empty_like(batch["latents"]), torch.empty_like(batch["latents"])
        noisy, target = latents + noise, latents - noise
        del latents, noise
        in_batch.extend(map_conditioning(made, torch.empty_like) for _ in range(0 if encoders else 1 + run.preserves))
        if run.preserves:
            with torch.no_grad(), without_adapters(networks.values()):
                kept = predicted(noisy, 1)
            noisy, target = torch.cat([noisy, noisy]), torch.cat([target, kept.float()])
            del kept
        prediction = predicted(noisy, 1 + run.preserves)
        return (prediction.float() - target).square().mean((1, 2, 3)).mean()

    followed = blocks_of(networks) | recomputable(networks)
    return record(step, blocks=followed, parameters=parameters, autocast=autocast, batch_size=PRIME)


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
    family = model.family
    networks = meta_networks(model, [family.denoiser, "vae"])
    if run.lora is not None:
        run.lora.quantize_base_(networks[family.denoiser])
    denoiser, vae = cast(networks[family.denoiser], dtype), cast(networks["vae"], vae_dtype)
    height, width = (size or model.resolution for size in run.drawn_size)
    inputs, conditioning = _inputs(model, 2 * count, height, width)

    def denoise() -> None:
        embeddings = map_conditioning(conditioning, lambda tensor: torch.empty_like(tensor, dtype=dtype))
        family.denoise(denoiser, inputs["latents"].to(dtype), inputs["timesteps"], embeddings)

    encoded = model.latent_space.decodable(inputs["latents"][:count])

    def decode() -> None:
        family.decode(vae, encoded.to(vae_dtype))

    with torch.no_grad(), family.decoding_in_tiles(vae, run.vae_tiling):
        return max(record(compute).peak() for compute in (denoise, decode))


def encoding_peak(model: LatentDiffusion, run: TrainingRun, count: int) -> int:
    """Return the bytes of activations while images are encoded, ``count`` at a time."""
    pixels = count * 3 * run.resolution**2 * model.family.vae_dtype(model.vae, run.encoder_dtype).itemsize
    return _images_encoded(model, run, count).peak() + rounded(pixels)


def encoding_traces(model: LatentDiffusion, run: TrainingRun, count: int) -> list[Trace]:
    """Trace what frozen encoders do for a batch: images unless latents are ready, captions unless they are trained.

    Args:
        model: The model; it is not changed.
        run: What is encoded in each step.
        count: Samples.
    """
    traces = [] if run.cache_latents else [_images_encoded(model, run, count)]
    return traces + [captions_encoded(model, run.encoder_dtype, count)] * (1 + run.preserves) * (
        not run.train_text_encoder
    )


@functools.lru_cache(maxsize=4)
def captions_encoded(model: LatentDiffusion, dtype: torch.dtype, count: int | None = None) -> Trace:
    """Trace what the text encoders do for captions, filled up to their full length.

    Args:
        model: The model; it is not changed.
        dtype: Of the text encoders.
        count: Captions; if not given, their number is left open.
    """
    networks = meta_networks(model, tuple(model.text_encoders))
    encoders = {name: cast(network, dtype) for name, network in networks.items()}
    batch = meta_batch(model, count or PRIME)

    def encode() -> None:
        model.condition(encoders, batch)

    with torch.no_grad():
        return record(encode, batch_size=None if count else PRIME)


@functools.lru_cache(maxsize=4)
def caption_numel(model: LatentDiffusion) -> int:
    """Return how many numbers the text encoders make of a caption, padding included."""
    with torch.no_grad():
        networks = meta_networks(model, tuple(model.text_encoders))
        made = model.family.embed(networks, meta_batch(model, 1)["input_ids"])
    return sum(tensor.numel() for tensor in flat_conditioning(made).values())


def _images_encoded(model: LatentDiffusion, run: TrainingRun, count: int) -> Trace:
    """Trace the VAE, and what else the denoiser takes of images."""
    family, size, dtype = model.family, run.resolution, model.family.vae_dtype(model.vae, run.encoder_dtype)
    names = [name for name in model.networks if name != family.denoiser and not family.is_text_encoder(name)]
    networks = {name: cast(network, run.encoder_dtype) for name, network in meta_networks(model, names).items()}
    vae = cast(networks["vae"], dtype)
    pixels = torch.empty(count, 3, size, size, dtype=dtype, device="meta")

    def random(shape: Sequence[int]) -> Tensor:
        return torch.empty(count, *shape, device="meta")

    def latents(images: Tensor) -> Tensor:
        return model.latent_space.latents(family.encode(vae, images.to(dtype)), random)

    def encode() -> None:
        family.encode(vae, pixels)
        if family.image_channels:
            family.image_inputs(pixels, {**model.tokenizers, **networks}, latents, random)

    with torch.no_grad():
        return record(encode)


@dataclass(frozen=True)
class Drawing:
    """What a model does to draw a batch of images, on the meta device."""

    networks: Mapping[str, nn.Module]
    """Its structure; without LoRA."""
    traces: Mapping[str, Trace]
    """Of the text encoders, of a call of the denoiser, and of decoding: "encode", "denoise", "decode"."""
    held: int
    """Bytes of latents and encoded captions."""


def drawing_passes(
    model: LatentDiffusion,
    *,
    height: int,
    width: int,
    batch_size: int,
    rows: int,
    dtype: torch.dtype | None = None,
    vae_tiling: bool = False,
) -> Drawing:
    """Trace text encoders, denoiser and VAE decoder, each once; the arguments are those of :func:`inference_bytes`.

    Args:
        rows: Captions that are encoded together, and samples in a call of the denoiser.
    """
    family, twins = model.family, {name: _twin(model, name, dtype) for name in model.networks}
    denoiser, vae = twins[family.denoiser], twins["vae"]
    # Inputs stay alive as in a pipeline.
    batch = meta_batch(model, rows, height=height, width=width)
    latents = batch["latents"].to(next(denoiser.parameters()).dtype)
    decoded = model.latent_space.decodable(latents[:batch_size]).to(next(vae.parameters()).dtype)

    def encode() -> None:
        model.condition(twins, batch)

    def denoise() -> None:
        family.denoise(denoiser, latents, torch.empty((), device="meta"), conditioning)

    def decode() -> None:
        family.decode(vae, decoded)

    calls, blocks = {"encode": encode, "denoise": denoise, "decode": decode}, blocks_of(twins)
    with torch.no_grad(), family.decoding_in_tiles(vae, vae_tiling):
        # As the families cast them for the denoiser: some encoders stay in float32.
        conditioning = map_conditioning(model.condition(twins, batch), lambda tensor: tensor.to(latents.dtype))
        held = sum(tensor.nbytes for tensor in (latents, *flat_conditioning(conditioning).values()))
        return Drawing(twins, {name: record(call, blocks=blocks) for name, call in calls.items()}, held)


def inference_bytes(
    model: LatentDiffusion,
    *,
    height: int,
    width: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    vae_tiling: bool = False,
) -> tuple[int, int]:
    """Compute the memory to generate a batch of images with guidance: all weights, and the peak including them.

    Text encoders, denoiser and VAE decoder run once on the meta device. Weights and all live tensors count, including
    dequantised weights; the libraries' workspaces do not. Attention counts as a fused kernel that never stores the
    score matrix.

    Args:
        model: The model; it is not changed.
        height: Image height in pixels.
        width: Image width in pixels.
        batch_size: Images generated at a time.
        dtype: Count the model as if it were in this dtype, without int8; None counts it as it is.
        vae_tiling: Whether the VAE decodes in tiles.

    Returns:
        Bytes of the weights, and bytes of the peak including the weights.
    """
    size: dict[str, Any] = {"height": height, "width": width, "batch_size": batch_size}
    # Guidance: with the caption and without.
    drawing = drawing_passes(model, **size, rows=2 * batch_size, dtype=dtype, vae_tiling=vae_tiling)
    counted = model.networks if dtype is None else drawing.networks  # only the live networks have LoRA weights
    weights = sum(map(weight_bytes, counted.values()))
    return weights, weights + max(trace.peak() for trace in drawing.traces.values())


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers."""
    return sum(t.nbytes for t in {id(t): t for t in [*network.parameters(), *network.buffers()]}.values())


def _twin(model: LatentDiffusion, name: str, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a network's structure on the meta device."""
    twin, network = meta_networks(model, [name])[name].requires_grad_(False), model.networks[name]
    if dtype is not None:
        return cast(twin, dtype)
    cast(twin, next(network.parameters()).dtype)
    for key, live in int8_layers(network):
        layer = twin.get_submodule(key.replace(".base_layer", ""))  # the twin has no LoRA
        weight, scale = (torch.empty_like(tensor, device="meta") for tensor in (live.weight, live.weight_scale))
        kernel, threshold = (live.kernel, live.threshold) if isinstance(live, Int8Linear) else ("", 0.0)
        to_int8(layer, weight, scale, kernel=kernel, threshold=threshold)
    division = division_of(network)
    for key, part in division.parts.items():
        prefix, _, key = key.rpartition(".")
        layer = twin.get_submodule(prefix)
        if isinstance(whole := getattr(layer, key), nn.Parameter):
            setattr(layer, key, nn.Parameter(whole.new_empty(part.shape), requires_grad=False))
    division.apply_(twin)
    return twin


def cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Change the dtype of a network in place; diffusers' own method warns."""
    return nn.Module.to(network, dtype=dtype)
