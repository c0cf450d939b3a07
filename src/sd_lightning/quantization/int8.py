"""int8 inference: its settings, and quantising and dequantising of networks, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.quantization.casting import cast_
from sd_lightning.quantization.layers import (
    Int8Layer,
    Int8Linear,
    Part,
    Rows,
    check_finite_rows,
    int8_layers,
    quantize_rows,
    refuse_quantised,
    to_float,
    to_int8,
)
from sd_lightning.quantization.tensor_parallel import (
    DividedModel,
    Division,
    TensorParallel,
    check_division,
    check_is_whole,
)
from sd_lightning.state.ranks import failing_together

if TYPE_CHECKING:
    from sd_lightning.storage.deferred_weights import DeferredWeights

Linear = Literal["bitsandbytes", "weight_only"]
Layer = Literal["linear", "conv2d", "embedding"]
_KINDS = {"linear": nn.Linear, "conv2d": nn.Conv2d, "embedding": nn.Embedding}
Dtype = Literal["float32", "float16", "bfloat16"]

# `benchmarks/run.py int8_layers` measures the memory and accuracy of each of these; see docs/int8.md.
EXCLUDED = ("time_embedding", "conv_in", "conv_out", "quant_conv", "post_quant_conv", "position_embedding")
FLOAT_INPUTS = ("proj_in", "proj_out")
QUANTIZATION = "quantization_config"
"""Key of ``config.json`` that holds the quantisation settings of a network."""
QUANT_METHOD = "sd_lightning_int8"
"""Value of ``quant_method`` in ``config.json``; diffusers refuses a method that it does not know."""
FORMAT = "format"
"""Key of that value in transformers' ``config.json``: it ignores an unknown ``quant_method`` but requires one."""
NUM_LAYERS = "num_layers"


