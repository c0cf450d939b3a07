"""Loading of int8 networks from a pipeline folder: weight files with int8 tensors and their scales."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.components import defer_network
from sd_lightning.models.families import Component
from sd_lightning.models.pipeline_folder import QUANTIZATION, read_json
from sd_lightning.quantization.config import NUM_LAYERS, Int8, read_record
from sd_lightning.quantization.layers import INT8_CLASSES, int8_layers
from sd_lightning.quantization.linear import load_kernels
from sd_lightning.quantization.model import cast_rest, describe, set_structure
from sd_lightning.storage.tensor_store import ShardedTensors


def stored_int8(folder: Path) -> Int8 | None:
    """Return the int8 settings of the network in a folder; None if it is not in int8.

    Raises:
        UsageError: The settings in ``config.json`` are damaged.
    """
    path = folder / "config.json"
    try:
        config = read_json(path)
    except UsageError:  # the loader of the network reports it
        return None
    return read_record(config, str(path))


def load_int8_network(
    component: Component, folder: Path, config: Int8, *, overflows: bool, variant: str | None = None
) -> tuple[nn.Module, Component]:
    """Load a network whose weight files are in int8, layer by layer, in no more memory than the result takes.

    Args:
        component: The network's library and class.
        folder: Folder of its files.
        config: Its int8 settings, with the kernel to use.
        overflows: Whether the family's VAE overflows in float16.
        variant: File variant.

    Returns:
        The network, and its record with the configuration.

    Raises:
        UsageError: Files are missing, damaged or of another network, or a package is missing.
    """
    load_kernels(config.linear)
    network, component, deferred = defer_network(
        component, folder, variant=variant, prepare=partial(_as_stored, config=config, folder=folder)
    )
    cast_rest(network, config, overflows=overflows)  # first, so that fill_parameters converts while it reads
    for _, layer in int8_layers(network):
        layer.weight = torch.empty_like(layer.weight, device="cpu")
        layer.weight_scale = torch.empty_like(layer.weight_scale, device="cpu")
    deferred.fill_parameters(network, [name for name, _ in network.named_parameters()])
    deferred.fill_buffers(network)
    describe(network, config)
    return network, component


def _as_stored(network: nn.Module, store: ShardedTensors, *, config: Int8, folder: Path) -> None:
    """Convert the layers that have scales in the files to int8 layers."""
    suffix = ".weight_scale"
    stored = {key.removesuffix(suffix) for key in store.keys() if key.endswith(suffix)}
    wrong = sorted(key for key in stored if f"{key}.weight" in store and store.dtype(f"{key}.weight") != torch.int8)
    expected = read_json(folder / "config.json")[QUANTIZATION].get(NUM_LAYERS)
    if wrong or len(stored) != expected:
        found = f"{wrong[0]}.weight, which has scales, is not" if wrong else f"{len(stored)} of the weights are"
        raise UsageError(
            f"{folder}: config.json says that {expected} layers are in int8, but {found}; copy the whole folder again"
        )
    names = {
        name
        for name, module in network.named_modules()
        if type(module) in INT8_CLASSES and not stored.isdisjoint({name, f"text_model.{name}"})
    }
    set_structure(network, names, config, folder.name)
