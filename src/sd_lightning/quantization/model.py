"""Put a model into int8 and back, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.pipeline_folder import QUANTIZATION
from sd_lightning.quantization.config import Int8
from sd_lightning.quantization.layers import Int8Linear, int8_layers, quantize_rows, to_float, to_int8
from sd_lightning.quantization.linear import load_kernels

if TYPE_CHECKING:
    from sd_lightning.deferred_weights import DeferredWeights
    from sd_lightning.latent_diffusion import LatentDiffusion

Filter = Callable[[nn.Module, str], bool]
"""(layer, its name, beginning with the network's: "unet.conv_out") -> whether to quantise it."""
Model = TypeVar("Model", "LatentDiffusion", nn.Module)

_KINDS = {"linear": nn.Linear, "conv2d": nn.Conv2d, "embedding": nn.Embedding}


def quantize_(model: Model, config: Int8 | None = None, filter_fn: Filter | None = None) -> Model:
    """Put the weights of a model into int8, in place.

    Weights that are still in their files (``LatentDiffusion.from_pretrained(…, deferred=[…])``) are read a few rows at
    a time: the model is never in memory in another form than int8. Networks on the meta device get the structure.

    Args:
        model: A model, or one network.
        config: What to quantise, and what computes with it.
        filter_fn: Chooses the layers, in the place of ``config.exclude``; weights of LoRA are never quantised.

    Returns:
        The model. Another call with a config that differs in what computes (``linear``, ``threshold``, ``dtype``)
        changes just that, and one with the same config nothing.

    Raises:
        UsageError: Other layers of the model are in int8 already, a weight is not finite, or a package is missing.
    """
    config = config or Int8()
    networks = _networks(model)
    for network in networks.values():
        _check_stored(network, config, filter_fn)
    load_kernels(config.linear)
    deferred: dict[str, DeferredWeights] = getattr(model, "deferred", {})
    pipeline_class = getattr(model, "pipeline_class", "")
    for name, network in networks.items():
        if int8_config(network) is None:
            if name in deferred:  # before the rest is read, so that it is converted on the way
                cast_rest(network, config, pipeline_class)
            chosen = {
                key: layer
                for key, layer in network.named_modules()
                if _is_chosen(layer, ".".join(filter(None, [name, key])), config, filter_fn)
            }
            _quantize_network(network, chosen, config, deferred.pop(name, None), name)
        elif int8_config(network) != config:
            _compute_with(network, config)
        cast_rest(network, config, pipeline_class)
    return model


def replace_module(model: Model) -> Model:
    """Put a model into int8 with the defaults, in place: ColossalAI's name of :func:`quantize_`."""
    return quantize_(model)


def dequantize_(model: Model) -> Model:
    """Put a model that is in int8 back into floating point, in place.

    The values are those that int8 left of the weights; load the model again for the original ones.
    """
    for network in _networks(model).values():
        for _, layer in list(int8_layers(network)):
            to_float(layer)
        network.__dict__.pop("int8_config", None)
    return model


def int8_config(network: nn.Module) -> Int8 | None:
    """Return how a network was quantised; None if it was not."""
    return getattr(network, "int8_config", None)


def int8_record(network: nn.Module) -> dict[str, Any]:
    """Return what belongs into the ``config.json`` of a network on account of int8."""
    config = int8_config(network)
    return {} if config is None else {QUANTIZATION: config.record(sum(1 for _ in int8_layers(network)))}


def set_structure(network: nn.Module, names: set[str], config: Int8) -> None:
    """Turn layers whose weights are on the meta device into int8 ones there: a place for weights that are int8."""
    for name in names:
        layer: Any = network.get_submodule(name)
        weight = torch.empty_like(layer.weight, dtype=torch.int8)
        scale = torch.empty(weight.shape[0], device="meta")
        to_int8(layer, weight, scale, kernel=config.kernel(name), threshold=config.threshold)
    network.int8_config = config  # type: ignore[assignment]


def cast_rest(network: nn.Module, config: Int8, pipeline_class: str) -> None:
    """Cast what is not int8 to the dtype of the config; ``pipeline_class`` is "" for a network on its own."""
    # diffusers' default of force_upcast is True; only the pipeline of SDXL, whose VAE does overflow, looks at it.
    upcast = pipeline_class == "StableDiffusionXLPipeline" and getattr(network.config, "force_upcast", False)
    dtype = torch.float32 if upcast and config.dtype == "float16" else config.torch_dtype
    if dtype is not None:
        nn.Module.to(network, dtype)  # diffusers' own warns at every cast


def _networks(model: LatentDiffusion | nn.Module) -> Mapping[str, nn.Module]:
    return {"": model} if isinstance(model, nn.Module) else model.networks


def _is_chosen(layer: nn.Module, name: str, config: Int8, filter_fn: Filter | None) -> bool:
    if type(layer) not in {_KINDS[kind] for kind in config.layers} or "lora_" in name:
        return False
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:  # rescales its weight when it is called
        return False
    if filter_fn is not None:
        return filter_fn(layer, name)
    return not config.excludes(name)


def _check_stored(network: nn.Module, config: Int8, filter_fn: Filter | None) -> None:
    before = int8_config(network)
    if before is None:
        return
    differing = [name for name in ("layers", "exclude") if getattr(before, name) != getattr(config, name)]
    if differing or filter_fn is not None:
        given = [f"{name}={list(getattr(config, name))}" for name in differing] or ["a filter_fn"]
        stored = " and ".join(f"{name}={list(getattr(before, name))}" for name in differing or ("layers", "exclude"))
        raise UsageError(
            f"quantize_ got {' and '.join(given)} for a model that is in int8 already, with {stored}; expected the "
            "same; call dequantize_(model) first, or load the original weights"
        )


def _compute_with(network: nn.Module, config: Int8) -> None:
    for name, layer in int8_layers(network):
        if isinstance(layer, Int8Linear):
            layer.kernel, layer.threshold = config.kernel(name), config.threshold
    network.int8_config = config  # type: ignore[assignment]


def _quantize_network(
    network: nn.Module, chosen: Mapping[str, nn.Module], config: Int8, deferred: DeferredWeights | None, name: str
) -> None:
    if deferred is not None:
        read_rest(network, deferred, {f"{key}.weight" for key in chosen})
    for key, layer in chosen.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if weight.is_meta and deferred is None:
            set_structure(network, {key}, config)
            continue
        read = _row_reader(weight, deferred, f"{key}.weight")
        quantized, scale = quantize_rows(weight.shape, read, f"{name}.{key}.weight".lstrip("."))
        to_int8(layer, quantized, scale, kernel=config.kernel(key), threshold=config.threshold)
    network.int8_config = config  # type: ignore[assignment]


def read_rest(network: nn.Module, deferred: DeferredWeights, without: set[str]) -> None:
    """Read the parameters that are not quantised, and what is saved of the buffers."""
    parameters = dict(network.named_parameters())
    deferred.fill_parameters(network, [key for key in parameters if key not in without])
    for key in network.state_dict().keys() - parameters.keys() - without:
        deferred.read(key, network.get_buffer(key))


def _row_reader(weight: Tensor, deferred: DeferredWeights | None, name: str) -> Callable[[int, int], Tensor]:
    if deferred is None:
        return lambda begin, end: weight[begin:end]

    def rows(begin: int, end: int) -> Tensor:
        numel = weight.shape[1:].numel()
        block = torch.empty((end - begin) * numel)
        deferred.read(name, block, begin * numel, end * numel)
        return block

    return rows
