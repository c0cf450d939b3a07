"""Networks and tokenizers of a pipeline: load them, in float32 or int8, or defer reading their weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component, Family
from sd_lightning.models.pipeline_folder import check_config, check_part, first_line, read_json
from sd_lightning.quantization.int8 import (
    NUM_LAYERS,
    QUANTIZATION,
    Int8,
    cast_rest,
    describe,
    quantize_layers,
    read_record,
)
from sd_lightning.quantization.layers import INT8_CLASSES
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.safetensors_file import indexed_files
from sd_lightning.storage.streamed_tensor import tensors_in
from sd_lightning.storage.tensor_store import ShardedTensors

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "preprocessor_config.json")
_REMEDY = "it needs config.json and complete safetensors weights; copy or download that folder again"


def load_tokenizer(folder: Path, component: Component) -> Any:
    """Load a tokenizer, or an image processor.

    Raises:
        UsageError: Its files are missing or unreadable.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would build an empty tokenizer
        raise UsageError(
            f"{folder}: neither {' nor '.join(_TOKENIZER_FILES)} in it; copy the tokenizer of the pipeline again"
        )
    check_part(folder)
    with _refusing(f"{folder}: cannot load the tokenizer", "copy or download that folder again"):
        tokenizer = component.load_class().from_pretrained(folder)
        # Qwen-Image 2.1 has a processor of text and images: what is not the tokenizer's is kept for saving.
        tokenizer.processor_files = {file.name: file.read_text() for file in folder.glob("*processor_config.json")}
        return tokenizer


@contextlib.contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """Raise a UsageError for any error of the block.

    The Rust library raises plain Exceptions, and values of unexpected types in a configuration raise anything.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {first_line(error)}; {remedy}") from error


def load_network(
    component: Component, folder: Path, *, variant: str | None = None, as_saved: bool = False
) -> tuple[nn.Module, Component]:
    """Load one network in float32 from safetensors and return it with its record (class and configuration).

    Args:
        component: The network's library and class.
        folder: Folder of its files, or a repository id of the hub.
        variant: File variant.
        as_saved: Load a network in the precision of its largest saved weight instead: a chat model that is never
            trained has no use for float32. Ignored for a repository of the hub.

    Raises:
        UsageError: Its files are missing, unreadable, pickled or incomplete.
    """
    options: dict[str, Any] = {"torch_dtype": torch.float32, "use_safetensors": True, "variant": variant}
    if component.is_of_transformers:  # otherwise its error does not name the tensor of the wrong shape
        options["ignore_mismatched_sizes"] = True
    with _refusing(f"{folder}: cannot load {component.class_name}", _REMEDY):
        cls = component.load_class()
        if folder.is_dir():
            check_part(folder)
            saved = _check_weights(component, folder, variant)
            options["torch_dtype"] = saved if as_saved else torch.float32
        else:  # a repository of the hub
            check_config(cls.load_config(folder), str(folder))
        with no_progress_bar():
            network, loaded = cls.from_pretrained(folder, output_loading_info=True, **options)
    random = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    if random:  # both libraries would continue with random values
        raise UsageError(_misses(folder, component, random))
    return network, _described(component, network)


def fill_shipped_(network: nn.Module, component: Component, folder: Path) -> Component:
    """Give a network the weights of its names that a folder of the package has, and return its whole record.

    Args:
        network: Built from its record.
        component: Its record.
        folder: Its safetensors files may have more than this network takes.
    """
    found = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    network.load_state_dict({name: found[name] for name in network.state_dict()})
    return _described(component, network.eval())


def _check_weights(component: Component, folder: Path, variant: str | None) -> torch.dtype:
    """Check the headers of the weight files, if there are any, and return the dtype of the largest weight.

    The libraries take them as they are.
    """
    files = [file for file in indexed_files(folder / component.weights_file, variant=variant) if file.is_file()]
    tensors = {name: tensor for file in files for name, tensor in tensors_in(file).items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if QUANTIZATION not in read_json(folder / "config.json"):  # else the quantizer checks
        refuse_int8(folder, dtypes)
    largest = max(tensors, key=lambda name: math.prod(tensors[name].shape), default=None)
    return torch.float32 if largest is None else dtypes[largest]


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bar: it shows for every network, without a download."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def refuse_int8(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse int8 tensors without an int8 record in ``config.json``: as floats they are meaningless.

    Raises:
        UsageError: A tensor is int8.
    """
    found = sorted(key for key, dtype in dtypes.items() if dtype == torch.int8)
    if found:
        raise UsageError(
            f"{folder}: {_and_more(found)} in int8, but config.json has no {QUANTIZATION} of sd_lightning to read them "
            "by; copy the config.json that was saved with them, or the weights in floating point"
        )


