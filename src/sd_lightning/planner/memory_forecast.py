"""Forecast of a training run's GPU and host memory, without allocating it.

Weights, gradients and optimizer states are computed in closed form from the placement that the Gemini engine will
choose; activations are traced on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.layout import ParameterSpec, Shard, pack_as_set
from sd_lightning.gemini.own_update import update_of
from sd_lightning.gemini.placement import Demand, fast_bytes, plan_static
from sd_lightning.gemini.tiers import Tier
from sd_lightning.models.adapters.lora import Lora
from sd_lightning.models.encoder import images_per_call
from sd_lightning.models.families.base import map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.meta import meta_batch, meta_conditioning
from sd_lightning.planner.memory_trace import peak_bytes
from sd_lightning.training.speed import enable_gradient_checkpointing

GB = 1e9
DEVICE_ALLOWANCE = int(0.6 * GB)
"""Allowance, not measured here, for the CUDA context, workspaces of cuBLAS and cuDNN, and fragmentation."""
HOST_ALLOWANCE = int(2.0 * GB)
"""Allowance, not measured here, for Python, torch and the CUDA libraries in host memory."""
_TRACE_MARGIN = 1.1
"""Traces of passes with activation checkpointing were 6 % below torch's own memory tracker."""
_FLOAT_BYTES = 4
_SLICE_BYTES = 3 * 16 * 2**20
"""Buffers that stream a checkpoint to disk."""


@dataclass(frozen=True)
class Training:
    """Settings of a run that its memory depends on."""

    batch_size: int
    """Samples per forward pass and process."""
    resolution: int
    """Side of the images, pixels."""
    train_text_encoder: bool = False
    lora: Lora | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-5)
    """Parameters -> optimizer; one that Gemini supports."""
    gradient_checkpointing: bool = False
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the weights and activations of the trained networks."""
    encoder_dtype: torch.dtype = torch.bfloat16
    averages: bool = False
    """Whether an EMA of the weights is kept."""
    offload_averages: bool = False
    """Whether the EMA is in host memory instead of on the device."""
    offload_encoders: bool = True
    """Whether frozen encoders are on the device only while they encode, one image at a time."""
    cache_latents: bool = True
    """Whether images are encoded before training instead of in each step."""
    drawn_size: tuple[int, int] | None = None
    """Height and width of generated images, pixels; ``resolution`` if not given."""
    vae_tiling: bool = False
    """Whether generated images are decoded in tiles."""
    sample_batch_size: int = 1
    """Images generated at a time during and after training; 0 for none."""
    num_images: int = 100
    """Images whose moments are cached in host memory with ``cache_latents``."""
    world_size: int = 1
    prior_batch_size: int = 0
    """Class images generated at a time before training; 0 for none."""
    prior_dtype: torch.dtype = torch.bfloat16
    """Dtype in which class images are generated."""
    from_files: bool = True
    """Whether weights are read from files tensor by tensor, not built as a whole model."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one process, bytes."""

    weights_and_states: int
    """On the device: the engine's weights, gradients and states; EMA and encoders if not offloaded."""
    activations: int
    """On the device: peak of a training step."""
    drawing: int
    """On the device while images are generated or encoded: offloaded encoders, and activations of denoiser or VAE."""
    class_images: int
    """On the device while class images are generated: the whole model, and activations of denoiser or VAE."""
    host_states: int
    """On the host: offloaded weights, master weights, gradients and optimizer states."""
    host_others: int
    """On the host: offloaded encoders and EMA, cached latents, and buffers that write a checkpoint."""
    host_loading: int
    """On the host after the engine's setup: offloaded states, encoders in float32, and a tensor on its way to the
    device; or before it the whole model in float32, if it is not read from files."""

    @property
    def device(self) -> int:
        """Peak of the device's memory, bytes."""
        training = self.weights_and_states + max(self.activations, self.drawing)
        return max(training, self.class_images) + DEVICE_ALLOWANCE

    @property
    def host(self) -> int:
        """Peak of host memory, bytes."""
        return max(self.host_states + self.host_others, self.host_loading) + HOST_ALLOWANCE

    def lines(self) -> list[str]:
        """Return a readable summary."""
        return [
            f"device  {self.device / GB:5.2f} GB = weights and states {self.weights_and_states / GB:.2f} + the larger "
            f"of a step's activations {self.activations / GB:.2f} and drawing {self.drawing / GB:.2f}, or before that "
            f"class images {self.class_images / GB:.2f}, + allowance {DEVICE_ALLOWANCE / GB:.1f}",
            f"host    {self.host / GB:5.2f} GB = the larger of offloaded states {self.host_states / GB:.2f} with "
            f"encoders, latents and buffers {self.host_others / GB:.2f}, and all while the model is loaded "
            f"{self.host_loading / GB:.2f} + allowance {HOST_ALLOWANCE / GB:.1f}",
        ]


