"""Files of adapters, as diffusers has them: their settings, and what they are merged into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.models import lycoris
from sd_lightning.models.families import Component
from sd_lightning.models.lora import BASE_VALUES, MAGNITUDE, METADATA, SCALE, SCALES, adapter_keys, add_adapter
from sd_lightning.models.lora_layers import is_adapter
from sd_lightning.storage.safetensors_file import open_safetensors
from sd_lightning.storage.streamed_tensor import StreamedTensor, converted_dtype, file_tensors
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.storage.untrusted import parse_json

_KEY = re.compile(rf"(?P<network>\w+)\.(?P<layer>.+)\.(lora_[AB]\.weight|{MAGNITUDE})")

# Settings of peft that change the merge formula; only plain LoRA and DoRA are supported here.
OTHER_KINDS = ("use_rslora", "lora_bias")
# Settings of peft that are numbers, flags and names of layers; others name modules to import, or files.
_PLAIN = {
    *("r", "lora_alpha", "lora_dropout", "lora_bias", "bias", "target_modules", "exclude_modules", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "use_qalora", "qalora_group_size", "fan_in_fan_out"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "inference_mode", "peft_type", "peft_version"),
    *("task_type", "base_model_name_or_path", "revision"),
}


def check_settings(path: Path) -> dict[str, list[float]]:
    """Check the settings of adapters before diffusers gives them to peft, which imports modules that some name.

    Returns:
        The first values of some weights that the adapters were trained on, by network and name; none if not recorded.

    Raises:
        UsageError: The file is damaged, or a setting is none of plain LoRA.
    """
    metadata = LoraFile.read(path).metadata
    try:
        settings, base = (parse_json(metadata.get(key, "{}")) for key in (METADATA, BASE_VALUES))
        trained_scales(metadata)
        unusual = {key: value for key, value in settings.items() if key.rpartition(".")[2] not in _PLAIN and value}
        base_values = {str(key): [float(value) for value in values] for key, values in base.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: its metadata cannot be read ({error}); copy the file again") from error
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    for key, value in unusual.items():
        if value != defaults.get(key.rpartition(".")[2]):
            raise UsageError(
                f"{path}: its metadata has {key}={str(value)[:80]}, which is no setting of plain LoRA; copy the file "
                "again, or save the adapters without it"
            )
    return base_values


class AdaptedLayer(NamedTuple):
    """A layer of a network in files, with its adapter."""

    network: str
    layer: str
    weight: StreamedTensor
    down: StreamedTensor
    up: StreamedTensor
    scale: float
    trained_scale: float
    """``alpha / rank`` of the training, which ``up`` includes."""
    magnitude: StreamedTensor | None
    """DoRA's."""


