"""LoRA adapters in a pipeline folder, streamed from their file when they are written or merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.models.adapters.lora import METADATA, adapter_keys, add_adapter, is_adapter
from sd_lightning.models.families import Component
from sd_lightning.storage.safetensors_file import open_safetensors
from sd_lightning.storage.streamed_tensor import StreamedTensor, converted_dtype, file_tensors
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.storage.untrusted import parse_json

_KEY = re.compile(r"(?P<network>\w+)\.(?P<layer>.+)\.lora_[AB]\.weight")
# Settings of peft that change the merge formula; only plain LoRA is supported here.
_OTHER_KINDS = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias")


# Settings of peft that are numbers, flags and names of layers; others name modules to import, or files.
_PLAIN = {
    *("r", "lora_alpha", "lora_dropout", "lora_bias", "bias", "target_modules", "exclude_modules", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "use_qalora", "qalora_group_size", "fan_in_fan_out"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "inference_mode", "peft_type", "peft_version"),
    *("task_type", "base_model_name_or_path", "revision"),
}


def check_settings(path: Path) -> None:
    """Check the settings of adapters before diffusers gives them to peft, which imports modules that some name.

    Raises:
        UsageError: The file is damaged, or a setting is none of plain LoRA.
    """
    try:
        settings = parse_json(LoraFile.read(path).metadata.get(METADATA, "{}"))
        unusual = {key: value for key, value in settings.items() if key.rpartition(".")[2] not in _PLAIN and value}
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
                tensors[key] = store.streamed(prefix + adapter)
        return LoraFile(self.path, tensors, self.metadata, is_source=False)

    def merged(self, networks: Mapping[str, Mapping[str, StreamedTensor]]) -> dict[str, dict[str, StreamedTensor]]:
        """Return, by network, the weights that have adapters; the adapters are merged when a weight is read.

        Args:
            networks: By network, the tensors of its weight file.

        Raises:
            UsageError: The adapters are not plain LoRA, or belong to another model.
        """
        found: dict[str, dict[str, StreamedTensor]] = {}
        for key in self.tensors:
            match = _KEY.fullmatch(key)
            network, layer = (match["network"], match["layer"]) if match else ("", "")
            weight = networks.get(network, {}).get(f"{layer}.weight")
            parts = [self.tensors.get(f"{network}.{layer}.lora_{part}.weight") for part in "AB"]
            if weight is None or parts[0] is None or parts[1] is None or not _fit(weight, parts[0], parts[1]):
                raise UsageError(
                    f"{self.path}: {key} does not fit a layer of the pipeline beside it, so it cannot be merged; copy "
                    "the file again, or write format=diffusers, which keeps it as it is"
                )
            slices = partial(_merged, weight, parts[0], parts[1], self._scale(network))
            found.setdefault(network, {})[f"{layer}.weight"] = StreamedTensor(weight.dtype, weight.shape, slices)
        return found

    def _scale(self, network: str) -> float:
        try:
            settings = parse_json(self.metadata[METADATA])
            if any(settings.get(f"{network}.{name}") for name in _OTHER_KINDS):
                raise ValueError("they are not plain LoRA")
            return float(settings[f"{network}.lora_alpha"] / settings[f"{network}.r"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UsageError(
                f"{self.path}: its metadata does not tell the scale of the adapters of {network} ({error}), so they "
                "cannot be merged; write format=diffusers, which keeps the file as it is"
            ) from error


def _fit(weight: StreamedTensor, down: StreamedTensor, up: StreamedTensor) -> bool:
    return down.shape[1:] == weight.shape[1:] and up.shape[:2] == (weight.shape[0], down.shape[0])


def _merged(weight: StreamedTensor, down: StreamedTensor, up: StreamedTensor, scale: float) -> Iterator[Tensor]:
    yield add_adapter(weight.read(), down.read(), up.read(), scale).to(weight.dtype).reshape(-1)