def forecast(model: LatentDiffusion, training: Training, gemini: GeminiConfig) -> Forecast:
    """Predict the memory of a run with ``strategy=gemini``.

    Args:
        model: On the meta device, in float32 (``LatentDiffusion.describe`` or ``build``); it is changed and cannot be
            used afterwards.
        training: Settings of the run.
        gemini: Settings of the engine, with static placement.
    """
    whole = sum(_bytes(network) for network in model.networks.values())
    names = [model.family.denoiser, *(model.text_encoders if training.train_text_encoder else ())]
    trained = {name: model.networks[name] for name in names}
    loading = whole - sum(_bytes(network) for network in trained.values())
    loading += max(_FLOAT_BYTES * p.numel() for network in trained.values() for p in network.parameters())
    for network in trained.values():
        _cast(network, training.dtype).requires_grad_(True).train()
    if training.lora is not None:
        with torch.device("meta"):
            training.lora.apply_(trained)
        for network in trained.values():
            _cast(network, training.dtype)
    if training.gradient_checkpointing:
        for network in trained.values():
            enable_gradient_checkpointing(network)
    device, host = _states(trained, training, gemini)
    numel = sum(p.numel() for network in trained.values() for p in network.parameters() if p.requires_grad)
    loading += host + (_FLOAT_BYTES * numel if training.lora is not None else 0)  # adapters begin in host memory
    average = _FLOAT_BYTES * numel // training.world_size if training.averages else 0
    average_on_host = average if training.offload_averages else 0
    encoders = [network for name, network in model.networks.items() if name not in trained]
    for network in encoders:
        _cast(network, training.encoder_dtype).requires_grad_(False).eval()
    encoder_bytes = sum(_bytes(network) for network in encoders)
    waiting = encoder_bytes if training.offload_encoders else 0
    latents = math.prod(model.family.latent_shape(model.components, training.resolution, training.resolution))
    moments = training.num_images * 2 * latents * _FLOAT_BYTES if training.cache_latents else 0
    drawing = max(_drawing_peak(model, training, training.sample_batch_size), _encoding_peak(model, training))
    return Forecast(
        weights_and_states=device + average - average_on_host + encoder_bytes - waiting,
        activations=int(_TRACE_MARGIN * _step_peak(model, trained, training)),
        drawing=waiting + int(_TRACE_MARGIN * drawing),
        class_images=_class_images(model, training, whole) if training.prior_batch_size else 0,
        host_states=host,
        host_others=waiting + average_on_host + moments + _SLICE_BYTES,
        host_loading=loading if training.from_files else max(loading, whole),
    )


def _states(trained: Mapping[str, nn.Module], training: Training, gemini: GeminiConfig) -> tuple[int, int]:
    """Return the bytes of weights, gradients and states on device and host, in the engine's placement."""
    specs = [
        ParameterSpec(f"{name}.{key}", parameter.numel(), training.dtype, parameter.requires_grad)
        for name, network in trained.items()
        for key, parameter in network.named_parameters()
    ]
    world_size = training.world_size
    layouts = pack_as_set(specs, gemini, world_size)
    plan = plan_static(layouts, gemini)
    shards = [Shard(layout, 0, world_size) for layout in layouts]
    states = _state_bytes(shards, training)
    units = tuple((layout.index,) for layout in layouts)
    sent_dtype = gemini.reduce_dtype if world_size > 1 else None
    device = fast_bytes(layouts, plan.chunks, Demand(0, 0, states, units, world_size, sent_dtype=sent_dtype))
    if gemini.offload_param_frac or world_size > 1:
        whole = sum(layout.numel for layout in layouts) * training.dtype.itemsize
        device += whole if gemini.gathered_budget is None else min(gemini.gathered_budget, whole)
    host = 0
    for shard, place, moments in zip(shards, plan.chunks, states):
        if place.param_tier is Tier.SLOW:
            host += shard.numel * training.dtype.itemsize
        if shard.layout.is_trained and place.optim_tier is Tier.SLOW:
            host += 2 * _FLOAT_BYTES * shard.numel + moments  # master weights and gradients
        if shard.layout.is_trained and place.optim_tier is Tier.DISK:
            host += _FLOAT_BYTES * shard.numel  # gradients stay on the host until the step
    return device, host


