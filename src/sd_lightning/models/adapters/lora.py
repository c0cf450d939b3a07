"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: what is trained instead of a network's own weights.

In memory peft puts a layer around each adapted one: ``to_q.weight`` becomes ``to_q.base_layer.weight`` beside
``to_q.lora_A.default.weight`` and ``to_q.lora_B.default.weight``. Files know only the plain names.
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
"""What diffusers calls the file."""
METADATA = "lora_adapter_metadata"
"""What diffusers calls the settings of the adapters, in the file's header."""
_ADAPTER = "default"
_MARK = ".lora_"


@dataclass(frozen=True)
class Lora:
    """Which layers get adapters, and which kind."""

    rank: int = 4
    alpha: float | None = None
    """The adapters' output is scaled by ``alpha / rank``; the rank if not given."""
    dropout: float = 0.0
    target_modules: tuple[str, ...] | list[str] = ("to_k", "to_q", "to_v", "to_out.0")
    """Endings of the names of the denoiser's layers."""
    text_encoder_target_modules: tuple[str, ...] | list[str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    """The same for text encoders, if they are trained."""
    merge: bool = False
    """Whether exported pipelines have the adapters added to their weights, instead of in a file beside them."""
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
        """What the adapters' output is scaled by, times the rank."""
        return self.rank if self.alpha is None else self.alpha

    def apply_(self, networks: Mapping[str, nn.Module]) -> None:
        """Freeze the networks and put adapters into them, which do nothing yet.

        Raises:
            UsageError: No layer is named so, or peft has no adapter for its kind.
        """
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for name, network in networks.items():
                config = self._config(name)
                try:
                    with _on_host(network):
                        inject_adapter_in_model(config, network, adapter_name=_ADAPTER)
                except ValueError as error:
                    key = "text_encoder_target_modules" if _is_text(name) else "target_modules"
                    reason = str(error).partition(". ")[0]
                    raise UsageError(
                        f"lora.{key}={list(config.target_modules)}: {reason}; expected endings of the names of linear "
                        f"or convolutional layers of {name}, e.g. {example_layers(network)}"
                    ) from error
                _refuse_other_kinds(network)
                for key, parameter in network.named_parameters():
                    parameter.requires_grad_(is_adapter(key))

    def write(self, file: Path, layers: Mapping[str, Mapping[str, Tensor]], components: Mapping[str, Component]) -> str:
        """Write ``pytorch_lora_weights.safetensors``, which diffusers' ``pipeline.load_lora_weights(folder)`` takes.

        diffusers' own writer puts its metadata in an order that changes from call to call.

        Args:
            file: Path of the file.
            layers: By network, the adapters' weights by their names in memory.
            components: What the networks are.

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
    """Put weights without storage in the place of those on the meta device, where peft would move adapters to."""
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


def _refuse_other_kinds(network: nn.Module) -> None:
    for name, layer in network.named_modules():
        base = getattr(layer, "base_layer", None)
        if base is not None and not isinstance(base, nn.Linear | nn.Conv2d):
            raise UsageError(
                f"lora: {name} is a {type(base).__name__}; expected target modules that are linear or convolutional "
                f"layers, e.g. {example_layers(network)}"
            )


def example_layers(network: nn.Module) -> str:
    """Return some names that adapters can be asked for by."""
    linear = [name.rpartition(".")[2] for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    return ", ".join(name for name in list(dict.fromkeys(linear))[:4] if not name.isdecimal())


def is_adapter(key: str) -> bool:
    """Whether a weight, by its name in memory, is an adapter's."""
    return _MARK in key


def adapter_keys(network: str, component: Component, names: Iterable[str]) -> dict[str, str]:
    """Map the names that the adapters of a network have in memory to their keys in the file of all adapters."""
    keys = file_keys(component, list(names))
    return {name: f"{network}.{key}".replace(f".{_ADAPTER}.", ".") for name, key in keys.items()}


def plain_names(keys: Iterable[str]) -> dict[str, str]:
    """Map the names that weights have in files to those in memory; the adapters' have none in files."""
    return {key.replace(".base_layer.", "."): key for key in keys if not is_adapter(key)}


def freeze_unused(network: nn.Module, unused: Iterable[str]) -> None:
    """Freeze parameters, by their plain names, and the adapters of their layers."""
    layers = {key.rpartition(".")[0] + "." for key in unused}
    for key, parameter in network.named_parameters():
        if any(key.startswith(layer) for layer in layers):
            parameter.requires_grad_(False)


Read = Callable[[str], Tensor]
"""Name of a weight in memory -> its values, whole and in host memory."""


def adapted_weights(network: nn.Module) -> dict[str, float]:
    """Return the weights that have adapters by their names in memory, with the scale of the adapters' output."""
    return {
        f"{name}.base_layer.weight": layer.scaling[_ADAPTER]
        for name, layer in network.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def merge(key: str, scale: float, read: Read) -> Tensor:
    """Add an adapter to the weight that it adapts, by its name in memory."""
    layer = key.removesuffix("base_layer.weight")
    down, up = (read(f"{layer}lora_{part}.{_ADAPTER}.weight") for part in "AB")
    return add_adapter(read(key), down, up, scale)


def add_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` (arXiv 2106.09685, section 4.1) in float32."""
    return weight.float() + scale * (up.float().flatten(1) @ down.float().flatten(1)).view(weight.shape)


def merged_state_dict(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's state under plain names, adapters added to the weights they adapt."""
    state = network.state_dict()
    adapted = adapted_weights(network)
    return {
        plain: merge(key, adapted[key], state.__getitem__).to(state[key].dtype) if key in adapted else state[key]
        for plain, key in plain_names(state).items()
    }
