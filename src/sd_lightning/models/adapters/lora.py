"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft, trained instead of a network's own weights.

In memory peft wraps each adapted layer: ``to_q.weight`` becomes ``to_q.base_layer.weight`` beside
``to_q.lora_A.default.weight`` and ``to_q.lora_B.default.weight``. Weight files have only the plain names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component
from sd_lightning.models.pipeline_folder import file_keys
from sd_lightning.storage.streamed_tensor import write_tensors

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
"""File name that diffusers uses."""
METADATA = "lora_adapter_metadata"
"""Key that diffusers uses for the adapters' settings in the file's header."""
_ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """Settings of the adapters, and the layers that get them."""

    rank: int = 4
    alpha: float | None = None
    """The adapters' output is scaled by ``alpha / rank``; equals ``rank`` if not given."""
    dropout: float = 0.0
    target_modules: tuple[str, ...] | list[str] = ("to_k", "to_q", "to_v", "to_out.0")
    """Name endings of the denoiser's layers that get adapters."""
    text_encoder_target_modules: tuple[str, ...] | list[str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    """The same for text encoders, if they are trained."""
    merge: bool = False
    """Whether exported pipelines have the adapters merged into their weights instead of in a separate file."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"lora got rank={self.rank}; expected at least 1; write lora.rank=4")
        if self.alpha is not None and not self.alpha > 0:
            raise UsageError(f"lora got alpha={self.alpha}; expected a number above 0; write lora.alpha={self.rank}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"lora got dropout={self.dropout}; expected a number in [0, 1); write lora.dropout=0")

    @property
    def effective_alpha(self) -> float:
        """``alpha``, or ``rank`` if it is not given."""
        return self.rank if self.alpha is None else self.alpha

    def apply_(self, networks: Mapping[str, nn.Module]) -> None:
        """Freeze the networks and insert adapters; the outputs do not change yet, as ``lora_B`` is zero.

        Raises:
            UsageError: No layer matches the names, or a layer is neither linear nor convolutional.
        """
        from peft import inject_adapter_in_model

        for name, network in networks.items():
            self._check_kinds(name, network)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for name, network in networks.items():
                config = self._config(name)
                try:
                    with _on_host(network):
                        inject_adapter_in_model(config, network, adapter_name=_ADAPTER)
                except ValueError as error:
                    reason = str(error).partition(". ")[0]
                    raise UsageError(
                        f"{self._targets(name)}: {reason}; expected endings of the names of linear "
                        f"or convolutional layers of {name}, e.g. {example_layers(network)}"
                    ) from error
                for key, parameter in network.named_parameters():
                    parameter.requires_grad_(is_adapter(key))

    def write(self, file: Path, layers: Mapping[str, Mapping[str, Tensor]], components: Mapping[str, Component]) -> str:
        """Write ``pytorch_lora_weights.safetensors`` for diffusers' ``pipeline.load_lora_weights(folder)``.

        diffusers' own writer is not used: the order of its metadata changes from call to call.

        Args:
            file: Path of the file.
            layers: By network, the adapters' weights by their names in memory.
            components: Records of the networks.

        Returns:
            The SHA-256 of the file.
        """
        tensors: dict[str, Tensor] = {}
        settings: dict[str, Any] = {}
        for name, adapters in layers.items():
            keys = adapter_keys(name, components[name], adapters)
            tensors |= {keys[k]: v for k, v in adapters.items()}
            config = self._config(name).to_dict().items()
            settings |= {f"{name}.{k}": sorted(v) if isinstance(v, set) else v for k, v in config}
        metadata = {METADATA: json.dumps(settings, sort_keys=True)}
        return write_tensors(file, tensors, metadata=metadata)

    def _check_kinds(self, name: str, network: nn.Module) -> None:
        """Raise if a target is neither linear nor convolutional, before any adapter is inserted."""
        endings = tuple(f".{target}" for target in self._config(name).target_modules)
        for key, module in network.named_modules():
            layer = getattr(module, "base_layer", module)  # peft's wrapper of a layer that has adapters already
            if f".{key}".endswith(endings) and not isinstance(layer, nn.Linear | nn.Conv2d):
                raise UsageError(
                    f"{self._targets(name)}: {key} is a {type(layer).__name__}; expected target modules that are "
                    f"linear or convolutional layers, e.g. {example_layers(network)}"
                )

    def _targets(self, name: str) -> str:
        """Return the setting that names a network's layers, for error messages."""
        key = "text_encoder_target_modules" if _is_text(name) else "target_modules"
        return f"lora.{key}={list(getattr(self, key))}"

    def _config(self, name: str) -> Any:
        from peft import LoraConfig

        targets = self.text_encoder_target_modules if _is_text(name) else self.target_modules
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.effective_alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=list(targets),
        )