@dataclass(frozen=True)
class Int8:
    """Settings of int8 weights, with one float32 scale per output channel (LLM.int8(), arXiv 2208.07339)."""

    linear: Linear = "weight_only"
    """Kernel of linear layers: weight_only (weights are dequantised on the fly) or bitsandbytes (LLM.int8: activations
    also in int8, except outlier columns). Convolutions and embeddings are always weight_only. Only with weight_only
    are images independent of the batch that they are generated in: with int8 activations, a difference in the last bit
    can become a whole int8 step."""
    layers: Sequence[Layer] = ("linear", "conv2d", "embedding")
    """Kinds of layers to quantise."""
    exclude: Sequence[str] = EXCLUDED
    """Layers that are not quantised: names of modules, alone ("conv_out", "vae") or as a path ("unet.conv_in").
    Names other than the defaults must exist in the model."""
    float_inputs: Sequence[str] = FLOAT_INPUTS
    """Linear layers that are always weight_only, so that their activations stay in float; names as in ``exclude``."""
    threshold: float = 6.0
    """For bitsandbytes: activations of at least this magnitude are outliers, multiplied unquantised; 0: no outliers.
    On a GPU any other value means 1/32 of the columns, the largest, so that the host need not wait for their number."""
    dtype: Dtype | None = None
    """Dtype of all other weights and of computation; None leaves it unchanged. An SDXL pipeline's VAE that overflows
    in float16 (``force_upcast``) stays in float32."""

    def __post_init__(self) -> None:
        if not self.layers or isinstance(self.layers, str):
            raise UsageError(f"Int8 got layers={self.layers!r}; expected a list of {', '.join(get_args(Layer))}")
        choices = [("linear", self.linear, get_args(Linear)), ("dtype", self.dtype, (*get_args(Dtype), None))]
        for name, value, allowed in [*choices, *(("layers", kind, get_args(Layer)) for kind in self.layers)]:
            if value not in allowed:
                names = ", ".join("null" if each is None else each for each in allowed)
                raise UsageError(f"Int8 got {name}={value}; expected one of {names}")
        if self.threshold < 0:
            raise UsageError(f"Int8 got threshold={self.threshold}; expected at least 0, e.g. threshold=6.0 (0: none)")
        for name in ("layers", "exclude", "float_inputs"):
            if isinstance(value := getattr(self, name), str):
                raise UsageError(f"Int8 got {name}={value!r}; expected a list of module names: [{value}]")
            object.__setattr__(self, name, tuple(value))  # so that configs compare equal

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)

    def check_names(self, layers: Collection[str]) -> None:
        """Check that all names in ``exclude`` and ``float_inputs``, except the defaults, exist in a model.

        Args:
            layers: Names of all layers that could be in int8.

        Raises:
            UsageError: No layer has such a name.
        """
        for field, usual in (("exclude", EXCLUDED), ("float_inputs", FLOAT_INPUTS)):
            for pattern in [pattern for pattern in getattr(self, field) if pattern not in usual]:
                if not any(matches([pattern], name) for name in layers):
                    examples = ", ".join(sorted(layers)[:: max(1, len(layers) // 3)][:3])
                    raise UsageError(
                        f"Int8 got {field}={list(getattr(self, field))}, but no layer is named {pattern}; expected "
                        f"whole parts of names such as {examples}; leave {pattern} out, or correct it"
                    )

    def kernel(self, name: str) -> Linear:
        """Return the kernel of a linear layer of this name."""
        return "weight_only" if matches(self.float_inputs, name) else self.linear

    def record(self, num_layers: int) -> dict[str, Any]:
        """Return the ``quantization_config`` entry of ``config.json`` for a network with that many int8 layers."""
        return {"quant_method": QUANT_METHOD, NUM_LAYERS: num_layers, **asdict(self)}


def read_record(config: Mapping[str, Any], who: str) -> Int8 | None:
    """Read the int8 settings from a network's ``config.json``; None if it was not quantised, or by another library.

    Raises:
        UsageError: The entry is damaged, or was written by a later version.
    """
    record = config.get(QUANTIZATION)
    if not isinstance(record, Mapping) or QUANT_METHOD not in (record.get("quant_method"), record.get(FORMAT)):
        return None
    try:
        return Int8(**{key: value for key, value in record.items() if key not in ("quant_method", FORMAT, NUM_LAYERS)})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{who}: cannot read the quantization_config ({error}); expected "
            f"{', '.join(sorted(field.name for field in fields(Int8)))}; copy that config.json again"
        ) from error


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether one of the patterns matches whole consecutive parts of a dotted name."""
    return any(f".{pattern}." in f".{name}." for pattern in patterns)


class QuantizableModel(DividedModel, Protocol):
    """Networks that are quantised together: a ``LatentDiffusion``."""

    deferred: dict[str, DeferredWeights]
    """Weights of networks on the meta device that are still in files; an entry is removed when it is read."""

    def draws_in_float32(self, name: str) -> bool:
        """Return whether a network overflows in float16, so that it stays in float32."""


Model = TypeVar("Model", bound="QuantizableModel | nn.Module")


def quantize_(
    model: Model, config: Int8 | Mapping[str, Int8] | None = None, *, tensor_parallel: TensorParallel | None = None
) -> Model:
    """Quantise the weights of a model to int8, in place.

    Deferred weights (``LatentDiffusion.from_pretrained(…, deferred=[…])``) are read a few rows at a time and never
    held whole in floating point. Networks on the meta device get int8 layers without values.

    Args:
        model: A model, or one network. LoRA weights are never quantised.
        config: Layers to quantise and the kernel; ``Int8()`` if not given. A mapping from networks' names gives each
            its own, such as :func:`int8_configs`; networks that are not in it stay in floating point.
        tensor_parallel: Divide the layers of a ``LatentDiffusion`` among processes: this one reads and keeps its part.
            Every process calls it, and from then on every call of a network is collective. int8 weights and scales
            are those of one device; a row-wise layer with the kernel bitsandbytes scales activations by its part.

    Returns:
        The model. A second call can change ``linear``, ``float_inputs``, ``threshold`` and ``dtype``; with the same
        config it changes nothing.

    Raises:
        UsageError: ``model`` or ``config`` has a wrong type, other layers of the model are in int8 already, or it is
            the base of adapters, a weight is not finite, a name in the config matches no layer, or the model cannot be
            divided among the processes. The model is not changed.
    """
    networks = _networks(model, "quantize_")
    check_is_whole(networks, "quantize_")
    for network in networks.values():
        if int8_config(network) is None:
            refuse_quantised(network, "quantize_")  # the base of adapters
    configs = config if isinstance(config, Mapping) else dict.fromkeys(networks, Int8() if config is None else config)
    if not all(isinstance(each, Int8) for each in configs.values()) or configs.keys() - networks.keys():
        raise UsageError(
            f"quantize_ got config={config!r}, a {type(config).__name__}; expected an Int8, or one for some of "
            f"{', '.join(networks)}; write quantize_(model, Int8(dtype='float16')), or leave it out for the defaults"
        )
    names = [_full(name, key) for name, network in networks.items() for key in _layers(network)]
    for name, own in configs.items():
        _check_stored(networks[name], own)
        own.check_names(names)
    deferred: dict[str, DeferredWeights] = {} if isinstance(model, nn.Module) else model.deferred
    upcast = set() if isinstance(model, nn.Module) else {name for name in networks if model.draws_in_float32(name)}
    chosen = {
        name: {
            key: layer
            for key, layer in networks[name].named_modules()
            if type(layer) in {_KINDS[kind] for kind in own.layers}
            and "lora_" not in key
            and getattr(layer, "max_norm", None) is None  # such an embedding rescales its weight at each call
            and not matches(own.exclude, _full(name, key))
        }
        for name, own in configs.items()
        if int8_config(networks[name]) is None
    }
    divisions = {} if tensor_parallel is None else _divisions(model, tensor_parallel)
    _check_finite(chosen, deferred, tensor_parallel)  # before a layer is changed
    for name, network in networks.items():
        own, division = configs.get(name, Int8()), divisions.get(name, Division())
        if name in deferred:  # first, so that weights are converted while they are read
            cast_rest(network, own, upcast=name in upcast)
        quantize_layers(network, chosen.get(name, {}), own, name, deferred.pop(name, None), division.parts)
        if name in configs and int8_config(network) != own:
            for key, layer in int8_layers(network):
                if isinstance(layer, Int8Linear):
                    layer.kernel, layer.threshold = own.kernel(_full(name, key)), own.threshold
            describe(network, own)
        cast_rest(network, own, upcast=name in upcast)
        division.apply_(network)
    return model


def replace_module(model: Model) -> Model:
    """Quantise a model to int8 with the defaults, in place: ColossalAI's name for :func:`quantize_`."""
    return quantize_(model)


def dequantize_(model: Model) -> Model:
    """Dequantise a model that is in int8, in place.

    The weights keep their int8 rounding; load the model again for the original weights.
    """
    networks = _networks(model, "dequantize_")
    check_is_whole(networks, "dequantize_")
    for network in networks.values():
        for _, layer in list(int8_layers(network)):
            to_float(layer)
        describe(network, None)
    return model


def int8_config(network: nn.Module) -> Int8 | None:
    """Return the int8 settings of a network; None if it is not quantised."""
    return getattr(network, "int8_config", None)


def int8_configs(model: QuantizableModel) -> dict[str, Int8]:
    """Return the int8 settings of the networks that are quantised."""
    return {name: own for name, network in model.networks.items() if (own := int8_config(network)) is not None}


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


def cast_rest(network: nn.Module, config: Int8, *, upcast: bool) -> None:
    """Cast all weights that are not int8 to ``config.dtype``; if ``upcast``, to float32 instead of float16."""
    dtype = torch.float32 if upcast and config.dtype == "float16" else config.torch_dtype
    if dtype is not None:
        cast_(network, dtype)


def _networks(model: QuantizableModel | nn.Module, who: str) -> Mapping[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    networks = getattr(model, "networks", None)
    if isinstance(networks, Mapping):
        return networks
    given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
    raise UsageError(
        f"{who} got {given}; expected a LatentDiffusion or one network (nn.Module); write "
        f"{who}(LatentDiffusion.from_pretrained(<folder>)), or {who}(pipeline.<network>) for a pipeline of diffusers"
    )


def _full(network: str, key: str) -> str:
    """Return the full name of a layer, prefixed by the network's name if there is one."""
    return ".".join(filter(None, [network, key]))


def _layers(network: nn.Module) -> list[str]:
    """Return the names of the layers that are, or could be, in int8."""
    kinds = (*_KINDS.values(), Int8Layer)
    return [key for key, layer in network.named_modules() if isinstance(layer, kinds) and "lora_" not in key]


def _check_stored(network: nn.Module, config: Int8) -> None:
    before = int8_config(network)
    differing = [n for n in ("layers", "exclude") if before is not None and getattr(before, n) != getattr(config, n)]
    if differing:
        given, stored = (
            " and ".join(f"{name}={list(getattr(each, name))}" for name in differing) for each in (config, before)
        )
        raise UsageError(
            f"quantize_ got {given} for a model that is in int8 already, with {stored}; expected the same; call "
            "dequantize_(model) first, or load the original weights"
        )


def _divisions(model: QuantizableModel | nn.Module, parallel: TensorParallel) -> dict[str, Division]:
    """Return what this process holds of each network.

    Raises:
        UsageError: The model cannot be divided.
    """
    if isinstance(model, nn.Module):
        raise UsageError(
            f"quantize_ got tensor_parallel for a {type(model).__name__}; expected a LatentDiffusion, whose family "
            "knows what can be divided; write LatentDiffusion.from_pretrained(<folder>, deferred=['all'])"
        )
    adapted = [
        name for name, network in model.networks.items() if any("base_layer" in n for n, _ in network.named_modules())
    ]
    if adapted:
        raise UsageError(
            f"quantize_ got tensor_parallel for {', '.join(adapted)} with LoRA on top; expected weights alone; save "
            "the model, which merges its adapters, or give their file to from_pretrained as lora="
        )
    check_division(model, parallel.size)
    if model.deferred or not all(each.is_meta for n in model.networks.values() for each in n.parameters()):
        parallel.check_joined()
    plans = {name: model.tensor_parallel_plan(name) for name in model.networks}
    return {name: Division.of(network, plans[name], parallel) for name, network in model.networks.items()}


def _check_finite(
    chosen: Mapping[str, Mapping[str, nn.Module]],
    deferred: Mapping[str, DeferredWeights],
    parallel: TensorParallel | None,
) -> None:
    """Raise if a weight is not finite; deferred weights are read a second time later.

    Each of several processes checks some rows, and all raise.
    """
    weights: list[tuple[str, str, Tensor]] = [
        (name, f"{key}.weight", weight)
        for name, layers in chosen.items()
        for key, layer in layers.items()
        if isinstance(weight := layer.weight, Tensor) and weight.numel() and (name in deferred or not weight.is_meta)
    ]
    is_collective = parallel is not None and parallel.size > 1 and weights
    with failing_together() if is_collective else nullcontext():
        for name, key, weight in weights:
            own = [(0, len(weight))] if parallel is None else parallel.ranges(len(weight), (1,))
            rows = row_reader(weight, deferred.get(name), key)
            check_finite_rows(Part.of(weight.shape, 0, own), weight.shape, rows, _full(name, key))


def quantize_layers(
    network: nn.Module,
    chosen: Mapping[str, nn.Module],
    config: Int8,
    name: str,
    deferred: DeferredWeights | None = None,
    parts: Mapping[str, Part] = MappingProxyType({}),
) -> None:
    """Quantise layers of a network in place; those on the meta device that are not deferred get no values.

    Args:
        network: The network.
        chosen: Its layers to quantise, by name.
        config: Tells the kernel.
        name: Of the network.
        deferred: Its weights if they are still in files; all of them are read.
        parts: What to read or keep of tensors, by name; of all others the whole.
    """
    for key, layer in chosen.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        part = parts.get(f"{key}.weight")
        if weight.is_meta and deferred is None:
            quantized = torch.empty(weight.shape if part is None else part.shape, dtype=torch.int8, device="meta")
            scale = torch.empty(len(quantized), device="meta")
        else:
            quantized, scale = quantize_rows(weight.shape, row_reader(weight, deferred, f"{key}.weight"), part)
        to_int8(layer, quantized, scale, kernel=config.kernel(_full(name, key)), threshold=config.threshold)
    quantized_names = {f"{key}.weight" for key in chosen}
    for tensor_name in parts.keys() - quantized_names:
        prefix, _, key = tensor_name.rpartition(".")
        layer = network.get_submodule(prefix)
        source = getattr(layer, key)
        values = parts[tensor_name].read(source, row_reader(source, deferred, tensor_name))
        setattr(layer, key, nn.Parameter(values, requires_grad=False) if isinstance(source, nn.Parameter) else values)
    if deferred is not None:
        deferred.fill_(network, torch.device("cpu"), skip={*parts, *quantized_names})


def row_reader(weight: Tensor, deferred: DeferredWeights | None, name: str) -> Rows:
    if deferred is None:
        return lambda begin, end: weight[begin:end]

    def rows(begin: int, end: int) -> Tensor:
        numel = weight.shape[1:].numel()
        block = torch.empty((end - begin) * numel, dtype=torch.float32 if weight.is_floating_point() else weight.dtype)
        deferred.read(name, block, begin * numel, end * numel)
        return block

    return rows