def defer_network(
    component: Component, folder: Path, *, variant: str | None = None, int8: Int8 | None = None
) -> tuple[nn.Module, Component, DeferredWeights]:
    """Build one network on the meta device, in float32, and locate its weights without reading them.

    Buffers that are computed and not saved, such as CLIP's position ids, get their values.

    Args:
        component: The network's library and class.
        folder: Folder of its files.
        variant: File variant.
        int8: Settings of weights that are in int8, with the kernel to use.

    Returns:
        The network, its record with the configuration, and its deferred weights.

    Raises:
        UsageError: Its files are missing, unreadable or pickled, or their tensors differ from the network's.
    """
    network = _empty_network(component, folder)
    files = indexed_files(folder / component.weights_file, variant=variant)
    store = ShardedTensors(folder, files=[file.name for file in files])
    if int8 is not None:
        _convert_stored(network, store, int8, folder)
    else:
        refuse_int8(folder, {key: store.dtype(key) for key in store.keys()})
    keys = _keys_in_files(component, network, store)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    wrong = sorted(name for name, shape in shapes.items() if name not in keys or store.shape(keys[name]) != shape)
    if wrong:
        raise UsageError(_misses(folder, component, wrong))
    unknown = sorted(set(store.keys()) - {keys[name] for name in shapes})
    # Transformers before 4.31 saved position ids; a pipeline may take a language model without its head.
    unknown = [key for key in unknown if not key.endswith("position_ids") and not key.startswith("lm_head.")]
    if unknown:
        raise UsageError(
            f"{folder}: the weights hold {_and_more(unknown)}, for which {component.class_name} of this config.json "
            "has no place, and which would be lost in training; copy the config.json that belongs to them"
        )
    return network, _described(component, network), DeferredWeights(store, {name: keys[name] for name in shapes})


def stored_int8(folder: Path) -> Int8 | None:
    """Return the int8 settings of the network in a folder; None if it is not in int8.

    Raises:
        UsageError: ``config.json`` is missing, or the settings in it are damaged.
    """
    return read_record(read_json(folder / "config.json"), str(folder / "config.json"))


def defer_int8_network(
    component: Component, folder: Path, config: Int8, family: Family, *, variant: str | None = None
) -> tuple[nn.Module, Component, DeferredWeights]:
    """Build a network whose weight files are in int8 on the meta device, and locate its weights without reading them.

    Args:
        component: The network's library and class.
        folder: Folder of its files.
        config: Its int8 settings, with the kernel to use.
        family: Tells whether the network overflows in float16.
        variant: File variant.

    Returns:
        The network, its record with the configuration, and its deferred weights.

    Raises:
        UsageError: Files are missing, damaged or of another network.
    """
    network, component, deferred = defer_network(component, folder, variant=variant, int8=config)
    cast_rest(network, config, upcast=family.draws_in_float32(folder.name, network))
    describe(network, config)
    return network, component, deferred


def _convert_stored(network: nn.Module, store: ShardedTensors, config: Int8, folder: Path) -> None:
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
    layers = {
        name: module
        for name, module in network.named_modules()
        if type(module) in INT8_CLASSES and not stored.isdisjoint({name, f"text_model.{name}"})
    }
    quantize_layers(network, layers, config, folder.name)


def meta_network(component: Component, folder: Path) -> tuple[nn.Module, Component]:
    """Build one network on the meta device, in float32, from its configuration alone.

    Args:
        component: The network's library and class.
        folder: Folder of its configuration, or a repository id of the hub.

    Returns:
        The network, and its record with the configuration.

    Raises:
        UsageError: The configuration is missing, or does not fit the class.
    """
    network = _empty_network(component, folder)
    return nn.Module.to(network, "meta", torch.float32), _described(component, network)


def _empty_network(component: Component, folder: Path) -> Any:
    """Build a network with its parameters on the meta device; computed buffers get their values."""
    from accelerate import init_empty_weights

    cls = component.load_class()
    with _refusing(f"{folder}: cannot build {component.class_name}", _REMEDY):
        if folder.is_dir():
            check_part(folder)
        with init_empty_weights(include_buffers=False):
            if not component.is_of_transformers:
                config = cls.load_config(folder)
                return cls.from_config({k: v for k, v in config.items() if k != QUANTIZATION})
            config = cls.config_class.from_pretrained(folder)
            vars(config).pop(QUANTIZATION, None)
            return cls(config)


def _keys_in_files(component: Component, network: Any, store: ShardedTensors) -> dict[str, str]:
    """Map the network's tensor names to their keys in the files, without those that no file has."""
    if not component.is_of_transformers:
        keys = {key: key for key in store.keys()}
        network._fix_state_dict_keys_on_load(keys)  # renames attention layers saved before diffusers 0.12
        return keys
    written = component.file_keys(network.state_dict())
    inner = f"{network.base_model_prefix}."  # of the model inside of one with a head
    older = {n: n.replace("model.language_model.", "model.").replace("model.visual.", "visual.") for n in written}
    known = {n: (f"{inner}{n}", n.removeprefix(inner), older[n], n, written[n]) for n in written}
    keys = {name: key for name, several in known.items() for key in several if key in store}  # the last that is there
    for name, other in getattr(network, "all_tied_weights_keys", {}).items():  # transformers may have saved only one
        if name in keys:
            keys.setdefault(other, keys[name])
        elif other in keys:
            keys[name] = keys[other]
    return keys


def _described(component: Component, network: Any) -> Component:
    """Return the record of a network built from its configuration file."""
    live = network.config.to_dict() if component.is_of_transformers else dict(network.config)
    other = ("architectures", "model_type", "transformers_version", "dtype", "torch_dtype")
    config = {key: value for key, value in live.items() if key not in other and not key.startswith("_")}
    return Component(component.library, component.class_name, config)


def _misses(folder: Path, component: Component, names: Sequence[str]) -> str:
    return (
        f"{folder}: {_and_more(names)} of {component.class_name} missing or of another shape in the weights; {_REMEDY}"
    )


def _and_more(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