def _state_bytes(shards: Sequence[Shard], training: Training) -> tuple[int, ...]:
    """Return the bytes of optimizer states of each shard."""
    optimizer = training.optimizer([nn.Parameter(torch.empty(1))])
    update, (group,) = update_of(optimizer), optimizer.param_groups
    count = len(update.states(group))
    sizes = [update.size(shard) if shard.layout.is_trained else (0, torch.uint8) for shard in shards]
    return tuple(count * numel * dtype.itemsize for numel, dtype in sizes)


def _step_peak(model: LatentDiffusion, trained: Mapping[str, nn.Module], training: Training) -> int:
    """Return the peak of a forward and backward pass; gradients are freed at once: the engine takes them."""

    def step() -> None:
        inputs = meta_batch(model, training.batch_size, height=training.resolution, width=training.resolution)
        if training.train_text_encoder:
            conditioning = model.condition(trained, inputs)
        else:
            conditioning = meta_conditioning(model, inputs, training.dtype)
        conditioning = map_conditioning(conditioning, lambda t: t.to(training.dtype))
        latents = inputs["latents"].to(training.dtype)
        prediction = model.family.denoise(model.denoiser, latents, inputs["timesteps"], conditioning)
        (prediction.float() - inputs["latents"]).square().mean((1, 2, 3)).mean().backward()

    for parameter in (p for network in trained.values() for p in network.parameters() if p.requires_grad):
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    return peak_bytes(step)


def _class_images(model: LatentDiffusion, training: Training, whole: int) -> int:
    """Return the device memory for generating class images, given the model's bytes in float32; casts the networks."""
    dtype = training.prior_dtype
    vae_dtype = model.family.vae_dtype(model.vae, dtype)
    _cast(model.denoiser, dtype)
    _cast(model.vae, vae_dtype)
    weights = whole * dtype.itemsize // _FLOAT_BYTES + (_bytes(model.vae) // 2 if vae_dtype != dtype else 0)
    return weights + int(_TRACE_MARGIN * _drawing_peak(model, training, training.prior_batch_size))


def _drawing_peak(model: LatentDiffusion, training: Training, count: int) -> int:
    """Return the peak of generating ``count`` images in the networks' dtypes: denoiser with guidance, then VAE."""
    if count == 0:
        return 0
    denoiser, vae, family = model.denoiser, model.vae, model.family
    dtype, decoded = (next(network.parameters()).dtype for network in (denoiser, vae))
    height, width = training.drawn_size or (training.resolution, training.resolution)

    def denoise() -> None:
        inputs = meta_batch(model, 2 * count, height=height, width=width)
        conditioning = map_conditioning(meta_conditioning(model, inputs, dtype), lambda t: t.to(dtype))
        family.denoise(denoiser, inputs["latents"].to(dtype), inputs["timesteps"], conditioning)

    def decode() -> None:
        vae.decode(meta_batch(model, count, height=height, width=width)["latents"].to(decoded))

    denoiser.eval()
    with torch.no_grad(), family.decoding_in_tiles(vae, training.vae_tiling):
        peaks = [peak_bytes(compute) for compute in (denoise, decode)]
    denoiser.train()
    return max(peaks)


def _encoding_peak(model: LatentDiffusion, training: Training) -> int:
    """Return the peak of encoding images, for as many as are encoded at a time."""
    size = training.resolution
    num_images = training.num_images if training.cache_latents else training.batch_size
    count = 1 if training.offload_encoders else min(num_images, images_per_call(size, size))

    def encode() -> None:
        model.family.encode(model.vae, torch.empty(count, 3, size, size, dtype=training.encoder_dtype, device="meta"))

    with torch.no_grad():
        return peak_bytes(encode)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(network: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters())


def _cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    return nn.Module.to(network, dtype=dtype)  # diffusers' own method warns