def _is_text(network: str) -> bool:
    return network.startswith("text_encoder")


@contextmanager
def _on_host(network: nn.Module) -> Iterator[None]:
    """Replace meta weights by host tensors without storage: peft puts adapters on the device of the weights."""
    deferred: dict[nn.Parameter, nn.Parameter] = {}
    modules = list(network.modules())
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                deferred[stand_in] = parameter
                module._parameters[key] = stand_in
    try:
        yield
    finally:
        for module in modules:
            for key, parameter in module._parameters.items():
                if parameter in deferred:
                    module._parameters[key] = deferred[parameter]


def example_layers(network: nn.Module) -> str:
    """Return some valid name endings for ``target_modules``, for error messages."""
    linear = [name.rpartition(".")[2] for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    return ", ".join(name for name in list(dict.fromkeys(linear))[:4] if not name.isdecimal())


def is_adapter(key: str) -> bool:
    """Return whether a name in memory belongs to an adapter's weight."""
    return ".lora_" in key


def adapter_keys(network: str, component: Component, names: Iterable[str]) -> dict[str, str]:
    """Map the adapters' names in memory to their keys in the LoRA file, for one network."""
    keys = file_keys(component, names)
    return {name: f"{network}.{key}".replace(f".{_ADAPTER}.", ".") for name, key in keys.items()}


def plain_names(keys: Iterable[str]) -> dict[str, str]:
    """Map plain names, as in weight files, to names in memory; adapters are left out."""
    return {key.replace(".base_layer.", "."): key for key in keys if not is_adapter(key)}


def freeze_unused(network: nn.Module, unused: Iterable[str]) -> None:
    """Freeze the parameters with these plain names, and the adapters of their layers."""
    layers = {key.rpartition(".")[0] + "." for key in unused}
    for key, parameter in network.named_parameters():
        if any(key.startswith(layer) for layer in layers):
            parameter.requires_grad_(False)


Read = Callable[[str], Tensor]
"""Name of a weight in memory -> its whole values, in host memory."""


def adapted_weights(network: nn.Module) -> dict[str, float]:
    """Map the names in memory of weights with adapters to the scale of the adapters' output."""
    return {
        f"{name}.base_layer.weight": layer.scaling[_ADAPTER]
        for name, layer in network.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def merge(key: str, scale: float, read: Read) -> Tensor:
    """Return a weight, given its name in memory, with its adapter merged in."""
    layer = key.removesuffix("base_layer.weight")
    down, up = (read(f"{layer}lora_{part}.{_ADAPTER}.weight") for part in "AB")
    return add_adapter(read(key), down, up, scale)


def add_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` (arXiv 2106.09685, section 4.1) in float32."""
    return weight.float() + scale * (up.float().flatten(1) @ down.float().flatten(1)).view(weight.shape)


def merged_state_dict(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's state dict under plain names, with the adapters merged into their weights."""
    state = network.state_dict()
    adapted = adapted_weights(network)
    return {
        plain: merge(key, adapted[key], state.__getitem__).to(state[key].dtype) if key in adapted else state[key]
        for plain, key in plain_names(state).items()
    }
