"""Memory of image generation: the bytes of the weights, and the peak from a trace on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.meta import meta_batch, meta_networks
from sd_lightning.planner.recording import record
from sd_lightning.quantization.layers import Int8Linear, int8_layers, to_int8


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers."""
    return sum(t.nbytes for t in {id(t): t for t in [*network.parameters(), *network.buffers()]}.values())


def inference_bytes(
    model: LatentDiffusion, *, height: int, width: int, batch_size: int = 1, dtype: torch.dtype | None = None
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

    Returns:
        Bytes of the weights, and bytes of the peak including the weights.
    """
    twins = {name: _twin(model, name, dtype) for name in model.networks}
    counted = model.networks if dtype is None else twins  # only the live networks have LoRA weights
    weights = sum(map(weight_bytes, counted.values()))
    with torch.no_grad():
        return weights, weights + max(record(call).peak() for call in _calls(model, twins, height, width, batch_size))


def _twin(model: LatentDiffusion, name: str, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a network's structure on the meta device."""
    twin = meta_networks(model, [name])[name].requires_grad_(False)
    network = model.networks[name]
    if name == "vae" and model.vae.use_tiling:
        twin.use_tiling = True  # type: ignore[assignment]
        for setting in ("tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor"):
            setattr(twin, setting, getattr(network, setting))
    if dtype is not None:
        return nn.Module.to(twin, dtype)
    nn.Module.to(twin, next(network.parameters()).dtype)
    for key, live in int8_layers(network):
        layer = twin.get_submodule(key.replace(".base_layer", ""))  # the twin has no LoRA
        weight, scale = (torch.empty_like(tensor, device="meta") for tensor in (live.weight, live.weight_scale))
        kernel, threshold = (live.kernel, live.threshold) if isinstance(live, Int8Linear) else ("", 0.0)
        to_int8(layer, weight, scale, kernel=kernel, threshold=threshold)
    return twin


def _calls(
    model: LatentDiffusion, twins: Mapping[str, nn.Module], height: int, width: int, batch_size: int
) -> Iterator[Callable[[], None]]:
    """Yield a pipeline's calls of text encoders, denoiser and VAE decoder; inputs stay alive as in a pipeline."""
    family, vae = model.family, twins["vae"]
    denoiser = twins[family.denoiser]
    rows, dtype = 2 * batch_size, next(denoiser.parameters()).dtype  # guidance: with the caption and without
    batch = meta_batch(model, rows, height=height, width=width)
    latents = batch["latents"].to(dtype)

    def encode() -> None:
        model.condition(twins, batch)

    def denoise() -> None:
        family.denoise(denoiser, latents, torch.empty((), device="meta"), conditioning)

    def decode() -> None:
        vae.decode(decoded)  # type: ignore[operator]

    yield encode
    conditioning = model.condition(twins, batch)
    yield denoise
    decoded = latents[:batch_size].to(next(vae.parameters()).dtype)
    yield decode
