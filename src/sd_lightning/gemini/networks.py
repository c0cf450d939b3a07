"""Preparation of networks for chunks: units, parameter names, meta parameters, buffers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.layout import ParameterSpec


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered before it runs, forward and backward."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_container: bool = False
    """Whether other units run inside it, so that it stays in use until the backward pass ends."""


def find_units(networks: Mapping[str, nn.Module], blocks: Iterable[nn.Module] | None = None) -> list[Unit]:
    """Divide networks into units that together own all parameters.

    Each block is a unit, with everything inside it. So is each largest module that contains no block and is in none. A
    module that contains blocks is a unit for its own direct parameters, if it has any.

    Args:
        networks: By name prefix of their parameters ("unet"; "" for none).
        blocks: Repeated modules; by default the children of every ``nn.ModuleList`` and ``nn.Sequential``.
    """
    if blocks is None:
        blocks = [
            child
            for network in networks.values()
            for module in network.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child in module.children()
        ]
    chosen = set(blocks)
    outer = [unit for prefix, network in networks.items() for unit in _units(prefix, network, chosen)]
    seen: set[nn.Module] = set()
    return [u for u in outer if not (u.module in seen or seen.add(u.module))]  # type: ignore[func-returns-value]


def _units(name: str, module: nn.Module, blocks: set[nn.Module]) -> Iterator[Unit]:
    inside = [child for child in module.modules() if child is not module and child in blocks]
    # ModuleList and ModuleDict are never called, so no hook can gather for them.
    is_callable = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_callable and (module in blocks or not inside):
        parameters = tuple(module.parameters())
        if parameters:
            yield Unit(name, module, parameters)
        return
    # ParameterList and ParameterDict are never called either: the parent owns theirs.
    lists = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    own = tuple(parameter for owner in (module, *lists) for parameter in owner.parameters(recurse=False))
    if own:
        yield Unit(name, module, own, is_container=True)
    for child_name, child in module.named_children():
        if child in lists:
            continue
        yield from _units(f"{name}.{child_name}" if name else child_name, child, blocks)


Reader = Callable[[str, int, int], Tensor]
"""(name, begin, end): returns a flat range of a parameter or buffer, in any dtype, on the CPU."""


def replace_meta_parameters(networks: Iterable[nn.Module], reader: Reader | None) -> None:
    """Replace parameters on the meta device by host parameters that take no memory.

    Raises:
        UsageError: There are parameters or buffers on the meta device and no reader.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for network in networks for module in network.modules()):
        tensors = [*module._parameters.items(), *module._buffers.items()]
        meta = [name for name, tensor in tensors if tensor is not None and tensor.is_meta]
        if meta and reader is None:
            raise UsageError(
                f"Gemini got {type(module).__name__}.{meta[0]} on the meta device and no reader; expected "
                "reader=(name, begin, end) -> values, or networks with weights"
            )
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in replaced:
                empty = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced[parameter]


def parameter_names(networks: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the first name of every parameter."""
    names: dict[nn.Parameter, str] = {}
    for prefix, network in networks.items():
        for name, parameter in network.named_parameters():
            names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
    return names


def parameter_specs(
    units: Iterable[Unit], names: Mapping[nn.Parameter, str], config: GeminiConfig
) -> list[ParameterSpec]:
    """Return the parameters that go into chunks, in the order of the units: all floating-point ones.

    Raises:
        UsageError: A parameter cannot be trained in a chunk.
    """
    specs = []
    for parameter in dict.fromkeys(p for unit in units for p in unit.parameters):
        if not parameter.is_floating_point():
            if parameter.requires_grad:
                raise UsageError(
                    f"Gemini got {names[parameter]} of type {parameter.dtype} to train; expected a floating-point type"
                )
            continue  # replicated on every rank
        is_row_major = parameter.is_contiguous() or parameter.dim() != 4
        if not is_row_major and parameter.is_contiguous(memory_format=torch.channels_last):
            raise UsageError(
                f"Gemini got {names[parameter]} in the channels_last format, and chunks are flat and row-major; leave "
                "it out (speed.channels_last=false)"
            )
        dtype = config.compute_dtype or parameter.dtype
        specs.append(ParameterSpec(names[parameter], parameter.numel(), dtype, parameter.requires_grad))
    return specs


def place_others(
    networks: Mapping[str, nn.Module], in_chunks: Container[nn.Parameter], device: torch.device, reader: Reader | None
) -> None:
    """Move all tensors outside of chunks to the fast tier: buffers, and integer parameters."""

    def read(name: str, tensor: Tensor) -> Tensor:
        assert reader is not None
        return reader(name, 0, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)

    for prefix, network in networks.items():
        for module_name, module in network.named_modules():
            path = "".join(f"{part}." for part in (prefix, module_name) if part)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    values = read(path + key, buffer) if buffer.is_meta else buffer
                    module._buffers[key] = values.to(device)
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter not in in_chunks:
                    values = parameter.data if reader is None else read(path + key, parameter)
                    parameter.data = values.to(device)