@dataclass(frozen=True)
class LoraFile:
    """The LoRA adapters of a pipeline."""

    path: Path
    tensors: Mapping[str, StreamedTensor]
    """By their keys in the file, ``<network>.<layer>.lora_A.weight``."""
    metadata: Mapping[str, str]
    is_source: bool = True
    """Whether the tensors are those of the file, not of a checkpoint."""

    @classmethod
    def read(cls, path: Path) -> LoraFile:
        """Read the header of a LoRA file.

        Raises:
            UsageError: The file is damaged.
        """
        tensors = file_tensors(path)
        file = open_safetensors(path)
        file.handle.close()
        return cls(path, tensors, file.header.metadata)

    def stays(self, dtype: torch.dtype | None) -> bool:
        """Return whether an export in ``dtype`` can copy the file unchanged."""
        return self.is_source and all(converted_dtype(t, dtype) == t.dtype for t in self.tensors.values())

    def trained(self, store: ShardedTensors, components: Mapping[str, Component]) -> LoraFile:
        """Return the adapters with the trained weights of a checkpoint instead of their EMA."""
        tensors = dict(self.tensors)
        for name, component in components.items():
            prefix = f"master/{name}."
            live = [key.removeprefix(prefix) for key in store.keys() if key.startswith(prefix) and is_adapter(key)]
            for adapter, key in adapter_keys(name, component, live).items():
                live_tensor = store.streamed(prefix + adapter)
                is_up, layer = ".lora_B." in key, key.removesuffix(".lora_B.weight")
                tensors[key] = _scaled(live_tensor, self.trained_scale(layer)) if is_up else live_tensor
        return LoraFile(self.path, tensors, self.metadata, is_source=False)

    def merged(self, networks: Mapping[str, Mapping[str, StreamedTensor]]) -> dict[str, dict[str, StreamedTensor]]:
        """Return, by network, the weights that have adapters; the adapters are merged when a weight is read.

        Args:
            networks: By network, the tensors of its weight file.

        Raises:
            UsageError: The adapters are not plain LoRA, or belong to another model.
        """
        found = lycoris.merged(self.tensors, networks, self.path)
        for each in self.layers(networks) if not found else ():
            weight, slices = each.weight, partial(_merged, each)
            merged = StreamedTensor(weight.dtype, weight.shape, slices)
            found.setdefault(each.network, {})[f"{each.layer}.weight"] = merged
        return found

    def layers(self, networks: Mapping[str, Mapping[str, StreamedTensor]]) -> Iterator[AdaptedLayer]:
        """Iterate over the layers that have adapters; arguments and errors as for :meth:`merged`."""
        for key in self.tensors:
            match = _KEY.fullmatch(key)
            network, layer = (match["network"], match["layer"]) if match else ("", "")
            weight = networks.get(network, {}).get(f"{layer}.weight")
            down, up = (self.tensors.get(f"{network}.{layer}.lora_{part}.weight") for part in "AB")
            magnitude = self.tensors.get(f"{network}.{layer}.{MAGNITUDE}")
            if weight is None or down is None or up is None or not _fit(weight, down, up):
                raise UsageError(
                    f"{self.path}: {key} does not fit a layer of the pipeline beside it, so it cannot be merged or "
                    "converted; copy the file again, or write format=diffusers, which keeps it as it is"
                )
            if ".lora_A." in key:
                scale, trained = self.scale_of(network, layer, down.shape[0]), self.trained_scale(f"{network}.{layer}")
                yield AdaptedLayer(network, layer, weight, down, up, scale, trained, magnitude)

    @cached_property
    def _settings(self) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        return parse_json(self.metadata.get(METADATA, "{}")), trained_scales(self.metadata)

    def trained_scale(self, layer: str) -> float:
        """Return ``alpha / rank`` of the training, which ``lora_B`` of a layer, ``unet.mid_block…``, includes."""
        return self._settings[1].get(layer, self._settings[1][""])

    def scale_of(self, network: str, layer: str, rank: int) -> float:
        """Return what scales ``lora_B @ lora_A`` of a layer.

        Raises:
            UsageError: The file does not tell.
        """
        try:
            return alpha_of(self._settings[0], network, layer) / rank
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, re.error) as error:
            raise UsageError(
                f"{self.path}: its metadata does not tell the scale of the adapters of {network} ({error}), so they "
                "cannot be merged or converted; write format=diffusers, which keeps the file as it is"
            ) from error


def trained_scales(metadata: Mapping[str, str]) -> dict[str, float]:
    """Return ``alpha / rank`` of the training by network and layer; of those that are not named by ""."""
    named = {layer: float(scale) for layer, scale in parse_json(metadata.get(SCALES, "{}")).items()}
    return named | {"": float(metadata.get(SCALE, 1))}


def alpha_of(settings: Mapping[str, Any], network: str, layer: str) -> float:
    """Return a layer's alpha by the settings that diffusers keeps in the file.

    Raises:
        KeyError: They do not tell.
        ValueError: The adapters are of another kind.
    """
    from peft.utils.other import get_pattern_key

    if any(settings.get(f"{network}.{name}") for name in OTHER_KINDS):
        raise ValueError("they are not plain LoRA")
    alphas = settings.get(f"{network}.alpha_pattern") or {}
    key = get_pattern_key(list(alphas), layer) if alphas else layer
    return float(alphas[key] if key in alphas else settings[f"{network}.lora_alpha"])


def _fit(weight: StreamedTensor, down: StreamedTensor, up: StreamedTensor) -> bool:
    return down.shape[1:] == weight.shape[1:] and up.shape[:2] == (weight.shape[0], down.shape[0])


def _merged(each: AdaptedLayer) -> Iterator[Tensor]:
    magnitude = None if each.magnitude is None else each.magnitude.read()
    merged = add_adapter(each.weight.read(), each.down.read(), each.up.read(), each.scale, magnitude)
    yield merged.to(each.weight.dtype).reshape(-1)


def _scaled(tensor: StreamedTensor, scale: float) -> StreamedTensor:
    return replace(tensor, slices=lambda: (block * scale for block in tensor.slices()))
