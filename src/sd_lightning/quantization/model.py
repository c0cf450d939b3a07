"""Quantise a model to int8 and dequantise it, in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import FAMILIES
from sd_lightning.models.pipeline_folder import QUANTIZATION
from sd_lightning.quantization.config import FORMAT, Int8
from sd_lightning.quantization.layers import (
    Int8Layer,
    Int8Linear,
    check_finite_rows,
    int8_layers,
    quantize_rows,
    to_float,
    to_int8,
)
from sd_lightning.quantization.linear import load_kernels

if TYPE_CHECKING:
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.storage.deferred_weights import DeferredWeights


Filter = Callable[[nn.Module, str], bool]
"""(layer, its name with the network's name first: "vae.conv_out") -> whether to quantise it."""
Model = TypeVar("Model", bound="LatentDiffusion | nn.Module")

_KINDS = {"linear": nn.Linear, "conv2d": nn.Conv2d, "embedding": nn.Embedding}


def quantize_(model: Model, config: Int8 | None = None, filter_fn: Filter | None = None) -> Model:
    """Quantise the weights of a model to int8, in place.

    Deferred weights (``LatentDiffusion.from_pretrained(…, deferred=[…])``) are read a few rows at a time and never
    held whole in floating point. Networks on the meta device get int8 layers without values.

    Args:
        model: A model, or one network.
        config: Layers to quantise and the kernel; ``Int8()`` if not given.
        filter_fn: Chooses the layers instead of ``config.exclude``; LoRA weights are never quantised.

    Returns:
        The model. A second call can change ``linear``, ``float_inputs``, ``threshold`` and ``dtype``; with the same
        config it changes nothing.

    Raises:
        UsageError: ``model`` or ``config`` has a wrong type, other layers of the model are in int8 already, a weight
            is not finite, a name in the config matches no layer, or a package is missing. The model is not changed.
    """
    networks = _networks(model, "quantize_")
    config = Int8() if config is None else config
    if not isinstance(config, Int8):
        raise UsageError(
            f"quantize_ got config={config!r}, a {type(config).__name__}; expected an Int8; write quantize_(model, "
            "Int8(dtype='float16')), or leave it out for the defaults"
        )
    for network in networks.values():
        _check_stored(network, config, filter_fn)
    if filter_fn is None:
        config.check_names([_full(name, key) for name, network in networks.items() for key in _layers(network)])
    load_kernels(config.linear)
    deferred: dict[str, DeferredWeights] = {} if isinstance(model, nn.Module) else model.deferred
    overflows = not isinstance(model, nn.Module) and model.family.vae_overflows
    chosen = {
        name: {
            key: layer
            for key, layer in network.named_modules()
            if _is_chosen(layer, _full(name, key), config, filter_fn)
        }
        for name, network in networks.items()
        if int8_config(network) is None
    }
    for name, layers in chosen.items():  # all of them, before one is changed
        _check_finite(layers, deferred.get(name), name)
    for name, network in networks.items():
        if name in chosen:
            if name in deferred:  # first, so that fill_parameters converts while it reads
                cast_rest(network, config, overflows=overflows)
            _quantize_network(network, chosen[name], config, deferred.pop(name, None), name)
        elif int8_config(network) != config:
            _compute_with(network, config, name)
        cast_rest(network, config, overflows=overflows)
    return model


def replace_module(model: Model) -> Model:
    """Quantise a model to int8 with the defaults, in place: ColossalAI's name for :func:`quantize_`."""
    return quantize_(model)


def dequantize_(model: Model) -> Model:
    """Dequantise a model that is in int8, in place.

    The weights keep their int8 rounding; load the model again for the original weights.
    """
    for network in _networks(model, "dequantize_").values():
        for _, layer in list(int8_layers(network)):
            to_float(layer)
        describe(network, None)
    return model


def int8_config(network: nn.Module) -> Int8 | None:
    """Return the int8 settings of a network; None if it is not quantised."""
    return getattr(network, "int8_config", None)


def int8_record(network: nn.Module) -> dict[str, Any]:
    """Return the int8 entries of a network's ``config.json``."""
    config = int8_config(network)
    return {} if config is None else {QUANTIZATION: config.record(sum(1 for _ in int8_layers(network)))}


def describe(network: nn.Module, config: Int8 | None) -> None:
    """Set a network's int8 settings, for this package and for the ``config.json`` that its library writes."""
    if config is None:
        network.__dict__.pop("int8_config", None)
    else:
        network.int8_config = config  # type: ignore[assignment]
    own: Any = getattr(network, "config", None)
    if hasattr(network, "register_to_config"):  # diffusers, whose configuration is read-only
        entries = {key: value for key, value in own.items() if key != QUANTIZATION}
        network._internal_dict = type(own)(entries | int8_record(network))
    elif hasattr(own, "to_dict"):  # transformers
        vars(own).pop(QUANTIZATION, None)
        for key, record in int8_record(network).items():
            setattr(own, key, {FORMAT: record.pop("quant_method"), **record})


def set_structure(network: nn.Module, names: set[str], config: Int8, network_name: str) -> None:
    """Convert layers on the meta device to int8 layers there, without values."""
    for name in names:
        layer: Any = network.get_submodule(name)
        weight = torch.empty_like(layer.weight, dtype=torch.int8)
        scale = torch.empty(weight.shape[0], device="meta")
        to_int8(layer, weight, scale, kernel=config.kernel(_full(network_name, name)), threshold=config.threshold)
    network.int8_config = config  # type: ignore[assignment]


def cast_rest(network: nn.Module, config: Int8, *, overflows: bool) -> None:
    """Cast all weights that are not int8 to ``config.dtype``; a VAE that overflows in float16 stays in float32."""
    # diffusers' default of force_upcast is True, so force_upcast alone does not mean that the VAE overflows.
    upcast = overflows and getattr(network.config, "force_upcast", False)
    dtype = torch.float32 if upcast and config.dtype == "float16" else config.torch_dtype
    if dtype is not None:
        nn.Module.to(network, dtype)  # diffusers' own method warns at every cast


def _networks(model: LatentDiffusion | nn.Module, who: str) -> Mapping[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    networks = getattr(model, "networks", None)
    if isinstance(networks, Mapping):
        return networks
    if isinstance(model, str | os.PathLike):
        given, remedy = repr(str(model)), f"{who}(LatentDiffusion.from_pretrained({str(model)!r}))"
    elif type(model).__name__ in FAMILIES:  # a pipeline of diffusers
        given = f"a {type(model).__name__}"
        denoiser = FAMILIES[given.removeprefix("a ")].denoiser
        remedy = f"{who}(pipeline.{denoiser}), or load the folder with LatentDiffusion.from_pretrained"
    else:
        given, remedy = f"a {type(model).__name__}", f"{who}(LatentDiffusion.from_pretrained(<folder>))"
    raise UsageError(f"{who} got {given}; expected a LatentDiffusion or one network (nn.Module); write {remedy}")


def _full(network: str, key: str) -> str:
    """Return the full name of a layer, prefixed by the network's name if there is one."""
    return ".".join(filter(None, [network, key]))


def _layers(network: nn.Module) -> list[str]:
    """Return the names of the layers that are, or could be, in int8."""
    kinds = (*_KINDS.values(), Int8Layer)
    return [key for key, layer in network.named_modules() if isinstance(layer, kinds) and "lora_" not in key]


def _is_chosen(layer: nn.Module, name: str, config: Int8, filter_fn: Filter | None) -> bool:
    if type(layer) not in {_KINDS[kind] for kind in config.layers} or "lora_" in name:
        return False
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:  # it rescales its weight at each call
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


def _compute_with(network: nn.Module, config: Int8, name: str) -> None:
    for key, layer in int8_layers(network):
        if isinstance(layer, Int8Linear):
            layer.kernel, layer.threshold = config.kernel(_full(name, key)), config.threshold
    describe(network, config)


def _check_finite(layers: Mapping[str, nn.Module], deferred: DeferredWeights | None, name: str) -> None:
    """Raise if a weight is not finite, before any layer changes; deferred weights are read a second time later."""
    for key, layer in layers.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if weight.numel() and (deferred is not None or not weight.is_meta):
            rows = _row_reader(weight, deferred, f"{key}.weight")
            check_finite_rows(weight.shape, rows, _full(name, f"{key}.weight"))


def _quantize_network(
    network: nn.Module, chosen: Mapping[str, nn.Module], config: Int8, deferred: DeferredWeights | None, name: str
) -> None:
    if deferred is not None:
        names = [key for key, _ in network.named_parameters() if key.removesuffix(".weight") not in chosen]
        deferred.fill_parameters(network, names)
        deferred.fill_buffers(network)
    for key, layer in chosen.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if weight.is_meta and deferred is None:
            set_structure(network, {key}, config, name)
            continue
        quantized, scale = quantize_rows(weight.shape, _row_reader(weight, deferred, f"{key}.weight"))
        to_int8(layer, quantized, scale, kernel=config.kernel(_full(name, key)), threshold=config.threshold)
    describe(network, config)


def _row_reader(weight: Tensor, deferred: DeferredWeights | None, name: str) -> Callable[[int, int], Tensor]:
    if deferred is None:
        return lambda begin, end: weight[begin:end]

    def rows(begin: int, end: int) -> Tensor:
        numel = weight.shape[1:].numel()
        block = torch.empty((end - begin) * numel)
        deferred.read(name, block, begin * numel, end * numel)
        return block

    return rows
